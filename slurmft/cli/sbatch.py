"""Batch scripts and command lines that exist already: ``slurmft sbatch``, what it launches in the job, ``convert`` and
``ft-launch``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmft.cli.main import say, say_block
from slurmft.cli.submit import submit_run
from slurmft.compat import converters
from slurmft.compat.converters import convert as converted
from slurmft.config import base
from slurmft.config.run import from_values
from slurmft.errors import StorageError, UsageError
from slurmft.scheduler.slurm import known_options
from slurmft.system.files import read_text, replace_atomically
from slurmft.system.foreign_text import one_line

if TYPE_CHECKING:
    from slurmft.operations.script import Ranks

# --- ``slurmft sbatch``: the batch script that one has, submitted as it is; and what it launches, in the job ---

_AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_AS_GIVEN)
@click.option("--again", is_flag=True, help="Repeat launches that have finished in an earlier start of the job.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SBATCH] SCRIPT [ARGUMENTS]...")
def sbatch(*, again: bool, words: tuple[str, ...]) -> int:
    """Submit the batch script that you have, as sbatch would; what it launches is supervised.

    Takes what sbatch takes: its options, #SBATCH lines and variables, --wrap, a script from standard input. Only where
    you set nothing, --requeue, --open-mode=append and --signal=USR2@120 are added.

    In the job the script runs as it is. A launch that trains is restarted where ranks or nodes fail, and goes on
    through the queue: torchrun, ft_launcher, python -m torch.distributed.run, accelerate launch, deepspeed, and srun
    where its command runs a Python program. SLURMFT=off in front of a launch, or #SLURMFT off above it, leaves it
    alone; SLURMFT=train and #SLURMFT train supervise any other command of these names, or of python.
    """
    from slurmft.operations.script import submit_script

    return submit_script(words, os.environ, again=again, tell=lambda line: say(f"slurmft: {line}", err=True))


@click.command(hidden=True, context_settings=_AS_GIVEN)
@click.option("--last-word", is_flag=True)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launch(*, last_word: bool, words: tuple[str, ...]) -> int:
    """Stand for a launcher of a batch script (called by the functions of slurmft/launchers)."""
    from slurmft.operations import script

    def tell(line: str) -> None:
        say(f"slurmft: {line}", err=True)

    if last_word:
        if word := script.last_word(os.environ):
            tell(word)
        return 0
    return script.launch(words[0], words[1:], os.environ, read_ranks=_ranks, tell=tell)


def _ranks(words: Sequence[str]) -> Ranks:
    from slurmft.operations.script import Ranks

    found = converters.parse(words)
    return Ranks(settings=found.settings, remarks=found.remarks)


# --- ``slurmft convert``: a batch script of one's own becomes a configuration ---

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


# --- ``slurmft ft-launch``: a command line of ``ft_launcher`` or torchrun becomes a run ---


@click.command(
    name="ft-launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCHER OPTIONS] SCRIPT [ARGUMENTS]...")
@click.option("--run-folder", type=click.Path(path_type=Path),
              help="Folder of the run; default: runs/ and the --rdzv-id, or the script's name.")  # fmt: skip
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default=None,
              help="Where to run; auto: Slurm where its commands are, else this machine. "
              "Default: local with --standalone, else auto.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one key, such as slurm.time=30.")
@click.option("--print-config", is_flag=True, help="Print the configuration for slurmft submit, and change nothing.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
def ft_launch(
    *, words: tuple[str, ...], run_folder: Path | None, cluster: str | None, overrides: tuple[str, ...],
    print_config: bool, dry_run: bool, wait: bool,
) -> int:  # fmt: skip
    """Submit a run by the command line of ft_launcher or torchrun.

    Called once, and not on every node. Takes torchrun's options (--nnodes, --nproc-per-node, --max-restarts, -m, ...)
    and --ft-* or --ft-param-* of nvidia-resiliency-ext behind the options below. Options without a counterpart are
    named.
    """
    if "SLURM_PROCID" in os.environ:
        raise UsageError("this is inside of a job, where each task would submit a run of its own",
                         hint="call slurmft ft-launch once, where you would call sbatch")  # fmt: skip
    launch = converters.parse(words)
    for remark in launch.remarks:
        if not remark.startswith("FaultToleranceConfig"):  # which has said it
            say(f"ft-launch: {remark}", err=True)
    values = {**launch.settings, **({"run_folder": str(run_folder)} if run_folder is not None else {})}
    settings = from_values(values, overrides, source="ft-launch", known_here=known_options)
    if print_config:
        say_block(settings.as_yaml())
        return 0
    return submit_run(
        settings, (), dry_run=dry_run, strict=False, wait=wait,
        cluster=cluster or ("local" if launch.standalone else "auto"),
    )  # fmt: skip
