"""Whether a node's replicas still work, and whether one that does not is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurmft.policy.inference import Restarts

SUSPECTED = 0.5
"""Of the time that counts as a hang."""


@dataclass(slots=True)
class Watched:
    """One life of a replica."""

    since_s: float
    """When it was started or made progress; moved on by the time in which it had nothing to do."""

    idle_s: float | None = None
    """Since when it has nothing to do."""

    ready: bool = False
    in_flight: int = 0
    patience: float = 1.0
    """By how much longer than ``hang_timeout_s`` the requests that it has may take."""

    asked_s: float | None = None
    """Since when it is to answer the smallest request there is."""

    worked: bool = False
    """It has made progress in this life."""


class WorkerHealthMonitor:
    """Judges replicas by progress, not by a health page: engines answer 200 while they hang.

    Progress is a byte of an answer or a new token. That a request has begun, or that its client has given up, is none:
    while there are requests the time without progress adds up. Half of it makes a suspect, which is to answer the
    smallest request; where it does, it lives, and what takes so long is a request. All times are seconds of one
    monotonic clock.

    Args:
        hang_timeout_s: without progress while requests are in flight.
        startup_timeout_s: from the start until it is ready.
    """

    def __init__(self, *, hang_timeout_s: float, startup_timeout_s: float) -> None:
        self._hang_s, self._startup_s = hang_timeout_s, startup_timeout_s
        self._watched: dict[int, Watched] = {}

    def started(self, replica: int, now_s: float) -> None:
        """Its process was started."""
        self._watched[replica] = Watched(now_s)

    def ready(self, replica: int, now_s: float) -> None:
        """It takes requests from now on."""
        if (watched := self._watched.get(replica)) is not None:
            watched.ready, watched.since_s, watched.idle_s = True, now_s, now_s

    def holds(self, replica: int, more: int, now_s: float) -> None:
        """It has so many more requests, or fewer."""
        if (watched := self._watched.get(replica)) is not None:
            watched.in_flight = max(0, watched.in_flight + more)
            self._settle(watched, now_s)

    def progressed(self, replica: int, now_s: float) -> None:
        """It made a token, sent a byte of an answer, or answered the smallest request."""
        if (watched := self._watched.get(replica)) is not None:
            watched.since_s, watched.asked_s, watched.idle_s, watched.worked = now_s, None, None, True
            self._settle(watched, now_s)

    def waits_for(self, replica: int, patience: float) -> None:
        """The largest request that it has may take so many times as long as an ordinary one."""
        if (watched := self._watched.get(replica)) is not None:
            watched.patience = patience

    def gone(self, replica: int) -> Watched:
        """It has ended; returns what was known of it."""
        return self._watched.pop(replica, None) or Watched(0.0)

    def asleep(self, seconds: float) -> None:
        """This process itself was stopped for so long, and could not see progress."""
        for watched in self._watched.values():
            watched.since_s += seconds
            watched.idle_s = None if watched.idle_s is None else watched.idle_s + seconds
            watched.asked_s = None if watched.asked_s is None else watched.asked_s + seconds

    def suspects(self, now_s: float) -> list[int]:
        """Replicas that are to answer the smallest request now."""
        found = []
        for replica, watched in self._watched.items():
            silent_s = self._silent_s(watched, now_s)
            if watched.ready and watched.asked_s is None and silent_s > self._hang_s * watched.patience * SUSPECTED:
                watched.asked_s = now_s
                found.append(replica)
        return found

    def overdue(self, now_s: float) -> dict[int, str]:
        """Replicas that hang, or do not become ready, and why."""
        found = {}
        for replica, watched in self._watched.items():
            silent_s, left_s = self._silent_s(watched, now_s), self._hang_s * watched.patience * (1 - SUSPECTED)
            if not watched.ready and silent_s > self._startup_s:
                found[replica] = f"not ready {silent_s:.1f} s after its start (inference.startup_timeout_s)"
            elif watched.asked_s is not None and now_s - watched.asked_s > left_s:
                found[replica] = (
                    f"no byte of an answer and no token for {silent_s:.1f} s with {watched.in_flight} in flight "
                    f"(inference.hang_timeout_s{f' times {watched.patience:.1f}' if watched.patience > 1 else ''})"
                )
        return found

    def _silent_s(self, watched: Watched, now_s: float) -> float:
        """Seconds without progress while there was something to do."""
        return (now_s if watched.idle_s is None else watched.idle_s) - watched.since_s

    def _settle(self, watched: Watched, now_s: float) -> None:
        """Let the time run while it has something to do, and only then."""
        is_busy = watched.in_flight > 0 or watched.asked_s is not None
        if is_busy and watched.idle_s is not None:
            watched.since_s += now_s - watched.idle_s
            watched.idle_s = None
        elif not is_busy and watched.idle_s is None:
            watched.idle_s = now_s


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
