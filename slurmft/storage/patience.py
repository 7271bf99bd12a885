"""Work on a run folder that may stall, fill up or turn read-only: the training must not wait for it; and a lock for
filesystems that have none that all hosts see.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import secrets
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.storage.journal import Event, EventName, Journal
from slurmft.system.files import FORMAT, UnsafeFile, check_regular, parse_json, read_bytes, trusted_owners, write_json
from slurmft.system.processes import birth_of, lives

# --- Work on a run folder that may stall, fill up or turn read-only: the training must not wait for it ---
# A write to a network filesystem that has lost its server blocks in the kernel, beyond the reach of any time-out. So
# one daemon thread does the waiting, in order; its callers wait up to a limit of their own, and then go on without
# it.

Result = TypeVar("Result")

PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENFILE,
     errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO, errno.ENOTCONN}
)  # fmt: skip
"""Errors that may pass while a run waits: space is freed, a server comes back."""

PAUSE_S = 1.0

log = logging.getLogger(__name__)


def translated(what: str, error: OSError) -> StorageError:
    """``error`` as slurmft's own: one that may pass by itself, or one that will not."""
    reason = error.strerror or str(error)
    if error.errno in PASSING:
        return StorageUnavailable(
            f"{what}: {reason}", hint="free space or repair the filesystem; existing files are safe"
        )
    return StorageError(f"{what}: {reason}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around a write of ``path``: the operating system's refusal becomes slurmft's own error.

    Raises:
        StorageUnavailable: no space, read-only, and the like.
        StorageError: it cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        raise translated(f"cannot write {path}", error) from error


def write_state(path: Path, value: Mapping[str, Any]) -> None:
    """``files.write_json`` with slurmft's own errors.

    Raises:
        StorageError: as ``writing``.
    """
    with writing(path):
        write_json(path, value)


def patiently(work: Callable[[], Result], *, patience_s: float, pause_s: float = PAUSE_S) -> Result:
    """Return the result of ``work``, trying again for ``patience_s`` seconds while the filesystem is unavailable.

    Raises:
        StorageUnavailable: it was in all that time.
    """
    deadline = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return work()
        except StorageUnavailable as error:
            if time.monotonic() + pause_s > deadline:
                raise
            if not told:
                log.warning("%s; trying again for %.0f s", error.what, patience_s)
            told = True
            time.sleep(pause_s)


Task = tuple[Future[Any], Callable[[], Any]]


class FolderThread:
    """Does a run folder's work in order, in a daemon thread: a stuck one does not keep the process from ending.

    The thread ends with this object, after the work that waits for it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.unwritten: deque[tuple[Event, str]] = deque()
        """Of the journal: what could not be written yet, over all attempts of this process."""

        threading.Thread(target=_work, args=[self._queue], daemon=True, name="run folder").start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Have ``work`` done when its turn comes; returns at once."""
        future: Future[Result] = Future()
        self._queue.put((future, work))
        return future

    async def ask(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, and let others run until it is there."""
        import asyncio  # which a submission does not need

        return await asyncio.wrap_future(self.submit(work))

    def call(self, work: Callable[[], Result], *, timeout_s: float) -> Result:
        """Return the result of ``work``.

        Raises:
            StorageUnavailable: it did not return in time; it may still happen later.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            raise StorageUnavailable(f"the run folder did not answer within {timeout_s:.0f} s") from None


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                future.set_exception(error)
        del task, future, work  # finished work must not keep its FolderThread alive, and so this thread


class PatientJournal(Journal):
    """A journal whose writer never waits: events keep their time and order, and are written when they can be."""

    def __init__(self, run_folder: Path, thread: FolderThread, *, attempt: str = "") -> None:
        super().__init__(run_folder, attempt=attempt)
        self._thread = thread
        self._pending = thread.unwritten
        self._told = False

    def append(self, event: EventName, **details: Any) -> Event:
        """Note one event; it is on disk when ``flush`` says so.

        Raises:
            ValueError: a detail has the name of something that every line has.
            TypeError: a detail is nothing that JSON can hold.
        """
        record = self.compose(event, details)
        self._pending.append((record, self.line_of(record)))
        self.retry()
        return record

    def retry(self) -> Future[None]:
        """Have what is still pending written, if it can be."""
        return self._thread.submit(self._write_pending)

    def flush(self, timeout_s: float) -> bool:
        """Whether everything is on disk; waits up to ``timeout_s`` seconds for an answer."""
        try:
            self.retry().result(timeout_s)
        except TimeoutError:
            return False
        return not self._pending

    def catch_up(self) -> None:
        """Write what earlier attempts of this process could not; for the thread of the run folder.

        Raises:
            StorageUnavailable: it cannot be written yet.
        """
        self._write_pending()
        if self._pending:
            raise StorageUnavailable(f"{self.path} cannot be written", hint="free space or repair the filesystem")

    def unwritten(self) -> list[Event]:
        """Events that are not on disk."""
        return [record for record, _ in list(self._pending)]

    def _write_pending(self) -> None:
        while self._pending:
            try:
                self.write(self._pending[0][1])
            except OSError as error:
                if not self._told:
                    log.error("%s cannot be written (%s); events wait in memory", self.path, error.strerror)
                self._told = True
                return
            self._pending.popleft()
            self._told = False


# --- A lock that is a file: for filesystems that have no flock, or have one that other hosts do not see ---
# Creating a file exclusively is atomic on every shared filesystem, NFS included. Such a lock does not end when its
# holder dies, so the holder writes its identity into it: on its own host a dead holder is detected at once, on
# another one by the age of the lock, which is only held for moments. A file that names no holder is removed once it
# can no longer be one that is still being written. Anything but a file of a trusted user is an error at once: waiting
# does not help.

STALE_S = 60.0
"""Age from which on a lock of another host is a dead holder's. Its work takes far less than a second."""

GARBAGE_S = 2.0
"""How long a file may lie there without naming a holder: without hard links it is created first and written then."""

LOCK_PAUSE_S = 0.02
MAX_BYTES = 4096

_HINT = "check its owner (ls -ld), and remove it"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL)
"""Error numbers of filesystems without hard links."""


class SoftLock:
    """Not reentrant; one object per holder."""

    def __init__(self, path: Path, *, mode: int = 0o600, host: str = "", stale_s: float = STALE_S) -> None:
        self.path = path
        self._mode = mode
        self._host = host or os.uname().nodename
        self._stale_s = stale_s
        self._token = ""
        self._garbage: tuple[tuple[int, ...], float] = (), 0.0
        """The identity of a file that names no holder, and since when it is unchanged, by our own clock."""

    @contextlib.contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Hold it, after at most ``timeout_s`` seconds.

        Raises:
            StorageUnavailable: others hold it for all that time.
            StorageError: its folder cannot be written, or no lock of ours lies there.
        """
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() > deadline:
                raise StorageUnavailable(
                    f"another process holds {self.path} for more than {timeout_s:.0f} s",
                    hint=f"{self._words()}; when that process is gone, remove the file",
                )
            time.sleep(LOCK_PAUSE_S * (0.5 + secrets.randbelow(1000) / 1000))
        try:
            yield
        finally:
            self.release()

    def try_acquire(self) -> bool:
        """Take it if it is free, or its holder is dead; never waits.

        Raises:
            StorageError: its folder cannot be written, or no lock of ours lies there.
        """
        try:
            if self._create():
                return True
            return self._remove_if_stale() and self._create()
        except UnsafeFile as error:
            raise StorageError(f"{error.filename} is not a lock of slurmft: it {error.strerror}", hint=_HINT) from error
        except OSError as error:
            raise translated(f"cannot lock {self.path}", error) from error

    def is_ours(self) -> bool:
        """Whether it is still the one that we took: another process may have taken us for dead."""
        try:
            return bool(self._token) and self._read().get("token") == self._token
        except OSError:
            return False

    def release(self) -> None:
        """Give it back, unless it is another's by now. A lock that cannot be removed is stale soon."""
        if self.is_ours():
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        self._token = ""

    def _create(self) -> bool:
        """The file has its content from its first moment: an empty one, of a killed process, would have no holder."""
        token = secrets.token_hex(8)
        pid = os.getpid()
        content = {"format": FORMAT, "host": self._host, "namespace": _pid_namespace(), "pid": pid,
                   "birth": birth_of(pid), "token": token}  # fmt: skip
        draft = self.path.with_name(f".{self.path.name}.{token}.tmp")
        if self._identity():
            return False
        try:
            self._write(draft, json.dumps(content).encode())
            self._token = token if self._appears(draft) else ""
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        return bool(self._token)

    def _write(self, path: Path, content: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
        try:
            os.fchmod(descriptor, self._mode)
            os.write(descriptor, content)
        except OSError:  # a full disk: an empty lock would block all others until it is old
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _appears(self, draft: Path) -> bool:
        """Give a draft its name, unless another file has it. Linking is atomic, over NFS as well (open(2), O_EXCL)."""
        try:
            self.path.hardlink_to(draft)
        except FileExistsError:
            return draft.stat().st_nlink > 1  # the answer to a request that NFS has sent twice
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                self._write(self.path, read_bytes(draft))
            except FileExistsError:
                return False
        return True

    def _read(self) -> dict[str, Any]:
        """The holder that the lock names; empty where it names none, or is gone.

        Raises:
            UnsafeFile: it is not a regular file, or not of a trusted user.
            OSError: it cannot be read.
        """
        try:
            value = parse_json(read_bytes(self.path, limit_bytes=MAX_BYTES, follow=False, owners=self._owners()))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        except UnsafeFile as error:
            if error.errno == errno.EFBIG:
                return {}
            raise
        return value if isinstance(value, dict) and isinstance(value.get("token"), str) else {}

    def _owners(self) -> set[int] | None:
        """The users whose locks are believed; None where a group shares it."""
        return None if self._mode & 0o070 else trusted_owners(self.path.parent)

    def _words(self) -> str:
        with contextlib.suppress(OSError):
            holder = self._read()
            pid, host = (ascii(str(holder.get(name, "?"))[:80])[1:-1] for name in ("pid", "host"))
            return f"process {pid} on {host} holds it"
        return "it cannot be read"

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        """Whether the lock cannot have a live holder."""
        pid, birth = holder.get("pid"), holder.get("birth")
        if not holder:
            return self._is_garbage()
        here = holder.get("host") == self._host and holder.get("namespace") == _pid_namespace() != ""
        if here and type(pid) is int and isinstance(birth, str) and birth:
            return not lives(pid, birth)
        # no clock is ahead by so much: a later date was not written by a holder
        return abs(self._age_s(self.path)) > self._stale_s

    def _is_garbage(self) -> bool:
        if not (seen := self._identity()):
            return False
        now = time.monotonic()
        if self._garbage[0] != seen:
            self._garbage = seen, now
        return now - self._garbage[1] > GARBAGE_S or self._age_s(self.path) > GARBAGE_S

    def _identity(self) -> tuple[int, ...]:
        with contextlib.suppress(FileNotFoundError):
            status = self.path.lstat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return ()

    def _remove_if_stale(self) -> bool:
        """Whether a lock was there whose holder is gone, and it is not there any more."""
        holder = self._read()
        if not self._is_dead(holder):
            return False
        breaker = self.path.with_name(f".{self.path.name}.breaking")
        try:
            os.close(os.open(breaker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode))
        except FileExistsError:  # another process removes it; if that one was killed, too, a later one will
            with contextlib.suppress(FileNotFoundError):
                check_regular(breaker, breaker.lstat())
                if abs(self._age_s(breaker)) > self._stale_s:
                    breaker.unlink(missing_ok=True)
            return False
        try:
            replaced = not holder and self._identity() != self._garbage[0]
            if replaced or self._read().get("token") != holder.get("token"):
                return False  # it was removed meanwhile, and this one has a live holder
            self.path.unlink(missing_ok=True)
            return True
        finally:
            breaker.unlink(missing_ok=True)

    def _age_s(self, path: Path) -> float:
        """By the clock of the filesystem, which hosts need not agree with; 0 when it is gone."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=f".{self.path.name}.") as now:
                return os.fstat(now.fileno()).st_mtime - path.lstat().st_mtime
        except FileNotFoundError:
            return 0.0
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                return 0.0
            raise translated(f"cannot look at {path}", error) from error


def _pid_namespace() -> str:
    """Distinguishes the process ids of a container from those of its host, which may have the same name."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
