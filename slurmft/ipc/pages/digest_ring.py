"""The newest digests of one worker, in its heartbeat page: pairs of a step and 64 bits, behind the section names."""

from __future__ import annotations

from collections.abc import Iterator

from slurmft.ipc.pages.heartbeat import NOTHING, Page, Slot

FIRST_SLOT, ENTRIES = 864, 64
"""Where the pairs begin, and how many there are; the slots end at 991."""


class DigestRing:
    """Both sides hold one; only the worker writes."""

    def __init__(self, page: Page) -> None:
        self._page, self._slots = page, page.view(FIRST_SLOT, 2 * ENTRIES)

    def add(self, group: int, step: int, value: int) -> None:
        """Leave the digest after ``step`` steps; the group is the same for all that follow until it changes."""
        page = self._page
        at = 2 * (page[Slot.DIGESTS] % ENTRIES)
        self._slots[at] = NOTHING  # a reader sees either pair, or none
        page[Slot.DIGEST_GROUP] = group
        self._slots[at + 1] = value
        self._slots[at] = step
        page[Slot.DIGESTS] += 1

    @property
    def count(self) -> int:
        """How many there ever were."""
        return self._page[Slot.DIGESTS]

    @property
    def group(self) -> int:
        """That of the newest one."""
        return self._page[Slot.DIGEST_GROUP]

    def since(self, taken: int) -> Iterator[tuple[int, int]]:
        """Step and value of those after the first ``taken``, oldest first, as far as they are still there."""
        for number in range(max(taken, self.count - ENTRIES + 1, 0), self.count):
            at = 2 * (number % ENTRIES)
            step, value = self._slots[at], self._slots[at + 1]
            if step >= 0:
                yield step, value
