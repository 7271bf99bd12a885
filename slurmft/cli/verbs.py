"""The verbs that act: ``run``, ``agent``, ``stop``, ``save``, ``requeue``; and ``schema``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import click

from slurmft.cli.names import optional_run_argument, own_run_argument, refuse_foreign, runs_root, who
from slurmft.cli.numbers import Amount
from slurmft.cli.output import say, say_error, say_json
from slurmft.errors import LaunchError, UsageError
from slurmft.operations import outside, rescue
from slurmft.operations.on_behalf import OWNER_LIMIT_S
from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.guardian import guarded

MAX_TIMEOUT_S = 366 * 86_400


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--after-loss",
    type=click.IntRange(1, 64),
    hidden=True,
    help="Act in the place of a supervisor that this signal ended.",
)
def run(*, config: Path, after_loss: int | None) -> int:
    """Be the supervisor of one job (what the batch script runs)."""
    refuse_foreign_configuration(config)
    guarded([sys.executable, "-P", "-u", "-m", "slurmft", "run", str(config), "--after-loss"])
    from slurmft.supervisor.run import recover, supervise

    if after_loss is not None:
        return recover(load_given(config), os.environ, after_loss)
    return supervise(load_given(config), os.environ)


@click.command(hidden=True)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("attempt")
def agent(*, config: Path, attempt: str) -> int:
    """Be one node's agent (what the supervisor starts with srun)."""
    from slurmft.agent.agent import serve

    refuse_foreign_configuration(config)
    return asyncio.run(serve(load_given(config), attempt, os.environ))


@click.command()
@own_run_argument
@click.option(
    "--timeout",
    default=0.0,
    type=Amount(0, MAX_TIMEOUT_S),
    show_default=True,
    help="Seconds to wait until it has ended.",
)
def stop(*, run: RunFolder, timeout: float) -> int:
    """Save, then end the run; it is not requeued. A waiting job is cancelled."""
    say(outside.stop(run, who()))
    deadline = time.monotonic() + timeout
    while timeout > 0 and outside.is_alive(run):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"run {run.path.name} has not ended within {timeout:.0f} s", hint="it may still be saving"
            )
        time.sleep(0.5)
    return 0


@click.command()
@own_run_argument
def save(*, run: RunFolder) -> int:
    """Save a checkpoint now and go on training."""
    if not outside.is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint=f"slurmft status {run.path}")
    run.request("SAVE", who())
    say(f"run {run.path.name} will save at the next step")
    return 0


@click.command()
@optional_run_argument
@click.option("--rescue", "only_rescue", is_flag=True,
              help="Only rescue what has lost its supervisor: RUN, or all below SLURMFT_RUNS. For cron.")  # fmt: skip
@click.option("--as-owner", is_flag=True, hidden=True, help="What root's rescue starts with each owner's rights.")
def requeue(*, run: RunFolder | None, only_rescue: bool, as_owner: bool) -> int:
    """Save and go through the queue again; start a waiting job now; rescue one that lost its batch script.

    --rescue by root acts on each run with the rights of its owner, and on no run without.
    """

    if not only_rescue:
        if run is None:
            raise UsageError("requeue which run?", hint="slurmft requeue RUN; only --rescue takes all of them")
        for line in rescue.rescue([refuse_foreign(run)], who()) or [outside.requeue(run, who())]:
            say(line)
        return 0
    if as_owner:
        if os.getuid() == 0:
            raise UsageError("--as-owner is for the processes of root's rescue, which are not root's")
        signal.alarm(OWNER_LIMIT_S)  # whatever becomes of root's process
    try:
        found = rescue.rescue_one(run, who()) if run is not None else rescue.rescue_below(runs_root(), who())
    except OSError as error:
        raise UsageError(
            f"cannot list {runs_root()}: {error.strerror}", hint="SLURMFT_RUNS names another folder"
        ) from error
    for line in found.done or ["nothing had to be rescued"] * (not as_owner):
        say(line)
    for line in [*found.problems, *[found.left_alone] * (bool(found.left_alone) and not as_owner)]:
        say_error(line)
    return 1 if found.problems else 0


@click.command()
def schema() -> int:
    """Print the JSON schema of a configuration, for editors."""
    from slurmft.cli.schema import schema as build

    say_json(build(), indent=2)
    return 0
