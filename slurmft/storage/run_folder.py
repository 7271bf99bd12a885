"""The run folder: the only module that knows which file lies where, and the only home of filelock.

In one piece, since names, owners and locks decide together what a reader of the folder may believe; a path that is
built elsewhere would escape those checks.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import itertools
import logging
import os
import pwd
import re
import secrets
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import filelock

from slurmft.errors import RunBusy, StorageError
from slurmft.policy.job_identity import NOTHING_KNOWN, JobIdentity, OwnJob, identity_from, is_same_job, merged
from slurmft.storage.checkpoint_names import OWNER_FILE
from slurmft.storage.journal import EventName, Journal
from slurmft.storage.patience import PASSING, SoftLock, translated, write_state, writing
from slurmft.system import files, processes

# --- claim ---
# The claim to act on the end of an attempt: supervisor, guardian and cron may all try.

SUPERVISOR = "supervisor on "
"""Prefix of the name of an actor inside the job, which ends with the job."""

CLAIM_LEASE_S = 180.0
"""An older claim without an outcome belongs to a process that died on another host."""


class EndingClaim:
    """The right to act on the end of one (job, restart).

    It is held by one living process until it is settled with an outcome, which is for good, or given back.
    """

    def __init__(self, path: Path, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self.path, self._lock = path, lock

    def take(self, actor: str, *, instead_of: str = "") -> bool:
        """Whether the caller has the right to act.

        Args:
            instead_of: beginning of the name of an actor that is known to be gone; its claim without an outcome is
                void.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        with self._lock():
            claim = files.read_json(self.path)
            free = claim is not None and claim.get("outcome") is None and _is_of(claim, instead_of)
            if _is_taken(claim) and not free:
                return False
            me = processes.me()
            mine = {"actor": actor, "at": time.time(), "host": me.host, "pid": me.pid, "birth": me.birth}
            write_state(self.path, {**mine, "outcome": None})
            return True

    def outcome(self) -> str | None:
        """The outcome; None while it is not settled.

        Raises:
            StorageError: the run folder cannot be read.
        """
        return (files.read_json(self.path) or {}).get("outcome")

    def settle(self, outcome: str) -> None:
        """Mark it as acted on, for good.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        write_state(self.path, {**(files.read_json(self.path) or {}), "outcome": outcome})

    def give_back(self) -> None:
        """Acting failed, or the settled action did not happen; another process may try."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _is_taken(claim: Mapping[str, Any] | None) -> bool:
    if claim is None:
        return False
    if claim.get("outcome") is not None:
        return True
    me = processes.me()
    if claim.get("host") == me.host:
        pid = claim.get("pid")
        return isinstance(pid, int) and pid != me.pid and processes.lives(pid, str(claim.get("birth", "")))
    at = claim.get("at")
    return isinstance(at, int | float) and abs(time.time() - at) < CLAIM_LEASE_S


def _is_of(claim: Mapping[str, Any], actor: str) -> bool:
    return bool(actor) and str(claim.get("actor", "")).startswith(actor)


# --- ``live.json``: what each rank of a running attempt does, written every few seconds for people and monitoring ---
# It is not part of the run's state. Lists have one value for each rank; it is believed value by value.

LIVE_FILE = "live.json"
MAX_RANKS = 100_000
MAX_NAME = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveView:
    """One look at all ranks."""

    at: float = 0.0
    """Unix time of the look; 0 where there was none."""

    attempt: str = ""
    steps: Sequence[float | None] = ()
    """Newest step of each rank."""

    step_s: Sequence[float | None] = ()
    """Seconds of a step: a rank's own work in the newest window of straggler detection where that is known, else the
    time between its newest steps."""

    nodes: Sequence[str] = ()
    sections: Sequence[str] = ()
    """The innermost open section of each rank; empty where none is open, or the rank was not heard."""

    section_s: Sequence[float | None] = ()
    heartbeat_s: float | None = None
    """Age of the oldest sign of life of a rank, in seconds."""

    hang_used: float | None = None
    """The largest part of a limit that some rank's section has used up: 1 is a hang."""

    restarts_left: int | None = None
    """Failures of the same kind that the run survives without progress; the least of all kinds."""

    save_interval_steps: int | None = None
    """Steps between two saves; None where they are not counted in steps."""

    tiers: Mapping[str, str] = field(default_factory=dict)
    """Where the newest save lies: tier -> in words."""


def read(run_folder: Path) -> LiveView:
    """The newest look; an empty one where there is none, or it cannot be believed."""
    try:
        facts = files.read_json(run_folder / LIVE_FILE) or {}
    except StorageError:
        return LiveView()
    tiers = facts.get("tiers")
    kinds: Mapping[Any, Callable[[Any], Any]] = {"Sequence[float | None]": _numbers, "Sequence[str]": _texts,
                                                 "float | None": files.number, "int | None": _count}  # fmt: skip
    return LiveView(
        **{each.name: kinds[each.type](facts.get(each.name)) for each in fields(LiveView) if each.type in kinds},
        at=files.number(facts.get("at")) or 0.0,
        attempt=str(facts.get("attempt") or "")[:MAX_NAME],
        tiers={str(name)[:MAX_NAME]: str(text)[:MAX_NAME] for name, text in list(tiers.items())[:8]}
        if isinstance(tiers, dict) else {},
    )  # fmt: skip


