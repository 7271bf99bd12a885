"""``slurmft requeue``, also with ``--rescue``."""

from __future__ import annotations

import os
import signal

import click

from slurmft.cli.arguments import optional_run_argument, refuse_foreign, runs_root
from slurmft.cli.main import say, say_error
from slurmft.errors import UsageError
from slurmft.operations import control, rescue
from slurmft.operations.rescue import OWNER_LIMIT_S
from slurmft.storage.run_folder import RunFolder
from slurmft.system.processes import who


@click.command()
@optional_run_argument
@click.option("--rescue", "only_rescue", is_flag=True,
              help="Only rescue what has lost its supervisor: RUN, or all below SLURMFT_RUNS. For cron.")  # fmt: skip
@click.option("--as-owner", is_flag=True, hidden=True, help="What root's rescue starts with each owner's rights.")
def requeue(*, run: RunFolder | None, only_rescue: bool, as_owner: bool) -> int:
    """Save and go through the queue again; start a waiting job now; rescue one that lost its batch script.

    --rescue by root acts on each run with the rights of its owner only.
    """

    if not only_rescue:
        if run is None:
            raise UsageError("requeue which run?", hint="slurmft requeue RUN; only --rescue takes all of them")
        for line in rescue.rescue([refuse_foreign(run)], who()) or [control.requeue(run, who())]:
            say(line)
        return 0
    if as_owner:
        if os.getuid() == 0:
            raise UsageError("--as-owner is for the processes of root's rescue, which are not root's")
        signal.alarm(OWNER_LIMIT_S)  # even if root's process dies
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
