"""Waits for a condition, not for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WITHIN_S = 60.0


def until(condition: Callable[[], object], within_s: float = WITHIN_S, what: str = "it") -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
