"""``slurmft metrics``: measured values of runs for Prometheus; ``slurmft companion``, which publishes a job's own."""

from __future__ import annotations

import os
from pathlib import Path

import click

from slurmft.cli.arguments import every_run, optional_run_argument
from slurmft.cli.main import say_block, say_error
from slurmft.errors import UsageError
from slurmft.storage.run_folder import RunFolder


@click.command()
@optional_run_argument
@click.option(
    "--textfile",
    type=click.Path(path_type=Path),
    help="File for node_exporter's textfile collector (*.prom), replaced each time; instead of printing.",
)
@click.option(
    "--targets",
    type=click.Path(path_type=Path),
    help="File for Prometheus' file_sd_configs (*.json): where supervisors and routers are scraped.",
)
def metrics(*, run: RunFolder | None, textfile: Path | None, targets: Path | None) -> int:
    """Print or write measured values of RUN, or of all runs below SLURMFT_RUNS, as Prometheus reads them.

    For cron. A running job publishes its own by itself where its configuration has a section metrics.
    """
    from slurmft.reporting import metrics as reporting_metrics
    from slurmft.reporting.metrics import families, looks_at
    from slurmft.system.exposition import text

    runs = [run] if run is not None else every_run()
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
@click.argument("config", type=click.Path(path_type=Path))
def companion(*, config: Path) -> int:
    """Publish the metrics of a run and tell its events (started by the supervisor)."""
    from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration
    from slurmft.reporting.companion import accompany

    refuse_foreign_configuration(config)
    return accompany(load_given(config), os.environ)
