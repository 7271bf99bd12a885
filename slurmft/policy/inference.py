"""Decisions about replicas and requests: devices, slots, restarts, what follows the end of a try, who is to blame."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

# --- What follows the end of one try of a request: it is an answer, it is tried again, or its replica is to blame ---

RETRIED_STATUS = frozenset({408, 409, 425, 429})
"""Client errors of HTTP that a later try may not meet: time-out, conflict, too early, too many requests."""

NOT_IMPLEMENTED = 501
"""Whichever replica is asked, and however often."""

OUT_OF_MEMORY = ("out of memory", "outofmemoryerror", "cuda oom", "kv cache is full", "cannot allocate memory")
"""Words of engines and frameworks, in lower case."""


class Outcome(StrEnum):
    """The meaning of one try."""

    ANSWER = "answer"
    """Final, be it a result or an error of the request's own."""

    RETRY = "retry"
    """The next try may succeed."""

    SMALLER = "smaller"
    """The replica was out of memory: fewer requests at a time, and again."""


def outcome_of_status(status: int, text: str = "") -> Outcome:
    """The meaning of an HTTP answer with this status; ``text`` is the body of an error.

    A client error (4xx) is final and says nothing about the replica. Where it or a server error names missing memory,
    the replica had too much to do.
    """
    if 200 <= status < 300:
        return Outcome.ANSWER
    if status >= 500 and is_out_of_memory(text):
        return Outcome.SMALLER
    is_passing = status in RETRIED_STATUS or (status >= 500 and status != NOT_IMPLEMENTED)
    return Outcome.RETRY if is_passing else Outcome.ANSWER


def is_good(answer: Mapping[str, Any]) -> bool:
    """Whether it is an engine's answer, and none that refuses the request."""
    return 200 <= int(answer.get("response", {}).get("status_code", 0)) < 300


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text names missing memory, of the device or the host."""
    lower = text.lower()
    return any(words in lower for words in OUT_OF_MEMORY)


def retry_after_s(header: str | None, *, longest_s: float) -> float | None:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), at most ``longest_s``; None without a usable one.

    A date is not taken: the clocks of an engine and of its client need not agree.
    """
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return min(seconds, longest_s) if math.isfinite(seconds) and seconds >= 0 else None


# --- Which GPUs a replica sees ---


def devices_of(visible: Sequence[str], replica: int, per_replica: int) -> tuple[str, ...]:
    """The GPUs of replica number ``replica`` of a node: its share, in order; all where ``per_replica`` is 0 or none is.

    Raises:
        ValueError: the node has too few.
    """
    if not visible or per_replica == 0:
        return tuple(visible)
    first = replica * per_replica
    if first + per_replica > len(visible):
        raise ValueError(
            f"replica {replica} needs GPUs {first} to {first + per_replica - 1}, but there are {len(visible)} on the "
            "node: inference.replicas_per_node times inference.gpus_per_replica is too much"
        )
    return tuple(visible[first : first + per_replica])


def all_down(phases: Collection[str], *, least: int) -> bool:
    """Whether every replica has given up: at least so many have reported, and no engine but those of other nodes, of
    which a replica is a member, is in another phase."""
    return len(phases) >= least > 0 and {*phases} - {"member"} == {"down"}


# --- Which nodes have one engine together ---


def gangs_of(
    gangs: Sequence[tuple[int, ...]], nodes: Collection[int], *, size: int, most: int
) -> list[tuple[int, ...]]:  # fmt: skip
    """The gangs of which all nodes are left, and new ones of nodes that are in none, each with its head first."""
    whole = [gang for gang in gangs if set(gang) <= set(nodes)]
    free = sorted(set(nodes).difference(*whole))
    while len(whole) < most and len(free) >= size:
        whole, free = [*whole, tuple(free[:size])], free[size:]
    return whole


# --- Which node is suspected when engines die: one where that happens again and again, while others work ---

WINDOW_S = 3600.0
"""Deaths further apart have nothing to do with each other: an endpoint lives for weeks."""

DEATHS = 3
"""Of engines of one node in the window, without a request that explains them, before it is suspected."""

TIMES_OTHERS = 3
"""It has so many times the deaths of any other node: where all have them the engine is to blame, or its requests."""


