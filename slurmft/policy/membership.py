"""Who takes part in the next attempt: the allocation's nodes and their condition in, an ordered list of nodes out.

The place of a node in the list is its group rank, so nodes that go on keep their ranks where that can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

PATIENCE_FACTOR = 4.0
"""How much longer silence must last where no node could take over: the node may come back, a requeue costs more."""


class Agent(Enum):
    """The state of a node's agent."""

    LIVING = "living"
    RETURNING = "returning"
    """Its node lives, and it is being started again."""

    LOST = "lost"


class Standing(IntEnum):
    """The fault of a node; a greater one is used later."""

    CLEAN = 0
    SUSPECT = 1
    """Weak evidence: used where the run would be smaller without it."""

    EXCLUDED = 2
    """On the exclusion list: used where the run could not go on without it."""

    BARRED = 3
    """Convicted, or suspect of an undecided rerun: never used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node that the run may use."""

    name: str
    agent: Agent = Agent.LIVING
    standing: Standing = Standing.CLEAN
    warm: bool = True
    """It can start at once; one that cannot gives way to one that can."""

    joined: bool = False
    """Lent by another job."""

    leaving: bool = False
    """The job that lends it is ending: it is not to be counted on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How many nodes the run trains on.

    Raises:
        ValueError: not 1 <= minimum <= nodes <= maximum.
    """

    nodes: int
    """The intended number of the job's own nodes; further ones of it are spares."""

    minimum: int
    """Fewer are not worth going on with; ``nodes`` for a run of one size."""

    maximum: int
    """With nodes that others lend; ``nodes`` for a run of one size."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.nodes <= self.maximum:
            raise ValueError(f"not 1 <= {self.minimum} <= {self.nodes} <= {self.maximum}")

    @property
    def is_elastic(self) -> bool:
        """Whether it may change."""
        return self.minimum < self.maximum


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Who takes part."""

    nodes: tuple[str, ...]
    """In the order of their ranks."""

    despite: tuple[str, ...] = ()
    """Those of them that are on the exclusion list: a place without them would be better, and is not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Look again when one of these nodes is back, at the latest in ``seconds``."""

    nodes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TooFew:
    """The run cannot go on in this allocation."""

    reason: str


def next_members(
    nodes: Iterable[Node], last: Sequence[str], size: Size, *, waited_s: float = 0.0, patience_s: float = 0.0
) -> Members | Wait | TooFew:
    """The members of the next attempt.

    As many as ``size`` allows: ``size.nodes`` of the job's own and one more for each that is lent. Those of the last
    attempt go on where they have no fault, at the places they had; gaps are filled by the others, the job's own first.
    Where fewer are living, one that is returning is waited for, ``patience_s`` seconds in all.

    Args:
        nodes: all that there are, in the allocation's order; a name that comes again is looked at once.
        last: the members of the last attempt, in the order of its ranks; empty at first.
        waited_s: how long this decision has been waiting already.
    """
    first: dict[str, Node] = {}
    for node in nodes:
        first.setdefault(node.name, node)
    known = list(first.values())
    chosen = _choose(_ranked(known, last), size)
    if waited_s < patience_s:
        hoped = _choose(_ranked(known, last, hopeful=True), size)
        missing = [node.name for node in hoped if node.agent is Agent.RETURNING]
        if missing and len(_good(hoped)) > len(_good(chosen)):
            return Wait(nodes=tuple(missing), seconds=patience_s - waited_s)
    if len(chosen) < size.minimum:
        return TooFew(reason=_why_too_few(known, len(chosen), size))
    despite = tuple(sorted(node.name for node in chosen if node.standing is Standing.EXCLUDED))
    return Members(nodes=_placed([node.name for node in chosen], last), despite=despite)


def growth(nodes: Iterable[Node], current: Sequence[str], size: Size) -> tuple[str, ...]:
    """Nodes to take in at the next checkpoint; empty when the run is as large as it should be.

    Only nodes without a fault are worth a stop. A lost member does not matter here: its attempt ends by itself.
    """
    known = list(nodes)
    taken = next_members(known, current, size)
    if not isinstance(taken, Members) or not set(current) <= set(taken.nodes):
        return ()
    clean = {node.name for node in known if node.standing is Standing.CLEAN}
    new = tuple(name for name in taken.nodes if name not in set(current))
    return new if set(new) <= clean else ()


def lost_after_s(timeout_s: float, *, replaceable: bool) -> float:
    """Seconds of silence after which a node counts as lost.

    Where no node could take over, the attempt's end means a requeue, which costs more than a longer wait.
    """
    return timeout_s if replaceable else timeout_s * PATIENCE_FACTOR


def _ranked(nodes: Sequence[Node], last: Sequence[str], *, hopeful: bool = False) -> list[Node]:
    """Usable nodes, the ones to be preferred first."""
    agents = (Agent.LIVING, Agent.RETURNING) if hopeful else (Agent.LIVING,)
    usable = [n for n in nodes if n.agent in agents and n.standing is not Standing.BARRED and not n.leaving]
    before = set(last)
    return sorted(
        usable, key=lambda n: (n.standing, n.agent is Agent.RETURNING, not n.warm, n.name not in before, n.joined)
    )


def _choose(ranked: Sequence[Node], size: Size) -> list[Node]:
    good = _good(ranked)
    wanted = min(size.maximum, size.nodes + sum(node.joined for node in good))
    good = good[:wanted]
    others = [node for node in ranked if node.standing is Standing.EXCLUDED]
    return [*good, *others[: max(0, size.minimum - len(good))]]


def _good(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.standing < Standing.EXCLUDED]


def _placed(chosen: Sequence[str], last: Sequence[str]) -> tuple[str, ...]:
    """The chosen ones, each at the place it had as far as there still is that place; the others fill the gaps."""
    places: list[str | None] = [None] * len(chosen)
    among = set(chosen)
    for place, name in enumerate(last[: len(places)]):
        if name in among:
            places[place] = name
    kept = set(places)
    before = {name: place for place, name in enumerate(last)}
    moving = sorted((name for name in chosen if name not in kept), key=lambda name: before.get(name, len(before)))
    rest = iter(moving)
    return tuple(name if name is not None else next(rest) for name in places)


def _why_too_few(nodes: Sequence[Node], living: int, size: Size) -> str:
    out = {
        "lost": [n.name for n in nodes if n.agent is not Agent.LIVING],
        "barred": [n.name for n in nodes if n.agent is Agent.LIVING and n.standing is Standing.BARRED],
        "about to leave": [n.name for n in nodes if n.agent is Agent.LIVING and n.leaving],
    }
    words = ", ".join(
        f"{why}: {', '.join(names[:5])}{' ...' if names[5:] else ''}" for why, names in out.items() if names
    )
    needed = f"elastic.min_nodes={size.minimum}" if size.minimum < size.nodes else f"nodes={size.nodes}"
    return f"{living} of {len(nodes)} nodes can be used, fewer than {needed}" + (f" ({words})" if words else "")
