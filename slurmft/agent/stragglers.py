"""The agent's side of straggler detection: at the end of each window, numbers from its workers' timing pages."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Protocol

from slurmft.ipc.pages.timing_page import TimingPage
from slurmft.ipc.reports import RankTimings, TimingsReport

MIN_SAMPLES = 3
"""Where a window holds fewer, older ones are added: steps may be as long as a window."""

RANKS_PER_MESSAGE = 32
"""A message must fit into a line of the control channel, also with long names of sections."""


class Measured(Protocol):
    """A worker as this module needs it."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def timings(self) -> TimingPage | None:
        """Its page; None where timings are switched off."""


class TimingReports:
    """Cuts time into windows and reports what each worker measured in them."""

    def __init__(self, interval_s: float, began_s: float) -> None:
        self._interval_s, self._began_s = interval_s, began_s
        self._window = 0
        self._taken: dict[int, dict[str, int]] = {}

    def due(self, workers: Sequence[Measured], now_s: float) -> Iterator[TimingsReport]:
        """The messages of the window that has ended, none before its end. A window that was slept through is left out.

        ``now_s`` is of the clock that ``began_s`` was of.
        """
        window = int((now_s - self._began_s) / self._interval_s)
        if window <= self._window:
            return
        self._window = window
        facts = [found for worker in workers if (found := self._facts(worker)) is not None]
        for first in range(0, len(facts), RANKS_PER_MESSAGE):
            yield TimingsReport(window=window, ranks=tuple(facts[first : first + RANKS_PER_MESSAGE]))

    def _facts(self, worker: Measured) -> RankTimings | None:
        page = worker.timings
        if page is None:
            return None
        counts = page.counts()  # before the durations: one that comes in between is sent twice, rather than lost
        durations = page.newest(self._taken.get(worker.rank, {}), MIN_SAMPLES)
        self._taken[worker.rank] = counts
        sections = tuple(
            (name, statistics.median(values) / 1e9, len(values)) for name, values in durations.items() if values
        )
        return RankTimings(rank=worker.rank, role=page.role, device=page.device, sections=sections)
