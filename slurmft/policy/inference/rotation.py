"""Which replica gets a request, and whether one that comes may wait for a replica."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

FAILURES_TO_AVOID = 5
"""Failures in a row, with nothing else in between, after which a replica is avoided."""

AVOIDED_S = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """One replica in the rotation, as a router sees it."""

    name: str
    in_flight: int
    """Of all routers, as far as this one knows."""

    avoided: bool = False
    """It fails what it gets, although it lives."""

    suspected: int = 0
    """The weight of the requests on it that may have crashed another one."""


def choose(loads: Sequence[Load], *, limit: int, without: Collection[str] = (), is_suspect: bool = False) -> str | None:
    """The replica with the fewest requests in flight, the first of several; None where none has room.

    One of ``without``, where the request has failed before, is taken where no other has room; one that is avoided only
    where the rotation has no other: a wait for a good one is better than another failure. A request that may have
    crashed an engine goes where such have the least weight.
    """
    able = [each for each in loads if not each.avoided] or loads
    free = [each for each in able if each.in_flight < limit]
    fresh = [each for each in free if each.name not in without] or free
    return min(fresh, key=lambda each: (is_suspect and each.suspected, each.in_flight)).name if fresh else None


@dataclass(frozen=True, slots=True)
class Breaker:
    """A living replica's failures in a row. What a client does wrong (4xx) is none of them."""

    failures: int = 0
    until_s: float = 0.0
    """It is avoided until then."""

    def failed(self, now_s: float) -> Breaker:
        """One more: no answer, or one that says that the replica cannot."""
        failures = self.failures + 1
        return Breaker(failures, now_s + AVOIDED_S if failures >= FAILURES_TO_AVOID else 0.0)

    def succeeded(self) -> Breaker:
        """Any answer of its own; it begins anew."""
        return Breaker() if self.failures else self

    def is_open(self, now_s: float) -> bool:
        """Whether the replica is avoided. Afterwards one request may try it; another failure opens it again."""
        return now_s < self.until_s


class Priority(IntEnum):
    """Of a request (``X-Priority``): one of a higher priority that waits is next."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @classmethod
    def of(cls, header: str | None) -> Priority:
        """What a request asks for; ``NORMAL`` for what is not known."""
        return cls.__members__.get((header or "").strip().upper(), cls.NORMAL)

    def share_of(self, concurrency: int) -> int:
        """How many requests a replica may have when it gets one of these: low ones leave a quarter to others."""
        return max(1, concurrency - concurrency // 4) if self is Priority.LOW else concurrency


class Entry(StrEnum):
    """What becomes of a request that has come."""

    ADMITTED = "admitted"
    FULL = "full"
    """429: so many wait that this one would not be answered in time."""

    LOW_PRIORITY = "low priority"
    """503: what is left of the endpoint is for others."""

    CLOSED = "closed"
    """503: the endpoint goes away."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits in a router, and how fast it becomes less."""

    waiting: int
    """Of this priority and above."""

    most: int
    slots: int
    """Requests at a time, of all replicas together."""

    mean_s: float
    """How long a request takes, on the average of the last ones; 0 where none has ended yet."""

    has_room: bool
    """A replica can take one more at once."""

    @property
    def wait_s(self) -> float:
        """How long one more would wait, by Little's law; 0 where that is not known."""
        return (self.waiting + 1) * self.mean_s / self.slots if self.slots else 0.0


def entry_of(queue: Queue, *, left_s: float, priority: Priority, degraded: bool, closing: bool) -> Entry:
    """Whether a request with ``left_s`` seconds until its deadline is admitted.

    Overload never becomes a time-out: a request that would not get a replica in time is refused at once.
    """
    if closing:
        return Entry.CLOSED
    if priority is Priority.LOW and degraded:
        return Entry.LOW_PRIORITY
    if queue.has_room and not queue.waiting:
        return Entry.ADMITTED
    return Entry.FULL if queue.waiting >= queue.most or queue.wait_s > left_s else Entry.ADMITTED
