"""Suspicion of nodes and GPUs, and exclusion: observations fade, corroborate each other, and are lifted.

A positive observation fades with the half-life of its kind. A negative one (an acquittal, a passed health check) takes
its weight off what was held against the node before it, never off what comes later, and never below nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple

from slurmft.policy.verdict import Evidence, Kind

# --- How much of an exclusion list a request can spare: the weakest suspicion is dropped first ---


class Strength(IntEnum):
    """The reason of an exclusion; greater ones are dropped later."""

    SCORE = 0
    BY_HAND = 1
    SUSPECT = 2
    """Suspect of an undecided rerun: excluded from one placement only, which would prove nothing on the same node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A node that should not be used."""

    node: str
    score: float
    strength: Strength = Strength.SCORE
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionNodes:
    """A partition that the job may run in."""

    name: str
    nodes: frozenset[str]
    usable: frozenset[str]
    """Those of them that can take this job now or when others have ended: up, and not excluded by the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A node that should be excluded, and is not."""

    node: str
    reason: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which of the candidates are excluded."""

    nodes: tuple[str, ...]
    """The strongest first."""

    dropped: tuple[Dropped, ...]
    """The strongest first."""

    unknown: tuple[str, ...]
    """Nodes that are in no partition of the cluster; sorted."""


def choose_exclusions(
    candidates: Sequence[Candidate],
    places: Sequence[PartitionNodes],
    *,
    known: Collection[str],
    nodes_needed: int,
    max_excluded_fraction: float,
    asked_for: Collection[str] = (),
) -> Choice:
    """The candidates to exclude, the strongest first, as far as the request can spare them.

    In every partition that could take the job without exclusions, ``nodes_needed`` usable nodes remain; where none
    could, no usable node is excluded, since that would only make the job wait longer. Exclusions for longer than one
    placement are no more than ``max_excluded_fraction`` of any of the partitions; suspects of an undecided rerun use up
    that share, and are not bound by it. Nodes outside of the partitions are neither excluded nor dropped: the job
    cannot get there. A node that the request asks for by name is dropped.
    """
    open_ones = [place for place in places if len(place.usable) >= nodes_needed] or list(places)
    room = {place.name: len(place.usable) - nodes_needed for place in open_ones}
    share = {place.name: math.floor(max_excluded_fraction * len(place.nodes) + 1e-9) for place in places}
    chosen: list[str] = []
    dropped: list[Dropped] = []
    for candidate in _strongest_first(candidates):
        node = candidate.node
        around = [place for place in places if node in place.nodes]
        if not around:
            continue
        costs = [place.name for place in open_ones if node in place.usable]
        why = ""
        if node in asked_for:
            why = "the request names it in nodelist"
        elif any(room[name] < 1 for name in costs):
            why = f"without it fewer than {nodes_needed} usable nodes would be left"
        elif candidate.strength < Strength.SUSPECT and any(share[place.name] < 1 for place in around):
            why = f"more than max_excluded_fraction={max_excluded_fraction:g} of the partition would be excluded"
        if why:
            dropped.append(Dropped(node=node, reason=why, score=candidate.score))
            continue
        chosen.append(node)
        for name in costs:
            room[name] -= 1
        for place in around:
            share[place.name] -= 1
    unknown = sorted({candidate.node for candidate in candidates if candidate.node not in known})
    return Choice(nodes=tuple(chosen), dropped=tuple(dropped), unknown=tuple(unknown))


def _strongest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """One for each node, the strongest of its candidates."""
    ordered = sorted(candidates, key=lambda each: (-each.strength, -each.score, each.node))
    found: dict[str, Candidate] = {}
    for candidate in ordered:
        found.setdefault(candidate.node, candidate)
    return list(found.values())


# --- Suspicion of nodes and GPUs, and exclusion: observations fade, corroborate each other, and are lifted ---

DAY_H = 24.0
HOUR_S = 3600.0

