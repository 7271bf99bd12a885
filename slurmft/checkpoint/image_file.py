"""An image as a file: its index, its writing, and damage in it; who uses one at the moment, and which ones lie in a
folder of a node's memory. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

import xxhash

from slurmft.errors import StorageError
from slurmft.policy.checkpoints import Name, Tier
from slurmft.storage.checkpoint_names import MANIFEST, MAX_STEP, Identity
from slurmft.system.files import (
    FORMAT,
    UnsafeFile,
    open_regular,
    read_bytes,
    read_json,
    replace_atomically,
    trusted_owners,
)

# --- damage ---
# The kinds of damage to a checkpoint. No torch.


class Damage(IntEnum):
    """The damage to a file; an integer, so that ranks can exchange it."""

    NONE = 0
    MISSING = 1
    TRUNCATED = 2
    CHANGED = 3
    UNREADABLE = 4
    NEWER = 5
    MISFIT = 6
    QUARANTINED = 7
    GIVEN_UP = 8
    """Quarantined, and where nothing else is left the run begins anew."""

    ASTRAY = 9

    @property
    def text(self) -> str:
        """A text that continues the file's name."""
        return _DAMAGE_TEXT[self]


_DAMAGE_TEXT = {
    Damage.NONE: "is intact",
    Damage.MISSING: "is missing",
    Damage.TRUNCATED: "has the wrong size",
    Damage.CHANGED: "has the wrong checksum",
    Damage.UNREADABLE: "cannot be read",
    Damage.NEWER: "was written by a newer slurmft",
    Damage.QUARANTINED: "belongs to a quarantined checkpoint",
    Damage.GIVEN_UP: "belongs to a quarantined checkpoint",
    Damage.MISFIT: "does not fit the objects to load it into",
    Damage.ASTRAY: "has ranks at different places in the data",
}


class Damaged(Exception):
    """A file of a checkpoint cannot be used; never leaves this package."""

    def __init__(self, damage: Damage, file_name: str, detail: str = "", *, hint: str = "") -> None:
        super().__init__(f"{file_name} {damage.text}" + (f": {detail}" if detail else ""))
        self.damage = damage
        self.file_name = file_name
        self.hint = hint


