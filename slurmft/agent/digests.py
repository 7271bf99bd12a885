"""The agent's side of replica digests: those that its workers have left in their pages, as messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from slurmft.ipc.pages.digest_ring import DigestRing
from slurmft.ipc.pages.heartbeat import Page
from slurmft.ipc.reports import DigestsReport, RankDigests

RANKS_PER_MESSAGE = 16
"""A message must fit into a line of the control channel."""


class Digested(Protocol):
    """A worker as this module needs it."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def page(self) -> Page:
        """Its heartbeat page."""


class DigestReports:
    """Reports each digest once. One object for the workers of one attempt."""

    def __init__(self) -> None:
        self._rings: dict[int, tuple[Page, DigestRing]] = {}
        self._taken: dict[int, int] = {}

    def new(self, workers: Sequence[Digested]) -> Iterator[DigestsReport]:
        """Messages with what these workers have left since the last call; none where there is nothing."""
        found = [facts for worker in workers if (facts := self._of(worker)) is not None]
        for first in range(0, len(found), RANKS_PER_MESSAGE):
            yield DigestsReport(ranks=tuple(found[first : first + RANKS_PER_MESSAGE]))

    def _of(self, worker: Digested) -> RankDigests | None:
        page, ring = self._rings.get(worker.rank, (None, None))
        if ring is None or page is not worker.page:  # of an earlier life of the rank: its page is closed
            ring = DigestRing(worker.page)
            self._rings[worker.rank] = worker.page, ring
            self._taken[worker.rank] = 0
        count, taken = ring.count, self._taken.get(worker.rank, 0)
        if count == taken:
            return None
        digests = tuple(ring.since(taken))
        self._taken[worker.rank] = count
        return RankDigests(rank=worker.rank, group=ring.group, digests=digests)
