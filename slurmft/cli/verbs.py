"""The verbs that act: ``run``, ``agent``, ``stop``, ``save``, ``requeue``; and ``schema``."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import time
from pathlib import Path

import click

from slurmft import config as configuration
from slurmft.cli.names import run_argument
from slurmft.errors import LaunchError, StorageError
from slurmft.launch import rescue
from slurmft.storage.run_folder import RunFolder


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
def run(*, config: Path) -> int:
    """Be the supervisor of one job (what the batch script runs)."""
    from slurmft.launch.run import supervise

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
    click.echo(rescue.stop(run, _who()))
    deadline = time.monotonic() + timeout
    while timeout > 0 and rescue.is_alive(run):
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
    if not rescue.is_alive(run):
        raise StorageError(f"run {run.path.name} is not running")
    run.request("SAVE", _who())
    click.echo(f"run {run.path.name} will save at the next step")
    return 0


@click.command()
@run_argument
@click.option("--rescue", "only_rescue", is_flag=True, help="Only rescue a job that has lost its batch script.")
def requeue(*, run: RunFolder, only_rescue: bool) -> int:
    """Save and go through the queue again; start a waiting job now; rescue one that lost its batch script."""
    click.echo(rescue.requeue(run, _who(), only_rescue=only_rescue))
    return 0


@click.command()
def schema() -> int:
    """Print the JSON schema of a configuration, for editors."""
    click.echo(json.dumps(configuration.schema(), indent=2))
    return 0


def _who() -> str:
    return f"{getpass.getuser()}@{os.uname().nodename}"
