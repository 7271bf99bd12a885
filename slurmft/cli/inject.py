"""``slurmft inject``: faults on purpose, to test the recovery."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from slurmft.cli.arguments import RANK, Amount, own_run_argument
from slurmft.cli.main import say
from slurmft.errors import LaunchError, UsageError
from slurmft.operations import control
from slurmft.operations.run_configuration import configuration_of, refuse_shared
from slurmft.policy.values import MAX_AFTER_S, Fault, Order
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder, give_order, is_pending, withdraw_order
from slurmft.system.files import open_regular
from slurmft.system.processes import who

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
@own_run_argument
@click.argument("fault", type=click.Choice([fault.value for fault in Fault]), metavar="FAULT")
@click.option("--rank", type=RANK, help="The rank to hit; one by chance without --rank and --node.")
@click.option("--node", default="", help="Hit every rank of this node: its host name, or its number from 0.")
@click.option("--after", "after_s", type=Amount(0.0, MAX_AFTER_S), default=0.0, show_default=True,
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
    world_size = configuration_of(run).world_size
    if order.rank is not None and order.rank >= world_size:
        raise UsageError(f"run {run.path.name} has no rank {order.rank}", hint=f"its ranks are 0 to {world_size - 1}")
    if is_pending(run.path):
        raise UsageError(f"another fault of run {run.path.name} waits to be taken", hint="try again in a second")


def _corrupt_newest_checkpoint(run: RunFolder, order: Order) -> str:
    from slurmft.checkpoint.catalog import Catalog
    from slurmft.checkpoint.image_file import image_file

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
    descriptor = open_regular(path, os.O_RDWR, follow=False)
    try:
        middle = os.fstat(descriptor).st_size // 2
        data = os.pread(descriptor, FLIPPED_BYTES, middle)
        os.pwrite(descriptor, bytes(byte ^ 0xFF for byte in data), middle)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
