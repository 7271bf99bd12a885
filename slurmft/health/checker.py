"""Runs all probes of this node and keeps the results, one file for each node on a shared folder; and what Slurm's
hooks do with them, with the lines of slurm.conf that call them.

Slurm drains a node whose prolog or epilog fails, so the scripts in ``bin/`` end with 0 on any error of ours; the one
exit code that they pass on is REFUSED, of a prolog that is allowed to refuse.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

import slurmft.errors
from slurmft.config import run as configuration
from slurmft.config.health import HealthConfig
from slurmft.errors import ConfigError, SlurmError, StorageError, StorageUnavailable, UsageError
from slurmft.health.node import (
    Process,
    Scene,
    bad,
    evidence_folder,
    orphaned_memory,
    process,
    processes,
    running_jobs,
    step_of,
)
from slurmft.health.probes import Probe, known_names, probes_for
from slurmft.policy import values as plain
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.node_health import Checkup, ProbeResult, Problem, Status, drain_reason
from slurmft.scheduler import slurm
from slurmft.scheduler.own_jobs import SOONEST_S, begin_in
from slurmft.scheduler.parsing import JobRecord
from slurmft.system.files import read_json, remove_tree, write_json
from slurmft.system.processes import Answer, Errand, run_all, text_of

# --- Results of the probes on a shared folder: one file for each node, which only that node's probes write ---
#     <folder>/<node>.json   {"format": 1, "node": ..., "checkups": [newest last (KEEP), and the newest long one]}
#     a checkup              {"node", "at", "context", "level", "ok": [names], "results": [those that are not OK]}
#
# Written atomically; of two writers at once on one node (a prolog beside the HealthCheckProgram) one may lose its look,
# never the file. A reader leaves out invalid looks and reports them.

KEEP = 12
"""Looks of one node that its file holds."""

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_RESULTS, MAX_TEXT, MAX_LINES = 200, 2000, 50
MAX_NUMBER = 1e300
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The content of a results folder."""

    checkups: Mapping[str, list[Checkup]]
    """Node -> its looks, oldest first."""

    problems: tuple[str, ...] = ()
    """Files that could not be read, one line each."""


