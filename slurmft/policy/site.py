"""Judgements about a site: what doctor looks at, the drill of a preemption, and a cloud's notices."""

from __future__ import annotations

import calendar
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from enum import StrEnum
from typing import Any

from slurmft.policy.stop import REQUEUE_COST_S, Preempts

# --- doctor ---
# What will and will not work on a site: its configuration and one run's options in, findings with remedies out.

SILENT_NODE_S = 600.0
FORGETFUL_S = 60.0
CLOCK_WARNING_S, CLOCK_PROBLEM_S = 5.0, 300.0
"""Half a minute of jitter is allowed for already; munge refuses credentials from 300 s on."""

OWN_EXITS = (16, 17, 74, 75, 93)
DEFAULT_CRED_EXPIRE_S = 120


HOOKS: Mapping[str, tuple[str, str]] = {
    "HealthCheckProgram": ("slurmft-healthcheck", "no node is looked at before a job meets its fault"),
    "Epilog": ("slurmft-epilog", "processes that a job leaves behind hold their GPU until a person ends them"),
    "EpilogSlurmctld": (
        "slurmft-epilog-slurmctld",
        "jobs that Slurm requeues by itself wait for 121 s instead of seconds",
    ),
}
"""Key of slurm.conf -> its program, and what happens without it."""

FRESH_S = 1800.0
"""Results of a node are fresh for so long: six looks of HealthCheckInterval=300."""

LOCAL_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "zfs", "f2fs"})
"""Types of filesystems that other nodes do not see; zfs and overlay may be shared by other means, hence no problem."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """A fact to know."""

    WARNING = "warning"
    """It works, worse than it could."""

    PROBLEM = "problem"
    """Something that this run needs will not work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was checked."""

    check: str
    level: Level
    text: str
    remedy: str = ""
    """The remedy, and who can apply it; empty where none is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionFacts:
    """One partition that the run may start in."""

    name: str
    preempt_mode: str = ""
    grace_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The run's options; of a run without a configuration, the defaults."""

    partitions: tuple[str, ...] = ()
    """As asked for; empty: the cluster's default."""

    requeue: bool = True
    continue_by: str = "auto"
    requeue_delay_s: int = 2
    survives_nodes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    """Results of a real try in the run folder's filesystem."""

    path: str
    error: str = ""
    """Why nothing could be written there."""

    exclusive: bool = True
    """A file can be created by one of two only."""

    renames: bool = True
    """A file can be replaced in one step."""

    flock: str = "works"
    """works, or why it does not."""

    clock_offset_s: float = 0.0
    """The filesystem's clock less this machine's."""

    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminFacts:
    """Whether the user may drain nodes; None where that is unknown."""

    may_drain: bool | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerFacts:
    """The run's container, as this machine sees it."""

    name: str
    runtime: str
    starter: str
    """The program that starts it, or the option of srun that does."""

    has_starter: bool
    image: str = ""
    """Its path, where it is one; else empty."""

    has_image: bool = True
    missing_mounts: tuple[str, ...] = ()
    tried: str = ""
    """What the Python inside has said of itself; empty where it did not, or was not tried."""

    error: str = ""
    """Why it did not."""

    to_try: str = ""
    """The command that tries it, where that can only be done on a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustedPath:
    """A file or folder that programs of other users, or of root, rely on."""

    path: str
    exists: bool = True
    owner: str = "root"
    changeable_by: str = ""
    """Who but root and its owner may change it, or replace it through a folder above; empty: no other user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomFacts:
    """Where one run's folder and checkpoints are, and the room that is there for them."""

    folder: TrustedPath
    kind: str = ""
    """Type of the filesystem; empty where it is unknown."""

    nodes: int = 1
    free_bytes: int | None = None
    checkpoint_bytes: int = 0
    """The newest checkpoint's size; 0 where there is none yet."""

    kept: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteFacts:
    """What an administrator has set up for all runs. No run needs any of it."""

    installation: TrustedPath
    conf: Mapping[str, str] = field(default_factory=dict)
    """``scontrol show config``; empty where Slurm did not answer."""

    programs: Mapping[str, TrustedPath] = field(default_factory=dict)
    """Key of slurm.conf -> the hook's program on this machine."""

    health: TrustedPath
    health_error: str = ""
    """Why health.yaml cannot be used; empty where it can, or is not there."""

    results: TrustedPath | None = None
    """The folder of the nodes' results; None where health.yaml names none."""

    looked_at: Mapping[str, float] = field(default_factory=dict)
    """Node -> seconds since its newest look."""

    nodes: tuple[str, ...] = ()
    """Slurm's nodes that are not down, or powered off."""