def write(run_folder: Path, view: LiveView) -> None:
    """Replace it; need not survive a power cut.

    Raises:
        OSError: the run folder cannot be written.
    """
    facts = {name: getattr(view, name) for name in LiveView.__slots__}
    files.write_json(run_folder / LIVE_FILE, {name: value for name, value in facts.items() if value is not None},
               durable=False)  # fmt: skip


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 10**15 else None


def _numbers(value: Any) -> tuple[float | None, ...]:
    return tuple(files.number(each) for each in value[:MAX_RANKS]) if isinstance(value, list) else ()


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(each)[:MAX_NAME] for each in value[:MAX_RANKS]) if isinstance(value, list) else ()


class ProgressMarks:
    """When an attempt came to its newest step, and to its newest save: for monitoring."""

    def __init__(self, attempt: Any) -> None:
        self.attempt = attempt
        self._newest: dict[str, int] = {}
        self._facts: dict[str, float] = {}

    def facts(self, progress: Mapping[str, Any]) -> Mapping[str, float]:
        """``progressed_at`` and ``saved_at``, as Unix times."""
        for name, mark in (("step", "progressed_at"), ("saved", "saved_at")):
            value = progress.get(name)
            if isinstance(value, int) and value > self._newest.get(name, -1):
                self._newest[name], self._facts[mark] = value, time.time()
        return self._facts


# --- The file of the jobs of a run: their ids, and their identities; folders of earlier versions hold ids alone ---

JOBS_FILE = "jobs.json"
LOCAL_PREFIX = "local-"
"""Begins the job id of a run that has no Slurm around it."""

_JOB_ID = re.compile(r"(\d{1,10})(?:[_+]\d{1,10})?", re.ASCII)
_MAX_ID = 2**31 - 1


# --- The file by which a user asks a run for a fault: believed only when the run's own user has written it ---

ORDER_FILE = "INJECT"
MAX_AGE_S = 300.0
"""An older order was meant for an attempt that is gone; clocks of machines may differ by less."""

MAX_BYTES = 4096


def is_pending(run: Path) -> bool:
    """Whether an order waits to be taken."""
    return (run / ORDER_FILE).exists()


def give_order(run: Path, order: Mapping[str, Any]) -> None:
    """Leave an order for the run's supervisor, readable by this user alone.

    Raises:
        StorageError: it cannot be written.
    """
    with writing(run / ORDER_FILE):
        files.write_json(run / ORDER_FILE, order, mode=0o600)


def withdraw_order(run: Path) -> None:
    """Remove the order that waits, if one still does."""
    (run / ORDER_FILE).unlink(missing_ok=True)