WEIGHTS: Mapping[str, float] = MappingProxyType({
    Kind.RERUN_PERSISTENT: 2.0,
    Kind.REPLICA_DIFFERS: 2.0,
    Kind.RECLAIMED: 2.0,
    Kind.RERUN_UNDECIDED: 0.6,
    Kind.RERUN_TRANSIENT: 0.4,
    Kind.HEALTH: 0.8,
    Kind.NODE_LOST: 0.6,
    Kind.LAUNCH_FAILED: 0.6,
    Kind.STRAGGLER: 0.5,
    Kind.AT_RISK: 0.5,
    Kind.REPEATED_DEATH: 0.5,
    Kind.HANG: 0.3,
    Kind.CRASH: 0.25,
    Kind.COMMUNICATION: 0.2,
    Kind.OUT_OF_MEMORY: 0.1,
    Kind.RERUN_ACQUITTED: -1.0,
    Kind.PASSED: -0.3,
    Kind.FORGIVEN: -1_000_000.0,
})  # fmt: skip
"""Weight of one observation where its source says nothing else. Alone, only a persistent error and a replica that
differs reach 1, and for half an hour an observation without suspicion: a cloud has announced to take the node away."""

HALF_LIFE_HOURS: Mapping[str, float] = MappingProxyType({
    Kind.RERUN_PERSISTENT: 30 * DAY_H,
    Kind.REPLICA_DIFFERS: 30 * DAY_H,
    Kind.RERUN_UNDECIDED: 7 * DAY_H,
    Kind.RERUN_TRANSIENT: 7 * DAY_H,
    Kind.HEALTH: 2 * DAY_H,
    Kind.LAUNCH_FAILED: 2 * DAY_H,
    Kind.NODE_LOST: 3 * DAY_H,
    Kind.RECLAIMED: 0.5,
    Kind.AT_RISK: 1.0,
    Kind.STRAGGLER: 3 * DAY_H,
    Kind.REPEATED_DEATH: 3 * DAY_H,
    Kind.HANG: 2 * DAY_H,
    Kind.CRASH: 1 * DAY_H,
    Kind.COMMUNICATION: 1 * DAY_H,
    Kind.OUT_OF_MEMORY: 1 * DAY_H,
})  # fmt: skip
"""Hours in which half of an observation fades; kinds with a negative weight act once and have none."""

OTHER_HALF_LIFE_HOURS = 1 * DAY_H
"""Of a kind that only a newer slurmft knows."""

_OF_WORKERS = frozenset({Kind.CRASH, Kind.REPEATED_DEATH, Kind.HANG, Kind.COMMUNICATION, Kind.OUT_OF_MEMORY})
ONCE_PER_RUN = _OF_WORKERS | {Kind.STRAGGLER}
"""Kinds that a run's own fault shows as well: of one run only the strongest counts, so that a script which crashes
wherever it runs excludes no node by itself."""

SEEN_BY_CHECKS = _OF_WORKERS | {Kind.HEALTH, Kind.NODE_LOST}
"""The kinds that a passed health check offsets. It proves nothing about wrong results, nor about speed."""

PRECISION_S = 1e-3
"""Of the moment at which a state ends."""

MAX_WEIGHT = 1_000_000.0
FADED = 0.01
"""Remaining weight at which an observation may be forgotten, as a share of ``Rules.probation``."""


class Observation(NamedTuple):
    """One thing held against a node, or in its favour. A tuple: a list holds tens of thousands."""

    kind: Kind | str
    node: str
    weight: float
    """Positive: against the node; negative: in its favour."""

    at: float
    """Unix time."""

    id: str
    """Distinguishes one observation that was handed in twice from two."""

    gpu: str = ""
    """UUID; empty where it is not known."""

    source: str = ""
    """Its source, such as ``supervisor`` or ``sweep``."""

    run: str = ""
    job: str = ""
    evidence: str = ""
    """A path or a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManualEntry:
    """A user excludes a node by hand; stronger than any score."""

    node: str
    reason: str
    who: str
    at: float
    until: float | None = None
    """Unix time; None: until it is removed."""

    def holds(self, now: float) -> bool:
        """Whether it has not expired."""
        return self.until is None or self.until > now


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """When suspicion becomes exclusion, and how fast it fades."""

    threshold: float = 1.0
    """Score from which on a node is excluded."""

    probation: float = 0.25
    """Score from which on a node is on probation."""

    half_life_hours: Mapping[str, float] = field(default_factory=dict)
    """By kind, where it differs from ``HALF_LIFE_HOURS``."""

    def half_life_s(self, kind: str) -> float:
        """Seconds in which an observation of this kind loses half of its weight."""
        return HOUR_S * self.half_life_hours.get(kind, HALF_LIFE_HOURS.get(kind, OTHER_HALF_LIFE_HOURS))


class State(StrEnum):
    """Whether new placements may use a node."""

    EXCLUDED = "excluded"
    PROBATION = "probation"
    FREE = "free"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The sum of all observations of a node."""

    node: str
    state: State
    score: float
    reasons: tuple[str, ...]
    """The weightiest first."""

    until: float | None
    """Unix time at which it leaves this state if nothing else is seen; infinite: never; None: it is free."""

    by_hand: bool = False
    """It was excluded by hand."""


