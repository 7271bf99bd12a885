"""The run folder: the only module that knows which file lies where, and the only home of filelock."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from slurmft.errors import RunBusy, StorageError
from slurmft.storage.claim import EndingClaim
from slurmft.storage.fence import OWNER_FILE
from slurmft.storage.files import read_json, replace_atomically, write_json
from slurmft.storage.journal import Journal
from slurmft.storage.patience import PASSING, translated, write_state, writing

JOBS_FILE = "jobs.json"
LOCK_TIMEOUT_S = 20.0
LOCAL_PREFIX = "local-"
"""Begins the job id of a run that has no Slurm around it."""

REQUESTS = ("KILL", "SAVE", "REQUEUE")
"""Files that ask a run for something: stop after saving, save now, save and go through the queue again."""


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
    """Who trains this run, or did last."""

    job: str
    restart: int
    generation: int
    """Grows by one with every attempt; what fences stale ones."""

    cluster: str
    """``slurm`` or ``local``."""

    host: str
    """Host of the supervisor."""

    pid: int
    """The supervisor's process id on that host."""

    birth: str
    """What tells that process from a later one with the same id (``storage.processes``)."""

    folder: str
    """Where the run folder lay, and ..."""

    inode: int
    """... which folder it was, so that a copy of it is known as one."""

    cycle: int = 0
    """In-job restarts so far."""


_JOB_ID = re.compile(r"\d{1,20}(?:[_+]\d{1,20})?", re.ASCII)


