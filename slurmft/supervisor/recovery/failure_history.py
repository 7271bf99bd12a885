"""The run's journal as a history of failures: how often work was lost, and the node-time of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slurmft.config.config import RunConfig
from slurmft.policy.timing.checkpoint_interval import FailureHistory, mtbf_s
from slurmft.policy.verdicts.verdict import BUDGETED
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.supervisor.recovery.remedies import batch_divisor_of

_LOST_WORK = frozenset(cause.value for cause in BUDGETED)
_MAX_NODES = 1 << 20


def history_of(events: Iterable[Event], nproc_per_node: int) -> FailureHistory:
    """Failures that lost work, and node-seconds of training, from the journal.

    A failure is an unplanned end after at least one step, or a planned stop that saved nothing. An attempt without
    a verdict counts until its newest event. Times of one attempt are of one clock, that of its supervisor.
    """
    began: dict[str, tuple[float, int]] = {}
    last: dict[str, float] = {}
    failures = 0
    for event in events:
        last[event.attempt] = event.seconds()
        if event.event == EventName.WORKERS_STARTED:
            began[event.attempt] = event.seconds(), _nodes(event.details.get("world_size"), nproc_per_node)
        elif event.event == EventName.VERDICT:
            failures += str(event.details.get("cause")) in _LOST_WORK and _has_worked(event.details)
        elif event.event == EventName.STOP_WITHOUT_A_SAVE:
            failures += 1
    node_s = sum(max(0.0, last[attempt] - at) * nodes for attempt, (at, nodes) in began.items())
    return FailureHistory(failures=failures, node_s=node_s)


def facts_for_workers(history: Sequence[Event], config: RunConfig, *, nodes: int) -> dict[str, Any]:
    """Facts of the run's history for the workers of the next attempt, on ``nodes``."""
    seen = history_of(history, config.nproc_per_node)
    return {"batch_divisor": batch_divisor_of(history), "mtbf_s": round(mtbf_s(seen, nodes), 1)}


def _nodes(world_size: Any, nproc_per_node: int) -> int:
    if type(world_size) is not int or not 0 < world_size <= _MAX_NODES * nproc_per_node:
        return 1
    return max(1, world_size // nproc_per_node)


def _has_worked(facts: dict[str, Any]) -> bool:
    first, last = facts.get("first_step", 0), facts.get("last_step", 0)
    return type(first) is int and type(last) is int and last > first
