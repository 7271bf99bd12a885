"""Before workers are killed: those that have the newest complete step keep it (``checkpoint.just_in_time``).

A worker that waits in a collective for one that is gone cannot run anything in its main thread, so a thread of its own
waits at a pipe beside its page. Where nothing would be gained, there is no wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.agent.workers import Worker
from slurmft.ipc.pages.heartbeat import NOTHING, RESCUE_S, RESCUE_SUFFIX, Slot
from slurmft.system.processes import is_stopped

BEGIN_S = 1.0
"""How long a worker may take to begin: its thread needs the interpreter for a moment."""

LOOK_S = 0.002


async def rescue_on_node(workers: Sequence[Worker]) -> int:
    """The newest step that this node's workers have kept when this returns; a negative number where they have none."""
    # a stopped worker can do nothing; others of its node may have the same state
    workers = [worker for worker in workers if not (worker.alive and worker.pid and is_stopped(worker.trainer_pid))]
    asked: set[tuple[int, int]] = set()
    began = time.monotonic()
    while able := [worker for worker in workers if worker.alive and worker.page[Slot.RESCUABLE] != NOTHING]:
        for worker in able:  # a worker that is updating its weights will be at the end of its step in a moment
            step = worker.page[Slot.RESCUABLE]
            if step >= 0 and (worker.rank, step) not in asked:
                asked.add((worker.rank, step))
                _wake(worker.stacks.with_suffix(RESCUE_SUFFIX))
        took_s = time.monotonic() - began
        if all(_is_kept(part, able, workers) for part in _parts(able)) or took_s > RESCUE_S:
            break
        if took_s > BEGIN_S and not any(worker.page[Slot.RESCUING] for worker in able):
            break
        await asyncio.sleep(LOOK_S)
    return _kept(workers)


def _parts(workers: Sequence[Worker]) -> set[int]:
    """The parts that these workers have of a state that is spread over ranks; one and the same where it is not."""
    return {worker.page[Slot.RESCUE_PART] for worker in workers}


def _is_kept(part: int, able: Sequence[Worker], workers: Sequence[Worker]) -> bool:
    """Whether any worker has kept the newest step of this part."""
    newest = max(worker.page[Slot.RESCUABLE] for worker in able if worker.page[Slot.RESCUE_PART] == part)
    return 0 <= newest <= _kept([worker for worker in workers if worker.page[Slot.RESCUE_PART] == part])


def _kept(workers: Sequence[Worker]) -> int:
    return max((worker.page[Slot.RESCUED] for worker in workers), default=-1)


def _wake(pipe: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # refused where there is no reader
        try:
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)