def take_order(run: Path) -> dict[str, Any] | None:
    """The order that waits, removing it; None when there is none.

    Raises:
        StorageError: the file is not an order of this user; it is removed all the same.
    """
    path = f"{run}/{ORDER_FILE}"  # there is none four times a second: a Path takes longer than the look
    try:
        with files.opened(path, follow=False, owners={os.getuid()}) as descriptor:
            status, text = os.fstat(descriptor), os.read(descriptor, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, not ours, or not ours to read
        Path(path).unlink(missing_ok=True)
        raise StorageError(f"{path} is not to be trusted: it {error.strerror}") from error
    Path(path).unlink(missing_ok=True)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StorageError(f"{path} can be read or written by others (mode {stat.S_IMODE(status.st_mode):o})")
    if time.time() - status.st_mtime > MAX_AGE_S:
        raise StorageError(f"{path} is {time.time() - status.st_mtime:.0f} s old: it was meant for an earlier attempt")
    return _parsed(text, path)


def _parsed(text: bytes, path: str) -> dict[str, Any]:
    try:
        value = files.parse_json(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict) or type(value.get("format")) is not int or value["format"] > files.FORMAT:
        raise StorageError(f"{path} is not an order that this slurmft understands")
    return value


# --- The owner of a run folder: conditions before anything in it is executed, submitted, followed or changed ---
# A run folder is trusted because of its owner, so each check asks the filesystem and never a file's content. Readers
# need none of this; every verb that acts does.

MAX_LINKS = 40
"""Symbolic links in one path, as the kernel counts."""


def user_name(user_id: int) -> str:
    """The user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user id {user_id}"


def refuse_foreign(folder: Path, *, folders: Sequence[Path], regular: Sequence[Path]) -> None:
    """Return when ``folder`` and those of ``folders`` and ``regular`` (files) that exist are the caller's.

    Raises:
        StorageError: one of them belongs to another user, is not what its name says, or everyone may write to it.
        OSError: the folder cannot be looked at.
    """
    link, status = os.lstat(folder), folder.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.getuid()):
        raise StorageError(f"{folder} is a symbolic link that {user_name(link.st_uid)} made",
                           hint="name the run folder itself")  # fmt: skip
    if status.st_uid != os.getuid():
        hint = "choose another run_folder, or ask its owner"
        if os.getuid() == 0:
            hint = f"act as its owner: runuser -u {user_name(status.st_uid)} -- slurmft ..."
        raise StorageError(f"the run folder {folder} belongs to user id {status.st_uid}, not to you", hint=hint)
    if status.st_mode & stat.S_IWOTH:
        raise StorageError(f"the run folder {folder} is writable by everybody", hint=f"chmod o-w {folder}")
    for path, is_kind in (*((path, stat.S_ISDIR) for path in folders), *((path, stat.S_ISREG) for path in regular)):
        for found in _statuses(path):
            if found.st_uid != os.getuid():
                raise StorageError(
                    f"{path} belongs to user id {found.st_uid}, not to you",
                    hint="another user can write to this run folder: chmod go-w it, then look at what was changed",
                )
            if not is_kind(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                kind = "folder" if is_kind is stat.S_ISDIR else "regular file"
                raise StorageError(f"{path} is not a {kind}", hint="move it away")


def refuse_replaceable(folder: Path, *, parts: Sequence[Path]) -> None:
    """Return when no user but the caller and root could put another folder, or other ``parts``, in their place.

    For unattended actions. A user who may write to a folder can rename its content, so each folder on the way
    counts, links followed. An ordinary user trusts the owners and groups of the folders above; root trusts root alone.

    Raises:
        StorageError: one could.
        OSError: a folder cannot be looked at.
    """
    for step, status, above in _steps(folder):
        if os.getuid() == 0 and (above.st_uid != 0 or above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise StorageError(f"others than root may write to {step.parent}, above a run of root's",
                               hint="keep root's runs where all folders above are writable by root alone")  # fmt: skip
        is_sticky = above.st_mode & stat.S_ISVTX and status.st_uid in (0, os.getuid(), above.st_uid)
        if above.st_mode & stat.S_IWOTH and not is_sticky:
            raise StorageError(f"every user may replace {step}: {step.parent} is writable by everybody",
                               hint=f"chmod +t {step.parent}")  # fmt: skip
    status = folder.stat()
    if _others_may_write(status):
        raise StorageError(f"other users may write to the run folder {folder}", hint=f"chmod go-w {folder}")
    if not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return  # no other user gets that far, with any modes inside
    for path in parts:
        if any(_others_may_write(found) for found in _statuses(path) if not stat.S_ISLNK(found.st_mode)):
            raise StorageError(f"other users may write to {path}", hint=f"chmod go-w {path}")


def followed(path: Path) -> Path:
    """``path`` with its symbolic links resolved: those that the caller or root made where no other may replace them.

    Raises:
        StorageError: another link is on the way: its maker chose the target.
    """
    try:
        for step, status, above in _steps(path):
            if not stat.S_ISLNK(status.st_mode):
                continue
            trusted = {0, os.geteuid()}
            is_sticky = above.st_mode & stat.S_ISVTX
            if not {status.st_uid, above.st_uid} <= trusted or (_others_may_write(above) and not is_sticky):
                raise StorageError(
                    f"{step} is a symbolic link that others than you can make or replace; it is not followed",
                    hint="name the file itself, or move the link to a folder that only you can write to",
                )
    except OSError:
        pass  # the rest is still to be made, or its use says what is wrong
    return Path(os.path.realpath(path))


def _statuses(path: Path) -> list[os.stat_result]:
    """That of ``path`` and, where it is a symbolic link, of its target, as far as they exist."""
    found: list[os.stat_result] = []
    with contextlib.suppress(FileNotFoundError):
        found.append(os.lstat(path))
        if stat.S_ISLNK(found[0].st_mode):
            found.append(path.stat())
    return found


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and (os.getuid() == 0 or not _is_private(status.st_gid))


def _is_private(group_id: int) -> bool:
    """Whether the group is the caller's own and has no other member, as many systems give one to each user."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result, os.stat_result]]:
    """Each name on the way from / to ``path``, links followed: where, its own status, that of the folder it lies in."""
    here, left, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        status = os.lstat(step)
        yield step, status, os.lstat(here)
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        if (links := links + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.readlink()
        if target.is_absolute():
            here = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


# --- The run folder: the only module that knows which file lies where, and the only home of filelock ---

LOCK_TIMEOUT_S = 20.0
LOCK_PAUSE_S = 0.05
SOFT_STALE_S = 600.0
"""Age from which on a run's lock of another host is a dead holder's, where the filesystem has no flock."""

MAX_DEPTH = 2
"""Folders between the root of all runs and a run: of a user, and of a project."""

MAX_FOLDERS = 20_000
"""Folders below the root that are no runs, and are looked into."""

MAX_NAMES = 30
"""Runs that an error names."""

REQUESTS = ("KILL", "SAVE", "REQUEUE")
"""Files that ask a run for something: stop after saving, save now, save and go through the queue again."""

_JOB = re.compile(r"[\w+-]{1,64}", re.ASCII)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the trainer's processes inside a job."""

    job: str
    """Slurm job id, or LOCAL_PREFIX and a process id."""

    restart: int
    """SLURM_RESTART_COUNT."""

    cycle: int = 0
    """In-job restarts so far."""

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}.{self.cycle}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that trains this run, or did last."""

    job: str
    restart: int
    generation: int
    """Grows by one with every attempt; fences stale ones."""

    cluster: str
    """``slurm`` or ``local``."""

    host: str
    """Host of the supervisor."""

    pid: int
    """The supervisor's process id on that host."""

    birth: str = ""
    """Distinguishes that process from a later one with the same id (``system.processes``)."""

    folder: str = ""
    """Where the run folder lay, and ..."""

    inode: int = 0
    """... the identity of the folder, so that a copy of it is recognized."""

    cycle: int = 0
    """In-job restarts so far."""


def result_of(result: Path, rank: int) -> Path:
    """Where a rank of a submitted callable stores what it returns, beside that of rank 0."""
    return result if rank == 0 else result.with_stem(f"{result.stem}-{rank}")


class RunFolder:
    """Paths and small state files of one run. Creating one changes nothing on disk."""

    def __init__(self, path: Path, *, name: str = "") -> None:
        self.path = path
        self.name = name or path.name
        """By which a person names it: the path below the root of all runs, where it was found there."""
        self.config = path / "config.yaml"
        self.script = path / "job.sh"
        self.attempts = path / "attempts"
        self.verdicts = path / "verdicts"
        self.submissions = path / "submissions"
        self.logs = path / "logs"
        self.bundle = path / "container"
        self.call = path / "call.pkl"
        self.result = path / "result.pkl"
        self._owner = path / OWNER_FILE
        self._done = path / "done.json"
        self._progress = path / "progress.json"
        self._jobs = path / JOBS_FILE
        self._marks = ProgressMarks(None)

    def create(self, *, only_look: bool = False) -> None:
        """Make the folder and its parts, private to the user; ``only_look``: raise the same errors, and make nothing.

        Raises:
            StorageError: it cannot be created, is another user's (``refuse_foreign``), or is a copy.
        """
        self._make(self.path, only_look=only_look)
        if only_look and not self.path.exists():
            return
        self.refuse_foreign()
        self.refuse_copy()
        for folder in () if only_look else (self.attempts, self.verdicts, self.submissions, self.logs):
            self._make(folder)

    def _make(self, folder: Path, *, only_look: bool = False) -> None:
        try:
            if only_look:
                files.refuse_uncreatable(folder)
            else:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in PASSING:
                raise translated(f"cannot create the run folder {folder}", error) from error
            raise StorageError(
                f"cannot create the run folder {folder}: {error.strerror or error}",
                hint="run_folder must lie on a filesystem that you can write to and that every node sees",
            ) from error

    def empty(self, made: Sequence[Path]) -> None:
        """Remove what a refused submission has put here; nothing unless it ``made`` the folder, and if more is in it.

        Call with the lock held. The folder itself stays.
        """
        own_files = {self.config, self.call, self.journal().path, self.path / ".lock"}
        failed = EventName.SUBMISSION_FAILED
        own = {EventName.SUBMITTING, EventName.AVOIDING, failed}
        with contextlib.suppress(OSError, StorageError):
            found = {*self.path.rglob("*")} if self.path in made else {self.path}
            events = [each.event for each in self.journal().read()]
            is_own = {*events} <= own and events[-1:] in ([], [failed])  # else a job may have arrived
            if is_own and found <= {*own_files, *self._folders, *made} - {self.path}:
                for path in sorted(found, reverse=True):  # the lock last
                    path.unlink() if path in own_files else path.rmdir()

    def exists(self) -> bool:
        """Whether this is the folder of a run."""
        return any(map(_lies_there, (self.config, Journal(self.path).path)))

    def may_exist(self) -> bool:
        """The same, and for a folder that cannot be looked into."""
        try:
            return self.exists()
        except OSError:
            return True

    def has_records(self) -> bool:
        """Whether something was submitted or started from here; a folder that cannot be looked into may have some."""
        return any(may_exist(path) for path in (self._owner, self._jobs, self.journal().path))

    def journal(self, attempt: Attempt | None = None) -> Journal:
        """The journal, writing as ``attempt``."""
        return Journal(self.path, attempt=str(attempt or ""))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run: one process at a time may change its owner and the action after an attempt.

        Raises:
            RunBusy: another process holds it for longer than LOCK_TIMEOUT_S.
        """
        path = self.path / ".lock"
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            owners = files.trusted_owners(self.path)
            descriptor = files.open_regular(path, os.O_RDWR | os.O_CREAT, follow=False, owners=owners)
        except OSError as error:
            raise translated(f"cannot lock {path}", error) from error
        with contextlib.ExitStack() as held:
            held.callback(os.close, descriptor)
            while not _locked(descriptor, path, held):
                if time.monotonic() > deadline:
                    raise RunBusy(f"another process holds {path} for more than {LOCK_TIMEOUT_S:.0f} s")
                time.sleep(LOCK_PAUSE_S)
            if not (os.path.lexists(path) and os.path.samestat(os.fstat(descriptor), os.lstat(path))):
                raise RunBusy(f"{self.path} was removed meanwhile", hint="try again")
            yield

    def owner(self) -> Owner | None:
        """The newest attempt's owner; None before the first."""
        owner = files.read_as(Owner, self._owner)
        if owner is not None and not _JOB.fullmatch(owner.job):  # it becomes part of names of files
            raise StorageError(f"{self._owner} is damaged: {owner.job[:40]!r} is no job", hint=files.MOVE_AWAY)
        return owner

    def refuse_foreign(self) -> None:
        """Return when the folder, and the files that slurmft executes or believes, are the caller's.

        Raises:
            StorageError: it is not, or everyone may write to it.
        """
        try:
            refuse_foreign(self.path, folders=self._folders, regular=self._files)
        except OSError as error:
            raise translated(f"cannot look at {error.filename or self.path}", error) from error

    def refuse_replaceable(self) -> None:
        """Return when no other user can replace the folder, or the files that are executed from it.

        Raises:
            StorageError: one can.
        """
        try:
            refuse_replaceable(self.path, parts=[*self._folders, *self._files])
        except OSError as error:
            raise translated(f"cannot look at {error.filename or self.path}", error) from error

    @property
    def _folders(self) -> list[Path]:
        return [self.attempts, self.verdicts, self.submissions, self.logs]

    @property
    def _files(self) -> list[Path]:
        return [self.config, self.script, self._owner, self._jobs, self._done, self._progress, self.journal().path]

    def refuse_copy(self) -> None:
        """Return when the folder is what its records say.

        Raises:
            StorageError: it is a copy of another run's folder, and acting on it would act on that run's jobs.
        """
        if (original := self.copied_from()) is not None:
            raise StorageError(
                f"the run folder {self.path} is a copy of {original} and names that run's jobs as its own",
                hint=f"to continue the copy as a run of its own, remove its {OWNER_FILE} and {JOBS_FILE}",
            )

    def copied_from(self) -> str | None:
        """The run folder that this one is a copy of, when its owner's record came along with the copy.

        A folder that was moved or restored to its old place is not a copy: it is that run.
        """
        owner = self.owner()
        if owner is None or not owner.inode or owner.folder == str(self.path):
            return None
        if self.path.stat().st_ino == owner.inode or not may_exist(Path(owner.folder)):
            return None  # moved, perhaps to another filesystem
        return owner.folder

    def take_over(self, owner: Owner) -> None:
        """Record a new owner; from now on every older generation is fenced. Call with the lock held."""
        write_state(self._owner, asdict(owner))

    def done(self) -> Mapping[str, Any] | None:
        """The record of the finished run, or None while it is not finished."""
        return files.read_json(self._done)

    def mark_done(self, **facts: Any) -> None:
        """Mark the run as complete; any later start by Slurm ends at once."""
        write_state(self._done, facts)

    def forget_end(self) -> None:
        """The run has more to do: it is complete no more. Its lock is to be held.

        Raises:
            StorageError: the mark cannot be removed.
        """
        with writing(self._done):
            self._done.unlink(missing_ok=True)

    def progress(self) -> Mapping[str, Any] | None:
        """The newest progress report of the supervisor."""
        return files.read_json(self._progress)

    def write_progress(self, **facts: Any) -> None:
        """Replace the progress report, which is not part of the run's state: it need not survive a power cut.

        Raises:
            OSError: the run folder cannot be written.
        """
        if self._marks.attempt != facts.get("attempt"):
            self._marks = ProgressMarks(facts.get("attempt"))
        files.write_json(self._progress, {**facts, **self._marks.facts(facts)}, durable=False)

    def jobs(self) -> list[str]:
        """The run's jobs so far, oldest first.

        Raises:
            StorageError: the file cannot be read or believed.
        """
        return self._known_jobs()[0]

    def own_jobs(self, newest: int | None = None) -> list[OwnJob]:
        """Those of Slurm, or the newest of them, with their identities, as ids are reused for other jobs.

        Raises:
            StorageError: a file cannot be read or believed.
        """
        jobs, known = self._known_jobs()
        of_slurm = [job for job in jobs if not job.startswith(LOCAL_PREFIX)]
        chosen = of_slurm if newest is None else of_slurm[-newest:]
        told = {} if all(job in known for job in chosen) else self._jobs_in_journal()
        user = self.path.stat().st_uid if chosen else 0
        return [OwnJob(job, replace(known.get(job) or told.get(job) or NOTHING_KNOWN, user=user)) for job in chosen]

    def _jobs_in_journal(self) -> dict[str, JobIdentity]:
        """The jobs in the folder of an earlier version."""
        found: dict[str, JobIdentity] = {}
        begin = (EventName.ATTEMPT_STARTED, EventName.SUBMITTED, EventName.RESUBMITTED)
        with contextlib.suppress(FileNotFoundError):
            for event in self.journal().each(frozenset(name.encode() for name in begin)):
                if event is not None and event.event in begin:
                    started = event.event == EventName.ATTEMPT_STARTED
                    job = event.attempt.partition(".")[0] if started else event.details.get("job")
                    found.setdefault(str(job), JobIdentity(begun=event.seconds()))
        return found

    def add_successor(self, job: str, after: OwnJob) -> None:
        """As ``add_job``, of one that was submitted with the run's script after, or beside, another one."""
        self.add_job(job, JobIdentity(user=os.getuid(), cluster=after.known.cluster, script=str(self.script)))

    def add_job(self, job: str, seen: JobIdentity | None = None) -> None:
        """Remember a job of this run, and its identity. Idempotent. Call with the lock held.

        A reused id means the newer job: it becomes the newest one.

        Raises:
            StorageError: the file cannot be read, believed or written.
        """
        jobs, known = self._known_jobs()
        before = known.get(job)
        is_another = seen is not None and before is not None and is_same_job(before, seen) is False
        if seen is not None:
            own = replace(seen, own_script=(seen.script or "").startswith(f"{self.path}{os.sep}"))
            known[job] = own if before is None or is_another else merged(before, own)
        order = [*(each for each in jobs if each != job), job] if is_another or job not in jobs else jobs
        if order != jobs or seen is not None:
            records = {each: identity.as_json() for each, identity in known.items() if each in order}
            write_state(self._jobs, {"jobs": order, "known": records})

    def _known_jobs(self) -> tuple[list[str], dict[str, JobIdentity]]:
        value = files.read_json(self._jobs) or {}
        jobs = value.get("jobs", [])
        if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
            raise StorageError(f"{self._jobs} does not hold a list of jobs", hint=files.MOVE_AWAY)
        for job in jobs:  # one that is not an id makes squeue forget all others in the same question
            is_id = (match := _JOB_ID.fullmatch(job)) is not None and 0 < int(match[1]) <= _MAX_ID
            if not is_id and not job.startswith(LOCAL_PREFIX):
                raise StorageError(f"{self._jobs} names a job {job[:40]!r}", hint=files.MOVE_AWAY)
        known = value.get("known")
        records = known if isinstance(known, dict) else {}
        return jobs, {str(job): identity_from(facts) for job, facts in records.items() if isinstance(facts, dict)}

    def ending(self, attempt: Attempt) -> EndingClaim:
        """The right to act on the end of this attempt's (job, restart)."""
        return EndingClaim(self.attempts / f"{attempt.job}.{attempt.restart}.ending.json", self.lock)

    def attempt_folder(self, attempt: Attempt) -> Path:
        """The attempt's own folder, created private."""
        folder = self.attempts / str(attempt)
        self._make(folder)
        return folder

    def new_secret(self, attempt: Attempt) -> Path:
        """A fresh key for the attempt's control channel, in a file only the user can read."""
        path = self.attempt_folder(attempt) / "secret"
        with writing(path):
            files.replace_atomically(path, secrets.token_hex(32))
        return path

    def request(self, kind: str, who: str) -> None:
        """Ask the run for one of REQUESTS.

        Raises:
            StorageError: the run folder cannot be written.
        """
        path = self.path / kind
        try:
            files.write_bytes(path, f"{who}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:  # on a full disk the empty file is request enough
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise translated(f"cannot write {path}", error) from error

    def see_request(self, kind: str) -> str | None:
        """The user who asks for ``kind``; None without a request. A bare ``touch`` counts; only files do.

        Raises:
            OSError: the folder cannot be looked at.
        """
        try:
            who = files.read_part(f"{self.path}/{kind}", 0, 1000).decode(errors="replace").strip()[:200]
        except FileNotFoundError:
            return None
        except files.UnsafeFile as error:
            log.debug("%s is not a request: it %s", self.path / kind, error.strerror)
            return None
        return who or "a user who touched the file"

    def take_request(self, kind: str) -> str | None:
        """The user who asked for ``kind``, removing the request; None without one."""
        if (who := self.see_request(kind)) is not None:
            (self.path / kind).unlink(missing_ok=True)
        return who


MAX_ROLES = 1000
"""Most roles of one run that are listed: its folder may be another user's."""


def with_roles(runs: Iterable[RunFolder], *, alone: bool = False) -> list[RunFolder]:
    """These runs, each with those of its roles behind it, as ``RUN/ROLE``; ``alone``: the roles in its place."""
    found: list[RunFolder] = []
    for run in runs:
        below: list[Path] = []
        with contextlib.suppress(OSError):
            paths = itertools.islice((run.path / "roles").iterdir(), MAX_ROLES)
            below = sorted(path for path in paths if (path / "config.yaml").is_file())
        own = [] if alone and below else [run]
        found += [*own, *(RunFolder(path, name=f"{run.name}/{path.name}") for path in below)]
    return found


def find_run(name: str, root: Path, noted: Callable[[], Sequence[RunFolder]] = tuple) -> RunFolder:
    """The run called ``name`` below ``root``, at the path ``name``, or by its name among the user's own.

    Args:
        noted: the runs that the user has submitted, wherever they are; only asked where the others are not it.

    Raises:
        StorageError: there is no such run, or there are several; names the ones there are.
    """
    for path in (Path(name), root / name):
        if (run := RunFolder(path.absolute())).exists():
            return run
    below = list_runs(root)
    mine = (run for run in below if _owner_of(run.path) == os.geteuid())
    own = [] if "/" in name else [run for run in (*noted(), *mine) if run.path.name == name]
    places = {_identity(run.path): run for run in own}
    if len(places) == 1:
        return own[0]
    if places:
        where = ", ".join(sorted(str(run.path) for run in places.values())[:MAX_NAMES])
        raise StorageError(f"there are {len(places)} runs called {name!r}", hint=f"give the path of one: {where}")
    names = [run.name for run in below]
    known = ", ".join(names[:MAX_NAMES]) + f" and {len(names) - MAX_NAMES} more" * (len(names) > MAX_NAMES) or "none"
    raise StorageError(f"there is no run {name!r} here or in {root}", hint=f"runs in {root}: {known}")


_REMOVED = re.compile(r"\..{1,50}\.removed-[0-9a-f]{8}", re.DOTALL)


def removed_name(run: Path) -> Path:
    """What a run's folder is called while it is removed: no run any more, and found again by ``left_overs``."""
    return run.with_name(f".{run.name[:50]}.removed-{secrets.token_hex(4)}")


def left_overs(run: Path) -> list[Path]:
    """What removals of the run at this path have left where they were interrupted."""
    begin = f".{run.name[:50]}.removed-"
    try:
        return [path for path in run.parent.iterdir() if path.name.startswith(begin) and _REMOVED.fullmatch(path.name)]
    except OSError:
        return []


def may_exist(path: Path) -> bool:
    """Whether ``path`` exists, or may exist where it cannot be looked at."""
    try:
        return path.exists()
    except OSError:
        return True


def list_runs(root: Path) -> list[RunFolder]:
    """Every run below ``root``, by name.

    Raises:
        OSError: ``root`` itself cannot be listed.
    """
    found = (RunFolder(path.absolute(), name=str(path.relative_to(root))) for path, _ in walk_runs(root))
    return sorted(found, key=lambda run: run.path)


def walk_runs(root: Path, owners: Collection[int] | None = None) -> Iterator[tuple[Path, int | None]]:
    """Every run below ``root`` and its owner: in it, and in folders that are no runs, such as one for each user or
    project, up to MAX_DEPTH of them deep. Also folders that cannot be looked into, which may be runs.

    Args:
        owners: user ids whose folders are looked into; those of others are all given, as what they are is not seen.

    Raises:
        OSError: ``root`` itself cannot be listed.
    """
    if not root.exists():
        return
    seen, waiting = {_identity(root)}, deque([root])
    for depth in range(1 + MAX_DEPTH):
        for _ in range(len(waiting)):
            folder = waiting.popleft()
            try:
                found = (path for path in folder.iterdir() if not _REMOVED.fullmatch(path.name))
                entries = sorted(found, key=lambda path: (path.is_symlink(), path.name))
            except OSError:
                if depth == 0:
                    raise
                continue  # gone meanwhile; one that is not to be looked into was found as a run that may be there
            for path in entries:
                owner = _owner_of(path)
                if owners is not None and owner not in owners:
                    if owner is not None:
                        yield path, owner
                    continue
                if (identity := _group_of_runs(path)) in seen:
                    continue  # a link to what was found already
                if RunFolder(path).may_exist():
                    yield path, owner
                if identity is not None:
                    seen.add(identity)
                    waiting.append(path)
            if len(seen) > MAX_FOLDERS:
                log.warning("%s has more than %d folders: runs may be missing here", root, MAX_FOLDERS)
                return


def _owner_of(path: Path) -> int | None:
    """A folder's owner; a symbolic link counts as its target only where the caller or root made it, else as its
    maker's. None for anything else."""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid in (0, os.getuid()):
            status = path.stat()
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode) else None


def _group_of_runs(path: Path) -> tuple[int, int] | None:
    """The identity of a folder that is no run and may hold some; None for anything else. What is inside of a run is
    none, nor is what lies behind a link that another user than the caller, root or its target's owner made."""
    try:
        link, status = path.lstat(), path.stat()
        if not stat.S_ISDIR(status.st_mode) or link.st_uid not in (0, os.getuid(), status.st_uid):
            return None
        return None if RunFolder(path).has_records() else _identity(path)
    except OSError:
        return None


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _lies_there(path: Path) -> bool:
    """Whether anything exists there: a run whose files are not regular files is damaged."""
    try:
        path.lstat()
    except ValueError:  # no path at all
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True


def _locked(descriptor: int, path: Path, held: contextlib.ExitStack) -> bool:
    """Whether the lock is ours by now, until ``held`` ends."""
    try:
        return filelock.lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise translated(f"cannot lock {path}", error) from error
        soft = SoftLock(path.with_name(f"{path.name}.soft"), stale_s=SOFT_STALE_S)  # such as Lustre without -o flock
        if not soft.try_acquire():
            return False
        held.callback(soft.release)
        return True


# --- progress ---
# The progress report of a run, as its supervisor wrote it: believed value by value, as others may have damaged it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The supervisor's progress report; None for values that cannot be believed."""

    at: float | None = None
    step: int | None = None
    until: int | None = None
    saved: int | None = None
    metric: float | None = None
    state: str | None = None
    attempt: str | None = None
    resumed: int | None = None
    failed_saves: int | None = None
    save_problem: str | None = None
    progressed_at: float | None = None
    saved_at: float | None = None
    world_size: int | None = None
    step_at: float | None = None
    stall_s: float | None = None
    saves_done: int | None = None
    copied: int | None = None
    replicas: str | None = None
    """Of an endpoint: what is lost, or how many are wanted, in words."""

    problem: str = ""
    """The damage of the report, which does not harm the run: the report is not part of its state."""

    @property
    def saved_step(self) -> int | None:
        """Newest step in a checkpoint of this attempt; None while there is none."""
        return self.saved if self.saved is not None and self.saved >= 0 else None


_TYPES = {"int | None": (int,), "float | None": (int, float), "str | None": (str,)}
_KINDS: Mapping[str, tuple[type, ...]] = {
    each.name: _TYPES[str(each.type)] for each in fields(Progress) if each.type in _TYPES
}


def progress_of(run: RunFolder) -> Progress:
    """The newest progress report; never raises for what the file holds."""
    try:
        facts = run.progress() or {}
    except StorageError as error:
        return Progress(problem=error.what)
    given = {name: facts[name] for name in _KINDS if facts.get(name) is not None}
    fit = {name: value for name, value in given.items() if type(value) in _KINDS[name] and _is_fit(value)}
    wrong = ", ".join(f"{name}={str(given[name])[:20]!r}" for name in given.keys() - fit.keys())
    return Progress(**fit, problem=f"progress.json has {wrong}" if wrong else "")


def _is_fit(value: Any) -> bool:
    return isinstance(value, str) or files.number(value, limit=1e300 if isinstance(value, float) else 1e15) is not None


# --- Whether the supervisor of an attempt still writes, by the file server's clock alone ---
# Slurm's answer that a job is gone may be wrong: filtered, of another cluster, of a controller that has lost its state.
# A live supervisor touches a file of its attempt every second, which needs no Slurm.

FRESH_S = 30.0
"""A supervisor that has written since then is not rescued. It is 30 times as long as it pauses between two touches."""

_NAME = "alive"


def touch(run: RunFolder, attempt: Attempt) -> None:
    """Note that the attempt's supervisor lives.

    Raises:
        OSError: the run folder cannot be written.
    """
    path = run.attempts / str(attempt) / _NAME
    with files.opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        os.utime(descriptor)


def newest(run: RunFolder, owner: Owner | Attempt) -> float | None:
    """Time of the newest sign of the owner's, by the file server's clock; None where there is none."""
    attempt = f"{owner.job}.{owner.restart}.{owner.cycle}"
    times = [_modified(run.attempts / attempt / _NAME)]
    with contextlib.suppress(StorageError):
        if (run.progress() or {}).get("attempt") == attempt:  # all that earlier versions write
            times.append(_modified(run.path / "progress.json"))
    return max((at for at in times if at is not None), default=None)


def is_fresh(run: RunFolder, owner: Owner | Attempt) -> bool:
    """Whether the owner has given a sign of life within ``FRESH_S`` seconds.

    Raises:
        StorageError: the run folder cannot be written, which is how the file server is asked for the time.
    """
    silent_s = silence_s(run, owner)
    return silent_s is not None and silent_s < FRESH_S


def silence_s(run: RunFolder, owner: Owner | Attempt) -> float | None:
    """How long ago the owner has given a sign of life; None where it has given none. Raises as ``is_fresh``."""
    now, at = _now(run.path), newest(run, owner)
    return None if at is None else now - at


def seconds_since(run: RunFolder, path: Path) -> float | None:
    """How long ago ``path`` was written, by the file server's clock; None where there is no such file.

    Raises:
        StorageError: the run folder cannot be written.
    """
    now, at = _now(run.path), _modified(path)
    return None if at is None else now - at


def _now(folder: Path) -> float:
    """The file server's time: that of a file that is written now. It also makes a network filesystem look anew."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-", buffering=0) as stream:
            with contextlib.suppress(OSError):  # on a full disk: its creation is the newest that there is
                stream.write(b"?")
            return os.fstat(stream.fileno()).st_mtime
    except OSError as error:
        raise translated(f"cannot write {folder}", error) from error


def _modified(path: Path) -> float | None:
    with contextlib.suppress(OSError), files.opened(path) as descriptor:
        return os.fstat(descriptor).st_mtime  # opening asks the file server, a mere stat may not
    return None


# --- Which runs the user has submitted: links in a private folder of the state folder, named by paths ---
# Two processes at once need no lock, and nothing of another user is ever read, as a link says what is stopped and
# removed. What cannot be noted is not found by its name elsewhere; no submission fails for it.

MAX_RUNS = 500
"""More are forgotten, the oldest first."""


def state_folder(environment: Mapping[str, str]) -> Path | None:
    """Where the user's state is: ``XDG_STATE_HOME``, or below the home folder; None where neither is known."""
    state = environment.get("XDG_STATE_HOME", "")
    try:
        return Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError:
        return None


def note_run(run: Path, environment: Mapping[str, str]) -> None:
    """Note that the run was submitted now."""
    if (folder := _index_folder(environment)) is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not files.is_private(folder):
            return
        files.replace_link(folder / _name_in_index(run), str(run.absolute()))
        for link in _index_links(folder)[MAX_RUNS:]:
            link.unlink(missing_ok=True)
    except OSError as error:
        log.debug("run %s is not noted in %s: %s", run, folder, error.strerror or error)


def forget_run(run: Path, environment: Mapping[str, str]) -> None:
    """Forget a run that was removed."""
    folder = _index_folder(environment)
    if folder is not None and files.is_private(folder):
        with contextlib.suppress(OSError):  # a link that leads nowhere is passed over
            (folder / _name_in_index(run)).unlink(missing_ok=True)


def noted_runs(environment: Mapping[str, str]) -> list[RunFolder]:
    """The runs that were submitted and are still there, or may be, where that cannot be seen; the newest first."""
    folder = _index_folder(environment)
    if folder is None or not files.is_private(folder):
        return []
    found = []
    try:
        links = _index_links(folder)[:MAX_RUNS]
    except OSError as error:
        log.warning("%s: %s; runs are found by their paths", folder, error.strerror or error)
        return []
    for link in links:
        with contextlib.suppress(OSError):  # removed meanwhile
            run = RunFolder(Path(os.readlink(link)))  # noqa: PTH115 - as it was noted, and not relative to the link
            if run.path.is_absolute() and run.may_exist():
                found.append(run)
    return found


def _index_folder(environment: Mapping[str, str]) -> Path | None:
    state = state_folder(environment)
    return None if state is None else state / "slurmft" / "runs"


def _name_in_index(run: Path) -> str:
    return hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:32]


def _index_links(folder: Path) -> list[Path]:
    """The newest first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile, by another submission
                if not entry.is_symlink():
                    continue
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]
