"""What the kernel says of a process (state, threads, what they wait for) and of a node's memory. No process is
involved itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# --- kernel view ---
# A process as the kernel sees it: state, threads, what they wait for. The process itself is not involved.
#
# Unreadable values (another user's process, a kernel that hides them) are empty; a process that is gone is None.

MAX_THREADS = 64
"""Threads that are looked at; a process on a GPU has hundreds, and the first ones are the program's own."""

MAX_TEXT_BYTES = 1 << 16
"""A member of a thousand groups has them all in its status, before the signals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """One thread."""

    tid: int
    name: str
    state: str
    """Letter of proc(5): R runs, S sleeps, D sleeps uninterruptibly, T is stopped, Z is dead."""

    wchan: str
    """Function of the kernel in which it sleeps; empty or 0 where it does not, or where the kernel hides it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One process."""

    pid: int
    state: str
    threads: tuple[Thread, ...]
    """The main thread first."""

    thread_count: int
    caught: int
    """Mask of the signals that it has handlers for; bit 0 is signal 1."""

    status: str
    syscall: str
    """System call in which the main thread is, with its arguments."""

    stack: str
    """The main thread's calls in the kernel; only root may see them."""

    @property
    def wchan(self) -> str:
        """Where the main thread sleeps in the kernel."""
        return self.threads[0].wchan if self.threads else ""

    def catches(self, number: int) -> bool:
        """Whether it has a handler for the signal; without one, most signals would end it."""
        return bool(self.caught >> (number - 1) & 1)

    def as_json(self) -> dict[str, Any]:
        """For the file that people read."""
        value = asdict(self)
        del value["caught"]
        return {**value, "status": self.status.splitlines()}


def view(pid: int) -> View | None:
    """One look at a living process; None when there is none, or it is a zombie."""
    status = _text(f"/proc/{pid}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = fields.get("State", "Z")[:1]
    if not status or state in "ZX":
        return None
    threads = _threads(pid)
    return View(
        pid=pid,
        state=state,
        threads=threads,
        thread_count=int(fields.get("Threads", len(threads))),
        caught=int(fields.get("SigCgt", "0"), 16),
        status=status,
        syscall=_text(f"/proc/{pid}/syscall").strip(),
        stack=_text(f"/proc/{pid}/stack").strip(),
    )


def memory_kills(root: str = "") -> int:
    """How many processes of this process's control group the kernel has ended for memory; 0 where it does not say.

    Args:
        root: in the place of ``/``, for tests.
    """
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "none", "")[:3]
        if controllers == "":
            top, name = f"{root}/sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = f"{root}/sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # inside of a container the path is one of the host's, and the group's own files lie at the top
        text = _text(f"{top}{path}/{name}") or _text(f"{top}/{name}")
        if found := re.search(r"^oom_kill (\d{1,18})$", text, re.MULTILINE):
            return int(found[1])
    return 0


def _threads(pid: int) -> tuple[Thread, ...]:
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - names are all it takes
    except OSError:
        return ()
    return tuple(thread for tid in tids[:MAX_THREADS] if (thread := _thread(pid, tid)) is not None)


def _thread(pid: int, tid: int) -> Thread | None:
    before, _, after = _text(f"/proc/{pid}/task/{tid}/stat").rpartition(")")
    if not before:
        return None
    wchan = _text(f"/proc/{pid}/task/{tid}/wchan").strip()
    return Thread(tid=tid, name=before.partition("(")[2], state=after.strip()[:1], wchan=wchan if wchan != "0" else "")


def _text(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, MAX_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


# --- memory limits ---
# Whether snapshots fit into a node's memory beside the training itself. No torch.

SPARE_FRACTION = 0.05
"""Share of the node's memory that is left alone: later allocations of the training must not meet the OOM killer."""

_UNLIMITED = 1 << 60
"""cgroup v1 shows a limit that is none as a number next to 2**63."""


def fits(bytes_needed: int, folder: Path, *, root: Path = Path("/")) -> str:
    """Why ``bytes_needed`` more bytes cannot lie in ``folder``, a place in memory; empty when they can.

    Args:
        bytes_needed: of all ranks of this node together, and without what lies there already.
        root: where proc and sys are found.
    """
    for what, free, total in _rooms(folder, root):
        room = free - int(SPARE_FRACTION * total)
        if bytes_needed > room:
            return (
                f"{_gib(bytes_needed)} are needed and {what} has {_gib(max(free, 0))} free of {_gib(total)}, "
                f"{SPARE_FRACTION:.0%} of which are left alone"
            )
    return ""


def _rooms(folder: Path, root: Path) -> Iterator[tuple[str, int, int]]:
    """The limits of usable memory: name, bytes that are free, bytes in all."""
    try:
        status = os.statvfs(folder)
        yield str(folder), status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    except OSError as error:
        yield f"{folder} ({error.strerror})", 0, 0
    memory = _fields(root / "proc/meminfo")
    if "MemAvailable:" in memory:
        yield "this node", memory["MemAvailable:"] * 1024, memory.get("MemTotal:", memory["MemAvailable:"]) * 1024
    yield from _cgroups(root)


def _cgroups(root: Path) -> Iterator[tuple[str, int, int]]:
    """The limits of this process's control group and of all above it: any of them may be the tightest."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            top, limit, usage, idle = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        # inside of a container the path is one of the host's, and the group's own files lie at the top
        for folder in [group, *group.parents] if (group / limit).exists() else [top]:
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None and most < _UNLIMITED:
                reclaimable = _fields(folder / "memory.stat").get(idle, 0)
                yield f"the control group {path}", most - used + reclaimable, most
            if folder == top:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # ``max``: no limit
        return None


def _fields(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
