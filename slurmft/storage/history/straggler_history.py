"""How fast each node was in earlier attempts of a run, and convicted nodes: one bounded file in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.system.files import duration, read_json, write_json

HISTORY_FILE = "stragglers.json"
MAX_BYTES = 32 << 20
MAX_NODES = 20_000
MAX_OUTCOMES = 1000
MAX_CONVICTIONS = 50
KEPT = 3
"""Best times kept of each worker's place; the largest of them counts, so that one lucky window says nothing."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The smallest times of one worker's place on a node."""

    role: str
    seconds: tuple[float, ...]
    """At most KEPT, ascending."""


@dataclass(kw_only=True, slots=True)
class NodeHistory:
    """The past of one node."""

    best: dict[int, Best] = field(default_factory=dict)
    """By the worker's place on the node (its local rank)."""

    outcomes: list[tuple[float, bool]] = field(default_factory=list)
    """Unix time of each window and whether it accused the node; oldest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conviction:
    """An earlier verdict."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    at: float


@dataclass(kw_only=True, slots=True)
class History:
    """All of it."""

    nodes: dict[str, NodeHistory] = field(default_factory=dict)
    """Least recently seen first."""

    convictions: list[Conviction] = field(default_factory=list)


def read(run_folder: Path, workload: str) -> History:
    """The records of earlier attempts of this workload; empty where the file cannot be believed.

    Times of another workload say nothing about this one, but convictions still count.
    """
    path = run_folder / HISTORY_FILE
    try:
        if (value := read_json(path, limit_bytes=MAX_BYTES)) is None:
            return History()
        history = History(convictions=[_conviction(each) for each in value["convictions"]][-MAX_CONVICTIONS:])
        if value["workload"] == workload:
            history.nodes = {str(name): _node(facts) for name, facts in value["nodes"]}
        return history
    except (StorageError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        log.warning("the straggler history in %s is ignored: %s", path, getattr(error, "what", repr(error)))
        return History()


def write(run_folder: Path, workload: str, history: History) -> None:
    """Replace the file; nodes that were seen least recently are forgotten first.

    Raises:
        OSError: the file is as it was.
    """
    nodes = [  # a list: their order is when they were last seen
        [name, {
            "best": {str(place): [best.role, list(best.seconds[:KEPT])] for place, best in node.best.items()},
            "outcomes": [[round(at, 1), slow] for at, slow in node.outcomes[-MAX_OUTCOMES:]],
        }]
        for name, node in list(history.nodes.items())[-MAX_NODES:]
    ]  # fmt: skip
    convictions = [
        {"nodes": each.nodes, "ranks": each.ranks, "at": each.at} for each in history.convictions[-MAX_CONVICTIONS:]
    ]
    value = {"workload": workload, "nodes": nodes, "convictions": convictions}
    write_json(run_folder / HISTORY_FILE, value, durable=False)


def _node(facts: Mapping[str, Any]) -> NodeHistory:
    best = {
        int(place): Best(role=str(role), seconds=tuple(sorted(duration(each) for each in seconds))[:KEPT])
        for place, (role, seconds) in facts["best"].items()
    }
    outcomes = [(duration(at), bool(slow)) for at, slow in facts["outcomes"]]
    return NodeHistory(best=best, outcomes=outcomes[-MAX_OUTCOMES:])


def _conviction(facts: Mapping[str, Any]) -> Conviction:
    return Conviction(
        nodes=tuple(str(node) for node in facts["nodes"]), ranks=tuple(int(rank) for rank in facts["ranks"]),
        at=duration(facts["at"]),
    )  # fmt: skip
