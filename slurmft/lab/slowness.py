"""A node that has become slow: a limit on the CPU time of everything that runs on it, now and later.

A cgroup of the cpu controller (version 1 or 2) holds the node's processes; their children start in it. A process
of its own lifts the limit when the time is up, so that no test that dies leaves a slow node behind.

Run as ``python -m slurmft.lab.slowness GROUP SECONDS``: lift the limit of GROUP after so many seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path

from slurmft.errors import LabError
from slurmft.lab.settings import lab_processes, run, wait_until

PERIOD_US = 50_000
_NO_GROUPS = "this machine has no cpu cgroup that can be written to"


def limit(folder: Path, member: str, *, cpus: float, for_s: float) -> None:
    """Leave the member of the lab in ``folder`` no more than ``cpus`` CPUs together, for so many seconds.

    A limit that it has already is replaced; the earlier of both ends counts.

    Raises:
        LabError: the kernel does not let us.
    """
    if not 0.01 <= cpus <= 1024 or not 0 < for_s <= 3600:
        raise LabError(f"{cpus:g} CPUs for {for_s:g} s is not a valid limit", hint="0.01 to 1024 CPUs for up to 3600 s")
    group = _group(folder, member)
    try:
        group.mkdir(exist_ok=True)
        _set_limit(group, round(cpus * PERIOD_US))
        wait_until(lambda: not _move(folder, member, group), doing=f"limiting {member}", within_s=10)
    except OSError as error:
        raise LabError(f"cannot limit the CPUs of {member}: {error}", hint=_NO_GROUPS) from error
    run(
        [sys.executable, "-P", "-m", "slurmft.lab.slowness", str(group), str(for_s)],
        doing=f"arranging for the end of {member}'s limit",
    )


def lift(group: Path) -> None:
    """Remove a limit and its group; nothing where there is none."""
    with contextlib.suppress(OSError):
        _set_limit(group, None)
    for _ in range(100):
        if not group.is_dir():
            return
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it is gone
                    (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()
        time.sleep(0.02)


def unlimit(folder: Path, member: str) -> None:
    """Lift the member's limit now; nothing where it has none."""
    lift(_group(folder, member))


def _group(folder: Path, member: str) -> Path:
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return _controller() / f"slurmft-lab-{name}-{member}"


def _controller() -> Path:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        where = Path(before.split()[4])
        if kind == "cgroup" and "cpu" in options.split(",") and os.access(where, os.W_OK):
            return where
        if kind == "cgroup2" and "cpu" in _words(where / "cgroup.subtree_control") and os.access(where, os.W_OK):
            return where
    raise LabError("no node can be made slow here", hint=_NO_GROUPS)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _set_limit(group: Path, quota_us: int | None) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {PERIOD_US}")
    elif quota_us is None:
        (group / "cpu.cfs_quota_us").write_text("-1")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, quota_us)))


def _move(folder: Path, member: str, group: Path) -> list[int]:
    """Move the member's processes into the group; those that were still outside."""
    inside = set(_words(group / "cgroup.procs"))
    outside = [pid for pid, owner in lab_processes(folder).items() if owner == member and str(pid) not in inside]
    for pid in outside:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
    return outside


def _lift_later(group: Path, after_s: float) -> None:
    """Return at once; a process of its own lifts the limit, or ends when the limit is gone already."""
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)  # readers of our output must not wait for us
    deadline = time.monotonic() + after_s
    while group.is_dir() and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    lift(group)
    os._exit(0)


if __name__ == "__main__":
    _lift_later(Path(sys.argv[1]), float(sys.argv[2]))
