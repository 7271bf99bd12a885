"""Keeping a run away from nodes: where it may not be placed next, and whether where it was placed is elsewhere."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slurmft.config import RunConfig
from slurmft.errors import SlurmError, StorageError
from slurmft.launch import avoidance
from slurmft.launch.avoidance import Avoidance
from slurmft.policy.evidence import Kind
from slurmft.policy.suspicion import State, standing, suspect_gpus
from slurmft.policy.verdict import Action
from slurmft.scheduler import slurm
from slurmft.scheduler.nodes import expand
from slurmft.storage.exclusions import Exclusions
from slurmft.storage.journal import Event
from slurmft.storage.patience import FolderThread

MAX_ESCAPES = 3
"""Placements on nodes that were to be kept away from, in a row, before the run is given up, or goes on all the same."""

LIST_S = 5.0
"""How long the exclusion list's filesystem may take to answer."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What the next placement of a job excludes."""

    excluded: frozenset[str]
    """All of the job's excluded nodes: its user's own and ours. An update replaces the ones it has."""

    avoidance: Avoidance
    """Ours, and why."""

    impossible: str = ""
    """Why a suspect cannot be kept away from; empty when all can."""


def read_exclusions(config: RunConfig) -> Exclusions | None:
    """The exclusion list; None, with a warning, when it cannot be read: no list is worth a run."""
    thread = FolderThread()  # its filesystem may be another one than the run folder's
    try:
        return thread.call(lambda: avoidance.exclusion_list(config, os.environ).read(), timeout_s=LIST_S)
    except (StorageError, SlurmError, OSError) as error:
        log.warning("the exclusion list is not used: %s", error)
        return None


def next_placement(
    config: RunConfig, *, partition: str, job: str | None, history: Sequence[Event], suspects: Sequence[str]
) -> Placement | None:
    """Where the run's next placement must not be; None where there is nothing to say and nothing to take back.

    When Slurm does not tell about its nodes, only the suspects are excluded: they were in an allocation, so Slurm knows
    their names, and one unknown name would make it refuse all of them.
    """
    exclusions = read_exclusions(config)
    before = ours(history)
    wanted = tuple(dict.fromkeys([*suspects, *sorted(left(history))]))
    if not wanted and not before and not excluded_now(config, exclusions):
        return None
    own = expanded(config.slurm.exclude)
    if job is not None:
        try:
            own |= slurm.excluded_nodes(job) - before
        except SlurmError as error:
            log.warning("the nodes that job %s excludes are not known: %s", job, error.what)
    try:
        found = _to_avoid(config, exclusions, partition=partition, suspects=wanted, own=own)
        if _kept(found, suspects):  # what it has left before must not cost it what it leaves now
            found = _to_avoid(config, exclusions, partition=partition, suspects=suspects, own=own)
    except (SlurmError, StorageError) as error:
        log.warning("only the suspects are avoided: %s", error.what)
        return Placement(excluded=own | set(wanted), avoidance=Avoidance(nodes=wanted, problem=error.what))
    return Placement(excluded=own | set(found.nodes), avoidance=found, impossible=_kept(found, suspects))


def _kept(found: Avoidance, suspects: Sequence[str]) -> str:
    """Which of them are not avoided, and why; empty when all are. One that the job cannot get to need not be."""
    return "; ".join(f"{drop.node}: {drop.reason}" for drop in found.dropped if drop.node in suspects)


def _to_avoid(
    config: RunConfig, exclusions: Exclusions | None, *, partition: str, suspects: Sequence[str] = (),
    own: frozenset[str] = frozenset(),
) -> Avoidance:  # fmt: skip
    return avoidance.to_avoid(
        exclusions or Exclusions(),
        partition=partition or None,
        nodes_needed=config.nodes + config.spare_nodes,
        suspects=suspects,
        max_excluded_fraction=config.exclusions.max_excluded_fraction,
        rules=config.exclusions.rules(),
        excluded_anyway=own,
    )


def excluded_now(config: RunConfig, exclusions: Exclusions | None) -> frozenset[str]:
    """Nodes that the list excludes, whether a request can bear it or not."""
    if exclusions is None:
        return frozenset()
    standings = standing(exclusions.observations, exclusions.manual, time.time(), config.exclusions.rules())
    return frozenset(node for node, each in standings.items() if each.state is State.EXCLUDED)


def expanded(hostlist: object) -> frozenset[str]:
    """The nodes in a hostlist that somebody wrote; none where it is not one."""
    try:
        return frozenset(expand(str(hostlist))) if hostlist else frozenset()
    except ValueError:
        return frozenset()


def to_keep_off(config: RunConfig, partition: str, allocated: Sequence[str]) -> frozenset[str]:
    """Allocated nodes that the exclusion list excludes, as far as the run could be placed without them."""
    exclusions = read_exclusions(config)
    if not set(allocated) & excluded_now(config, exclusions):
        return frozenset()
    try:
        found = _to_avoid(config, exclusions, partition=partition)
    except (SlurmError, StorageError) as error:
        log.warning("Slurm does not tell about its nodes, so the run stays where it is: %s", error.what)
        return frozenset()
    return frozenset(allocated) & set(found.nodes)


def ours(history: Sequence[Event]) -> frozenset[str]:
    """Nodes that the run ever excluded by itself, rather than its user."""
    lists = [expanded(event.details.get("nodes")) for event in history if event.event == "avoiding"]
    return frozenset().union(*lists)


def left(history: Sequence[Event]) -> frozenset[str]:
    """Nodes that the run has moved away from, and that were not acquitted since: it does not go back by chance."""
    nodes: set[str] = set()
    for event in history:
        facts = event.details
        if event.event == "decision" and facts.get("elsewhere") and facts.get("action") == Action.CONTINUE:
            nodes.update(map(str, facts.get("avoid", [])))
        elif event.event == "evidence" and facts.get("kind") == Kind.RERUN_ACQUITTED:
            nodes.discard(str(facts.get("node")))
    return frozenset(nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """Nodes that the run was to go on without, as its journal has it."""

    nodes: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()
    """UUIDs of GPUs that it was to go on without, on whatever node."""

    escapes: int = 0
    """Times in a row that it was placed on one of them all the same."""


def duty_of(history: Sequence[Event]) -> Duty:
    """What the newest decision demands of the placement that follows it."""
    nodes: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()
    escapes = 0
    for event in history:
        if event.event == "decision":
            demands = event.details.get("elsewhere") and event.details.get("action") == Action.CONTINUE
            nodes = frozenset(map(str, event.details.get("avoid", []))) if demands else frozenset()
        elif event.event == "verdict":
            escapes, gpus = 0, frozenset()
        elif event.event == "avoiding_gpus":
            gpus = frozenset(map(str, event.details.get("gpus", [])))
        elif event.event == "exclusion_escaped":
            escapes += 1
    return Duty(nodes=nodes, gpus=gpus, escapes=escapes)


def suspect_gpus_of(config: RunConfig, history: Sequence[Event]) -> frozenset[str]:
    """UUIDs of the GPUs that no worker may use: the run's own suspects, and those that the list excludes."""
    exclusions = read_exclusions(config)
    duty = duty_of(history).gpus
    if exclusions is None:
        return duty
    return duty | frozenset(suspect_gpus(exclusions.observations, time.time(), config.exclusions.rules()))


def choose(allocated: Sequence[str], avoid: frozenset[str], needed: int) -> tuple[str, ...] | None:
    """``needed`` nodes of the allocation that need not be avoided, in its order; None when it has too few."""
    others = [node for node in allocated if node not in avoid]
    return tuple(others[:needed]) if len(others) >= needed else None
