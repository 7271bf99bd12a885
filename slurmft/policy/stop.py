"""At which tick all ranks stop: the arithmetic of the agreement (design, ordering rule 5); and how often agents report,
before silence means a loss.

A *tick* is a safe point of a worker: a step boundary, or a batch of an evaluation. It is one integer,
``step << SUB_BITS | evaluation << BATCH_BITS | batch``: all ticks of one step name the same training state, so ranks
that stop at different ticks of one step still stop at the same state. The end of an evaluation is the last tick of its
block, so that ranks with fewer batches meet the others there. A worker first publishes the tick it has reached, then
compares it with the proposed one; a worker that reaches the proposal waits until it is committed or moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# --- The begin time of a requeued job, in seconds from now: a delay that was long enough before ---

FELL_BACK_S = (118.0, 200.0)
"""Seconds from a requeue to the next start that show a begin time which was over too soon: Slurm's own wait of 121
(``slurmctld/job_mgr.c``, batch_requeue_fini), from the moment at which the job's last node is done, and a scheduler's
interval. A queue that was just that long is taken for it, too; that costs seconds."""

LONGEST_S = 60
"""Where even that was too short, something else takes two minutes at each start."""


def delay_that_holds(asked_s: int, past: Iterable[tuple[int, float]]) -> int:
    """Seconds to ask for: ``asked_s``, doubled as long as that much was too short before.

    Args:
        past: of each earlier requeue, the delay it had asked for, and the seconds until the job began.
    """
    shortest, longest = FELL_BACK_S
    too_short = {delay_s for delay_s, took_s in past if shortest <= took_s - delay_s <= longest}
    delay_s = max(1, asked_s)
    # ends of another kind need longer delays: one that was too short for them may be enough here
    while delay_s < LONGEST_S and any(delay_s <= short < 2 * delay_s for short in too_short):
        delay_s = min(2 * delay_s, LONGEST_S)
    return asked_s if delay_s == LONGEST_S and LONGEST_S in too_short else max(asked_s, delay_s)


# --- How often agents report: a large fleet must not cost its supervisor more than a small one ---

REPORT_S = 0.5
REPORTS_PER_S = 100
"""A report of 8 ranks costs about 0.3 ms; above that rate agents report less often."""

LONGEST_PING_S = 5.0


def report_interval_s(agents: int) -> float:
    """Seconds between two reports of one agent."""
    return max(REPORT_S, agents / REPORTS_PER_S)


def longest_silence_s(agents: int) -> float:
    """Seconds without a report that are still no sign of a lost agent: two reports may be late."""
    return 3 * report_interval_s(agents)


def ping_interval_s(agents: int, *, lease_s: float) -> float:
    """Seconds between two pings of the supervisor to each agent; four of them fit into a lease."""
    return min(max(LONGEST_PING_S, agents / REPORTS_PER_S), lease_s / 4)


# --- At which tick all ranks stop: the arithmetic of the agreement (design, ordering rule 5) ---

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
