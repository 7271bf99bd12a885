"""Acting on a run from outside its job: stop it, send it through the queue, ask it for a save."""

from __future__ import annotations

from slurmft.errors import SlurmUnavailable, UsageError
from slurmft.launch.living import owner_lives
from slurmft.scheduler import queueing, slurm
from slurmft.scheduler.parsing import JobRecord
from slurmft.storage.run_folder import RunFolder


def records_of(run: RunFolder) -> list[JobRecord]:
    """The run's newest jobs as Slurm knows them.

    Raises:
        SlurmUnavailable: Slurm did not answer.
        StorageError: the folder is a copy of another run's, whose jobs it names.
    """
    run.refuse_copy()
    job_ids = run.slurm_jobs()[-20:]
    return list(slurm.jobs(job_ids).values()) if job_ids else []


def is_alive(run: RunFolder) -> bool:
    """Whether the run has a job with nodes, or a process on this machine.

    Raises:
        SlurmUnavailable: Slurm did not answer.
    """
    owner = run.owner()
    if owner is not None and owner.cluster == "local":
        return owner_lives(owner)
    return any(record.alive for record in records_of(run))


def stop(run: RunFolder, who: str) -> str:
    """Ask a running run to save and end, cancel its waiting job; returns what was done, in words.

    Raises:
        SlurmError: Slurm refused or did not answer.
        StorageError: the run folder cannot be written, or is a copy.
    """
    run.refuse_copy()
    run.request("KILL", who)  # first: it needs no Slurm, and a job that starts in between finds it
    journal = run.journal()
    journal.append("stop asked for", who=who)
    try:
        waiting = [record.job_id for record in records_of(run) if record.waiting]
        for job_id in waiting:
            slurm.cancel(job_id)
        if is_alive(run):
            return f"run {run.path.name} will save and end"
    except SlurmUnavailable as error:
        return f"run {run.path.name} will save and end, if it runs: {error.what}"
    run.take_request("KILL")
    if waiting:
        journal.append("cancelled", jobs=waiting, reason=f"cancelled by {who}")
        return f"cancelled the waiting job {', '.join(waiting)}"
    return f"run {run.path.name} is not running"


def requeue(run: RunFolder, who: str) -> str:
    """Send the run through the queue: a waiting job begins now, a running one saves and requeues; says which.

    Raises:
        SlurmError: Slurm refused or did not answer.
        UsageError: the run has no job.
    """
    for record in records_of(run):
        if record.waiting:
            return _begin_now(run, record, who)
    if not is_alive(run):
        if run.done() is not None:
            raise UsageError(f"run {run.path.name} is finished")
        raise UsageError(f"run {run.path.name} is not running", hint=f"slurmft submit {run.config} continues it")
    run.request("REQUEUE", who)
    return f"run {run.path.name} will save and requeue"


def _begin_now(run: RunFolder, record: JobRecord, who: str) -> str:
    if "held" in record.reason.lower() or record.state == "REQUEUE_HOLD":
        slurm.release(record.job_id)
    queueing.begin_in(record.job_id, queueing.SOONEST_S)
    run.journal().append("begin now", job=record.job_id, who=who)
    return f"job {record.job_id} may begin now"
