"""At which tick all ranks stop: the arithmetic of the agreement (design, ordering rule 5).

A *tick* is a safe point of a worker: a step boundary, or a batch of an evaluation. It is one integer,
``step << SUB_BITS | evaluation << BATCH_BITS | batch``: all ticks of one step name the same training state, so ranks
that stop at different ticks of one step still stop at the same state. The end of an evaluation is the last tick of its
block, so that ranks with fewer batches meet the others there. A worker first publishes the tick it has reached, then
compares it with the proposed one; a worker that reaches the proposal waits until it is committed or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BATCH_BITS = 18
SUB_BITS = 26
NOT_STARTED = -1
"""The worker has not reached its first step boundary."""

END = 1 << 61
"""The worker has left its training loop for good; steps, counted from ``base_of`` the first, stay below 2**35."""

NEVER = 1 << 62
"""No stop is proposed."""

LAST_BATCH = (1 << BATCH_BITS) - 1
LAST_EVALUATION = (1 << (SUB_BITS - BATCH_BITS)) - 1


def base_of(start: int) -> int:
    """What an attempt that begins at step ``start`` subtracts from steps before it makes ticks of them: 0 below 2**34.

    So it has a year of a thousand steps a second before it, wherever it begins. All its ranks begin at the same step.
    """
    return start >> 34 << 34


def tick_of(step: int, evaluation: int = 0, batch: int = 0) -> int:
    """The tick of a step's boundary, or of a batch (from 1) of one of its evaluations (from 0).

    Beyond 2**18 batches or 2**8 evaluations ticks do not advance: no stop is possible there before the end.
    """
    sub = min(evaluation, LAST_EVALUATION) << BATCH_BITS | min(batch, LAST_BATCH - 1)
    return step << SUB_BITS | sub


def end_of_evaluation(step: int, evaluation: int) -> int:
    """The tick at which every rank leaves an evaluation, however many batches it had."""
    return step << SUB_BITS | min(evaluation, LAST_EVALUATION) << BATCH_BITS | LAST_BATCH


def step_of(tick: int) -> int:
    """The step a tick belongs to: that many steps are complete there. NOT_STARTED stays negative."""
    return tick >> SUB_BITS


def _evaluation_of(tick: int) -> int | None:
    """Which evaluation of which step a rank is inside of; None where it may be training already."""
    return tick >> BATCH_BITS if 0 < tick & LAST_BATCH < LAST_BATCH else None


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


class Look(NamedTuple):
    """An agent's reading of one worker's page."""

    attached: bool
    """The worker uses ``slurmft.session``."""

    tick: int
    alive: bool
    holding: int = NOT_STARTED
    """The proposal at which the worker waits for the commit."""


def plan_stop(looks: Sequence[Look], tries: int = 0) -> Plan:
    """The next step of the agreement, given one look at every rank.

    When all ranks are inside the same evaluation they stop at its next batch. Otherwise at the next step boundary of
    the rank that is furthest: one that is not evaluating may be inside a step, which it cannot leave. Each retry (a
    rank had passed the proposal before it arrived, because steps are shorter than a round trip) doubles the distance,
    so the agreement always ends.
    """
    if not any(look.attached for look in looks):
        return ByThemselves() if any(look.alive for look in looks) else NothingToSave()
    ticks = [look.tick for look in looks]
    if max(ticks) >= END:
        return Finishing()
    if min(ticks) <= NOT_STARTED:
        return NothingToSave()
    furthest = max(ticks)
    evaluations = {_evaluation_of(tick) for tick in ticks}
    if tries == 0 and len(evaluations) == 1 and None not in evaluations:
        return StopAt(furthest + 1)
    return StopAt(tick_of(step_of(furthest) + (1 << tries)))


def inside_an_evaluation(tick: int) -> bool:
    """Whether the tick is one of an evaluation, which a rank may leave early, and not a step's boundary."""
    return tick != tick_of(step_of(tick))


def all_hold(looks: Sequence[Look], proposal: int) -> bool:
    """Whether every rank waits at ``proposal``."""
    return all(look.holding == proposal for look in looks)


def passed(looks: Sequence[Look], proposal: int) -> bool:
    """Whether some rank may have gone by ``proposal`` without seeing it, or saw it only in a later step.

    A rank *at* the proposal may have compared just before it was written, so only a smaller tick, or the rank's own
    flag that it waits there, is proof.
    """

    def is_safe(look: Look) -> bool:
        if look.tick < proposal:
            return True
        return look.holding == proposal and step_of(look.tick) == step_of(proposal)

    return not all(is_safe(look) for look in looks)
