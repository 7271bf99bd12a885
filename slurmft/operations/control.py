"""A run from outside of its job: its state, and what it is asked to do.

Files that are damaged, of a newer version or not ours to read make their own run ``damaged``, and hide no other one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmft.errors import RunBusy, SlurmError, SlurmUnavailable, StorageError, UsageError
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.verdict import EXIT_TEMPORARY, GOES_ON, Action, Cause
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.parsing import JobRecord, SlurmJob, current_job, why_held, why_never
from slurmft.storage import run_folder
from slurmft.storage.journal import TAIL_BYTES, Event, EventName, listed, newest_of
from slurmft.storage.run_folder import Attempt, Owner, RunFolder, progress_of, user_name
from slurmft.supervisor.guardian import local_owner_lives
from slurmft.system import processes
from slurmft.system.files import MOVE_AWAY, UnsafeFile, check_regular, open_folder, remove_tree
from slurmft.system.foreign_text import one_line

if TYPE_CHECKING:
    from slurmft.config.run import RunConfig

# --- Its state, from its folder and from Slurm: the values behind ``slurmft status`` and ``slurmft explain`` ---

NEWEST_SHOWN = 5
"""The newest jobs of a run that Slurm is asked about."""

GIVE_UP_S = 30.0
"""A run without a decision and without a job for this long counts as failed."""

NEXT_START_S = 10.0
"""How long a run that was decided to go on may have no process."""

MAX_SHOWN = 8
"""Culprits that are shown in full."""

TRIES = 3
"""Looks at a run whose jobs change while Slurm is asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """One run at one moment."""

    run: str
    folder: str
    state: str
    """finished, running, waiting, stopped, unknown (Slurm did not answer), damaged, or new."""

    detail: str
    """Why, in Slurm's or the journal's words."""

    job: str | None
    jobs: tuple[str, ...]
    """The chain of the run's jobs, oldest first."""

    step: int | None
    until: int | None
    saved: int | None
    """Newest step in a committed checkpoint of the newest attempt."""

    metric: float | None
    attempts: int
    at: float | None
    """Unix time of the progress report."""

    failed_saves: int = 0
    """Saves of a running attempt that failed in a row; 0 when the newest one was done."""

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format only grows."""
        return {"format": 1, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A run's journal."""

    events: list[Event]
    unreadable: int
    """Lines that are not events: torn by a writer that died, or damaged."""


def story(run: RunFolder) -> Story:
    """All events of the journal.

    Raises:
        StorageError: there is no journal, it cannot be read, or a newer slurmft wrote it.
    """
    with reading_journal(run):
        events, unreadable = run.journal().read_all()
    return Story(events=events, unreadable=unreadable)


@contextlib.contextmanager
def reading_journal(run: RunFolder) -> Iterator[None]:
    """Errors of reading the run's journal as the user is told of them.

    Raises:
        StorageError: there is no journal, or it cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"run {run.path.name} has no journal yet: nothing was submitted",
                           hint="slurmft submit CONFIG submits it") from error  # fmt: skip
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError):
            raise StorageError(error.what, hint=_permission_hint(run)) from error.__cause__
        raise


def account_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Details of the newest verdict beside its reason, as names and texts: culprit, suspects, evidence, traceback.

    Empty when no rank is blamed. The journal may be damaged or of a newer slurmft: what does not fit is left out.
    """
    newest = newest_of(events, EventName.VERDICT)
    if newest is None:
        return []
    facts = newest.details
    rank, node = facts.get("rank"), facts.get("node")
    culprit = " on ".join([*([f"rank {rank}"] if type(rank) is int else []), *([str(node)] if node else [])])
    rows = [("culprit", culprit), ("re-run", str(facts.get("rerun") or ""))]
    rows += [("suspect", _suspect(each)) for each in listed(facts.get("suspects"))]
    rows += [("evidence", str(each)) for each in listed(facts.get("evidence"))]
    rows += [("traceback", line) for line in str(facts.get("traceback") or "").splitlines()]
    known = [(name, text) for name, text in rows if text.strip()]
    return [("attempt", newest.attempt), ("cause", str(facts.get("cause", "?"))), *known] if known else []


