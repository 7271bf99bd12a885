"""A checkpoint from which runs die, or a node on which they do: which of the two, by the nodes they died on.

Pure. A checkpoint is on trial from the moment that an attempt reads it until one commits the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurmft.policy.verdicts.verdict import Cause

COUNTING = frozenset({Cause.WORKER_ERROR, Cause.SIGNAL_CRASH, Cause.HANG, Cause.DATA_CORRUPTION})
"""Ends that a spoilt state can bring about. Planned stops, lost nodes, networks and lack of memory do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One attempt that began with a checkpoint, and how it ended."""

    checkpoint: str
    step: int
    cause: str
    nodes: frozenset[str] = frozenset()
    """The node to blame, or the suspects'; empty where it is unknown."""

    committed: bool = False
    """It had saved a new step: the checkpoint is good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Poisoned:
    """The checkpoint must not be resumed from any more."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSuspected:
    """All died on this node: the checkpoint has not been tried on another one."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopeless:
    """Going back further would not help."""

    reason: str


def examine(
    trials: Sequence[Trial],
    *,
    poison_after: int,
    quarantined: Collection[int] = (),
    max_quarantines: int = 3,
    alone: bool = False,
) -> Poisoned | NodeSuspected | Hopeless | None:
    """Judge the newest of ``trials`` (oldest first) together with earlier ones; None: nothing follows yet.

    Deaths on different nodes speak against the checkpoint, deaths on one node against the node. A further death on that
    node, although the run was to be moved, speaks against the checkpoint as well.

    Args:
        poison_after: deaths from one checkpoint that it takes.
        quarantined: steps of the checkpoints that were quarantined since the run last got beyond them.
        alone: there is one machine, so no other node can be tried.
    """
    newest = trials[-1]
    deaths = _deaths(trials, newest.checkpoint)
    if newest.committed or len(deaths) < poison_after:
        return None
    where = [death.nodes for death in deaths if death.nodes]
    common = frozenset[str]().union(*where).intersection(*where)
    died = f"{len(deaths)} attempts have died from {newest.checkpoint} before their next save"
    if not alone:
        if len(where) < 2 <= len(deaths) or len(common) > 1:
            return None  # the node is unknown
        if common and len(deaths) <= max(poison_after, 2):
            (node,) = common
            return NodeSuspected(node=node, reason=f"{died}, all on {node}")
    if newest.step in quarantined:
        return Hopeless(reason=f"{died}, as others have from an earlier checkpoint of step {newest.step}")
    if len(quarantined) >= max_quarantines:
        return Hopeless(reason=f"{died}, after {len(quarantined)} other checkpoints were quarantined for that")
    nodes = sorted(frozenset[str]().union(*where))
    on = f", on {', '.join(nodes[:5])}{' and others' * (len(nodes) > 5)}" if nodes and not alone else ""
    return Poisoned(reason=f"{died}{on}")


def _deaths(trials: Sequence[Trial], checkpoint: str) -> list[Trial]:
    """Those of ``checkpoint`` since it was last found good."""
    deaths: list[Trial] = []
    for trial in trials:
        if trial.checkpoint != checkpoint:
            continue
        if trial.committed:
            deaths = []
        elif trial.cause in COUNTING:
            deaths.append(trial)
    return deaths
