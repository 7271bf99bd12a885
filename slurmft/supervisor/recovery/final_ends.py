"""Makes an end of the run in this job stay one: Slurm is told not to requeue the job, and a start that it makes all the
same ends at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmft.errors import SlurmError
from slurmft.policy.site.job_identity import OwnJob
from slurmft.policy.verdicts.final_ends import End, end_of, why_no_requeue, why_superfluous
from slurmft.policy.verdicts.verdict import Action, Cause
from slurmft.scheduler import own_jobs, queueing
from slurmft.scheduler.command import ignoring_signals
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.patience import PatientJournal
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor.cluster import Cluster, SlurmCluster
from slurmft.supervisor.recovery.requeue import FLUSH_S, restart_of

CONTINUE_BY_NOTHING = "preemption.continue_by is nothing"
"""Reason in the journal of a run that is not continued because its user wants that."""

ASK_S = 4.0
TELL_S = 8.0
"""A Slurm that does not answer delays the end of a job by no more than both."""

_MAYBE_PREEMPTED = frozenset({Cause.PREEMPTED.value, Cause.REQUEUED.value, Cause.SUPERVISOR_LOST.value})
_TOLD = frozenset({EventName.REQUEUE_STAYS_ON, EventName.REQUEUED_MEANWHILE})

log = logging.getLogger(__name__)


def keep_ended(end: End, cluster: Cluster, journal: PatientJournal, history: Iterable[Event]) -> None:
    """Tell Slurm not to requeue the job, where it would undo this end. Call right before the batch script ends."""
    if not isinstance(cluster, SlurmCluster) or end in (End.FINISHED, End.OPEN):
        return
    with ignoring_signals():  # the grace may end now, and its TERM must not reach scontrol
        try:
            job = own_jobs.requeueing(cluster.own, cluster.attempt.restart, patience_s=ASK_S)
        except SlurmError as error:
            log.warning("cannot tell whether Slurm would requeue job %s: %s", cluster.own, error.what)
            job = None
        if reason := why_no_requeue(end, job, was_preempted=was_preempted(history, cluster.attempt)):
            _switch_off(cluster.own, journal, reason)


def _switch_off(job: OwnJob, journal: PatientJournal, reason: str) -> None:
    journal.append(EventName.SWITCHING_REQUEUE_OFF, job=job.job_id, reason=reason)
    journal.flush(FLUSH_S)
    try:
        queueing.forbid_requeue(job, patience_s=TELL_S)
    except SlurmError as error:
        journal.append(EventName.REQUEUE_STAYS_ON, job=job.job_id, reason=error.what)
        log.error("Slurm may requeue job %s, which ends at once then: %s", job, error.what)


def was_preempted(history: Iterable[Event], attempt: Attempt) -> bool:
    """Whether an earlier start of the attempt's job was preempted, or left no word of how it ended."""
    ends: dict[int, str | None] = {}
    for event in history:
        job, restart = restart_of(event)
        if job != attempt.job or restart >= attempt.restart:
            continue
        if event.event == EventName.ATTEMPT_STARTED:
            ends[restart] = None
        elif event.event in (EventName.VERDICT, EventName.STOP_REQUESTED) and ends.get(restart) not in _MAYBE_PREEMPTED:
            ends[restart] = str(event.details.get("cause"))
    return any(cause is None or cause in _MAYBE_PREEMPTED for cause in ends.values())


@dataclass(frozen=True, slots=True)
class Superfluous:
    """A start of a job that is not to train."""

    reason: str
    earlier: str
    """The attempt of the same job after which nothing was to follow in it."""

    end: End
    exit_code: int
    """Of that end."""


def superfluous(history: Sequence[Event], attempt: Attempt, queued_at: float | None) -> Superfluous | None:
    """Why this start is one that Slurm alone wanted; None for one that is to train.

    Args:
        queued_at: Unix time at which Slurm put the job into the queue last; None where it is not known.
    """
    mine = [(restart, event) for event in history for job, restart in [restart_of(event)]
            if job == attempt.job and restart < attempt.restart]  # fmt: skip
    started = [restart for restart, event in mine if event.event == EventName.ATTEMPT_STARTED]
    if not started:
        return None
    last = [event for restart, event in mine if restart >= started[-1]]
    decided = next((event for event in reversed(last) if event.event == EventName.DECISION), None)
    if decided is None:
        return None
    told = any(event.event in _TOLD for event in last)
    end = _end(decided, last)
    lived = (last[0].at.timestamp(), last[-1].at.timestamp())
    reason = why_superfluous(end, lived=lived, queued_at=queued_at, told=told)
    code = decided.details.get("exit_code")
    return Superfluous(reason, decided.attempt, end, code if type(code) is int else 1) if reason else None


def _end(decided: Event, lines: Iterable[Event]) -> End:
    """The end of a start, out of its lines in the journal."""
    try:
        end = end_of(Action(str(decided.details.get("action"))))
    except ValueError:  # of a newer slurmft
        return End.OPEN
    if end is not End.OPEN:
        return end
    for event in lines:
        if event.event == EventName.RESUBMITTED or (event.event == EventName.NOT_CONTINUED and "job" in event.details):
            return End.HANDED_ON
        if event.event == EventName.NOT_CONTINUED and event.details.get("reason") == CONTINUE_BY_NOTHING:
            return End.NOT_CONTINUED
    return End.OPEN
