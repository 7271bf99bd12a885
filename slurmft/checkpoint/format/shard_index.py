"""The layout of one shard of a checkpoint. No torch: the writer process and a login node read it too.

A shard is one file image: the same bytes in shared memory, with a peer, and on disk as ``__<shard>_0.distcp``, which
torch.distributed.checkpoint reads. Its items follow each other without a gap, so their digests cover every byte.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from slurmft.checkpoint.format.damage import Damage, Damaged
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import Identity
from slurmft.system.files import FORMAT, read_json, replace_atomically
from slurmft.system.opening import UnsafeFile, read_bytes, trusted_owners

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
class Row:
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


Holder = int | Row | None
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
            key: [one.first, one.stride, one.count, one.dimension] if isinstance(one, Row) else one
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


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a ShardIndex is of, by its own fields; without its items."""

    identity: Identity
    shard: int
    shards: int
    size_bytes: int


def text_of(item: Item) -> str:
    """An item as it stands in the file of its index."""
    return json.dumps({name: getattr(item, name) for name in Item.__slots__}, sort_keys=True)


def write_index(path: Path, index: ShardIndex, *, durable: bool, mode: int = 0o600) -> None:
    """Write ``index`` so that readers see all of it or none.

    Raises:
        OSError: it was not written.
    """
    identity = [index.identity.step, index.identity.generation, index.identity.commit]
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


def verified_index(path: Path, size_bytes: int, digest: str) -> ShardIndex:
    """The index in a file whose bytes are exactly those of the marker.

    Raises:
        Damaged: they are not, or cannot be read.
    """
    try:
        raw = read_bytes(path, limit_bytes=min(size_bytes, MAX_INDEX_BYTES), owners=trusted_owners(path.parent))
    except FileNotFoundError:
        raise Damaged(Damage.MISSING, path.name) from None
    except UnsafeFile as error:
        damage = Damage.TRUNCATED if error.errno == errno.EFBIG else Damage.UNREADABLE
        raise Damaged(damage, path.name, f"it {error.strerror}") from error
    except OSError as error:
        raise Damaged(Damage.UNREADABLE, path.name, str(error)) from error
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


def stamp_of(raw: bytes, name: str) -> Stamp:
    """The numbers around the items of an index, which are not looked at.

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
    return Stamp(Identity(*identity), shard, shards, size_bytes)


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
        holder = Row(*one) if isinstance(one, list) else one
        numbers = one if isinstance(one, list) else [one] if one is not None else []
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"the holder of {key!r} makes no sense")
        last = holder.first + (holder.count - 1) * holder.stride if isinstance(holder, Row) else holder or 0
        if last >= shards or (isinstance(holder, Row) and not (holder.count and holder.stride)):
            raise ValueError(f"the holder of {key!r} is no shard")
        found[key] = holder
    return Holders.of(found)


def _check(index: ShardIndex) -> None:
    """Raises ValueError or TypeError unless the items tile the image and every number is what it should be."""
    numbers = [
        index.shard,
        index.shards,
        index.size_bytes,
        *(getattr(index.identity, name) for name in Identity.__slots__),
    ]
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
