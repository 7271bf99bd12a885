"""Tasks that run beside the main line of a process, of which none fails silently; an event loop in a thread, a child of
the agent, sleep that was too long, and log messages through a thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TypeVar

from slurmft.errors import SlurmftError
from slurmft.system.foreign_text import log_to_stderr
from slurmft.system.processes import die_with_parent

# --- Tasks that run beside the main line of a process; one that fails is never silent ---

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Background:
    """Keeps tasks alive until they are done; one that failed is logged, and told to ``on_error`` where there is one."""

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def cancel_all(self) -> None:
        """End all running tasks; returns when they have ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error: %r", error, exc_info=error)
            if self._on_error is not None:
                self._on_error(error)


class LoopThread:
    """An event loop in a thread of its own: what was begun in it goes on while its owner waits for something else."""

    def __init__(self, name: str) -> None:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def until_closed() -> None:
            closing = asyncio.Event()
            ready.set_result((asyncio.get_running_loop(), closing))
            await closing.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(until_closed()), daemon=True, name=name)
        self._thread.start()
        self._loop, self._closing = ready.result()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``; signals are handled meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Have it called in the loop; for signal handlers, too."""
        self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Cancel what still runs in it, and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


async def end_child(process: asyncio.subprocess.Process, within_s: float | None = None) -> None:
    """SIGKILL it and its group, and wait for its end; one that is stuck in the kernel is left behind after so long."""
    for end in (process.kill, lambda: os.killpg(process.pid, signal.SIGKILL)):
        with contextlib.suppress(ProcessLookupError):
            end()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)


# --- A process of inference that an agent has started: a driver or a router ---


def run_below_agent(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run ``work`` until it ends or the agent does; returns its exit code, or that of its error, which is logged."""
    log_to_stderr("slurmft: %(message)s")
    die_with_parent()
    # the agent says when to stop; an engine must not inherit "ignored"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda _number, _frame: None)
    try:
        return asyncio.run(work())
    except SlurmftError as error:
        with contextlib.suppress(OSError):  # a full disk
            sys.stderr.write(f"slurmft: {error}\n")
        return error.exit_code


# --- Sleeping, and detecting a suspension meanwhile ---


async def overslept_s(pause_s: float) -> float:
    """Sleep for ``pause_s``; returns by how many seconds it was too long, 0 where that is not worth mentioning.

    A suspended process wakes up where it was, and must not blame another process for the silence meanwhile.
    """
    before = time.monotonic()
    await asyncio.sleep(pause_s)
    asleep_s = time.monotonic() - before - pause_s
    return asleep_s if asleep_s > pause_s else 0.0


def heard_awake(heard_s: float, asleep_s: float) -> float:
    """When something was last heard, not counting the time that this process was stopped; both monotonic.

    What it found at once when it woke up was heard now, and not later than that: silence must not be noticed late.
    """
    return min(heard_s + asleep_s, time.monotonic())


# --- Log messages through a thread: the log may lie on the very filesystem that stalls, and must block no caller ---

FLUSH_S = 2.0


class BackgroundLog:
    """Takes the root logger's handlers over until the process ends."""

    def __init__(self) -> None:
        logging.raiseExceptions = False  # an error of the log cannot be logged
        root = logging.getLogger()
        messages: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._listener: QueueListener | None = QueueListener(messages, *root.handlers)
        root.handlers = [QueueHandler(messages)]
        self._listener.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write waiting records, but do not wait for a log that hangs. Nothing is logged afterwards."""
        listener, self._listener = self._listener, None
        if listener is not None:
            stopping = threading.Thread(target=listener.stop, daemon=True)
            stopping.start()
            stopping.join(FLUSH_S)
