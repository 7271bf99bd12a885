"""Probes of local filesystems: space and inodes, remounts after errors, bytes that come back."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from slurmft.config.health import DiskLimits
from slurmft.health.judging import bad, below, fine, gravest, unknown
from slurmft.health.node_view import Mount, Scene, mounts
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status, worst

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


def written_and_read(folder: Path, size: int, *, name: str, check: str = "disk-write") -> ProbeResult:
    """Write, make durable, drop from the cache, read back, compare; nothing is left behind."""
    pattern = os.urandom(4096)
    content = (pattern * (size // len(pattern) + 1))[:size]
    try:
        descriptor, path = tempfile.mkstemp(dir=folder, prefix=".slurmft-health-")
    except OSError as error:
        return _cannot_write(check, name, error)
    try:
        os.unlink(path)  # noqa: PTH108 - at once: no file is left if we are killed
        back = _through_the_disk(descriptor, content)
    except OSError as error:
        return _cannot_write(check, name, error)
    finally:
        os.close(descriptor)
    if back == content:
        return fine(check, f"{name}: {size} bytes came back", value=size, unit="B")
    return bad(check, Status.CRITICAL, f"{name}: the data read differ from the data written", problem=Problem.HARDWARE,
               remedy="check the filesystem and its disk; smartctl -a")  # fmt: skip


def _through_the_disk(descriptor: int, content: bytes) -> bytes:
    left = memoryview(content)
    while left:  # a disk that fills up accepts a part, and refuses the rest
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    pieces: list[bytes] = []
    while piece := os.read(descriptor, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _cannot_write(check: str, name: str, error: OSError) -> ProbeResult:
    detail = f"{name}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return unknown(check, detail, remedy="run as root, or name a folder of your own")
    hardware = error.errno in (errno.EIO, errno.EROFS)
    return bad(check, Status.CRITICAL, detail, problem=Problem.HARDWARE if hardware else Problem.NODE,
               remedy="look in dmesg for the disk's errors" if hardware else f"make room in {name}")  # fmt: skip
