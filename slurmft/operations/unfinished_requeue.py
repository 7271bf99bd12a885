"""Finishes, from outside, a requeue whose process died halfway: the job's excluded nodes and its begin time."""

from __future__ import annotations

from collections.abc import Sequence

from slurmft.errors import ConfigError, SlurmError, SlurmUnavailable
from slurmft.operations.run_configuration import configuration_of
from slurmft.policy.site.job_identity import OwnJob
from slurmft.scheduler import own_jobs, queueing
from slurmft.scheduler.nodes import compress
from slurmft.scheduler.parsing.parsing import JobRecord, is_held_by_requeue
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.recovery.place_elsewhere import Placement, duty_of, expanded, next_placement, ours

_TRANSACTION = frozenset({EventName.REQUEUEING, EventName.REQUEUED, EventName.PLACED, EventName.REQUEUE_FAILED})


def placement_of(run: RunFolder, *, partition: str, job: OwnJob | None, history: Sequence[Event]) -> Placement | None:
    """Nodes that the run's next placement must avoid; None where there are none."""
    try:
        config = configuration_of(run)
    except ConfigError:  # it was readable when the run was submitted; its excluded nodes are in the script
        return None
    suspects = sorted(duty_of(history).undecided)
    return next_placement(config, partition=partition, job=job, history=history, suspects=suspects)


def complete(run: RunFolder, job: OwnJob, record: JobRecord, who: str) -> str | None:
    """Finish the requeue of a waiting job whose supervisor ended in the middle of it; says what was done.

    A job that waits has no process left, so no supervisor can be doing the same. May be done twice.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    events = run.journal().read()
    mine = [event for event in events if event.event in _TRANSACTION and event.details.get("job") == record.job_id]
    began = mine[-1] if mine and mine[-1].event == EventName.REQUEUEING else None
    if began is not None:
        excluded = began.details.get("excluded")
        avoid = None if excluded is None else expanded(excluded)
        done = queueing.place(job, queueing.SOONEST_S, avoid=avoid)
        if is_held_by_requeue(record.reason):  # by ``requeue_ended``; a job that a user holds stays held
            own_jobs.release(job)
        run.journal().append(EventName.REQUEUED, job=record.job_id, who=who, **done.in_words())
        return f"finished the requeue of job {record.job_id}" + (f", which keeps off {excluded}" if excluded else "")
    if record.reason == "BadConstraints" and (added := ours(events, record.job_id)):
        left = own_jobs.named_nodes(job).excluded - added
        done = queueing.place(job, queueing.SOONEST_S, avoid=left)
        run.journal().append(EventName.EXCLUSIONS_DROPPED, job=record.job_id, nodes=sorted(added), who=who,
                             **done.in_words())  # fmt: skip
        return f"job {record.job_id} could not be placed without {compress(added)}; they are not excluded any more"
    return None


def bring_back(run: RunFolder, job: OwnJob, placement: Placement | None, *, in_memory: bool) -> str | None:
    """Put a job that has ended back into the queue; its id, or None when Slurm does not, or has forgotten it.

    Raises:
        SlurmUnavailable: Slurm did not answer; the job may be held, and ``complete`` releases it.
    """
    if not in_memory:
        return None
    journal = run.journal()
    excluded = {} if placement is None else {"excluded": compress(placement.excluded)}
    journal.append(EventName.REQUEUEING, job=job.job_id, delay_s=queueing.SOONEST_S, **excluded)
    try:
        done = queueing.requeue_ended(job, queueing.SOONEST_S, avoid=None if placement is None else placement.excluded)
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        journal.append(EventName.REQUEUE_FAILED, job=job.job_id, reason=error.what)
        return None
    journal.append(EventName.REQUEUED, job=job.job_id, **done.in_words())
    return job.job_id
