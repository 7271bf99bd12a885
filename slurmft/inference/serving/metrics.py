"""What a router counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slurmft.system.exposition import registry_text

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Counted(Protocol):
    """What changes by itself."""

    in_flight: int

    @property
    def degraded(self) -> bool:
        """Too few replicas are ready."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica."""

    @property
    def ready(self) -> int:
        """Replicas in the rotation."""

    @property
    def expected(self) -> int:
        """Replicas that there should be."""


class Metrics:
    """One router's counters."""

    def __init__(self, router: Counted) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._answered = Counter("slurmft_requests_answered", "Answers of engines", ["status"], registry=registry)
        self._failed = Counter("slurmft_requests_failed", "Requests without a whole answer", ["why"], registry=registry)
        self._refused = Counter("slurmft_requests_refused", "Requests refused at once", ["why"], registry=registry)
        self._again = Counter("slurmft_tries_again", "Further tries of requests", ["why"], registry=registry)
        self._seconds = Histogram("slurmft_request_seconds", "From admission to the end of the answer",
                                  buckets=SECONDS, registry=registry)  # fmt: skip
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "slurmft_requests_in_flight": ("Requests that are not answered yet", lambda: router.in_flight),
            "slurmft_requests_waiting": ("Requests that wait for a replica", lambda: router.waiting),
            "slurmft_replicas_ready": ("Replicas in the rotation", lambda: router.ready),
            "slurmft_replicas_expected": ("Replicas that there should be", lambda: router.expected),
            "slurmft_degraded": ("1 while too few replicas are ready", lambda: float(router.degraded)),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)

    def answered(self, status: int, seconds: float) -> None:
        """An engine's answer has gone to the client."""
        self._answered.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def failed(self, why: str) -> None:
        """A request ended without a whole answer."""
        self._failed.labels(why).inc()

    def refused(self, why: str) -> None:
        """A request was refused at once."""
        self._refused.labels(why).inc()

    def tried_again(self, why: str) -> None:
        """A request is tried again."""
        self._again.labels(why).inc()

    def answer(self, accept: str) -> tuple[bytes, str]:
        """All of them, and the content type: OpenMetrics where ``accept``, the scrape's header, asks for that."""
        return registry_text(self._registry, accept)
