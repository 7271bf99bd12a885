"""When to save periodically, and when to try again after a save that failed. Pure: no clock, no collective.

Ranks must save before the same step, and their clocks differ. So with an interval in seconds rank 0 alone watches the
time, and announces steps: at a *look*, whose step all ranks know, it says before which step the next save is due, or
when to look again. An interval has a dozen looks, however long it is; where steps become F times slower all at once, a
save comes late by an eighth of its interval times F at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from slurmft.policy.timing import checkpoint_interval

RETRIES_PER_INTERVAL = 8
NO_STEP = 0
"""In a row: nothing is due yet."""

LOOKS = 8
"""The next look is at most one part of so many of the interval away."""

NEAR = 16
"""A save that is due within one part of so many of its interval is announced, and not looked at again."""

STEPS_REMEMBERED = 32


class SaveSchedule:
    """Every ``interval_steps`` (0: never); after a failure sooner, and from failure to failure later again."""

    def __init__(self, interval_steps: int, start: int) -> None:
        self._interval, self._start = interval_steps, start
        self._retry_at: int | None = None
        self._pause = 0

    def is_due(self, step: int) -> bool:
        """Whether a save is due before ``step`` begins."""
        if not self._interval or step <= self._start:
            return False
        return step % self._interval == 0 or (self._retry_at is not None and step >= self._retry_at)

    def done(self, step: int, *, worked: bool) -> None:
        """Take in how the save at ``step`` went."""
        if worked:
            self._retry_at, self._pause = None, 0
            return
        shortest = max(1, self._interval // RETRIES_PER_INTERVAL)
        self._pause = min(max(shortest, 2 * self._pause), self._interval)
        self._retry_at = step + self._pause


class ToldSchedule:
    """Every rank's copy of a schedule in seconds: what rank 0 announced last. Equal on all ranks at every step."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._look_at: int | None = start + 1
        self._due_at: int | None = None

    def is_look(self, step: int) -> bool:
        """Whether rank 0 updates all ranks before ``step`` begins (``SaveTimer.row``, then ``take``)."""
        return self._look_at is not None and step >= self._look_at

    def take(self, step: int, row: Sequence[int]) -> None:
        """Take in rank 0's row: steps from here to the save, and to the next look; one of them is NO_STEP."""
        until_due, until_look = row
        self._due_at = step + until_due - 1 if until_due else None
        self._look_at = step + max(1, until_look) if not until_due else None

    def is_due(self, step: int) -> bool:
        """Whether a save is due before ``step`` begins."""
        return self._due_at is not None and step >= self._due_at and step > self._start

    def done(self, step: int) -> None:
        """A save was tried at ``step``, periodic or not: the next one is announced before the step after it."""
        self._due_at, self._look_at = None, step + 1


class Spacing(Protocol):
    """How far apart saves are to be."""

    def seconds(self, *, step_s: float) -> float:
        """Seconds of training between two saves, now."""

    def cost(self, seconds: float) -> None:
        """A save has cost the training loop so much: its stall, and what steps took longer while it was written."""


class EverySeconds:
    """A fixed interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def seconds(self, *, step_s: float) -> float:
        """The configured interval."""
        return self._interval_s

    def cost(self, seconds: float) -> None:
        """It changes nothing."""


class Automatic:
    """The interval that wastes least, by what saves have cost so far; a minute until two of them were measured."""

    def __init__(self, mtbf_s: float, *, longest_s: float = 0.0) -> None:
        self._mtbf_s, self._longest_s = mtbf_s, longest_s
        self._costs_s: list[float] = []

    def seconds(self, *, step_s: float) -> float:
        """Daly's interval within its bounds (``policy.timing.checkpoint_interval``)."""
        cost_s = checkpoint_interval.typical_cost_s(self._costs_s)
        plan = checkpoint_interval.plan(cost_s or 0.0, self._mtbf_s, step_s=step_s, longest_s=self._longest_s)
        if len(self._costs_s) >= 2:
            return plan.interval_s
        return min(max(checkpoint_interval.FIRST_S, 10 * (cost_s or 0.0), step_s), self._longest_s or math.inf)

    def cost(self, seconds: float) -> None:
        """Take in what the newest save cost."""
        if math.isfinite(seconds) and seconds >= 0:
            self._costs_s = [*self._costs_s[-2 * checkpoint_interval.SAVES_MEASURED :], seconds]


