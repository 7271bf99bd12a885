"""``slurmft join``."""

from __future__ import annotations

import os
import shlex

import click

from slurmft.cli.arguments import own_run_argument
from slurmft.cli.main import say
from slurmft.errors import UsageError
from slurmft.operations.run_configuration import configuration_of
from slurmft.scheduler import submission, successor
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import avoided_nodes
from slurmft.system.processes import who


@click.command()
@own_run_argument
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", "-N", type=click.IntRange(1, 65_536), default=1, show_default=True, help="Nodes to lend.")
@click.option("--here", is_flag=True, help="Lend the nodes of the job around this command, and submit nothing.")
@click.option("--dry-run", is_flag=True, help="Print the sbatch command, and change nothing.")
def join(*, run: RunFolder, sbatch_options: tuple[str, ...], nodes: int, here: bool, dry_run: bool) -> int:
    """Lend nodes to a run: submit a job on whose nodes it trains too, from its next checkpoint on.

    It goes on without them when that job ends. The run must be elastic: elastic.max_nodes above nodes, or
    elastic.min_nodes below. Options behind -- go to sbatch.
    """
    if here:
        from slurmft.operations.join import lend

        return lend(run, os.environ)
    settings = configuration_of(run)
    if not settings.size.is_elastic:
        raise UsageError(
            f"run {run.path.name} trains on {settings.nodes} nodes, always",
            hint="set elastic.max_nodes and submit it again",
        )
    if (done := run.done()) is not None:
        raise UsageError(f"run {run.path.name} is finished ({done.get('reason')})")
    options = submission.parse_sbatch_options(sbatch_options)
    avoiding = avoided_nodes.for_submission(settings, options, os.environ, ())
    argv = successor.lending_command(settings, run, nodes=nodes, options=options, avoid=frozenset(avoiding.nodes))
    if dry_run:
        say(shlex.join(argv))
        return 0
    job = successor.submit_lender(argv)
    run.journal().append(EventName.JOINING, job=job, nodes=nodes, who=who())
    say(f"submitted job {job}, which lends {nodes} {'node' if nodes == 1 else 'nodes'} to {settings.name}")
    return 0