@dataclass(frozen=True, slots=True)
class NodeDeaths:
    """Deaths of engines by node."""

    deaths: tuple[tuple[str, float], ...] = ()
    """Node and time, seconds; those within the window."""

    def died(self, node: str, now_s: float, *, in_flight: int) -> NodeDeaths:
        """One more. With a single request in flight that is more likely the request's fault."""
        kept = tuple(each for each in self.deaths if now_s - each[1] <= WINDOW_S)
        return NodeDeaths(kept if in_flight == 1 else (*kept, (node, now_s)))

    def forgiven(self, node: str) -> NodeDeaths:
        """Begin anew with this node, whose deaths have been held against it."""
        return NodeDeaths(tuple(each for each in self.deaths if each[0] != node))

    def suspect(self, nodes: Collection[str], now_s: float) -> str | None:
        """The node of ``nodes``, those that serve, that is suspected now; None without one, or without others."""
        counts = Counter(node for node, at_s in self.deaths if now_s - at_s <= WINDOW_S and node in nodes)
        if len(set(nodes)) < 2 or not counts:
            return None
        (node, most), *others = counts.most_common(2)
        second = others[0][1] if others else 0
        return node if most >= max(DEATHS, TIMES_OTHERS * second) else None


# --- Requests that kill engines: a death makes suspects of all that were in flight, and only those alone are proof ---

KILLS = 2
"""Replicas that a request must have killed while it was alone on them."""

SOON_S = 30.0
"""One that was at a single death is tried alone where its turn comes within so long; the others go on as before.
Engines die of other things as well, and where answers take minutes most would wait in vain."""

OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that come from outside of an engine."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a replica while a request was in flight on it."""

    replica: str
    """One life of a replica: a restart is another one."""

    alone: bool
    """Nothing else was in flight."""

    how: str
    """The end, in words: signal, exit code or hang."""


def is_suspect(deaths: Sequence[Death], wait_s: float = math.inf) -> bool:
    """Whether a request is tried with nothing beside it from now on.

    Args:
        wait_s: until its turn would come.
    """
    return len(deaths) > 1 or any(death.alone or wait_s <= SOON_S for death in deaths)


def is_poison(deaths: Sequence[Death]) -> bool:
    """Whether the request killed ``KILLS`` replicas alone: it is not tried again."""
    return len({death.replica for death in deaths if death.alone}) >= KILLS


def has_crashed(code: int) -> bool:
    """Whether an engine ended by its own fault, perhaps that of a request; ``code`` as ``Popen.returncode``."""
    return code != 0 and -code not in OUTSIDE


def evidence_of(deaths: Sequence[Death]) -> str:
    """The deaths in one sentence, for the request's error record."""
    alone = [death for death in deaths if death.alone]
    told = "; ".join(f"{death.replica}: {death.how}" for death in alone)
    return f"the engine died {len(alone)} times while it worked on this request alone ({told})"


# --- Restarts of one replica: how many without a success, and after which pause ---


@dataclass(frozen=True, slots=True)
class Restarts:
    """A replica's failures since it last completed a request."""

    max_restarts: int
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    failures: int = 0

    def failed(self) -> Restarts:
        """One more end that the replica itself has to answer for."""
        return replace(self, failures=self.failures + 1)

    def counted(self, failures: int) -> Restarts:
        """With so many failures before."""
        return replace(self, failures=failures)

    def succeeded(self) -> Restarts:
        """It completed a request: the count begins anew."""
        return replace(self, failures=0) if self.failures else self

    @property
    def exhausted(self) -> bool:
        """It stays down."""
        return self.failures > self.max_restarts

    @property
    def delay_s(self) -> float:
        """Seconds before the next start: none after the first failure, then doubled each time up to the longest."""
        if self.failures <= 1:
            return 0.0
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(self.failures - 2, 30))


# --- How many requests a replica gets at a time: halved when it runs out of memory, raised again slowly ---

RAISE_AFTER = 20
"""Requests that must end well, for each slot there is, before one slot is added."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP's congestion control."""

    limit: int
    """Never more than these; the configured concurrency."""

    now: int
    good: int = 0
    """Requests that ended well since the last change."""

    @classmethod
    def full(cls, limit: int) -> Slots:
        """As many as are configured."""
        return cls(limit=limit, now=limit)

    def out_of_memory(self) -> Slots:
        """Half as many, at least one."""
        return replace(self, now=max(1, self.now // 2), good=0)

    def ended_well(self, count: int = 1) -> Slots:
        """One slot more after ``RAISE_AFTER`` requests for each slot."""
        if self.now >= self.limit:
            return self
        good = self.good + count
        if good < RAISE_AFTER * self.now:
            return replace(self, good=good)
        return replace(self, now=self.now + 1, good=0)
