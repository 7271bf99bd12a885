"""How much of an exclusion list a request can spare: the weakest suspicion is dropped first."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum


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
class Place:
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


def choose(
    candidates: Sequence[Candidate],
    places: Sequence[Place],
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