def judge_container(facts: ContainerFacts) -> Iterator[Finding]:
    """Findings on the run's container."""
    check = "container"
    if not facts.has_starter:
        by_srun = facts.starter.startswith("--")
        what = f"srun has no option {facts.starter}" if by_srun else f"there is no {facts.starter} on this machine"
        remedy = {"pyxis": "an administrator: install pyxis and enroot; or use another container.runtime",
                  "oci": "Slurm 21.08 or newer with oci.conf; or use another container.runtime"}  # fmt: skip
        yield Finding(check=check, level=Level.PROBLEM, text=f"{facts.runtime}: {what}", remedy=remedy.get(
            facts.runtime, "install it on all nodes; where only they have it: srun slurmft doctor CONFIG"))  # fmt: skip
    if not facts.has_image:
        yield Finding(check=f"{check} image", level=Level.PROBLEM, text=f"there is no {facts.image}",
                      remedy="set container.image to one that every node sees")  # fmt: skip
    if facts.missing_mounts:
        yield Finding(check=f"{check} mounts", level=Level.PROBLEM, remedy="correct container.mounts, or make them",
                      text=f"not on this machine: {', '.join(facts.missing_mounts)}")  # fmt: skip
    if facts.tried:
        yield Finding(check=f"{check} python", level=Level.OK, text=f"{facts.name}: {facts.tried}")
    elif facts.error:
        yield Finding(check=f"{check} python", level=Level.PROBLEM, text=facts.error,
                      remedy="set container.python to one with slurmft and torch; or see to the image")  # fmt: skip
    elif facts.has_starter and facts.has_image:
        yield Finding(check=f"{check} python", level=Level.NOTE, text="it can be tried in a job only",
                      remedy=facts.to_try)  # fmt: skip


def judge_cluster(conf: Mapping[str, str], wishes: Wishes) -> Iterator[Finding]:
    """Findings on ``scontrol show config``; a key that is not there causes no finding."""
    for look in (
        _preemption,
        _kill_wait,
        _requeue_finding,
        _requeue_delay,
        _proctrack,
        _silent_nodes,
        _accounting,
        _exits,
        _memory_of_jobs,
        _held_launches,
        _hidden_nodes,
    ):
        found = look(conf, wishes)
        if found is not None:
            yield found


def judge_federation(name: str) -> Iterator[Finding]:
    """A finding where the cluster belongs to the federation of this name; none where it is empty."""
    if name:
        yield Finding(check="federation", level=Level.WARNING,
                      text=f"the cluster belongs to {name}: Slurm would start a job on any of its clusters, and "
                      "slurmft submit refuses that",
                      remedy="name one, which the job then keeps to: slurm: {clusters: NAME}")  # fmt: skip


def judge_partitions(
    conf: Mapping[str, str], known: Mapping[str, PartitionFacts], default: Sequence[str], wishes: Wishes
) -> Iterator[Finding]:
    """Findings on the partitions that the run may start in."""
    names = wishes.partitions or tuple(default)
    if not names:
        yield Finding(check="partition", level=Level.PROBLEM, text="no partition is asked for and none is the default",
                      remedy="set slurm.partition")  # fmt: skip
    for name in names:
        if name not in known:
            yield Finding(check=f"partition {name}", level=Level.PROBLEM, text=f"there is no partition {name}",
                          remedy=f"set slurm.partition to one of: {', '.join(sorted(known)[:20])}")  # fmt: skip
        elif not _never_preempts(conf):
            yield _of_partition(known[name], conf, wishes)


def judge_folder(facts: FolderFacts) -> Iterator[Finding]:
    """Findings on the run folder's filesystem."""
    where = facts.path
    if facts.error:
        yield Finding(check="run folder", level=Level.PROBLEM, text=f"{where} cannot be written: {facts.error}",
                      remedy="choose another run_folder, or ask for room and permission there")  # fmt: skip
        return
    if not (facts.exclusive and facts.renames):
        what = "create a file exclusively" if not facts.exclusive else "replace a file in one step"
        yield Finding(check="run folder", level=Level.PROBLEM, text=f"{where} cannot {what}",
                      remedy="choose a run_folder on a POSIX filesystem")  # fmt: skip
    elif facts.took_s > 1.0:
        yield Finding(check="run folder", level=Level.WARNING, text=f"{where}: a small file takes {facts.took_s:.1f} s",
                      remedy="stops and starts wait for it; choose a faster run_folder")  # fmt: skip
    else:
        yield Finding(check="run folder", level=Level.OK, text=f"{where} can be written, {facts.took_s * 1e3:.0f} ms")
    if facts.flock == "works":
        yield Finding(check="file locks", level=Level.OK, text="flock works there, on this machine at least")
    else:
        yield Finding(check="file locks", level=Level.NOTE, text=f"flock does not work there: {facts.flock}",
                      remedy="slurmft's own locks need none; other programs may (mount with flock)")  # fmt: skip


def judge_clocks(offsets_s: Mapping[str, float]) -> Iterator[Finding]:
    """Findings on clocks: by owner, its time less this machine's."""
    for who, offset_s in offsets_s.items():
        level = Level.PROBLEM if abs(offset_s) > CLOCK_PROBLEM_S else Level.WARNING
        if abs(offset_s) <= CLOCK_WARNING_S:
            yield Finding(check="clock", level=Level.OK, text=f"{who} and this machine agree within a few seconds")
        else:
            yield Finding(check="clock", level=level, text=f"{who} is {offset_s:+.0f} s off this machine's clock",
                          remedy="correct it (chrony): one computes deadlines and the other keeps them")  # fmt: skip


