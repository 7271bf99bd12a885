"""A shard's image: where each tensor lies, the bytes around it, and the objects behind it.

An item is a complete small archive of torch.save. Where a tensor's values go is left open (``skip_data``) and filled
by a copy, so that staging a save costs that copy and nothing else. Knows memory, not files or ranks' agreement.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import heapq
import io
import mmap
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import get_unsafe_globals_in_checkpoint, skip_data
from torch.utils._pytree import tree_leaves

from slurmft.checkpoint.image_file import Holder, Holders, Item, ShardIndex, Spread, text_of
from slurmft.checkpoint.state import KeyPath, Part, name_of_dtype
from slurmft.errors import CheckpointError, UsageError
from slurmft.storage.checkpoint_names import Identity
from slurmft.trainer.savers import local_part

# --- Values that are not tensors, as the bytes of torch.save: small, and checked to load without running code ---

_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Packed:
    """One object, ready to be placed in an image."""

    key: str
    data: bytes


class ObjectPacker:
    """Packs the same keys again and again; unchanged values cost a comparison."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, bytes]] = {}

    def pack(self, objects: Mapping[str, Any]) -> list[Packed]:
        """Each object's bytes, in order; later changes of the objects do not matter.

        Raises:
            CheckpointError: one of them would be refused at load, which is reported now rather than at the resume.
        """
        packed, fresh = [], {}
        for key, value in objects.items():
            known = self._last.get(key)
            if known is not None and _is_same(known[0], value):
                fresh[key], data = known, known[1]
            else:
                data = to_bytes(key, value)
                if _is_plain(value) and not any(isinstance(one, torch.Tensor) for one in tree_leaves(value)):
                    fresh[key] = copy.deepcopy(value), data  # a copy: the value may grow in place
            packed.append(Packed(key, data))
        self._last = fresh
        return packed


def to_bytes(key: str, value: Any) -> bytes:
    """``value`` in the form of torch.save.

    Raises:
        CheckpointError: it cannot be saved, or torch.load(weights_only=True) refuses it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        if _is_plain(value):
            return stream.getvalue()
        stream.seek(0)
        unsafe = sorted(get_unsafe_globals_in_checkpoint(stream))
        if not unsafe:
            from_bytes(stream.getvalue())
            return stream.getvalue()
        reason, cause = f"it holds {', '.join(unsafe)}", None
    except Exception as error:  # noqa: BLE001 - any error of the object's own code
        reason, cause = f"{type(error).__name__}: {str(error)[:300]}", error
    raise CheckpointError(
        f"{key} cannot be part of a checkpoint, torch.load(weights_only=True) would refuse it: {reason}",
        hint="save plain numbers, strings, lists, dicts and tensors only",
    ) from cause


def from_bytes(data: bytes | bytearray | memoryview) -> Any:
    """The reverse of ``to_bytes``, tensors on the CPU; runs no code that the bytes bring along."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _is_plain(value: Any) -> bool:
    """Whether it is made of nothing but what torch.load(weights_only=True) always takes."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind in (list, tuple):
        return all(_is_plain(each) for each in value)
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return bool(kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized)


def _is_same(first: Any, second: Any) -> bool:
    """Equal in type and value, to the last bit of a number."""
    if type(first) is not type(second):
        return False
    if type(first) in (list, tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if type(first) in (dict, OrderedDict):
        return list(first) == list(second) and all(_is_same(first[key], second[key]) for key in first)
    if type(first) is float:
        return bool(first.hex() == second.hex())  # 0.0 is not -0.0 here, and NaN is NaN
    return bool(first == second)


# --- A shard's image: where each tensor lies, the bytes around it, and the objects behind it ---

ALIGNMENT = 64
"""Of items and of each tensor's values: as torch.save has it, and enough for every dtype."""

SPREAD_SHARDS, SMALL_BYTES = 256, 4096
"""In a larger world shard 0 stores every plain tensor up to this size: to read one, its holder's index is read."""

SPARE_OBJECT_BYTES = 256 << 10
"""Room that ``capacity_bytes`` leaves for objects to grow from save to save."""

_Chunk = tuple[tuple[int, ...], tuple[int, ...]]
Memory = memoryview | bytearray | mmap.mmap
"""Writable, byte by byte."""


LISTED = "\t"
"""Between a tensor's key and the rest of its line in a ``Layout.listing``: no key has it there."""


class NoRoom(Exception):
    """The memory is too small for this save; never leaves the package."""


@dataclass(frozen=True, slots=True)
class _Archive:
    """The bytes that torch.save writes around a tensor's values."""

    head: bytes
    tail: bytes
    data_bytes: int

    @property
    def length(self) -> int:
        return _aligned(len(self.head) + self.data_bytes + len(self.tail))


