"""``slurmft convert``: a batch script of one's own becomes a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from slurmft.cli.main import say, say_block
from slurmft.compat.converters import convert as converted
from slurmft.config import base
from slurmft.config.run import from_values
from slurmft.errors import StorageError, UsageError
from slurmft.system.files import read_text, replace_atomically
from slurmft.system.foreign_text import one_line

MAX_SCRIPT_BYTES = 1 << 20


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="Write the configuration to this file, which must not exist; default: print it.")  # fmt: skip
def convert(*, script: Path, output: Path | None) -> int:
    """Convert a batch script with srun, torchrun or ft_launcher to a configuration.

    Nothing is run and nothing is submitted. What has no counterpart is named in comments, with its line.
    """
    try:
        text = read_text(script, limit_bytes=MAX_SCRIPT_BYTES)
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {script}: it is not UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror or error}") from error
    found = converted(text, script.stem)
    from_values(dict(found.settings), source=f"what {script} says", known_here=lambda options: options)
    remarks = "".join(f"# {one_line(remark)}\n" for remark in found.remarks)
    result = f"# From {one_line(script.name)}\n{remarks}{base.written(found.settings)}"
    if output is None:
        say_block(result.removesuffix("\n"))
        return 0
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} exists", hint="remove it, or name another file")
    try:
        replace_atomically(output, result, mode=0o644)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror or error}") from error
    for remark in found.remarks:
        say(remark, err=True)
    say(f"wrote {output}; try it with: slurmft submit {output} --dry-run", err=True)
    return 0
