"""Work in a child process with a time limit, wherever it hangs; one of a kind at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp

from slurmft.errors import StorageUnavailable
from slurmft.system.private_folder import check_private, own_folders, prefix, shared_memory

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
        _be_child(work)
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
