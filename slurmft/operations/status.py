"""The state of a run, from its folder and from Slurm: the values behind ``slurmft status`` and ``slurmft explain``.

Files that are damaged, of a newer version or not ours to read make their own run ``damaged``, and hide no other one.
"""

from __future__ import annotations

import contextlib
import pwd
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.errors import SlurmError, StorageError, UsageError
from slurmft.inference.endpoint import State, read_handover, read_update
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.verdict import EXIT_TEMPORARY, GOES_ON, Cause
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.parsing import JobRecord, why_held, why_never
from slurmft.storage.journal import TAIL_BYTES, Event, EventName
from slurmft.storage.run_folder import Owner, RunFolder, progress_of
from slurmft.supervisor.guardian import process_here
from slurmft.system import processes
from slurmft.system.files import MOVE_AWAY, UnsafeFile, check_regular
from slurmft.system.foreign_text import one_line

NEWEST = 5
"""The newest jobs of a run that Slurm is asked about."""

GIVE_UP_S = 30.0
"""A run without a decision and without a job for this long counts as failed."""

NEXT_START_S = 10.0
"""How long a run that was decided to go on may have no process."""

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
    try:
        events, unreadable = run.journal().read_all()
    except FileNotFoundError as error:
        raise StorageError(f"run {run.path.name} has no journal yet: nothing was submitted",
                           hint="slurmft submit CONFIG submits it") from error  # fmt: skip
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError):
            raise StorageError(error.what, hint=_permission_hint(run)) from error.__cause__
        raise
    return Story(events=events, unreadable=unreadable)


def account_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Details of the newest verdict beside its reason, as names and texts: culprit, suspects, evidence, traceback.

    Empty when no rank is blamed. The journal may be damaged or of a newer slurmft: what does not fit is left out.
    """
    newest = next((event for event in reversed(events) if event.event == EventName.VERDICT), None)
    if newest is None:
        return []
    facts = newest.details
    rank, node = facts.get("rank"), facts.get("node")
    culprit = " on ".join([*([f"rank {rank}"] if type(rank) is int else []), *([str(node)] if node else [])])
    rows = [("culprit", culprit), ("re-run", str(facts.get("rerun") or ""))]
    rows += [("suspect", _suspect(each)) for each in _listed(facts.get("suspects"))]
    rows += [("evidence", str(each)) for each in _listed(facts.get("evidence"))]
    rows += [("traceback", line) for line in str(facts.get("traceback") or "").splitlines()]
    known = [(name, text) for name, text in rows if text.strip()]
    return [("attempt", newest.attempt), ("cause", str(facts.get("cause", "?"))), *known] if known else []


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _suspect(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    rank, gpu = value.get("rank"), value.get("gpu")
    details = [*([f"rank {rank}"] if type(rank) is int else []), *([str(gpu)] if gpu else [])]
    return str(value.get("node", "?")) + (f" ({', '.join(details)})" if details else "")


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
    state, detail = _state(run, owner, done, run.own_jobs(newest=NEWEST), records)
    if progress.problem:
        detail = f"{detail} ({progress.problem})"
    if state == "running" and (waits := _successor_waits(run, owner)):
        detail = f"{detail}; handover: {waits}"
    if state == "running" and progress.replicas:
        detail = f"{detail}; {one_line(progress.replicas)}"
    if state == "running" and (update := _update_told(run)):
        detail = f"{detail}; {update}"
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


def _successor_waits(run: RunFolder, owner: Owner | None) -> str:
    """Why the successor of an endpoint has no nodes, and what follows; empty where there is none, or it has some."""
    handover = read_handover(run.path)
    return handover.waits if handover is not None and owner is not None and handover.predecessor == owner.job else ""


def _update_told(run: RunFolder) -> str:
    """A rolling update that is under way, or has gone back; empty where there is none."""
    update = read_update(run)
    if update is None or update.state is State.DONE:
        return ""
    if update.state is State.BACK:
        return f"update {update.number} went back to the old engine: {update.reason}"
    return f"update {update.number}: {update.renewed} of {update.total} replicas have the new engine"


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
        return [] if run.done() else run.own_jobs(newest=NEWEST)
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
    if user_id is None:
        return ""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user id {user_id}"


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
    decisions = [event for event in events if event.event == EventName.DECISION]
    told = decisions[-1].details.get("exit_code") if decisions else None
    return told if isinstance(told, int) else EXIT_TEMPORARY


def is_over(events: Sequence[Event]) -> bool:
    """Whether nothing follows the newest decision; a run that goes on has no process for a moment."""
    decisions = [event for event in events if event.event == EventName.DECISION]
    if not decisions:
        return False
    goes_on = decisions[-1].details.get("action") in GOES_ON and events[-1].event != EventName.NOT_CONTINUED
    return not goes_on or time.time() - events[-1].seconds() > NEXT_START_S
