"""Tries of one request: exponential backoff with jitter, and what the engine itself asks for."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")
Answer = dict[str, Any]
"""``{"response": {"status_code": ..., "body": ...}}``, or ``{"error": {"code": ..., "message": ...}}``."""

MAX_TOLD = 2000
"""Characters of an error that are kept."""


class Again(Exception):
    """A try has failed in a way that the next one may not.

    Args:
        after_s: seconds that the other side asks for; None: the schedule's.
    """

    def __init__(self, why: str, *, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


class OutOfMemory(Again):
    """A try failed for want of memory."""


@dataclass(frozen=True, slots=True)
class RetryManager:
    """Tries again after ``Again``: ``base_delay_s`` doubled each time, at most ``max_delay_s``, with jitter."""

    max_retries: int = 3
    base_delay_s: float = 1.0
    max_delay_s: float = 30.0

    async def call(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of ``work``.

        Raises:
            Again: of the last try, when there is none left.
            Exception: any other error of ``work``, at once.
        """
        for failed in itertools.count(1):
            try:
                return await work()
            except Again as error:
                if failed > self.max_retries:
                    raise
                pause_s = self._pause_s(failed, error)
            await asyncio.sleep(pause_s)
        raise AssertionError("the count has no end")

    def _pause_s(self, failed: int, error: Again) -> float:
        if error.after_s is not None:
            return min(error.after_s, self.max_delay_s)
        jitter_s = random.uniform(0, self.base_delay_s)  # noqa: S311 - spreads load, keeps no secret
        return min(self.max_delay_s, self.base_delay_s * 2.0 ** min(failed - 1, 60) + jitter_s)
