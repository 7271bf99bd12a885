"""Whether snapshots fit into a node's memory beside the training itself. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
