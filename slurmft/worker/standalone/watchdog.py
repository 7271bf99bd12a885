"""A timer that has to be reset: when it runs out, all stacks are written down, and a callback is called."""

from __future__ import annotations

import faulthandler
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

from slurmft.errors import UsageError

log = logging.getLogger(__name__)

DEFAULT_S = 60.0
SLICE_S = 0.5
OVERSLEPT_S = 1.0
"""A wait this much longer than requested is not a hang of the loop: the whole process was stopped, or starved."""


class WatchdogTimer:
    """Calls ``on_timeout()`` once, in a thread of its own, when ``reset()`` was not called for ``timeout_seconds``.

        with WatchdogTimer(60, lambda: os._exit(1)) as watchdog:
            for batch in loader:
                train(batch)
                watchdog.reset()

    ``on_timeout`` calls ``callback`` unless a subclass overrides it. Before it, the stacks of all threads go to
    ``file`` (standard error when not given). The thread does not keep the process alive. Time in which the whole
    process was stopped (SIGSTOP, a suspended job) does not count. A ``reset()`` after it has run out arms it again,
    also when ``on_timeout`` has raised, which is shown as any exception of a thread. Does not see a hang in C code that
    never gives the GIL back: no Python thread runs then. Not inherited by a fork.

    Args:
        timeout_seconds: the same as ``timeout``, by the name that other packages give it.

    Raises:
        UsageError: the timeout is not a positive number, or there are two, or what is to be called cannot be.
    """

    def __init__(
        self,
        timeout: float = DEFAULT_S,
        callback: Callable[[], object] | None = None,
        *,
        timeout_seconds: float | None = None,
        file: IO[str] | None = None,
    ) -> None:
        if timeout_seconds is not None and timeout != DEFAULT_S:
            raise UsageError("timeout and timeout_seconds are the same", hint="give one of them")
        if callback is not None and not callable(callback):
            raise UsageError(f"the callback is {callback!r:.60}, which cannot be called")
        limit = timeout if timeout_seconds is None else timeout_seconds
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < math.inf:
            raise UsageError(f"the timeout is {limit!r:.60}; it is a positive number of seconds")
        self.timeout = limit
        self._callback, self._file = callback, file
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._deadline_s: float | None = None
        self._look_at_s = 0.0
        self._stopped = True
        self._fired = 0

    @property
    def timeout_seconds(self) -> float:
        """The same as ``timeout``."""
        return self.timeout

    @property
    def active(self) -> bool:
        """Whether it has been started and not stopped."""
        return not self._stopped

    def on_timeout(self) -> None:
        """The time is up, and the stacks are written: to be overridden; calls the callback."""
        if self._callback is not None:
            self._callback()

    @property
    def expired(self) -> bool:
        """Whether it has ever run out since it was started."""
        return self._fired > 0

    def start(self) -> None:
        """Begin to count; a running timer is reset."""
        with self._changed:
            self._look_at_s = time.monotonic()
            self._deadline_s = self._look_at_s + self.timeout
            if self._thread is None or not self._thread.is_alive():
                self._stopped, self._fired = False, 0
                self._start_thread()
            self._changed.notify_all()

    def reset(self) -> None:
        """Count from the beginning; arms it again when it has run out. Costs a lock and a clock."""
        with self._changed:
            was_idle, self._deadline_s = self._deadline_s is None, time.monotonic() + self.timeout
            if was_idle:
                self._look_at_s = time.monotonic()
                self._changed.notify_all()

    def stop(self) -> None:
        """Never run out any more; returns when a callback that is running has ended, unless it is that which calls."""
        with self._changed:
            self._stopped, self._deadline_s = True, None
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True, name="slurmft-watchdog")
        self._thread.start()

    def _watch(self) -> None:
        try:
            while self._wait():
                self._run_out()
                with self._changed:
                    self._look_at_s = time.monotonic()
        finally:  # on_timeout has raised, which ends this thread: another one takes its place
            with self._changed:
                if not self._stopped and self._thread is threading.current_thread():
                    self._look_at_s = time.monotonic()
                    self._start_thread()

    def _wait(self) -> bool:
        """Return True when the time is up, False when it will never be."""
        with self._changed:
            while not self._stopped:
                now_s = time.monotonic()
                if self._deadline_s is None:
                    self._changed.wait()
                    continue
                if (late_s := now_s - self._look_at_s) > OVERSLEPT_S:
                    self._deadline_s += late_s
                left_s = self._deadline_s - now_s
                if left_s <= 0:
                    self._deadline_s, self._fired = None, self._fired + 1
                    return True
                slice_s = min(left_s, SLICE_S)
                self._look_at_s = now_s + slice_s
                self._changed.wait(slice_s)
        return False

    def _run_out(self) -> None:
        log.error("WATCHDOG TIMEOUT: nothing has reset the watchdog for %g s; all stacks follow", self.timeout)
        dump_stacks(self._file or sys.stderr)
        self.on_timeout()


def dump_stacks(file: IO[str]) -> None:
    """Write the stacks of all threads; never raises. A stream without a file behind it gets them too."""
    try:
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    except (AttributeError, ValueError, OSError, RuntimeError):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            text = f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            try:
                file.write(text)
            except (OSError, ValueError):
                return
