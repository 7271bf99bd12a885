"""The agent's part of an injected fault: signals to its workers, and orders that their sessions read at a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.agent.workers import Worker
from slurmft.ipc.pages.heartbeat import FAULT_SUFFIX, Slot
from slurmft.ipc.replies import Injected
from slurmft.policy.faults import BY_SIGNAL, NOT_YET, Fault, order_of
from slurmft.system.files import write_json


def strike(workers: Sequence[Worker], order: Mapping[str, Any], ranks: Sequence[int] | None) -> Injected:
    """Inject a fault into those of these workers that are meant; None means all of them.

    Returns the ranks that were hit, and why others were not.
    """
    hit: list[int] = []
    refused: list[str] = []
    try:
        fault = order_of(order).fault
    except ValueError as error:
        return Injected(injected=(), refused=(str(error),))
    for worker in workers:
        if ranks is not None and worker.rank not in ranks:
            continue
        if why := _strike_one(worker, fault):
            refused.append(f"rank {worker.rank} {why}")
        else:
            hit.append(worker.rank)
    return Injected(injected=tuple(hit), refused=tuple(refused))


def _strike_one(worker: Worker, fault: Fault) -> str:
    """Why it could not be done; empty when it was."""
    if not worker.alive:
        return "is not alive"
    if not worker.pid:
        return NOT_YET
    try:
        if fault in BY_SIGNAL:
            os.kill(worker.trainer_pid, signal.Signals[BY_SIGNAL[fault]])
            return ""
        if worker.page[Slot.PID] == 0:
            return f"uses no session; only {', '.join(BY_SIGNAL)} reach it"
        path = worker.stacks.with_suffix(FAULT_SUFFIX)
        write_json(path, {"fault": fault.value}, durable=False)
    except OSError as error:
        return f"cannot be reached: {error.strerror}"
    worker.page[Slot.FAULT] += 1  # only now: the worker reads the file when it sees another number
    return ""
