"""How a run stops: the time that a stop needs and has, at which tick all ranks stop; and how often agents report,
before silence means a loss.

A *tick* is a safe point of a worker: a step boundary, or a batch of an evaluation. It is one integer, ``step <<
SUB_BITS | evaluation << BATCH_BITS | batch``: all ticks of one step name the same training state, so ranks that stop
at different ticks of one step still stop at the same state. The end of an evaluation is the last tick of its block,
so that ranks with fewer batches meet the others there. A worker first publishes the tick it has reached, then
compares it with the proposed one; a worker that reaches the proposal waits until it is committed or moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from slurmft.policy.verdict import Cause

# --- The arithmetic of time around a stop: the time that it needs, that Slurm leaves it, and that remains ---
# Two clocks meet here, Slurm's and the node's. Differences are taken on one of them: Slurm's own times give the
# length of a grace, the node's monotonic clock how much of it has passed. Only where that is not enough are the two
# compared, and an impossible difference is not believed.

SLURM_JITTER_S = 30.0
"""``--signal=TERM@N`` comes up to 30 s early, never late (Slurm checks its jobs in that rhythm)."""

REQUEUE_COST_S = 3.0
"""Two ``scontrol`` calls, the end of the step, and a retry."""

NOTICE_S = 5.0
"""A signal is noticed within this time of being sent, where there is anything to save."""

KILL_WAIT_S = 30.0
"""Slurm's default for the time between the TERM and the KILL with which it ends a job."""

END_ROUNDING_S = 2.0
"""Slurm's times are whole seconds, and start and limit may be rounded apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTimes:
    """Unix times of a job as Slurm reports them, all of Slurm's clock; None where it does not know."""

    start: float | None
    end: float | None
    limit_s: float | None
    preempted: float | None = None
    """When a preemption's grace began."""

    @property
    def grace_s(self) -> float | None:
        """Seconds a preemption leaves the job; None when no preemption is known."""
        if self.preempted is None or self.start is None or self.end is None or self.preempted < self.start:
            return None
        # a gang scheduler that suspends a job notes the time, too, and leaves its end where it was
        return self.end - self.preempted if self._ends_early and self.end > self.preempted else None

    @property
    def _ends_early(self) -> bool:
        if self.start is None or self.end is None:
            return False
        return self.limit_s is None or self.end < self.start + self.limit_s - END_ROUNDING_S


@dataclass(frozen=True, slots=True)
class SlurmClock:
    """Slurm's clock, read once and kept by this machine's monotonic one.

    A node's own clock may be hours off, or be set while the job runs; this one goes on.
    """

    unix_s: float
    monotonic_s: float

    def at(self, monotonic_s: float) -> float:
        """Slurm's Unix time at that moment of the monotonic clock."""
        return self.unix_s + monotonic_s - self.monotonic_s


@dataclass(frozen=True, slots=True)
class Terms:
    """How a site ends jobs."""

    clock: SlurmClock
    """The clock of its times."""

    kill_wait_s: float = KILL_WAIT_S

    has_epilog: bool = True
    """Whether a script of the site's runs after each job, for a time that is not known."""


def cause_of_signal(times: JobTimes, *, now: float, lead_s: float) -> Cause:
    """Why a TERM came at ``now`` (of Slurm's clock): Slurm does not say, but its end time does.

    A preemption moves the end time to the end of the grace, before the limit; the time-limit warning comes at most
    lead + jitter before an end that *is* the limit; any other signal was sent by a user.
    """
    if times.end is None or times.start is None:
        return Cause.SIGNALLED
    if times._ends_early:
        return Cause.PREEMPTED
    if times.end - now <= lead_s + SLURM_JITTER_S + END_ROUNDING_S:
        return Cause.TIME_LIMIT
    return Cause.SIGNALLED


