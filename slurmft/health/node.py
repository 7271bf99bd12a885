"""A node as probes see it, how its numbers become results, and what ended jobs have left on it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmft.config.health import HealthConfig
from slurmft.errors import StorageError
from slurmft.policy.node_health import ProbeResult, Problem, Sample, Status, growth, with_sample, worst
from slurmft.system.files import MAX_DEPTH, is_left_over, read_json, write_json
from slurmft.system.processes import text_of

# --- How numbers become results: pure, and the same for all probes ---


def fine(name: str, detail: str, *, value: float | None = None, unit: str = "") -> ProbeResult:
    """All is well."""
    return ProbeResult(name=name, status=Status.OK, detail=detail, value=value, unit=unit)


def unknown(name: str, detail: str, *, remedy: str = "") -> ProbeResult:
    """It could not look."""
    return ProbeResult(name=name, status=Status.UNKNOWN, detail=detail, remedy=remedy)


def bad(
    name: str, status: Status, detail: str, *, remedy: str, problem: Problem = Problem.NODE,
    evidence: Sequence[str] = (), value: float | None = None, unit: str = "",
) -> ProbeResult:  # fmt: skip
    """Something is wrong; OK and UNKNOWN come out of here too, without a remedy."""
    remedy = remedy if status in (Status.WARNING, Status.CRITICAL) else ""
    return ProbeResult(name=name, status=status, detail=detail, remedy=remedy, problem=problem,
                       evidence=tuple(evidence), value=value, unit=unit)  # fmt: skip


def above(value: float | None, warning: float | None, critical: float | None) -> Status:
    """Whether a number is too great: from a limit on. No number, or NaN, is UNKNOWN; no limit is never reached."""
    if value is None or math.isnan(value):
        return Status.UNKNOWN
    if critical is not None and value >= critical:
        return Status.CRITICAL
    return Status.WARNING if warning is not None and value >= warning else Status.OK


def below(value: float | None, warning: float, critical: float) -> Status:
    """Whether a number is too small: below a limit. No number, or NaN, is UNKNOWN."""
    if value is None or math.isnan(value):
        return Status.UNKNOWN
    if value < critical:
        return Status.CRITICAL
    return Status.WARNING if value < warning else Status.OK


def gravest(results: Sequence[ProbeResult]) -> ProbeResult:
    """The worst of several of one name, with what the other bad ones said; the first where all are alike."""
    status = worst(result.status for result in results)
    chosen = next(result for result in results if result.status is status)
    if status is Status.OK:
        details = [result.detail for result in results if result.detail]
    else:
        details = [result.detail for result in results if result.status is status]
    evidence = tuple(line for result in results for line in result.evidence)
    return ProbeResult(
        name=chosen.name, status=status, detail="; ".join(dict.fromkeys(details)), value=chosen.value,
        unit=chosen.unit, evidence=evidence, remedy=chosen.remedy, problem=chosen.problem,
    )  # fmt: skip


# --- Where probes look and by which settings: roots that tests can move, and bounded reading of any file ---

MAX_BYTES = 1 << 20

PATIENCE: Mapping[str, float] = {"healthcheck": 10.0, "cron": 5.0}
"""Context -> how many times longer than usual things may take: Slurm gives HealthCheckProgram 60 s."""


LONGEST_S: Mapping[str, float] = {"prolog": 5.0, "epilog": 5.0, "healthcheck": 40.0}
"""Context -> seconds that no probe may exceed: bin/slurmft-prolog has 10 s in all, bin/slurmft-healthcheck 50 s. A
probe that is cut short is UNKNOWN; without this, one slow probe would lose the results of all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One look: where, at which node, with which settings."""

    node: str
    now: float
    """Unix time."""

    config: HealthConfig = field(default_factory=HealthConfig)
    context: str = "manual"
    level: int = 1
    root: Path = Path("/")
    """Where /proc, /sys and /dev are found."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def patience(self) -> float:
        """How many times longer than usual things may take."""
        return PATIENCE.get(self.context, 1.0)

    def stretched(self, limit_s: float) -> float:
        """A limit in this context: with patience, and within the hook's own limit."""
        return min(limit_s * self.patience, LONGEST_S.get(self.context, math.inf))

    def path(self, name: str) -> Path:
        """``proc/loadavg`` below the root."""
        return self.root / name

    def text(self, name: str) -> str:
        """The text of this file below the root; empty where it is missing or may not be read."""
        return text_of(self.root / name)

    def integer(self, name: str) -> int | None:
        """The number that a file begins with; None where there is none."""
        match = re.match(r"\s*(-?\d{1,18})\b", self.text(name))
        return int(match[1]) if match else None

    def up_s(self) -> float | None:
        """Seconds since boot; None where the kernel does not say."""
        try:
            return float(self.text("proc/uptime").split()[0])
        except (IndexError, ValueError):
            return None

    def folders(self, name: str, pattern: str = "*") -> list[Path]:
        """What matches in a folder below the root, sorted; nothing where it is missing."""
        with contextlib.suppress(OSError):
            return sorted((self.root / name).glob(pattern))
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: Path
    kind: str
    """Type of the filesystem."""

    source: str
    mount_options: frozenset[str]
    super_options: frozenset[str]


