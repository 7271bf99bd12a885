"""``slurmft infer``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmft.cli import submit as submitting
from slurmft.cli.output import say
from slurmft.errors import UsageError
from slurmft.operations.run_configuration import load_given
from slurmft.storage.run_folder import RunFolder

TOLD_EVERY = 100_000


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key, such as inference.concurrency=8.")  # fmt: skip
@click.pass_context
def infer(
    context: click.Context, *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...],
) -> int:  # fmt: skip
    """Answer a batch of requests, or continue one that has stopped. Options behind -- go to sbatch.

    The requests are read and checked first; nothing is submitted when one of them is none.
    """
    settings = load_given(config, overrides)
    if settings.inference is None:
        raise UsageError(f"{config} has no section inference", hint="slurmft submit trains")
    if not dry_run:
        from slurmft.inference.answers import refuse_foreign_output
        from slurmft.inference.requests import folder_of, load, prepare

        run = RunFolder(settings.run_folder)
        run.create()
        folder = folder_of(run.path)
        output = settings.inference.output or run.path / "output"
        if (before := load(folder)) is None:
            refuse_foreign_output(output, None)
        batch = prepare(settings.inference, folder, _tell)
        refuse_foreign_output(output, batch.digest)
        if before is None:
            bad = sum(last - first for first, last in batch.bad)
            say(f"{batch.total} requests" + (f", {bad} lines are none and will be in errors.jsonl" if bad else ""))
    code: int = context.invoke(
        submitting.submit, config=config, sbatch_options=sbatch_options, dry_run=dry_run, strict=False, wait=wait,
        cluster=cluster, overrides=overrides, data=None,
    )  # fmt: skip
    return code


def _tell(count: int) -> None:
    if count % TOLD_EVERY == 0:
        say(f"{count} requests read", err=True)
