"""What a run's history has spent: failures by cause, and ends in a row that brought nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurmft.policy.decide import PATIENT, Budget
from slurmft.policy.verdict import BUDGETED, Cause, Verdict

DEFAULT_KNOB = "fault_tolerance.num_job_retries_on_failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class PastEnd:
    """One earlier end of the run, oldest first."""

    cause: str
    """As the journal has it; one that is not known counts as a failure of its own kind."""

    progressed: bool = False
    given_up: bool = False
    """The run was stopped by a decision: whoever submitted it again has looked at it, and the count begins anew."""


def budget_for(
    verdict: Verdict,
    past: Iterable[PastEnd],
    *,
    retries: int,
    retries_of: Mapping[Cause, int],
    max_no_progress_cycles: int,
) -> Budget:
    """What the run had spent before ``verdict``, and may spend in all."""
    spent: Counter[str] = Counter()
    idle = 0
    for end in past:
        if end.progressed or end.given_up:
            spent.clear()
            idle = 0
        if end.given_up:
            continue
        if end.cause in _COUNTED or end.cause not in _KNOWN:
            spent[end.cause] += 1
        if not end.progressed and end.cause not in _PATIENT and end.cause != Cause.STOPPED_BY_USER.value:
            idle += 1
    if verdict.progressed:
        spent.clear()
        idle = 0
    own = retries_of.get(verdict.cause)
    return Budget(
        failures_so_far=spent[verdict.cause.value],
        max_failures=retries if own is None else own,
        knob=DEFAULT_KNOB if own is None else f"fault_tolerance.retries: {verdict.cause.value}",
        idle_cycles=idle,
        max_no_progress_cycles=max_no_progress_cycles,
    )


_KNOWN = frozenset(cause.value for cause in Cause)
_COUNTED = frozenset(cause.value for cause in BUDGETED)
_PATIENT = frozenset(cause.value for cause in PATIENT)
