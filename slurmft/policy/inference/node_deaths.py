"""Which node is suspected when engines die: one where that happens again and again, while others work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

WINDOW_S = 3600.0
"""Deaths further apart have nothing to do with each other: an endpoint lives for weeks."""

DEATHS = 3
"""Of engines of one node in the window, without a request that explains them, before it is suspected."""

TIMES_OTHERS = 3
"""It has so many times the deaths of any other node: where all have them the engine is to blame, or its requests."""


@dataclass(frozen=True, slots=True)
class NodeDeaths:
    """Deaths of engines by node."""

    deaths: tuple[tuple[str, float], ...] = ()
    """Node and time, seconds; those within the window."""

    def died(self, node: str, now_s: float, *, in_flight: int) -> NodeDeaths:
        """One more. With a single request in flight that is more likely the request's fault."""
        kept = tuple(each for each in self.deaths if now_s - each[1] <= WINDOW_S)
        return NodeDeaths(kept if in_flight == 1 else (*kept, (node, now_s)))

    def forgiven(self, node: str) -> NodeDeaths:
        """Begin anew with this node, whose deaths have been held against it."""
        return NodeDeaths(tuple(each for each in self.deaths if each[0] != node))

    def suspect(self, nodes: Collection[str], now_s: float) -> str | None:
        """The node of ``nodes``, those that serve, that is suspected now; None without one, or without others."""
        counts = Counter(node for node, at_s in self.deaths if now_s - at_s <= WINDOW_S and node in nodes)
        if len(set(nodes)) < 2 or not counts:
            return None
        (node, most), *others = counts.most_common(2)
        second = others[0][1] if others else 0
        return node if most >= max(DEATHS, TIMES_OTHERS * second) else None
