"""One look at the whole cluster: the state of its nodes in, actions out.

Actions need the agreement of N of M looks (``node_health``). Nodes that Slurm does not list are ignored, and nodes that
another user has drained are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurmft.policy.nodes.evidence import Kind
from slurmft.policy.nodes.node_health import (
    REASON_PREFIX,
    Assessment,
    Checkup,
    ClusterProblem,
    Condition,
    HealthRules,
    NodeVerdict,
    Status,
    assess,
    is_ours,
    plan,
)
from slurmft.policy.nodes.suspicion import (
    SEEN_BY_CHECKS,
    WEIGHTS,
    ManualEntry,
    Observation,
    Rules,
    Standing,
    State,
    standing,
)

SOURCE = "sweep"
EXCLUDES = 1.2
"""Weight of a sick node's observation, as a share of the threshold: it is excluded; a few clean looks lift that."""

DRAINED = frozenset({"DRAINED", "DRAINING", "DRAIN"})
"""Base states of sinfo from which a node may be resumed; one that is down is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFact:
    """One node as sinfo shows it."""

    node: str
    state: str
    """Base state in capital letters, without suffixes."""

    usable: bool
    """It takes jobs, now or later."""

    is_idle: bool
    """Nothing runs on it and it takes jobs now."""

    reason: str = ""
    """Why it is drained or down; empty where there is none."""

    since: float | None = None
    """Unix time at which it got that reason; None where Slurm does not say."""

    @property
    def is_drained_by_us(self) -> bool:
        """It is drained, and the reason is ours."""
        return self.state in DRAINED and is_ours(self.reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visits:
    """Which nodes are checked by a job of the sweep's own."""

    at_most: int = 0
    """Jobs of one sweep; 0: none."""

    retest_s: float = 600.0
    """Age of the newest look from which on a node under suspicion is tested again."""

    stale_s: float = 3600.0
    """The same for all others."""

    under_way: frozenset[str] = frozenset()
    """Nodes for which such a job waits or runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The actions of one sweep."""

    nodes: Mapping[str, NodeFact]
    assessment: Assessment
    standings: Mapping[str, Standing]
    observations: tuple[Observation, ...]
    """New ones for the exclusion list: sick nodes, and clean looks at nodes under suspicion."""

    excluded: tuple[NodeVerdict, ...]
    """Nodes that these take out."""

    held_back: tuple[tuple[NodeVerdict, str], ...]
    drain: tuple[NodeVerdict, ...]
    resume: tuple[NodeFact, ...]
    test: tuple[str, ...]
    cluster_problems: tuple[ClusterProblem, ...]
    strangers: int
    """Nodes with results that Slurm does not name."""

    @property
    def exit_code(self) -> int:
        """0: all well; 1: something to look at; 2: sick nodes, or a problem of the whole cluster."""
        if self.cluster_problems or self.assessment.of(Condition.SICK):
            return 2
        return 1 if self.assessment.of(Condition.SUSPECT) or self.resume else 0


def sweep_plan(
    nodes: Mapping[str, NodeFact], checkups: Mapping[str, Sequence[Checkup]], *, observations: Sequence[Observation],
    manual: Iterable[ManualEntry], now: float, health: HealthRules, rules: Rules, visits: Visits,
) -> SweepPlan:  # fmt: skip
    """Plan the actions of a sweep; linear in the numbers of nodes, looks and observations."""
    mine = {node: looks for node, looks in checkups.items() if node in nodes}
    assessment = assess(mine, now, health)
    standings = standing(observations, manual, now, rules)
    excluded = {node for node, each in standings.items() if each.state is State.EXCLUDED}
    out = {node for node, fact in nodes.items() if not fact.usable}
    taken_out_at = [each.at for each in observations if each.kind is Kind.HEALTH and each.source == SOURCE]
    found = plan(
        assessment, now, health, taken_out_at=taken_out_at, already_out=frozenset(excluded | out)
    )  # fmt: skip
    acted = {verdict.node for verdict in found.act}
    well = [each for each in assessment.of(Condition.HEALTHY) if each.clean >= health.clean_needed]
    cleared = _clean_looks(mine, well, standings, {each.id for each in observations})
    sick = [verdict for verdict in assessment.of(Condition.SICK) if verdict.node in acted | (excluded - out)]
    sick.sort(key=lambda verdict: (verdict.node not in acted, -verdict.failed, verdict.node))
    drain, later = _to_drain(nodes, sick, now, health)
    return SweepPlan(
        nodes=nodes,
        assessment=assessment,
        standings=standings,
        observations=(*(_against(verdict, now, rules) for verdict in found.act), *cleared),
        excluded=found.act,
        held_back=(*found.held_back, *((verdict, "max_nodes_per_hour: drained later") for verdict in later)),
        drain=drain,
        resume=tuple(nodes[verdict.node] for verdict in well if nodes[verdict.node].is_drained_by_us),
        test=_to_test(nodes, assessment, standings, now, visits),
        cluster_problems=found.cluster_problems,
        strangers=len(checkups) - len(mine),
    )


