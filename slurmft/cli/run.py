"""The processes of a job, ``slurmft run``, ``agent`` and ``companion``; and ``slurmft metrics``, what the last one
publishes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path

import click

from slurmft.cli import arguments
from slurmft.cli.main import say_block, say_error
from slurmft.errors import UsageError
from slurmft.ipc.zygote_start import Zygote
from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration
from slurmft.storage.run_folder import RunFolder
from slurmft.system.processes import without_collections

# --- ``slurmft run``, a job's supervisor, and ``slurmft agent``, a node's agent: the processes of a run ---


@click.command()
@arguments.config_argument
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
@arguments.config_argument
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


# ``slurmft metrics``: measured values of runs for Prometheus; ``slurmft companion``, which publishes a job's own.


@click.command()
@arguments.optional_run_argument
@click.option(
    "--textfile",
    type=arguments.PATH,
    help="File for node_exporter's textfile collector (*.prom), replaced each time; instead of printing.",
)
@click.option(
    "--targets",
    type=arguments.PATH,
    help="File for Prometheus' file_sd_configs (*.json): where supervisors and routers are scraped.",
)
def metrics(*, run: RunFolder | None, textfile: Path | None, targets: Path | None) -> int:
    """Print or write measured values of RUN, or of all runs below SLURMFT_RUNS, as Prometheus reads them.

    For cron. A running job publishes its own by itself where its configuration has a section metrics.
    """
    from slurmft.reporting import metrics as reporting_metrics
    from slurmft.reporting.metrics import families, looks_at
    from slurmft.system.exposition import text

    runs = [run] if run is not None else arguments.every_run()
    looks, problems = looks_at(runs)
    for problem in problems:
        say_error(problem)
    try:
        if targets is not None:
            reporting_metrics.write_targets(targets, runs)
        if textfile is not None:
            reporting_metrics.write_textfile(textfile, families(looks))
    except OSError as error:
        raise UsageError(f"cannot write {textfile or targets}: {error.strerror}") from error
    if textfile is None and targets is None:
        say_block(text(families(looks)).rstrip("\n"))
    return 1 if problems else 0


@click.command(hidden=True)
@arguments.config_argument
def companion(*, config: Path) -> int:
    """Publish the metrics of a run and tell its events (started by the supervisor)."""
    from slurmft.reporting.metrics import accompany

    refuse_foreign_configuration(config)
    return accompany(load_given(config), os.environ)
