"""Where a rank's snapshots lie: a few places in shared memory, which outlive the process that fills them.

    <memory folder>/shard-<rank>.a.image     the file's exact bytes, warm from save to save
    <memory folder>/shard-<rank>.a.json      its ShardIndex; there only while the image is whole

The folder is the agent's (``SLURMFT_MEMORY_DIR``), so a snapshot outlives its worker; without an agent it is the
process's own and goes with it. A copy is never torn: the index goes before the first byte changes, and comes after the
last one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from slurmft.checkpoint.format.shard_index import ShardIndex, read_index, write_index
from slurmft.checkpoint.replicas.offers import forget_staged
from slurmft.checkpoint.staging.holding import is_held
from slurmft.checkpoint.staging.pinning import Budget, Pinned
from slurmft.checkpoint.writer.priority import NICE
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import Identity
from slurmft.system.opening import open_regular
from slurmft.system.private_folder import check_private, make_private_folder
from slurmft.trainer.streams import Device

PLACES = "ab"
PLACES_WITH_COPIES = "abc"
"""With copies of steps between saves: one that is whole on all ranks, one on its way, and a save's."""

_PAGE = mmap.PAGESIZE
_PIECE_BYTES = 16 << 20


class Place:
    """One of a rank's places for a snapshot.

    Args:
        may_warm: cleared while the training waits for a copy.
    """

    def __init__(self, folder: Path, name: str, may_warm: threading.Event) -> None:
        self.image = folder / f"{name}.image"
        self.index = folder / f"{name}.json"
        self.memory: mmap.mmap | None = None
        self._may_warm = may_warm
        self._warming: threading.Thread | None = None
        self._is_wanted = False
        self._pinned: Pinned | None = None
        self.layout: object = None
        """The layout whose fixed bytes the image has already; set by the caller of ``begin``."""

        self.holds: Identity | None = None
        with contextlib.suppress(StorageError):
            found = read_index(self.index)
            self.holds = found.identity if found is not None else None

    def begin(self, size_bytes: int) -> mmap.mmap:
        """Make room for an image; the old one here is gone from now on, also for other processes.

        Raises:
            OSError: there is not so much memory.
        """
        self.index.unlink(missing_ok=True)
        self.holds = None
        self.stop_warming()
        if self.memory is None or len(self.memory) < size_bytes:
            self._map(size_bytes)
        assert self.memory is not None
        return self.memory

    def warm(self, size_bytes: int) -> None:
        """Make room in the background, where nothing lies here yet: new pages cost more than the copy into them."""
        if self.memory is None and self.holds is None and self._warming is None:
            self._warming = threading.Thread(target=self._warm, args=(size_bytes,), daemon=True, name="slurmft-warm")
            self._warming.start()

    def stop_warming(self) -> None:
        """Return when no thread makes room here any more; at most a piece later."""
        if self._warming is not None:
            self._is_wanted = True
            self._may_warm.set()
            self._warming.join()
            self._warming = None

    @property
    def address(self) -> int:
        """Of the first byte of its memory."""
        assert self.memory is not None
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def pin(self, device: Device, budget: Budget) -> None:
        """Have the device copy into this place by itself, as far as that is allowed; returns at once."""
        if self._pinned is None and self.memory is not None and not self.is_warming:
            self._pinned = Pinned(device, self.address, len(self.memory), budget, self._may_warm)

    def unmap(self) -> None:
        """Release the memory."""
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
        self.memory = self.layout = None

    @property
    def is_warming(self) -> bool:
        """Whether room is being made now."""
        return self._warming is not None and self._warming.is_alive()

    def _warm(self, size_bytes: int) -> None:
        """Piece by piece, as a system that has to find the memory first may take a second for each gigabyte of it."""
        with contextlib.suppress(OSError):  # the next user of the place gets the same error, and reports it
            os.setpriority(os.PRIO_PROCESS, 0, NICE)  # on Linux it is this thread's alone
            descriptor = _open_image(self.image)
            try:
                for start in self._pieces(size_bytes):
                    os.posix_fallocate(descriptor, start, min(_PIECE_BYTES, size_bytes - start))
            finally:
                os.close(descriptor)
            if self._is_wanted:
                return
            self._map(size_bytes)
            address = self.address
            for start in self._pieces(size_bytes):  # in this process's page table as well
                ctypes.memset(address + start, 0, min(_PIECE_BYTES, size_bytes - start))

    def _pieces(self, size_bytes: int) -> Iterator[int]:
        for start in range(0, size_bytes, _PIECE_BYTES):
            self._may_warm.wait()
            if self._is_wanted:
                return
            yield start

    def complete(self, index: ShardIndex) -> None:
        """The image is whole: write its index."""
        write_index(self.index, index, durable=False)
        self.holds = index.identity

    def _map(self, size_bytes: int) -> None:
        self.unmap()  # views of the old one keep it; the file grows under them
        rounded = -(-size_bytes // _PAGE) * _PAGE
        descriptor = _open_image(self.image)
        try:
            rounded = max(rounded, os.fstat(descriptor).st_size)
            os.posix_fallocate(descriptor, 0, rounded)  # a store into a page without memory would kill the process
            self.memory = mmap.mmap(descriptor, rounded)
        finally:
            os.close(descriptor)


class Arena:
    """The places of one rank, in the agent's folder; without one, in a folder of the process's own.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, rank: int, folder: Path | None, places: str = PLACES) -> None:
        self._private = None
        if folder is None:
            self._private = make_private_folder()
            folder = self._private.path
        self.folder = folder
        self.folder.mkdir(mode=0o700, exist_ok=True)
        check_private(self.folder)  # beside the checkpoints, another user may have made it first
        self._may_warm = threading.Event()
        self._may_warm.set()
        self._budget: Budget | None = None
        self.places = [Place(self.folder, f"shard-{rank}.{name}", self._may_warm) for name in places]

    def free(self, busy: Iterable[Identity]) -> Place | None:
        """The place whose snapshot is the oldest; None where all are ``busy``: still being read, or needed.

        A place that is still being warmed comes last: to wait for it would take longer than the copy.

        The reader may also be the writer of a dead worker, which its successor can only see by its lock.
        """
        taken = set(busy)
        free = [place for place in self.places if place.holds not in taken and not is_held(place.image)]
        return min(
            free, key=lambda place: (place.is_warming, place.holds.age if place.holds else (-1, -1)), default=None
        )

    @property
    def is_private(self) -> bool:
        """Whether the folder goes with this process."""
        return self._private is not None

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """The training waits: nothing else here takes processors and memory meanwhile."""
        self._may_warm.clear()
        try:
            yield
        finally:
            self._may_warm.set()

    def warm_up(self, size_bytes: int) -> None:
        """Make room in every place that was never used."""
        for place in self.places:
            place.warm(size_bytes)

    def pin(self, device: Device) -> None:
        """Pin what is mapped, in the background, for copies from this device."""
        self._budget = self._budget or Budget.of_this_rank()
        for place in self.places:
            place.pin(device, self._budget)

    def close(self) -> None:
        """Release the memory, and remove a folder of our own."""
        for place in self.places:
            place.stop_warming()  # it stores into memory that is unmapped now
            place.unmap()
        if self._private is not None:
            self._private.close()


class Spill:
    """The folder beside the checkpoints for snapshots that do not fit into memory: slower, but no OOM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._may_hold = True

    def arena(self, rank: int) -> Arena:
        """Places in it.

        Raises:
            OSError: it cannot be made.
        """
        self._may_hold = True
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Arena(rank, self.folder)

    def forget(self, rank: int, world_size: int) -> None:
        """Remove this rank's snapshots there; on rank 0, also those of ranks that the run no longer has."""
        if self._may_hold and self.folder.is_dir():
            forget_staged(self.folder, lambda one: one == rank or (rank == 0 and one >= world_size))
        self._may_hold = False


def _open_image(path: Path) -> int:
    return open_regular(path, os.O_RDWR | os.O_CREAT, follow=False, owners={os.geteuid()})
