"""Bringing back runs that have lost their supervisor, by hand or from a sweep: from outside of their jobs.

A job that Slurm holds is released, an orphan is requeued, a successor is submitted; root does it with the rights of
each run's owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from slurmft.config.run import RunConfig
from slurmft.errors import (
    ConfigError,
    LaunchError,
    SlurmError,
    SlurmftError,
    SlurmUnavailable,
    StorageError,
)
from slurmft.operations.control import NEWEST
from slurmft.operations.run_configuration import configuration_of, refuse_moved
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.node_health import NodeFact
from slurmft.policy.suspicion import observed
from slurmft.policy.verdict import GOES_ON, Action, Cause, Evidence, Kind, Suspect
from slurmft.scheduler import own_jobs, parsing, slurm
from slurmft.scheduler.slurm import compress, undisturbed
from slurmft.storage import run_folder
from slurmft.storage.journal import Event, EventName, newest_of
from slurmft.storage.run_folder import SUPERVISOR, Attempt, EndingClaim, Owner, RunFolder, user_name, walk_runs
from slurmft.supervisor import avoided_nodes
from slurmft.supervisor.observations import progressed
from slurmft.supervisor.placement import Placement, duty_of, next_placement, ours
from slurmft.system import files, processes

# --- Jobs that Slurm holds because a node could not start them, which is what a failing Prolog does by default ---

MAX_RELEASES = 3
"""Releases of a run's job in a row, without a start in between."""

log = logging.getLogger(__name__)


def release(run: RunFolder, job: OwnJob, record: parsing.JobRecord, who: str) -> str:
    """Let a job that Slurm holds after a failed launch begin elsewhere; says what was done.

    The nodes that refused it are recorded on the exclusion list. Call for a job of ``is_held_by_launch``.

    Raises:
        LaunchError: it was released often enough.
        SlurmError: Slurm refused or did not answer.
    """
    history, journal = run.journal().read(), run.journal()
    times = releases_without_start(history)
    refusals = _refusals(record, history)
    names = sorted({each.node for each in refusals})
    if times >= MAX_RELEASES:
        where = f" (now by {', '.join(f'{each.node}: {each.reason[:200]}' for each in refusals)})" if refusals else ""
        raise LaunchError(
            f"job {job} of run {run.path.name} was refused by nodes {times + 1} times in a row{where}",
            hint=f"fix what fails there (a Prolog?), then scontrol release {job}",
        )
    queued_at = record.identity.submitted[-1:]
    with run.lock():
        if any(_released(event, record.job_id, queued_at) for event in journal.read()):
            return f"another process is already releasing job {job}"
        journal.append(EventName.RELEASED, job=job.job_id, reason=record.reason, nodes=names, times=times + 1, who=who,
                       **({"queued_at": queued_at[0]} if queued_at else {}))  # fmt: skip
    if (config := _configuration(run)) is not None:
        _accuse(run, config, job, refusals)
        placement = next_placement(config, partition=record.partition, job=job, history=history, suspects=names)
        _note_avoided(run, placement)
        own_jobs.place(job, own_jobs.SOONEST_S, avoid=None if placement is None else placement.excluded)
    own_jobs.release(job)
    where = f", now without {', '.join(names)}" if names else ""
    return f"job {job} was held by Slurm ({record.reason}); it is released{where}"


def _released(event: Event, job_id: str, queued_at: Sequence[float]) -> bool:
    """Whether another process has just begun to release the job since Slurm put it into the queue at ``queued_at``."""
    facts = event.details
    is_same = (
        event.event == EventName.RELEASED and facts.get("job") == job_id and [facts.get("queued_at")] == [*queued_at]
    )
    return is_same and abs(time.time() - event.seconds()) < SETTLED_S


def releases_without_start(history: Sequence[Event]) -> int:
    """How often the run's job was released since the run last began."""
    count = 0
    for event in history:
        if event.event in (EventName.ATTEMPT_STARTED, EventName.SUBMITTED):
            count = 0
        count += event.event == EventName.RELEASED
    return count


