"""Which rank stores which of the values that several ranks hold alike. Pure, so that all ranks agree without a word."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def spread(sizes_bytes: Sequence[int], holders: int) -> list[int]:
    """For each value the number of the holder that stores it, from 0; the same answer everywhere.

    Balanced: no holder gets more than the mean of all plus the largest single value. Values of equal size go round.

    Raises:
        ValueError: there is nobody to hold them, or a size is negative.
    """
    if holders < 1 or any(size < 0 for size in sizes_bytes):
        raise ValueError(f"{len(sizes_bytes)} values cannot be spread over {holders} holders")
    chosen = [0] * len(sizes_bytes)
    loads = [(0, 0, holder) for holder in range(holders)]  # bytes, values, holder: empty values are spread too
    # The largest first: what is small evens out at the end.
    for place in sorted(range(len(sizes_bytes)), key=lambda place: (-sizes_bytes[place], place)):
        load, count, holder = loads[0]
        heapq.heapreplace(loads, (load + sizes_bytes[place], count + 1, holder))
        chosen[place] = holder
    return chosen
