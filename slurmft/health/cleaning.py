"""The epilog's work: end the processes that a job has left on its node, and remove its shared memory. Of no other job.

A process is ended when its cgroup, or else the environment that it began with, names this very job, its user is the
job's, it began before the epilog did, and none of its ancestors is the step daemon of another job. Shared memory is
removed as ``leftovers`` proves it. Root's processes are never touched. A cleaner that was stuck for longer than its
limit does nothing any more when it wakes up: the same job may run here again by then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmft.health.leftovers import Process, orphaned_memory, process, processes, running_jobs, step_of
from slurmft.health.node_view import Scene, text_of
from slurmft.system.private_folder import remove_tree

PASSES = 3
"""A process may fork while we look."""

GONE_S = 1.0
MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """Left-overs that were removed."""

    processes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    skipped: str = ""
    """Why nothing was done; empty when something may have been."""

    def __str__(self) -> str:
        if self.skipped:
            return f"nothing cleaned: {self.skipped}"
        return f"ended {len(self.processes)} processes, removed {len(self.paths)} shared-memory objects"


def clean(
    scene: Scene, job: str, uid: int, *, limit_s: float = 8.0, clock: Callable[[], float] = time.monotonic
) -> Cleaned:
    """Clean up after an ended job; anything that cannot be proven to be its own stays."""
    if not job.isdecimal() or uid <= 0:
        return Cleaned(skipped=f"job {job[:20]!r} of user {uid} is none that is cleaned up after")
    deadline, born_before = clock() + limit_s, _ticks_now(scene)
    running = running_jobs(scene)
    if running is None or job in running:
        return Cleaned(skipped=f"job {job} still has a step here, or one is starting")
    ended: list[str] = []
    for _ in range(PASSES):
        left = [each for each in processes(scene) if is_left_over(scene, each, job, uid, born_before)]
        if not left:
            break
        for each in left:
            if clock() < deadline and _end(scene, each):
                ended.append(f"{each.pid} {each.name}")
        _wait_until_gone(scene, left, min(deadline, clock() + GONE_S), clock)
    removed = []
    for path, _ in orphaned_memory(scene, uid=uid):
        if clock() < deadline and _remove(path, uid):
            removed.append(str(path))
    return Cleaned(processes=tuple(ended), paths=tuple(removed))


def is_left_over(scene: Scene, each: Process, job: str, uid: int, born_before: int) -> bool:
    """Whether a process is proven to be the ended job's."""
    if each.uid != uid or each.job != job or each.started > born_before or each.pid == os.getpid():
        return False
    return not _belongs_to_another_step(scene, each.pid, job)


def _belongs_to_another_step(scene: Scene, pid: int, job: str) -> bool:
    for _ in range(MAX_DEPTH):
        fields = text_of(scene.path(f"proc/{pid}/stat")).rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdecimal():
            return False
        pid = int(fields[1])
        if pid <= 1:
            return False
        step = step_of(text_of(scene.path(f"proc/{pid}/cmdline")))
        if step is not None:
            return step != job
    return True


def _end(scene: Scene, each: Process) -> bool:
    """SIGKILL, to this process and not to a later one of its number."""
    try:
        handle = os.pidfd_open(each.pid)
    except OSError:
        return False
    try:
        if process(scene.path(f"proc/{each.pid}")) != each:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _wait_until_gone(scene: Scene, left: list[Process], until: float, clock: Callable[[], float]) -> None:
    while clock() < until and any(process(scene.path(f"proc/{each.pid}")) == each for each in left):
        time.sleep(0.01)


def _remove(path: Path, uid: int) -> bool:
    """A link is never followed, and files of other users stay."""
    with contextlib.suppress(OSError):
        if path.lstat().st_uid != uid:
            return False
        if path.is_dir() and not path.is_symlink():
            remove_tree(path, owner=uid)
        else:
            path.unlink()
        return True
    return False


def _ticks_now(scene: Scene) -> int:
    """Ticks since boot, as /proc/PID/stat counts them."""
    try:
        up_s = float(scene.text("proc/uptime").split()[0])
    except (IndexError, ValueError):
        return 0  # nothing began before that, so nothing is ended
    return int(up_s * os.sysconf("SC_CLK_TCK"))