def seconds_for_stop(times: JobTimes, *, cause: Cause, now: float, lead_s: float, timeout_s: float) -> float:
    """Seconds from the signal at ``now`` until the workers must be gone so that the requeue still fits; at least 1.

    ``now`` should be of Slurm's clock (``SlurmClock``), and is believed only as far as it can be true: a clock that is
    an hour ahead would leave no time for a save that fits, one that is behind would let Slurm end it in the middle.
    ``timeout_s`` is for a stop that nothing hurries.
    """
    low, high = _bounds_s(times, cause=cause, lead_s=lead_s, timeout_s=timeout_s)
    left = high if times.end is None else min(high, max(low, times.end - now))
    return max(1.0, left - REQUEUE_COST_S)


def seconds_in_kill_wait(kill_wait_s: float) -> float:
    """Seconds, from when Slurm ends the job, until the workers must be gone so that what follows is done before KILL.

    Workers that ignore TERM live on until then: srun, which gets TERM too, asks the controller to kill its step, and
    that refuses it for a job that is ending already.
    """
    return max(1.0, kill_wait_s - REQUEUE_COST_S)


def _bounds_s(times: JobTimes, *, cause: Cause, lead_s: float, timeout_s: float) -> tuple[float, float]:
    """At least and at most so many seconds lie between the signal and the end of the job, independent of clocks."""
    if cause is Cause.PREEMPTED and times.grace_s is not None:
        return times.grace_s - NOTICE_S, times.grace_s  # Slurm signals at the beginning of the grace
    if cause is Cause.TIME_LIMIT:
        # a limit shorter than that makes Slurm signal whenever it first looks
        high_s = lead_s + SLURM_JITTER_S
        return lead_s if times.limit_s is None or times.limit_s > high_s else 0.0, high_s
    return min(lead_s, timeout_s), timeout_s


class Severity(StrEnum):
    """Whether a finding is a fact or a warning; ``--strict`` refuses warnings."""

    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about the grace budget, with its numbers."""

    severity: Severity
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GraceNeed:
    """The needs of a stop of this workload, as measured earlier; None where nothing was."""

    longest_step_s: float | None = None
    """Longest time between two moments at which a stop is possible."""

    save_s: float | None = None
    """99th percentile of the saves."""

    cut_off: bool = False
    """``save_s`` is how far a longer save had got when it was cut off."""

    start_s: float | None = None
    """From the start of a job to the end of its first step."""

    step_s: float | None = None
    """Mean time of a step with all that goes with it, to state the cost of a lost one."""

    interval_steps: int = 0
    """Steps between two periodic checkpoints; 0: there are none, or they are spaced by time."""

    interval_s: float = 0.0
    """Seconds between two periodic checkpoints, at most; 0 where they are spaced by steps."""

    @property
    def known(self) -> bool:
        """Both parts that count have been measured."""
        return self.longest_step_s is not None and self.save_s is not None

    @property
    def lead_s(self) -> int:
        """The least sufficient ``preemption.signal_lead_s``."""
        return math.ceil((self.total_s + NOTICE_S) / 10) * 10

    @property
    def total_s(self) -> float:
        """Seconds from the signal to the requeue; unknown parts count as 0."""
        return (self.longest_step_s or 0.0) + (self.save_s or 0.0) + REQUEUE_COST_S

    def fits(self, seconds: float) -> bool:
        """Whether a stop can be done within that time, as far as is known."""
        return self.total_s + (NOTICE_S if self.cut_off else 0.0) <= seconds

    def __str__(self) -> str:
        save = "a save that was cut off at" if self.cut_off else "p99 save"
        parts = (("longest step", self.longest_step_s), (save, self.save_s), ("requeue", REQUEUE_COST_S))
        told = ", ".join(f"{name} {'unknown' if value is None else _number(value)}" for name, value in parts)
        at_least = "at least " if self.cut_off or not self.known else ""
        return f"a stop needs {at_least}{_number(self.total_s)} s ({told})"

    @property
    def at_risk(self) -> str:
        """The work that is repeated when a stop's save fails."""
        if self.interval_s > 0:
            work = f"{_number(self.interval_s)} s of work"
            return f"the newest periodic checkpoint continues, and up to {work} are done again"
        if self.interval_steps == 0:
            return "everything since the newest save of a stop is done again (checkpoint.interval_steps is 0)"
        work = "" if self.step_s is None else f" ({_number(self.interval_steps * self.step_s)} s of work)"
        return f"the newest periodic checkpoint continues, and up to {self.interval_steps} steps{work} are done again"


