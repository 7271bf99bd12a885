"""Whether saves keep failing: one that fails is tried again, many in a row mean that the run's work is at risk."""

from __future__ import annotations

from enum import Enum


class News(Enum):
    """The change since the last look."""

    NOTHING = "nothing"
    FAILED = "failed"
    """One more has failed; it will be tried again."""

    KEEP_FAILING = "keep failing"
    """So many in a row that the user should look; repeated each time their number has doubled."""

    WORK_AGAIN = "work again"
    """The first one that was done after KEEP_FAILING."""


class FailingSaves:
    """Counts failures in a row, from numbers that only grow while a process lives.

    Args:
        most: failures in a row that raise the alarm (``checkpoint.max_failed_saves``).
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._alarm_at = self._most
        self._failures = self._done = 0
        self.in_a_row = 0
        """Failures since the newest save that was done."""

    @property
    def is_alarming(self) -> bool:
        """Whether the user should look."""
        return self.in_a_row >= self._most

    def note(self, *, failures: int, done: int) -> News:
        """Take in how many saves of the process have failed, and how many were done."""
        new = max(0, failures - self._failures)
        was_alarming = self.is_alarming
        if done > self._done:
            self.in_a_row, self._alarm_at = 0, self._most
        self._failures, self._done = max(failures, self._failures), max(done, self._done)
        self.in_a_row += new
        if new and self.in_a_row >= self._alarm_at:
            while self._alarm_at <= self.in_a_row:
                self._alarm_at *= 2
            return News.KEEP_FAILING
        if was_alarming and not self.is_alarming:
            return News.WORK_AGAIN
        return News.FAILED if new else News.NOTHING
