"""Which part of a stored piece goes where in the piece that a rank needs. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a whole tensor: where it begins in each dimension, and its sizes."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Of its values."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None where they have nothing in common."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    def run_of(self, part: Box) -> int | None:
        """At which of this box's values, row by row, ``part`` begins; None where they do not follow each other."""
        if not _is_run(part.sizes, self.sizes):
            return None
        offset = 0
        for start, own_start, own_size in zip(part.starts, self.starts, self.sizes, strict=True):
            offset = offset * own_size + start - own_start
        return offset

    def slices(self, part: Box) -> tuple[slice, ...]:
        """Where in this box ``part`` lies."""
        return tuple(
            slice(start - own, start - own + size)
            for start, own, size in zip(part.starts, self.starts, part.sizes, strict=True)
        )


def _is_run(part: Sequence[int], whole: Sequence[int]) -> bool:
    place = len(whole)
    while place and part[place - 1] == whole[place - 1]:
        place -= 1
    # The innermost dimension that is cut may have any size; whatever is outside of it must be a single row.
    return all(size == 1 for size in part[: max(place - 1, 0)])
