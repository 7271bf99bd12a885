"""The arithmetic of the time that is left when Slurm asks for a stop."""

from __future__ import annotations

from dataclasses import dataclass

from slurmft.policy.verdict import Cause

SLURM_JITTER_S = 30.0
"""``--signal=TERM@N`` comes up to 30 s early, never late (Slurm checks its jobs in that rhythm)."""

REQUEUE_COST_S = 3.0
"""Two ``scontrol`` calls, the end of the step, and a retry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTimes:
    """Unix times of a job as Slurm tells them; None where it does not know."""

    start: float | None
    end: float | None
    limit_s: float | None


def cause_of_signal(times: JobTimes, *, now: float, lead_s: float) -> Cause:
    """Why a TERM came: Slurm does not say, but its end time does.

    A preemption moves the end time to the end of the grace, before the limit; the time-limit warning comes at most
    lead + jitter before an end that *is* the limit; anything else was sent by somebody.
    """
    if times.end is None or times.start is None:
        return Cause.SIGNALLED
    limit_end = None if times.limit_s is None else times.start + times.limit_s
    if limit_end is None or times.end < limit_end - 2.0:
        return Cause.PREEMPTED
    if times.end - now <= lead_s + SLURM_JITTER_S + 2.0:
        return Cause.TIME_LIMIT
    return Cause.SIGNALLED


def time_left_s(times: JobTimes, *, now: float, lead_s: float) -> float:
    """Seconds until the workers must be gone so that the requeue still fits; at least 1.

    Without an end time the configured lead is all that is known.
    """
    end = now + lead_s if times.end is None else times.end
    return max(1.0, end - now - REQUEUE_COST_S)
