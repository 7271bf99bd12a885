"""``slurmft run``, a job's supervisor, and ``slurmft agent``, a node's agent: the processes of a run."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path

import click

from slurmft.ipc.zygote_start import Zygote
from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration
from slurmft.system.processes import without_collections


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--after-loss",
    type=click.IntRange(1, 64),
    hidden=True,
    help="Act in the place of a supervisor that this signal ended.",
)
def run(*, config: Path, after_loss: int | None) -> int:
    """Run the supervisor of one job (called by the batch script)."""
    # before the fork: the guardian may need it when files cannot be read any more
    with without_collections():
        from slurmft.supervisor.agents import outlives_its_supervisor
        from slurmft.supervisor.guardian import guarded

    refuse_foreign_configuration(config)
    settings = functools.cache(lambda: load_given(config))
    guarded(
        [sys.executable, "-P", "-u", "-m", "slurmft", "run", str(config), "--after-loss"],
        spares=lambda pid: outlives_its_supervisor(settings(), pid),
    )
    with without_collections():
        from slurmft.supervisor.run import recover, supervise

    if after_loss is not None:
        return recover(settings(), os.environ, after_loss)
    return supervise(settings(), os.environ)


@click.command(hidden=True)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("attempt")
@click.pass_obj
def agent(begun: Zygote | None, *, config: Path, attempt: str) -> int:
    """Run one node's agent (started by the supervisor with srun)."""
    with without_collections():
        from slurmft.agent import container as agent_container
        from slurmft.agent.agent import serve

    refuse_foreign_configuration(config)
    settings = load_given(config)
    if (container := settings.contained()) is None:
        return asyncio.run(serve(settings, attempt, os.environ, begun))
    agent_container.become_first_process()
    environment = agent_container.usable_environment(os.environ, os.uname().nodename)
    agent_container.refuse_unusable(container, attempt, environment)
    return asyncio.run(serve(settings, attempt, environment))
