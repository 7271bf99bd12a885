"""An image in a rank's own place in memory, used where it lies: verified there, and copied from there once.

To read it into new memory first costs more than both. Whatever fills the place takes its index away before the first
byte changes, and does not begin while the image is held: an index that is still the same one after the copy says that
what was copied is what was verified.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import torch
import xxhash

from slurmft.checkpoint.format.damage import Damage, Damaged
from slurmft.checkpoint.format.shard_index import Item
from slurmft.checkpoint.staging.holding import holding
from slurmft.system.opening import UnsafeFile, trusted_owners

_HASH_BYTES = 16 << 20


class MappedImage:
    """The image and its index. ``close`` lets others fill the place again; views of it must not be used after that.

    Raises:
        OSError: it cannot be held or mapped; it can still be read as a file.
    """

    def __init__(self, image: Path, index: Path, size_bytes: int) -> None:
        self._name, self._index = image.name, index
        with contextlib.ExitStack() as stack:
            descriptor = stack.enter_context(holding(image))
            self._version = _version(index)
            status = os.fstat(descriptor)
            if status.st_uid not in trusted_owners(image.parent):
                raise UnsafeFile(errno.EPERM, "belongs to another user", str(image))
            if status.st_size < size_bytes:
                raise OSError(errno.ENODATA, f"has fewer than {size_bytes} bytes", str(image))
            # private, as torch takes no memory that cannot be written; nothing is written
            self._memory = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)
            self._stack = stack.pop_all()
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)

    def verify(self, item: Item) -> None:
        """Look at all bytes of an item.

        Raises:
            Damaged: they are not those that were written.
        """
        if not item.digest:
            raise Damaged(Damage.UNREADABLE, self._name, f"{item.key} has no digest yet")
        hasher, end = xxhash.xxh3_128(), item.offset + item.length
        with memoryview(self._memory) as whole:
            for start in range(item.offset, end, _HASH_BYTES):
                hasher.update(whole[start : min(start + _HASH_BYTES, end)])
        if hasher.hexdigest() != item.digest:
            raise Damaged(Damage.CHANGED, self._name, item.key)

    def view(self, item: Item, dtype: torch.dtype, start: int, sizes: tuple[int, ...]) -> torch.Tensor:
        """A run of an item's values, the first one's number being ``start``."""
        length = torch.Size(sizes).numel() * dtype.itemsize
        begin = item.data_offset + start * dtype.itemsize
        return self._whole[begin : begin + length].view(dtype).view(sizes)

    def is_unchanged(self) -> bool:
        """Whether nothing has begun to fill the place since it was held."""
        try:
            return _version(self._index) == self._version
        except OSError:
            return False

    def close(self) -> None:
        """Let it go. Idempotent."""
        self._stack.close()


def _version(index: Path) -> tuple[int, int, int]:
    status = index.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