def judge_permissions(facts: AdminFacts) -> Finding:
    """Findings on the user's permissions for nodes; own jobs need none."""
    if facts.may_drain:
        return Finding(check="permissions", level=Level.OK, text=f"you may drain nodes ({facts.why})")
    unknown = "it is not known whether you may drain nodes" if facts.may_drain is None else "you may not drain nodes"
    return Finding(check="permissions", level=Level.NOTE, text=f"{unknown} ({facts.why}); you may requeue your jobs",
                   remedy="slurmft sweep prints the commands for an administrator")  # fmt: skip


def judge_site(facts: SiteFacts) -> Iterator[Finding]:
    """Findings on hooks, results, and the permissions of what root relies on; what is not set up is a note."""
    hooks = {key for key, (name, _) in HOOKS.items() if name in facts.conf.get(key, "").replace(",", "/").split("/")}
    is_open = bool(hooks and facts.installation.changeable_by)  # users may have installations of their own
    yield _trusted("installation", facts.installation, "it is what all jobs run", is_roots=is_open)
    for key, (name, without) in HOOKS.items() if facts.conf else ():
        place = facts.programs.get(key, TrustedPath(path=facts.conf.get(key, ""), exists=False))
        if key not in hooks:
            yield _missing(key, f"{name} is not in slurm.conf: {without}", "slurmft hooks show")
        elif place.exists:
            yield _trusted(key, place, "root runs it")
        else:
            yield Finding(
                check=key,
                level=Level.NOTE,
                text=f"there is no {place.path} on this machine",
                remedy="look whether all nodes have it: Slurm drains nodes whose Prolog fails",
            )
    if facts.health_error:
        yield Finding(check="health.yaml", level=Level.PROBLEM, text=facts.health_error, remedy="correct it")
    elif not facts.health.exists:
        yield _missing(
            "health.yaml",
            f"there is no {facts.health.path}: defaults hold, and results stay on the nodes",
            "slurmft examples health.yaml > /etc/slurmft/health.yaml, and set results_folder",
        )
    else:
        yield _trusted("health.yaml", facts.health, "root obeys it")
        yield _results(facts)


def judge_room(run: RoomFacts) -> Iterator[Finding]:
    """Findings on the place of one run's folder, and the room for its checkpoints."""
    check, gib = "room for checkpoints", 1 << 30
    if run.folder.changeable_by:
        yield _trusted("run folder's place", run.folder, "they can replace the run", is_roots=False)
    elif run.kind in LOCAL_KINDS and run.nodes > 1:
        yield Finding(
            check="run folder's place",
            level=Level.NOTE,
            remedy="choose a run_folder that all nodes see",
            text=f"{run.folder.path} is on {run.kind}, which other nodes usually do not see",
        )
    if run.kept < 2:
        yield Finding(
            check="kept checkpoints",
            level=Level.WARNING,
            remedy="set checkpoint.keep_last_n: 2 or more",
            text="one is kept: damage to it leaves nothing to resume from",
        )
    if run.free_bytes is None or not run.checkpoint_bytes:
        return
    # older ones are there already; the next is written before the oldest is removed
    text = f"{run.free_bytes / gib:.1f} GiB free, a checkpoint has {run.checkpoint_bytes / gib:.2f} GiB"
    if run.free_bytes < run.checkpoint_bytes:
        yield Finding(check=check, level=Level.PROBLEM, text=text, remedy="the next save fails: make room")
    elif run.free_bytes < run.checkpoint_bytes * (run.kept + 1):
        yield Finding(
            check=check,
            level=Level.WARNING,
            text=text,
            remedy=f"room for {run.kept + 1} is safe; lower checkpoint.keep_last_n or make room",
        )
    else:
        yield Finding(check=check, level=Level.OK, text=text)


def _missing(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, level=Level.NOTE, text=text, remedy=f"an administrator: {remedy} (docs/deployment.md)")


def _trusted(check: str, place: TrustedPath, why: str, *, is_roots: bool = True) -> Finding:
    """Whether others may change what is relied on; what root alone relies on must be root's own."""
    if place.changeable_by or (is_roots and place.owner != "root"):
        return Finding(
            check=check,
            level=Level.PROBLEM if is_roots else Level.WARNING,
            text=f"{place.path} can be changed by {place.changeable_by or place.owner}: {why}",
            remedy="make it, and the folders above it, root's or yours alone (chmod go-w)",
        )
    return Finding(check=check, level=Level.OK, text=f"{place.path} can be changed by {place.owner} only")


