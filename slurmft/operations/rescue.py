"""Bringing back a run that has lost its supervisor, by hand or from cron, from outside its jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.errors import SlurmError, SlurmftError, StorageError
from slurmft.operations import launch_failures
from slurmft.operations.control import NEWEST
from slurmft.operations.on_behalf import Rescued, left_alone, rescue_on_behalf
from slurmft.operations.run_configuration import refuse_moved
from slurmft.operations.unfinished_requeue import bring_back, complete, placement_of
from slurmft.policy.site.job_identity import JobIdentity, OwnJob
from slurmft.policy.verdicts.verdict import GOES_ON
from slurmft.scheduler import own_jobs, queueing, successor
from slurmft.scheduler.command import undisturbed
from slurmft.scheduler.nodes import compress
from slurmft.scheduler.parsing.parsing import JobRecord, expand_hostlist, is_held_by_launch
from slurmft.storage import signs_of_life
from slurmft.storage.claim import SUPERVISOR, EndingClaim
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt, Owner, RunFolder, walk_runs
from slurmft.supervisor.budget import progressed
from slurmft.supervisor.recovery.place_elsewhere import Placement
from slurmft.supervisor.standby.lease import Lease

BEGIN_PATIENCE_S = 60.0
LIMIT_S = 600.0
"""How long root's rescue goes on to start with further owners."""


log = logging.getLogger(__name__)

SETTLED_S = 30.0
"""How long a job that Slurm does not know counts as not listed yet."""

MAX_RESCUES = 3
"""How often a run without a verdict is submitted again without progress in between."""

LIVES = frozenset({
    EventName.ATTEMPT_STARTED, EventName.STANDBY_ENDS_JOB, EventName.RESCUING, EventName.REQUEUED,
    EventName.RESUBMITTED, EventName.SUBMITTED,
})  # fmt: skip
"""What begins a life of the run's job, or ends it."""


def rescue_below(root: Path, who: str, *, limit_s: float = LIMIT_S) -> Rescued:
    """Bring back the runs below ``root`` that have lost their supervisor: the caller's own, and called by root the
    others as their owners (``on_behalf``). The caller's own cost one question to Slurm.

    Args:
        limit_s: seconds after which no other owner's turn begins.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing was changed.
        OSError: ``root`` cannot be listed.
    """
    owners: dict[int, list[str]] = {}
    once: dict[str, RunFolder] = {}
    for path, owner in walk_runs(root, owners={0, os.getuid()}):  # each other owner's process looks into the owner's
        if owner == os.getuid():
            once.setdefault(os.path.realpath(path), RunFolder(path.absolute()))  # links lead to some twice
        elif owner is not None:
            owners.setdefault(owner, []).append(str(path.relative_to(root)))
    done = rescue(list(once.values()), who)
    if os.getuid() != 0:
        return Rescued(done=done, left_alone=left_alone(owners, "only their owners may rescue them"))
    found = rescue_on_behalf(owners, root, limit_s=limit_s)
    return Rescued(done=[*done, *found.done], problems=found.problems, left_alone=found.left_alone)


def rescue_one(run: RunFolder, who: str) -> Rescued:
    """The same for one run, whose owner is found from outside of it when root asks.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing was changed.
        SlurmftError: the rescue failed, or the run is not the caller's.
    """
    try:
        owner = run.path.stat().st_uid
    except OSError as error:
        raise StorageError(f"cannot look at {run.path}: {error.strerror}") from error
    if os.getuid() != 0 or owner == 0:
        _refuse_unsafe(run)
        return Rescued(done=rescue([run], who))
    return rescue_on_behalf({owner: [run.path.name]}, run.path.parent, limit_s=LIMIT_S, only=run.path)


def rescue(runs: Sequence[RunFolder], who: str) -> list[str]:
    """Bring back those that have lost their supervisor; returns what was done, in words. Asks Slurm once.

    Either a job runs without its batch script, or a run's job is gone although no verdict ended the run. An error of
    one run's rescue is logged, and does not stop the others. Only a run that is the caller's, and in whose place no
    other user can put something, is looked at; jobs of other users count as unknown to Slurm.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing was changed.
        SlurmftError: the rescue of the only run failed.
    """
    jobs = {run.path: found for run in runs if (found := _jobs_to_ask_about(run))}
    records, unknown = own_jobs.find_where_answered([job for of_run in jobs.values() for job in of_run])
    done = []
    for run in runs:
        if not (mine := jobs.get(run.path)):
            continue
        try:
            for job in mine:
                if job in unknown:
                    raise unknown[job]
            if (line := _rescue(run, {job: records[job] for job in mine if job in records}, mine, who)) is not None:
                done.append(line)
        except Exception as error:
            if len(runs) == 1:
                raise
            expected = isinstance(error, (SlurmftError, OSError))
            log.error("run %s: %s", run.path.name, error if expected else repr(error), exc_info=not expected)
    return done


