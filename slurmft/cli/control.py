"""``slurmft stop``, ``save``, ``requeue``, ``join`` and ``inject``: acting on a run from outside of its job."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from slurmft.cli import arguments
from slurmft.cli.main import say, say_error
from slurmft.errors import LaunchError, UsageError
from slurmft.operations import control
from slurmft.policy.values import MAX_AFTER_S, Fault, Order
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder, give_order, is_pending, left_overs, withdraw_order
from slurmft.system.files import opened
from slurmft.system.processes import who

# --- ``slurmft stop`` and ``slurmft save`` ---


@click.command()
@arguments.only_run_argument
@click.option(
    "--timeout",
    default=0.0,
    type=arguments.Amount(0, arguments.MAX_TIMEOUT_S),
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
@arguments.only_run_argument
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


# --- ``slurmft rm`` ---


class _Removable(arguments.OwnRun):
    """The caller's own run, or the name of one whose removal was interrupted."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunFolder:
        paths = (Path(str(value)).absolute(), arguments.runs_root().absolute() / str(value))
        if not any(map(os.path.lexists, paths)):  # before a run of that name elsewhere is taken for the one meant
            for path in paths:
                if left_overs(path):
                    return RunFolder(path)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("run", type=_Removable())
@click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
def rm(*, run: RunFolder, yes: bool) -> int:
    """Remove a run that is not running: its folder, with journal, logs and the checkpoints in it.

    Checkpoints in a folder elsewhere (checkpoint.directory), and what links lead to, stay. Called again, it goes on
    with a removal that was interrupted.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{run.path} would be removed", hint="--yes removes it without a question")
        if not click.confirm(f"remove {run.path}, with its checkpoints?"):
            return 1
    control.remove(run)
    say(f"removed {run.path}")
    return 0


# --- ``slurmft requeue``, also with ``--rescue`` ---


@click.command()
@arguments.optional_run_argument
@click.option("--rescue", "only_rescue", is_flag=True,
              help="Only rescue what has lost its supervisor: RUN, or all below SLURMFT_RUNS. For cron.")  # fmt: skip
@click.option("--as-owner", is_flag=True, hidden=True, help="What root's rescue starts with each owner's rights.")
def requeue(*, run: RunFolder | None, only_rescue: bool, as_owner: bool) -> int:
    """Save and go through the queue again; start a waiting job now; rescue one that lost its batch script.

    --rescue by root acts on each run with the rights of its owner only.
    """

    from slurmft.operations import rescue

    if not only_rescue:
        if (run := run or arguments.only_run()) is None:  # the shell completes a word
            return 0
        run = arguments.refuse_foreign(run)
        for line in rescue.rescue([run], who()) or [control.requeue(run, who())]:
            say(line)
        return 0
    if as_owner:
        if os.getuid() == 0:
            raise UsageError("--as-owner is for the processes of root's rescue, which are not root's")
        signal.alarm(rescue.OWNER_LIMIT_S)  # even if root's process dies
    try:
        found = rescue.rescue_one(run, who()) if run is not None else rescue.rescue_below(arguments.runs_root(), who())
    except OSError as error:
        raise UsageError(
            f"cannot list {arguments.runs_root()}: {error.strerror}", hint="SLURMFT_RUNS names another folder"
        ) from error
    for line in found.done or ["nothing had to be rescued"] * (not as_owner):
        say(line)
    for line in [*found.problems, *[found.left_alone] * (bool(found.left_alone) and not as_owner)]:
        say_error(line)
    return 1 if found.problems else 0


# --- ``slurmft join`` ---


@click.command()
@arguments.own_run_argument
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
        return control.lend(run, os.environ)
    from slurmft.operations.run_configuration import configuration_of
    from slurmft.scheduler import own_jobs, submission
    from slurmft.supervisor import avoided_nodes

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
    argv = own_jobs.lending_command(settings, run, nodes=nodes, options=options, avoid=frozenset(avoiding.nodes))
    if dry_run:
        say(shlex.join(argv))
        return 0
    job = own_jobs.submit_lender(argv)
    run.journal().append(EventName.JOINING, job=job, nodes=nodes, who=who())
    say(f"submitted job {job}, which lends {nodes} {'node' if nodes == 1 else 'nodes'} to {settings.name}")
    return 0


# --- ``slurmft inject``: faults on purpose, to test the recovery ---

TAKEN_WITHIN_S = 10.0
LOOK_S = 0.1
FLIPPED_BYTES = 64

_FAULTS = """\b
Faults:
  kill, stop                 SIGKILL, SIGSTOP to the worker
  hang, exception            at its next step: sleeps for ever; raises
  nan                        its next loss is NaN, once
  bit-flip                   one bit of a parameter changes, silently; see the section digests
  bit-flip-moment            one bit of the optimizer's state does
  bit-flip-gradient          one bit of a gradient does, after the ranks have summed it
  corrupt-newest-checkpoint  flips bytes in the newest committed checkpoint (of another rank's part with --rank)

Whole nodes and slow ones: slurmft lab partition, kill-node, slow-node.
"""


@click.command(epilog=_FAULTS)
@arguments.own_run_argument
@click.argument("fault", type=click.Choice([fault.value for fault in Fault]), metavar="FAULT")
@click.option("--rank", type=arguments.RANK, help="The rank to hit; one by chance without --rank and --node.")
@click.option("--node", default="", help="Hit every rank of this node: its host name, or its number from 0.")
@click.option("--after", "after_s", type=arguments.Amount(0.0, MAX_AFTER_S), default=0.0, show_default=True,
              help="Seconds until then.")  # fmt: skip
def inject(*, run: RunFolder, fault: str, rank: int | None, node: str, after_s: float) -> int:
    """Inject a fault into a running RUN, to see what follows. Only its owner can; it is recorded in the journal."""
    order = Order(fault=Fault(fault), who=who(), rank=rank, node=node, after_s=after_s)
    _refuse(run, order)
    if order.fault is Fault.CORRUPT_CHECKPOINT:
        say(_corrupt_newest_checkpoint(run, order))
        return 0
    give_order(run.path, order.as_json())
    whom = f"node {node}" if node else ("a rank by chance" if rank is None else f"rank {rank}")
    deadline = time.monotonic() + TAKEN_WITHIN_S
    while is_pending(run.path):
        if time.monotonic() > deadline:
            withdraw_order(run.path)  # or it would hit the next attempt
            what = f"the supervisor of run {run.path.name} has not taken the order within {TAKEN_WITHIN_S:.0f} s"
            raise LaunchError(f"{what}; it is withdrawn", hint=f"slurmft status {run.path}")
        time.sleep(LOOK_S)
    say(f"run {run.path.name}: {fault} of {whom}{f' in {after_s:g} s' if after_s else ''}")
    return 0


def _refuse(run: RunFolder, order: Order) -> None:
    """Return when the order makes sense.

    Raises:
        UsageError: it does not.
    """
    if order.rank is not None and order.node:
        raise UsageError("--rank and --node exclude each other", hint="a rank lives on one node only")
    if order.fault is Fault.CORRUPT_CHECKPOINT:
        if order.node or order.after_s:
            raise UsageError(f"{order.fault.value} takes no --node and no --after: it is done at once, in the files")
        return
    if not control.is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint=f"slurmft status {run.path}")
    from slurmft.operations.run_configuration import configuration_of

    world_size = configuration_of(run).world_size
    if order.rank is not None and order.rank >= world_size:
        raise UsageError(f"run {run.path.name} has no rank {order.rank}", hint=f"its ranks are 0 to {world_size - 1}")
    if is_pending(run.path):
        raise UsageError(f"another fault of run {run.path.name} waits to be taken", hint="try again in a second")


def _corrupt_newest_checkpoint(run: RunFolder, order: Order) -> str:
    from slurmft.checkpoint.catalog import Catalog
    from slurmft.checkpoint.image_file import image_file
    from slurmft.operations.run_configuration import configuration_of, refuse_shared

    folder = configuration_of(run).checkpoint_dir
    refuse_shared(run, folder)
    entries = Catalog(folder).committed()
    if not entries:
        raise UsageError(f"there is no committed checkpoint in {folder}", hint=f"slurmft save {run.path}")
    name = image_file(order.rank or 0)
    if name not in entries[0].files:
        raise UsageError(f"{entries[0].path} has no {name}", hint="its ranks: " + ", ".join(sorted(entries[0].files)))
    path = entries[0].path / name
    run.journal().append(EventName.FAULT_INJECTED, fault=order.fault.value, who=order.who, file=str(path))
    _flip(path)
    return f"run {run.path.name}: flipped {FLIPPED_BYTES} bytes of {path}"


def _flip(path: Path) -> None:
    with opened(path, os.O_RDWR, follow=False) as descriptor:
        middle = os.fstat(descriptor).st_size // 2
        data = os.pread(descriptor, FLIPPED_BYTES, middle)
        os.pwrite(descriptor, bytes(byte ^ 0xFF for byte in data), middle)
        os.fsync(descriptor)
