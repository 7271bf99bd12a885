"""How many requests a replica gets at a time: halved when it runs out of memory, raised again slowly."""

from __future__ import annotations

from dataclasses import dataclass, replace

RAISE_AFTER = 20
"""Requests that must end well, for each slot there is, before one slot is added."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP's congestion control."""

    limit: int
    """Never more than these; the configured concurrency."""

    now: int
    good: int = 0
    """Requests that ended well since the last change."""

    @classmethod
    def full(cls, limit: int) -> Slots:
        """As many as are configured."""
        return cls(limit=limit, now=limit)

    def out_of_memory(self) -> Slots:
        """Half as many, at least one."""
        return replace(self, now=max(1, self.now // 2), good=0)

    def ended_well(self, count: int = 1) -> Slots:
        """One slot more after ``RAISE_AFTER`` requests for each slot."""
        if self.now >= self.limit:
            return self
        good = self.good + count
        if good < RAISE_AFTER * self.now:
            return replace(self, good=good)
        return replace(self, now=self.now + 1, good=0)