def _refuse_unsafe(run: RunFolder) -> None:
    """Return when the run folder's content may be executed and followed unattended.

    Raises:
        StorageError: it may not.
    """
    run.refuse_foreign()
    run.refuse_replaceable()
    run.refuse_copy()


def _jobs_to_ask_about(run: RunFolder) -> list[OwnJob]:
    """The newest jobs of a run that may need a rescue; none where the folder is not to be believed."""
    try:
        _refuse_unsafe(run)
        owner = run.owner()
        if run.done() is not None or (owner is not None and owner.cluster != "slurm"):
            return []
        return run.own_jobs(newest=NEWEST)
    except (StorageError, OSError, ValueError, OverflowError) as error:
        log.warning("%s", error)
        return []


def _rescue(run: RunFolder, records: Mapping[OwnJob, JobRecord], jobs: Sequence[OwnJob], who: str) -> str | None:
    for job, record in records.items():
        if is_orphan(record) and not _has_standby(run, job):
            return _requeue_orphan(run, job, record, who)
        if record.waiting and (done := complete(run, job, record, who)):
            return done
        if record.waiting and is_held_by_launch(record.reason):
            return launch_failures.release(run, job, record, who)
    if any(record.alive or record.waiting for record in records.values()):
        return None
    return _submit_again(run, records, jobs, who)


def is_orphan(record: JobRecord) -> bool:
    """Under --no-kill a job whose batch host died stays RUNNING without its script until its time limit."""
    if record.state != "RUNNING" or not record.batch_host:
        return False
    try:
        return record.batch_host not in expand_hostlist(record.nodes)
    except ValueError:
        return False  # not known: Slurm answered something that cannot be its nodes


def _has_standby(run: RunFolder, job: OwnJob) -> bool:
    """Whether a standby has taken the place of the job's batch script, and lives."""
    owner = run.owner()
    if owner is None or not owner.standby or owner.job != job.job_id:
        return False
    lease_age_s = Lease(run, Attempt(job=owner.job, restart=owner.restart)).age_s()  # renewed between attempts, too
    return signs_of_life.is_fresh(run, owner) or (lease_age_s is not None and lease_age_s < signs_of_life.FRESH_S)


def _requeue_orphan(run: RunFolder, job: OwnJob, record: JobRecord, who: str) -> str:
    owner = run.owner()
    restart = owner.restart if owner is not None and owner.job == job.job_id else 0
    journal = run.journal()
    claim = run.ending(Attempt(job=job.job_id, restart=restart))
    if not claim.take(who) and not _take_broken(run, claim, who):
        return f"another process is already rescuing job {job}"
    journal.append(EventName.RESCUING, job=job.job_id, lost_batch_host=record.batch_host, nodes=record.nodes, who=who)
    try:
        # Slurm may have started it once more, and that start was lost before it took the run over
        queueing.requeue(job, restart=own_jobs.restarts(job), delay_s=queueing.SOONEST_S)
    except SlurmError:
        claim.give_back()
        raise
    claim.settle("rescued")
    _begin_when_pending(job)
    journal.append(EventName.REQUEUED, job=job.job_id, who=who)
    return f"job {job} had lost its batch host {record.batch_host}; it is requeued"


def _submit_again(run: RunFolder, records: Mapping[OwnJob, JobRecord], jobs: Sequence[OwnJob], who: str) -> str | None:
    owner, events = run.owner(), run.journal().read()
    if owner is None or not is_unfinished(events, owner.job) or run.see_request("KILL") is not None:
        return None
    mine = next((job for job in reversed(jobs) if job.job_id == owner.job), OwnJob(owner.job))
    # a later job was to continue the run, and has never begun: how it ended decides
    later = jobs[jobs.index(mine) + 1 :] if mine in jobs else []
    newest = later[-1] if later else mine
    may_be_wanted = not _ended_by_standby(events, newest)
    if may_be_wanted and newest in records and records[newest].state == "CANCELLED":  # noted: Slurm forgets it
        run.journal().append(EventName.CANCELLED, jobs=[newest.job_id], reason=f"job {newest} was cancelled")
        return None
    if newest not in records and _is_recent(run, owner):
        return None
    if rescues_without_progress(events) >= MAX_RESCUES:
        raise StorageError(
            f"run {run.path.name} ended {MAX_RESCUES} times without a verdict and without progress",
            hint=f"slurmft explain {run.path}, then slurmft submit {run.config}",
        )
    if may_be_wanted and newest not in records and own_jobs.cancelled_by(newest) is not None:
        return None
    refuse_moved(run)
    is_known = mine in records
    claim = run.ending(Attempt(job=owner.job, restart=owner.restart))
    # a job that has ended has no supervisor any more
    if not claim.take(who, instead_of=SUPERVISOR if is_known else "") and not _take_broken(run, claim, who):
        return None
    journal = run.journal()
    journal.append(EventName.RESCUING, job=owner.job, reason="its job is gone and no verdict ended the run", who=who)
    partition = records[mine].partition if is_known else ""
    try:
        placement = placement_of(run, partition=partition, job=None, history=events)
        job_id = bring_back(run, mine, placement, in_memory=is_known)
        job_id = job_id or _sbatch(run, mine, placement, events)
    except BaseException:
        claim.give_back()
        raise
    claim.settle(f"rescued as job {job_id}")
    return f"job {owner.job} of run {run.path.name} is gone without a verdict; the run goes on as job {job_id}"


