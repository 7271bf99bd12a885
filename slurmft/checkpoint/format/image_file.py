"""The bytes of an image on their way into memory, each item's digest checked as they pass. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from slurmft.checkpoint.format.damage import Damage, Damaged
from slurmft.checkpoint.format.shard_index import Item, ShardIndex
from slurmft.system.opening import UnsafeFile, open_regular, trusted_owners

BLOCK_BYTES = 1 << 20
"""Read, then hashed: small enough to be in the cache still when the hash comes."""

_MAX_BUFFERS = 64
"""In one call; the system takes 1024."""


class ImageFile:
    """One shard's image: a file of a checkpoint folder, or of a node's memory. Threads may read at the same time.

    Raises:
        Damaged: it is not there, shorter than its index says, or cannot be opened.
    """

    def __init__(self, path: Path, index: ShardIndex) -> None:
        self.path, self.index = path, index
        try:
            self._descriptor = open_regular(path, owners=trusted_owners(path.parent))
        except FileNotFoundError:
            raise Damaged(Damage.MISSING, path.name) from None
        except UnsafeFile as error:
            raise Damaged(Damage.UNREADABLE, path.name, f"it {error.strerror}") from error
        except OSError as error:
            raise Damaged(Damage.UNREADABLE, path.name, str(error)) from error
        if os.fstat(self._descriptor).st_size < index.size_bytes:
            self.close()
            raise Damaged(Damage.TRUNCATED, path.name)

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, item: Item, targets: Sequence[tuple[int, memoryview]] = ()) -> None:
        """Read a whole item and check it.

        Args:
            targets: where parts of its values go: the first byte, counted from ``item.data_offset``, and the memory; in
                order, without overlaps. Bytes without a target are read as well, and dropped.

        Raises:
            Damaged: its bytes are not those that were written. The targets may hold wrong values.
        """
        if not item.digest:
            raise Damaged(Damage.UNREADABLE, self.path.name, f"{item.key} has no digest yet")
        hasher, at = xxhash.xxh3_128(), item.offset
        for batch in _batches(_buffers(item, targets)):
            self._fill(batch, at, item)
            for buffer in batch:
                hasher.update(buffer)
                at += len(buffer)
        if hasher.hexdigest() != item.digest:
            raise Damaged(Damage.CHANGED, self.path.name, item.key)

    def _fill(self, buffers: list[memoryview], offset: int, item: Item) -> None:
        rest = buffers
        while rest:
            try:
                count = os.preadv(self._descriptor, rest, offset)
            except OSError as error:
                raise Damaged(Damage.UNREADABLE, self.path.name, f"{item.key}: {error}") from error
            if not count:
                raise Damaged(Damage.TRUNCATED, self.path.name, item.key)
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest[0])
                rest = rest[1:]
            if count:
                rest = [rest[0][count:], *rest[1:]]


def _buffers(item: Item, targets: Iterable[tuple[int, memoryview]]) -> Iterator[memoryview]:
    """Memory for every byte of an item, in order, none larger than a block."""
    at = item.offset
    for start, target in targets:
        yield from _scratch(item.data_offset + start - at)
        for begin in range(0, len(target), BLOCK_BYTES):
            yield target[begin : begin + BLOCK_BYTES]
        at = item.data_offset + start + len(target)
    yield from _scratch(item.offset + item.length - at)


def _scratch(length: int) -> Iterator[memoryview]:
    block = memoryview(bytearray(min(length, BLOCK_BYTES)))
    for begin in range(0, length, BLOCK_BYTES):
        yield block[: min(BLOCK_BYTES, length - begin)]


def _batches(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Buffers that are read by one call; of large ones each alone, as scratch memory is used again."""
    batch, size = list[memoryview](), 0
    for buffer in buffers:
        if batch and (size + len(buffer) > BLOCK_BYTES or len(batch) == _MAX_BUFFERS):
            yield batch
            batch, size = [], 0
        if len(buffer):
            batch.append(buffer)
            size += len(buffer)
    if batch:
        yield batch