class SaveTimer:
    """Rank 0's part: how long steps take, what saves cost, and how many steps remain until the next one.

    Times are nanoseconds of one monotonic clock, read before each step; ``now_ns`` never goes back. ``on_cost`` gets
    the seconds that each save has cost the training, once they are known.
    """

    def __init__(self, spacing: Spacing, *, now_ns: int, on_cost: Callable[[float], None] = lambda _: None) -> None:
        self._spacing, self._on_cost = spacing, on_cost
        self._from_ns = self._step_began_ns = now_ns
        self._pause_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._quiet_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        """Of steps beside which nothing was written."""

        self._steps_seen = 0

        self._cost_ns: int | None = None
        """The stall of the newest save, until all of its cost is known."""

        self._excess_ns = 0
        """Additional time of the steps beside its write, which may be negative by chance."""

    def step_done(self, now_ns: int, *, is_writing: bool) -> None:
        """A step ended at ``now_ns``; a checkpoint was or was not being written beside it."""
        took_ns = max(0, now_ns - self._step_began_ns)
        self._step_began_ns = now_ns
        self._steps_ns.append(took_ns)
        self._steps_seen += 1
        if self._cost_ns is None:
            if not is_writing:
                self._quiet_ns.append(took_ns)
            return
        # it began while the newest save was written, or right behind its stall
        self._excess_ns += took_ns - int(median(self._quiet_ns)) if self._quiet_ns else 0
        if not is_writing:
            self._settle()

    def saved(self, now_ns: int, *, began_ns: int, worked: bool) -> None:
        """A save was tried between ``began_ns`` and ``now_ns``, before a step begins."""
        self._settle()
        self._step_began_ns = now_ns
        if worked:
            self._cost_ns = max(0, now_ns - began_ns)
            self._from_ns, self._pause_ns = now_ns, 0
            return
        interval_ns = self._interval_ns()
        self._pause_ns = min(max(interval_ns // RETRIES_PER_INTERVAL, 2 * self._pause_ns), interval_ns)
        self._from_ns = now_ns - interval_ns + self._pause_ns

    def row(self, now_ns: int) -> tuple[int, int]:
        """The row for all ranks before the step that begins now: see ``ToldSchedule.take``."""
        interval_ns = self._interval_ns()
        left_ns = self._from_ns + interval_ns - now_ns
        if left_ns <= 0:
            return 1, NO_STEP  # before this very step
        step_ns = max(1, self._step_ns())
        steps = math.ceil(left_ns / step_ns)
        believed = 2 * self._steps_seen  # so few steps do not predict many more
        if left_ns * NEAR <= interval_ns and steps <= believed:
            return 1 + steps, NO_STEP
        return NO_STEP, max(1, min(steps // 2, interval_ns // LOOKS // step_ns, believed))

    def _settle(self) -> None:
        if self._cost_ns is not None:
            seconds = (self._cost_ns + max(0, self._excess_ns)) / 1e9
            self._cost_ns, self._excess_ns = None, 0
            self._spacing.cost(seconds)
            self._on_cost(seconds)

    def _interval_ns(self) -> int:
        return max(1, round(self._spacing.seconds(step_s=self._step_ns() / 1e9) * 1e9))

    def _step_ns(self) -> int:
        """The mean of the newest steps, or the middle of the newest three if that is more: slower ones count at once.

        Too long a time does no harm: the next look comes sooner.
        """
        if not self._steps_ns:
            return 0
        newest = list(self._steps_ns)
        return max(sum(newest) // len(newest), int(median(newest[-3:])))
