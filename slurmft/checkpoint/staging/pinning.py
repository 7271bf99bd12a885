"""Pages of a snapshot's place that the device copies into by itself: pinned in the background, piece by piece.

A copy from a GPU into other memory goes through a buffer of the driver's, at a fraction of the speed, and holds its
thread. Pinned pages can be neither moved nor reclaimed, so there is a budget for them, and where the limit of locked
memory or the driver forbids them, copies go through the driver's buffer.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import threading
from collections.abc import Iterator

import torch

from slurmft.trainer.streams import Device

PIECE_BYTES = 16 << 20
"""How much is pinned at once: the driver holds its lock meanwhile, and the training launches nothing; and how much is
copied at once, as one copy must not cross the edge of what was pinned."""

SHARE = 0.25
"""Of the node's memory, for the pinned pages of all its ranks together."""

log = logging.getLogger(__name__)


class Budget:
    """The bytes that one rank may pin, in all its places."""

    def __init__(self, limit_bytes: int, reason: str) -> None:
        self._left_bytes, self._reason = limit_bytes, reason
        self._lock = threading.Lock()

    @classmethod
    def of_this_rank(cls) -> Budget:
        """Its share of the node's memory, or the limit of locked memory (``ulimit -l``) where that is less."""
        node_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        share = int(node_bytes * SHARE) // ranks
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY and soft < share:
            return cls(soft, f"the limit of locked memory (ulimit -l) is {soft >> 10} KiB")
        return cls(share, f"that is {SHARE:.0%} of the node's memory for {ranks} ranks")

    def take(self, size_bytes: int) -> str:
        """Take so much off; why not, where it is spent."""
        with self._lock:
            if size_bytes > self._left_bytes:
                return self._reason
            self._left_bytes -= size_bytes
            return ""

    def give_back(self, size_bytes: int) -> None:
        """Return the budget of unpinned bytes."""
        with self._lock:
            self._left_bytes += size_bytes


class Pinned:
    """The pinned pieces of one mapping.

    Args:
        address: of its first byte, on a page.
        may_go_on: cleared while the training waits for a copy.
    """

    def __init__(
        self, device: Device, address: int, size_bytes: int, budget: Budget, may_go_on: threading.Event
    ) -> None:
        self._device, self._address, self._size_bytes = device, address, size_bytes
        self._budget, self._may_go_on = budget, may_go_on
        self._pieces: list[tuple[int, int]] = []
        self._is_wanted = True
        self._thread = threading.Thread(target=self._pin, name="slurmft-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """So far."""
        return sum(size_bytes for _, size_bytes in self._pieces)

    def wait(self) -> None:
        """Until as much is pinned as can be."""
        self._thread.join()

    def release(self) -> None:
        """Unpin everything; before the memory is unmapped."""
        self._is_wanted = False
        self._may_go_on.set()
        self._thread.join()
        while self._pieces:
            address, size_bytes = self._pieces.pop()
            self._device.unregister(address)
            self._budget.give_back(size_bytes)

    def _pin(self) -> None:
        self._device.use()
        for start in range(0, self._size_bytes, PIECE_BYTES):
            self._may_go_on.wait()
            if not self._is_wanted:
                return None
            size_bytes = min(PIECE_BYTES, self._size_bytes - start)
            if reason := self._budget.take(size_bytes):
                return self._say(start, reason)
            if reason := self._device.register(self._address + start, size_bytes):
                self._budget.give_back(size_bytes)
                return self._say(start, reason)
            self._pieces.append((self._address + start, size_bytes))
        return None

    def _say(self, pinned_bytes: int, reason: str) -> None:
        log.info(
            "%d of %d MiB of a snapshot's memory are pinned, the rest is copied more slowly: %s",
            pinned_bytes >> 20, self._size_bytes >> 20, reason,
        )  # fmt: skip


def in_pieces(target: torch.Tensor, source: torch.Tensor, base: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A copy as copies of which none crosses an edge between pieces.

    Args:
        target: contiguous, in the memory whose first byte lies at ``base``.
        source: of the same dtype and shape.
    """
    begin = target.data_ptr() - base
    first, last = begin // PIECE_BYTES, (begin + target.nbytes - 1) // PIECE_BYTES
    if first >= last:
        yield target, source
        return
    size = target.element_size()
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    edges = [0, *((edge * PIECE_BYTES - begin) // size for edge in range(first + 1, last + 1)), target.numel()]
    for start, end in itertools.pairwise(edges):
        yield flat_target[start:end], flat_source[start:end]
