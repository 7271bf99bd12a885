"""Where a rank's snapshots lie: two places in shared memory, which outlive the process that fills them.

    <memory folder>/shard-<rank>.a.image     the file's exact bytes, warm from save to save
    <memory folder>/shard-<rank>.a.json      its ShardIndex; there only while the image is whole

The folder is the agent's (``SLURMFT_MEMORY_DIR``), so a snapshot outlives its worker; without an agent it is the
process's own and goes with it. A copy is never torn: the index goes before the first byte changes, and comes after the
last one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from slurmft.checkpoint.holding import is_held
from slurmft.checkpoint.politeness import NICE
from slurmft.checkpoint.shard_index import ShardIndex, read_index, write_index
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import Identity

PLACES = "ab"

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder is made in it
_PREFIX = f"slurmft-memory-{os.getuid()}-"
_PAGE = mmap.PAGESIZE
_PIECE_BYTES = 16 << 20


class Place:
    """One of a rank's two places for a snapshot.

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
        self.layout: object = None
        """Whose fixed bytes the image has already; the user's of ``begin`` to set."""

        self.holds: Identity | None = None
        with contextlib.suppress(StorageError):
            found = read_index(self.index)
            self.holds = found.identity if found is not None else None

    def begin(self, size_bytes: int) -> mmap.mmap:
        """Make room for an image; whatever is here is gone as of now, also for other processes.

        Raises:
            OSError: there is not so much memory.
        """
        self.index.unlink(missing_ok=True)
        self.holds = None
        if self._warming is not None:
            self._is_wanted = True
            self._may_warm.set()
            self._warming.join()
            self._warming = None
        if self.memory is None or len(self.memory) < size_bytes:
            self._map(size_bytes)
        assert self.memory is not None
        return self.memory

    def warm(self, size_bytes: int) -> None:
        """Make room in the background, where nothing lies here yet: new pages cost more than the copy into them."""
        if self.memory is None and self.holds is None and self._warming is None:
            self._warming = threading.Thread(target=self._warm, args=(size_bytes,), daemon=True, name="slurmft-warm")
            self._warming.start()

    @property
    def is_warming(self) -> bool:
        """Whether room is being made now."""
        return self._warming is not None and self._warming.is_alive()

    def _warm(self, size_bytes: int) -> None:
        """Piece by piece, as a system that has to find the memory first may take a second for each gigabyte of it."""
        with contextlib.suppress(OSError):  # who needs the place meets it again, and tells
            os.setpriority(os.PRIO_PROCESS, 0, NICE)  # on Linux it is this thread's alone
            descriptor = os.open(self.image, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for start in self._pieces(size_bytes):
                    os.posix_fallocate(descriptor, start, min(_PIECE_BYTES, size_bytes - start))
            finally:
                os.close(descriptor)
            if self._is_wanted:
                return
            self._map(size_bytes)
            assert self.memory is not None
            address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
            for start in self._pieces(size_bytes):  # in this process's page table as well
                ctypes.memset(address + start, 0, min(_PIECE_BYTES, size_bytes - start))

    def _pieces(self, size_bytes: int) -> Iterator[int]:
        for start in range(0, size_bytes, _PIECE_BYTES):
            self._may_warm.wait()
            if self._is_wanted:
                return
            yield start

    def complete(self, index: ShardIndex) -> None:
        """The image is whole: say what it is."""
        write_index(self.index, index, durable=False)
        self.holds = index.identity

    def _map(self, size_bytes: int) -> None:
        self.memory = self.layout = None  # views of the old one keep it; the file grows under them
        rounded = -(-size_bytes // _PAGE) * _PAGE
        descriptor = os.open(self.image, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            rounded = max(rounded, os.fstat(descriptor).st_size)
            os.posix_fallocate(descriptor, 0, rounded)  # a store into a page without memory would kill the process
            self.memory = mmap.mmap(descriptor, rounded)
        finally:
            os.close(descriptor)


class Arena:
    """The two places of one rank, in the agent's folder; without one, in a folder of the process's own.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, rank: int, folder: Path | None) -> None:
        self.is_private = folder is None
        self.folder = folder or private_folder()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._may_warm = threading.Event()
        self._may_warm.set()
        self.places = [Place(self.folder, f"shard-{rank}.{name}", self._may_warm) for name in PLACES]

    def free(self, busy: Iterable[Identity]) -> Place | None:
        """The place whose snapshot is the older one; None where both are ``busy``: somebody still reads them.

        One that is still being made room in comes last: to wait for it would take longer than the copy.

        So does, maybe, the writer of a worker that has died, which its successor knows nothing of but by its lock.
        """
        taken = set(busy)
        free = [place for place in self.places if place.holds not in taken and not is_held(place.image)]
        return min(free, key=lambda place: (place.is_warming, -1 if place.holds is None else place.holds.commit),
                   default=None)  # fmt: skip

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

    def close(self) -> None:
        """Let go of the memory; a folder of our own goes with it."""
        for place in self.places:
            place.memory = place.layout = None
        if self.is_private:
            shutil.rmtree(self.folder, ignore_errors=True)


def private_folder() -> Path:
    """A folder in shared memory for a process without an agent; ``Arena.close`` removes it, after the last save.

    What was left by one that was killed is removed first: a lock tells the living from the dead.
    """
    root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for left in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (left / "lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=root, prefix=_PREFIX))
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)  # held until this process ends
    return folder
