"""Probes of the host: load, processes, clock, time since boot, left-over shared memory."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable

from slurmft.config.health import HostLimits
from slurmft.health.judging import above, bad, fine, unknown
from slurmft.health.leftovers import orphaned_memory
from slurmft.health.node_view import Scene, text_of
from slurmft.policy.nodes.node_health import ProbeResult, Status

MIB = 1 << 20
STA_UNSYNC, STA_NANO = 0x0040, 0x2000
DAY_S = 86_400.0
ASK_S = 1.0


def load(scene: Scene) -> ProbeResult:
    """Mean number of processes that want a CPU."""
    words = scene.text("proc/loadavg").split()
    cpus = len(re.findall(r"^cpu\d+ ", scene.text("proc/stat"), re.MULTILINE))
    try:
        return judge_load(float(words[1]), cpus, scene.config.host)
    except (IndexError, ValueError):
        return unknown("load", "/proc/loadavg cannot be read")


def judge_load(load5: float, cpus: int, limits: HostLimits) -> ProbeResult:
    """Busy is not broken: never more than a warning."""
    per_cpu = load5 / max(1, cpus)
    detail = f"load {load5:.1f} on {cpus} CPUs"
    return bad("load", above(per_cpu, limits.load_per_cpu_warning, None), detail, value=per_cpu, unit="per CPU",
               remedy="look at top for processes of jobs that have ended")  # fmt: skip


def processes(scene: Scene) -> ProbeResult:
    """Zombies, and processes that the kernel does not let go."""
    states: Counter[str] = Counter()
    stuck = []
    for folder in scene.folders("proc", "[0-9]*"):
        before, _, after = text_of(folder / "stat").rpartition(")")
        state = after.split()[:1]
        states.update(state)
        if state == ["D"]:
            where = text_of(folder / "wchan").strip()
            stuck.append(f"{folder.name} {before.partition('(')[2]} {where if where != '0' else ''}".strip())
    if not states:
        return unknown("processes", "/proc cannot be read")
    return judge_processes(states["Z"], stuck, scene.config.host)


def judge_processes(zombies: int, stuck: list[str], limits: HostLimits) -> ProbeResult:
    """Many in state D at one moment mean a filesystem or a device that does not answer."""
    waiting = above(len(stuck), limits.stuck_warning, limits.stuck_critical)
    status = max(waiting, above(zombies, limits.zombies_warning, None))
    detail = f"{len(stuck)} in uninterruptible sleep, {zombies} zombies"
    remedy = "look at /proc/PID/stack of those in state D: a filesystem or a device does not answer"
    return bad("processes", status, detail, value=len(stuck), unit="processes", evidence=stuck[:20],
               remedy=remedy if waiting else "the zombies' parents do not wait for them")  # fmt: skip


def uptime(scene: Scene) -> ProbeResult:
    """Time since boot."""
    try:
        up_s = float(scene.text("proc/uptime").split()[0])
    except (IndexError, ValueError):
        return unknown("uptime", "/proc/uptime cannot be read")
    return judge_uptime(up_s, scene.config.host)


def judge_uptime(up_s: float, limits: HostLimits) -> ProbeResult:
    """A fresh boot may explain other findings; a very old one lacks updates."""
    detail, longest = f"up for {up_s / DAY_S:.1f} days", limits.max_uptime_days * DAY_S
    if up_s < limits.min_uptime_s:
        return bad("uptime", Status.WARNING, f"booted {up_s:.0f} s ago", value=up_s, unit="s",
                   remedy="look in the log for the reason of the boot")  # fmt: skip
    old = 0 < longest <= up_s
    return bad("uptime", Status.WARNING if old else Status.OK, detail, value=up_s, unit="s",
               remedy="plan a boot into the newest kernel")  # fmt: skip


def clock(scene: Scene) -> ProbeResult:
    """How far the clock is off, by chrony where it runs, else by the kernel's own account."""
    offset = _offset_by_chrony() if scene.root.samefile("/") else None
    return judge_clock(offset if offset is not None else _offset_by_kernel(), scene.config.host)


def judge_clock(offset_s: float | None, limits: HostLimits) -> ProbeResult:
    """An unknown offset is not a fault unless the configuration says so."""
    if offset_s is None or not math.isfinite(offset_s):
        detail = "nothing corrects the clock: its offset is not known"
        status = Status.WARNING if limits.clock_must_be_disciplined else Status.OK
        return bad("clock", status, detail, remedy="start chronyd or systemd-timesyncd")
    status = above(abs(offset_s), limits.clock_offset_warning_s, limits.clock_offset_critical_s)
    return bad("clock", status, f"off by {offset_s * 1000:.3f} ms", value=offset_s, unit="s",
               remedy="chronyc tracking; chronyc makestep")  # fmt: skip


def parse_chrony(text: str) -> float | None:
    """Seconds of offset in the output of ``chronyc -c tracking``; None where it is not synchronised."""
    fields = text.strip().split(",")
    if len(fields) != 14 or fields[13] == "Not synchronised":
        return None
    try:
        return float(fields[4])
    except ValueError:
        return None


def _offset_by_chrony() -> float | None:
    if shutil.which("chronyc") is None:
        return None
    try:
        done = subprocess.run(["chronyc", "-c", "tracking"], capture_output=True, text=True, errors="replace",
                              timeout=ASK_S, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_chrony(done.stdout) if done.returncode == 0 else None


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2); fields after the status are not needed."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_byte * 400),
    )  # fmt: skip


def _offset_by_kernel() -> float | None:
    timex = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0 or timex.status & STA_UNSYNC:
        return None
    return float(timex.offset) / (1e9 if timex.status & STA_NANO else 1e6)


def shared_memory(scene: Scene) -> ProbeResult:
    """Memory that no process uses any more, and that no job can get."""
    return judge_shared_memory([(str(path), size) for path, size in orphaned_memory(scene)], scene.config.host)


def judge_shared_memory(orphans: Iterable[tuple[str, int]], limits: HostLimits) -> ProbeResult:
    """Judge left-over objects that the epilog would have removed."""
    found = sorted(orphans, key=lambda each: -each[1])
    total = sum(size for _, size in found)
    if not found:
        return fine("shared-memory", "nothing is left over")
    detail = f"{len(found)} left-over objects hold {total / MIB:.0f} MiB, the largest is {found[0][0]}"
    return bad("shared-memory", above(total / MIB, limits.shared_memory_warning_mib, None), detail, value=total / MIB,
               unit="MiB", evidence=[f"{size} {path}" for path, size in found[:20]],
               remedy="let bin/slurmft-epilog be the Epilog; now: remove what lsof does not show")  # fmt: skip


def own_name(scene: Scene) -> str:
    """The node's name where no other one is configured."""
    return scene.node or os.uname().nodename