class Preempts(StrEnum):
    """The effect of a preemption on a job."""

    NEVER = "never"
    """It cannot happen, or needs no save: the job is suspended and goes on later."""

    BY_PARTITION = "by partition"
    """It ends the job, after the partition's GraceTime."""

    BY_QOS = "by QOS"
    """It ends the job, after the GraceTime of its QOS, which is only in the accounting database."""

    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraceOffer:
    """The time that Slurm leaves a job that it ends."""

    lead_s: float
    """``preemption.signal_lead_s``."""

    limit_s: float | None = None
    """Time limit: infinite where there is none, None where it is not known."""

    partition: str = ""
    preempts: Preempts = Preempts.UNKNOWN
    grace_s: float | None = None
    """The partition's GraceTime; None where it is not known."""

    kill_wait_s: float | None = None


def preempts(*, kind: str, mode: str, tier: int | None, tiers: Sequence[int]) -> Preempts:
    """The effect of a preemption on jobs of a partition with this PreemptMode and PriorityTier.

    ``kind`` is the cluster's PreemptType, ``tiers`` those of all partitions: a job of the highest one is never
    preempted. Empty texts are unknown.
    """
    words = set(mode.upper().split(",")) - {"GANG", "WITHIN", "PRIORITY", ""}
    if kind.endswith("none") or (words and words <= {"OFF", "SUSPEND"}):
        return Preempts.NEVER
    if kind.endswith("qos"):
        return Preempts.BY_QOS
    if not words:
        return Preempts.NEVER if "GANG" in mode.upper() else Preempts.UNKNOWN
    if kind.endswith("partition_prio") and tier is not None and tiers and max(tiers) <= tier:
        return Preempts.NEVER
    return Preempts.BY_PARTITION


def findings(need: GraceNeed, offers: Sequence[GraceOffer]) -> list[Finding]:
    """Findings about the grace budget, warnings first; one offer for each partition the job may start in."""
    warnings = [text for offer in offers for text in (*_about_limit(need, offer), *_about_preemption(need, offer))]
    told = [Finding(Severity.WARNING, text) for text in dict.fromkeys(warnings)]
    if not need.known:
        told.append(Finding(Severity.NOTE, "longest step and save are unknown until a run of this workload has saved; "
                                           f"a stop {_summary(offers)}"))  # fmt: skip
    elif not told:
        told.append(Finding(Severity.NOTE, f"{need} and {_summary(offers)}"))
    return told


def _summary(offers: Sequence[GraceOffer]) -> str:
    if not offers:
        return "has an unknown time"
    lead_s = min(offer.lead_s for offer in offers)
    parts = [] if all(offer.limit_s == math.inf for offer in offers) else [f"{_number(lead_s)} s at the time limit"]
    graces = [offer.grace_s for offer in offers if offer.preempts is Preempts.BY_PARTITION]
    known = [grace for grace in graces if grace is not None]
    if known:
        parts.append(f"{_number(min(known))} s at a preemption")
    elif any(offer.preempts is Preempts.BY_QOS for offer in offers):
        parts.append("the GraceTime of its QOS at a preemption (sacctmgr show qos format=Name,GraceTime)")
    elif graces or any(offer.preempts is Preempts.UNKNOWN for offer in offers):
        parts.append("an unknown time at a preemption")
    return f"has {', '.join(parts)}" if parts else "is only requested by hand"