def write_result(folder: Path, node: str, result: Checkup) -> Path:
    """Add one look to the node's file; returns the file. The folder is made where it is missing.

    Raises:
        StorageUnavailable: there is no room, or the folder cannot be written.
        StorageError: this is not the name of a node.
    """
    path = _path(folder, node)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        before = _stored(path, node) if path.exists() else []
    except OSError as error:
        raise StorageUnavailable(f"cannot keep results in {folder}: {error.strerror or error}") from error
    except StorageError:
        before = []  # damaged or newer: this look is worth more than an unreadable file
    looks = sorted([*before, result], key=lambda each: each.at)
    long = [look for look in looks[:-KEEP] if look.level > 1][-1:]  # rare, and said to be due without it
    kept = looks[-KEEP:] if any(look.level > 1 for look in looks[-KEEP:]) else [*long, *looks[-KEEP:]]
    try:
        write_json(path, {"node": node, "checkups": [brief_json(each) for each in kept]}, mode=0o644, durable=False)
    except OSError as error:
        raise StorageUnavailable(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read_results(folder: Path) -> Results:
    """Every node's looks; a folder that is not there holds none.

    Only files of root, of this user, or of the folder's own owner are believed: a drain may follow from them.

    Raises:
        StorageUnavailable: the folder cannot be listed.
    """
    checkups: dict[str, list[Checkup]] = {}
    problems = []
    try:
        trusted = {0, os.geteuid(), folder.stat().st_uid}
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    except FileNotFoundError:
        return Results(checkups={})
    except OSError as error:
        raise StorageUnavailable(f"cannot list {folder}: {error.strerror or error}") from error
    for name in names:
        node = name.removesuffix(".json")
        if name.startswith("."):
            continue  # a writer's temporary file
        try:
            path = _path(folder, node)
            if (owner := path.lstat().st_uid) not in trusted:
                raise StorageError(f"{path} belongs to user {owner}: not believed")
            checkups[node] = _stored(path, node)
        except (StorageError, OSError) as error:
            problems.append(" ".join(str(error).split()))
    return Results(checkups=checkups, problems=tuple(problems))


def checkup_json(checkup: Checkup) -> dict[str, Any]:
    """A look as plain values; ``checkup_of`` reads it back."""
    results = [result_json(result) for result in checkup.results]
    return {"node": checkup.node, "at": checkup.at, "results": results, "context": checkup.context,
            "level": checkup.level}  # fmt: skip


def brief_json(checkup: Checkup) -> dict[str, Any]:
    """For the shared folder: only the names of OK results, since a sweep reads the files of ten thousand nodes."""
    value = checkup_json(checkup)
    value["ok"] = [result.name for result in checkup.results if result.status is Status.OK]
    value["results"] = [each for each in value["results"] if each["status"] != Status.OK.name]
    return value


def result_json(result: ProbeResult) -> dict[str, Any]:
    """A result as plain values; ``result_of`` reads it back."""
    return {**asdict(result), "status": result.status.name, "evidence": list(result.evidence)}


def checkup_of(value: Any) -> Checkup:
    """A look from plain values.

    Raises:
        ValueError: it is invalid; says why.
    """
    if not isinstance(value, dict):
        raise ValueError("a look is not an object")
    node, at, results = value.get("node"), value.get("at"), value.get("results")
    if not isinstance(node, str) or not _is_node(node):
        raise ValueError(f"{str(node)[:40]!r} is not the name of a node")
    if not is_number(at):
        raise ValueError(f"at={str(at)[:40]} is not a time")
    if not isinstance(results, list) or len(results) > MAX_RESULTS:
        raise ValueError("its results are not a list, or too many")
    level, context, fine = value.get("level", 1), value.get("context", ""), value.get("ok", [])
    try:
        passed = _passed(tuple(fine)) if isinstance(fine, list) else None
    except TypeError:  # a list in it
        passed = None
    if passed is None:
        raise ValueError("the OK results are not a list of names, or too many")
    return Checkup(node=node, at=float(at), results=(*map(result_of, results), *passed),
                   context=str(context)[:40], level=level if type(level) is int else 1)  # fmt: skip


@functools.lru_cache(maxsize=1000)
def _passed(names: tuple[str, ...]) -> tuple[ProbeResult, ...] | None:
    """The same few lists are in the files of ten thousand nodes. None where it is not one of names."""
    if len(names) > MAX_RESULTS or not all(isinstance(name, str) for name in names):
        return None
    return tuple(ProbeResult(name=_text(name), status=Status.OK, detail="") for name in names)


def result_of(value: Any) -> ProbeResult:
    """One probe's result from plain values.

    Raises:
        ValueError: it is invalid; says why.
    """
    if not isinstance(value, dict):
        raise ValueError("a result is not an object")
    name, status, problem = value.get("name"), value.get("status"), value.get("problem", Problem.NODE.value)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a result has no name")
    if not isinstance(status, str) or status not in Status.__members__:
        raise ValueError(f"{name[:40]!r} has no status")
    lines = value.get("evidence", [])
    return ProbeResult(
        name=_text(name), status=Status[status], detail=_text(value.get("detail", "")),
        value=_number(value.get("value")), unit=_text(value.get("unit", "")),
        evidence=tuple(_text(line) for line in lines[:MAX_LINES]) if isinstance(lines, list) else (),
        remedy=_text(value.get("remedy", "")),
        problem=Problem(problem) if problem in tuple(Problem) else Problem.NODE,
        took_s=_number(value.get("took_s")) or 0.0,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _is_node(name: str) -> bool:
    return _NODE.fullmatch(name) is not None


def _path(folder: Path, node: str) -> Path:
    if not _is_node(node):
        raise StorageError(f"{node[:80]!r} is not the name of a node")
    return folder / f"{node}.json"


def _stored(path: Path, node: str) -> list[Checkup]:
    value = read_json(path, limit_bytes=MAX_FILE_BYTES) or {}
    found = value.get("checkups")
    if not isinstance(found, list):
        raise StorageError(f"{path} holds no checkups")
    try:
        looks = [checkup_of(each) for each in found[-KEEP - 1 :]]
    except ValueError as error:
        raise StorageError(f"{path}: {error}") from error
    if strangers := {look.node for look in looks} - {node}:
        raise StorageError(f"{path} holds looks at {min(strangers)[:80]}")
    return looks


def _text(value: Any) -> str:
    return " ".join(str(value).split())[:MAX_TEXT]


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a finite number that a float can hold, and not a truth value."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER


# --- Runs all probes of this node, and keeps the results ---

CONFIG_VARIABLE = "SLURMFT_HEALTH_CONFIG"
SYSTEM_CONFIG = Path("/etc/slurmft/health.yaml")
CONTEXTS = ("manual", "prolog", "epilog", "healthcheck", "cron")
WRITE_S = 2.0
"""Seconds that writing the result to a folder may take, which may hang."""

CHECK_S = (20.0, 600.0)
"""Seconds that a program waits for its answer: of level 1, and of level 2."""

MAX_CHECK_S = 86_400
_TOLD = ("healthy", "status", "checks", "timestamp")


def load_config(path: Path | None, environment: Mapping[str, str]) -> HealthConfig:
    """The named configuration, else ``$SLURMFT_HEALTH_CONFIG``, else /etc/slurmft/health.yaml, else the defaults.

    Raises:
        ConfigError: it cannot be used; for root, also where another user decides which programs it runs.
    """
    named = path or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    if named is None:
        if not SYSTEM_CONFIG.exists():
            return HealthConfig()
        named = SYSTEM_CONFIG
    found = configuration.load_section(named, HealthConfig)
    if found.user_probes and os.geteuid() == 0:
        _refuse_another_users(named)
    return found


def _refuse_another_users(path: Path) -> None:
    status = path.stat()
    if status.st_uid != 0 or status.st_mode & 0o022:
        raise ConfigError(f"{path} names programs (user_probes), and users other than root may write to it",
                          hint=f"chown root {path} && chmod go-w {path}")  # fmt: skip


def node_name(environment: Mapping[str, str]) -> str:
    """This node as Slurm calls it, where it says so; else the first part of the host's name."""
    return environment.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def look(scene: Scene, *, only: Collection[str] = ()) -> Checkup:
    """Run the probes and return their results, worst first. For programs with a single thread.

    Raises:
        UsageError: ``only`` names a probe that does not exist.
    """
    known = known_names(scene)
    for name in only:
        if name not in known:
            raise UsageError(
                f"there is no probe {name[:80]!r}{plain.did_you_mean(name, known)}", hint=f"probes: {', '.join(known)}"
            )
    chosen = [probe for probe in probes_for(scene) if not only or set(probe.names) & set(only)]
    errands = [
        Errand(name=str(number), limit_s=probe.limit(scene), task=lambda probe=probe: _plain(probe, scene))  # type: ignore[misc]
        for number, probe in enumerate(chosen)
    ]
    found = [
        result
        for probe, answer in zip(chosen, run_all(errands), strict=True)
        for result in results_of(probe, answer, late_is_bad=math.isfinite(probe.late_after_s(scene)))
        if (not only or result.name in only) and result.name not in scene.config.disabled
    ]
    return Checkup(node=scene.node, at=scene.now, results=tuple(found), context=scene.context, level=scene.level)


def results_of(probe: Probe, answer: Answer, *, late_is_bad: bool = False) -> list[ProbeResult]:
    """The results of a probe; UNKNOWN where it crashed, was too late (or CRITICAL), or returned something else."""
    if not answer.error:
        try:
            return [replace(result_of(value), took_s=answer.took_s) for value in answer.value]
        except (TypeError, ValueError) as error:
            answer = Answer(name=answer.name, error=f"its answer cannot be read: {error}", took_s=answer.took_s)
    reason = answer.error if answer.timed_out else f"the probe failed: {answer.error}"
    if answer.timed_out and late_is_bad:
        return [bad(probe.names[0], Status.CRITICAL, f"what it asks hangs: {reason}", problem=Problem.HARDWARE,
                    remedy="look at dmesg; boot the node")]  # fmt: skip
    # one probe of several names fails once
    return [ProbeResult(name=probe.names[0], status=Status.UNKNOWN, detail=reason, took_s=answer.took_s)]


def _plain(probe: Probe, scene: Scene) -> list[dict[str, Any]]:
    found = probe.look(scene)
    results: Sequence[ProbeResult] = [found] if isinstance(found, ProbeResult) else found or []
    return [result_json(result) for result in results]


def keep(checkup: Checkup, config: HealthConfig, *, share: bool = True) -> tuple[Checkup, list[str]]:
    """Write the evidence on the node, and the look itself to the shared folder where there is one.

    Neither can hang us or end us: errors are returned in words. The returned look names the file that holds its
    evidence.
    """
    folder = evidence_folder(config)
    path = folder / f"{checkup.node}.evidence.json"
    pointed = replace(checkup, results=tuple(
        replace(result, evidence=(str(path),)) if result.evidence else result for result in checkup.results
    ))  # fmt: skip
    errands = [Errand(name="evidence", limit_s=WRITE_S, task=lambda: _write_evidence(path, checkup))]
    if share and config.results_folder is not None:
        target = config.results_folder
        errands.append(Errand(name="results", limit_s=WRITE_S, task=lambda: _share(target, pointed)))
    answers = run_all(errands)
    problems = [f"{each.name} not kept: {each.error or each.value}" for each in answers if each.error or each.value]
    return pointed if not answers[0].error and not answers[0].value else checkup, problems


def _write_evidence(path: Path, checkup: Checkup) -> str:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_json(path, checkup_json(checkup), mode=0o644, durable=False)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _share(folder: Path, checkup: Checkup) -> str:
    try:
        write_result(folder, checkup.node, checkup)
    except StorageError as error:
        return error.what
    return ""


class HealthChecker:
    """The probes of this node, for use inside of programs.

    They run in a process of their own, so threads, GPUs and signals of the calling program are left alone.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(self, config: Path | None = None, *, level: int = 1, only: Sequence[str] = ()) -> None:
        self._config, self._level, self._only = config, level, tuple(only)
        load_config(config, os.environ)

    def check_health(self, timeout_s: float | None = None) -> dict[str, Any]:
        """``{"healthy": bool, "status": "OK", "checks": [...], "timestamp": ...}``.

        status is the gravest of all checks: CRITICAL, WARNING, UNKNOWN or OK. healthy means that at least one probe
        could look, and that no check is CRITICAL. Where no probe could, status is UNKNOWN and healthy is False: the
        node is neither healthy nor sick, and only CRITICAL is a reason to take it out. Each check has name, status,
        detail, value, unit, evidence, remedy. Never raises because of the node's state: when the probes cannot run at
        all, the only check is UNKNOWN, with the reason.

        Args:
            timeout_s: seconds to wait for the probes; by their level when it is not given.

        Raises:
            UsageError: ``timeout_s`` is not a positive number of seconds, or more than a day.
        """
        limit_s = timeout_s if timeout_s is not None else CHECK_S[self._level > 1]
        if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not 0 < limit_s <= MAX_CHECK_S:
            raise UsageError(f"timeout_s is {limit_s!r:.40}; it is a positive number of seconds, at most {MAX_CHECK_S}")
        argv = [sys.executable, "-P", "-m", "slurmft", "health", "--json", "--level", str(self._level)]
        argv += ["--config", str(self._config)] if self._config is not None else []
        argv += [word for name in self._only for word in ("--only", name)]
        found: Any = None
        reason = ""
        try:
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=limit_s,
                                  check=False, stdin=subprocess.DEVNULL)  # fmt: skip
            reason = " ".join(done.stderr.split())[-300:]
            with contextlib.suppress(ValueError):
                found = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            reason = f"no answer within {limit_s:.0f} s"
        except OSError as error:
            reason = error.strerror or str(error)
        if not isinstance(found, dict) or not set(_TOLD) <= set(found):
            nothing = ProbeResult(name="probes", status=Status.UNKNOWN, detail=reason or "no answer")
            found = told(Checkup(node="", at=time.time(), results=(nothing,)))
        return {key: found[key] for key in _TOLD}


def told(checkup: Checkup) -> dict[str, Any]:
    """A look as ``slurmft health --json`` prints it."""
    checks = [result_json(result) for result in checkup.results]
    return {
        "format": 1,
        "node": checkup.node,
        "status": checkup.status.name,
        "healthy": checkup.is_healthy,
        "checks": checks,
        "timestamp": datetime.fromtimestamp(checkup.at, UTC).isoformat(),
        "context": checkup.context,
        "level": checkup.level,
    }


def scene_here(config: HealthConfig, environment: Mapping[str, str], *, context: str, level: int) -> Scene:
    """This node, now."""
    node = node_name(environment)
    return Scene(node=node, now=time.time(), config=config.for_node(node), context=context, level=level,
                 environment=environment)  # fmt: skip


# --- cleaning ---
# The epilog's work: end the processes that a job has left on its node, and remove its shared memory. Of no other job.
#
# A process is ended when its cgroup, or else the environment that it began with, names this very job, its user is the
# job's, it began before the epilog did, and none of its ancestors is the step daemon of another job. Shared memory is
# removed as ``health.node`` proves it. Root's processes are never touched. A cleaner that was stuck for longer than its
# limit does nothing any more when it wakes up: the same job may run here again by then.

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
    return int((scene.up_s() or 0.0) * os.sysconf("SC_CLK_TCK"))  # 0: nothing began before that, so nothing is ended


# --- requeued ---
# After a requeue Slurm makes a job wait for ``cred_expire`` + 1 s, 121 by default. On the controller, as SlurmUser,
# that wait can be cut short for the jobs of all users, as ``bin/slurmft-epilog-slurmctld`` does.
#
# The job is COMPLETING as long as EpilogSlurmctld runs, so the follower is a process that outlives it.

SLURMS_WAIT_S = 130.0
"""A begin time that is further away was requested."""

FOLLOW_S = 180.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0


def follow_in_background(job: str) -> None:
    """Start the follower in a session of its own: slurmctld ends the group of the script that started it."""
    argv = [sys.executable, "-P", "-m", "slurmft", "hooks", "run", "follow-requeue", job]
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     start_new_session=True, close_fds=True)  # fmt: skip


def follow(
    job: str,
    *,
    look: Callable[[str], JobRecord | None] = slurm.job,
    begin: Callable[[OwnJob, int], None] = begin_in,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the job is in the queue again, and let it begin at once; False where it was not requeued, was put off
    on purpose, is held, or does not come within three minutes.

    Raises:
        SlurmError: Slurm refused or did not answer; the job begins after Slurm's own wait.
    """
    deadline, pause = now() + FOLLOW_S, FIRST_PAUSE_S
    while now() < deadline:
        record = look(job)
        if record is None:
            return False
        if waits_for_slurm(record, now()):
            begin(OwnJob(job, record.identity), SOONEST_S)
            return True
        # right after COMPLETING it is PENDING for a moment for no reason
        if record.state != "COMPLETING" and (record.state, record.reason) != ("PENDING", "None"):
            return False
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return False


def waits_for_slurm(record: JobRecord, now: float) -> bool:
    """Whether it waits only for the time after a requeue, and for longer than it must."""
    if record.state != "PENDING" or record.reason != "BeginTime" or record.start is None:
        return False
    return SOONEST_S + 1 < record.start - now <= SLURMS_WAIT_S


def follow_quietly(job: str) -> str:
    """``follow``, with its result in words."""
    try:
        return f"job {job} may begin now" if follow(job) else f"job {job} is left alone"
    except SlurmError as error:
        return f"job {job} begins after Slurm's own wait: {error.what}"


# --- The work of Slurm's hooks on a node, and the lines of slurm.conf that call them ---

REFUSED = 40
"""Exit code of a prolog that refuses the node; not one of ours, of the shell, or of Python."""

ROOM_S = 5.0
"""What a prolog needs beside its longest probe."""

SCRIPTS = ("slurmft-healthcheck", "slurmft-prolog", "slurmft-epilog", "slurmft-epilog-slurmctld")


@dataclass(frozen=True, kw_only=True, slots=True)
class HookResult:
    """The result of a hook."""

    words: str
    exit_code: int = 0


def prolog(environment: Mapping[str, str]) -> HookResult:
    """The fast probes before a job; they refuse the node only where the configuration lets them.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    answer_s = load_config(None, environment).hooks.prolog_answer_s
    if answer_s is not None:
        sys.stdout.write(f"slurmft-hook-within {min(99, math.ceil(answer_s + ROOM_S)):02}\n")
        sys.stdout.flush()
    found, problems, refuses = _checked(environment, "prolog")
    failed = [result for result in found.results if result.status is Status.CRITICAL]
    if failed and refuses:
        reason = drain_reason(failed[0].problem, failed[0].name, failed[0].detail)
        return HookResult(words=reason, exit_code=REFUSED)
    return HookResult(words="; ".join([f"{found.node} is {found.status.name}", *problems]))


def healthcheck(environment: Mapping[str, str]) -> HookResult:
    """The fast probes, patiently, for the sweep; nothing is drained here.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    found, problems, _ = _checked(environment, "healthcheck")
    return HookResult(words="; ".join([f"{found.node} is {found.status.name}", *problems]))


def epilog(environment: Mapping[str, str]) -> HookResult:
    """Clean up after the job that has ended.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    config = load_config(None, environment)
    if not config.hooks.clean:
        return HookResult(words="hooks.clean is off")
    job, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    scene = scene_here(config, environment, context="epilog", level=1)
    return HookResult(words=str(clean(scene, job, int(uid) if uid.isdecimal() else -1)))


def epilog_slurmctld(environment: Mapping[str, str]) -> HookResult:
    """See whether the job goes back into the queue, and let it begin at once; returns before that."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return HookResult(words="there is no SLURM_JOB_ID: nothing to do")
    if environment.get("SLURM_JOB_RESTART_COUNT") == "0":  # a requeue has counted already when we are called
        return HookResult(words=f"job {job} has never been requeued")
    follow_in_background(job)
    return HookResult(words=f"following job {job}")


HOOKS: Mapping[str, Callable[[Mapping[str, str]], HookResult]] = {
    "prolog": prolog, "epilog": epilog, "healthcheck": healthcheck, "epilog-slurmctld": epilog_slurmctld,
}  # fmt: skip


def slurm_conf_lines(scripts: Path) -> str:
    """The lines for slurm.conf, with what each one does.

    Raises:
        UsageError: the scripts are not there.
    """
    missing = [name for name in SCRIPTS if not (scripts / name).is_file()]
    if missing:
        raise slurmft.errors.UsageError(
            f"there is no {scripts / missing[0]}",
            hint="pip installs the hooks beside slurmft: install it again, into an environment of its own",
        )
    return f"""\
# slurmft's hooks; each line may be left out. They end with 0 on any fault of their own, and run no Slurm command but
# the last. Settings: /etc/slurmft/health.yaml (slurmft examples health.yaml shows all of them).

# Probes every five minutes, on all nodes; results go to results_folder, where slurmft sweep reads them.
HealthCheckProgram={scripts}/slurmft-healthcheck
HealthCheckInterval=300
HealthCheckNodeState=ANY,CYCLE

# Probes before each job, under two seconds; refuses nothing unless hooks.prolog_refuses is on.
Prolog={scripts}/slurmft-prolog

# Ends what the job has left: its processes, and its shared memory.
Epilog={scripts}/slurmft-epilog
PrologEpilogTimeout=60

# On the controller, optional: requeued jobs begin at once instead of after 121 s. One squeue per job that ends, a few
# where it is requeued. A slurmctld that had no EpilogSlurmctld must be restarted to take it; reconfigure is not enough.
EpilogSlurmctld={scripts}/slurmft-epilog-slurmctld
"""


def _checked(environment: Mapping[str, str], context: str) -> tuple[Checkup, list[str], bool]:
    scene = scene_here(load_config(None, environment), environment, context=context, level=1)
    found, problems = keep(look(scene), scene.config)
    return found, problems, scene.config.hooks.prolog_refuses
