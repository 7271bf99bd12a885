"""From checks of nodes to actions: results over time in, a verdict for each node out, and which of them to act on.

One bad result takes no node out: N of the last M looks must agree, a failure that many nodes share is a problem of the
cluster and changes no node, and no more than a few nodes are taken out in an hour. A node that could not be checked is
neither healthy nor sick.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import attrgetter

from slurmft.policy.suspicion import SEEN_BY_CHECKS, WEIGHTS, ManualEntry, Observation, Rules, Standing, State, standing
from slurmft.policy.verdict import Kind

# --- node health ---

REASON_PREFIX = "slurmft: "
MAX_REASON = 200
"""Characters of a drain reason; sinfo and mails cut longer ones anywhere."""

CLOCK_SLACK_S = 300.0
"""How far a node's clock may be ahead of ours before its results are not believed."""


class Status(IntEnum):
    """The outcome of one check; the numbers are Nagios's exit codes."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3
    """It could not look, or not in time: nothing is known of the node."""


class Problem(StrEnum):
    """The domain of a failure, as the drain reason names it."""

    NODE = "node_problem"
    HARDWARE = "hardware_problem"
    USER = "user_problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of one probe."""

    name: str
    status: Status
    detail: str
    """One line for people."""

    value: float | None = None
    """The number that was judged, in ``unit``; None where there is none."""

    unit: str = ""
    evidence: tuple[str, ...] = ()
    """Lines that were seen; or, in a stored result, the file that holds them."""

    remedy: str = ""
    """The remedy for an admin; empty when all is well."""

    problem: Problem = Problem.NODE
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """One look at one node: all results of one run of its probes."""

    node: str
    at: float
    """Unix time by the node's own clock."""

    results: tuple[ProbeResult, ...]
    context: str = "manual"
    level: int = 1

    @property
    def status(self) -> Status:
        """The worst of its results; unknown where there is none."""
        return worst(result.status for result in self.results)

    @property
    def is_healthy(self) -> bool:
        """Whether something could be looked at, and nothing is critical; not being so does not make a node sick."""
        known = {result.status for result in self.results} - {Status.UNKNOWN}
        return bool(known) and Status.CRITICAL not in known


