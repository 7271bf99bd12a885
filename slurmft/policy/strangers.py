"""Connections that have not authenticated yet: how many may wait, and which one is closed when there are too many."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")


class Strangers(Generic[T]):
    """The connections that wait for their proof, in the order of their arrival.

    One that has proved itself is taken off the list (``forget``) and never closed for another one's sake. Of the
    others the oldest goes: of its own address first, and then of the address that has the most, so that one address
    never takes the places of another.

    Args:
        at_most: how many may wait in all; at least 1.
        per_address: how many of one address. An IPv6 network of 64 bits counts as one address.
    """

    def __init__(self, at_most: int, per_address: int) -> None:
        self._at_most, self._per_address = at_most, per_address
        self._waiting: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, connection: T, address: str) -> list[T]:
        """Take in a new connection; returns those to close for it, which are forgotten."""
        group = _group_of(address)
        self._waiting[connection] = group
        closed = []
        if list(self._waiting.values()).count(group) > self._per_address:
            closed.append(self._drop_oldest(group))
        if len(self._waiting) > self._at_most:
            counts = Counter(self._waiting.values())
            closed.append(self._drop_oldest(max(counts, key=lambda each: counts[each])))  # of equals, the oldest
        return closed

    def drop_oldest(self) -> list[T]:
        """The connection to close where there is no room at all; none where none waits."""
        return [self._drop_oldest(next(iter(self._waiting.values())))] if self._waiting else []

    def forget(self, connection: T) -> None:
        """It has proved itself, or is closed."""
        self._waiting.pop(connection, None)

    def _drop_oldest(self, group: str) -> T:
        oldest = next(each for each, its_group in self._waiting.items() if its_group == group)
        del self._waiting[oldest]
        return oldest


def _group_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
