"""Acting on a run from outside its job: what people and cron do when the supervisor cannot, or is not there."""

from __future__ import annotations

import contextlib
import time

from slurmft.errors import SlurmError, SlurmUnavailable, StorageError
from slurmft.launch.run import owner_lives
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import JobRecord, expand_hostlist
from slurmft.storage.run_folder import Attempt, RunFolder

BEGIN_PATIENCE_S = 60.0


def records_of(run: RunFolder) -> list[JobRecord]:
    """The run's newest jobs as Slurm knows them.

    Raises:
        SlurmUnavailable: Slurm did not answer.
    """
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
    """
    journal = run.journal()
    journal.append("stop asked for", who=who)
    run.request("KILL", who)  # first: it needs no Slurm, and a job that starts in between finds it
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


def requeue(run: RunFolder, who: str, *, only_rescue: bool) -> str:
    """Bring the run back into, or through, the queue; returns what was done, in words.

    A job that has lost its batch script is requeued. Unless ``only_rescue``: a waiting job is made to begin now, a
    running one is asked to save and requeue.

    Raises:
        SlurmError: Slurm refused or did not answer.
        StorageError: the run has no job.
    """
    records = records_of(run)
    for record in records:
        if is_orphan(record):
            return _rescue(run, record, who)
    if only_rescue:
        return f"no job of run {run.path.name} needs to be rescued"
    for record in records:
        if record.waiting:
            return _begin_now(run, record, who)
    if not is_alive(run):
        raise StorageError(f"run {run.path.name} is not running", hint=f"slurmft submit {run.config} continues it")
    run.request("REQUEUE", who)
    return f"run {run.path.name} will save and requeue"


def is_orphan(record: JobRecord) -> bool:
    """Under --no-kill a job whose batch host died stays RUNNING without its script until its time limit."""
    lost = bool(record.batch_host) and record.batch_host not in expand_hostlist(record.nodes)
    return record.state == "RUNNING" and lost


def _begin_now(run: RunFolder, record: JobRecord, who: str) -> str:
    if "held" in record.reason.lower() or record.state == "REQUEUE_HOLD":
        slurm.release(record.job_id)
    slurm.begin_in(record.job_id, 0)
    run.journal().append("begin now", job=record.job_id, who=who)
    return f"job {record.job_id} may begin now"


def _rescue(run: RunFolder, record: JobRecord, who: str) -> str:
    owner = run.owner()
    restart = owner.restart if owner is not None and owner.job == record.job_id else 0
    journal = run.journal()
    if not run.claim_ending(Attempt(job=record.job_id, restart=restart), who):
        return f"somebody else is already rescuing job {record.job_id}"
    journal.append("rescuing", job=record.job_id, lost_batch_host=record.batch_host, nodes=record.nodes, who=who)
    slurm.requeue(record.job_id, delay_s=2)
    _begin_when_pending(record.job_id)
    journal.append("requeued", job=record.job_id, who=who)
    return f"job {record.job_id} had lost its batch host {record.batch_host}; it is requeued"


def _begin_when_pending(job_id: str) -> None:
    """From outside, a requeued job that is pending can be started at once instead of after 121 s."""
    deadline = time.monotonic() + BEGIN_PATIENCE_S
    while time.monotonic() < deadline:
        record = slurm.job(job_id)
        if record is None or record.state == "RUNNING":
            return
        if record.state == "PENDING":
            with contextlib.suppress(SlurmError):  # it began by itself in between, or Slurm is busy: look again
                slurm.begin_in(job_id, 0)
                return
        time.sleep(0.5)
