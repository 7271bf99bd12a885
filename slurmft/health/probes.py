"""All other probes of a node: what each looks at and how it judges, which there are, and how long each may take."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.config.health import (
    DiskLimits,
    FilesystemLimits,
    HealthConfig,
    HostLimits,
    MemoryLimits,
    NetworkLimits,
    UserProbe,
)
from slurmft.health import gpu
from slurmft.health.node import (
    LONGEST_S,
    PATIENCE,
    Mount,
    Scene,
    above,
    bad,
    below,
    fine,
    gravest,
    grown,
    mounts,
    orphaned_memory,
    unknown,
)
from slurmft.policy.node_health import ProbeResult, Problem, Status, worst
from slurmft.system.files import write_all
from slurmft.system.processes import Answer, Errand, end_group, output_of, run_all, text_of

# --- Probes of local filesystems: space and inodes, remounts after errors, bytes that come back ---

_ON_DEVICES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "reiserfs", "bcachefs"})
MIB = 1 << 20


def disk_space(scene: Scene) -> ProbeResult:
    """Space and inodes of each configured folder's filesystem; one that does not exist here is skipped."""
    found = []
    for path in scene.config.disk.paths:
        where = scene.path(str(path).lstrip("/"))
        try:
            facts = os.statvfs(where)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append(unknown("disk-space", f"{path}: {error.strerror}"))
            continue
        space = facts.f_bavail / facts.f_blocks if facts.f_blocks else 1.0
        inodes = facts.f_favail / facts.f_files if facts.f_files else 1.0  # some filesystems have no fixed number
        found.append(judge_space(str(path), space, inodes, facts.f_bavail * facts.f_frsize, scene.config.disk))
    return gravest(found) if found else fine("disk-space", "no folder to look at")


def judge_space(path: str, space: float, inodes: float, free_bytes: int, limits: DiskLimits) -> ProbeResult:
    """A disk without inodes is as full as one without space."""
    room = below(space, limits.space_warning, limits.space_critical)
    files = below(inodes, limits.inodes_warning, limits.inodes_critical)
    detail = f"{path}: {space:.0%} free ({free_bytes / MIB:.0f} MiB), {inodes:.0%} of the inodes"
    return bad("disk-space", worst([room, files]), detail, value=min(space, inodes) * 100, unit="%",
               remedy=f"make room below {path}: du -x --max-depth=2, or --inodes")  # fmt: skip


def read_only(scene: Scene) -> ProbeResult:
    """Filesystems that the kernel has made read-only after errors."""
    found = list(mounts(scene))
    if not found:
        return unknown("read-only", "/proc/self/mountinfo cannot be read")
    return judge_mounts(found, scene.config.disk)


def judge_mounts(found: list[Mount], limits: DiskLimits) -> ProbeResult:
    """A mount that was asked to be read-only says so itself; after errors only its superblock does."""
    remounted = [
        mount for mount in found
        if mount.kind in _ON_DEVICES and "ro" in mount.super_options and "rw" in mount.mount_options
    ]  # fmt: skip
    by_point = {mount.point: mount for mount in found}  # the last mount at a point hides earlier ones
    locked = [
        path for path in limits.paths
        if (mount := by_point.get(path)) is not None and "ro" in mount.mount_options | mount.super_options
    ]  # fmt: skip
    points = sorted({str(mount.point) for mount in remounted} | {str(path) for path in locked})
    if not points:
        return fine("read-only", "no filesystem went read-only")
    return bad("read-only", Status.CRITICAL, f"read-only after errors: {', '.join(points)}", value=len(points),
               problem=Problem.HARDWARE, evidence=[f"{mount.source} on {mount.point}" for mount in remounted],
               remedy="look in dmesg for the disk's errors; check the filesystem, replace the disk")  # fmt: skip


def disk_write(scene: Scene) -> ProbeResult:
    """A small file comes back as it was written, from each configured folder."""
    size = scene.config.disk.write_kib * 1024
    found = [
        written_and_read(where, size, name=str(path))
        for path in scene.config.disk.write_to
        if (where := scene.path(str(path).lstrip("/"))).is_dir()
    ]
    return gravest(found) if found else fine("disk-write", "no folder to write to")


