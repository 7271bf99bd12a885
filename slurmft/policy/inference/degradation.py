"""An endpoint with too few replicas does less for each request, instead of failing all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from slurmft.policy.inference.continuation import is_count

BACK_ABOVE = 1.2
"""Degradation ends at this multiple of the share at which it begins: a replica that comes and goes changes nothing."""


LIMITS = {
    "/v1/completions": ("max_tokens",), "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",), "/v1/messages": ("max_tokens",),
}  # fmt: skip
"""What limits the tokens of an answer, by the request's path; the first one where none is given."""


def cheaper(path: str, body: bytes, max_tokens: int | None, model: str | None) -> tuple[bytes, str]:
    """A request for an answer with these limits, and what is another than it asked for; any other body as it is."""
    try:
        request = json.loads(body) if path in LIMITS else None
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        return body, ""
    now = dict(request)
    if max_tokens is not None:
        asked = [name for name in LIMITS[path] if request.get(name) is not None]
        for name in (*(asked or LIMITS[path][:1]), *(["min_tokens"] if "min_tokens" in request else [])):
            if is_count(given := request.get(name)) or given is None:  # else the engine refuses it
                now[name] = max_tokens if given is None else min(given, max_tokens)
    if model is not None:
        now["model"] = model
    told = ", ".join(f"{name}={value}" for name, value in sorted(now.items()) if value != request.get(name))
    return (json.dumps(now).encode(), told) if told else (body, "")


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
