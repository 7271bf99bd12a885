"""``slurmft trials``: a sweep, what has come of it, and failed trials again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from slurmft.cli.arguments import own_run_argument, run_argument
from slurmft.cli.main import say, say_json
from slurmft.cli.submit import follow_made, submission_options, submit_run
from slurmft.errors import UsageError
from slurmft.storage.run_folder import RunFolder
from slurmft.system.processes import who


class _Trials(click.Group):
    """What is no verb of this group is the CONFIG of a sweep."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["submit", *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] not in ("--help", "-h")
        return super().parse_args(ctx, ["submit", *args] if is_option else args)


@click.group(cls=_Trials, subcommand_metavar="CONFIG | results RUN | retry RUN --failed")
def trials() -> None:
    """Run each trial of a sweep once, or go on with one that has stopped: slurmft trials CONFIG.

    A sweep that is there gets the trials that are new. Options behind -- go to sbatch.
    """


@trials.command(context_settings={"ignore_unknown_options": False})
@submission_options
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key, such as trials.max_jobs=8.")  # fmt: skip
def submit(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...],
) -> int:  # fmt: skip
    """Submit the sweep that CONFIG describes, or add what is new."""
    from slurmft.operations.run_configuration import load_given

    settings = load_given(config, overrides)
    if settings.trials is None:
        raise UsageError(f"{config} has no section trials", hint="slurmft submit trains")
    if dry_run:
        return submit_run(settings, sbatch_options, dry_run=True, strict=False, wait=False, cluster=cluster)
    return _submit(settings, sbatch_options, cluster=cluster, wait=wait, retry=False)


@trials.command()
@own_run_argument
@click.option("--failed", is_flag=True, required=True, help="Those that have failed.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
def retry(*, run: RunFolder, failed: bool, wait: bool, cluster: str) -> int:
    """Run trials of RUN again, each in its folder."""
    from slurmft.operations.run_configuration import configuration_of

    assert failed
    return _submit(configuration_of(run), (), cluster=cluster, wait=wait, retry=True)


@trials.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each trial, a line each.")
@click.option("--csv", "as_csv", is_flag=True, help="A table, with a column for each parameter.")
@click.option("--parquet", type=click.Path(path_type=Path), metavar="FILE", help="Write a Parquet file.")
def results(*, run: RunFolder, as_json: bool, as_csv: bool, parquet: Path | None) -> int:
    """Print what has come of the trials of RUN so far; without an option only how many."""
    from slurmft.inference.trials import rows, write_csv, write_parquet

    if as_json + as_csv + (parquet is not None) > 1:
        raise UsageError("give one of --json, --csv and --parquet")
    found = rows(run.path)
    if as_json:
        for row in found:
            say(json.dumps(row, ensure_ascii=False))
    elif as_csv:
        write_csv(found, sys.stdout)
    elif parquet is not None:
        write_parquet(found, parquet)
    else:
        counts = Counter(row["state"] for row in found)
        say_json({state: counts[state] for state in ("done", "failed", "open")})
    return 0


def _submit(settings: Any, sbatch_options: tuple[str, ...], *, cluster: str, wait: bool, retry: bool) -> int:
    from slurmft.operations.submit import submit_trials

    sweep = submit_trials(settings, sbatch_options, cluster=cluster, who=who(), command=" ".join(sys.argv),
                          tell=lambda line: say(line, err=True), retry=retry)  # fmt: skip
    run, added = RunFolder(settings.run_folder), sweep.added
    say(f"{added.new} trials added, {added.known} were there")
    if sweep.is_finished:
        say(f"the sweep is finished; see slurmft trials results {run.path}")
        return 0
    if sweep.made is not None:
        return follow_made(settings, sweep.made, wait=wait)
    say("the sweep runs, or waits, already")
    say(f"run folder: {run.path}")
    if wait:
        from slurmft.cli.status import follow

        return follow(run, told=len(run.journal().read()), stop_on_interrupt=False)
    return 0
