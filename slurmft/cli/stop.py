"""``slurmft stop`` and ``slurmft save``."""

from __future__ import annotations

import time

import click

from slurmft.cli.arguments import Amount, own_run_argument
from slurmft.cli.main import say
from slurmft.errors import LaunchError, UsageError
from slurmft.operations import control
from slurmft.storage.run_folder import RunFolder
from slurmft.system.processes import who

MAX_TIMEOUT_S = 366 * 86_400


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
    """Save, then end the run; it is not requeued. A waiting job is cancelled.

    Workers that do not use slurmft get SIGTERM: only what their script saves by itself is kept."""
    say(control.stop(run, who()))
    deadline = time.monotonic() + timeout
    while timeout > 0 and control.is_alive(run):
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
    if not control.is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint=f"slurmft status {run.path}")
    run.request("SAVE", who())
    if control.has_session(run):
        say(f"run {run.path.name} will save at the next step")
    else:
        say(f"run {run.path.name} cannot be made to save: its workers have not called slurmft")
    return 0
