"""An endpoint with too few replicas does less for each request, instead of failing all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from slurmft.policy.inference.continuation import PATHS, is_count

BACK_ABOVE = 1.2
"""Degradation ends at this multiple of the share at which it begins: a replica that comes and goes changes nothing."""


def cheaper(path: str, body: bytes, max_tokens: int | None, model: str | None) -> bytes:
    """A request for a completion or a chat with these limits; any other body as it is."""
    try:
        request = json.loads(body) if path in PATHS else None
    except (ValueError, RecursionError):
        return body
    if not isinstance(request, dict):
        return body
    if max_tokens is not None:
        asked = [name for name in ("max_tokens", "max_completion_tokens") if request.get(name) is not None]
        for name in (*(asked or ["max_tokens"]), *(["min_tokens"] if "min_tokens" in request else [])):
            if is_count(now := request.get(name)) or now is None:  # else the engine refuses it
                request[name] = max_tokens if now is None else min(now, max_tokens)
    return json.dumps(request if model is None else {**request, "model": model}).encode()


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
