"""A run's time as a strip of coloured pieces, as many as can be seen, however many intervals there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slurmft.reporting.times import Account, Category, Interval, Mark

COLUMNS = 1000
"""Columns of a picture; what is narrower than one could not be seen."""

DENSE = 400
"""With more intervals than this, one colour a column would hide all that is short: columns are stacked instead."""

WIDE = 8
"""Columns of a stack."""

HEIGHT = 46


class Piece(NamedTuple):
    """A rectangle of one category, in columns and in units of HEIGHT."""

    x: int
    y: float
    width: int
    height: float
    category: Category


class Tick(NamedTuple):
    """Marks of one kind that fall into the same column."""

    x: int
    kind: str
    text: str
    number: int


def is_dense(account: Account) -> bool:
    """Whether the strip shows shares of each stretch of time, instead of what happened one after the other."""
    return len(account.intervals) > DENSE


def pieces_of(account: Account) -> list[Piece]:
    """The strip, from the beginning of what is kept to the end."""
    width = WIDE if is_dense(account) else 1
    found = list[Piece]()
    for column, shares in enumerate(_shares(account, COLUMNS // width)):
        if width == 1:
            category = max(shares, key=lambda each: shares[each])
            if found and found[-1].category is category:
                found[-1] = found[-1]._replace(width=found[-1].width + 1)
            else:
                found.append(Piece(column, 0, 1, HEIGHT, category))
            continue
        y, whole = float(HEIGHT), sum(shares.values())
        for category in Category:
            if (height := round(HEIGHT * shares.get(category, 0.0) / whole, 1)) > 0:
                y = round(max(0.0, y - height), 1)
                found.append(Piece(column * width, y, width, height, category))
    return found


def _shares(account: Account, columns: int) -> Iterator[dict[Category, float]]:
    """For each column, the seconds of its categories."""
    begin_s, intervals, at = _begin(account), list(account.intervals), 0
    column_s = (account.end_s - begin_s) / columns
    for column in range(columns if column_s > 0 else 0):
        low_s, high_s = begin_s + column * column_s, begin_s + (column + 1) * column_s
        while at < len(intervals) - 1 and intervals[at].end_s <= low_s:
            at += 1
        yield _within(intervals, at, low_s, high_s)


def _within(intervals: Sequence[Interval], at: int, low_s: float, high_s: float) -> dict[Category, float]:
    shares: dict[Category, float] = {}
    while at < len(intervals) and intervals[at].begin_s < high_s:
        begin_s, end_s, category = intervals[at]
        shares[category] = shares.get(category, 0.0) + max(0.0, min(end_s, high_s) - max(begin_s, low_s))
        at += 1
    return shares if sum(shares.values()) > 0 else {Category.UNKNOWN: 1.0}


def ticks_of(account: Account) -> list[Tick]:
    """Faults, saves and stops above the strip; those of one column are one tick with their number."""
    begin_s = _begin(account)
    span_s = account.end_s - begin_s
    if span_s <= 0:
        return []
    found: dict[tuple[int, str], Tick] = {}
    width = WIDE if is_dense(account) else 1
    for mark in account.marks:
        if begin_s <= mark.at_s <= account.end_s:
            column = min(COLUMNS - 1, int((mark.at_s - begin_s) / span_s * COLUMNS))
            _count(found, column // width * width, mark)
    return sorted(found.values())


def _count(found: dict[tuple[int, str], Tick], column: int, mark: Mark) -> None:
    old = found.get((column, mark.kind))
    tick = Tick(column, mark.kind, mark.text[:80], 1)
    found[column, mark.kind] = tick if old is None else old._replace(number=old.number + 1)


def _begin(account: Account) -> float:
    """Where the strip begins: intervals older than those that are kept are in the sums alone."""
    return account.intervals[0].begin_s if account.intervals else account.begin_s
