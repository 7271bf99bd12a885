"""Work on a run folder that may stall, fill up or turn read-only: the training must not wait for it.

A write to a network filesystem that has lost its server blocks in the kernel, beyond the reach of any time-out. So one
daemon thread does the waiting, in order; its callers wait up to a limit of their own, and then go on without it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
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
from slurmft.system.files import write_json

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