@dataclass(slots=True)
class Weighed:
    """One observation and what it means now."""

    observation: Observation
    value: float
    """Positive: its remaining weight. Negative: the weight that it lifted when it was made."""

    counts: bool = True
    """False where a stronger one of the same kind and run stands for it."""

    left: float = 1.0
    """The share that favourable observations have left of it."""


def observed(
    evidence: Evidence, *, source: str, run: str = "", job: str = "", weight: float | None = None, where: str = ""
) -> Observation:
    """``evidence`` as an observation; ``where`` is the file it came from, and distinguishes its message from others.

    The id is made of the kind, the suspect, the job and the time, so that reading the same file twice adds nothing.
    """
    suspect = evidence.suspect
    seen = (evidence.kind, suspect.node, suspect.gpu, suspect.rank, run, job, f"{evidence.at:.3f}", evidence.step)
    return Observation(
        kind=evidence.kind,
        node=suspect.node,
        weight=WEIGHTS.get(evidence.kind, 0.0) if weight is None else weight,
        at=evidence.at,
        id="|".join(map(str, seen)),
        gpu=suspect.gpu,
        source=source,
        run=run,
        job=job,
        evidence=f"{evidence.message} ({where})" if where else evidence.message,
    )


def weigh(observations: Iterable[Observation], now: float, rules: Rules) -> list[Weighed]:
    """The weight of each of one node's observations at ``now``, oldest first; those that are not numbers are left out.

    One from the future, by a clock that is ahead, counts as of now.
    """
    sound = [each for each in observations if math.isfinite(each.weight) and math.isfinite(each.at)]
    if len(sound) > 1:
        sound.sort(key=lambda each: (min(each.at, now), each.weight < 0, each.id))
    weighed: list[Weighed] = []
    against: list[Weighed] = []
    for observation in sound:
        entry = Weighed(observation, observation.weight)
        weighed.append(entry)
        if observation.weight > 0:
            against.append(entry)
        else:
            entry.value = -_take_off(observation, against, min(observation.at, now), rules)
    _value_at(against, now, rules)
    return weighed


def _take_off(favour: Observation, against: Sequence[Weighed], at: float, rules: Rules) -> float:
    """Lift up to the weight of ``favour`` from what stands against the node; returns how much it was."""
    checks_only = favour.kind is Kind.PASSED
    held = [
        entry for entry in against if entry.left and not (checks_only and entry.observation.kind not in SEEN_BY_CHECKS)
    ]
    total = _value_at(held, at, rules)
    if total <= 0:
        return 0.0
    taken = min(total, -favour.weight)
    for entry in held:
        entry.left *= 1 - taken / total
    return taken


def _value_at(against: Sequence[Weighed], at: float, rules: Rules) -> float:
    """Set the weight of each at that time, and which of one run's count; returns the sum."""
    strongest: dict[tuple[str, str], Weighed] = {}
    total = 0.0
    for entry in against:
        observation = entry.observation
        age_s = max(0.0, at - observation.at)
        entry.value = observation.weight * entry.left * 2.0 ** (-age_s / rules.half_life_s(observation.kind))
        entry.counts = True
        if observation.run and observation.kind in ONCE_PER_RUN:
            key = (str(observation.kind), observation.run)
            other = strongest.get(key)
            if other is not None and other.value >= entry.value:
                entry.counts = False
                continue
            if other is not None:
                other.counts = False
                total -= other.value
            strongest[key] = entry
        total += entry.value
    return max(0.0, total)


def standing(
    observations: Iterable[Observation], manual: Iterable[ManualEntry], now: float, rules: Rules
) -> dict[str, Standing]:
    """Every node with observations, by name."""
    by_node: dict[str, list[Observation]] = {}
    for observation in observations:
        by_node.setdefault(observation.node, []).append(observation)
    entries: dict[str, list[ManualEntry]] = {}
    for entry in manual:
        if entry.holds(now):
            entries.setdefault(entry.node, []).append(entry)
    names = sorted(by_node.keys() | entries.keys())
    return {node: _standing_of(node, by_node.get(node, ()), entries.get(node, ()), now, rules) for node in names}


