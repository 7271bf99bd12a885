"""Left-overs of ended jobs on a node: their owner, and how that is proven.

Nothing is proven by a name alone. A process is a job's when its cgroup, or the environment that it began with, says so
and its user is the job's. Shared memory is left over when its owner has no process here any more, or, of slurmft's own
folders, when no process holds the lock that their agent keeps as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmft.health.node_view import Scene, text_of
from slurmft.system.private_folder import MAX_DEPTH, is_left_over

SETTLED_S = 60.0
"""Younger objects may be about to be used."""

DAEMONS = frozenset({0, os.geteuid()})
"""Who runs Slurm's step daemons: root, and in a lab one user."""

OURS = re.compile(r"slurmft-(?:memory-)?\d+-")
LIBRARIES = re.compile(
    r"(?:torch_\d+_|sem\.mp-|psm_[0-9a-f]{8}$|nccl-[A-Za-z0-9]{6}$|sem\.loky-|psm[23]_shm\.|ucx_shm_|cuda\.shm\.|"
    r"__KMP_REGISTERED_LIB_|vader_segment\.|osc_rdma\.)"
)
"""Names that torch, multiprocessing, NCCL, UCX and MPI leave in /dev/shm when they are killed. Anything else may be
data that a user keeps there on purpose."""

MAX_COUNTED = 10_000
"""Files of one folder whose sizes are added up."""

_STEP = re.compile(r"slurmstepd: \[(\d+)\.")
_CGROUP_JOB = re.compile(r"/job_(\d+)(?:/|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process, and which job it belongs to by its own account."""

    pid: int
    uid: int
    started: int
    """Ticks since boot."""

    job: str
    """The job's number; empty where neither cgroup nor environment show it."""

    name: str


def running_jobs(scene: Scene) -> frozenset[str] | None:
    """The jobs with a step on this node, by the titles of Slurm's own step daemons; None where one has no title yet."""
    found = set()
    for folder in scene.folders("proc", "[0-9]*"):
        if text_of(folder / "comm").strip() != "slurmstepd":
            continue
        daemon = process(folder)
        if daemon is None or daemon.uid not in DAEMONS:
            continue  # gone, or a user's: any process can take that name and title
        if (step := step_of(text_of(folder / "cmdline"))) is None:
            return None
        found.add(step or "")
    return frozenset(found - {""})


def step_of(title: str) -> str | None:
    """The job whose step daemon has this title, such as ``slurmstepd: [12.batch]``; None where it is none."""
    match = _STEP.match(title)
    return match[1] if match else None


def process(folder: Path) -> Process | None:
    """The process of a folder in /proc; None where it is gone or a zombie."""
    before, _, after = text_of(folder / "stat").rpartition(")")
    fields = after.split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    try:
        uid = folder.stat().st_uid
    except OSError:
        return None
    return Process(pid=int(folder.name), uid=uid, started=int(fields[19]), job=_job(folder),
                   name=before.partition("(")[2])  # fmt: skip


def processes(scene: Scene) -> Iterator[Process]:
    """All that live."""
    for folder in scene.folders("proc", "[0-9]*"):
        if (found := process(folder)) is not None:
            yield found


def _job(folder: Path) -> str:
    """The cgroup is set by Slurm and comes first; an environment can be inherited."""
    if match := _CGROUP_JOB.search(text_of(folder / "cgroup")):
        return match[1]
    match = re.search(r"(?:^|\0)SLURM_JOB_ID=(\d+)\0", text_of(folder / "environ") + "\0")
    return match[1] if match else ""


def orphaned_memory(scene: Scene, *, uid: int | None = None) -> list[tuple[Path, int]]:
    """Objects in /dev/shm that no process uses any more, of this user or of all, each with its bytes."""
    found, candidates = [], _known_names(scene.path("dev/shm"))
    alive = _users_with_processes(scene) if candidates else frozenset()
    for path in candidates:
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_uid == 0 or (uid is not None and facts.st_uid != uid):
                continue
            if scene.now - max(facts.st_mtime, facts.st_ctime) < SETTLED_S and uid is None:
                continue
            ours = OURS.match(path.name)
            if ours and stat.S_ISDIR(facts.st_mode):  # its number is that of the user in a container, of one from there
                if is_left_over(path, owner=facts.st_uid):
                    found.append((path, _size(path)))
            elif LIBRARIES.match(path.name) and stat.S_ISREG(facts.st_mode) and facts.st_uid not in alive:
                found.append((path, facts.st_blocks * 512))
    return found


def _users_with_processes(scene: Scene) -> frozenset[int]:
    users = set()
    for folder in scene.folders("proc", "[0-9]*"):
        with contextlib.suppress(OSError):
            users.add(folder.stat().st_uid)
    return frozenset(users)


def _known_names(folder: Path) -> list[Path]:
    """Entries with the names that we clean up after; all others cost one look at their name."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(each.path) for each in entries if OURS.match(each.name) or LIBRARIES.match(each.name))
    return []


def _size(folder: Path) -> int:
    """Bytes of what lies in it, as far as it has been counted; a user may leave millions of files."""
    total = 0
    for counted, (where, _, names) in enumerate(os.walk(folder)):
        for name in names[:MAX_COUNTED]:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512  # noqa: PTH118 - names may be bytes
        if counted > MAX_DEPTH or len(names) > MAX_COUNTED:
            break
    return total