def _suspect(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    rank, gpu = value.get("rank"), value.get("gpu")
    details = [*([f"rank {rank}"] if type(rank) is int else []), *([str(gpu)] if gpu else [])]
    return str(value.get("node", "?")) + (f" ({', '.join(details)})" if details else "")


def look_told(events: Sequence[Event]) -> list[tuple[str, str]]:
    """The newest look at the ranks as names and texts, the attempt first; empty where there was none.

    The journal may be damaged or of a newer slurmft: what does not fit is left out.
    """
    newest = newest_of(events, EventName.LAST_LOOK)
    if newest is None:
        return []
    facts = newest.details
    culprits = [each for each in listed(facts.get("culprits")) if isinstance(each, Mapping)]
    rows = [row for each in culprits[:MAX_SHOWN] for row in _culprit(each)]
    if len(culprits) > MAX_SHOWN:
        rows.append(("culprit", f"and {len(culprits) - MAX_SHOWN} more"))
    if not culprits:
        rows.append(("culprit", f"not found: {facts.get('undecided') or 'no reason given'}"))
    rows += [("victims", str(each)) for each in listed(facts.get("victims"))]
    rows += [("collective", str(each)) for each in listed(facts.get("collectives"))]
    rows.append(("files", str(facts.get("folder") or "")))
    return [("attempt", newest.attempt), *((name, text) for name, text in rows if text.strip())]


def _culprit(each: Mapping[str, Any]) -> list[tuple[str, str]]:
    reason = str(each.get("reason", ""))
    where = f"rank {each.get('rank', '?')} on {each.get('node') or '?'}"
    step = f" (step {each['step']})" if type(each.get("step")) is int and " at step " not in reason else ""
    sections = " > ".join(map(str, listed(each.get("sections"))))
    return [
        ("culprit", f"{where}{step}: {reason}"),
        ("section", sections),
        *(("stack", str(call)) for call in listed(each.get("stack"))),
    ]


def saves_told(events: Sequence[Event]) -> list[tuple[str, str]]:
    """What ``slurmft explain`` shows of saves that keep failing, as names and texts: the attempt, then the facts.

    Empty when saves work again.
    """
    for event in reversed(events):
        if event.event == EventName.SAVES_KEEP_FAILING:
            text = str(event.details.get("reason", ""))
            return [("attempt", event.attempt), ("problem", text), ("remedy", _REMEDY)]
        if event.event == EventName.SAVES_WORK_AGAIN or (
            event.event == EventName.DECISION and event.details.get("action") == "finish"
        ):
            return []
    return []


_REMEDY = "free space or repair the filesystem; the run saves at its next try, or at once with slurmft save"


def started_here(run: RunFolder) -> int | None:
    """The process that was started for the run on this machine, while it lives; None where there is none.

    It owns the run only a moment later, and again a moment after its supervisor was killed: its guardian goes on.

    Raises:
        StorageError: the journal cannot be read.
    """
    started = run.journal().newest(EventName.STARTED_HERE)
    if started is None or started.details.get("host") != processes.me().host:
        return None
    pid, birth = started.details.get("process"), started.details.get("birth")
    return pid if isinstance(pid, int) and isinstance(birth, str) and processes.lives(pid, birth) else None


def process_here(run: RunFolder, owner: Owner | None) -> int | None:
    """The process of this machine that runs it, or is about to; None for a run of Slurm's, and where there is none.

    Raises:
        StorageError: as ``started_here``.
    """
    if owner is not None and owner.cluster != "local":
        return None
    return owner.pid if owner is not None and local_owner_lives(owner) else started_here(run)


def _permission_hint(run: RunFolder) -> str:
    try:
        return f"it belongs to {run.path.owner()}"
    except (OSError, KeyError):
        return "it may belong to another user"


def overview(run: RunFolder, records: Mapping[OwnJob, JobRecord] | None) -> Overview:
    """The run's state; ``records`` is what Slurm said of its jobs, None when it did not answer.

    Raises:
        StorageError: one of the run's files cannot be read or believed.
        OSError: the folder cannot be looked at.
    """
    _refuse_odd(run.config)
    owner, done, progress = run.owner(), run.done(), progress_of(run)
    jobs = run.jobs()
    state, detail = _state(run, owner, done, run.own_jobs(newest=NEWEST_SHOWN), records)
    if progress.problem:
        detail = f"{detail} ({progress.problem})"
    if state == "running" and progress.replicas:
        detail = f"{detail}; {one_line(progress.replicas)}"
    if state == "running" and (run.path / "serving").is_dir():
        detail = "; ".join(filter(None, (detail, *_told_of_endpoint(run, owner))))
    if state == "running" and progress.copied is not None and progress.copied > (progress.saved_step or 0):
        detail = f"{detail}; step {progress.copied} is in memory on all nodes"
    failed = max(0, progress.failed_saves or 0) if state == "running" else 0
    if failed:
        detail = f"{detail}; SAVES FAIL: {failed} in a row, {progress.save_problem or 'reason unknown'}"
    return Overview(
        run=run.name,
        folder=str(run.path),
        state=state,
        detail=detail,
        job=jobs[-1] if jobs else None,
        jobs=tuple(jobs),
        step=progress.step,
        until=progress.until,
        saved=progress.saved_step,
        metric=progress.metric,
        attempts=owner.generation if owner is not None else 0,
        at=progress.at,
        failed_saves=failed,
    )


def _told_of_endpoint(run: RunFolder, owner: Owner | None) -> Iterator[str]:
    """Why its successor has no nodes, and what follows; a rolling update that is under way, or has gone back."""
    from slurmft.inference.endpoint import State, read_handover, read_update  # other runs have no use for it

    handover, update = read_handover(run.path), read_update(run)
    if handover is not None and owner is not None and handover.predecessor == owner.job and handover.waits:
        yield f"handover: {handover.waits}"
    if update is not None and update.state is State.BACK:
        yield f"update {update.number} went back to the old engine: {update.reason}"
    elif update is not None and update.state is not State.DONE:
        yield f"update {update.number}: {update.renewed} of {update.total} replicas have the new engine"


def _refuse_odd(path: Path) -> None:
    """Return when what lies there, if anything does, can be read as a file.

    Raises:
        StorageError: it cannot.
        OSError: the folder cannot be looked at.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            check_regular(path, path.stat())
        except UnsafeFile as error:
            raise StorageError(f"cannot read {path}: it {error.strerror}", hint=MOVE_AWAY) from error


def overviews(runs: Sequence[RunFolder]) -> list[Overview]:
    """All of them with one question to Slurm; for a single one that was cancelled also with the user who did it."""
    found = _looked_at(runs, TRIES)
    if len(runs) == 1 and found[0].state == "stopped" and (who := who_cancelled(runs[0])):
        found = [replace(found[0], detail=f"{found[0].detail} by {who}")]
    return found


def _looked_at(runs: Sequence[RunFolder], tries: int) -> list[Overview]:
    """Slurm is asked again about runs whose jobs changed since it was asked: they only look as if they had stopped."""
    jobs = {run.path: _own_jobs(run) for run in runs}
    asked = [job for mine in jobs.values() for job in mine]
    records: Mapping[OwnJob, JobRecord] = {}
    unknown: Collection[OwnJob] = ()
    if asked and slurm.available():
        try:
            records, unknown = own_jobs.find_where_answered(asked)
        except SlurmError:
            unknown = asked
    unseen = {path for path, mine in jobs.items() if any(job in unknown for job in mine)}
    found = [_overview_or_damage(run, None if run.path in unseen else records) for run in runs]
    moved = [at for at, run in enumerate(runs) if found[at].state == "stopped" and _own_jobs(run) != jobs[run.path]]
    if moved and tries > 1:
        for at, view in zip(moved, _looked_at([runs[at] for at in moved], tries - 1), strict=True):
            found[at] = view
    return found


def _own_jobs(run: RunFolder) -> list[OwnJob]:
    try:
        return [] if run.done() else run.own_jobs(newest=NEWEST_SHOWN)
    except (StorageError, OSError):
        return []  # _overview_or_damage reports the error


def _overview_or_damage(run: RunFolder, records: Mapping[OwnJob, JobRecord] | None) -> Overview:
    """One damaged run folder must not hide the others."""
    try:
        return overview(run, records)
    except StorageError as error:
        hint = _permission_hint(run) if isinstance(error.__cause__, PermissionError) else error.hint
        why = "; ".join(filter(None, (error.what, hint)))
    except OSError as error:
        why = f"{error.filename or run.path}: {error.strerror}; {_permission_hint(run)}"
    nothing: dict[str, Any] = dict.fromkeys(("job", "step", "until", "saved", "metric", "at"))
    return Overview(run=run.name, folder=str(run.path), state="damaged", detail=why, jobs=(), attempts=0, **nothing)


def _state(
    run: RunFolder,
    owner: Owner | None,
    done: Mapping[str, Any] | None,
    jobs: Sequence[OwnJob],
    records: Mapping[OwnJob, JobRecord] | None,
) -> tuple[str, str]:
    if done is not None:
        return "finished", str(done.get("reason", ""))
    if (pid := process_here(run, owner)) is not None:
        return "running", f"process {pid} on {processes.me().host}"
    if jobs and records is None:
        return "unknown", "Slurm did not answer"
    mine = [record for job in jobs if (record := (records or {}).get(job)) is not None]
    for record in mine:
        if record.alive:
            return "running", f"job {record.job_id} {record.state.lower()} on {record.nodes}"
    for record in mine:
        if record.waiting:
            why = why_never(record.reason)
            held = why_held(record.reason)
            more = f": as things are it cannot start, {why}" if why else f": {held}" if held else ""
            return "waiting", f"job {record.job_id} {record.state.lower()} ({record.reason}){more}"
    return _ended(run)


def _ended(run: RunFolder) -> tuple[str, str]:
    event = run.journal().newest(
        EventName.ATTEMPT_STARTED,
        EventName.DECISION,
        EventName.CANCELLED,
        EventName.ENDED_FROM_OUTSIDE,
        EventName.SUBMISSION_FAILED,
    )
    if event is None:
        if (path := run.journal().path).exists() and path.stat().st_size > TAIL_BYTES:
            return "stopped", f"the newest {TAIL_BYTES >> 20} MiB of its journal do not say why"
        return "new", ""
    if event.event == EventName.ATTEMPT_STARTED:
        return "stopped", "it left no verdict; slurmft submit continues it, or requeue --rescue"
    return "stopped", str(event.details.get("reason", event.event))


def who_cancelled(run: RunFolder) -> str:
    """The user who cancelled the run's newest job, from the accounting; empty where it is not known. One command."""
    jobs = run.own_jobs(newest=1)
    verdict = run.journal().newest(EventName.VERDICT) if jobs else None
    if verdict is None or verdict.details.get("cause") != Cause.CANCELLED:
        return ""
    user_id = own_jobs.cancelled_by(jobs[-1])
    return "" if user_id is None else user_name(user_id)


def logs_of(run: RunFolder, *, rank: int, attempt: str | None = None) -> list[Path]:
    """The logs of a rank, oldest first; the supervisor's where no worker has written one.

    Args:
        attempt: only the log of this one, as JOB.RESTART.CYCLE.

    Raises:
        UsageError: there is no such attempt or rank.
        StorageError: nothing was written yet.
    """
    folders = oldest_first(folder for folder in run.attempts.glob("*") if folder.is_dir())
    if attempt is not None:
        known = ", ".join(folder.name for folder in folders[-5:]) or "none yet"
        folders = [folder for folder in folders if folder.name == attempt]
        if not folders:
            raise UsageError(f"run {run.path.name} has no attempt {attempt!r}", hint=f"its newest attempts: {known}")
    files = [path for folder in folders if (path := folder / f"rank-{rank}.log").is_file()]
    if not files and any(any(folder.glob("rank-*.log")) for folder in folders):
        raise UsageError(f"run {run.path.name} has no rank {rank}", hint=f"ls {run.attempts}")
    if not files:
        found = [*run.logs.glob("*.log"), *run.submissions.glob("*_log.out")]
        files = oldest_first(path for path in found if path.is_file())
    if not files:
        raise StorageError(f"run {run.path.name} has no output of rank {rank} yet", hint=f"slurmft status {run.path}")
    return files


def oldest_first(paths: Iterable[Path]) -> list[Path]:
    """The paths by the time of their last change; those that are gone come first."""

    def changed(path: Path) -> float:
        try:
            return path.lstat().st_ctime
        except OSError:
            return 0.0

    return sorted(paths, key=changed)


def has_ended(view: Overview, events: Sequence[Event], *, since: float) -> bool:
    """Whether nothing follows any more.

    Args:
        events: the journal since the submission.
        since: Unix time of the submission.
    """
    if view.state == "finished" or (view.state == "stopped" and is_over(events)):
        return True
    return view.state in ("stopped", "new", "damaged") and time.time() - since > GIVE_UP_S


def exit_code_of(view: Overview, events: Sequence[Event]) -> int:
    """The exit code of a run that has ended; of one that left no decision: temporary."""
    if view.state == "finished":
        return 0
    decision = newest_of(events, EventName.DECISION)
    told = None if decision is None else decision.details.get("exit_code")
    return told if isinstance(told, int) else EXIT_TEMPORARY


def is_over(events: Sequence[Event]) -> bool:
    """Whether nothing follows the newest decision; a run that goes on has no process for a moment."""
    if (decision := newest_of(events, EventName.DECISION)) is None:
        return False
    goes_on = decision.details.get("action") in GOES_ON and events[-1].event != EventName.NOT_CONTINUED
    return not goes_on or time.time() - events[-1].seconds() > NEXT_START_S


# --- Acting on it: stop it, send it through the queue, ask it for a save, remove it ---

NEWEST = 20
"""The newest jobs of a run that Slurm is asked about; earlier ones have ended long ago."""

MAX_DEPTH = 200
"""Folders in folders of a run that are removed; each is a descriptor or two, of which a process has 1024."""


def records_of(run: RunFolder) -> dict[OwnJob, JobRecord]:
    """The run's newest jobs as Slurm knows them, oldest first.

    Raises:
        SlurmUnavailable: Slurm did not answer.
        StorageError: the folder is a copy of another run's, whose jobs it names.
    """
    run.refuse_copy()
    return own_jobs.find(run.own_jobs(newest=NEWEST))


def is_unseen(run: RunFolder, records: Mapping[OwnJob, JobRecord]) -> bool:
    """Whether the run's supervisor gives signs of life although neither Slurm nor this machine knows it.

    Raises:
        StorageError: the run folder cannot be read or written.
    """
    owner = run.owner()
    if owner is None or any(job.job_id == owner.job for job in records):
        return False
    if owner.cluster == "local" and owner.host == processes.me().host:
        return False  # a process of another machine shows itself as a supervisor does that Slurm does not know
    return run.done() is None and run_folder.is_fresh(run, owner)


def is_alive(run: RunFolder) -> bool:
    """Whether the run has a job with nodes, a process on this machine, or a live supervisor that Slurm does not list.

    Raises:
        SlurmUnavailable: Slurm did not answer.
    """
    owner = run.owner()
    if process_here(run, owner) is not None:
        return True
    records = {} if owner is not None and owner.cluster == "local" else records_of(run)
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
    if any(event.event == EventName.BORROWING for event in journal.read()):
        own_jobs.end_lenders(run)
    ids = [job.job_id for job in waiting]
    if run.done() is None:  # also where nothing waits: a run that has lost its job must not be rescued any more
        journal.append(EventName.CANCELLED, jobs=ids, reason=f"cancelled by {who}")
    return f"cancelled the waiting job {', '.join(ids)}" if waiting else f"run {run.path.name} is not running"


def remove(run: RunFolder) -> None:
    """Remove the run's folder with all that is in it; links in it are removed, and not followed.

    It gets another name first: what is left of it when this process is killed is no run any more, and goes with the
    next removal of that name.

    Raises:
        RunBusy: a job or a process of it lives, or one waits.
        UsageError: the path is a link, the folder is not the caller's alone, or more than a run is in it.
        StorageError: something could not be removed.
    """
    if run.path.is_symlink():
        raise UsageError(f"{run.path} is a link", hint=f"the run is {run.path.resolve()}")
    if run.path.exists():
        with run.lock():  # a submission holds it as well
            refuse_busy(run, ask_slurm=bool(run.jobs()))
            _refuse_more_than_a_run(run)
            try:
                with open_folder(run.path, owner=os.geteuid()):
                    run.path.rename(run_folder.removed_name(run.path))
            except UnsafeFile as error:
                raise UsageError(f"{run.path} {error.strerror}", hint="chmod go-w it first, if it is yours") from error
            except OSError as error:
                raise StorageError(f"cannot remove {run.path}: {error.strerror or error}") from error
    for gone in run_folder.left_overs(run.path):
        try:
            _refuse_mounts(gone)
            remove_tree(gone, owner=os.geteuid(), depth=MAX_DEPTH)
        except OSError as error:
            where, again = error.filename or gone, f"slurmft rm {shlex.quote(str(run.path))}"
            raise StorageError(f"cannot remove all of {gone}: {where}: {error.strerror or error}",
                               hint=f"chmod what is read-only; {again} goes on") from error  # fmt: skip
    run_folder.forget_run(run.path, os.environ)


def refuse_busy(run: RunFolder, *, ask_slurm: bool) -> None:
    """Return when no process and no job of the run lives or waits.

    Args:
        ask_slurm: its jobs count; without it, only the processes of this machine and signs of life.

    Raises:
        RunBusy: one does; names it.
        SlurmError: Slurm did not answer.
        StorageError: the run folder cannot be read or written.
    """
    owner = run.owner()
    if owner is not None and local_owner_lives(owner):
        raise RunBusy(f"run {run.path.name} is running here (process {owner.pid})", hint=f"slurmft stop {run.path}")
    if (pid := started_here(run)) is not None:
        raise RunBusy(f"run {run.path.name} is running here, starting or ending (process {pid})",
                      hint=f"slurmft status {run.path}, and slurmft stop once it runs")  # fmt: skip
    records = records_of(run) if ask_slurm else {}
    for record in records.values():
        if record.alive or record.waiting:
            raise RunBusy(
                f"run {run.path.name} has job {record.job_id} in state {record.state}",
                hint=f"slurmft stop {run.path} ends it after a save",
            )
    if is_unseen(run, records):
        raise RunBusy(
            f"run {run.path.name} is being trained, although Slurm does not know its job {owner and owner.job}",
            hint=f"is this the cluster, or the machine, it runs on ({owner and owner.host})? If its nodes are gone, "
            "try again in a minute",
        )


def _refuse_more_than_a_run(run: RunFolder) -> None:
    """Return when the folder is a run's, and holds nothing else that would go with it.

    Raises:
        UsageError: it is any folder with a file called config.yaml; or another run, a mounted filesystem, the home
            folder or the current one is in it.
    """
    real = Path(os.path.realpath(run.path))
    if not run.journal().read():
        raise UsageError(f"nothing was ever submitted from {run.path}: it may be no run's folder",
                         hint="rm -r removes any folder")  # fmt: skip
    for what, folder in (("the current folder", "/proc/self/cwd"), ("your home folder", "~")):
        if Path(os.path.realpath(os.path.expanduser(folder))).is_relative_to(real):  # noqa: PTH111 - may be unknown
            raise UsageError(f"{what} is in {run.path}", hint="a run is removed from outside of its folder")
    for other in run_folder.list_runs(real):
        if other.has_records() and Path(os.path.realpath(other.path)).is_relative_to(real):
            raise UsageError(f"another run is in {run.path}: {other.path}", hint="remove or move that one first")
    _refuse_mounts(real)


def _refuse_mounts(folder: Path) -> None:
    """Return when no other filesystem, and no other folder, is mounted below: its content is not the run's."""
    from slurmft.health.node import Scene, mounts  # by a removal alone

    for mount in mounts(Scene(node="", now=0.0)):
        if mount.point != folder and mount.point.is_relative_to(folder):
            raise UsageError(f"{mount.point} is mounted in it", hint="unmount it first")


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
    # told so again and again, Slurm would never come to begin it
    if record.reason in _FOR_ROOM and _seconds_since(run, EventName.BEGIN_NOW, job.job_id) < BEGIN_AGAIN_S:
        return f"job {job} may begin already, and waits for nodes"
    if "held" in record.reason.lower() or record.state == "REQUEUE_HOLD":
        own_jobs.release(job)
    own_jobs.begin_in(job, own_jobs.SOONEST_S)
    run.journal().append(EventName.BEGIN_NOW, job=job.job_id, who=who)
    return f"job {job} may begin now"


def _seconds_since(run: RunFolder, name: str, job: str = "") -> float:
    """How long ago the run's journal has had such an event, about ``job`` where that is given; infinite: never."""
    told = (event for event in run.journal().read() if event.event == name)
    return time.time() - max((each.seconds() for each in told if not job or each.details.get("job") == job),
                             default=-math.inf)  # fmt: skip


# --- Inside a job that lends its nodes: agents there report to the run's supervisor, as long as both live ---

LEND_LOOK_S = 2.0
_GOES_ON = (EventName.SUBMITTING, EventName.ATTEMPT_STARTED, EventName.REQUEUED_MEANWHILE)
LEND_PATIENCE_S = 1800.0
"""How long a lending job waits for a run that is between two jobs, before it gives its nodes back."""

GIVE_WAY_S = 60.0
"""So long without a supervisor, a lending job looks whether the run's own job waits for a node, such as its own."""

BEGIN_AGAIN_S = 60.0
"""So long a job that was told to begin now is left to Slurm."""

_FOR_ROOM = frozenset({"None", "Resources", "Priority"})
"""Slurm's reasons of a job that would begin if it had nodes."""

log = logging.getLogger(__name__)


def lend(run: RunFolder, environment: Mapping[str, str]) -> int:
    """Keep agents for the run on this job's nodes; returns when the run is over, or has not used them for long.

    Raises:
        UsageError: this is not a job, or not the run's user.
        SlurmUnavailable: there is no srun.
    """
    from slurmft.operations.run_configuration import configuration_of  # more than other verbs need
    from slurmft.supervisor.agents import crew_of

    job = current_job(environment)
    if job is None:
        raise UsageError("this is not inside a Slurm job", hint=f"slurmft join {run.path}")
    config = configuration_of(run)
    wanted_s = looked_s = time.monotonic()
    while run.done() is None:
        if (now_s := time.monotonic()) - looked_s > min(GIVE_WAY_S, LEND_PATIENCE_S):
            looked_s, silent_s = now_s, _silence_s(run)
            wanted_s = max(wanted_s, now_s - silent_s)
            if now_s - wanted_s > LEND_PATIENCE_S or (silent_s > GIVE_WAY_S and _gives_way(run, job.job_id)):
                return 0
        if (crew := crew_of(run)) is None:
            if _was_stopped(run):
                return 0
            time.sleep(LEND_LOOK_S)
            continue
        code = _serve(config, crew, job, environment)
        if code == EXIT_TEMPORARY:  # the agents were notified that this job ends, and have given their nodes back
            return 0
        time.sleep(LEND_LOOK_S)
    return 0


def _silence_s(run: RunFolder) -> float:
    """How long ago the run's supervisor has given a sign of life; infinite where that is unknown."""
    try:
        owner = run.owner()
        silent_s = None if owner is None else run_folder.silence_s(run, owner)
    except (StorageError, OSError):
        return math.inf
    return math.inf if silent_s is None else silent_s


def _gives_way(run: RunFolder, job: str) -> bool:
    """Whether the run's own job waits for nodes, and this is the newest of the jobs that lend it some: one at a time
    gives its nodes back. One that its user has submitted to lend nodes stays.
    """
    try:
        if not any(each.waiting and each.reason in _FOR_ROOM for each in records_of(run).values()):
            return False
        lending = [each.job_id for each in own_jobs.lenders(run) if each.alive]
        if job not in lending or job != max(lending, key=int):
            return False
        if _seconds_since(run, EventName.LENDER_GAVE_WAY) < GIVE_WAY_S / 2:
            return False
        run.journal().append(EventName.LENDER_GAVE_WAY, job=job)
    except (SlurmError, StorageError, OSError, ValueError) as error:
        log.warning("cannot tell whether the run's job waits for this node: %s", error)
        return False
    return True


def _was_stopped(run: RunFolder) -> bool:
    """Whether nothing follows the last attempt, and the run is not queued again; False where that cannot be known."""
    with contextlib.suppress(StorageError):
        told = [one for one in run.journal().read() if one.event in (EventName.DECISION, *_GOES_ON)]
        return bool(told) and told[-1].event == EventName.DECISION and told[-1].details.get("action") == Action.STOP
    return False


def _serve(config: RunConfig, crew: Attempt, job: SlurmJob, environment: Mapping[str, str]) -> int:
    from slurmft.agent.workers import LENDER_VARIABLE
    from slurmft.supervisor.cluster import agents_argv, environment_for

    together = config.trials is not None and config.trials.nodes > 1
    argv = agents_argv(config, environment, job.node_count, crew, together=together)
    log.info("lending %s to run %s", job.nodes, config.name)
    try:
        with subprocess.Popen(
            argv,
            env={**environment_for(config, os.environ), LENDER_VARIABLE: job.job_id},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            return process.wait()
    except FileNotFoundError as error:
        raise SlurmUnavailable("there is no srun on this node") from error
