"""Tries of one request: exponential backoff with jitter, and what the engine itself asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

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
        try:
            return await work()  # a request that succeeds, as nearly all do, pays nothing for the retries
        except Again as error:
            failed = [error]

        async def next_try() -> Result:
            if failed:
                raise failed.pop()
            return await work()

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.max_retries + 1),
            wait=self._wait,
            retry=retry_if_exception_type(Again),
            sleep=asyncio.sleep,
            reraise=True,
        )
        return await retrying(next_try)

    def _wait(self, state: RetryCallState) -> float:
        error: Any = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, Again) and error.after_s is not None:
            return min(error.after_s, self.max_delay_s)
        spaced = wait_exponential(multiplier=self.base_delay_s, max=self.max_delay_s)
        return min(self.max_delay_s, float(spaced(state)) + float(wait_random(0, self.base_delay_s)(state)))
