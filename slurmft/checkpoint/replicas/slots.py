"""Two places for each shard in a folder of copies: a newer image replaces the older one of two, once it is verified.

An index (``shard-3.a.json``) lies there only while its image (``shard-3.a.image``) is whole. The files are written
over in place: pages that are there already cost a quarter of new ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from slurmft.checkpoint.format.shard_index import Item, ShardIndex, write_index
from slurmft.checkpoint.replicas.offers import Holding, holdings_in, image_of
from slurmft.policy.checkpoints.tiers import Name, Tier
from slurmft.system.opening import open_regular


class Mismatch(Exception):
    """The bytes are not those that the index describes."""


class Verifier:
    """Compares the items of an image that pass by, piece by piece, with their digests."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._item = next(self._items, None)
        self._hash, self._done = xxhash.xxh3_128(), 0

    def feed(self, chunk: memoryview) -> None:
        """The next bytes.

        Raises:
            Mismatch: an item that ends in them is damaged, or there are more bytes than items.
        """
        while self._item is not None:
            piece = chunk[: self._item.length - self._done]
            self._hash.update(piece)
            self._done += len(piece)
            chunk = chunk[len(piece) :]
            if self._done < self._item.length:
                break
            if self._hash.hexdigest() != self._item.digest:
                raise Mismatch(f"{self._item.key} differs from its digest")
            self._item = next(self._items, None)
            self._hash, self._done = xxhash.xxh3_128(), 0
        if len(chunk):
            raise Mismatch("there are more bytes than the index lists")

    def finish(self) -> None:
        """Return when nothing is missing.

        Raises:
            Mismatch: bytes are.
        """
        self.feed(memoryview(b""))  # items without bytes end here
        if self._item is not None:
            raise Mismatch("bytes are missing")


class Incoming:
    """One image on its way into a folder: in the place of the older of two, and trusted only when all of it is there.

    As a context manager it leaves nothing of an image that was not finished.

    Args:
        items: those that come, in order; all of them unless given. The others are holes in the file.
        keep: a snapshot that is not written over, even where it is the older one.

    Raises:
        OSError: there is no room, or the folder is gone.
    """

    def __init__(
        self, folder: Path, index: ShardIndex, items: Sequence[Item] | None = None, *, keep: Name | None = None
    ) -> None:
        self._index = index
        self._path = place_for(folder, index, keep)
        self._path.unlink(missing_ok=True)
        self._verifier = Verifier(index.items if items is None else items)
        self._ranges = ranges_of(index.items if items is None else items)
        self._file = open_regular(image_of(self._path), os.O_RDWR | os.O_CREAT, follow=False)
        self._finished = False

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the image unless it was finished; nothing more can be written. Idempotent."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        if not self._finished:
            with contextlib.suppress(OSError):
                image_of(self._path).unlink(missing_ok=True)

    def write(self, chunk: memoryview) -> None:
        """The next bytes of the image.

        Raises:
            Mismatch: they are not the right ones.
            OSError: they cannot be written.
        """
        self._verifier.feed(chunk)
        while chunk:
            offset, length = self._ranges[0]
            count = os.pwrite(self._file, chunk[:length], offset)
            chunk = chunk[count:]
            self._ranges[:1] = [(offset + count, length - count)] if count < length else []

    def finish(self, *, durable: bool = False) -> Holding:
        """The image is whole: from now on it is offered.

        Raises:
            Mismatch: bytes are missing.
            OSError: it cannot be written.
        """
        self._verifier.finish()
        os.ftruncate(self._file, self._index.size_bytes)
        if durable:
            os.fsync(self._file)
        if not os.path.samestat(os.fstat(self._file), image_of(self._path).stat()):
            raise FileNotFoundError(f"{image_of(self._path)} was replaced by another process")
        write_index(self._path, self._index, durable=durable)
        self._finished = True
        return Holding(index=self._index, image=image_of(self._path), index_path=self._path, tier=Tier.PEER)


def ranges_of(items: Iterable[Item]) -> list[tuple[int, int]]:
    """Where bytes of these items lie, as (offset, length), neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for item in items:
        if ranges and sum(ranges[-1]) == item.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + item.length)
        elif item.length:
            ranges.append((item.offset, item.length))
    return ranges


def place_for(folder: Path, index: ShardIndex, keep: Name | None = None) -> Path:
    """The index path of the place that an image goes to: a free one, else that of the older, but not of ``keep``."""
    places = [folder / f"shard-{index.shard}.{letter}.json" for letter in "ab"]
    held = {one.index_path: one for one in holdings_in(folder, Tier.PEER) if one.index_path in places}
    free = [place for place in places if place not in held]
    return (
        free[0] if free else min(places, key=lambda place: (held[place].name == keep, held[place].index.identity.age))
    )


def remove_unfinished(folder: Path) -> None:
    """Remove incomplete files of dead processes; call while no process writes here."""
    for path in (*folder.glob("shard-*.image"), *folder.glob(".*")):
        if path.name.startswith(".") or not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def remove_stale(folder: Path, keep: Name | None = None) -> None:
    """Remove images that no restart can need any more: older than the two newest snapshots in ``folder``.

    They belong to shards that the run has no more, since it goes on with fewer ranks. What is to be kept stays.
    """
    held = holdings_in(folder, Tier.PEER)
    newest = sorted({one.index.identity for one in held}, key=lambda one: one.age, reverse=True)[:2]
    for one in held:
        if one.index.identity not in newest and one.name != keep:
            one.index_path.unlink(missing_ok=True)
            one.image.unlink(missing_ok=True)
