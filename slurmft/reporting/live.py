"""What ``slurmft watch`` shows, as values: all runs of a folder, or one run with its ranks and newest events.

Everything in it comes from files that others may have written; the view makes it safe to show.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmft.operations.status import Overview, overviews
from slurmft.reporting.metrics import RunCounts
from slurmft.storage import run_folder
from slurmft.storage.journal import Entry, JournalTail
from slurmft.storage.run_folder import LiveView, RunFolder

KEPT_EVENTS = 500
SLURM_EVERY_S = 10.0
"""Slurm is asked no more often than this, however often the view is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One moment."""

    runs: Sequence[Overview]
    chosen: Overview | None = None
    """The run that is looked at closely; None: all are listed."""

    view: LiveView = field(default_factory=LiveView)
    events: Sequence[Entry] = ()
    """The newest events, oldest first."""

    span: str | None = None
    since: float | None = None
    replicas: Sequence[tuple[str, str]] = ()
    """Node and number of each replica that can answer."""

    problem: str = ""
    at: float = 0.0


class Watcher:
    """Looks at runs again and again; cheap: of a journal only what is new is read.

    Args:
        chosen: the run to look at closely; None: all of ``runs``.
    """

    def __init__(self, runs: Sequence[RunFolder], chosen: RunFolder | None) -> None:
        self._runs, self._chosen = [chosen] if chosen is not None else runs, chosen
        self._tail = None if chosen is None else JournalTail(chosen.path)
        self._counts, self._begun = RunCounts(), 0
        self._events: deque[Entry] = deque(maxlen=KEPT_EVENTS)
        self._seen: Sequence[Overview] = ()
        self._asked_s = -math.inf

    def look(self) -> Scene:
        """This moment."""
        if time.monotonic() - self._asked_s > SLURM_EVERY_S:
            self._seen, self._asked_s = overviews(self._runs), time.monotonic()
        if self._chosen is None or self._tail is None:
            return Scene(runs=self._seen, at=time.time())
        problem = ""
        try:
            for entry in self._tail.news():
                if self._tail.begun != self._begun:
                    self._counts, self._begun = RunCounts(), self._tail.begun
                    self._events.clear()
                self._counts.take((entry,))
                self._events.append(entry)
        except OSError as error:
            problem = f"the journal cannot be read: {error.strerror or error}"
        counts = self._counts
        return Scene(
            runs=self._seen, chosen=self._seen[0], view=run_folder.read(self._chosen.path), events=tuple(self._events),
            span=counts.span, since=counts.since, replicas=sorted(counts.ready_replicas), problem=problem,
            at=time.time(),
        )  # fmt: skip


def open_sections(view: LiveView) -> list[tuple[str, int, float]]:
    """Each section that is open: its name, in how many ranks, and the longest time; the longest first."""
    count: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for rank, name in enumerate(view.sections):
        if name:
            count[name] += 1
            held_s = (view.section_s[rank] if rank < len(view.section_s) else None) or 0.0
            longest[name] = max(longest.get(name, 0.0), held_s)
    return sorted(((name, count[name], longest[name]) for name in count), key=lambda each: (-each[2], each[0]))


LEVELS = 8


def heat(view: LiveView) -> list[int | None]:
    """For each rank how slow its steps are: 0 as fast as the fastest, 7 twice as slow as the median or more; None
    where that is not known."""
    known = sorted(each for each in view.step_s if each is not None and each > 0)
    if not known:
        return [None] * max(len(view.steps), len(view.step_s))
    low, median = known[0], known[len(known) // 2]
    span = max(2 * median - low, 0.1 * median)
    return [
        None if each is None else min(LEVELS - 1, max(0, int(LEVELS * (each - low) / span))) for each in view.step_s
    ]


def slowest(view: LiveView, count: int) -> list[tuple[int, float, str]]:
    """Rank, seconds of a step and node of the slowest ranks."""
    known = [(each, rank) for rank, each in enumerate(view.step_s) if each is not None]
    return [
        (rank, each, view.nodes[rank] if rank < len(view.nodes) else "")
        for each, rank in sorted(known)[: -count - 1 : -1]
    ]