def written_and_read(folder: Path, size: int, *, name: str) -> ProbeResult:
    """Write, make durable, drop from the cache, read back, compare; nothing is left behind."""
    check, pattern = "disk-write", os.urandom(4096)
    content = (pattern * (size // len(pattern) + 1))[:size]
    try:
        descriptor, path = tempfile.mkstemp(dir=folder, prefix=".slurmft-health-")
    except OSError as error:
        return _cannot_write(name, error)
    try:
        os.unlink(path)  # noqa: PTH108 - at once: no file is left if we are killed
        back = _through_the_disk(descriptor, content)
    except OSError as error:
        return _cannot_write(name, error)
    finally:
        os.close(descriptor)
    if back == content:
        return fine(check, f"{name}: {size} bytes came back", value=size, unit="B")
    return bad(check, Status.CRITICAL, f"{name}: the data read differ from the data written", problem=Problem.HARDWARE,
               remedy="check the filesystem and its disk; smartctl -a")  # fmt: skip


def _through_the_disk(descriptor: int, content: bytes) -> bytes:
    write_all(descriptor, content)  # a disk that fills up accepts a part, and refuses the rest
    os.fsync(descriptor)
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    pieces: list[bytes] = []
    while piece := os.read(descriptor, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _cannot_write(name: str, error: OSError) -> ProbeResult:
    check, detail = "disk-write", f"{name}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return unknown(check, detail, remedy="run as root, or name a folder of your own")
    hardware = error.errno in (errno.EIO, errno.EROFS)
    return bad(check, Status.CRITICAL, detail, problem=Problem.HARDWARE if hardware else Problem.NODE,
               remedy="look in dmesg for the disk's errors" if hardware else f"make room in {name}")  # fmt: skip


# --- filesystems ---
# Shared filesystems: whether they answer. Each is asked by a process of its own, left behind if it hangs.

NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "panfs", "glusterfs", "wekafs", "orangefs",
     "pvfs2", "afs", "9p", "fuse.glusterfs", "fuse.ceph", "fuse.sshfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse",
     "fuse.vast", "fuse.wekafs"}
)  # fmt: skip
MAX_MOUNTS = 32
"""Automounted home folders can be thousands, all of one server."""


def filesystems(scene: Scene) -> ProbeResult:
    """Ask every shared filesystem for one attribute, all at the same time."""
    limits, required = scene.config.filesystems, list(scene.config.filesystems.paths)
    wanted = [*required, *(found_points(list(mounts(scene))) if limits.detect else [])]
    wanted = list(dict.fromkeys(wanted))[: MAX_MOUNTS + len(required)]
    if not wanted:
        return fine("filesystems", "no shared filesystem is mounted")
    limit = scene.stretched(limits.answer_s)
    errands = [
        Errand(name=str(path), limit_s=limit, task=lambda path=path: _ask(path))  # type: ignore[misc]
        for path in wanted
    ]
    answers = run_all(errands)
    return judge_answers(answers, frozenset(map(str, required)), limits, patience=scene.patience)


def found_points(found: Sequence[Mount]) -> list[Path]:
    """One mount point of each network filesystem: several mounts of one source answer alike."""
    by_source: dict[tuple[str, str], Path] = {}
    for mount in found:
        if mount.kind in NETWORK_KINDS:
            by_source.setdefault((mount.kind, mount.source), mount.point)
    return list(by_source.values())


def judge_answers(
    answers: Sequence[Answer], required: frozenset[str], limits: FilesystemLimits, *, patience: float = 1.0
) -> ProbeResult:
    """One that hangs is critical; one that is gone is so where it is required."""
    return gravest([_judge(answer, answer.name in required, limits, patience) for answer in answers])


def _judge(answer: Answer, required: bool, limits: FilesystemLimits, patience: float) -> ProbeResult:
    name = "filesystems"
    if answer.timed_out:
        return bad(name, Status.CRITICAL, f"{answer.name} hangs ({answer.error})", value=answer.took_s, unit="s",
                   remedy="look at the file server and its network; dmesg shows 'not responding'")  # fmt: skip
    if answer.error:
        return unknown(name, f"{answer.name}: {answer.error}")
    if reason := (answer.value or {}).get("error"):
        stale = answer.value.get("errno") in (5, 116)  # EIO, ESTALE: the client has lost it
        if required or stale:
            return bad(name, Status.CRITICAL, f"{answer.name}: {reason}",
                       remedy="mount it again; see whether other nodes reach its server")  # fmt: skip
        return unknown(name, f"{answer.name}: {reason}")
    slow = answer.took_s >= limits.slow_warning_s * patience
    return bad(name, Status.WARNING if slow else Status.OK, f"{answer.name} answers in {answer.took_s:.2f} s",
               value=answer.took_s, unit="s", remedy="look at the load of the file server")  # fmt: skip


def _ask(path: Path) -> dict[str, Any]:
    try:
        facts = os.stat(path)  # noqa: PTH116
        if stat.S_ISDIR(facts.st_mode):
            os.statvfs(path)  # goes to the server where the attributes are cached
    except OSError as error:
        return {"error": error.strerror or str(error), "errno": error.errno}
    return {}


# --- Probes of the host: load, processes, clock, time since boot, left-over shared memory ---

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
    if (up_s := scene.up_s()) is None:
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


# --- Probes of the memory: available memory, pressure, ECC errors ---


def memory(scene: Scene) -> ProbeResult:
    """Memory that is available, and how long processes waited for some."""
    fields = dict(re.findall(r"^(\w+):\s+(\d{1,18}) kB$", scene.text("proc/meminfo"), re.MULTILINE))
    try:
        share = int(fields["MemAvailable"]) / int(fields["MemTotal"])
    except (KeyError, ZeroDivisionError):
        return unknown("memory", "/proc/meminfo cannot be read")
    return judge_memory(share, parse_pressure(scene.text("proc/pressure/memory")), scene.config.memory)


def parse_pressure(text: str) -> float | None:
    """Share of the last minute in which nothing could run for want of it; None on kernels without PSI."""
    match = re.search(r"^full .*\bavg60=(\d{1,3}(?:\.\d{1,9})?)\b", text, re.MULTILINE)
    return float(match[1]) / 100 if match else None


def judge_memory(available: float, pressure: float | None, limits: MemoryLimits) -> ProbeResult:
    """A job that uses all of it is not the node's fault."""
    space = below(available, limits.available_warning, limits.available_critical)
    waiting = Status.OK if pressure is None else above(pressure, limits.pressure_warning, None)
    detail = f"{available:.0%} available"
    if pressure is not None:
        detail += f", all waited for memory {pressure:.0%} of the last minute"
    return bad("memory", worst([space, waiting]), detail, value=available * 100, unit="%", problem=Problem.USER,
               remedy="see which job uses it: systemd-cgtop, or ps --sort=-rss")  # fmt: skip


def edac(scene: Scene) -> ProbeResult | None:
    """ECC errors that the memory controllers have counted lately; None where there are none to ask."""
    corrected = uncorrected = 0
    lines = []
    controllers = scene.folders("sys/devices/system/edac/mc", "mc[0-9]*")
    for folder in controllers:
        name = str(folder.relative_to(scene.root))
        found = scene.integer(f"{name}/ce_count"), scene.integer(f"{name}/ue_count")
        if None in found:
            return unknown("edac", f"{name} cannot be read")
        ce, ue = found[0] or 0, found[1] or 0
        corrected, uncorrected = corrected + ce, uncorrected + ue
        if ce or ue:
            lines.append(f"{folder.name}: {ce} corrected, {ue} uncorrected since boot")
    if not controllers:
        return None
    recent = grown(scene, "edac", {"corrected": corrected, "uncorrected": uncorrected})
    return judge_edac(recent.get("corrected", 0), recent.get("uncorrected", 0), lines, scene.config.memory)


def judge_edac(corrected: int, uncorrected: int, lines: list[str], limits: MemoryLimits) -> ProbeResult:
    """An uncorrected one has changed data, or killed what used it."""
    if not corrected and not uncorrected:
        return fine("edac", "no ECC errors lately", value=0, unit="errors")
    hard = above(uncorrected, None, limits.uncorrected_critical)
    status = worst([hard, above(corrected, limits.corrected_warning, None)])
    detail = f"{uncorrected} uncorrected and {corrected} corrected ECC errors lately"
    remedy = "replace the DIMM that ras-mc-ctl --errors names" if hard else "watch it: ras-mc-ctl --errors"
    return bad("edac", status, detail, value=uncorrected or corrected, unit="errors", evidence=lines, remedy=remedy,
               problem=Problem.HARDWARE)  # fmt: skip


# --- Probes of the network: links, InfiniBand ports, names ---

MIN_ERRORS = 100
"""Fewer say nothing: a few packets are lost while a link comes up."""

IFF_UP = 0x1


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One interface; None where the kernel does not say."""

    name: str
    exists: bool = True
    state: str = ""
    """up, down, unknown, ...; of the kernel's operstate."""

    speed_mbps: int | None = None
    packets: int = 0
    errors: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One port of an InfiniBand (or RoCE) device."""

    name: str
    state: str
    """ACTIVE, INIT, ARMED or DOWN."""

    physical: str
    """LinkUp, Polling, Disabled, ..."""

    gbps: float | None
    downed: int
    """Times that its link went down."""


def links(scene: Scene) -> ProbeResult:
    """The interfaces that matter: the named ones, or the one with the default route."""
    limits = scene.config.network
    names = list(limits.links) or default_routes(scene.text("proc/net/route"))
    found = [_link(scene, name) for name in names]
    return judge_links(found, limits)


def default_routes(text: str) -> list[str]:
    """Interfaces with a default route in /proc/net/route."""
    rows = (line.split() for line in text.splitlines()[1:])
    return list(dict.fromkeys(row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"))


def judge_links(found: Sequence[Link], limits: NetworkLimits) -> ProbeResult:
    """Down is critical, slower than it should be too; errors are worth a warning."""
    if not found:
        return fine("links", "no interface is named and none has a default route")
    return gravest([_judge_link(link, limits) for link in found])


def _judge_link(link: Link, limits: NetworkLimits) -> ProbeResult:
    check, remedy = "links", f"ethtool {link.name}; look at the cable and the switch port"
    if not link.exists:
        return bad(check, Status.CRITICAL, f"there is no interface {link.name}", remedy="look at lspci and dmesg")
    if link.state in ("down", "lowerlayerdown", "notpresent"):
        return bad(check, Status.CRITICAL, f"{link.name} is {link.state}", remedy=remedy, problem=Problem.HARDWARE)
    if limits.min_speed_mbps and link.speed_mbps is not None and 0 <= link.speed_mbps < limits.min_speed_mbps:
        detail = f"{link.name} has {link.speed_mbps} Mb/s, not {limits.min_speed_mbps}"
        return bad(check, Status.CRITICAL, detail, remedy=remedy, value=link.speed_mbps, unit="Mb/s",
                   problem=Problem.HARDWARE)  # fmt: skip
    share = link.errors / max(1, link.packets)
    if link.errors >= MIN_ERRORS and share >= limits.error_share_warning:
        detail = f"{link.name}: {link.errors} errors in {link.packets} packets"
        return bad(check, Status.WARNING, detail, remedy=remedy, value=share * 100, unit="%", problem=Problem.HARDWARE)
    return fine(check, f"{link.name} is up", value=share * 100, unit="%")


def _link(scene: Scene, name: str) -> Link:
    folder = f"sys/class/net/{name}"
    if "/" in name or not scene.path(folder).exists():
        return Link(name=name, exists=False)

    def count(*counters: str) -> int:
        return sum(scene.integer(f"{folder}/statistics/{each}") or 0 for each in counters)

    flags = scene.text(f"{folder}/flags").strip()
    is_up = not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", flags) or int(flags, 16) & IFF_UP
    state = scene.text(f"{folder}/operstate").strip() if is_up else "down"
    return Link(
        name=name, state=state, speed_mbps=scene.integer(f"{folder}/speed"),
        packets=count("rx_packets", "tx_packets"), errors=count("rx_errors", "tx_errors", "rx_crc_errors"),
    )  # fmt: skip


def infiniband(scene: Scene) -> ProbeResult | None:
    """Ports of InfiniBand devices; None where there are none and none are expected."""
    folders = scene.folders("sys/class/infiniband", "*/ports/[0-9]*")
    if not folders and not scene.config.network.infiniband_ports:
        return None
    ports = []
    for folder in folders:
        name = str(folder.relative_to(scene.root))
        rate = re.match(r"\s*(\d{1,6}(?:\.\d{1,3})?) Gb/sec", scene.text(f"{name}/rate"))
        ports.append(Port(
            name=f"{folder.parents[1].name}/{folder.name}", state=_word(scene.text(f"{name}/state")),
            physical=_word(scene.text(f"{name}/phys_state")), gbps=float(rate[1]) if rate else None,
            downed=scene.integer(f"{name}/counters/link_downed") or 0,
        ))  # fmt: skip
    recent = grown(scene, "infiniband", {port.name: port.downed for port in ports})
    return judge_ports([replace(port, downed=recent.get(port.name, 0)) for port in ports], scene.config.network)


def judge_ports(ports: Sequence[Port], limits: NetworkLimits) -> ProbeResult:
    """A port with a link that is not ACTIVE has no subnet manager; one without a link may have no cable."""
    check, remedy = "infiniband", "ibstat; look at the cable, the switch port and the subnet manager"
    active = [port for port in ports if port.state == "ACTIVE"]
    waiting = [port for port in ports if port.physical == "LinkUp" and port.state != "ACTIVE"]
    evidence = [f"{port.name}: {port.state} {port.physical} {port.gbps or 0:g} Gb/s" for port in ports]

    def failed(status: Status, detail: str) -> ProbeResult:
        return bad(check, status, detail, remedy=remedy, evidence=evidence, value=len(active), unit="ports",
                   problem=Problem.HARDWARE)  # fmt: skip

    if limits.infiniband_ports is not None and len(active) < limits.infiniband_ports:
        return failed(Status.CRITICAL, f"{len(active)} of {limits.infiniband_ports} ports are active")
    if waiting:
        status = Status.WARNING if limits.infiniband_ports is not None else Status.CRITICAL
        return failed(status, f"{', '.join(f'{port.name} is {port.state}' for port in waiting)}")
    slow = [port for port in active if port.gbps is not None and port.gbps < limits.infiniband_min_gbps]
    if slow:
        return failed(Status.CRITICAL, ", ".join(f"{port.name} has {port.gbps:g} Gb/s" for port in slow))
    if flapping := [port for port in active if port.downed >= limits.link_downed_warning]:
        return failed(Status.WARNING, ", ".join(f"{port.name} went down {port.downed} times" for port in flapping))
    return fine(check, f"{len(active)} of {len(ports)} ports are active", value=len(active), unit="ports")


def _word(text: str) -> str:
    """ACTIVE of ``4: ACTIVE``."""
    return text.partition(":")[2].strip() or text.strip()


def names(scene: Scene) -> ProbeResult:
    """Names that must resolve, all at the same time."""
    limits = scene.config.network
    wanted, own = list(limits.resolve), scene.node or os.uname().nodename
    limit = scene.stretched(limits.resolve_s)
    errands = [Errand(name=name, limit_s=limit, task=lambda name=name: _resolve(name))  # type: ignore[misc]
               for name in dict.fromkeys(wanted or [own])]  # fmt: skip
    return judge_names(run_all(errands), required=bool(wanted))


def judge_names(answers: Sequence[Answer], *, required: bool) -> ProbeResult:
    """A name of the site's that is not found is critical; the node's own is worth a warning."""
    check, remedy = "names", "getent hosts NAME; look at /etc/resolv.conf, /etc/hosts and the name server"
    failed = [f"{each.name}: {each.error or each.value['error']}" for each in answers
              if each.error or (each.value or {}).get("error")]  # fmt: skip
    if not failed:
        return fine(check, f"{len(answers)} resolve", value=max((each.took_s for each in answers), default=0), unit="s")
    return bad(check, Status.CRITICAL if required else Status.WARNING, "; ".join(failed), remedy=remedy)


def _resolve(name: str) -> dict[str, str]:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}
    return {}


# --- Executables of the site as probes: Nagios's exit codes and performance data, with any output ---

MAX_OUTPUT_BYTES = 64 * 1024
MAX_DETAIL = 500
GONE_S = 0.2
_PERFDATA = re.compile(r"\s*(?:'(?:[^']|'')*'|[^\s='|]+)=(-?\d{1,15}(?:\.\d{1,15})?)([A-Za-z%]{0,8})(?:;\S*)?(?=\s|$)")


def user_probe(scene: Scene, name: str, probe: UserProbe) -> ProbeResult:
    """Run it, and believe its exit code.

    It is in a group of processes of its own, which is ended with it; it has no input, and the environment that we have,
    with ``SLURMFT_HEALTH_CONTEXT`` and ``SLURMFT_HEALTH_LEVEL``.
    """
    limit = scene.stretched(probe.timeout_s)
    environment = {**scene.environment, "SLURMFT_HEALTH_CONTEXT": scene.context,
                   "SLURMFT_HEALTH_LEVEL": str(scene.level)}  # fmt: skip
    try:
        process = subprocess.Popen(
            list(probe.command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return unknown(name, f"{probe.command[0]}: {reason}", remedy="look at user_probes in the configuration")
    (output,), code = output_of(process, limit, MAX_OUTPUT_BYTES)
    end_group(process, GONE_S)
    if code is None:
        return unknown(name, f"no answer within {limit:.1f} s", remedy="raise timeout_s, or make it faster")
    return result_of_output(name, code, output, probe)


def result_of_output(name: str, code: int, output: bytes, probe: UserProbe) -> ProbeResult:
    """The result that exit code and output stand for. Any other code than 0 to 3 is UNKNOWN: a probe that was killed or
    not found says nothing of the node."""
    lines = output.decode(errors="replace").replace("\0", " ").splitlines() or [""]
    words, bar, perfdata = lines[0].partition("|")
    detail = " ".join(words.split())[:MAX_DETAIL]
    if code not in (0, 1, 2, 3):
        how = f"it was ended by signal {-code}" if code < 0 else f"it ended with {code}, which Nagios does not know"
        return unknown(name, f"{how}: {detail}".rstrip(": "), remedy="run it by hand")
    number, unit = first_number(perfdata) if bar else (None, "")
    return bad(
        name, Status(code), detail or "it said nothing", remedy=probe.remedy or "run it by hand",
        problem=Problem.HARDWARE if probe.is_hardware else Problem.NODE, value=number, unit=unit,
        evidence=[" ".join(line.split())[:MAX_DETAIL] for line in lines[:20]] if code else (),
    )  # fmt: skip


def first_number(perfdata: str) -> tuple[float | None, str]:
    """Value and unit of the first entry of Nagios's performance data (``'label'=value[unit];warn;crit;min;max``)."""
    match = _PERFDATA.match(perfdata)
    if match is None:
        return None, ""
    value = float(match[1])
    return (value, match[2]) if math.isfinite(value) else (None, "")


# --- Which probes there are, and how long each may take ---

MOMENT_S = 0.3

Found = ProbeResult | Sequence[ProbeResult] | None
"""The return type of a probe: one result, several, or none where there is nothing of its kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A function that looks at the node, in a process of its own."""

    names: tuple[str, ...]
    """Of the results that it may give; all are UNKNOWN when it fails."""

    look: Callable[[Scene], Found]
    limit_s: float = 1.5
    level: int = 1
    is_patient: bool = True
    """Its limit grows with the patience of the context."""

    late_s: Callable[[HealthConfig], float] = lambda _: math.inf
    """Seconds without an answer that are a fault of the node, in contexts that can wait so long."""

    waits: Callable[[HealthConfig], float] = lambda _: 0.0
    """Seconds that it waits by itself, as the configuration says: it must live to report what did not answer."""

    def limit(self, scene: Scene) -> float:
        """Seconds that it may take here."""
        base = max(scene.config.limits_s.get(name, self.limit_s) for name in self.names)
        own, late_s = self.waits(scene.config), self.late_after_s(scene)
        if not self.is_patient:
            return base
        if math.isfinite(late_s):
            return max(base, late_s)
        return scene.stretched(max(base - MOMENT_S, own)) + MOMENT_S if own else scene.stretched(base)

    def late_after_s(self, scene: Scene) -> float:
        """Seconds without an answer that are CRITICAL here, and not UNKNOWN; infinite where that is never so."""
        late_s = self.late_s(scene.config)
        if math.isinf(late_s):
            return math.inf
        if scene.context == "prolog":
            return scene.config.hooks.prolog_answer_s or math.inf
        return min(late_s, LONGEST_S.get(scene.context, math.inf)) if scene.context in PATIENCE else math.inf


PROBES = (
    Probe(names=("load",), look=load),
    Probe(names=("processes",), look=processes),
    Probe(names=("uptime",), look=uptime),
    Probe(names=("clock",), look=clock),
    Probe(names=("shared-memory",), look=shared_memory),
    Probe(names=("memory",), look=memory),
    Probe(names=("edac",), look=edac),
    Probe(names=("disk-space",), look=disk_space),
    Probe(names=("read-only",), look=read_only),
    Probe(names=("disk-write",), look=disk_write),
    Probe(names=("filesystems",), look=filesystems, waits=lambda config: config.filesystems.answer_s),
    Probe(names=("links",), look=links),
    Probe(names=("infiniband",), look=infiniband),
    Probe(names=("names",), look=names, waits=lambda config: config.network.resolve_s),
    Probe(names=gpu.NAMES, look=gpu.gpus, late_s=lambda config: config.gpu.answer_s),
    Probe(names=("xid",), look=gpu.xid),
    Probe(names=("gpu-matmul", "gpu-memory"), look=gpu.gpu_compute, limit_s=gpu.WORK_S, level=2, is_patient=False),
    Probe(names=("cpu-matmul", "cpu-memory"), look=gpu.cpu_compute, limit_s=gpu.WORK_S, level=2, is_patient=False),
    Probe(names=("dcgm",), look=gpu.diagnose, limit_s=gpu.DIAGNOSE_S, level=2, is_patient=False),
    Probe(names=("all-reduce",), look=gpu.all_reduce, limit_s=gpu.PAIR_S, level=2, is_patient=False),
)
"""Our own. Those of level 1 take less than two seconds together, even if one hangs."""


def probes_for(scene: Scene) -> list[Probe]:
    """The probes of this look: ours and the site's, without those that are disabled."""
    off = frozenset(scene.config.disabled)
    own = [probe for probe in PROBES if probe.level <= scene.level and not set(probe.names) <= off]
    theirs = [_user_probe(name, probe) for name, probe in scene.config.user_probes.items()
              if probe.level <= scene.level and name not in off]  # fmt: skip
    return own + theirs


def known_names(scene: Scene) -> list[str]:
    """Every name that a result may have."""
    return [*(name for probe in PROBES for name in probe.names), *scene.config.user_probes]


def _user_probe(name: str, probe: UserProbe) -> Probe:
    def look(scene: Scene, **_: Any) -> ProbeResult:
        return user_probe(scene, name, probe)

    # it ends its program itself; a moment more, so that it can report that
    return Probe(names=(name,), look=look, limit_s=probe.timeout_s, level=probe.level, waits=lambda _: probe.timeout_s)
