"""Python stacks of a worker, written by itself on request, at any point of its code: no lock of Python is needed.

The worker opens a file in its node's private memory and has the interpreter's C handler write all threads into it when
STACKS_SIGNAL comes, and when it crashes. Nothing is written before; a network filesystem that hangs cannot delay it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.system.files import open_regular, read_part

STACKS_SIGNAL = signal.SIGRTMIN + 13
"""Number 47 with glibc. Its two neighbours on both sides are free as well: pthreads and POSIX timers take the first
real-time signals (32 and 33, hidden behind SIGRTMIN), profilers and virtual machines the last ones."""

STOP_SIGNAL_VARIABLE = "SLURMFT_STOP_SIGNAL"
"""``preemption.signal`` where that is not SIGTERM: it would end a trainer, and its agent answers to it."""

MAX_FRAMES = 5
MAX_FRAME = 240
MAX_FILE_BYTES = 1024 * 1024

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_THREAD = re.compile(r"(?P<current>Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):")
_OUTERMOST = (" in _run_module_as_main", "  ...", "...")
"""How the last line ends: the zygote was started with -m, or faulthandler has cut off frames or threads."""


def ignore_stop_signal(environment: Mapping[str, str]) -> None:
    """In a worker, before its program begins: some sites send the signal to every process of a step.

    What the worker starts ignores it, too. A handler of the program's own is called as ever.
    """
    if environment.get(STOP_SIGNAL_VARIABLE) in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[environment[STOP_SIGNAL_VARIABLE]], signal.SIG_IGN)


def arm(path: Path) -> None:
    """From now on this process writes its stacks to ``path``, also at a segmentation fault, bus error or abort.

    A trainer may use ``faulthandler`` itself: only a registration of the same signal would
    replace this one. Where the file cannot be made there are no stacks.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
        if not faulthandler.is_enabled():  # else PYTHONFAULTHANDLER asks for it in the log
            faulthandler.enable(file=descriptor, all_threads=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One Python call."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file[-MAX_FRAME:]}:{self.line} {self.function[:MAX_FRAME]}"


def is_complete(dump: str) -> bool:
    """Whether a dump is complete, as far as its last line shows."""
    return dump.endswith("\n") and dump[:-1].rpartition("\n")[2].endswith(_OUTERMOST)


def main_thread(dump: str) -> tuple[Frame, ...]:
    """The main thread's calls in the newest of the dumps, innermost first; none where there is no dump.

    The interpreter lists its newest thread first, so the main thread is the last one. When there were too many threads
    to list, it is the one that took the signal, which is the main thread wherever that did not block it.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    cut = False
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            threads.append((match["current"] == "Current t", []))
        elif (match := _FRAME.match(line)) and threads:
            threads[-1][1].append(Frame(file=match["file"], line=match["line"], function=match["function"]))
        cut = line == "..."
    if not threads:
        return ()
    current = [frames for is_current, frames in threads if is_current]
    return tuple(current[-1] if cut and current else threads[-1][1])


def crashed_thread(text: str) -> tuple[Frame, ...]:
    """The calls of the thread that a process has died in, innermost first; none where it did not crash."""
    _, crash, dump = text.rpartition("Fatal Python error")
    if not crash:
        return ()
    _, current, rest = dump.partition("Current thread")
    return main_thread(current + rest.partition("\n\n")[0])


def innermost(frames: Sequence[Frame]) -> list[str]:
    """The calls that a summary has room for."""
    return [str(frame) for frame in frames[:MAX_FRAMES]]


def read(path: Path, since: int = 0) -> bytes:
    """The bytes written behind byte ``since``; empty when there is no such file."""
    try:
        return read_part(path, since, MAX_FILE_BYTES)
    except OSError:
        return b""


def size(path: Path) -> int:
    """Bytes written so far; 0 when there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
