"""Spans of time on a GPU, by events in its stream, read when they are over, without a wait."""

from __future__ import annotations

from collections.abc import Iterator

from slurmft.trainer.streams import Device

AHEAD = 8
"""Spans that may be under way: the host runs ahead of its GPU. With more, spans are left out until some are over."""


class DeviceSpans:
    """Spans from ``begin`` to ``end``, less one wait in between. One at a time is open."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events = [[device.event(timed=True) for _ in range(4)] for _ in range(AHEAD)]
        self._free = list(range(AHEAD))
        self._under_way: list[tuple[int, bool]] = []
        self._open: int | None = None
        self._waits = 0

    def begin(self) -> None:
        """Open a span; one that is still open is given up. None of its events may be part of a graph."""
        if self._open is not None:
            self._free.append(self._open)
        self._open = self._free.pop() if self._free else None
        self._waits = 0
        self._record(0)

    def wait_begins(self) -> None:
        """Open the wait."""
        if self._waits == 0 and not self._device.is_capturing():
            self._record(1)
            self._waits = 1

    def wait_ends(self) -> None:
        """Close the wait."""
        if self._waits == 1 and not self._device.is_capturing():
            self._record(2)
            self._waits = 2

    def end(self) -> None:
        """Close the span; while a graph is captured, nothing: it would time the capture, and then never again."""
        if self._device.is_capturing():
            return
        self._record(3)
        if self._open is not None:
            self._under_way.append((self._open, self._waits == 2))
            self._open = None

    def finished(self) -> Iterator[int]:
        """Nanoseconds of the spans that the GPU has done, oldest first; each once."""
        while self._under_way and self._events[self._under_way[0][0]][3].query():
            slot, waited = self._under_way.pop(0)
            begin, wait_begins, wait_ends, end = self._events[slot]
            milliseconds = begin.elapsed_time(end) - (wait_begins.elapsed_time(wait_ends) if waited else 0.0)
            self._free.append(slot)
            yield int(milliseconds * 1e6)

    def _record(self, which: int) -> None:
        if self._open is not None:
            self._events[self._open][which].record()
