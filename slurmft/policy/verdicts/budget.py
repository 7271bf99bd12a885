"""The budget spent by a run's history: failures by cause, and ends in a row without progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurmft.policy.verdicts.decide import PATIENT, Budget
from slurmft.policy.verdicts.symptoms import bug_of
from slurmft.policy.verdicts.verdict import BUDGETED, Cause, Verdict

DEFAULT_KNOB = "fault_tolerance.num_job_retries_on_failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class PastEnd:
    """One earlier end of the run, oldest first."""

    cause: str
    """As the journal has it; one that is not known counts as a failure of its own kind."""

    progressed: bool = False
    """It had saved a new step."""

    first_step: int | None = None
    """Step it had resumed from; None where it did not come that far."""

    bug: str = ""
    """The exception that it ended with, soon and before any step (``symptoms.bug_of``)."""

    restarted_in: str | None = None
    """The start of the job within which it was followed by a restart; None where none followed."""

    given_up: bool = False
    """The run was stopped by a decision: the user who resubmitted it has looked at it, and the count begins anew."""


def budget_for(
    verdict: Verdict,
    past: Iterable[PastEnd],
    *,
    retries: int,
    retries_of: Mapping[Cause, int],
    max_no_progress_cycles: int,
    restarts: int = 0,
    job_start: str = "",
) -> Budget:
    """The budget that the run had spent before ``verdict``, and its limits.

    Ends that a restart within the same start of the job followed count as restarts alone: only requeues spend retries.
    """
    spent: Counter[str] = Counter()
    idle = lost = restarted = lost_restarts = 0
    ends = list(past)
    for end, is_lost in zip(ends, _lost(ends, verdict), strict=True):
        if end.given_up or (end.progressed and not is_lost):
            spent.clear()
            idle = lost = restarted = lost_restarts = 0
        if end.given_up:
            continue
        if end.restarted_in is not None:
            here = end.restarted_in == job_start
            restarted, lost_restarts = restarted + here, lost_restarts + (here and is_lost)
            continue
        if end.cause in _COUNTED or end.cause not in _KNOWN:
            spent[end.cause] += 1
        if end.cause not in _PATIENT and end.cause != Cause.STOPPED_BY_USER.value:
            idle += not end.progressed or is_lost
            lost += is_lost
    if verdict.progressed:
        spent.clear()
        idle, restarted = lost, lost_restarts
    own = retries_of.get(verdict.cause)
    newest = next((end for end in reversed(ends) if end.given_up or end.cause not in _PATIENT), PastEnd(cause=""))
    bug = bug_of(verdict.traceback) if verdict.last_step <= verdict.first_step else ""
    return Budget(
        failures_so_far=spent[verdict.cause.value],
        max_failures=retries if own is None else own,
        knob=DEFAULT_KNOB if own is None else f"fault_tolerance.retries: {verdict.cause.value}",
        idle_cycles=idle,
        lost_cycles=lost,
        max_no_progress_cycles=max_no_progress_cycles,
        restarts_so_far=restarted,
        max_restarts=restarts,
        is_same_bug=bool(bug) and newest.bug == bug,
    )


def _lost(ends: Sequence[PastEnd], verdict: Verdict) -> list[bool]:
    """Ends whose saves were of no use: the run came back to the step that they had begun at."""
    lost = []
    began = verdict.first_step if verdict.last_step or verdict.saved_step is not None else None
    for end in reversed(ends):
        came_back = end.first_step is not None and began is not None and began <= end.first_step
        lost.append(end.progressed and came_back)
        if end.given_up:  # the user may have deleted the checkpoints
            began = None
        elif end.first_step is not None:
            began = end.first_step
    return lost[::-1]


_KNOWN = frozenset(cause.value for cause in Cause)
_COUNTED = frozenset(cause.value for cause in BUDGETED)
_PATIENT = frozenset(cause.value for cause in PATIENT)
