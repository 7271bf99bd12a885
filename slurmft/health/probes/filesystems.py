"""Shared filesystems: whether they answer. Each is asked by a process of its own, left behind if it hangs."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.config.health import FilesystemLimits
from slurmft.health.judging import bad, fine, gravest, unknown
from slurmft.health.node_view import Mount, Scene, mounts
from slurmft.policy.nodes.node_health import ProbeResult, Status
from slurmft.system.isolation import Answer, Errand, run_all

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