class Condition(StrEnum):
    """The condition of a node, from its looks."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It failed, but not often enough to act on; or it failed and has not been well for long enough."""

    SICK = "sick"
    """N of the last M looks failed the same check, the newest among them."""

    UNKNOWN = "unknown"
    """Nothing recent is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRules:
    """When results become a verdict, and a verdict an action."""

    needed: int = 2
    """Looks that must have failed the same check, ..."""

    considered: int = 3
    """... among so many newest ones that could look."""

    clean_needed: int = 2
    """Looks without a failure, newest ones, after which a node is healthy again."""

    min_spacing_s: float = 30.0
    """Looks closer together than this count as one: ten jobs that start at once are not ten independent looks."""

    max_age_s: float = 7200.0
    """Looks older than this count no more."""

    cluster_problem_fraction: float = 0.3
    """Share of the nodes looked at: where more of them, and at least two, fail the same check it is the cluster's."""

    max_nodes_per_hour: int = 4
    """Nodes that may be taken out within an hour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeVerdict:
    """The verdict on one node, from its looks."""

    node: str
    condition: Condition
    check: str = ""
    """The check that failed; empty when none did."""

    problem: Problem = Problem.NODE
    detail: str = ""
    remedy: str = ""
    failed: int = 0
    """Of the looks that count, how many failed that check, ..."""

    looked: int = 0
    """... and how many could look."""

    clean: int = 0
    """Newest looks in a row in which nothing failed and something was seen."""

    at: float = -math.inf
    """Unix time of the newest look; minus infinity when there is none."""

    @property
    def reason(self) -> str:
        """The drain reason."""
        return drain_reason(self.problem, self.check, self.detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProblem:
    """One failure that many nodes share: no node's fault, and no node is changed for it."""

    check: str
    nodes: tuple[str, ...]
    looked: int
    """Nodes whose newest look could run the check."""

    detail: str

    def __str__(self) -> str:
        return f"cluster problem: {self.check} fails on {len(self.nodes)} of {self.looked} nodes: {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """The verdicts on all nodes."""

    verdicts: Mapping[str, NodeVerdict]
    cluster_problems: tuple[ClusterProblem, ...] = ()

    def of(self, *conditions: Condition) -> list[NodeVerdict]:
        """The verdicts of these conditions, by node."""
        return [self.verdicts[node] for node in sorted(self.verdicts) if self.verdicts[node].condition in conditions]


_SEVERITY = {Status.OK: 0, Status.UNKNOWN: 1, Status.WARNING: 2, Status.CRITICAL: 3}


def worst(statuses: Iterable[Status]) -> Status:
    """The gravest of them: critical, then warning, then unknown, then OK; unknown when there is none."""
    return max(statuses, key=lambda status: _SEVERITY[status], default=Status.UNKNOWN)


def assess(
    checkups: Mapping[str, Sequence[Checkup]], now: float, rules: HealthRules, *, nodes: Iterable[str] = ()
) -> Assessment:
    """The verdict on each node from its checkups, in any order; ``nodes`` are those that may have none.

    Linear in the number of results. A check that fails on many nodes leaves them out of SICK: they are SUSPECT.
    """
    recent = {node: _recent(checkups.get(node, ()), now, rules) for node in {*checkups, *nodes}}
    problems = _cluster_problems(recent, rules)
    shared = frozenset(problem.check for problem in problems)
    verdicts = {node: _verdict(node, looks, rules, shared) for node, looks in recent.items()}
    return Assessment(verdicts=verdicts, cluster_problems=problems)


def plan(
    assessment: Assessment, now: float, rules: HealthRules, *, taken_out_at: Iterable[float] = (),
    already_out: frozenset[str] = frozenset(),
) -> tuple[tuple[NodeVerdict, ...], tuple[NodeVerdict, ...]]:  # fmt: skip
    """Which of the sick nodes are taken out now; and which stay, as ``max_nodes_per_hour`` is reached.

    Args:
        taken_out_at: Unix times at which nodes were taken out before; those of the last hour count.
        already_out: nodes that are drained or excluded; nothing is done about them.
    """
    left = rules.max_nodes_per_hour - sum(1 for at in taken_out_at if at > now - 3600)
    sick = [verdict for verdict in assessment.of(Condition.SICK) if verdict.node not in already_out]
    sick.sort(key=lambda verdict: (-verdict.failed, verdict.node))
    return tuple(sick[: max(0, left)]), tuple(sick[max(0, left) :])


def drain_reason(problem: Problem, check: str, detail: str) -> str:
    """The reason that Slurm shows: one printable line that begins with our prefix."""
    text = f"{REASON_PREFIX}[{problem.value}] {check}: {detail}"
    plain = re.sub(r"[^ -~]+", " ", text).replace('"', "'").replace("\\", "/")
    return " ".join(plain.split())[:MAX_REASON]


def is_ours(reason: str) -> bool:
    """Whether slurmft wrote this drain reason; no other is ever touched."""
    return reason.startswith(REASON_PREFIX)


# --- Counters that only grow: what counts is how much they have grown lately ---

Totals = Mapping[str, int]
Sample = tuple[float, Totals]
"""Unix time, and the counters by name."""

SHARES_OF_WINDOW = 48
"""Samples closer together than such a part of the window become one: a counter may grow with every look."""


def with_sample(samples: Sequence[Sample], now: float, totals: Totals, window_s: float) -> tuple[Sample, ...]:
    """The samples, oldest first, with the totals of now: as few as ``growth`` needs.

    Counters that are not known now keep what they had: a GPU may be back at the next look.
    """
    kept = [each for each in samples if each[0] <= now]
    while len(kept) > 1 and kept[1][0] <= now - window_s:
        del kept[0]
    last = kept[-1][1] if kept else {}
    merged = {**last, **totals}
    if merged == last and kept:
        return tuple(kept)
    is_close = len(kept) > 1 and now - kept[-1][0] < window_s / SHARES_OF_WINDOW
    if is_close and all(merged[name] >= total for name, total in last.items()):
        return (*kept[:-1], (kept[-1][0], merged))
    return (*kept, (now, merged))


def growth(samples: Sequence[Sample], now: float, window_s: float) -> dict[str, int]:
    """By how much each counter has grown within the window. One that fell began anew, with a reset or a boot."""
    grown: dict[str, int] = {}
    for (_, before), (at, after) in itertools.pairwise(samples):
        for name, total in after.items():
            earlier = before.get(name, 0)
            counts = now - window_s < at <= now
            grown[name] = grown.get(name, 0) + counts * (total - earlier if total >= earlier else total)
    return grown


def _recent(checkups: Sequence[Checkup], now: float, rules: HealthRules) -> list[Checkup]:
    """The looks that count, newest first: neither old nor from the future, and apart from each other."""
    oldest, latest = now - rules.max_age_s, now + CLOCK_SLACK_S
    kept: list[Checkup] = []
    for each in sorted((each for each in checkups if oldest <= each.at <= latest), key=attrgetter("at"), reverse=True):
        if not kept or kept[-1].at - each.at >= rules.min_spacing_s:
            kept.append(each)
    return kept


def _cluster_problems(recent: Mapping[str, Sequence[Checkup]], rules: HealthRules) -> tuple[ClusterProblem, ...]:
    """By each node's newest look: what fails now counts, however often it failed before."""
    looked: Counter[str] = Counter()
    failing: dict[str, list[tuple[str, str]]] = {}
    for node, looks in recent.items():
        for result in looks[0].results if looks else ():
            looked[result.name] += result.status is not Status.UNKNOWN
            if result.status is Status.CRITICAL:
                failing.setdefault(result.name, []).append((node, result.detail))
    return tuple(
        ClusterProblem(check=check, nodes=tuple(sorted(node for node, _ in found)), looked=looked[check],
                       detail=min(found)[1])
        for check, found in sorted(failing.items())
        if len(found) >= 2 and len(found) > rules.cluster_problem_fraction * looked[check]
    )  # fmt: skip


