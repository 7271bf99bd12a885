"""Work in a child process that may take so long and no longer, whatever it hangs in; one of a kind at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurmft.errors import StorageUnavailable

LOOK_S = 0.02
KILL_S = 2.0


def bounded(work: Callable[[], int], *, limit_s: float, name: str, environment: Mapping[str, str]) -> int:
    """The exit code of ``work``, which runs in a child.

    A child in uninterruptible sleep cannot be killed: it is left behind, and holds the lock until the kernel lets it
    go, so that a filesystem that hangs costs one process, and not one for each time cron comes by.

    Raises:
        StorageUnavailable: another one is at work, or it took longer than ``limit_s`` seconds.
    """
    lock = _lock(name, environment)
    pid = os.fork()
    if pid == 0:
        _be_child(work)
    os.close(lock)  # the child has it
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


def _be_child(work: Callable[[], int]) -> None:
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


def _lock(name: str, environment: Mapping[str, str]) -> int:
    """A lock of this machine and user, in memory where that is offered: it must not hang with what it guards."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) if runtime.startswith("/") and os.access(runtime, os.W_OK) else Path("/tmp")  # noqa: S108
    path = folder / f"{name}-{os.getuid()}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageUnavailable(f"cannot lock {path}: {error.strerror}") from error
    facts = os.fstat(descriptor)
    if facts.st_uid != os.getuid() or not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise StorageUnavailable(f"{path} is not ours", hint="remove it, or set XDG_RUNTIME_DIR")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageUnavailable("another one is at work on this machine", hint=f"it holds {path}") from error
    return descriptor