@contextlib.contextmanager
def damage_in(name: str) -> Iterator[None]:
    """Around what reads a file of this name: errors of the system are damage to it.

    Raises:
        Damaged: it cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise Damaged(Damage.MISSING, name) from None
    except UnsafeFile as error:
        damage = Damage.TRUNCATED if error.errno == errno.EFBIG else Damage.UNREADABLE
        raise Damaged(damage, name, f"it {error.strerror}") from error
    except OSError as error:
        raise Damaged(Damage.UNREADABLE, name, str(error)) from error


# --- shard index ---
# The layout of one shard of a checkpoint. No torch: the writer process and a login node read it too.
#
# A shard is one file image: the same bytes in shared memory, with a peer, and on disk as ``__<shard>_0.distcp``, which
# torch.distributed.checkpoint reads. Its items follow each other without a gap, so their digests cover every byte.

MAX_INDEX_BYTES = 256 << 20

Kind = Literal["tensor", "object"]


def image_file(shard: int) -> str:
    """The name of a shard's bytes in a checkpoint folder; torch's own pattern."""
    return f"__{shard}_0.distcp"


def index_file(shard: int) -> str:
    """The name of a shard's index in a checkpoint folder: written when its bytes are durable, as their receipt."""
    return f"__{shard}_0.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One tensor, or one part of a tensor that is spread over ranks, or one other object, in the form of torch.save."""

    key: str
    """As torch.distributed.checkpoint flattens it: ``model.head.weight``, ``optimizer.state.head.weight.exp_avg``."""

    kind: Kind
    offset: int
    length: int
    """Bytes [offset, offset + length) of the image; padding in front of the next item belongs to this one."""

    data_offset: int
    data_length: int
    """The tensor's raw values in the machine's byte order, row by row; of an object, all that torch.load reads."""

    dtype: str = ""
    """``float32``, as in ``torch.float32``; empty for an object."""

    shape: tuple[int, ...] = ()
    """Of the whole tensor."""

    starts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    """Which part of the whole tensor this is: where it begins in each dimension, and its shape."""

    path: tuple[str | int, ...] = ()
    """The same key in its pieces: a string leads into a dict, a number into a list. Empty: the key is one piece."""

    digest: str = ""
    """xxh3_128 of the item's bytes in hex; empty until the writer has read them."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The shards that have the parts of a tensor, which is cut along one dimension: every ``stride``-th from ``first``.

    Part ``n`` is what ``torch.chunk`` would make of it; parts at the end may be empty, and are not stored.
    """

    first: int
    stride: int
    count: int
    dimension: int

    def shards_of(self, size: int, start: int, length: int) -> range:
        """The shards with the values [start, start + length) of ``size`` along the dimension."""
        part = max(-(-size // self.count), 1)
        begin, end = start // part, -(-(start + length) // part)
        return range(self.first + begin * self.stride, self.first + min(end, self.count) * self.stride, self.stride)


Holder = int | Spread | None
"""The shard of a whole tensor, the row of shards with its parts, or None where they can only be searched for."""


@dataclass(frozen=True, slots=True)
class Holders:
    """Where every tensor of a checkpoint is, so that a rank reads the indexes that it needs and no others."""

    by_key: Mapping[str, Holder]
    text: str = field(default="", compare=False, repr=False)
    """As it stands in the file of an index."""

    @classmethod
    def of(cls, by_key: Mapping[str, Holder]) -> Holders:
        """The same with its text."""
        values = {
            key: [one.first, one.stride, one.count, one.dimension] if isinstance(one, Spread) else one
            for key, one in by_key.items()
        }
        return cls(by_key, json.dumps(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """One shard of one checkpoint. Its address is (identity, shard), independent of the rank that holds it."""

    identity: Identity
    shard: int
    shards: int
    """How many make the whole checkpoint: the world size that saved."""

    size_bytes: int
    """Of the image."""

    items: tuple[Item, ...]

    holders: Holders | None = None
    """Of all tensors of the whole checkpoint; in shard 0 alone, and not in checkpoints of slurmft 0.1."""

    texts: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Of the first so many items, ``text_of``: the training loop waits while an index is written."""

    @property
    def is_hashed(self) -> bool:
        """Whether every item has its digest."""
        return all(item.digest for item in self.items)

    def with_digests(self, digests: Sequence[str]) -> ShardIndex:
        """The same index, its items with these digests, in order."""
        hashed = tuple(replace(item, digest=digest) for item, digest in zip(self.items, digests, strict=True))
        return replace(self, items=hashed, texts=tuple(map(text_of, hashed)))  # it is written more than once


def text_of(item: Item) -> str:
    """An item as it stands in the file of its index."""
    return json.dumps({name: getattr(item, name) for name in Item.__slots__}, sort_keys=True)


def write_index(path: Path, index: ShardIndex, *, durable: bool, mode: int = 0o600) -> None:
    """Write ``index`` so that readers see all of it or none.

    Raises:
        OSError: it was not written.
    """
    identity = [*index.identity]
    items = ", ".join([*index.texts, *map(text_of, index.items[len(index.texts) :])])
    rest = f'"shard": {index.shard}, "shards": {index.shards}, "size_bytes": {index.size_bytes}'
    holders = f'"holders": {index.holders.text}, ' if index.holders is not None else ""
    text = f'{{"format": {FORMAT}, "identity": {identity}, "items": [{items}], {holders}{rest}}}\n'
    replace_atomically(path, text, mode=mode, durable=durable)


def read_index(path: Path) -> ShardIndex | None:
    """The index in a file; None where there is no file.

    Raises:
        NewerFormat: a newer slurmft wrote it.
        StorageError: it cannot be read, or is not an index.
    """
    value = read_json(path, limit_bytes=MAX_INDEX_BYTES)
    if value is None:
        return None
    try:
        return _index(value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StorageError(f"{path} is not the index of a shard: {error!r}") from error


Fingerprint = tuple[int, int, int]


def fingerprint(path: Path) -> Fingerprint | None:
    """Distinguishes versions of a small file; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def verified_index(path: Path, size_bytes: int, digest: str) -> ShardIndex:
    """The index in a file whose bytes are exactly those of the marker.

    Raises:
        Damaged: they are not, or cannot be read.
    """
    with damage_in(path.name):
        raw = read_bytes(path, limit_bytes=min(size_bytes, MAX_INDEX_BYTES), owners=trusted_owners(path.parent))
    if len(raw) != size_bytes:
        raise Damaged(Damage.TRUNCATED, path.name)
    if xxhash.xxh3_128_hexdigest(raw) != digest:
        raise Damaged(Damage.CHANGED, path.name)
    return parse_index(raw, path.name)


def parse_index(raw: bytes, name: str) -> ShardIndex:
    """The index that a file of this name has as its content.

    Raises:
        Damaged: it is none.
    """
    try:
        value = json.loads(raw)
        if value["format"] > FORMAT:
            raise Damaged(Damage.NEWER, name)
        return _index(value)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(Damage.UNREADABLE, name, repr(error)) from error


_HEAD = re.compile(rb'\{"format": (\d+), "identity": \[(\d+), (\d+), (\d+)\], "items": \[')
_TAIL = re.compile(rb'"shard": (\d+), "shards": (\d+), "size_bytes": (\d+)\}\n$')


def stamp_of(raw: bytes, name: str) -> ShardIndex:
    """An index as that file has it, but for its items, which are not looked at.

    Raises:
        Damaged: it is no index of this format.
    """
    head, tail = _HEAD.match(raw[:200]), _TAIL.search(raw[-200:])
    if head is None or tail is None:
        raise Damaged(Damage.UNREADABLE, name, "it is not the index of a shard")
    format_, *identity = map(int, head.groups())
    if format_ > FORMAT:
        raise Damaged(Damage.NEWER, name)
    shard, shards, size_bytes = map(int, tail.groups())
    return ShardIndex(identity=Identity(*identity), shard=shard, shards=shards, size_bytes=size_bytes, items=())


def _index(value: Mapping[str, Any]) -> ShardIndex:
    items = tuple(
        Item(**{**{name: item[name] for name in Item.__slots__},
                **{name: tuple(item[name]) for name in ("shape", "starts", "sizes", "path")}})
        for item in value["items"]
    )  # fmt: skip
    index = ShardIndex(
        identity=Identity(*value["identity"]),
        shard=value["shard"],
        shards=value["shards"],
        size_bytes=value["size_bytes"],
        items=items,
        holders=_holders(value["holders"], value["shards"]) if value.get("holders") is not None else None,
    )
    _check(index)
    return index


def _holders(value: Mapping[str, Any], shards: int) -> Holders:
    """Raises ValueError or TypeError where they lead out of the checkpoint."""
    found: dict[str, Holder] = {}
    for key, one in value.items():
        holder = Spread(*one) if isinstance(one, list) else one
        numbers = one if isinstance(one, list) else [one] if one is not None else []
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"the holder of {key!r} makes no sense")
        last = holder.first + (holder.count - 1) * holder.stride if isinstance(holder, Spread) else holder or 0
        if last >= shards or (isinstance(holder, Spread) and not (holder.count and holder.stride)):
            raise ValueError(f"the holder of {key!r} is no shard")
        found[key] = holder
    return Holders.of(found)


def _check(index: ShardIndex) -> None:
    """Raises ValueError or TypeError unless the items tile the image and every number is what it should be."""
    numbers = [index.shard, index.shards, index.size_bytes, *index.identity]
    if any(type(number) is not int or number < 0 for number in numbers) or index.shard >= index.shards:
        raise ValueError("its numbers make no sense")
    end = 0
    for item in index.items:
        numbers = [item.offset, item.length, item.data_offset, item.data_length, *item.shape, *item.starts, *item.sizes]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"item {item.key!r} has a number that makes no sense")
        inside = item.offset <= item.data_offset and item.data_offset + item.data_length <= item.offset + item.length
        if item.offset != end or not inside:
            raise ValueError(f"item {item.key!r} does not follow the one before it")
        if item.kind not in ("tensor", "object") or not all(
            type(t) is str for t in (item.key, item.dtype, item.digest)
        ):
            raise ValueError(f"item {item.key!r} is of no known kind")
        if not (item.dtype.isidentifier() if item.kind == "tensor" else not item.dtype):  # it goes into .metadata
            raise ValueError(f"item {item.key!r} has the dtype {item.dtype[:40]!r}")
        if not all(type(piece) in (str, int) for piece in item.path) or (
            item.path and ".".join(map(str, item.path)) != item.key
        ):
            raise ValueError(f"item {item.key!r} has another path")
        if not len(item.shape) == len(item.starts) == len(item.sizes):
            raise ValueError(f"item {item.key!r} has {len(item.shape)} dimensions and {len(item.sizes)} sizes")
        end = item.offset + item.length
    if end != index.size_bytes:
        raise ValueError(f"its items end at {end} of {index.size_bytes} bytes")


# --- image file ---
# The bytes of an image on their way into memory, each item's digest checked as they pass. No torch.

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
        with damage_in(path.name):
            self._descriptor = open_regular(path, owners=trusted_owners(path.parent))
        if os.fstat(self._descriptor).st_size < index.size_bytes:
            self.close()
            raise Damaged(Damage.TRUNCATED, path.name)

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_error: object) -> None:
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


# --- image writing ---
# Bytes from memory to a file that appears whole and durable: past the page cache where that is possible. No torch.
#
# Direct writes cost half the time of buffered ones and hardly any processor, and leave the page cache to the training.

PIECE_BYTES = 16 << 20
_BUFFERED_BYTES = 4 << 20
_BEHIND_BYTES = 32 << 20
"""How much a buffered write may be ahead of the disk: the fsync at the end must not stall for long."""

_HASH_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_SYNC_AND_WAIT = 1 | 2 | 4
"""SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER of sync_file_range(2)."""

_TEMPORARY = ".tmp"

_KEPT = 3
"""A rank's places in memory, at most."""

Pace = Callable[[int], None]
"""Called with the bytes done so far; may sleep, and may raise to leave the work."""


class Mappings:
    """Files as memory. The newest few stay mapped: to map an image anew at every save costs as much as to hash it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], mmap.mmap] = {}

    @contextlib.contextmanager
    def of(self, descriptor: int, size_bytes: int) -> Iterator[memoryview]:
        """The first bytes of an open file.

        Raises:
            OSError: it is shorter.
        """
        status = os.fstat(descriptor)
        if status.st_size < size_bytes:
            raise OSError(errno.ENODATA, f"has fewer than {size_bytes} bytes")
        if not size_bytes:
            yield memoryview(b"")
            return
        memory = self._kept.pop((status.st_dev, status.st_ino), None)
        if memory is None or len(memory) < size_bytes:
            memory = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._kept[status.st_dev, status.st_ino] = memory  # keeps the file, and so its inode number
        for old in [*self._kept][: len(self._kept) - _KEPT]:
            del self._kept[old]
        with memoryview(memory) as whole, whole[:size_bytes] as view:
            yield view


class NewFile:
    """A file that takes its name when it is whole. Left before that, nothing of it stays, unless we are killed."""

    def __init__(self, folder: Path, name: str, *, mode: int) -> None:
        self._path = folder / name
        self._temporary = folder / f".{name}.{os.getpid()}-{os.urandom(4).hex()}{_TEMPORARY}"
        self._is_direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._temporary, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # the kernel may have made the file before it found that this filesystem has no direct writes
            self._temporary.unlink(missing_ok=True)
            self._descriptor = os.open(self._temporary, flags, 0o600)
            self._is_direct = False
        os.fchmod(self._descriptor, mode)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        os.close(self._descriptor)
        if kind is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def write(self, view: memoryview, pace: Pace) -> None:
        """Write all of ``view``.

        Raises:
            OSError: it was not.
        """
        done = self._write_directly(view, pace) if self._is_direct else 0
        if done < len(view):
            self._write_buffered(view, done, pace)

    def put_in_place(self) -> None:
        """Give it its name, over a leftover of the same name. Durable with the folder's own fsync."""
        os.replace(self._temporary, self._path)  # noqa: PTH105 - same folder, so the rename cannot cross filesystems

    def sync(self) -> None:
        """Return when it is on the disk."""
        os.fsync(self._descriptor)

    def _write_directly(self, view: memoryview, pace: Pace) -> int:
        """Whole blocks, as many as the filesystem takes in this way; returns the bytes written."""
        done, whole = 0, len(view) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            while done < whole:
                done += os.pwrite(self._descriptor, view[done : min(done + PIECE_BYTES, whole)], done)
                if done % _BLOCK_BYTES:
                    done -= done % _BLOCK_BYTES  # a short write, as before a full disk: the rest will say why
                    break
                pace(done)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return done

    def _write_buffered(self, view: memoryview, start: int, pace: Pace) -> None:
        done = synced = start
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done : done + _BUFFERED_BYTES], done)
            if done - synced >= 2 * _BEHIND_BYTES:
                _sync_range(self._descriptor, synced, _BEHIND_BYTES)
                synced += _BEHIND_BYTES
            pace(done)


