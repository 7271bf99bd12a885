"""How often the present step is copied to memory: as often as was asked for, until that costs the training too much.

All ranks put the same numbers in and come to the same interval, without another word.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

MAX_SHARE = 0.05
"""Of the time of the steps themselves."""

SAMPLES = 9
"""Copies behind each decision. Their middle counts: one that met a busy moment must not space out all that follow."""

NEW_PLACES = 4
"""The first copies meet memory that has no pages yet, which costs several times as much."""


@dataclass(kw_only=True, slots=True)
class Costs:
    """What copies have cost since the interval was looked at last, in nanoseconds."""

    copies: list[int] = field(default_factory=list)
    """How long the training stood still for each one, on the slowest rank."""

    agreeing: int = 0
    """All agreements together, on the rank that waited least: the others' waits are for ranks that are late."""

    training: int = 0
    """What was left to the training."""

    @property
    def share(self) -> float:
        """Of the training's own time, which stood still beside it; 0.0 where nothing was copied."""
        if not self.copies:
            return 0.0
        stalls = statistics.median(self.copies) * len(self.copies) + self.agreeing
        return stalls / max(self.training, 1)


class Spacing:
    """The interval of one run, in steps. Every rank calls the same methods with the same numbers.

    Args:
        interval: as it was asked for, at least 1.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._met = 0
        self._costs = Costs()

    def note(self, *, copy: int, agreeing: int, training: int) -> float | None:
        """Take in what lies behind since the last call; the share for which the interval was doubled, or None.

        It is never halved again: what made copies dear would come back with it.

        Args:
            copy: nanoseconds of the newest copy on the slowest rank; 0 where none was made.
            agreeing: of the agreement, on the rank that waited least.
            training: of the training in between.
        """
        if copy:
            self._met += 1
        if self._met <= NEW_PLACES:
            return None
        self._costs.agreeing += agreeing
        self._costs.training += training
        if copy:
            self._costs.copies.append(copy)
        if len(self._costs.copies) < SAMPLES:
            return None
        share, self._costs = self._costs.share, Costs()
        if share <= MAX_SHARE:
            return None
        self.interval *= 2
        return share

    def is_due(self, step: int) -> bool:
        """Whether ranks look after ``step`` steps."""
        return step % self.interval == 0