class RunFolder:
    """Paths and small state files of one run. Creating one changes nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.script = path / "job.sh"
        self.attempts = path / "attempts"
        self.verdicts = path / "verdicts"
        self.submissions = path / "submissions"
        self.logs = path / "logs"
        self._owner = path / OWNER_FILE
        self._done = path / "done.json"
        self._progress = path / "progress.json"
        self._jobs = path / JOBS_FILE

    def create(self) -> None:
        """Make the folder and its parts, private to the user.

        Raises:
            StorageError: it cannot be created, or belongs to somebody else.
        """
        self._make(self.path)
        status = self.path.stat()
        if status.st_uid != os.getuid():
            raise StorageError(
                f"the run folder {self.path} belongs to user id {status.st_uid}, not to you",
                hint="choose another run_folder, or ask its owner",
            )
        self.refuse_copy()
        if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
            raise StorageError(f"the run folder {self.path} is writable by everybody", hint=f"chmod o-w {self.path}")
        for folder in (self.attempts, self.verdicts, self.submissions, self.logs):
            self._make(folder)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in PASSING:
                raise translated(f"cannot create the run folder {folder}", error) from error
            raise StorageError(
                f"cannot create the run folder {folder}: {error.strerror or error}",
                hint="run_folder must lie on a filesystem that you can write to and that every node sees",
            ) from error

    def exists(self) -> bool:
        """Whether this is the folder of a run."""
        return self.config.is_file() or Journal(self.path).path.is_file()

    def journal(self, attempt: Attempt | None = None) -> Journal:
        """The journal, writing as ``attempt``."""
        return Journal(self.path, attempt=str(attempt or ""))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run: one process at a time may change who owns it and what follows an attempt.

        Raises:
            RunBusy: another process holds it for longer than LOCK_TIMEOUT_S.
        """
        try:
            lock = filelock.FileLock(self.path / ".lock", timeout=LOCK_TIMEOUT_S, mode=0o600)
            lock.acquire()
        except filelock.Timeout as error:
            raise RunBusy(f"another process holds {self.path}/.lock for more than {LOCK_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise translated(f"cannot lock {self.path}/.lock", error) from error
        try:
            yield
        finally:
            lock.release()

    def owner(self) -> Owner | None:
        """The newest attempt's owner; None before the first."""
        value = read_json(self._owner)
        if value is None:
            return None
        try:
            return Owner(
                job=str(value["job"]),
                restart=int(value["restart"]),
                generation=int(value["generation"]),
                cluster=str(value["cluster"]),
                host=str(value["host"]),
                pid=int(value["pid"]),
                birth=str(value.get("birth", "")),
                folder=str(value.get("folder", "")),
                inode=int(value.get("inode", 0)),
                cycle=int(value.get("cycle", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged: {error}"
            raise StorageError(f"{self._owner} {reason}", hint="move it away and run again") from error

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

        A folder that was moved or restored to its old place is no copy: it is that run.
        """
        owner = self.owner()
        if owner is None or not owner.inode or owner.folder == str(self.path):
            return None
        if self.path.stat().st_ino == owner.inode or not Path(owner.folder).exists():
            return None  # moved, perhaps to another filesystem
        return owner.folder

    def take_over(self, owner: Owner) -> None:
        """Record a new owner; from now on every older generation is fenced. Call with the lock held."""
        write_state(self._owner, asdict(owner))

    def done(self) -> Mapping[str, Any] | None:
        """What the finished run left, or None while it is not finished."""
        return read_json(self._done)

    def mark_done(self, **facts: Any) -> None:
        """The run is complete; whatever Slurm starts from now on ends at once."""
        write_state(self._done, facts)

    def progress(self) -> Mapping[str, Any] | None:
        """The newest progress report of the supervisor."""
        return read_json(self._progress)

    def write_progress(self, **facts: Any) -> None:
        """Replace the progress report, which is news and no state: it need not survive a power cut.

        Raises:
            OSError: the run folder cannot be written.
        """
        write_json(self._progress, facts, durable=False)

    def jobs(self) -> list[str]:
        """The run's jobs so far, oldest first.

        Raises:
            StorageError: the file cannot be read or believed.
        """
        jobs = (read_json(self._jobs) or {}).get("jobs", [])
        if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
            raise StorageError(f"{self._jobs} does not hold a list of jobs", hint="move it away and run again")
        for job in jobs:  # one that is no id makes squeue forget all others in the same question
            if not job.startswith(LOCAL_PREFIX) and not _JOB_ID.fullmatch(job):
                raise StorageError(f"{self._jobs} names a job {job[:40]!r}", hint="move it away and run again")
        return jobs

    def slurm_jobs(self) -> list[str]:
        """Those of them that Slurm knows, oldest first."""
        return [job for job in self.jobs() if not job.startswith(LOCAL_PREFIX)]

    def add_job(self, job: str) -> None:
        """Remember a job of this run. Idempotent. Call with the lock held."""
        if job not in (jobs := self.jobs()):
            write_state(self._jobs, {"jobs": [*jobs, job]})

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
            path.touch()  # on a full disk the empty file is request enough
            path.write_text(who + "\n", encoding="utf-8")
        except OSError as error:
            if error.errno != errno.ENOSPC or not path.exists():
                raise translated(f"cannot write {path}", error) from error

    def see_request(self, kind: str) -> str | None:
        """Who asks for ``kind``; None when nobody does. A bare ``touch`` counts."""
        try:
            who = (self.path / kind).read_text(encoding="utf-8", errors="replace").strip()[:200]
        except FileNotFoundError:
            return None
        return who or "somebody who touched the file"

    def take_request(self, kind: str) -> str | None:
        """Who asked for ``kind``, removing the request; None when nobody did."""
        who = self.see_request(kind)
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
    known = ", ".join(run.path.name for run in list_runs(root)) or "none"
    raise StorageError(f"there is no run {name!r} here or in {root}", hint=f"runs in {root}: {known}")


def list_runs(root: Path) -> list[RunFolder]:
    """Every run below ``root``, by name; also folders that cannot be looked into, which may be runs.

    Raises:
        OSError: ``root`` itself cannot be listed.
    """
    if not root.exists():
        return []
    return [run for path in sorted(root.iterdir()) if _may_be_a_run(run := RunFolder(path.absolute()))]


def _may_be_a_run(run: RunFolder) -> bool:
    try:
        return run.exists()
    except OSError:
        return True
