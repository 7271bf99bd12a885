"""How fast an attempt is, from its ranks' reports: steps, saves, and how long a stop takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurmft.ipc.worker_facts import WorkerFacts
from slurmft.storage.history.timings import MAX_COSTS, MAX_SAVES, Timings

SUSPENDED_S = 10.0
"""Agents report twice a second: after such a silence the job may have been suspended, and times in it are false."""

REPORTS_S = 2.0
"""A silence is longer than what caused it by up to this: reports and their way."""


class Measurements:
    """Keeps the extremes of what the ranks of one attempt report. All times are of this machine's monotonic clock."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._heard_s: float | None = None
        self._still_s = 0.0
        self._false_from_s = math.inf
        """Discard times that include a suspension of the job."""

        self._first_step_s = self._longest_step_s = 0.0
        self._saves_s: dict[int, float] = {}
        self._cost_s = 0.0
        self._costs_s: list[float] = []
        self._unfinished_s: dict[int, float] = {}
        self._saved_at_s: dict[int, float] = {}
        self._steps_from: tuple[float, int] | None = None
        self._steps_to: tuple[float, int] | None = None
        self._start_s: float | None = None

    def note(self, ranks: Sequence[WorkerFacts], now_s: float) -> None:
        """Take in one agent's report."""
        self._note_silence(now_s)
        for facts in ranks:
            self._first_step_s = max(self._first_step_s, self._believed(facts.first_step_s))
            self._longest_step_s = max(self._longest_step_s, self._believed(facts.longest_step_s))
            self._note_saves(facts, now_s)
        step = max((facts.step for facts in ranks), default=0)
        if self._steps_from is not None and step > (self._steps_to or self._steps_from)[1]:
            self._steps_to = now_s - self._still_s, step

    def first_step_done(self, step: int, now_s: float) -> None:
        """Every rank has done its first step; the newest is ``step``."""
        self._start_s = now_s - self._began_s - self._still_s
        self._steps_from = now_s - self._still_s, step

    def timings(self) -> Timings:
        """All of it, to be kept."""
        return Timings(
            longest_step_s=_rounded(self._longest_step_s),
            first_step_s=_rounded(self._first_step_s),
            start_s=_rounded(self._start_s),
            step_s=_rounded(self._mean_step_s()),
            saves_s=tuple(round(seconds, 3) for seconds in tuple(self._saves_s.values()) if seconds),
            unfinished_save_s=_rounded(self.unfinished_save_s),
            costs_s=tuple(round(seconds, 4) for seconds in tuple(self._costs_s) if seconds),
        )

    def seconds_to_save(self, since_s: float) -> float | None:
        """From ``since_s`` until the newest save had been done by every rank that has saved; 0 when that was before."""
        done_at_s = max(self._saved_at_s.values(), default=None)
        return None if done_at_s is None else max(0.0, done_at_s - since_s)

    @property
    def unfinished_save_s(self) -> float | None:
        """How long the save has taken that some rank has begun and not ended, by the newest reports."""
        return max(tuple(self._unfinished_s.values()), default=0.0) or None

    def _note_silence(self, now_s: float) -> None:
        silent_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        if silent_s > SUSPENDED_S:
            self._still_s += silent_s
            self._false_from_s = min(self._false_from_s, silent_s - REPORTS_S)
        self._heard_s = now_s

    def _note_saves(self, facts: WorkerFacts, now_s: float) -> None:
        rank, number = facts.rank, facts.saves
        if rank == 0 and facts.save_cost_s != self._cost_s:
            self._cost_s = facts.save_cost_s
            self._costs_s = [*self._costs_s[-MAX_COSTS + 1 :], self._believed(self._cost_s)]
        self._unfinished_s[rank] = self._believed(facts.saving_s)
        if number <= 0:
            return
        self._saved_at_s[rank] = now_s - facts.since_saved_s
        self._saves_s[number] = max(self._saves_s.get(number, 0.0), self._believed(facts.save_s))
        if len(self._saves_s) > MAX_SAVES:
            self._saves_s.pop(min(self._saves_s))

    def _believed(self, seconds: float) -> float:
        return float(seconds) if seconds < self._false_from_s else 0.0

    def _mean_step_s(self) -> float | None:
        if self._steps_from is None or self._steps_to is None:
            return None
        return (self._steps_to[0] - self._steps_from[0]) / (self._steps_to[1] - self._steps_from[1])


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 3) if seconds else None
