"""An endpoint with too few replicas does less for each request, instead of failing all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

BACK_ABOVE = 1.2
"""Degradation ends at this multiple of the share at which it begins: a replica that comes and goes changes nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms for requests at the moment."""

    degraded: bool
    concurrency: int
    """Requests at a time for each replica."""

    timeout_factor: float
    """Of time limits that the client has not chosen itself."""


@dataclass(frozen=True, slots=True)
class GracefulDegradation:
    """Degrades below a share of the capacity, and comes back with hysteresis.

    Args:
        below: share of the expected replicas; with fewer that are ready the endpoint is degraded. 0: never.
        concurrency: requests at a time for each replica, when all is well.
    """

    below: float = 0.5
    concurrency: int = 32
    degraded: bool = False

    def saw(self, ready: int, expected: int) -> GracefulDegradation:
        """The state when so many replicas of those expected are ready."""
        share = ready / expected if expected else 1.0
        limit = min(1.0, self.below * BACK_ABOVE) if self.degraded else self.below
        return replace(self, degraded=share < limit)

    @property
    def terms(self) -> Terms:
        """For requests from now on."""
        if self.degraded:
            return Terms(degraded=True, concurrency=max(1, self.concurrency // 2), timeout_factor=2.0)
        return Terms(degraded=False, concurrency=self.concurrency, timeout_factor=1.0)
