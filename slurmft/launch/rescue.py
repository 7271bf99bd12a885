"""Bringing back a run whose supervisor cannot: what people and cron do from outside its jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.errors import SlurmError, SlurmftError, StorageError
from slurmft.launch.completing import bring_back, complete, placement_of
from slurmft.launch.elsewhere import Placement
from slurmft.policy.verdict import GOES_ON, has_progressed
from slurmft.scheduler import queueing, slurm, successor
from slurmft.scheduler.nodes import compress
from slurmft.scheduler.parsing import JobRecord, expand_hostlist
from slurmft.storage.claim import SUPERVISOR
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt, RunFolder

BEGIN_PATIENCE_S = 60.0

log = logging.getLogger(__name__)

SETTLED_S = 30.0
"""For so long a job that Slurm does not know counts as one that Slurm does not know yet."""

MAX_RESCUES = 3
"""Times a run that leaves no verdict is submitted again without any progress in between."""


def rescue(runs: Sequence[RunFolder], who: str) -> list[str]:
    """Bring back those that have lost their supervisor; returns what was done, in words. Asks Slurm once.

    Either a job runs without its batch script, or a run's job is gone although nobody decided that the run ends. What
    one run's rescue meets is logged, and does not keep the others from theirs.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing was changed.
        SlurmftError: the rescue of the only run failed.
    """
    jobs = {run.path: found for run in runs if (found := _jobs_to_ask_about(run))}
    records = slurm.jobs([job for of_run in jobs.values() for job in of_run])
    done = []
    for run in runs:
        mine = [records[job] for job in jobs.get(run.path, []) if job in records]
        try:
            if jobs.get(run.path) and (line := _rescue(run, mine, who)) is not None:
                done.append(line)
        except (SlurmftError, OSError) as error:
            if len(runs) == 1:
                raise
            log.error("run %s: %s", run.path.name, error)
    return done


def _jobs_to_ask_about(run: RunFolder) -> list[str]:
    """The newest jobs of a run that may need a rescue; none where the folder is not to be believed."""
    try:
        run.refuse_copy()
        owner = run.owner()
        if run.done() is not None or owner is None or owner.cluster != "slurm":
            return []
        return run.slurm_jobs()[-20:]
    except (StorageError, OSError) as error:
        log.warning("%s", error)
        return []


def _rescue(run: RunFolder, records: Sequence[JobRecord], who: str) -> str | None:
    for record in records:
        if is_orphan(record):
            return _requeue_orphan(run, record, who)
        if record.waiting and (done := complete(run, record, who)):
            return done
    if any(record.alive or record.waiting for record in records):
        return None
    return _submit_again(run, records, who)


def is_orphan(record: JobRecord) -> bool:
    """Under --no-kill a job whose batch host died stays RUNNING without its script until its time limit."""
    lost = bool(record.batch_host) and record.batch_host not in expand_hostlist(record.nodes)
    return record.state == "RUNNING" and lost


def _requeue_orphan(run: RunFolder, record: JobRecord, who: str) -> str:
    owner = run.owner()
    restart = owner.restart if owner is not None and owner.job == record.job_id else 0
    journal = run.journal()
    claim = run.ending(Attempt(job=record.job_id, restart=restart))
    if not claim.take(who):
        return f"somebody else is already rescuing job {record.job_id}"
    journal.append("rescuing", job=record.job_id, lost_batch_host=record.batch_host, nodes=record.nodes, who=who)
    try:
        queueing.requeue(record.job_id, restart=restart, delay_s=queueing.SOONEST_S)
    except SlurmError:
        claim.give_back()
        raise
    claim.settle("rescued")
    _begin_when_pending(record.job_id)
    journal.append("requeued", job=record.job_id, who=who)
    return f"job {record.job_id} had lost its batch host {record.batch_host}; it is requeued"


def _submit_again(run: RunFolder, records: Sequence[JobRecord], who: str) -> str | None:
    owner, events = run.owner(), run.journal().read()
    if owner is None or not is_unfinished(events, owner.job):
        return None
    states = [record.state for record in records if record.job_id == owner.job]
    if "CANCELLED" in states or (not states and time.time() - events[-1].seconds() < SETTLED_S):
        return None
    if run.see_request("KILL") is not None:
        return None
    if rescues_without_progress(events) >= MAX_RESCUES:
        raise StorageError(
            f"run {run.path.name} ended {MAX_RESCUES} times without a verdict and without progress",
            hint=f"slurmft explain {run.path}, then slurmft submit {run.config}",
        )
    if not states and slurm.cancelled_by(owner.job) is not None:
        return None
    claim = run.ending(Attempt(job=owner.job, restart=owner.restart))
    if states and claim.outcome() == "requeued":  # the start that followed ended before it had taken the run over
        claim = run.ending(Attempt(job=owner.job, restart=owner.restart + 1))
    if not claim.take(who, instead_of=SUPERVISOR if states else ""):  # a job that has ended has no supervisor
        return None
    journal = run.journal()
    journal.append("rescuing", job=owner.job, reason="its job is gone and nobody decided that the run ends", who=who)
    placement = placement_of(run, partition=records[-1].partition if records else "", job=None, history=events)
    try:
        job_id = bring_back(run, owner.job, placement, in_memory=bool(states))
        job_id = job_id or _sbatch(run, owner.job, placement, events)
    except SlurmError:
        claim.give_back()
        raise
    claim.settle(f"rescued as job {job_id}")
    return f"job {owner.job} of run {run.path.name} is gone without a verdict; the run goes on as job {job_id}"


def _sbatch(run: RunFolder, after: str, placement: Placement | None, events: Sequence[Event]) -> str:
    if not run.script.is_file():
        raise StorageError(
            f"job {after} of run {run.path.name} is gone without a verdict, and its batch script was not ours",
            hint="submit it again as you did before; the run goes on from its newest checkpoint",
        )
    folder = next(event.details.get("folder") for event in reversed(events) if event.event == "attempt started")
    options = [] if placement is None else [f"--exclude={compress(placement.excluded)}"]
    job_id = successor.submit_script(
        run.script, after=after, options=options, environment=os.environ, folder=Path(folder or run.path)
    )
    with run.lock():
        run.add_job(job_id)
    run.journal().append("resubmitted", job=job_id, after=after)
    return job_id


def is_unfinished(events: Sequence[Event], job: str) -> bool:
    """Whether the newest attempt, of ``job``, ended without anybody's decision, or was to continue and did not."""
    started = [event for event in events if event.event == "attempt started"]
    if not started or not started[-1].attempt.startswith(f"{job}."):
        return False
    later = [e for e in events if e.attempt == started[-1].attempt or e.seconds() > started[-1].seconds()]
    names = [event.event for event in later]
    if "cancelled" in names or "resubmitted" in names or "submitted" in names:
        return False
    decided = [event for event in later if event.event == "decision"]
    return not decided or decided[-1].details.get("action") in GOES_ON


def rescues_without_progress(events: Sequence[Event]) -> int:
    """Rescues since the run last did a step that was new."""
    count = 0
    for event in events:
        if event.event == "rescuing":
            count += 1
        elif event.event == "verdict" and has_progressed(
            event.details.get("first_step", 0), event.details.get("saved_step")
        ):
            count = 0
    return count


def _begin_when_pending(job_id: str) -> None:
    """From outside, a requeued job that is pending can be started at once instead of after 121 s."""
    deadline = time.monotonic() + BEGIN_PATIENCE_S
    while time.monotonic() < deadline:
        record = slurm.job(job_id)
        if record is None or record.state == "RUNNING":
            return
        if record.state == "PENDING":
            with contextlib.suppress(SlurmError):  # it began by itself in between, or Slurm is busy: look again
                queueing.begin_in(job_id, queueing.SOONEST_S)
                return
        time.sleep(0.5)
