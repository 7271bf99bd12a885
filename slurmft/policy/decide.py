"""The runbook: verdict and history in, decision out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmft.policy.exit_actions import ExitAction, explicit_action
from slurmft.policy.verdict import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_RERUN_ELSEWHERE,
    EXIT_TEMPORARY,
    EXIT_UNSAVED,
    EXIT_USAGE,
    PLANNED,
    Action,
    Cause,
    Decision,
    Verdict,
)

HOPELESS = frozenset({EXIT_USAGE, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND})
"""Exit codes that another try, on whatever node, would only repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What the run may still spend."""

    failures_so_far: int
    """Unplanned ends since the run last made progress."""

    max_failures: int
    """``fault_tolerance.num_job_retries_on_failure``."""

    stops_without_progress: int = 0
    """Planned stops in a row after which no new step had been saved."""

    max_no_progress_cycles: int = 3


def decide(verdict: Verdict, budget: Budget, exit_actions: Mapping[ExitAction, str] | None = None) -> Decision:
    """What follows ``verdict``. A planned stop and exit 16 never spend the failure budget."""
    has_code = verdict.cause is Cause.FINISHED or (verdict.exit_code != 0 and verdict.cause not in PLANNED)
    action = explicit_action(verdict.exit_code, exit_actions or {}) if has_code else None
    if action is ExitAction.COMPLETE or (action is None and verdict.cause is Cause.FINISHED):
        return Decision(action=Action.FINISH, reason=verdict.reason, exit_code=0)
    if action is ExitAction.FAIL:
        return Decision(
            action=Action.STOP,
            reason=f"exit_actions maps {verdict.exit_code} to FAIL: {verdict.reason}",
            exit_code=verdict.exit_code,
        )
    if verdict.cause in PLANNED:
        return _after_planned_stop(verdict, budget)
    if verdict.cause is Cause.CANCELLED:
        return Decision(action=Action.STOP, reason=verdict.reason, exit_code=EXIT_TEMPORARY)
    if verdict.cause is Cause.VALIDATION_FAILED and action is None:
        return Decision(action=Action.STOP, reason=verdict.reason, exit_code=verdict.exit_code)
    if verdict.cause is Cause.RERUN_ELSEWHERE and action is None:
        return Decision(action=Action.CONTINUE, reason=verdict.reason, exit_code=EXIT_RERUN_ELSEWHERE)
    if verdict.cause is Cause.WORKER_ERROR and verdict.exit_code in HOPELESS and action is None:
        reason = f"{verdict.reason}; bad usage, bad input or a missing program fails again wherever it is tried"
        return Decision(action=Action.STOP, reason=reason, exit_code=verdict.exit_code)
    return _after_failure(verdict, budget)


def _after_planned_stop(verdict: Verdict, budget: Budget) -> Decision:
    code = EXIT_UNSAVED if verdict.unsaved_steps else EXIT_TEMPORARY
    if verdict.cause is Cause.STOPPED_BY_USER:
        return Decision(action=Action.STOP, reason=verdict.reason, exit_code=code)
    if verdict.cause is Cause.TIME_LIMIT and not verdict.progressed and _exhausted(budget):
        return Decision(
            action=Action.STOP,
            reason=f"{budget.stops_without_progress + 1} time limits in a row without a new step; "
            "the limit is too short for one step and a save (slurm.time)",
            exit_code=EXIT_DO_NOT_REQUEUE,
        )
    return Decision(action=Action.CONTINUE, reason=verdict.reason, exit_code=code)


def _exhausted(budget: Budget) -> bool:
    return budget.stops_without_progress + 1 >= budget.max_no_progress_cycles


def _after_failure(verdict: Verdict, budget: Budget) -> Decision:
    if budget.failures_so_far >= budget.max_failures:
        return Decision(
            action=Action.STOP,
            reason=f"{verdict.reason}; {budget.failures_so_far + 1} failures without progress are more than "
            f"fault_tolerance.num_job_retries_on_failure={budget.max_failures} retries",
            exit_code=verdict.exit_code or EXIT_DO_NOT_REQUEUE,
        )
    return Decision(
        action=Action.CONTINUE,
        reason=f"{verdict.reason}; retry {budget.failures_so_far + 1} of {budget.max_failures}",
        exit_code=verdict.exit_code or EXIT_TEMPORARY,
    )
