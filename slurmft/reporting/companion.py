"""The process beside a supervisor that publishes its run's metrics and tells its events.

It is a process of its own, so that a long journal, a slow scraper, a dead webhook or a silent filesystem costs the
supervisor nothing. It ends when its standard input does, which the supervisor holds open: however that one ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.errors import StorageError, UsageError
from slurmft.reporting import publishing
from slurmft.reporting.metrics import RunMetrics, families
from slurmft.reporting.notify import Notifier
from slurmft.storage.run_folder import RunFolder
from slurmft.system import processes
from slurmft.system.exposition import Family
from slurmft.system.token_file import token_in

LOOK_S = 1.0
AGAIN_S = 30.0
"""Pause before a port that is in use is tried again: the companion of an attempt before may still have it."""

log = logging.getLogger(__name__)


def accompany(config: RunConfig, environment: Mapping[str, str], stdin: int = 0) -> int:
    """Publish and tell until ``stdin`` ends, and the last news after that; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends the job's signals to all of its processes
    run, ended = RunFolder(config.run_folder), threading.Event()
    turn = _Turn(run)
    threading.Thread(target=_wait_for_end, args=(stdin, ended), daemon=True, name="end").start()
    publisher = None
    if config.metrics.is_on:
        publisher = threading.Thread(target=_Publisher(config, run, turn).publish, args=(ended,), name="publisher")
        publisher.start()
    if config.notify.is_on:
        _tell(config, run, turn, environment, ended)
    ended.wait()
    if publisher is not None:
        publisher.join(LOOK_S)
    # not by the interpreter's own end, which waits for threads that a filesystem may hold
    logging.shutdown()
    os._exit(0)


def _wait_for_end(stdin: int, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(stdin, 4096):
            pass
    ended.set()


class _Turn:
    """Whether the supervisor that started this process owns the run: in a handover two jobs have a companion each."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._supervisor = run, (processes.me().host, os.getppid())

    def is_ours(self) -> bool:
        try:
            owner = self._run.owner()
        except (OSError, StorageError):
            return True
        return owner is None or (owner.host, owner.pid) == self._supervisor


def _tell(
    config: RunConfig, run: RunFolder, turn: _Turn, environment: Mapping[str, str], ended: threading.Event
) -> None:
    def pause(seconds: float) -> bool:
        return ended.wait(seconds) and config.notify.last_s <= seconds

    notifier: Notifier | None = None
    said = ""
    while True:
        is_last = ended.wait(LOOK_S)
        try:
            if not turn.is_ours():
                notifier = None
            else:
                # made anew after another companion's turn, which has moved on in the journal
                notifier = notifier or Notifier(run.path, config.notify, environment, clock=time.time, pause=pause)
                notifier.tell_news()
        except UsageError as error:
            log.error("no messages are sent: %s", error)
            return
        except (OSError, StorageError) as error:
            if str(error) != said:
                log.warning("messages wait: %s", error)
            said = str(error)
        if is_last:
            return


class _Publisher:
    def __init__(self, config: RunConfig, run: RunFolder, turn: _Turn) -> None:
        self._settings, self._run, self._turn = config.metrics, run, turn
        self._metrics = RunMetrics(run)
        self._told: set[str] = set()
        self._scrapes: publishing.Scrapes | None = None
        self._try_at_s = 0.0
        self._lock = threading.Lock()

    def publish(self, ended: threading.Event) -> None:
        """Write the file now and then, and answer scrapes, until ``ended``."""
        path = None
        try:
            while True:
                if self._turn.is_ours():
                    self._open_port()
                    path = self._write(path)
                if ended.wait(self._settings.interval_s if self._scrapes is not None or path else LOOK_S):
                    return
        finally:
            is_ours = self._turn.is_ours()
            if self._scrapes is not None and is_ours:
                publishing.forget_port(self._run)
            if path is not None and is_ours:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _families(self) -> list[Family]:
        with self._lock:
            try:
                return families([self._metrics.look()])
            except (OSError, StorageError) as error:
                self._warn(f"the run cannot be read: {error}")
                return []

    def _write(self, before: Path | None) -> Path | None:
        if self._settings.textfile_folder is None or not (found := self._families()):
            return before
        labels = next(iter(found)).samples[0].labels
        path = publishing.textfile_of(self._settings.textfile_folder, labels["user"], labels["run"])
        try:
            publishing.write_textfile(path, found)
        except OSError as error:
            self._warn(f"{path} cannot be written: {error.strerror}")
            return before
        return path

    def _open_port(self) -> None:
        settings = self._settings
        if settings.port is None or self._scrapes is not None or time.monotonic() < self._try_at_s:
            return
        self._try_at_s = time.monotonic() + AGAIN_S
        try:
            token = "" if settings.token_file is None else token_in(settings.token_file)
            self._scrapes = publishing.Scrapes(settings.address, settings.port, self._families, token=token)
            publishing.note_port(self._run, settings.address, self._scrapes.port)
        except (OSError, UsageError) as error:
            self._warn(f"no metrics on {settings.address}, port {settings.port}: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
