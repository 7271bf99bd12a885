"""``slurmft infer``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slurmft.cli.main import say
from slurmft.cli.submit import submit_run
from slurmft.errors import UsageError
from slurmft.operations.run_configuration import load_given
from slurmft.operations.submit import read_requests

TOLD_EVERY = 100_000


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("-i", "--input-file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE",
              help="The requests, in place of inference.input; - is standard input.")  # fmt: skip
@click.option("-o", "--output-file", type=click.Path(path_type=Path), metavar="PATH",
              help="In place of inference.output: one file (.jsonl, .parquet) or a folder.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key, such as inference.concurrency=8.")  # fmt: skip
def infer(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...], input_file: Path | None, output_file: Path | None,
) -> int:  # fmt: skip
    """Answer a batch of requests, or continue one that has stopped. Options behind -- go to sbatch.

    The requests are read and checked first; nothing is submitted when one of them is none.
    """
    given = {"input": input_file, "output": output_file}
    paths = {name: path if str(path) == "-" else path.absolute() for name, path in given.items() if path is not None}
    overrides += tuple(f"inference.{name}={json.dumps(str(path))}" for name, path in paths.items())
    settings = load_given(config, overrides)
    if settings.inference is None:
        raise UsageError(f"{config} has no section inference", hint="slurmft submit trains")
    if settings.inference.serving is not None:
        raise UsageError(f"{config} is of an endpoint and names no requests", hint="slurmft serve submits it")
    if not dry_run and (found := read_requests(settings, _tell)) is not None:
        bad = f", {found.bad} lines are none and will be in errors.jsonl" if found.bad else ""
        say(f"{found.total} requests{bad}")
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=False, wait=wait, cluster=cluster)


def _tell(count: int) -> None:
    if count % TOLD_EVERY == 0:
        say(f"{count} requests read", err=True)
