"""Measurements and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: its values, and what is asked of it, if anything."""

    what: str
    values: Sequence[float] = ()
    digits: int = 2
    target: str = ""
    hit: bool | None = None
    note: str = ""
    """Stands in place of values that could not be measured."""

    def cells(self) -> list[str]:
        verdict = "" if self.hit is None else "hit" if self.hit else "**miss**"
        return [self.what, self.note or spread(self.values, self.digits), self.target, verdict]


@dataclass
class Table:
    """One part of the benchmark."""

    title: str
    unit: str
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        asked = any(row.target for row in self.rows)
        heads = ["", self.unit, "asked", ""] if asked else ["", self.unit]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [f"| {' | '.join(row.cells()[: len(heads)])} |" for row in self.rows]
        return "\n".join([f"## {self.title}", "", *lines, *(text for remark in self.remarks for text in ("", remark))])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median (min - max)``."""
    numbers = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return f"{numbers[0]} ({numbers[1]} - {numbers[2]})" if len(values) > 1 else numbers[0]