def _standing_of(
    node: str, observations: Sequence[Observation], manual: Sequence[ManualEntry], now: float, rules: Rules
) -> Standing:
    counting = [entry for entry in weigh(observations, now, rules) if entry.counts and entry.value > 0]
    score = math.fsum(entry.value for entry in counting)
    reasons = tuple(_by_hand(entry) for entry in manual) + _reasons(counting)
    if score >= rules.threshold:
        state, until = State.EXCLUDED, now + _fades_in_s(counting, rules.threshold, rules)
    elif score >= rules.probation:
        state, until = State.PROBATION, now + _fades_in_s(counting, rules.probation, rules)
    else:
        state, until = State.FREE, None
    if manual:
        ends = [math.inf if entry.until is None else entry.until for entry in manual]
        until = max([*ends, until] if state is State.EXCLUDED and until is not None else ends)
        state = State.EXCLUDED
    return Standing(node=node, state=state, score=score, reasons=reasons, until=until, by_hand=bool(manual))


def _by_hand(entry: ManualEntry) -> str:
    return f"{entry.reason or 'no reason given'} (by {entry.who or 'hand'})"


def _reasons(counting: Sequence[Weighed]) -> tuple[str, ...]:
    totals: dict[str, tuple[float, int]] = {}
    for entry in counting:
        value, count = totals.get(entry.observation.kind, (0.0, 0))
        totals[entry.observation.kind] = (value + entry.value, count + 1)
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(f"{f'{count} x ' if count > 1 else ''}{kind} {value:.2f}" for kind, (value, count) in ordered)


def _fades_in_s(counting: Sequence[Weighed], level: float, rules: Rules) -> float:
    """Seconds until the sum of what counts is down to ``level``, which it is not below now."""
    sums: dict[float, float] = {}
    for entry in counting:
        half_life_s = rules.half_life_s(entry.observation.kind)
        sums[half_life_s] = sums.get(half_life_s, 0.0) + entry.value
    if len(sums) == 1:
        return max(sums) * math.log2(max(1.0, math.fsum(sums.values()) / level))
    seconds = 0.0
    for _ in range(100):  # Newton on the logarithm, which is falling and convex: it comes nearer from one side only
        left = [(value * 2.0 ** (-seconds / half_life_s), half_life_s) for half_life_s, value in sums.items()]
        total = math.fsum(value for value, _ in left)
        if total <= level:
            break
        step = math.log2(total / level) * total / math.fsum(value / half_life_s for value, half_life_s in left)
        seconds += step
        if step < PRECISION_S:
            break
    return seconds


def suspect_gpus(observations: Iterable[Observation], now: float, rules: Rules) -> dict[str, float]:
    """Score of every GPU, by UUID, that has reached the threshold by itself.

    Observations in favour of a whole node count for its GPUs; those against it accuse none of them.
    """
    by_gpu: dict[str, list[Observation]] = {}
    for_nodes: dict[str, list[Observation]] = {}
    for observation in observations:
        if observation.gpu:
            by_gpu.setdefault(observation.gpu, []).append(observation)
        elif observation.weight < 0:
            for_nodes.setdefault(observation.node, []).append(observation)
    scores = {}
    for gpu, held in sorted(by_gpu.items()):
        favours = [each for node in {one.node for one in held} for each in for_nodes.get(node, ())]
        weighed = weigh([*held, *favours], now, rules)
        scores[gpu] = math.fsum(entry.value for entry in weighed if entry.counts and entry.value > 0)
    return {gpu: score for gpu, score in scores.items() if score >= rules.threshold}


def worth_keeping(observations: Iterable[Observation], now: float, rules: Rules) -> list[Observation]:
    """All observations but those that change no node's state, now or later."""
    by_node: dict[str, list[Observation]] = {}
    for observation in observations:
        by_node.setdefault(observation.node, []).append(observation)
    return [each for held in by_node.values() for each in _worth_keeping_of_one(held, now, rules)]


def _worth_keeping_of_one(held: Sequence[Observation], now: float, rules: Rules) -> list[Observation]:
    weighed = weigh(held, now, rules)
    matters = [entry for entry in weighed if entry.value > FADED * rules.probation]
    oldest = min((entry.observation.at for entry in matters), default=math.inf)
    lifted = [entry for entry in weighed if entry.value < 0 and entry.observation.at >= oldest]
    # the weight that it lifted was shared by all observations of that time, faded since or not
    newest = max((entry.observation.at for entry in lifted), default=-math.inf)
    shared = [entry for entry in weighed if entry.observation.weight > 0 and entry.observation.at <= newest]
    return list(dict.fromkeys(entry.observation for entry in (*matters, *shared, *lifted)))