def _results(facts: SiteFacts) -> Finding:
    check, within = "node results", f"within {FRESH_S / 60:.0f} minutes"
    if facts.results is None:
        return _missing(check, "results_folder is not set: the sweep sees no results", "set it, to a shared folder")
    if facts.results.changeable_by:
        return _trusted(check, facts.results, "the sweep drains by it")
    late = sorted(node for node in facts.nodes if facts.looked_at.get(node, FRESH_S + 1) > FRESH_S)
    if late:
        names = ", ".join(late[:5]) + (", ..." if len(late) > 5 else "")
        return Finding(
            check=check,
            level=Level.WARNING,
            remedy="on one of them: slurmft health, then slurmd's log",
            text=f"{len(late)} of {len(facts.nodes)} nodes left no result {within}: {names}",
        )
    return Finding(check=check, level=Level.OK, text=f"{len(facts.nodes)} nodes, all looked at {within}")


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among them."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)


def exit_code(findings: Sequence[Finding]) -> int:
    """0: nothing to do; 1: warnings; 2: problems."""
    return {Level.WARNING: 1, Level.PROBLEM: 2}.get(worst(findings), 0)


def seconds_of(text: str) -> float | None:
    """The number in ``300 sec``; None where there is none."""
    match = re.match(r"(\d{1,15})\b", text.strip())
    return float(match[1]) if match else None


def requeue_delay_s(conf: Mapping[str, str]) -> float:
    """Seconds that a requeued job waits by itself: ``cred_expire`` and one more, or what the site has set."""
    parameters = conf.get("SchedulerParameters", "")
    if match := re.search(r"\brequeue_delay=(\d{1,9})\b", parameters):
        return float(match[1])
    match = re.search(r"\bcred_expire=(\d{1,9})\b", conf.get("AuthInfo", ""))
    return float(match[1] if match else DEFAULT_CRED_EXPIRE_S) + 1


def _never_preempts(conf: Mapping[str, str]) -> bool:
    return conf.get("PreemptType", "").endswith("none")


