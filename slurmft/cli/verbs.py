"""The verbs that act: ``run``, ``agent``, ``stop``, ``save``, ``requeue``; and ``schema``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import click

from slurmft import config as configuration
from slurmft.cli.names import every_run, optional_run_argument, run_argument, who
from slurmft.errors import LaunchError, UsageError
from slurmft.launch import outside, rescue
from slurmft.launch.guardian import guarded
from slurmft.storage.run_folder import RunFolder


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--after-loss", type=int, hidden=True, help="Act in the place of a supervisor that this signal ended.")
def run(*, config: Path, after_loss: int | None) -> int:
    """Be the supervisor of one job (what the batch script runs)."""
    guarded([sys.executable, "-P", "-u", "-m", "slurmft", "run", str(config), "--after-loss"])
    from slurmft.launch.run import recover, supervise

    if after_loss is not None:
        return recover(configuration.load(config), os.environ, after_loss)
    return supervise(configuration.load(config), os.environ)


@click.command(hidden=True)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("attempt")
def agent(*, config: Path, attempt: str) -> int:
    """Be one node's agent (what the supervisor starts with srun)."""
    from slurmft.launch.agent import serve

    return asyncio.run(serve(configuration.load(config), attempt, os.environ))


@click.command()
@run_argument
@click.option("--timeout", default=0.0, show_default=True, help="Seconds to wait until it has ended.")
def stop(*, run: RunFolder, timeout: float) -> int:
    """Save, then end the run; it is not requeued. A waiting job is cancelled."""
    click.echo(outside.stop(run, who()))
    deadline = time.monotonic() + timeout
    while timeout > 0 and outside.is_alive(run):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"run {run.path.name} has not ended within {timeout:.0f} s", hint="it may still be saving"
            )
        time.sleep(0.5)
    return 0


@click.command()
@run_argument
def save(*, run: RunFolder) -> int:
    """Save a checkpoint now and go on training."""
    if not outside.is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint=f"slurmft status {run.path}")
    run.request("SAVE", who())
    click.echo(f"run {run.path.name} will save at the next step")
    return 0


@click.command()
@optional_run_argument
@click.option("--rescue", "only_rescue", is_flag=True,
              help="Only rescue what has lost its supervisor: RUN, or all below SLURMFT_RUNS. For cron.")  # fmt: skip
def requeue(*, run: RunFolder | None, only_rescue: bool) -> int:
    """Save and go through the queue again; start a waiting job now; rescue one that lost its batch script."""
    if run is None and not only_rescue:
        raise UsageError("requeue which run?", hint="slurmft requeue RUN; only --rescue takes all of them")
    done = rescue.rescue([run] if run is not None else every_run(), who())
    if run is not None and not only_rescue and not done:
        done = [outside.requeue(run, who())]
    for line in done or ["nothing had to be rescued"]:
        click.echo(line)
    return 0


@click.command()
def schema() -> int:
    """Print the JSON schema of a configuration, for editors."""
    from slurmft.cli.schema import schema as build

    click.echo(json.dumps(build(), indent=2))
    return 0
