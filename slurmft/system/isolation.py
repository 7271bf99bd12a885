"""Each look at the node in a process of its own: one that crashes, hangs or is stuck in the kernel harms no other.

A child that is stuck in uninterruptible sleep cannot be killed, so it is not waited for: it gets its signal, is left
behind, and ends by itself when its system call returns. Children hold none of our streams open meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_ANSWER_BYTES = 4 << 20
_EXIT_NOW = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """A function to run, and how long it may take."""

    name: str
    limit_s: float
    task: Callable[[], Any]
    """Returns plain values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of an errand."""

    name: str
    value: Any = None
    error: str = ""
    """Why there is no value; empty when there is one."""

    timed_out: bool = False
    took_s: float = 0.0


@dataclass(slots=True)
class _Child:
    errand: Errand
    pid: int
    pipe: int
    began: float
    received: bytearray = field(default_factory=bytearray)

    @property
    def deadline(self) -> float:
        return self.began + self.errand.limit_s


def run_all(errands: Sequence[Errand], *, at_once: int = 32) -> list[Answer]:
    """Run them beside each other; the answers are in the order of the errands.

    Returns when all have answered or are too late; that is the longest of their limits where there are no more than
    ``at_once``. For programs with a single thread.
    """
    waiting, running, answers = list(reversed(errands)), dict[int, _Child](), dict[str, Answer]()
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < at_once:
                child = _start(waiting.pop())
                running[child.pipe] = child
                selector.register(child.pipe, selectors.EVENT_READ)
            soonest = min(child.deadline for child in running.values())
            for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                child = running[key.fd]
                if _has_answered(child):
                    answers[child.errand.name] = _read(child)
                    _let_go(child, running, selector)
            for child in [child for child in running.values() if child.deadline <= time.monotonic()]:
                answers[child.errand.name] = _too_late(child)
                _let_go(child, running, selector)
    return [answers[errand.name] for errand in errands]


def _start(errand: Errand) -> _Child:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; none is started in here
        pid = os.fork()
    if pid == 0:
        _be_child(errand, writer)
    os.close(writer)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both do it: the first one counts
    return _Child(errand=errand, pid=pid, pipe=reader, began=began)


def _be_child(errand: Errand, writer: int) -> None:
    """Never returns."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # a reader of our output must not wait for a child that was left behind
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        signal.alarm(int(errand.limit_s) + 2)  # should our parent be killed
        try:
            said = json.dumps({"value": errand.task()})
        except Exception as error:  # noqa: BLE001 - a probe that crashes is a result
            said = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        _write_all(writer, said.encode())
    finally:
        os._exit(_EXIT_NOW)  # nothing of the parent's is flushed or cleaned up twice


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content[:MAX_ANSWER_BYTES])
    while left:
        left = left[os.write(descriptor, left) :]


def _has_answered(child: _Child) -> bool:
    piece = os.read(child.pipe, 1 << 16)
    child.received += piece
    return not piece or len(child.received) > MAX_ANSWER_BYTES


def _read(child: _Child) -> Answer:
    took = time.monotonic() - child.began
    try:
        said = json.loads(child.received)
    except ValueError:
        return Answer(name=child.errand.name, error="it died without an answer", took_s=took)
    return Answer(name=child.errand.name, value=said.get("value"), error=said.get("error", ""), took_s=took)


def _too_late(child: _Child) -> Answer:
    took = time.monotonic() - child.began
    return Answer(name=child.errand.name, error=f"no answer within {child.errand.limit_s:.1f} s", timed_out=True,
                  took_s=took)  # fmt: skip


def _let_go(child: _Child, running: dict[int, _Child], selector: selectors.BaseSelector) -> None:
    selector.unregister(child.pipe)
    os.close(child.pipe)
    del running[child.pipe]
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # and its child processes
    deadline = time.monotonic() + 0.05
    with contextlib.suppress(OSError):
        while os.waitpid(child.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)  # a moment for the kernel; one in uninterruptible sleep is left behind
