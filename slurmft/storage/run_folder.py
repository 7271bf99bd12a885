"""The run folder: the only module that knows which file lies where, and the only home of filelock."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from slurmft.errors import RunBusy, StorageError
from slurmft.storage.fence import OWNER_FILE
from slurmft.storage.files import read_json, write_json
from slurmft.storage.journal import Journal

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

    pid_started: float
    """Start time of that process (Unix seconds), since process ids are used again."""


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
        self._jobs = path / "jobs.json"

    def create(self) -> None:
        """Make the folder and its parts, private to the user.

        Raises:
            StorageError: it cannot be created, or belongs to somebody else.
        """
        self._make(self.path)
        status = self.path.stat()
        if status.st_uid != os.getuid():
            raise StorageError(f"the run folder {self.path} belongs to user id {status.st_uid}, not to you")
        if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
            raise StorageError(f"the run folder {self.path} is writable by everybody", hint=f"chmod o-w {self.path}")
        for folder in (self.attempts, self.verdicts, self.submissions, self.logs):
            self._make(folder)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
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
            with filelock.FileLock(self.path / ".lock", timeout=LOCK_TIMEOUT_S, mode=0o600):
                yield
        except filelock.Timeout as error:
            raise RunBusy(f"another process holds {self.path}/.lock for more than {LOCK_TIMEOUT_S:.0f} s") from error

    def owner(self) -> Owner | None:
        """The newest attempt's owner; None before the first."""
        value = read_json(self._owner)
        if value is None:
            return None
        try:
            return Owner(**{name: value[name] for name in Owner.__dataclass_fields__})
        except KeyError as error:
            raise StorageError(f"{self._owner} lacks {error}", hint="move it away and run again") from error

    def take_over(self, owner: Owner) -> None:
        """Record a new owner; from now on every older generation is fenced. Call with the lock held."""
        write_json(self._owner, asdict(owner))

    def done(self) -> Mapping[str, Any] | None:
        """What the finished run left, or None while it is not finished."""
        return read_json(self._done)

    def mark_done(self, **facts: Any) -> None:
        """The run is complete; whatever Slurm starts from now on ends at once."""
        write_json(self._done, facts)

    def progress(self) -> Mapping[str, Any] | None:
        """The newest progress report of the supervisor."""
        return read_json(self._progress)

    def write_progress(self, **facts: Any) -> None:
        """Replace the progress report."""
        write_json(self._progress, facts)

    def jobs(self) -> list[str]:
        """The run's jobs so far, oldest first."""
        return list((read_json(self._jobs) or {}).get("jobs", []))

    def slurm_jobs(self) -> list[str]:
        """Those of them that Slurm knows, oldest first."""
        return [job for job in self.jobs() if not job.startswith(LOCAL_PREFIX)]

    def add_job(self, job: str) -> None:
        """Remember a job of this run. Idempotent. Call with the lock held."""
        if job not in (jobs := self.jobs()):
            write_json(self._jobs, {"jobs": [*jobs, job]})

    def claim_ending(self, attempt: Attempt, actor: str) -> bool:
        """Whether the caller is the one who acts on the end of this (job, restart); True once, for one caller.

        Keyed without the cycle: supervisor and cron may both try (design, ordering rule 2).
        """
        path = self.attempts / f"{attempt.job}.{attempt.restart}.ending.json"
        with self.lock():
            if read_json(path) is not None:
                return False
            write_json(path, {"actor": actor})
            return True

    def attempt_folder(self, attempt: Attempt) -> Path:
        """The attempt's own folder, created private."""
        folder = self.attempts / str(attempt)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def new_secret(self, attempt: Attempt) -> Path:
        """A fresh key for the attempt's control channel, in a file only the user can read."""
        path = self.attempt_folder(attempt) / "secret"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(stream.fileno())
        return path

    def request(self, kind: str, who: str) -> None:
        """Ask the run for one of REQUESTS."""
        (self.path / kind).write_text(who + "\n", encoding="utf-8")

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
    """Every run below ``root``, by name."""
    if not root.is_dir():
        return []
    return [run for path in sorted(root.iterdir()) if (run := RunFolder(path.absolute())).exists()]