class Layout:
    """Where one shard's tensors lie; the same from save to save until the trainer's tensors change."""

    def __init__(
        self, *, items: Sequence[Item], archives: Sequence[_Archive], rows: Sequence[tuple[Any, ...]], shard: int,
        shards: int, holders: Holders | None,
    ) -> None:  # fmt: skip
        self.items = tuple(items)
        self._holders = holders
        self._texts = tuple(map(text_of, self.items))
        self.shard, self.shards = shard, shards
        self.tensor_bytes = items[-1].offset + items[-1].length if items else 0
        self._archives = archives
        self._rows = list(rows)
        self._packer = ObjectPacker()
        digest = hashlib.blake2b(repr((shards, self._rows)).encode(), digest_size=8).digest()
        self.fingerprint = int.from_bytes(digest, "big") >> 1
        """63 bits over all keys, dtypes, shapes and placements, in order: equal on all ranks that save the same."""

    @classmethod
    def plan(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        shard: int,
        shards: int,
        paths: Mapping[str, KeyPath] | None = None,
        of_lead: Collection[str] = (),
    ) -> Layout:
        """Lay out this shard's part of ``tensors``, which all ranks have alike: the same keys in the same order.

        Plain tensors are spread over the shards, but for those ``of_lead``, which shard 0 stores; of a DTensor each
        rank stores its own part, once if several hold it.

        Raises:
            UsageError: a tensor has no values that could be saved (partial sums, the meta device).
        """
        holders: dict[str, Holder] | None = {} if shard == 0 else None
        chunks = _own_chunks(tensors, shard=shard, shards=shards, of_lead=of_lead, holders=holders)
        known = Holders.of({key: holders[key] for key in tensors}) if holders is not None else None
        return cls._of_chunks(tensors, chunks, known, shard=shard, shards=shards, paths=paths)

    @classmethod
    def plan_part(
        cls, tensors: Mapping[str, torch.Tensor], part: Part, *, paths: Mapping[str, KeyPath] | None = None
    ) -> Layout:
        """Lay out all that a part of ``tensors`` has, on any of the ranks that have it: part 0 has the plain ones.

        Raises:
            UsageError: a tensor has no values that could be saved, or is spread in another way than the part.
        """
        chunks, holders = dict[str, _Chunk](), dict[str, Holder]()
        for key, tensor in tensors.items():
            if tensor.is_meta:
                raise UsageError(f"{key} is on the meta device: it has no values to save")
            if isinstance(tensor, DTensor):
                holders[key] = Spread(0, 1, part.count, part.dimension_of(key, tensor))
            else:
                holders[key] = 0
            if (holders[key] != 0 or part.number == 0) and (chunk := _chunk(key, tensor)) is not None:
                chunks[key] = chunk
        known = Holders.of(holders) if part.number == 0 else None
        return cls._of_chunks(tensors, chunks, known, shard=part.number, shards=part.count, paths=paths)

    @classmethod
    def _of_chunks(
        cls, tensors: Mapping[str, torch.Tensor], chunks: Mapping[str, _Chunk], holders: Holders | None, *,
        shard: int, shards: int, paths: Mapping[str, KeyPath] | None,
    ) -> Layout:  # fmt: skip
        items, archives, end = list[Item](), list[_Archive](), 0
        for key, (starts, sizes) in chunks.items():
            whole = tensors[key]
            archive = _archive(whole.dtype, sizes)
            archives.append(archive)
            items.append(
                Item(
                    key=key,
                    path=(paths or {}).get(key, (key,)),
                    kind="tensor",
                    offset=end,
                    length=archive.length,
                    data_offset=end + len(archive.head),
                    data_length=archive.data_bytes,
                    dtype=name_of_dtype(whole.dtype),
                    shape=tuple(whole.shape),
                    starts=starts,
                    sizes=sizes,
                )
            )
            end += archive.length
        rows = [_row(key, tensor) for key, tensor in tensors.items()]
        return cls(items=items, archives=archives, rows=rows, shard=shard, shards=shards, holders=holders)

    @property
    def listing(self) -> bytes:
        """What ``fingerprint`` is of, a line for each tensor: its key, ``LISTED``, and the rest."""
        return "\n".join(f"{repr(key)[1:-1]}{LISTED}{rest}" for key, *rest in self._rows).encode()

    def matches(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether ``tensors`` are still of the same keys, dtypes, shapes and placements; cheap."""
        return len(tensors) == len(self._rows) and all(
            _row(key, tensor) == row for (key, tensor), row in zip(tensors.items(), self._rows, strict=True)
        )

    def pack(self, objects: Mapping[str, Any]) -> list[Packed]:
        """The objects' bytes, for ``capacity_bytes`` and ``with_objects``; keep them between the two.

        Raises:
            CheckpointError: one of them could not be loaded again.
        """
        return self._packer.pack(objects)

    def size_bytes(self, packed: Sequence[Packed]) -> int:
        """Of the image with these objects."""
        return self.tensor_bytes + sum(_aligned(len(each.data)) for each in packed)

    def capacity_bytes(self, packed: Sequence[Packed]) -> int:
        """The size of a slot: objects may grow."""
        objects_bytes = self.size_bytes(packed) - self.tensor_bytes
        return self.tensor_bytes + objects_bytes + objects_bytes // 4 + SPARE_OBJECT_BYTES

    def write_fixed(self, memory: Memory) -> None:
        """Put the bytes around the tensors into ``memory``: once for each slot and layout.

        Raises:
            NoRoom: it is too small.
        """
        self._check_room(memory, self.tensor_bytes)
        target = memoryview(memory)
        for item, archive in zip(self.items, self._archives, strict=True):
            after, end = item.offset + len(archive.head) + archive.data_bytes, item.offset + item.length
            target[item.offset : item.offset + len(archive.head)] = archive.head
            target[after:end] = archive.tail.ljust(end - after, b"\0")

    def views(self, memory: Memory) -> list[torch.Tensor]:
        """One tensor for each of ``items``, that lies in ``memory``: copy the values there, and nothing else.

        Raises:
            NoRoom: the memory is too small.
        """
        self._check_room(memory, self.tensor_bytes)
        if not self.items:
            return []
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=self.tensor_bytes)
        return [_view(whole, item) for item in self.items]

    def sources(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """This rank's own tensor for each of ``items``, in the same order; nothing is copied."""
        return [local_part(tensors[item.key]) for item in self.items]

    def with_objects(
        self,
        memory: Memory,
        packed: Sequence[Packed],
        *,
        identity: Identity,
        paths: Mapping[str, KeyPath] | None = None,
    ) -> ShardIndex:
        """Append the objects behind the tensors; the image's index, without digests.

        Raises:
            NoRoom: the memory is too small.
        """
        self._check_room(memory, self.size_bytes(packed))
        target, items, end = memoryview(memory), list(self.items), self.tensor_bytes
        for each in packed:
            length = _aligned(len(each.data))
            target[end : end + length] = each.data.ljust(length, b"\0")
            items.append(
                Item(
                    key=each.key,
                    path=(paths or {}).get(each.key, (each.key,)),
                    kind="object",
                    offset=end,
                    length=length,
                    data_offset=end,
                    data_length=len(each.data),
                )
            )
            end += length
        return ShardIndex(
            identity=identity, shard=self.shard, shards=self.shards, size_bytes=end, items=tuple(items),
            holders=self._holders, texts=self._texts,
        )  # fmt: skip

    def _check_room(self, memory: Memory, needed_bytes: int) -> None:
        if memoryview(memory).nbytes < needed_bytes:
            raise NoRoom(f"the image takes {needed_bytes} bytes")


def dtype_named(name: str) -> torch.dtype | None:
    """``torch.float32`` for ``float32``; None for a type that this torch does not know."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _row_of(tensor: DTensor, replica: int, shards: int) -> Spread | None:
    """The shards with the parts of a DTensor, in order; None where they are more than a row."""
    cut = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cut) > 1 or any(type(tensor.placements[number]) is not Shard for number in cut):
        return None
    others = [number for number in range(len(tensor.placements)) if number not in cut]
    if tensor.device_mesh.get_coordinate() is None:
        return None  # this rank takes no part in how its replicas are spread
    mesh = tensor.device_mesh.mesh
    width = mesh.size(cut[0]) if cut else 1
    ranks: list[int] = mesh.permute(*others, *cut).reshape(-1, width)[replica].tolist()
    stride = ranks[1] - ranks[0] if width > 1 else 1
    if stride < 1 or ranks != list(range(ranks[0], ranks[0] + width * stride, stride)) or ranks[-1] >= shards:
        return None
    return Spread(ranks[0], stride, width, cast(Shard, tensor.placements[cut[0]]).dim if cut else 0)


def _own_chunks(
    tensors: Mapping[str, torch.Tensor], *, shard: int, shards: int, of_lead: Collection[str],
    holders: dict[str, Holder] | None,
) -> dict[str, _Chunk]:  # fmt: skip
    """Key -> where this shard's part begins, and its sizes; in the order of ``tensors``; fills ``holders``."""
    alike: dict[Any, list[str]] = {None: []}
    small_bytes = SMALL_BYTES if shards > SPREAD_SHARDS else -1
    own = set[str]()
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise UsageError(f"{key} is on the meta device: it has no values to save")
        group = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if group is None and (key in of_lead or tensor.nbytes <= small_bytes):
            own |= {key} if shard == 0 else set()
            if holders is not None:
                holders[key] = 0
        else:
            alike.setdefault(group, []).append(key)
    for group, keys in alike.items():
        first = None if group is None else cast(DTensor, tensors[keys[0]])
        holder, count = (shard, shards) if first is None else _replica(first)
        chosen = spread([tensors[key].nbytes for key in keys], count)
        own |= {key for key, one in zip(keys, chosen, strict=True) if one == holder}
        if holders is not None:
            rows = {one: one if first is None else _row_of(first, one, shards) for one in set(chosen)}
            holders.update((key, rows[one]) for key, one in zip(keys, chosen, strict=True))
    return {key: chunk for key in tensors if key in own and (chunk := _chunk(key, tensors[key])) is not None}


def _replica(tensor: DTensor) -> tuple[int, int]:
    """Which of the ranks that hold the same part of a DTensor this one is, and how many they are."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return -1, 1  # this rank is not in the mesh
    number, count = 0, 1
    for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            number, count = number * size + place, count * size
    return number, count


def _chunk(key: str, tensor: torch.Tensor) -> _Chunk | None:
    """This rank's part; None where it has none of a tensor that is not itself empty."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(f"{key} is a partial sum over ranks: reduce it before it is saved")
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1:
        raise CheckpointError(f"{key} has {len(chunks)} parts on this rank; one is what can be saved")
    starts, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    if 0 in sizes and 0 not in tensor.shape:
        return None
    return starts, sizes


def _row(key: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """The inputs of a layout; compared at every save, and of the same repr on every rank."""
    if isinstance(tensor, DTensor):
        return key, tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh.shape
    return key, tensor.dtype, tensor.shape


def _view(whole: torch.Tensor, item: Item) -> torch.Tensor:
    dtype = dtype_named(item.dtype)
    if not item.data_length or dtype is None:
        return torch.empty(item.sizes, dtype=dtype)
    return whole[item.data_offset : item.data_offset + item.data_length].view(dtype).view(item.sizes)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class _Recorder:
    """A file for torch.save that keeps the bytes and where it was left open."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.data_bytes = 0

    def write(self, data: bytes) -> int:
        (self.tail if self.data_bytes else self.head).extend(data)
        return len(data)

    def seek(self, count: int, whence: int) -> int:
        if whence != 1 or self.data_bytes:
            raise ValueError("not left open once")
        self.data_bytes = count
        return count

    def flush(self) -> None:
        """Nothing is buffered."""


@functools.cache
def _archive(dtype: torch.dtype, sizes: tuple[int, ...]) -> _Archive:
    """The archive of any tensor of this kind: its name is not part of it."""
    recorder = _Recorder()
    blank = torch.empty(sizes, dtype=dtype)  # never touched: costs address space only
    try:
        with skip_data():
            torch.save(blank, cast("IO[bytes]", recorder))
        archive = _Archive(bytes(recorder.head), bytes(recorder.tail), recorder.data_bytes)
    except (ValueError, RuntimeError):
        archive = None
    if archive is None or not _is_usable(archive, blank):
        archive = _cut_archive(blank)  # skip_data is young, and may change
    if not _is_usable(archive, blank):
        raise CheckpointError(f"torch {torch.__version__} writes its archives in a way that is not known here")
    return archive


def _is_usable(archive: _Archive, tensor: torch.Tensor) -> bool:
    return archive.data_bytes == tensor.nbytes and not (tensor.nbytes and len(archive.head) % ALIGNMENT)


def _cut_archive(tensor: torch.Tensor) -> _Archive:
    """The same by way of a whole archive, in memory."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    if not tensor.nbytes:
        return _Archive(stream.getvalue(), b"", 0)
    stream.seek(0)
    start: int = torch._C.PyTorchFileReader(stream).get_record_offset("data/0")  # type: ignore[attr-defined]
    whole = stream.getbuffer()
    return _Archive(bytes(whole[:start]), bytes(whole[start + tensor.nbytes :]), tensor.nbytes)


def spread(sizes_bytes: Sequence[int], holders: int) -> list[int]:
    """For each value the number of the holder that stores it, from 0; the same answer everywhere.

    Balanced: no holder gets more than the mean of all plus the largest single value. Values of equal size go round.

    Raises:
        ValueError: there are no holders, or a size is negative.
    """
    if holders < 1 or any(size < 0 for size in sizes_bytes):
        raise ValueError(f"{len(sizes_bytes)} values cannot be spread over {holders} holders")
    chosen = [0] * len(sizes_bytes)
    loads = [(0, 0, holder) for holder in range(holders)]  # bytes, values, holder: empty values are spread too
    # The largest first: small values even out at the end.
    for place in sorted(range(len(sizes_bytes)), key=lambda place: (-sizes_bytes[place], place)):
        load, count, holder = loads[0]
        heapq.heapreplace(loads, (load + sizes_bytes[place], count + 1, holder))
        chosen[place] = holder
    return chosen