def _verdict(node: str, looks: Sequence[Checkup], rules: HealthRules, shared: frozenset[str]) -> NodeVerdict:
    if not looks:
        return NodeVerdict(node=node, condition=Condition.UNKNOWN)
    at, clean = looks[0].at, _clean(looks)
    if clean == len(looks):  # nearly every node of a cluster: no failures
        return NodeVerdict(node=node, condition=Condition.HEALTHY, at=at, clean=clean)
    outcomes: dict[str, list[ProbeResult]] = {}
    for look in looks:
        for result in _once(look.results):
            if result.status is not Status.UNKNOWN:
                outcomes.setdefault(result.name, []).append(result)
    worst_of: tuple[int, ProbeResult, int] | None = None
    for found in outcomes.values():
        newest = found[: rules.considered]
        failed = [result for result in newest if result.status is Status.CRITICAL]
        if failed and (worst_of is None or _rank(failed, newest, rules, shared) > worst_of[0]):
            worst_of = (_rank(failed, newest, rules, shared), failed[0], len(newest))
    if worst_of is None or (worst_of[0] < 0 and clean >= rules.clean_needed):
        known = bool(outcomes)
        return NodeVerdict(node=node, condition=Condition.HEALTHY if known else Condition.UNKNOWN, at=at, clean=clean)
    _, result, looked = worst_of
    failures = [each for each in outcomes[result.name][: rules.considered] if each.status is Status.CRITICAL]
    still = outcomes[result.name][0].status is Status.CRITICAL
    sick = still and len(failures) >= rules.needed and result.name not in shared
    return NodeVerdict(
        node=node, condition=Condition.SICK if sick else Condition.SUSPECT, check=result.name, problem=result.problem,
        detail=result.detail, remedy=result.remedy, failed=len(failures), looked=looked, clean=clean, at=at,
    )  # fmt: skip


def _once(results: Iterable[ProbeResult]) -> Iterable[ProbeResult]:
    """One result of each name, the gravest: a result that a look contains twice counts once."""
    by_name: dict[str, ProbeResult] = {}
    for result in results:
        other = by_name.get(result.name)
        if other is None or _SEVERITY[result.status] > _SEVERITY[other.status]:
            by_name[result.name] = result
    return by_name.values()


def _rank(
    failed: Sequence[ProbeResult], newest: Sequence[ProbeResult], rules: HealthRules, shared: frozenset[str]
) -> int:
    """The failure to report: one to act on before one that is shared or too rare, and these before one that is over."""
    if newest[0].status is not Status.CRITICAL:
        return -1
    acts = len(failed) >= rules.needed and failed[0].name not in shared
    return len(failed) + (1_000_000 if acts else 0)


def _clean(looks: Sequence[Checkup]) -> int:
    count = 0
    for look in looks:
        seen = {result.status for result in look.results}
        if Status.CRITICAL in seen or not seen - {Status.UNKNOWN}:
            break
        count += 1
    return count


