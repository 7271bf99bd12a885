"""Sleeping, and detecting a suspension meanwhile."""

from __future__ import annotations

import asyncio
import time


async def overslept_s(pause_s: float) -> float:
    """Sleep for ``pause_s``; returns by how many seconds it was too long, 0 where that is not worth mentioning.

    A suspended process wakes up where it was, and must not blame another process for the silence meanwhile.
    """
    before = time.monotonic()
    await asyncio.sleep(pause_s)
    asleep_s = time.monotonic() - before - pause_s
    return asleep_s if asleep_s > pause_s else 0.0