def _refusals(record: parsing.JobRecord, history: Sequence[Event]) -> list[NodeFact]:
    """Nodes that Slurm has drained when it put the job back into the queue, without those of an earlier time."""
    at = record.identity.submitted
    told = {
        (event.details.get("node"), event.details.get("seen_at"))
        for event in history
        if event.event == EventName.EVIDENCE
    }
    try:
        return [each for each in slurm.refusals(at[-1]) if (each.node, each.since) not in told] if at else []
    except SlurmError as error:
        log.warning("Slurm does not report which node refused job %s: %s", record.job_id, error.what)
        return []


def _configuration(run: RunFolder) -> RunConfig | None:
    try:
        return configuration_of(run)
    except ConfigError as error:
        log.warning("nothing is excluded: %s", error.what)
        return None


def _accuse(run: RunFolder, config: RunConfig, job: OwnJob, refusals: Sequence[NodeFact]) -> None:
    evidence = [
        Evidence(kind=Kind.LAUNCH_FAILED, suspect=Suspect(node=each.node),
                 message=f"it could not start job {job}: {each.reason[:200]}", at=each.since or 0.0)
        for each in refusals
    ]  # fmt: skip
    try:
        observations = [
            observed(each, source=f"launch of {job}", run=str(run.path), job=job.job_id) for each in evidence
        ]
        if observations:
            avoided_nodes.exclusion_list(config, os.environ).observe(observations)
    except (StorageError, SlurmError, OSError) as error:
        log.warning("the exclusion list cannot be written: %s", error)
        return
    for each in evidence:
        run.journal().append(
            EventName.EVIDENCE, kind=each.kind.value, node=each.suspect.node, message=each.message, seen_at=each.at
        )


# --- Root's rescue of other users' runs: for each owner a process with that owner's rights and nothing of root's ---
# All files in a run folder may have been forged by the folder's owner, so root reads none of them: it lists names and
# owners, and the owner's process does the rest. The output of that process is the owner's text: it is bounded, and
# shown.

AT_ONCE = 8
"""Owners' processes at one time; one that hangs does not block the others."""

OWNER_LIMIT_S = 100
"""A rescue waits up to 60 s for a requeued job, and as long for sbatch."""

OUTPUT_LIMIT_BYTES = 64 * 1024
MAX_LINES, MAX_LINE = 50, 300
ROTATION_S = 300


_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SLURM_CONF", "SLURM_CLUSTERS")
"""Variables of root's environment that an owner's process gets; sbatch would pass all of it on to the job."""

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1

_NO_LOGIN = frozenset({"nologin", "false", "sync", "shutdown", "halt"})


@dataclass(kw_only=True, slots=True)
class Rescued:
    """The results of a rescue."""

    done: list[str] = field(default_factory=list)
    """In words."""

    problems: list[str] = field(default_factory=list)
    """Runs that could not be rescued, in words."""

    left_alone: str = ""
    """Which runs of other users were not touched, and why, in one line; empty where there are none."""