def _about_limit(need: GraceNeed, offer: GraceOffer) -> list[str]:
    if offer.limit_s == math.inf:
        return []
    told = []
    if not need.fits(offer.lead_s):
        told.append(
            f"{need}, but Slurm signals only {_number(offer.lead_s)} s before the time limit: "
            f"set preemption.signal_lead_s to at least {need.lead_s}"
        )
    if offer.limit_s is None:
        return told
    before_s = offer.lead_s + SLURM_JITTER_S
    work_s = (need.start_s or 0.0) + (need.save_s or 0.0)
    if offer.limit_s <= before_s + work_s:
        when = "at the very start" if offer.limit_s <= offer.lead_s else f"as early as {_number(before_s)} s before it"
        work = f", and start-up, first step and a save take {_number(work_s)} s" if work_s else ""
        told.append(
            f"the time limit of {_number(offer.limit_s)} s is too short: Slurm asks for a stop {when} "
            f"(preemption.signal_lead_s {_number(offer.lead_s)}, and up to {_number(SLURM_JITTER_S)} s early){work}; "
            f"set slurm.time to at least {math.floor((before_s + work_s) / 60) + 1} minutes, or a shorter signal_lead_s"
        )
    return told


def _about_preemption(need: GraceNeed, offer: GraceOffer) -> list[str]:
    if offer.preempts is not Preempts.BY_PARTITION or offer.grace_s is None:
        return []
    where = f"a preemption in partition {offer.partition}"
    if offer.grace_s == 0:
        kill_wait = "" if offer.kill_wait_s is None else f", {_number(offer.kill_wait_s)} s"
        return [
            f"{where} leaves no grace (GraceTime 0): a save has KillWait alone{kill_wait}, "
            f"and where that is too short, {need.at_risk}"
        ]
    if not need.fits(offer.grace_s):
        return [
            f"{need}, but {where} leaves {_number(offer.grace_s)} s (GraceTime): the save will not be done in time, "
            f"{need.at_risk}"
        ]
    return []


def _number(seconds: float) -> str:
    return f"{seconds:.1f}".removesuffix(".0")


# --- The begin time of a requeued job, in seconds from now: a delay that was long enough before ---

OTHERS_END_S = 4
"""Added to the begin time when the step did not end in order: its slurmstepds still look for an srun that is gone
(2.5 s were seen), and a begin time that has passed before they end falls back to Slurm's 121 s."""

SHRUNK_S = 6
"""Added once more after a dead node was given back."""

FELL_BACK_S = (118.0, 200.0)
"""Seconds from a requeue to the next start that show a begin time which was over too soon: Slurm's own wait of 121
(``slurmctld/job_mgr.c``, batch_requeue_fini), from the moment at which the job's last node is done, and a scheduler's
interval. A queue that was just that long is taken for it, too; that costs seconds."""

LONGEST_S = 60
"""Where even that was too short, something else takes two minutes at each start."""


def delay_of_requeue(
    asked_s: int, past: Iterable[tuple[int, float]], *, in_order: bool, backs_off_s: int = 0, is_shrunk: bool = False
) -> int:
    """Seconds from a requeue to the begin time to ask for.

    Args:
        asked_s: of the configuration.
        past: as ``delay_that_holds`` takes it.
        in_order: the step has ended in order.
        backs_off_s: failures without progress begin again later.
        is_shrunk: a dead node was given back.
    """
    asked_s += backs_off_s + (0 if in_order else OTHERS_END_S) + (SHRUNK_S if is_shrunk else 0)
    return delay_that_holds(asked_s, past)


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


# --- At which tick all ranks stop: the arithmetic of the agreement ---

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


class Instead(StrEnum):
    """Why no tick is proposed, in the words of the journal."""

    NOTHING_TO_SAVE = "nothing to save"
    """Some rank never reached its first boundary, so no step can have completed: stop at once."""

    FINISHING = "the workers are finishing"
    """Some rank has left its loop: all others will, so let them."""

    BY_THEMSELVES = "the workers stop by themselves"
    """They do not use ``slurmft.session``: they have the signal, wait for them."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """Propose this tick to every rank."""

    tick: int


Plan = Instead | StopAt


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
        return Instead.BY_THEMSELVES if any(look.alive for look in looks) else Instead.NOTHING_TO_SAVE
    ticks = [look.tick for look in looks]
    if max(ticks) >= END:
        return Instead.FINISHING
    if min(ticks) <= NOT_STARTED:
        return Instead.NOTHING_TO_SAVE
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
