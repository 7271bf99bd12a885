"""At which tick all ranks stop: the arithmetic of the agreement (design, ordering rule 5).

A *tick* is a safe point of a worker: a step boundary, or a batch of an evaluation. It is one integer,
``step << SUB_BITS | sub``: all ticks of one step name the same training state, so ranks that stop at different ticks of
one step still stop at the same state. A worker first publishes the tick it has reached, then compares it with the
proposed one; whoever reaches the proposal waits until it is committed or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SUB_BITS = 20
NOT_STARTED = -1
"""The worker has not reached its first step boundary."""

END = 1 << 61
"""The worker has left its training loop for good."""

NEVER = 1 << 62
"""No stop is proposed."""

LAST_SUB = (1 << SUB_BITS) - 1


def tick_of(step: int, sub: int = 0) -> int:
    """The tick of safe point ``sub`` of ``step``; an evaluation longer than 2**20 batches stays at the last one."""
    return step << SUB_BITS | min(sub, LAST_SUB)


def step_of(tick: int) -> int:
    """The step a tick belongs to; NOT_STARTED stays negative."""
    return tick >> SUB_BITS


@dataclass(frozen=True, slots=True)
class NothingToSave:
    """Some rank never reached its first boundary, so no step can have completed: stop at once."""


@dataclass(frozen=True, slots=True)
class Finishing:
    """Some rank has left its loop: all others will, so let them."""


@dataclass(frozen=True, slots=True)
class ByThemselves:
    """The workers do not use ``slurmft.session``: they have the signal, wait for them."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """Propose this tick to every rank."""

    tick: int


Plan = NothingToSave | Finishing | ByThemselves | StopAt


@dataclass(frozen=True, slots=True)
class Look:
    """What an agent read from one worker's page."""

    attached: bool
    """The worker uses ``slurmft.session``."""

    tick: int
    alive: bool
    holding: int = NOT_STARTED
    """The proposal at which the worker waits for the commit."""


def plan_stop(looks: Sequence[Look], tries: int = 0) -> Plan:
    """The next step of the agreement, given one look at every rank.

    The first proposal is the next tick of the rank that is furthest. Each retry (a rank had passed the proposal before
    it arrived, because steps are shorter than a round trip) doubles the distance, so the agreement always ends.
    """
    if not any(look.attached for look in looks):
        return ByThemselves() if any(look.alive for look in looks) else NothingToSave()
    ticks = [look.tick for look in looks]
    if max(ticks) >= END:
        return Finishing()
    if min(ticks) <= NOT_STARTED:
        return NothingToSave()
    furthest = max(ticks)
    if tries == 0:
        return StopAt(furthest + 1)
    return StopAt(tick_of(step_of(furthest) + (1 << tries)))


def passed(looks: Sequence[Look], proposal: int) -> bool:
    """Whether some rank may have gone by ``proposal`` without seeing it.

    A rank *at* the proposal may have compared just before it was written, so only a smaller tick, or the rank's own
    word that it waits there, is proof.
    """
    return any(look.tick >= proposal and look.holding != proposal for look in looks)
