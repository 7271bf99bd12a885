"""What a site should have before many people rely on slurmft: facts in, findings with remedies out.

Nothing of it is needed for a run to work; docs/deployment.md says what each is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slurmft.policy.site.doctor import Finding, Level

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

LEAST_KEPT = 2
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A file or folder that programs of other users, or of root, rely on."""

    path: str
    exists: bool = True
    owner: str = "root"
    changeable_by: str = ""
    """Who but root and its owner may change it, or replace it through a folder above; empty: no other user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What one run's configuration asks for, and the room that is there for it."""

    folder: Place
    kind: str = ""
    """Type of the filesystem; empty where it is unknown."""

    nodes: int = 1
    free_bytes: int | None = None
    checkpoint_bytes: int = 0
    """The newest checkpoint's size; 0 where there is none yet."""

    kept: int = LEAST_KEPT
    time_limit: str = ""
    is_told: bool = False
    """Its end is made known: notify or metrics are configured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteFacts:
    """What is there for all runs."""

    installation: Place
    conf: Mapping[str, str] = field(default_factory=dict)
    """``scontrol show config``; empty where Slurm did not answer."""

    programs: Mapping[str, Place] = field(default_factory=dict)
    """Key of slurm.conf -> the hook's program on this machine."""

    health: Place
    health_error: str = ""
    """Why health.yaml cannot be used; empty where it can, or is not there."""

    results: Place | None = None
    """The folder of the nodes' results; None where health.yaml names none."""

    looked_at: Mapping[str, float] = field(default_factory=dict)
    """Node -> seconds since its newest look."""

    nodes: tuple[str, ...] = ()
    """Slurm's nodes that are not down, or powered off."""


def judge_site(facts: SiteFacts) -> Iterator[Finding]:
    """Findings on hooks, results, and the permissions of what root relies on."""
    yield _installation(facts.installation, is_for_root=bool(_hooks(facts.conf)))
    if facts.conf:
        yield from _judge_hooks(facts)
    yield from _judge_health(facts)
    yield Finding(
        check="sweep",
        level=Level.NOTE,
        text="whether cron runs slurmft sweep cannot be seen from here",
        remedy="an administrator: the line in docs/security.md, with --metrics or --heartbeat-url-file",
    )


def judge_run(run: RunFacts) -> Iterator[Finding]:
    """Findings on one run's folder, room and settings."""
    yield _folder(run)
    yield _room(run)
    if run.kept < LEAST_KEPT:
        yield Finding(
            check="kept checkpoints",
            level=Level.WARNING,
            remedy="set checkpoint.keep_last_n: 2 or more",
            text="one is kept: damage to it leaves nothing to resume from",
        )
    if not run.time_limit:
        yield Finding(
            check="time limit",
            level=Level.NOTE,
            text="none is asked for: the partition's default holds",
            remedy="set slurm.time: shorter limits start sooner, and cost one requeue each",
        )
    if not run.is_told:
        yield Finding(
            check="notifications",
            level=Level.NOTE,
            text="nothing is sent when the run ends or stands still",
            remedy="set notify, or let Prometheus read its metrics",
        )
    yield Finding(
        check="rehearsal",
        level=Level.NOTE,
        text="a preemption of this run can be rehearsed",
        remedy="slurmft drill CONFIG",
    )


def _hooks(conf: Mapping[str, str]) -> dict[str, str]:
    """Those of the hooks that are ours, by key."""
    return {
        key: conf[key] for key, (name, _) in HOOKS.items() if name in conf.get(key, "").replace(",", "/").split("/")
    }


def _installation(place: Place, *, is_for_root: bool) -> Finding:
    check = "installation"
    if place.changeable_by:
        return Finding(
            check=check,
            level=Level.PROBLEM if is_for_root else Level.WARNING,
            text=f"{place.path} can be changed by {place.changeable_by}: they decide what your jobs run",
            remedy=f"chmod go-w {place.path}, or install where others may not write",
        )
    if is_for_root and place.owner != "root":
        return Finding(
            check=check,
            level=Level.NOTE,
            text=f"{place.path} belongs to {place.owner}",
            remedy="what root's hooks and cron lines run must be an installation of root's",
        )
    return Finding(check=check, level=Level.OK, text=f"{place.path} can be changed by {place.owner} only")