def mounts(scene: Scene) -> Iterator[Mount]:
    """All mounts, as this process sees them (proc(5), mountinfo); lines of another shape are skipped."""
    for line in scene.text("proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if dash and len(left) >= 6 and len(right) >= 3:
            yield Mount(
                point=Path(_unescaped(left[4])), kind=right[0], source=_unescaped(right[1]),
                mount_options=frozenset(left[5].split(",")), super_options=frozenset(right[2].split(",")),
            )  # fmt: skip


def _unescaped(text: str) -> str:
    """Blanks and backslashes in paths are escaped in octal there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# --- Counters that only grow: their totals at earlier looks ---

HOUR_S = 3600.0


def evidence_folder(config: HealthConfig) -> Path:
    """Node-local folder of the newest look's evidence, and of the totals of counters."""
    if config.evidence_folder is not None:
        return config.evidence_folder
    if os.geteuid() == 0:
        return Path("/run/slurmft")
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state) / "slurmft" / "health"


def grown(scene: Scene, kind: str, totals: Mapping[str, int]) -> dict[str, int]:
    """By how much these counters have grown within ``window_hours``, as far as the looks of this user know.

    The first look on a node that has been up for longer cannot know when its counters have grown: nothing is recent.
    Two looks at once may lose a sample of one, never the file.
    """
    window_s = scene.config.window_hours * HOUR_S
    path = scene.path(str(evidence_folder(scene.config) / f"{scene.node}.{kind}.json").lstrip("/"))
    samples = with_sample(before := _samples(path), scene.now, totals, window_s)
    if not before and (up_s := scene.up_s() or 0.0) < window_s:
        samples = ((scene.now - up_s, {}), *samples)
    if samples != before:
        with contextlib.suppress(OSError):  # a full disk: this look counts from the samples that are there
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_json(path, {"samples": samples}, mode=0o644, durable=False)
    return growth(samples, scene.now, window_s)


def _samples(path: Path) -> tuple[Sample, ...]:
    """What earlier looks have left; nothing where it is damaged or another user's."""
    try:
        found = (read_json(path, limit_bytes=MAX_BYTES, owners={0, os.geteuid()}) or {}).get("samples", ())
        return tuple((float(at), {str(name): int(total) for name, total in totals.items()}) for at, totals in found)
    except (StorageError, TypeError, ValueError, AttributeError, OverflowError):
        return ()


# --- Left-overs of ended jobs on a node: their owner, and how that is proven ---
# Nothing is proven by a name alone. A process is a job's when its cgroup, or the environment that it began with, says
# so and its user is the job's. Shared memory is left over when its owner has no process here any more, or, of slurmft's
# own folders, when no process holds the lock that their agent keeps as long as it lives.

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
