"""How many replicas of an endpoint are to be on, by what its routers have to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What the configuration allows."""

    least: int
    most: int
    concurrency: int
    """Requests that a replica takes at a time."""

    idle_s: float
    """Fewer have to have been enough for so long before one is stopped."""

    def needed(self, requests: int) -> int:
        """So many that each request has a place, as far as there may be."""
        return min(self.most, max(self.least, math.ceil(requests / self.concurrency)))


@dataclass(frozen=True, slots=True)
class Scale:
    """What is wanted now, and what would have been enough lately."""

    wanted: int
    reason: str = ""
    since_s: float | None = None
    """Since when fewer would have been enough; None while they would not."""

    enough: int = 0
    """The most that were needed since then."""

    def saw(self, requests: int | None, bounds: Bounds, now_s: float) -> Scale:
        """What is wanted while so many requests wait or are worked on; None: not known, and nothing is stopped.

        It grows at once, and becomes no smaller than what was needed at any time of the last ``idle_s``.
        """
        if requests is None:
            return replace(self, since_s=None)
        needed = bounds.needed(requests)
        if needed > self.wanted:
            return Scale(needed, f"{requests} requests")
        if needed == self.wanted:
            return replace(self, since_s=None)
        if self.since_s is None:
            return replace(self, since_s=now_s, enough=needed)
        enough = max(self.enough, needed)
        if now_s - self.since_s < bounds.idle_s:
            return replace(self, enough=enough)
        return Scale(enough, f"no more were needed for {bounds.idle_s:g} s")
