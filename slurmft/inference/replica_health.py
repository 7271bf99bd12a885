"""Whether a node's replicas still work, and whether one that does not is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurmft.policy.inference.restarts import Restarts


@dataclass(slots=True)
class _Watched:
    since_s: float
    """When it was started, last completed something, or had nothing to do; what comes last."""

    ready: bool = False
    in_flight: int = 0


class WorkerHealthMonitor:
    """Judges replicas by progress, not by a health page: engines answer 200 while they hang.

    Progress is a completed request or a new token. A replica without a request in flight cannot hang. All times are
    seconds of one monotonic clock.

    Args:
        hang_timeout_s: without progress while requests are in flight.
        startup_timeout_s: from the start until it is ready.
    """

    def __init__(self, *, hang_timeout_s: float, startup_timeout_s: float) -> None:
        self._hang_s, self._startup_s = hang_timeout_s, startup_timeout_s
        self._watched: dict[int, _Watched] = {}

    def started(self, replica: int, now_s: float) -> None:
        """Its process was started."""
        self._watched[replica] = _Watched(now_s)

    def ready(self, replica: int, now_s: float) -> None:
        """It takes requests from now on."""
        if replica in self._watched:
            self._watched[replica].ready, self._watched[replica].since_s = True, now_s

    def dispatched(self, replica: int, count: int, now_s: float) -> None:
        """It got ``count`` more requests."""
        if (watched := self._watched.get(replica)) is not None:
            if not watched.in_flight:
                watched.since_s = now_s
            watched.in_flight += count

    def progressed(self, replica: int, now_s: float, *, completed: int = 0) -> None:
        """It made a token, or completed requests."""
        if (watched := self._watched.get(replica)) is not None:
            watched.since_s = now_s
            watched.in_flight = max(0, watched.in_flight - completed)

    def gone(self, replica: int) -> None:
        """It has ended."""
        self._watched.pop(replica, None)

    def asleep(self, seconds: float) -> None:
        """This process itself was stopped for so long, and could not see progress."""
        for watched in self._watched.values():
            watched.since_s += seconds

    def overdue(self, now_s: float) -> dict[int, str]:
        """Replicas that hang, or do not become ready, and why."""
        found = {}
        for replica, watched in self._watched.items():
            silent_s = now_s - watched.since_s
            if not watched.ready and silent_s > self._startup_s:
                found[replica] = f"not ready {silent_s:.1f} s after its start (inference.startup_timeout_s)"
            elif watched.ready and watched.in_flight and silent_s > self._hang_s:
                found[replica] = (
                    f"no completed request and no token for {silent_s:.1f} s with {watched.in_flight} in flight "
                    "(inference.hang_timeout_s)"
                )
        return found


class AutoRestartManager:
    """Restarts of a node's replicas: each has ``max_restarts`` without a completed request in between.

    Args:
        window_s: count the failures of so many seconds instead, whatever was completed in between: an engine that
            answers a while and dies again and again is no endpoint.
    """

    def __init__(
        self, max_restarts: int = 3, *, first_delay_s: float = 1.0, longest_delay_s: float = 30.0,
        window_s: float | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._fresh = Restarts(max_restarts, first_delay_s, longest_delay_s)
        self._restarts: dict[int, Restarts] = {}
        self._window_s, self._clock = window_s, clock
        self._failed_at: dict[int, list[float]] = {}

    def failed(self, replica: int) -> float | None:
        """It has ended without being asked to: seconds until its next start, or None when it stays down."""
        now = self._restarts.get(replica, self._fresh)
        if self._window_s is not None:
            since_s = self._clock() - self._window_s
            recent = [each for each in self._failed_at.get(replica, []) if each > since_s]
            self._failed_at[replica] = [*recent, self._clock()]
            now = now.counted(len(recent))
        self._restarts[replica] = now = now.failed()
        return None if now.exhausted else now.delay_s

    def failures(self, replica: int) -> int:
        """Failures without a completed request since, or in the window."""
        return self._restarts.get(replica, self._fresh).failures

    def succeeded(self, replica: int) -> None:
        """It completed a request."""
        if replica in self._restarts and self._window_s is None:
            self._restarts[replica] = self._restarts[replica].succeeded()
