"""The run folder: the only module that knows which file lies where, and the only home of filelock."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from slurmft.errors import RunBusy, StorageError
from slurmft.policy.site.job_identity import JobIdentity, OwnJob
from slurmft.storage import ownership
from slurmft.storage.claim import EndingClaim
from slurmft.storage.events import EventName
from slurmft.storage.fence import OWNER_FILE
from slurmft.storage.history.live_view import ProgressMarks
from slurmft.storage.jobs_file import JOBS_FILE, JobsFile
from slurmft.storage.journal import Journal
from slurmft.storage.patience import PASSING, translated, write_state, writing
from slurmft.storage.soft_lock import SoftLock
from slurmft.system.files import read_json, refuse_uncreatable, replace_atomically, write_json
from slurmft.system.opening import UnsafeFile, open_regular, read_part, trusted_owners, write_bytes

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

    birth: str
    """Distinguishes that process from a later one with the same id (``system.processes``)."""

    folder: str
    """Where the run folder lay, and ..."""

    inode: int
    """... the identity of the folder, so that a copy of it is recognized."""

    cycle: int = 0
    """In-job restarts so far."""

    standby: bool = False
    """It was a standby: no batch script belongs to it."""


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
        self._jobs = JobsFile(path)
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
                refuse_uncreatable(folder)
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
        files = {self.config, self.call, self.journal().path, self.path / ".lock"}
        failed = EventName.SUBMISSION_FAILED
        own = {EventName.SUBMITTING, EventName.AVOIDING, failed}
        with contextlib.suppress(OSError, StorageError):
            found = {*self.path.rglob("*")} if self.path in made else {self.path}
            events = [each.event for each in self.journal().read()]
            is_own = {*events} <= own and events[-1:] in ([], [failed])  # else a job may have arrived
            if is_own and found <= {*files, *self._folders, *made} - {self.path}:
                for path in sorted(found, reverse=True):  # the lock last
                    path.unlink() if path in files else path.rmdir()

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
        return any(may_exist(path) for path in (self._owner, self._jobs.path, self.journal().path))

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
            owners = trusted_owners(self.path)
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, follow=False, owners=owners)
        except OSError as error:
            raise translated(f"cannot lock {path}", error) from error
        with contextlib.ExitStack() as held:
            held.callback(os.close, descriptor)
            while not _locked(descriptor, path, held):
                if time.monotonic() > deadline:
                    raise RunBusy(f"another process holds {path} for more than {LOCK_TIMEOUT_S:.0f} s")
                time.sleep(LOCK_PAUSE_S)
            if not (os.path.lexists(path) and os.path.samestat(os.fstat(descriptor), os.lstat(path))):
                raise RunBusy(f"{self.path} was removed, as its submission was refused", hint="try again")
            yield

    def owner(self) -> Owner | None:
        """The newest attempt's owner; None before the first."""
        value = read_json(self._owner)
        if value is None:
            return None
        try:
            job = str(value["job"])
            if not _JOB.fullmatch(job):  # it becomes part of names of files
                raise ValueError(f"{job[:40]!r} is no job")
            return Owner(
                job=job,
                restart=int(value["restart"]),
                generation=int(value["generation"]),
                cluster=str(value["cluster"]),
                host=str(value["host"]),
                pid=int(value["pid"]),
                birth=str(value.get("birth", "")),
                folder=str(value.get("folder", "")),
                inode=int(value.get("inode", 0)),
                cycle=int(value.get("cycle", 0)),
                standby=value.get("standby") is True,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged: {error}"
            raise StorageError(f"{self._owner} {reason}", hint="move it away and run again") from error

    def refuse_foreign(self) -> None:
        """Return when the folder, and the files that slurmft executes or believes, are the caller's.

        Raises:
            StorageError: it is not, or everyone may write to it.
        """
        try:
            ownership.refuse_foreign(self.path, folders=self._folders, files=self._files)
        except OSError as error:
            raise translated(f"cannot look at {error.filename or self.path}", error) from error

    def refuse_replaceable(self) -> None:
        """Return when no other user can replace the folder, or the files that are executed from it.

        Raises:
            StorageError: one can.
        """
        try:
            ownership.refuse_replaceable(self.path, parts=[*self._folders, *self._files])
        except OSError as error:
            raise translated(f"cannot look at {error.filename or self.path}", error) from error

    @property
    def _folders(self) -> list[Path]:
        return [self.attempts, self.verdicts, self.submissions, self.logs]

    @property
    def _files(self) -> list[Path]:
        return [self.config, self.script, self._owner, self._jobs.path, self._done, self._progress, self.journal().path]

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
        facts = asdict(owner)
        if not owner.standby:
            del facts["standby"]
        write_state(self._owner, facts)

    def done(self) -> Mapping[str, Any] | None:
        """The record of the finished run, or None while it is not finished."""
        return read_json(self._done)

    def mark_done(self, **facts: Any) -> None:
        """Mark the run as complete; any later start by Slurm ends at once."""
        write_state(self._done, facts)

    def progress(self) -> Mapping[str, Any] | None:
        """The newest progress report of the supervisor."""
        return read_json(self._progress)

    def write_progress(self, **facts: Any) -> None:
        """Replace the progress report, which is not part of the run's state: it need not survive a power cut.

        Raises:
            OSError: the run folder cannot be written.
        """
        if self._marks.attempt != facts.get("attempt"):
            self._marks = ProgressMarks(facts.get("attempt"))
        write_json(self._progress, {**facts, **self._marks.facts(facts)}, durable=False)

    def jobs(self) -> list[str]:
        """The run's jobs so far, oldest first.

        Raises:
            StorageError: the file cannot be read or believed.
        """
        return self._jobs.ids()

    def own_jobs(self, newest: int | None = None) -> list[OwnJob]:
        """Those of Slurm, or the newest of them, with their identities, as ids are reused for other jobs.

        Raises:
            StorageError: a file cannot be read or believed.
        """
        return self._jobs.own_jobs(newest, self._jobs_in_journal)

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

    def add_job(self, job: str, seen: JobIdentity | None = None) -> None:
        """Remember a job of this run, and its identity. Idempotent. Call with the lock held.

        Raises:
            StorageError: the file cannot be read, believed or written.
        """
        self._jobs.add(job, seen)

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
            replace_atomically(path, secrets.token_hex(32))
        return path

    def request(self, kind: str, who: str) -> None:
        """Ask the run for one of REQUESTS.

        Raises:
            StorageError: the run folder cannot be written.
        """
        path = self.path / kind
        try:
            write_bytes(path, f"{who}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:  # on a full disk the empty file is request enough
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise translated(f"cannot write {path}", error) from error

    def see_request(self, kind: str) -> str | None:
        """The user who asks for ``kind``; None without a request. A bare ``touch`` counts; only files do.

        Raises:
            OSError: the folder cannot be looked at.
        """
        try:
            who = read_part(self.path / kind, 0, 1000).decode(errors="replace").strip()[:200]
        except FileNotFoundError:
            return None
        except UnsafeFile as error:
            log.debug("%s is not a request: it %s", self.path / kind, error.strerror)
            return None
        return who or "a user who touched the file"

    def take_request(self, kind: str) -> str | None:
        """The user who asked for ``kind``, removing the request; None without one."""
        if (who := self.see_request(kind)) is not None:
            (self.path / kind).unlink(missing_ok=True)
        return who


def find_run(name: str, root: Path) -> RunFolder:
    """The run called ``name`` below ``root``, or at the path ``name``.

    Raises:
        StorageError: there is no such run; names the ones there are.
    """
    for path in (Path(name), root / name):
        if (run := RunFolder(path.absolute())).exists():
            return run
    names = [run.name for run in list_runs(root)]
    known = ", ".join(names[:MAX_NAMES]) + f" and {len(names) - MAX_NAMES} more" * (len(names) > MAX_NAMES) or "none"
    raise StorageError(f"there is no run {name!r} here or in {root}", hint=f"runs in {root}: {known}")


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
                entries = sorted(folder.iterdir(), key=lambda path: (path.is_symlink(), path.name))
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
