"""When to save periodically, and when to try again after a save that failed. Pure, and the same on all ranks."""

from __future__ import annotations

RETRIES_PER_INTERVAL = 8


class SaveSchedule:
    """Every ``interval_steps`` (0: never); after a failure sooner, and from failure to failure later again."""

    def __init__(self, interval_steps: int, start: int) -> None:
        self._interval, self._start = interval_steps, start
        self._retry_at: int | None = None
        self._pause = 0

    def is_due(self, step: int) -> bool:
        """Whether a save is due before ``step`` begins."""
        if not self._interval or step <= self._start:
            return False
        return step % self._interval == 0 or (self._retry_at is not None and step >= self._retry_at)

    def done(self, step: int, *, worked: bool) -> None:
        """Take in how the save at ``step`` went."""
        if worked:
            self._retry_at, self._pause = None, 0
            return
        shortest = max(1, self._interval // RETRIES_PER_INTERVAL)
        self._pause = min(max(shortest, 2 * self._pause), self._interval)
        self._retry_at = step + self._pause
