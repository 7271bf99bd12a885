"""Restarts of one replica: how many without a success, and after which pause."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Restarts:
    """A replica's failures since it last completed a request."""

    max_restarts: int
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    failures: int = 0

    def failed(self) -> Restarts:
        """One more end that the replica itself has to answer for."""
        return replace(self, failures=self.failures + 1)

    def counted(self, failures: int) -> Restarts:
        """With so many failures before."""
        return replace(self, failures=failures)

    def succeeded(self) -> Restarts:
        """It completed a request: the count begins anew."""
        return replace(self, failures=0) if self.failures else self

    @property
    def exhausted(self) -> bool:
        """It stays down."""
        return self.failures > self.max_restarts

    @property
    def delay_s(self) -> float:
        """Seconds before the next start: none after the first failure, then doubled each time up to the longest."""
        if self.failures <= 1:
            return 0.0
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(self.failures - 2, 30))
