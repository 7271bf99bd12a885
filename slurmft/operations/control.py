"""Acting on a run from outside its job: stop it, send it through the queue, ask it for a save."""

from __future__ import annotations

from collections.abc import Mapping

from slurmft.errors import SlurmUnavailable, UsageError
from slurmft.policy.job_identity import OwnJob
from slurmft.scheduler import own_jobs
from slurmft.scheduler.parsing import JobRecord
from slurmft.storage import run_folder
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder, progress_of
from slurmft.supervisor.owner import process_here

NEWEST = 20
"""The newest jobs of a run that Slurm is asked about; earlier ones have ended long ago."""


def records_of(run: RunFolder) -> dict[OwnJob, JobRecord]:
    """The run's newest jobs as Slurm knows them, oldest first.

    Raises:
        SlurmUnavailable: Slurm did not answer.
        StorageError: the folder is a copy of another run's, whose jobs it names.
    """
    run.refuse_copy()
    return own_jobs.find(run.own_jobs(newest=NEWEST))


def is_unseen(run: RunFolder, records: Mapping[OwnJob, JobRecord]) -> bool:
    """Whether the run's supervisor gives signs of life although Slurm does not know its job.

    Raises:
        StorageError: the run folder cannot be read or written.
    """
    owner = run.owner()
    if owner is None or owner.cluster == "local" or any(job.job_id == owner.job for job in records):
        return False
    return run.done() is None and run_folder.is_fresh(run, owner)


def is_alive(run: RunFolder) -> bool:
    """Whether the run has a job with nodes, a process on this machine, or a live supervisor that Slurm does not list.

    Raises:
        SlurmUnavailable: Slurm did not answer.
    """
    owner = run.owner()
    if process_here(run, owner) is not None:
        return True
    if owner is not None and owner.cluster == "local":
        return False
    records = records_of(run)
    return any(record.alive for record in records.values()) or is_unseen(run, records)


def stop(run: RunFolder, who: str) -> str:
    """Ask a running run to save and end, cancel its waiting job; returns what was done, in words.

    Raises:
        SlurmError: Slurm refused or did not answer.
        StorageError: the run folder cannot be written, or is a copy.
    """
    run.refuse_copy()
    run.request("KILL", who)  # first: it needs no Slurm, and a job that starts in between finds it
    journal = run.journal()
    journal.append(EventName.STOP_ASKED_FOR, who=who)
    try:
        waiting = [job for job, record in records_of(run).items() if record.waiting]
        for job in waiting:
            own_jobs.cancel(job)
        if is_alive(run):
            return what_a_stop_does(run)
    except SlurmUnavailable as error:
        return f"run {run.path.name} will save and end, if it runs: {error.what}"
    run.take_request("KILL")
    ids = [job.job_id for job in waiting]
    if run.done() is None:  # also where nothing waits: a run that has lost its job must not be rescued any more
        journal.append(EventName.CANCELLED, jobs=ids, reason=f"cancelled by {who}")
    return f"cancelled the waiting job {', '.join(ids)}" if waiting else f"run {run.path.name} is not running"


def what_a_stop_does(run: RunFolder) -> str:
    """What is to be expected of a run that was asked to stop, in words: not every script can be made to save."""
    if has_session(run):
        return f"run {run.path.name} will save and end"
    return (
        f"run {run.path.name} gets SIGTERM and ends: its workers have not called slurmft, so only what the "
        "script saves by itself is kept, and the next start goes on from that"
    )


def has_session(run: RunFolder) -> bool:
    """Whether workers of the newest attempt use a session, through which they save; also where that is unknown yet."""
    facts = progress_of(run)
    starts = [event.attempt for event in run.journal().read() if event.event == EventName.ATTEMPT_STARTED]
    is_of_this_attempt = bool(starts) and facts.attempt == starts[-1]
    return not (is_of_this_attempt and facts.state == "running" and facts.step is None)


def requeue(run: RunFolder, who: str) -> str:
    """Send the run through the queue: a waiting job begins now, a running one saves and requeues; says which.

    Raises:
        SlurmError: Slurm refused or did not answer.
        UsageError: the run has no job.
    """
    for job, record in records_of(run).items():
        if record.waiting:
            return _begin_now(run, job, record, who)
    if not is_alive(run):
        if run.done() is not None:
            raise UsageError(f"run {run.path.name} is finished")
        raise UsageError(f"run {run.path.name} is not running", hint=f"slurmft submit {run.config} continues it")
    run.request("REQUEUE", who)
    return f"run {run.path.name} will save and requeue"


def _begin_now(run: RunFolder, job: OwnJob, record: JobRecord, who: str) -> str:
    if "held" in record.reason.lower() or record.state == "REQUEUE_HOLD":
        own_jobs.release(job)
    own_jobs.begin_in(job, own_jobs.SOONEST_S)
    run.journal().append(EventName.BEGIN_NOW, job=job.job_id, who=who)
    return f"job {job} may begin now"