def is_temporary(name: str) -> bool:
    """Whether a file in a checkpoint folder is one of ours that has not got its name yet."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def digests(view: memoryview, index: ShardIndex, pace: Pace) -> list[str]:
    """``digest_of`` each item, in order."""
    return [digest_of(view, item, pace) for item in index.items]


def digest_of(view: memoryview, item: Item, pace: Pace = lambda _done_bytes: None) -> str:
    """xxh3_128 of an item's bytes in hex; ``view`` is the whole image. Lets other threads run meanwhile."""
    digest, end = xxhash.xxh3_128(), item.offset + item.length
    for start in range(item.offset, end, _HASH_BYTES):
        digest.update(view[start : min(start + _HASH_BYTES, end)])
        pace(start)
    return digest.hexdigest()


def _sync_range(descriptor: int, start: int, length: int) -> None:
    """Have part of a file written out. Where that is not possible, the fsync at the end does it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_AND_WAIT):
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            raise OSError(number, os.strerror(number))


# --- in use ---
# Which files are in use at the moment: the image that a writer reads, the checkpoint that is being loaded. No torch.
#
# Built on flock, whose lock ends with its holder, however that dies. Holders share; to change or remove the file a
# process must lock it alone. Between processes of one node this always holds. Between nodes it holds where the
# filesystem carries flock to its server: NFS from version 4 or Linux 2.6.12 on, Lustre mounted with ``flock``, GPFS,
# BeeGFS and CephFS with locks switched on; not with NFS ``local_lock=flock`` or ``nolock``, nor Lustre ``localflock``.
# Where there are no locks at all, no process counts as a holder: the newest two good checkpoints are never removed all
# the same, so that a reader of the newest is safe until two more have been committed.

_PATIENCE_S = 1.0
_CLAIM = ".claim."


@contextlib.contextmanager
def holding(path: Path) -> Iterator[int]:
    """A descriptor to read ``path`` with; while it is open, others see that the file is in use.

    Raises:
        BlockingIOError: another process has it alone, to change or remove it.
        FileNotFoundError: it is gone, or was replaced meanwhile.
        OSError: it cannot be opened.
    """
    descriptor = open_regular(path)
    with _locked(path, descriptor, lambda: lock_within(lambda: _lock(descriptor, fcntl.LOCK_SH))):
        yield descriptor


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """A descriptor of ``path`` that no other process holds; new holders are refused until the end.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: it is gone, or was replaced meanwhile.
        OSError: it cannot be opened.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except UnsafeFile:
        raise
    except PermissionError:
        descriptor = open_regular(path)  # enough on a local filesystem
    with _locked(path, descriptor, lambda: _lock(descriptor, fcntl.LOCK_EX)):
        yield descriptor


