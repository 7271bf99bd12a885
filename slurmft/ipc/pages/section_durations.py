"""How long sections take, seen from outside: a section that was open at one look and is gone at the next has ended."""

from __future__ import annotations

from collections.abc import Sequence

from slurmft.ipc.pages.section_stack import MAX_NAMES, OpenSection


class SectionDurations:
    """The longest of each section of a node's workers. Sections shorter than the time between two looks are missed."""

    def __init__(self) -> None:
        self._open: dict[int, dict[OpenSection, float]] = {}
        self._longest_s: dict[str, float] = {}

    def note(self, rank: int, sections: Sequence[OpenSection], now_s: float) -> None:
        """Take in what a worker has open now; a section that has ended took as long as it was last seen to take.

        A section that never ends is a hang and gives no duration.
        """
        before, now = self._open.get(rank, {}), {each: now_s - each.began_ns * 1e-9 for each in sections}
        self._open[rank] = now
        for section, held_s in before.items():
            if section not in now and (section.name in self._longest_s or len(self._longest_s) < MAX_NAMES):
                longest_s = self._longest_s.get(section.name, 0.0)
                self._longest_s[section.name] = max(longest_s, held_s)

    def take(self) -> dict[str, float]:
        """The longest of each since the last call, in seconds."""
        taken, self._longest_s = self._longest_s, {}
        return taken
