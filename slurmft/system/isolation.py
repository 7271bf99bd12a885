"""Calls in a child of their own, which may hang or die: bounded in time, or isolated for what they do."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from slurmft.errors import StorageUnavailable
from slurmft.system.private_folder import check_private, own_folders, prefix, shared_memory

# --- Work in a child process with a time limit, wherever it hangs; one of a kind at a time ---

LOOK_S = 0.02
KILL_S = 2.0


def bounded(work: Callable[[], int], *, limit_s: float, name: str, environment: Mapping[str, str]) -> int:
    """The exit code of ``work``, which runs in a child.

    A child in uninterruptible sleep cannot be killed: it is left behind, and holds the lock until the kernel lets it
    go, so that a filesystem that hangs costs one process, and not one for each run of cron.

    Raises:
        StorageUnavailable: another one is at work, or it took longer than ``limit_s`` seconds.
    """
    locks = _lock(name, environment)
    pid = os.fork()
    if pid == 0:
        _be_bounded_child(work)
    _close(locks)  # the child has them
    deadline = time.monotonic() + limit_s
    while (code := _ended(pid)) is None:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + KILL_S
            while _ended(pid) is None and time.monotonic() < until:
                time.sleep(LOOK_S)
            raise StorageUnavailable(
                f"it took longer than {limit_s:.0f} s and was ended", hint="something hangs; see --limit"
            )
        time.sleep(LOOK_S)
    return code


def _be_bounded_child(work: Callable[[], int]) -> None:
    """Never returns to the caller's frames, which belong to the parent."""
    code = 70
    try:
        code = work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 70
    if found == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _lock(name: str, environment: Mapping[str, str]) -> list[int]:
    """Locks of this machine and user, in memory where that is offered: they must not hang with what they guard.

    The lock is on a folder of ours with a random name. No other user can take such a name before us, and other users'
    files beside it are neither opened nor waited for. Two processes that begin at once may both make one, so that all
    are locked.

    Raises:
        StorageUnavailable: another process holds one of them, or none can be made.
    """
    root, names = _place(environment), prefix(name)
    held: list[int] = []
    try:
        if not own_folders(root, names):
            mkdtemp(dir=root, prefix=names)
        for folder in own_folders(root, names):
            held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        _close(held)
        raise StorageUnavailable("another one is at work on this machine", hint=f"it holds {folder}") from error
    except OSError as error:
        _close(held)
        raise StorageUnavailable(f"cannot lock anything in {root}: {error.strerror}") from error
    if not held:
        raise StorageUnavailable(f"cannot lock anything in {root}: the folder {names}... is not ours alone")
    return held


def _place(environment: Mapping[str, str]) -> Path:
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        if runtime.startswith("/"):
            check_private(Path(runtime))
            return Path(runtime)
    return shared_memory()


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


# --- isolation ---
# Each look at the node in a process of its own: one that crashes, hangs or is stuck in the kernel harms no other.
#
# A child that is stuck in uninterruptible sleep cannot be killed, so it is not waited for: it gets its signal, is left
# behind, and ends by itself when its system call returns. Children hold none of our streams open meanwhile.

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
        _be_isolated_child(errand, writer)
    os.close(writer)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both do it: the first one counts
    return _Child(errand=errand, pid=pid, pipe=reader, began=began)


def _be_isolated_child(errand: Errand, writer: int) -> None:
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