def is_held(path: Path) -> bool:
    """Whether any process holds ``path`` now; False where it is gone, or cannot be locked."""
    try:
        with alone(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


class Claim:
    """Until it is released, or its process ends, others see that a save in ``folder`` goes on.

    The file is one of the temporary files of a save: should it be left behind, it goes with the commit or the folder.

    Raises:
        OSError: it cannot be claimed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{_CLAIM}{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._descriptor, fcntl.LOCK_SH)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The save has ended. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_claimed(folder: Path) -> bool:
    """Whether a live process has claimed ``folder``."""
    return any(is_held(path) for path in folder.glob(f"{_CLAIM}*"))


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around the reading of a committed checkpoint: it is not removed meanwhile. One rank may do it for all.

    Where its marker cannot be held, others do not see that it is in use: the newest two stay in any case.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(holding(folder / MANIFEST))
        yield


@contextlib.contextmanager
def _locked(path: Path, descriptor: int, lock: Callable[[], None]) -> Iterator[None]:
    """Closes ``descriptor`` at the end."""
    try:
        lock()
        # it may have been unlinked between open and lock; then the lock protects nothing
        if not os.path.samestat(path.stat(), os.fstat(descriptor)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        # before the descriptor: a child that was forked meanwhile has it, too, and would go on holding the file
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
            raise


def lock_within(lock: Callable[[], None], within_s: float = _PATIENCE_S) -> None:
    """Call ``lock`` until it gets the lock: ``is_held`` has a file alone for a moment, and so does who removes it.

    Raises:
        BlockingIOError: it did not in time.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return lock()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# --- shards in a folder ---
# Complete images in a folder of a node's memory, or in one of copies. No torch.

MAX_WORLD = 1 << 20
"""Shards of one snapshot; half a word holds a shard's number with its tier (``memory_sources``)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One shard of one snapshot that lies on this node, complete."""

    index: ShardIndex
    image: Path
    index_path: Path
    tier: Tier

    @property
    def name(self) -> Name:
        return self.index.identity


def image_of(index_path: Path) -> Path:
    """The image that belongs to an index in a memory folder."""
    return index_path.with_suffix(".image")


def holdings_in(folder: Path, tier: Tier) -> list[Holding]:
    """The complete shards in one folder."""
    try:
        paths = sorted(folder.glob("shard-*.json"))
    except OSError:
        return []
    return [one for path in paths if (one := _holding(path, tier)) is not None]


def _holding(path: Path, tier: Tier) -> Holding | None:
    image = image_of(path)
    try:
        status = path.lstat()
        if not S_ISREG(status.st_mode) or status.st_size > MAX_INDEX_BYTES:
            return None
        index = read_index(path)
        status = image.lstat()
    except (OSError, StorageError) as error:
        log.debug("passing over %s: %s", path, error)
        return None
    if index is None or not S_ISREG(status.st_mode) or status.st_size < index.size_bytes:
        return None
    if index.shards > MAX_WORLD or max(index.identity) > MAX_STEP:
        return None
    return Holding(index=index, image=image, index_path=path, tier=tier)
