"""After an attempt that ran out of memory: the same global batch, in smaller pieces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurmft.policy.verdicts.verdict import Cause

OUT_OF_MEMORY = frozenset({Cause.DEVICE_OUT_OF_MEMORY, Cause.HOST_OUT_OF_MEMORY})

MAX_DIVISOR = 2**30
"""More than any micro-batch has samples; larger numbers in a damaged journal are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Smaller:
    """The next start computes each of its micro-batches in this many pieces."""

    divisor: int
    micro_batches: tuple[int, ...]
    """Samples of each, after that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Irreducible:
    """No smaller pieces are possible, or allowed."""

    reason: str


def pieces(micro_batch: int, at_least: int) -> int:
    """The smallest number of equal pieces, ``at_least`` so many, that ``micro_batch`` samples can be cut into.

    As many as there are samples where it has fewer. 12 samples: 1, 2, 4, 12 when it is doubled each time.
    """
    small = [number for number in range(1, math.isqrt(micro_batch) + 1) if micro_batch % number == 0]
    divisors = [*small, *(micro_batch // number for number in small)]
    return min((number for number in divisors if number >= at_least), default=micro_batch)


def smaller(asked: Collection[int], *, divisor: int, min_batch: int) -> Smaller | Irreducible:
    """At least twice as many pieces as ``divisor``, such that all that was ``asked`` for stays exact.

    Args:
        asked: the micro-batches that the trainer has asked for; not empty, all positive.
        divisor: the one in force.
        min_batch: samples below which no micro-batch may go.
    """
    largest = max(asked)
    cut = pieces(largest, divisor)
    now = [size // pieces(size, cut) for size in sorted(asked)]
    words = f"the micro-batch of {' and '.join(map(str, now))} sample{'s' * (now != [1])}"
    if cut == largest:
        return Irreducible(reason=f"{words} cannot be made smaller")
    wanted = pieces(largest, 2 * cut)
    after = [size // pieces(size, wanted) for size in sorted(asked)]
    if below := [size for size, before in zip(after, now, strict=True) if size < min_batch and size != before]:
        return Irreducible(reason=f"{words} could next be {below[0]}, below oom.min_batch={min_batch}")
    return Smaller(divisor=wanted, micro_batches=tuple(after))


def divisor_in(values: Iterable[object]) -> int:
    """The divisor in force after these, oldest first, as a journal has them; invalid values are skipped."""
    divisor = 1
    for value in values:
        if type(value) is int and 1 <= value <= MAX_DIVISOR:
            divisor = value
    return divisor