def _ended_by_standby(events: Sequence[Event], job: OwnJob) -> bool:
    """Whether a supervisor that was a standby has ended the job: Slurm shows that as a cancellation by the user."""
    lives = [event for event in events if event.event in LIVES]
    return bool(lives) and lives[-1].event == EventName.STANDBY_ENDS_JOB and lives[-1].details.get("job") == job.job_id


def _is_recent(run: RunFolder, owner: Owner) -> bool:
    """Whether the run has a supervisor that lives, or a job that Slurm may not show yet."""
    told_s = signs_of_life.seconds_since(run, run.journal().path)
    return signs_of_life.is_fresh(run, owner) or (told_s is not None and told_s < SETTLED_S)


def _take_broken(run: RunFolder, claim: EndingClaim, who: str) -> bool:
    """Take over a claim that was settled but not acted on: the run has had no job for long."""
    if claim.outcome() is None:
        return False
    age_s = signs_of_life.seconds_since(run, claim.path)
    if age_s is None or age_s < SETTLED_S:
        return False
    claim.give_back()
    return claim.take(who)


def _sbatch(run: RunFolder, after: OwnJob, placement: Placement | None, events: Sequence[Event]) -> str:
    if not run.script.is_file():
        raise StorageError(
            f"job {after} of run {run.path.name} is gone without a verdict, and its batch script was not ours",
            hint="submit it again as you did before; the run goes on from its newest checkpoint",
        )
    folders = [event.details.get("folder") for event in reversed(events) if event.event == EventName.ATTEMPT_STARTED]
    options = [] if placement is None else [f"--exclude={compress(placement.excluded)}"]
    job_id = successor.submit_script(
        run.script, known=run.own_jobs(), options=options, environment=_as_submitted(events),
        folder=Path(next(filter(None, folders), run.path)),
    )  # fmt: skip
    seen = JobIdentity(user=os.getuid(), cluster=after.known.cluster, script=str(run.script))
    with run.lock():
        run.add_job(job_id, seen)
    run.journal().append(EventName.RESUBMITTED, job=job_id, after=after.job_id)
    return job_id


def _as_submitted(events: Sequence[Event]) -> dict[str, str]:
    """Our environment with the wishes for sbatch of the shell that submitted the run, and not those of a crontab."""
    submitting = [event.details for event in events if event.event == EventName.SUBMITTING]
    wishes = submitting[-1].get("wishes") if submitting else None
    wished = {str(name): str(value) for name, value in wishes.items()} if isinstance(wishes, dict) else {}
    return undisturbed(os.environ) | {name: value for name, value in wished.items() if name.startswith("SBATCH_")}


def is_unfinished(events: Sequence[Event], job: str) -> bool:
    """Whether the newest attempt, of ``job``, ended without a decision, or was to continue and did not.

    By the order of the lines: the clocks of hosts differ. A user who submits the run again revokes earlier decisions;
    decisions of another attempt do not matter for this one.
    """
    started = [index for index, event in enumerate(events) if event.event == EventName.ATTEMPT_STARTED]
    if not started or not events[started[-1]].attempt.startswith(f"{job}."):
        return False
    newest = events[started[-1]].attempt
    unfinished = True
    for event in events[started[-1] + 1 :]:
        if event.event == EventName.CANCELLED:
            unfinished = False
        elif event.event == EventName.SUBMITTED:
            unfinished = True
        elif event.event == EventName.DECISION and event.attempt == newest:
            unfinished = str(event.details.get("action")) in GOES_ON
    return unfinished


def rescues_without_progress(events: Sequence[Event]) -> int:
    """Rescues since the run last did a step that was new.

    An attempt whose host was lost leaves no verdict; that it had made progress shows in where the next one resumes.
    """
    count, furthest = 0, 0
    for event in events:
        facts = event.details
        if event.event == EventName.RESCUING:
            count += 1
        elif event.event == EventName.VERDICT and progressed(facts):
            count = 0
        elif event.event == EventName.FIRST_STEP and type(step := facts.get("resumed_from")) is int and step > furthest:
            count, furthest = 0, step
    return count


def _begin_when_pending(job: OwnJob) -> None:
    """From outside, a requeued job that is pending can be started at once instead of after 121 s."""
    deadline = time.monotonic() + BEGIN_PATIENCE_S
    while time.monotonic() < deadline:
        record = own_jobs.find_one(job)
        if record is None or record.state == "RUNNING":
            return
        if record.state == "PENDING":
            with contextlib.suppress(SlurmError):  # it began by itself in between, or Slurm is busy: look again
                queueing.begin_in(job, queueing.SOONEST_S)
                return
        time.sleep(0.5)