def rescue_on_behalf(owners: Mapping[int, Sequence[str]], root: Path, *, limit_s: float, only: Path | None = None
                     ) -> Rescued:  # fmt: skip
    """Have the runs below ``root`` rescued by their ``owners`` (user id to names), or the run ``only`` by its owner.

    Each owner's process ends after OWNER_LIMIT_S, and no new one begins after ``limit_s`` seconds; owners that were not
    reached are named, and another owner is first the next time. Call as root.
    """
    deadline, found = time.monotonic() + limit_s, Rescued()
    accounts = {owner: account for owner in sorted(owners) if (account := _account(owner)) is not None}
    found.left_alone = left_alone({owner: names for owner, names in owners.items() if owner not in accounts},
                                  "no account that can log in")  # fmt: skip
    first = int(time.time() / ROTATION_S) % max(1, len(accounts))
    in_turn = [*list(accounts.values())[first:], *list(accounts.values())[:first]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for told in pool.map(lambda account: _as_owner(account, root, only, deadline), in_turn):
            found.done += told.done
            found.problems += told.problems
    return found


def left_alone(names: Mapping[int, Sequence[str]], why: str) -> str:
    """One line that counts these folders and names some of them; empty where there are none."""
    count, shown = sum(map(len, names.values())), []
    for owner in sorted(names)[:3]:
        some = ", ".join(sorted(names[owner])[:3]) + ", ..." * (len(names[owner]) > 3)
        shown.append(f"{user_name(owner)}: {some}")
    more = "; ..." * (len(names) > 3)
    return f"left alone: {count} folders of other users ({why}): {'; '.join(shown)}{more}" if count else ""


def _account(owner: int) -> pwd.struct_passwd | None:
    """The account to act as; None for root, and for accounts without a login shell."""
    try:
        account = pwd.getpwuid(owner)
    except KeyError:
        return None
    return None if owner == 0 or Path(account.pw_shell).name in _NO_LOGIN else account


def _as_owner(account: pwd.struct_passwd, root: Path, only: Path | None, deadline: float) -> Rescued:
    if time.monotonic() > deadline:
        return Rescued(problems=[f"runs of {account.pw_name} were not looked at: there was no time left"])
    _leave_session_of_root(account.pw_uid)
    # isolated: neither root's PYTHONPATH nor the owner's own packages
    argv = [sys.executable, "-I", "-m", "slurmft", "requeue", "--rescue", "--as-owner", *([str(only)] if only else [])]
    try:
        process = subprocess.Popen(
            argv, user=account.pw_uid, group=account.pw_gid,
            extra_groups=os.getgrouplist(account.pw_name, account.pw_gid), umask=0o077, cwd="/",
            env=_environment(account, root), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        why = f"{error.strerror or error}; can they read {sys.prefix}?"
        return Rescued(problems=[f"no process as {account.pw_name}: {why}"])
    (out, err), code = processes.output_of(process, OWNER_LIMIT_S, OUTPUT_LIMIT_BYTES)
    if code is None:
        processes.end_group(process, 1.0)
    warnings = _lines(account, err)
    if code != 0:
        ending = f"not done in {OWNER_LIMIT_S} s" if code is None else f"ended with exit code {code}"
        return Rescued(done=_lines(account, out), problems=[f"{account.pw_name}: {ending}", *warnings])
    for line in warnings:  # such as a damaged run, which its owner sees in status: no business of root's
        log.debug("%r", line)
    return Rescued(done=_lines(account, out))


def _leave_session_of_root(owner: int) -> None:
    """For this thread and what it starts: an empty session keyring, without root's tickets, and the owner's audit id.
    Both are a thread's own, and a child has them from its first moment."""
    if (number := _KEYCTL.get(os.uname().machine)) is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _JOIN_SESSION_KEYRING, None)
    with contextlib.suppress(OSError):  # a kernel without audit, or one in which it cannot be changed
        files.write_bytes("/proc/thread-self/loginuid", str(owner).encode())


def _environment(account: pwd.struct_passwd, root: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {
        "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell or "/bin/sh", "SLURMFT_RUNS": str(root.absolute()),
    }  # fmt: skip


def _lines(account: pwd.struct_passwd, text: bytes) -> list[str]:
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    cut = [f"{account.pw_name}: {line[:MAX_LINE]}" for line in lines[:MAX_LINES]]
    return cut + [f"{account.pw_name}: {len(lines) - MAX_LINES} more lines"] * (len(lines) > MAX_LINES)


# --- Finishes, from outside, a requeue whose process died halfway: the job's excluded nodes and its begin time ---

_TRANSACTION = frozenset({EventName.REQUEUEING, EventName.REQUEUED, EventName.PLACED, EventName.REQUEUE_FAILED})


def placement_of(run: RunFolder, *, partition: str, history: Sequence[Event]) -> Placement | None:
    """Nodes that the run's next job must avoid, entered in its journal; None where there are none."""
    try:
        config = configuration_of(run)
    except ConfigError:  # it was readable when the run was submitted; its excluded nodes are in the script
        return None
    suspects = sorted(duty_of(history).undecided)
    placement = next_placement(config, partition=partition, job=None, history=history, suspects=suspects)
    _note_avoided(run, placement)
    return placement


def _note_avoided(run: RunFolder, placement: Placement | None) -> None:
    """Without it these nodes would be the user's own, which the run gives up in no need."""
    if placement is not None:
        run.journal().append(EventName.AVOIDING, **placement.avoidance.as_event())


def complete(run: RunFolder, job: OwnJob, record: parsing.JobRecord, who: str) -> str | None:
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
        avoid = None if excluded is None else avoided_nodes.expanded(excluded)
        done = own_jobs.place(job, own_jobs.SOONEST_S, avoid=avoid)
        if parsing.is_held_by_requeue(record.reason):  # by ``requeue_ended``; a job that a user holds stays held
            own_jobs.release(job)
        run.journal().append(EventName.REQUEUED, job=record.job_id, who=who, **done.in_words())
        return f"finished the requeue of job {record.job_id}" + (f", which keeps off {excluded}" if excluded else "")
    if record.reason == "BadConstraints" and (added := ours(events, record.job_id)):
        left = own_jobs.named_nodes(job).excluded - added
        done = own_jobs.place(job, own_jobs.SOONEST_S, avoid=left)
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
    journal.append(EventName.REQUEUEING, job=job.job_id, delay_s=own_jobs.SOONEST_S, **excluded)
    try:
        done = own_jobs.requeue_ended(job, own_jobs.SOONEST_S, avoid=None if placement is None else placement.excluded)
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        journal.append(EventName.REQUEUE_FAILED, job=job.job_id, reason=error.what)
        return None
    journal.append(EventName.REQUEUED, job=job.job_id, **done.in_words())
    return job.job_id


# --- Bringing back a run that has lost its supervisor, by hand or from cron, from outside its jobs ---

BEGIN_PATIENCE_S = 60.0
LIMIT_S = 600.0
"""How long root's rescue goes on to start with further owners."""

SETTLED_S = 30.0
"""How long a job that Slurm does not know counts as not listed yet."""

MAX_RESCUES = 3
"""How often a run without a verdict is submitted again without progress in between."""


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


def _rescue(
    run: RunFolder, records: Mapping[OwnJob, parsing.JobRecord], jobs: Sequence[OwnJob], who: str
) -> str | None:
    for job, record in records.items():
        if is_orphan(record):
            return _requeue_orphan(run, job, record, who)
        if record.waiting and (done := complete(run, job, record, who)):
            return done
        if record.waiting and parsing.is_held_by_launch(record.reason):
            later = [records[each] for each in jobs[jobs.index(job) + 1 :] if each in records]
            if any(each.alive or each.waiting for each in later):
                return _cancel_replaced(job)
            return release(run, job, record, who)
        if record.waiting and parsing.is_held_for_good(record.reason):
            return _submit_in_place_of(run, job, record, who)
    if any(record.alive or record.waiting for record in records.values()):
        return None
    return _submit_again(run, records, jobs, who)


def is_orphan(record: parsing.JobRecord) -> bool:
    """Under --no-kill a job whose batch host died stays RUNNING without its script until its time limit."""
    if record.state != "RUNNING" or not record.batch_host:
        return False
    try:
        return record.batch_host not in parsing.expand_hostlist(record.nodes)
    except ValueError:
        return False  # not known: Slurm answered something that cannot be its nodes


def _requeue_orphan(run: RunFolder, job: OwnJob, record: parsing.JobRecord, who: str) -> str:
    owner = run.owner()
    restart = owner.restart if owner is not None and owner.job == job.job_id else 0
    claim = run.ending(Attempt(job=job.job_id, restart=restart))
    with _claimed(run, claim, who) as is_ours:
        if not is_ours:
            return f"another process is already rescuing job {job}"
        run.journal().append(
            EventName.RESCUING, job=job.job_id, lost_batch_host=record.batch_host, nodes=record.nodes, who=who
        )
        # Slurm may have started it once more, and that start was lost before it took the run over
        own_jobs.requeue(job, restart=own_jobs.restarts(job), delay_s=own_jobs.SOONEST_S)
    claim.settle("rescued")
    _begin_when_pending(job)
    run.journal().append(EventName.REQUEUED, job=job.job_id, who=who)
    return f"job {job} had lost its batch host {record.batch_host}; it is requeued"


def _submit_in_place_of(run: RunFolder, job: OwnJob, record: parsing.JobRecord, who: str) -> str | None:
    """Submit a run again whose job cannot be released, and cancel that one. May be done twice."""
    if [each.job_id for each in run.own_jobs(newest=1)] != [job.job_id]:  # it was done, but for this
        return _cancel_replaced(job)
    events = run.journal().read()
    # it has ended for good, and Slurm could not be told, or it is to end
    if not is_unfinished(events, job.job_id) or run.see_request("KILL") is not None:
        return None
    claim = run.ending(Attempt(job=job.job_id, restart=own_jobs.restarts(job)))
    with _claimed(run, claim, who) as is_ours:
        if not is_ours:
            return f"another process is already rescuing job {job}"
        with run.lock():  # else its new time of submission makes it look like another job, which this has submitted
            run.add_job(job.job_id, record.identity)
        run.journal().append(EventName.RESCUING, job=job.job_id, reason=f"Slurm holds it: {record.reason}", who=who)
        placement = placement_of(run, partition=record.partition, history=events)
        try:
            job_id = _sbatch(run, job, placement, events)
        except SlurmError:  # there may be no room for both of them (MaxSubmitJobs)
            own_jobs.cancel(job)
            job_id = _sbatch(run, job, placement, events)
    claim.settle(f"rescued as job {job_id}")
    own_jobs.cancel(job)
    return f"Slurm has requeued job {job} too often and holds it; the run goes on as job {job_id}"


def _cancel_replaced(job: OwnJob) -> str:
    own_jobs.cancel(job)
    return f"job {job}, in place of which the run has another one, is cancelled"


def _submit_again(
    run: RunFolder, records: Mapping[OwnJob, parsing.JobRecord], jobs: Sequence[OwnJob], who: str
) -> str | None:
    owner, events = run.owner(), run.journal().read()
    if owner is not None and (complete_at := _unmarked_end(events)) is not None:
        config = _configuration(run)
        if config is None or config.trials is not None:  # whose mark goes when trials are added
            return None
        with run.lock():
            run.mark_done(step=complete_at, job=owner.job, reason="its supervisor was lost when it had decided so")
        return f"run {run.path.name} is complete, and marked as such now: its supervisor was lost before it could"
    if owner is None or not is_unfinished(events, owner.job) or run.see_request("KILL") is not None:
        return None
    mine = next((job for job in reversed(jobs) if job.job_id == owner.job), OwnJob(owner.job))
    # a later job was to continue the run, and has never begun: how it ended decides
    later = jobs[jobs.index(mine) + 1 :] if mine in jobs else []
    newest = later[-1] if later else mine
    if newest in records and records[newest].state == "CANCELLED":  # noted: Slurm forgets it
        run.journal().append(EventName.CANCELLED, jobs=[newest.job_id], reason=f"job {newest} was cancelled")
        return None
    if newest not in records and _is_recent(run, owner):
        return None
    if rescues_without_progress(events) >= MAX_RESCUES:
        raise StorageError(
            f"run {run.path.name} ended {MAX_RESCUES} times without a verdict and without progress",
            hint=f"slurmft explain {run.path}, then slurmft submit {run.config}",
        )
    if newest not in records and own_jobs.cancelled_by(newest) is not None:
        return None
    refuse_moved(run)
    is_known = mine in records
    lost = Attempt(job=owner.job, restart=owner.restart, cycle=owner.cycle)
    claim = run.ending(lost)
    # a job that has ended has no supervisor any more
    with _claimed(run, claim, who, instead_of=SUPERVISOR if is_known else "") as is_ours:
        if not is_ours:
            return None
        reason = "its job is gone and no verdict ended the run"
        run.journal().append(EventName.RESCUING, job=owner.job, reason=reason, who=who)
        partition = records[mine].partition if is_known else ""
        placement = placement_of(run, partition=partition, history=events)
        # a full disk may have taken neither the entry of a successor nor its number
        in_memory = is_known and own_jobs.earlier_try(run.script, run.own_jobs()) is None
        job_id = bring_back(run, mine, placement, in_memory=in_memory)
        job_id = job_id or _sbatch(run, mine, placement, events)
    claim.settle(f"rescued as job {job_id}")
    return f"job {owner.job} of run {run.path.name} is gone without a verdict; the run goes on as job {job_id}"


def _is_recent(run: RunFolder, owner: Owner) -> bool:
    """Whether the run has a supervisor that lives, or a job that Slurm may not show yet."""
    told_s = run_folder.seconds_since(run, run.journal().path)
    return run_folder.is_fresh(run, owner) or (told_s is not None and told_s < SETTLED_S)


@contextlib.contextmanager
def _claimed(run: RunFolder, claim: EndingClaim, who: str, *, instead_of: str = "") -> Iterator[bool]:
    """Whether this process may bring the run back now; what fails gives the claim back, for the next rescue.

    One that was settled but not acted on, so that the run has had no job for long, is taken over.
    """
    is_ours = claim.take(who, instead_of=instead_of)
    if not is_ours and claim.outcome() is not None:
        age_s = run_folder.seconds_since(run, claim.path)
        if age_s is not None and age_s >= SETTLED_S:
            claim.give_back()
            is_ours = claim.take(who)
    try:
        yield is_ours
    except BaseException:
        if is_ours:
            claim.give_back()
        raise


def _sbatch(run: RunFolder, after: OwnJob, placement: Placement | None, events: Sequence[Event]) -> str:
    if not run.script.is_file():
        raise StorageError(
            f"job {after} of run {run.path.name} does not go on, and its batch script was not ours",
            hint="submit it again as you did before; the run goes on from its newest checkpoint",
        )
    folders = [event.details.get("folder") for event in reversed(events) if event.event == EventName.ATTEMPT_STARTED]
    options = [] if placement is None else [f"--exclude={compress(placement.excluded)}"]
    job_id = own_jobs.submit_script(
        run.script, known=run.own_jobs(), options=options, environment=_as_submitted(events),
        folder=Path(next(filter(None, folders), run.path)),
    )  # fmt: skip
    with run.lock():
        run.add_successor(job_id, after)
    run.journal().append(EventName.RESUBMITTED, job=job_id, after=after.job_id)
    return job_id


def _as_submitted(events: Sequence[Event]) -> dict[str, str]:
    """Our environment with the wishes for sbatch of the shell that submitted the run, and not those of a crontab."""
    submitting = newest_of(events, EventName.SUBMITTING)
    wishes = None if submitting is None else submitting.details.get("wishes")
    wished = {str(name): str(value) for name, value in wishes.items()} if isinstance(wishes, dict) else {}
    return undisturbed(os.environ) | {name: value for name, value in wished.items() if name.startswith("SBATCH_")}


def is_unfinished(events: Sequence[Event], job: str) -> bool:
    """Whether the newest attempt, of ``job``, ended with no decision and no stop by its user, or did not continue.

    By the order of the lines: the clocks of hosts differ. A user who submits the run again revokes earlier decisions;
    decisions of another attempt do not matter for this one. A ``job`` without a line has owned the run, and was lost
    before its first one: it was to train.
    """
    begun, newest, unfinished = set[str](), "", False
    for event in events:
        stopped = event.details.get("cause") == Cause.STOPPED_BY_USER or event.event == EventName.WILL_NOT_CONTINUE
        # a supervisor may be lost before its first line
        if event.event in (EventName.ATTEMPT_STARTED, EventName.SUPERVISOR_LOST) and event.attempt not in begun:
            begun.add(newest := event.attempt)
            unfinished = True
        elif event.event == EventName.CANCELLED or (stopped and event.attempt == newest):
            unfinished = False
        elif event.event == EventName.SUBMITTED:
            unfinished = True
        elif event.event == EventName.DECISION and event.attempt == newest:
            unfinished = str(event.details.get("action")) in GOES_ON
    return unfinished and (newest.startswith(f"{job}.") or not any(each.startswith(f"{job}.") for each in begun))


def _unmarked_end(events: Sequence[Event]) -> int | None:
    """The last step of a run that is complete by the newest decision in its journal; None where it is not."""
    ends = (EventName.ATTEMPT_STARTED, EventName.SUBMITTING, EventName.SUBMITTED, EventName.DECISION)
    newest = newest_of(events, *ends)
    if newest is None or newest.event != EventName.DECISION or newest.details.get("action") != Action.FINISH:
        return None
    steps = [event.details.get("last_step") for event in events if event.event == EventName.VERDICT]
    return next((step for step in reversed(steps) if type(step) is int), 0)


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
                own_jobs.begin_in(job, own_jobs.SOONEST_S)
                return
        time.sleep(0.5)
