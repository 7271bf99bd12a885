"""When an endpoint is handed over to a successor job, and what its owner does about that successor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slurmft.policy.timing.grace import SLURM_JITTER_S

STARTUP_FACTOR = 1.5
"""Engines of the successor load while those of this job still work, perhaps from the same filesystem."""

MARGIN_S = 60.0
"""For the queue, the agents' start, and the last requests of this job."""

MAX_TRIES = 3
PAUSE_S = 30.0
"""Between a successor that was lost and the next one."""

SETTLE_S = 10.0
"""How long after a stop has begun a successor may take to get nodes before the drain begins without it."""

DRAIN_SHARE, LEAST_DRAIN_S = 0.3, 5.0
"""Of the time of a stop, what is kept for requests in flight while a successor is awaited."""


class Successor(StrEnum):
    """The successor job, as far as it is known."""

    NONE = "not submitted"
    UNKNOWN = "Slurm did not answer"
    WAITING = "in the queue"
    ALIVE = "has nodes"
    GONE = "has ended"


class Step(StrEnum):
    """What the owner does next."""

    WAIT = "wait"
    SUBMIT = "submit a successor"
    REPLACE = "cancel the successor, which does not become ready, and try again"
    GIVE_UP = "go on without a handover"


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The handover at one moment; all times in seconds of one clock."""

    now_s: float
    due_s: float | None
    """When it is to begin; None: at no time that is known."""

    successor: Successor
    alive_since_s: float | None
    """Since when the successor has nodes."""

    start_limit_s: float
    """How long it may take from then on until it is ready."""

    tries: int
    """Successors submitted so far in this job."""

    again_s: float
    """Not before then is another one submitted."""


def lead_s(configured: float | None, *, startup_s: float | None, stop_s: float) -> float | None:
    """Seconds before the time limit at which the successor is submitted; None where that cannot be known yet.

    Args:
        startup_s: measured from the first agent to the last replica; None before that.
        stop_s: the lead of Slurm's signal, after which this job drains.
    """
    if configured is not None:
        return configured
    if startup_s is None:
        return None
    return stop_s + SLURM_JITTER_S + STARTUP_FACTOR * startup_s + MARGIN_S


def due_s(lead: float | None, *, owned_since_s: float, ends_s: float | None) -> float | None:
    """When the handover begins; None where the job has no end, or the lead is not known.

    Not in the first half of what this job has: a limit shorter than the lead would only start jobs all the time.
    """
    if lead is None or ends_s is None:
        return None
    return max(ends_s - lead, owned_since_s + (ends_s - owned_since_s) / 2)


def next_step(seen: Situation) -> Step:
    """What the owner does about the handover."""
    match seen.successor:
        case Successor.UNKNOWN | Successor.WAITING:
            return Step.WAIT
        case Successor.ALIVE:
            since_s = seen.now_s if seen.alive_since_s is None else seen.alive_since_s
            return Step.REPLACE if seen.now_s - since_s > seen.start_limit_s else Step.WAIT
    if seen.due_s is None or seen.now_s < max(seen.due_s, seen.again_s):
        return Step.WAIT
    return Step.SUBMIT if seen.tries < MAX_TRIES else Step.GIVE_UP


def waits_for(successor: Successor, *, since_s: float, left_s: float, whole_s: float) -> bool:
    """Whether a stop goes on serving instead of draining, since a successor may take over in time.

    Args:
        since_s: seconds since the stop began.
        left_s: seconds that are left of it.
        whole_s: seconds that it had.
    """
    if left_s <= max(LEAST_DRAIN_S, DRAIN_SHARE * whole_s):
        return False
    return successor is Successor.ALIVE or (successor is not Successor.GONE and since_s < SETTLE_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The replicas and routers of a candidate."""

    ready: int
    down: int
    """Replicas that have given up."""

    expected: int
    routers: int
    routers_wanted: int

    def suffices(self, least_share: float) -> bool:
        """Whether it can take over: all are ready, but for those that have given up, if enough are left."""
        if self.routers < self.routers_wanted or self.ready == 0:
            return False
        return self.ready + self.down >= self.expected and self.ready >= least_share * self.expected