def _preemption(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    kind = conf.get("PreemptType", "")
    if not kind:
        return None
    if _never_preempts(conf):
        return Finding(
            check="preemption", level=Level.OK, text="no job is preempted on this cluster (PreemptType none)"
        )
    return Finding(check="preemption", level=Level.OK, text=f"{kind}, PreemptMode {conf.get('PreemptMode', 'unknown')}")


def _of_partition(partition: PartitionFacts, conf: Mapping[str, str], wishes: Wishes) -> Finding:
    words = set((partition.preempt_mode or conf.get("PreemptMode", "")).upper().split(","))
    check = f"partition {partition.name}"
    if "CANCEL" in words:
        stuck = wishes.continue_by == "requeue"
        then = (
            "and the run ends there, since preemption.continue_by is requeue" if stuck else "so a successor is queued"
        )
        return Finding(
            check=check, level=Level.PROBLEM if stuck else Level.WARNING,
            text=f"PreemptMode=CANCEL: a preempted job is never requeued, even with --requeue, {then}",
            remedy="set preemption.continue_by to auto" if stuck else
            f"an administrator: scontrol update PartitionName={partition.name} PreemptMode=REQUEUE",
        )  # fmt: skip
    if "REQUEUE" not in words:
        what = "suspended" if "SUSPEND" in words else "not preempted"
        return Finding(check=check, level=Level.OK, text=f"its jobs are {what} (PreemptMode {','.join(sorted(words))})")
    if conf.get("PreemptType", "").endswith("qos"):
        return Finding(check=check, level=Level.NOTE, text="the grace of a preemption is that of the job's QOS",
                       remedy="sacctmgr show qos format=Name,GraceTime,PreemptMode")  # fmt: skip
    if partition.grace_s is None:
        return Finding(check=check, level=Level.NOTE, text="its GraceTime is not known")
    if partition.grace_s <= REQUEUE_COST_S:
        return Finding(
            check=check, level=Level.WARNING,
            text=f"GraceTime={partition.grace_s:.0f}: a preempted job has KillWait alone "
            f"({conf.get('KillWait', 'unknown')}) to save",
            remedy=f"an administrator: GraceTime=120 for {partition.name}; or save often (checkpoint.interval_steps)",
        )  # fmt: skip
    return Finding(check=check, level=Level.OK, text=f"requeues with a grace of {partition.grace_s:.0f} s")


def _kill_wait(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    kill_wait_s = seconds_of(conf.get("KillWait", ""))
    if kill_wait_s is None:
        return None
    if kill_wait_s <= REQUEUE_COST_S:
        return Finding(
            check="KillWait", level=Level.WARNING,
            text=f"{kill_wait_s:.0f} s between TERM and KILL: a manual requeue or scancel leaves no time for a save",
            remedy="an administrator: KillWait=30 or more; use slurmft requeue and slurmft stop, which save first",
        )  # fmt: skip
    return Finding(check="KillWait", level=Level.OK, text=f"{kill_wait_s:.0f} s between TERM and KILL")


def _requeue_finding(conf: Mapping[str, str], wishes: Wishes) -> Finding | None:
    if not wishes.requeue:
        return Finding(check="requeue", level=Level.WARNING, text="slurm.requeue is false: a successor is queued",
                       remedy="leave slurm.requeue true")  # fmt: skip
    match conf.get("JobRequeue"):
        case None:
            return None
        case "0":
            return Finding(check="requeue", level=Level.NOTE,
                           text="JobRequeue=0: only jobs that ask for it are requeued; those of slurmft submit do",
                           remedy="own batch scripts need #SBATCH --requeue")  # fmt: skip
    return Finding(check="requeue", level=Level.OK, text="jobs may be requeued (JobRequeue=1)")


def _requeue_delay(conf: Mapping[str, str], wishes: Wishes) -> Finding | None:
    if not conf:
        return None
    delay_s, own_s = requeue_delay_s(conf), wishes.requeue_delay_s
    text = f"Slurm's own delay of a requeue is {delay_s:.0f} s; slurmft's begin time spares it (about {own_s} s)"
    return Finding(check="requeue delay", level=Level.OK if delay_s <= 10 else Level.NOTE, text=text)


def _proctrack(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    kind = conf.get("ProctrackType", "").rpartition("/")[2]
    if not kind:
        return None
    if kind == "pgid":
        return Finding(check="proctrack", level=Level.WARNING,
                       text="pgid: processes that leave their group outlive the job, and hold GPUs and memory",
                       remedy="an administrator: ProctrackType=proctrack/cgroup")  # fmt: skip
    who = "the agent only, which passes it on" if kind == "cgroup" else "every process, data-loader workers too"
    return Finding(check="proctrack", level=Level.OK, text=f"{kind}: a signal to the step reaches {who}")


def _silent_nodes(conf: Mapping[str, str], wishes: Wishes) -> Finding | None:
    timeout_s = seconds_of(conf.get("SlurmdTimeout", ""))
    if timeout_s is None:
        return None
    if timeout_s == 0 or timeout_s > SILENT_NODE_S:
        what = "never" if timeout_s == 0 else f"only after {timeout_s:.0f} s"
        return Finding(check="SlurmdTimeout", level=Level.WARNING,
                       text=f"Slurm notices a dead node {what}; until then its jobs seem to run",
                       remedy="an administrator: SlurmdTimeout=300; or spare_nodes, slurm.no_kill")  # fmt: skip
    faster = " (slurmft itself needs seconds)" if wishes.survives_nodes else ""
    return Finding(check="SlurmdTimeout", level=Level.OK,
                   text=f"Slurm notices a dead node after {timeout_s:.0f} s{faster}")  # fmt: skip


def has_accounting(conf: Mapping[str, str]) -> bool:
    """Whether the cluster has accounting, according to its configuration."""
    return conf.get("AccountingStorageType", "") not in ("accounting_storage/none", "(null)", "")


def _accounting(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    kind = conf.get("AccountingStorageType")
    if kind is None:
        return None
    if not has_accounting(conf):
        return Finding(check="accounting", level=Level.WARNING,
                       text="none: once Slurm has forgotten a job, a cancelled one and a lost one look the same",
                       remedy="slurmft status before slurmft requeue --rescue; or set up slurmdbd")  # fmt: skip
    return Finding(check="accounting", level=Level.OK, text=kind)


def _exits(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    if taken := sorted(_codes(conf.get("RequeueExitHold", "")) & set(OWN_EXITS)):
        return Finding(check="exit codes", level=Level.PROBLEM,
                       text=f"RequeueExitHold holds jobs that end with {', '.join(map(str, taken))}, which are ours",
                       remedy="an administrator: take them out; until then: scontrol release JOB")  # fmt: skip
    if taken := sorted(_codes(conf.get("RequeueExit", "")) & set(OWN_EXITS)):
        return Finding(check="exit codes", level=Level.WARNING,
                       text=f"RequeueExit requeues jobs that end with {', '.join(map(str, taken))}: twice, and nothing "
                       "can be excluded before", remedy="an administrator: take them out")  # fmt: skip
    return None


def _memory_of_jobs(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    age_s = seconds_of(conf.get("MinJobAge", ""))
    if age_s is None or age_s >= FORGETFUL_S:
        return None
    return Finding(check="MinJobAge", level=Level.NOTE,
                   text=f"Slurm forgets a job {age_s:.0f} s after its end; a rescue then submits a new one",
                   remedy="an administrator: MinJobAge=300")  # fmt: skip


def _held_launches(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    prologs = [value for key, value in conf.items() if key.partition("[")[0] == "Prolog"]
    if not any(value not in ("(null)", "") for value in prologs):
        return None
    if "nohold_on_prolog_fail" in conf.get("SchedulerParameters", ""):
        return Finding(check="Prolog", level=Level.OK, text="a job whose Prolog fails begins on other nodes")
    return Finding(check="Prolog", level=Level.NOTE,
                   text="a job whose Prolog fails on one node is held until it is released by hand",
                   remedy="slurmft requeue --rescue, or sweep, from cron: it releases the job, away from that node; or "
                   "an administrator: SchedulerParameters=nohold_on_prolog_fail")  # fmt: skip


def _hidden_nodes(conf: Mapping[str, str], _: Wishes) -> Finding | None:
    if "nodes" not in conf.get("PrivateData", "").split(","):
        return None
    return Finding(check="PrivateData", level=Level.NOTE,
                   text="users do not see the states of nodes: one that is down counts as one that could be used, and "
                   "slurmft sweep needs an administrator")  # fmt: skip


def _codes(text: str) -> set[int]:
    """Of ``16,90-93``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d{1,3})(?:-(\d{1,3}))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


# --- The result of a preemption drill: facts in, a row for each expected event out ---

SLURMS_DELAY_S = 100.0
"""A requeued job that waited longer has fallen back to Slurm's own delay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillFacts:
    """One drill, from the journal of its run and the site; None where something did not happen or is unknown."""

    how: str
    """The signal, in words."""

    partition: str = ""
    preempts: Preempts = Preempts.UNKNOWN
    preempt_mode: str = ""
    grace_s: float | None = None
    kill_wait_s: float | None = None
    stop_reason: str | None = None
    """Where the signal was received first."""

    stop_cause: str = ""
    world_size: int = 0
    marked: int = 0
    """Ranks that SIGTERM reached."""

    saved_step: int | None = None
    save_s: float | None = None
    """From the signal to the commit."""

    requeued: bool = False
    resubmitted: bool = False
    why_not: str = ""
    waited_s: float | None = None
    """From the end of the one start to the next."""

    resumed_from: int | None = None
    workload_needs_s: float | None = None
    """Duration of a stop of the user's own workload, from earlier runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    passed: bool | None
    """None: there is no criterion."""

    text: str


def rows(facts: DrillFacts) -> list[Row]:
    """The table, in the order in which things happen."""
    return [_signalled(facts), _ranks(facts), _saved(facts), _grace(facts), _workload(facts), _requeue_row(facts),
            _waited(facts), _resumed(facts)]  # fmt: skip


def passed(table: list[Row]) -> bool:
    """Whether nothing in it failed."""
    return all(row.passed is not False for row in table)


def _signalled(facts: DrillFacts) -> Row:
    if facts.stop_reason is None:
        return Row(what="signal", passed=False, text=f"{facts.how}: no process of the run received it")
    return Row(what="signal", passed=True, text=f"{facts.how}: {facts.stop_reason}, taken for: {facts.stop_cause}")


def _ranks(facts: DrillFacts) -> Row:
    text = f"the agents, and {facts.marked} of {facts.world_size} ranks"
    return Row(what="who got it", passed=facts.stop_reason is not None, text=text)


def _saved(facts: DrillFacts) -> Row:
    if facts.saved_step is not None and facts.save_s is None:
        return Row(what="save", passed=True, text=f"step {facts.saved_step}; its duration was not reported")
    if facts.saved_step is None or facts.save_s is None:
        return Row(what="save", passed=False, text="no checkpoint was committed after the signal")
    return Row(what="save", passed=True, text=f"step {facts.saved_step}, {facts.save_s:.1f} s after the signal")


def _grace(facts: DrillFacts) -> Row:
    what, where = "grace", f"partition {facts.partition}" if facts.partition else "the partition"
    if facts.preempts is Preempts.NEVER:
        return Row(what=what, passed=None, text=f"jobs of {where} are not ended by preemption")
    if facts.preempts is Preempts.BY_QOS:
        return Row(what=what, passed=None, text="that of the job's QOS: sacctmgr show qos format=Name,GraceTime")
    if facts.grace_s is None:
        return Row(what=what, passed=None, text=f"the GraceTime of {where} is not known")
    needed_s = (facts.save_s or 0.0) + REQUEUE_COST_S
    if facts.grace_s == 0:
        kill_wait = "KillWait" if facts.kill_wait_s is None else f"KillWait, {facts.kill_wait_s:.0f} s"
        text = f"GraceTime=0 for {where}: a preempted job is ended at once, its save has {kill_wait}"
        return Row(what=what, passed=False, text=text)
    text = f"{facts.grace_s:.0f} s for {where}; this small job needs {needed_s:.1f} s with its requeue"
    return Row(what=what, passed=needed_s <= facts.grace_s, text=text)


def _workload(facts: DrillFacts) -> Row:
    what = "your workload"
    if facts.workload_needs_s is None:
        return Row(what=what, passed=None, text="its stops are not known until a run of it has saved")
    text = f"a stop took {facts.workload_needs_s:.1f} s in earlier runs"
    if facts.grace_s is None or facts.preempts is not Preempts.BY_PARTITION:
        return Row(what=what, passed=None, text=text)
    return Row(
        what=what, passed=facts.workload_needs_s <= facts.grace_s, text=f"{text}, of {facts.grace_s:.0f} s grace"
    )


def _requeue_row(facts: DrillFacts) -> Row:
    what = "requeue"
    if "CANCEL" in facts.preempt_mode.upper().split(","):
        then = "a successor was queued" if facts.resubmitted else "slurmft queues a successor where continue_by lets it"
        text = f"PreemptMode=CANCEL for partition {facts.partition}: Slurm cancels what it preempts; {then}"
        return Row(what=what, passed=False, text=text)
    if facts.requeued:
        return Row(what=what, passed=True, text="the job was requeued")
    if facts.resubmitted:
        return Row(
            what=what, passed=False, text=f"refused ({facts.why_not or 'no reason given'}); a successor was queued"
        )
    return Row(what=what, passed=False, text=facts.why_not or "the job did not go through the queue again")


def _waited(facts: DrillFacts) -> Row:
    if facts.waited_s is None:
        return Row(what="ineligible", passed=False, text="it did not start again while the drill waited")
    slow = facts.waited_s > SLURMS_DELAY_S
    more = "; Slurm's own delay: raise preemption.requeue_delay_s" if slow else ""
    return Row(what="ineligible", passed=not slow, text=f"{facts.waited_s:.1f} s from requeue to start{more}")


def _resumed(facts: DrillFacts) -> Row:
    if facts.resumed_from is None:
        return Row(what="resumed", passed=False, text="no step was done after it")
    if facts.resumed_from == facts.saved_step:
        return Row(what="resumed", passed=True, text=f"from step {facts.resumed_from}, the one that was saved")
    return Row(what="resumed", passed=False, text=f"from step {facts.resumed_from}, and not from {facts.saved_step}")


# --- A cloud's notices that it will take a machine away: its answers in, notices out; and which cloud this is ---

AWS_LEAD_S = 120.0
GCP_LEAD_S = 30.0
GCP_MAINTENANCE_LEAD_S = 60.0
AZURE_PREEMPT_LEAD_S = 30.0
AZURE_LEAD_S = 300.0
"""The clouds' documented time between a notice and the end, where the notice itself does not say."""

PLUGIN_LEAD_S = 120.0
LEAST_S = 5.0
"""A deadline that has passed already may also be a clock that is ahead: there is so much time at least."""

MOST_S = 86_400.0
MAX_TEXT = 200


class Cloud(StrEnum):
    """The owner of the machine."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One announcement."""

    source: str
    """The cloud, ``plugin``, or ``gpu``."""

    what: str
    """One line for people."""

    ends: bool
    """The machine goes away or is restarted. False: it may, so it is under suspicion and no more."""

    left_s: float = 0.0
    """Seconds from now until then, where ``ends``."""

    fault: bool = False
    """Hardware of this machine has failed. It ``ends`` where nothing can be computed there any more."""

    key: str = ""
    """The same for the same announcement, however often it is made."""


AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
AWS_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
AWS_OFF_VARIABLE = "AWS_EC2_METADATA_DISABLED"
GCP_VARIABLE = "GCE_METADATA_HOST"
AZURE_VARIABLE = "SLURMFT_AZURE_METADATA_ENDPOINT"
LINK_LOCAL = "http://169.254.169.254"


def endpoints(facts: Mapping[str, str], environment: Mapping[str, str]) -> dict[Cloud, str]:
    """Where to ask for notices, by cloud; nothing where no sign of a cloud is seen.

    Args:
        facts: the firmware's values, by the names of the files in ``/sys/class/dmi/id``.
        environment: the clouds' own variables, for private setups: AWS_EC2_METADATA_SERVICE_ENDPOINT (or
            AWS_EC2_METADATA_DISABLED), GCE_METADATA_HOST; and SLURMFT_AZURE_METADATA_ENDPOINT.
    """
    found: dict[Cloud, str] = {}
    vendor = facts.get("sys_vendor", "").strip().lower()
    if vendor.startswith("amazon") or "amazon" in facts.get("bios_version", "").lower():
        found[Cloud.AWS] = LINK_LOCAL
    elif vendor == "google" or facts.get("product_name", "").strip() == "Google Compute Engine":
        found[Cloud.GCP] = LINK_LOCAL
    elif vendor == "microsoft corporation" and facts.get("chassis_asset_tag", "").strip() == AZURE_CHASSIS:
        found[Cloud.AZURE] = LINK_LOCAL  # without the tag it is a private Hyper-V
    if given := environment.get(AWS_VARIABLE):
        found[Cloud.AWS] = given
    if given := environment.get(GCP_VARIABLE):
        found[Cloud.GCP] = f"http://{given}"
    if given := environment.get(AZURE_VARIABLE):
        found[Cloud.AZURE] = given
    if environment.get(AWS_OFF_VARIABLE, "").strip().lower() == "true":
        found.pop(Cloud.AWS, None)
    return found


def aws_action(text: str, now: float) -> Notice | None:
    """The notice in an answer of ``spot/instance-action``; None where there is none in it."""
    facts = _object(text)
    action = facts.get("action")
    if action not in ("terminate", "stop", "hibernate"):
        return None
    at = _iso(facts.get("time"))
    left_s = AWS_LEAD_S if at is None else min(AWS_LEAD_S, at - now)  # never announced earlier
    return Notice(
        source=Cloud.AWS, what=f"AWS will {action} this spot instance", ends=True, left_s=_bounded(left_s),
        key=f"aws|{action}|{_short(facts.get('time'))}",
    )  # fmt: skip


def aws_rebalance(text: str) -> Notice | None:
    """The notice in an answer of ``events/recommendations/rebalance``: a higher risk, which may come to nothing."""
    facts = _object(text)
    if _iso(facts.get("noticeTime")) is None:
        return None
    what = "AWS recommends to leave this spot instance (rebalance recommendation)"
    return Notice(source=Cloud.AWS, what=what, ends=False, key=f"aws|rebalance|{_short(facts['noticeTime'])}")


def gcp_preempted(text: str) -> Notice | None:
    """The notice in an answer of ``instance/preempted``."""
    if text.strip().upper() != "TRUE":
        return None
    return Notice(source=Cloud.GCP, what="Google preempts this VM", ends=True, left_s=GCP_LEAD_S, key="gcp|preempted")


def gcp_maintenance(text: str) -> Notice | None:
    """The notice in an answer of ``instance/maintenance-event``: a migration is a short pause."""
    match text.strip().upper():
        case "TERMINATE_ON_HOST_MAINTENANCE":
            what = "Google will stop this VM for maintenance of its host"
            left_s = GCP_MAINTENANCE_LEAD_S
            return Notice(source=Cloud.GCP, what=what, ends=True, left_s=left_s, key="gcp|maintenance|terminate")
        case "MIGRATE_ON_HOST_MAINTENANCE":
            what = "Google migrates this VM to another host"
            return Notice(source=Cloud.GCP, what=what, ends=False, key="gcp|maintenance|migrate")
    return None


_AZURE_ENDS = {"preempt": "evicts", "terminate": "deletes", "reboot": "restarts", "redeploy": "moves and restarts"}


def azure_incarnation(text: str) -> int | None:
    """The number of this version of the document of scheduled events; None where it is not such a document."""
    number = _object(text).get("DocumentIncarnation")
    return number if type(number) is int else None


def azure_events(text: str, names: Sequence[str], now: float) -> list[Notice]:
    """The notices in the document of scheduled events that are about one of ``names``; others are about neighbours."""
    events = _object(text).get("Events")
    mine = {name.lower() for name in names if name}
    found = [_azure_event(event, mine, now) for event in _list(events) if isinstance(event, dict)]
    return [notice for notice in found if notice is not None]


def _azure_event(event: Mapping[str, Any], mine: set[str], now: float) -> Notice | None:
    resources = event.get("Resources")
    if not mine & {name.lower() for name in _list(resources) if isinstance(name, str)}:
        return None
    kind = str(event.get("EventType", "")).lower()
    key = f"azure|{kind}|{_short(event.get('EventId'))}"
    if kind == "freeze":  # its memory is kept; the others of the run wait for it
        return Notice(source=Cloud.AZURE, what="Azure will freeze this VM for seconds", ends=False, key=key)
    if kind not in _AZURE_ENDS or str(event.get("EventStatus", "")).lower() in ("completed", "canceled", "cancelled"):
        return None
    lead_s = AZURE_PREEMPT_LEAD_S if kind == "preempt" else AZURE_LEAD_S
    at = _http_date(event.get("NotBefore"))  # empty once it has begun
    left_s = _bounded(lead_s if at is None else at - now)
    return Notice(source=Cloud.AZURE, what=f"Azure {_AZURE_ENDS[kind]} this VM", ends=True, left_s=left_s, key=key)


def from_plugin(line: str, source: str = "plugin") -> Notice | None:
    """The notice in a line that a plug-in has printed: ``{"what": ..., "ends": true, "left_s": 90, "id": ...}``, with
    ``"fault": true`` where hardware has failed.

    None where the line is something else, or does not say whether the machine ``ends``.
    """
    facts = _object(line)
    ends, what, left_s = facts.get("ends"), facts.get("what", ""), facts.get("left_s", PLUGIN_LEAD_S)
    if type(ends) is not bool or not isinstance(what, str) or type(left_s) not in (int, float):
        return None
    what, fault = _short(what) or "a plug-in announces the end of this machine", facts.get("fault") is True
    key = f"{source}|{ends}|{_short(facts.get('id', what))}"
    return Notice(source=source, what=what, ends=ends, fault=fault, key=key,
                  left_s=_bounded(float(left_s)) if ends and not fault else 0.0)  # fmt: skip


def server_time(date: str, own: float) -> float:
    """The unix time in an answer's ``Date`` header, whose clock also sets the deadline; ``own`` where it has none."""
    at = _http_date(date)
    return own if at is None else at


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _short(value: Any) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in str(value)[:MAX_TEXT]).strip()


def _bounded(seconds: float) -> float:
    return min(MOST_S, max(LEAST_S, seconds)) if math.isfinite(seconds) else LEAST_S


_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII | re.IGNORECASE
)


def _iso(value: Any) -> float | None:
    """Unix time; one without a zone is UTC."""
    match = _ISO.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    try:
        at = calendar.timegm(tuple(map(int, match.groups()[:6])))
    except (ValueError, OverflowError):
        return None
    offset_s = int(match[8] or 0) * 3600 + int(match[9] or 0) * 60
    return float(at + offset_s if match[7] == "-" else at - offset_s)


def _http_date(value: Any) -> float | None:
    try:
        parts = parsedate_tz(value)
        return None if parts is None else float(mktime_tz(parts))
    except (TypeError, ValueError, OverflowError, IndexError, AttributeError):
        return None
