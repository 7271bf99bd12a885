"""Keeps a writer from slowing the training beside it, and from being ended by signals before its work is done."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

IGNORED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Slurm sends its TERM to the whole tree on some sites; the writer ends when its worker has, and its work is done."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
"""The number of the system call, which has no function in libc."""

_BEST_EFFORT, _LOWEST = 2 << 13, 7
_NAP_S = 0.1

NICE = 10
"""A tenth of a processor that training wants as well: at most 5 % of two. The lowest would take ten times as long."""


def ignore_signals() -> None:
    """From now on; those that came since the process was started are forgotten as well."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def yield_to_others() -> None:
    """Give this thread, and every thread that it starts later, a low priority for processor and disk.

    Not the idle classes: a node whose processors or disks are never idle would never finish a checkpoint.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # on Linux it is the calling thread's alone
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        # a session of its own is a group of its own for the kernel's autogroup, which looks at no process's nice value
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")
    if number := _IOPRIO_SET.get(platform.machine()):
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT | _LOWEST)


def do_politely(work: Callable[[], object]) -> None:
    """Do it in a thread of its own, whose low priority cannot be undone; returns at its end, also where it raised."""

    def behind_others() -> None:
        yield_to_others()
        work()

    thread = threading.Thread(target=behind_others, daemon=True)
    thread.start()
    thread.join()


class Throttle:
    """Sleeps whenever more bytes have passed than ``max_bytes_per_s`` allows; 0 allows any number."""

    def __init__(self, max_bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_bytes_per_s
        self._clock = clock
        self._since = clock()
        self._sleep: Callable[[float], None] = time.sleep

    def lift(self) -> None:
        """No cap from now on."""
        self._max = 0.0

    def pass_on(self, done_bytes: int, tick: Callable[[], None]) -> None:
        """Return when ``done_bytes`` since the beginning are within the cap; calls ``tick`` ten times a second."""
        while self._max > 0 and (ahead_s := self._since + done_bytes / self._max - self._clock()) > 0:
            self._sleep(min(ahead_s, _NAP_S))
            tick()