def _judge_hooks(facts: SiteFacts) -> Iterator[Finding]:
    there = _hooks(facts.conf)
    for key, (name, without) in HOOKS.items():
        if key not in there:
            yield Finding(
                check=key,
                level=Level.WARNING,
                text=f"{name} is not in slurm.conf: {without}",
                remedy="an administrator: slurmft hooks show",
            )
            continue
        place = facts.programs.get(key, Place(path=there[key], exists=False))
        if not place.exists:
            yield Finding(
                check=key,
                level=Level.NOTE,
                text=f"there is no {place.path} on this machine",
                remedy="look whether all nodes have it: Slurm drains nodes whose Prolog fails",
            )
        elif place.changeable_by or place.owner != "root":
            yield Finding(
                check=key,
                level=Level.PROBLEM,
                remedy="make it, and the folders above it, root's alone",
                text=f"root runs {place.path}, which {place.changeable_by or place.owner} may change",
            )
        else:
            yield Finding(check=key, level=Level.OK, text=place.path)


def _judge_health(facts: SiteFacts) -> Iterator[Finding]:
    check = "health.yaml"
    if facts.health_error:
        yield Finding(check=check, level=Level.PROBLEM, text=facts.health_error, remedy="correct it")
        return
    if not facts.health.exists:
        yield Finding(
            check=check,
            level=Level.WARNING,
            text=f"there is no {facts.health.path}: defaults hold, and results stay on the nodes",
            remedy="an administrator: start from configs/health.yaml, and set results_folder",
        )
        return
    if facts.health.changeable_by or facts.health.owner != "root":
        who = facts.health.changeable_by or facts.health.owner
        yield Finding(
            check=check,
            level=Level.PROBLEM,
            text=f"{who} may change {facts.health.path}, which root obeys",
            remedy=f"chown root {facts.health.path}; chmod go-w {facts.health.path}",
        )
    else:
        yield Finding(check=check, level=Level.OK, text=facts.health.path)
    yield _results(facts)


def _results(facts: SiteFacts) -> Finding:
    check = "node results"
    if (place := facts.results) is None:
        return Finding(
            check=check,
            level=Level.WARNING,
            text="results_folder is not set: the sweep sees no results",
            remedy="set results_folder in health.yaml, on a shared filesystem",
        )
    if place.changeable_by:
        return Finding(
            check=check,
            level=Level.PROBLEM,
            remedy=f"chmod go-w {place.path}",
            text=f"{place.path} can be changed by {place.changeable_by}: the sweep drains by it",
        )
    late = sorted(node for node in facts.nodes if facts.looked_at.get(node, FRESH_S + 1) > FRESH_S)
    if late:
        names = ", ".join(late[:_SHOWN]) + (", ..." if len(late) > _SHOWN else "")
        return Finding(
            check=check,
            level=Level.WARNING,
            remedy="on one of them: slurmft health, then slurmd's log",
            text=f"{len(late)} of {len(facts.nodes)} nodes left no result in {FRESH_S / 60:.0f} minutes: {names}",
        )
    return Finding(
        check=check, level=Level.OK, text=f"{len(facts.nodes)} nodes, all looked at within {FRESH_S / 60:.0f} minutes"
    )


def _folder(run: RunFacts) -> Finding:
    check, place = "run folder's place", run.folder
    if place.changeable_by:
        return Finding(
            check=check,
            level=Level.PROBLEM,
            remedy=f"chmod go-w {place.path}, or choose another run_folder",
            text=f"{place.path} can be replaced by {place.changeable_by}",
        )
    if run.kind in LOCAL_KINDS and run.nodes > 1:
        return Finding(
            check=check,
            level=Level.WARNING,
            remedy="choose a run_folder that all nodes see",
            text=f"{place.path} is on {run.kind}, which other nodes usually do not see",
        )
    return Finding(
        check=check,
        level=Level.OK,
        text=f"{place.path}{f' on {run.kind}' if run.kind else ''}: no other user can replace it",
    )


def _room(run: RunFacts) -> Finding:
    check, gib = "room for checkpoints", 1 << 30
    if run.free_bytes is None or not run.checkpoint_bytes:
        return Finding(
            check=check,
            level=Level.NOTE,
            text="there is no checkpoint yet whose size could be known",
            remedy=f"needed: its size times {run.kept + 1} (keep_last_n, and the one being written)",
        )
    need = run.checkpoint_bytes  # older ones are there already; the next is written before the oldest is removed
    text = f"{run.free_bytes / gib:.1f} GiB free, a checkpoint has {run.checkpoint_bytes / gib:.2f} GiB"
    if run.free_bytes < need:
        return Finding(check=check, level=Level.PROBLEM, text=text, remedy="the next save fails: make room")
    if run.free_bytes < need * (run.kept + 1):
        return Finding(
            check=check,
            level=Level.WARNING,
            text=text,
            remedy=f"room for {run.kept + 1} is safe; lower checkpoint.keep_last_n or make room",
        )
    return Finding(check=check, level=Level.OK, text=text)
