"""Waits for a condition, not for a time."""

import asyncio
import os
import time
from collections.abc import Callable

WITHIN_S = 60.0
PER_CORE = 4.0
"""Busy processes for each core under which the limits of tests hold: with five workers there are as many."""

SLOWEST = 6.0


def slowness() -> float:
    """By how much waits of tests are longer now: 1, or more where the machine has more to do than tests bring along."""
    return min(max(1.0, os.getloadavg()[0] / (PER_CORE * (os.cpu_count() or 1))), SLOWEST)


def until(condition: Callable[[], object], within_s: float = WITHIN_S, what: str = "it") -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within_s * slowness(), f"{what}: not within {within_s:g} s"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s * slowness()):
        while not condition():
            await asyncio.sleep(0.005)