def _to_drain(
    nodes: Mapping[str, NodeFact], wanted: Sequence[NodeVerdict], now: float, health: HealthRules
) -> tuple[tuple[NodeVerdict, ...], tuple[NodeVerdict, ...]]:
    """Nodes to drain now and later: an hour's number holds for those that were excluded long ago as well."""
    drained = [fact for fact in nodes.values() if fact.is_drained_by_us and (fact.since or 0.0) > now - 3600]
    left = max(0, health.max_nodes_per_hour - len(drained))
    return tuple(wanted[:left]), tuple(wanted[left:])


def _against(verdict: NodeVerdict, now: float, rules: Rules) -> Observation:
    return Observation(
        kind=Kind.HEALTH,
        node=verdict.node,
        weight=EXCLUDES * rules.threshold,
        at=min(verdict.at, now),
        id=f"sweep|{verdict.node}|{verdict.check}|{verdict.at:.3f}",
        source=SOURCE,
        evidence=verdict.reason.removeprefix(REASON_PREFIX),
    )


def _clean_looks(
    checkups: Mapping[str, Sequence[Checkup]], well: Sequence[NodeVerdict], standings: Mapping[str, Standing],
    known: Collection[str],
) -> list[Observation]:  # fmt: skip
    """Each clean look of a healthy node, once, where there is an observation that it offsets."""
    found = []
    for verdict in well:
        node = verdict.node
        if node not in standings or not _is_answerable(standings[node]):
            continue
        newest = sorted(checkups[node], key=lambda look: look.at, reverse=True)[: verdict.clean]
        found += [
            Observation(kind=Kind.PASSED, node=node, weight=WEIGHTS[Kind.PASSED], at=look.at, id=name, source=SOURCE,
                        evidence=f"{len(look.results)} checks passed")
            for look in newest
            if look.status is not Status.UNKNOWN and (name := f"passed|{node}|{look.at:.3f}") not in known
        ]  # fmt: skip
    return found


def _is_answerable(each: Standing) -> bool:
    """Whether there is an observation of the node that clean checks can offset."""
    kinds = tuple(str(kind) for kind in SEEN_BY_CHECKS)
    held = (reason.split(" x ")[-1] for reason in each.reasons)
    return each.state is not State.FREE and any(reason.rpartition(" ")[0] in kinds for reason in held)


def _to_test(
    nodes: Mapping[str, NodeFact], assessment: Assessment, standings: Mapping[str, Standing], now: float,
    visits: Visits,
) -> tuple[str, ...]:  # fmt: skip
    """Idle nodes whose newest look is too old: those under suspicion first, then the longest unseen."""
    due: list[tuple[bool, float, str]] = []
    for node, fact in nodes.items():
        if not fact.is_idle or node in visits.under_way:
            continue
        verdict, held = assessment.verdicts.get(node), standings.get(node)
        suspect = (verdict is not None and verdict.condition in (Condition.SUSPECT, Condition.SICK)) or (
            held is not None and _is_answerable(held)
        )
        at = verdict.at if verdict is not None else float("-inf")
        if at <= now - (visits.retest_s if suspect else visits.stale_s):
            due.append((not suspect, at, node))
    return tuple(node for _, _, node in sorted(due)[: visits.at_most])