# --- One look at the whole cluster: the state of its nodes in, actions out ---
# Actions need the agreement of N of M looks (``node_health``). Nodes that Slurm does not list are ignored, and nodes
# that another user has drained are left alone.

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
    """Nodes that are checked at a time; 0: as ``share`` says."""

    share: float = 0.0
    """The same as a part of all nodes, one at least; 0: none."""

    retest_s: float = 600.0
    """Age of the newest long look (level 2) from which on a node under suspicion is tested again."""

    stale_s: float = 86_400.0
    """The same for all others; one that is new, or was away since, is tested at once."""

    away_s: float = 1800.0
    """A pause between two looks of HealthCheckProgram from which on the node was away: down, or under repair."""

    switch_of: Mapping[str, str] = field(default_factory=dict)
    """Node -> its switch; two nodes of one are tested as a pair. Those that are not named have one in common."""

    under_way: frozenset[str] = frozenset()
    """Nodes for which such a job waits or runs."""

    def room(self, nodes: int) -> int:
        """How many more of so many nodes may be checked now."""
        limit = self.at_most or (max(1, int(self.share * nodes)) if self.share else 0)
        return max(0, limit - len(self.under_way))


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
    test: tuple[tuple[str, ...], ...]
    """Jobs that look at idle nodes: of each the node, or the pair of nodes."""

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
    act, late = plan(assessment, now, health, taken_out_at=taken_out_at, already_out=frozenset(excluded | out))
    acted, why = {verdict.node for verdict in act}, f"max_nodes_per_hour={health.max_nodes_per_hour} is reached"
    well = [each for each in assessment.of(Condition.HEALTHY) if each.clean >= health.clean_needed]
    cleared = _clean_looks(mine, well, standings, {each.id for each in observations})
    sick = [verdict for verdict in assessment.of(Condition.SICK) if verdict.node in acted | (excluded - out)]
    sick.sort(key=lambda verdict: (verdict.node not in acted, -verdict.failed, verdict.node))
    drain, later = _to_drain(nodes, sick, now, health)
    return SweepPlan(
        nodes=nodes,
        assessment=assessment,
        standings=standings,
        observations=(*(_against(verdict, now, rules) for verdict in act), *cleared),
        excluded=act,
        held_back=(
            *((verdict, why) for verdict in late),
            *((verdict, "max_nodes_per_hour: drained later") for verdict in later),
        ),
        drain=drain,
        resume=tuple(
            nodes[verdict.node]
            for verdict in well
            if nodes[verdict.node].is_drained_by_us
            and _has_passed(mine[verdict.node], verdict, nodes[verdict.node].reason)
        ),
        test=_to_test(nodes, mine, assessment, standings, now=now, visits=visits),
        cluster_problems=assessment.cluster_problems,
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


def _has_passed(looks: Sequence[Checkup], verdict: NodeVerdict, reason: str) -> bool:
    """Whether one of the clean looks has passed the check that the node was drained for.

    A check of long looks says nothing in a short one, and a drained node is not looked at by jobs.
    """
    check = re.match(r"slurmft: \[\w+\] ([^:]+):", reason)
    newest = sorted(looks, key=lambda look: look.at, reverse=True)[: verdict.clean]
    return check is None or any(
        result.name == check[1] and result.status in (Status.OK, Status.WARNING)
        for look in newest for result in look.results
    )  # fmt: skip


def _to_test(
    nodes: Mapping[str, NodeFact], checkups: Mapping[str, Sequence[Checkup]], assessment: Assessment,
    standings: Mapping[str, Standing], *, now: float, visits: Visits,
) -> tuple[tuple[str, ...], ...]:  # fmt: skip
    """Idle nodes that are due for a long look: under suspicion first, then new or back, then the longest unseen.

    Each has a partner of its switch where there is one, never one under suspicion: the pair would prove nothing.
    """
    room = visits.room(len(nodes))
    if not room:
        return ()
    due: list[tuple[bool, float, str]] = []
    partners: dict[str, list[str]] = {}
    for node, fact in nodes.items():
        if not fact.is_idle or node in visits.under_way:
            continue
        verdict, held = assessment.verdicts.get(node), standings.get(node)
        suspect = (verdict is not None and verdict.condition in (Condition.SUSPECT, Condition.SICK)) or (
            held is not None and _is_answerable(held)
        )
        at = _long_look_at(checkups.get(node, ()), visits)
        if at <= now - (visits.retest_s if suspect else visits.stale_s):
            due.append((not suspect, at, node))
        if not suspect:
            partners.setdefault(visits.switch_of.get(node, ""), []).append(node)
    return _groups([node for _, _, node in sorted(due)], partners, visits, room)


def _long_look_at(looks: Sequence[Checkup], visits: Visits) -> float:
    """Unix time of the newest long look; minus infinity where there is none, or the node was away since."""
    newest = max((look.at for look in looks if look.level > 1), default=-math.inf)
    regular = sorted(look.at for look in looks if look.context == "healthcheck" and look.at >= newest)
    was_away = any(after - before > visits.away_s for before, after in itertools.pairwise(regular))
    return -math.inf if was_away else newest


def _groups(
    due: Sequence[str], partners: Mapping[str, list[str]], visits: Visits, room: int
) -> tuple[tuple[str, ...], ...]:
    """Those that are due, with partners that are due as well, else with others; ``room`` nodes at most."""
    taken, found = set[str](), list[tuple[str, ...]]()
    rank = {node: number for number, node in enumerate(due)}
    waiting = {  # the last one is the next
        switch: sorted(names, key=lambda node: (-rank.get(node, len(rank)), node)) for switch, names in partners.items()
    }
    for node in due:
        if room < 1:
            break
        if node in taken:
            continue
        taken.add(node)
        others = waiting.get(visits.switch_of.get(node, ""), [])
        while others and others[-1] in taken:
            others.pop()
        pair = (node, others.pop()) if others and room > 1 else (node,)
        taken.update(pair)
        room -= len(pair)
        found.append(pair)
    return tuple(found)
