"""Reading a stored state: each tensor straight into its place, its digest checked on the way; and a committed
checkpoint as one file, for programs that know nothing of shards.

Of an image in a rank's own place in memory a tensor can also be had as it lies there, without reading it into memory
of its own first.

A checkpoint folder and a snapshot in memory are read alike; only the paths differ. Nothing that is read is run:
objects come through torch.load(weights_only=True), and only after their digest was right.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from slurmft.checkpoint.catalog import Entry, index_of
from slurmft.checkpoint.image import dtype_named, from_bytes
from slurmft.checkpoint.image_file import (
    Damage,
    Damaged,
    Holder,
    ImageFile,
    Item,
    ShardIndex,
    Spread,
    digest_of,
    fingerprint,
    holding,
    image_file,
    index_file,
    reading,
)
from slurmft.checkpoint.state import GROUPS, MODEL, OPTIMIZER, STATE, KeyPath, key_of, unflatten
from slurmft.errors import CheckpointError, UsageError
from slurmft.system.files import UnsafeFile, fsync_folder, mode_of_shown_files, opened, trusted_owners

# --- An image in a rank's own place in memory, used where it lies: verified there, and copied from there once ---
# To read it into new memory first costs more than both. Whatever fills the place takes its index away before the first
# byte changes, and does not begin while the image is held: an index that is still the same one after the copy says that
# what was copied is what was verified.


class MappedImage:
    """The image and its index. ``close`` lets others fill the place again; views of it must not be used after that.

    Raises:
        OSError: it cannot be held or mapped; it can still be read as a file.
    """

    def __init__(self, image: Path, index: Path, size_bytes: int) -> None:
        self._name, self._index = image.name, index
        with contextlib.ExitStack() as stack:
            descriptor = stack.enter_context(holding(image))
            if (version := fingerprint(index)) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(index))
            self._version = version
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
        with memoryview(self._memory) as whole:
            if digest_of(whole, item) != item.digest:
                raise Damaged(Damage.CHANGED, self._name, item.key)

    def view(self, item: Item, dtype: torch.dtype, start: int, sizes: tuple[int, ...]) -> torch.Tensor:
        """A run of an item's values, the first one's number being ``start``."""
        length = torch.Size(sizes).numel() * dtype.itemsize
        begin = item.data_offset + start * dtype.itemsize
        return self._whole[begin : begin + length].view(dtype).view(sizes)

    def is_unchanged(self) -> bool:
        """Whether nothing has begun to fill the place since it was held."""
        with suppress(OSError):
            return self._version is not None and fingerprint(self._index) == self._version
        return False

    def close(self) -> None:
        """Let it go. Idempotent."""
        self._stack.close()


# --- Reading a stored state: each tensor straight into its place, its digest checked on the way ---

MAX_OPEN = 256
"""Images at the same time."""

MAX_THREADS = 4
"""Of one rank: the ranks of a node read at the same time."""

HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True)
_Share = TypeVar("_Share")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where one shard's bytes are: in a checkpoint folder, in this node's memory, or a peer's copy."""

    image: Path
    index: ShardIndex
    own_place: Path | None = None
    """The file of the index, where the image lies in a rank's own place in memory; None elsewhere."""


class DiskSources(Mapping[int, Source]):
    """The shards of a committed checkpoint; the index of each is read and verified when it is asked for.

    Args:
        held: shards that lie in this node's memory, which go before those on disk.

    Raises:
        Damaged: the index that is asked for is not the one that was committed.
    """

    def __init__(self, entry: Entry, held: Mapping[int, Source] | None = None) -> None:
        self._entry, self._held = entry, held or {}

    def __getitem__(self, shard: int) -> Source:
        if shard in self._held:
            return self._held[shard]
        if not 0 <= shard < self._entry.world_size:
            raise KeyError(shard)
        return Source(image=self._entry.path / image_file(shard), index=index_of(self._entry, shard))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._entry.world_size))

    def __len__(self) -> int:
        return self._entry.world_size


@dataclass(frozen=True, slots=True)
class Target:
    """Memory that is to be filled with a part of a stored tensor."""

    tensor: torch.Tensor
    """On the host, contiguous, of the stored dtype; its shape is the part's."""

    starts: tuple[int, ...]
    """Where the part begins in the whole tensor."""

    is_mapped: bool = False
    """The tensor is the stored one itself: it only has to be verified, and must not be changed or kept."""

    @property
    def box(self) -> Box:
        return Box(self.starts, tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True)
class _Piece:
    source: Source
    item: Item

    @property
    def box(self) -> Box:
        return Box(self.item.starts, self.item.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The facts about a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: int
    """1 for a tensor that was on every rank, or is small; more when it was spread over ranks."""


class Stored:
    """One complete state, from shards in any place. Nothing is read in advance.

    Args:
        sources: the shards by their numbers; may read them when they are asked for, and raise Damaged then.
        own: the shard that has this rank's own parts. With it, and where shard 0 knows which shard has what, only the
            indexes of shards are read whose parts are needed: a rank of ten thousand does not read what all have
            written. Otherwise all are.

    Raises:
        Damaged: a shard is missing, belongs to another checkpoint, or the shards do not fit together.
    """

    def __init__(self, sources: Mapping[int, Source], *, own: int | None = None) -> None:
        self._sources = sources
        self._taken = dict[int, Source]()
        self._threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pieces: dict[str, list[_Piece]] = {}
        self._mapped: dict[Path, MappedImage | None] = {}
        self.tensors: dict[str, StoredTensor] = {}
        """Every stored tensor by its key."""
        self.objects: dict[str, None] = {}
        """The keys of objects that are not tensors; of other ranks' own objects only those that have been seen."""
        first = self._found(min(sources, default=0) if own is None else 0).index
        self.identity, self.shards = first.identity, first.shards
        self._holders: Mapping[str, Holder] | None = None
        if own is None or first.holders is None:
            self._take(range(self.shards))
            return
        self._holders = first.holders.by_key
        self._take([0] if own >= self.shards else [0, own])
        lacking = [one for key, one in self._holders.items() if key not in self._pieces]
        if any(one is None for one in lacking):
            self._take(range(self.shards))
        self._take(sorted({one.first if isinstance(one, Spread) else one or 0 for one in lacking}))
        if missing := [key for key in self._holders if key not in self.tensors]:
            raise Damaged(Damage.UNREADABLE, index_file(0), f"no shard has {missing[0]}")
        # in the same order on every rank, whatever it has read first: an optimizer keeps the order of what it loads
        self.tensors = {key: self.tensors[key] for key in {**self._holders, **self.tensors}}

    @property
    def seen(self) -> Collection[int]:
        """The shards whose indexes have been read."""
        return self._taken.keys()

    def look_at(self, shards: Iterable[int]) -> None:
        """Read the indexes of these shards as well: the objects in them are found from now on.

        Raises:
            Damaged: one is missing, or belongs to another checkpoint.
        """
        self._take(shards)

    def _found(self, shard: int) -> Source:
        try:
            return self._sources[shard]
        except KeyError:
            raise Damaged(Damage.MISSING, image_file(shard) if self._sources else index_file(shard)) from None

    def _take(self, shards: Iterable[int]) -> None:
        """Look at the indexes of such shards, once each."""
        touched = dict[str, None]()
        for shard in shards:
            if shard in self._taken:
                continue
            source = self._found(shard)
            if (source.index.identity, source.index.shards, source.index.shard) != (self.identity, self.shards, shard):
                raise Damaged(Damage.UNREADABLE, index_file(shard), "it belongs to another checkpoint")
            self._taken[shard] = source
            for item in source.index.items:
                self._pieces.setdefault(item.key, []).append(_Piece(source, item))
                touched[item.key] = None
        is_all = len(self._taken) == self.shards
        for key in touched:
            pieces = self._pieces[key]
            if pieces[0].item.kind == "tensor":
                holder = self._holders.get(key) if self._holders is not None else None
                self.tensors[key] = _checked(key, pieces, holder, is_all=is_all)
            else:
                self.objects[key] = None

    def _cover(self, key: str, box: Box) -> None:
        """Look at the shards that have parts of this box.

        Raises:
            Damaged: no shard has some of it.
        """
        if self._is_covered(key, box):
            return
        row, shape = (self._holders or {}).get(key), self.tensors[key].shape
        if isinstance(row, Spread) and box.count and row.dimension < len(shape):
            size = shape[row.dimension]
            self._take(row.shards_of(size, box.starts[row.dimension], box.sizes[row.dimension]))
            if self._is_covered(key, box):
                return
        self._take(range(self.shards))
        if not self._is_covered(key, box):
            raise Damaged(Damage.UNREADABLE, index_file(0), f"parts of {key} are missing")

    def _is_covered(self, key: str, box: Box) -> bool:
        parts = {part for piece in self._pieces[key] if (part := piece.box.overlap(box)) is not None}
        return sum(part.count for part in parts) == box.count

    def path(self, key: str) -> KeyPath:
        """The key in its pieces."""
        return self._pieces[key][0].item.path or (key,)

    def holder(self, key: str) -> str:
        """The name of the file that has (the first part of) it, for messages."""
        return image_file(self._pieces[key][0].source.index.shard)

    def load_objects(self, keys: Collection[str]) -> dict[str, Any]:
        """The values of objects, verified.

        Raises:
            Damaged: one of them is not what was written, or cannot be loaded.
        """
        buffers = {key: bytearray(self._pieces[key][0].item.data_length) for key in keys}
        self._read([(self._pieces[key][0], [(0, memoryview(buffer))], None) for key, buffer in buffers.items()])
        return {key: self._unpacked(key, buffer) for key, buffer in buffers.items()}

    def fill(self, targets: Mapping[str, Target]) -> None:
        """Fill each target from the pieces that cover it, and verify every piece that is touched, whole.

        Raises:
            Damaged: a piece is not what was written. The targets are partly filled then.
        """
        jobs, mapped = list[_Job](), list[_Piece]()
        for key, target in targets.items():
            self._cover(key, target.box)
        for key, target in targets.items():
            for piece in self._pieces[key]:
                if (part := piece.box.overlap(target.box)) is not None:
                    if target.is_mapped:
                        mapped.append(piece)
                    else:
                        jobs.append((piece, *_placed(piece, target, part)))
                elif not piece.box.count:
                    jobs.append((piece, [], None))
        self._verify(mapped)
        self._read(jobs)

    def mapped(self, key: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Target | None:
        """A part of a tensor as it lies in a rank's own place in memory, to be copied from until ``close``.

        ``fill`` verifies it. None where it has to be read: it is somewhere else, or in several pieces.
        """
        box = Box(starts, sizes)
        self._cover(key, box)
        pieces = [piece for piece in self._pieces[key] if piece.box.overlap(box) is not None]
        if len(pieces) != 1 or (image := self._image(pieces[0].source)) is None:
            return None
        piece, dtype = pieces[0], self.tensors[key].dtype
        if piece.box.overlap(box) != box or (start := piece.box.run_of(box)) is None:
            return None
        return Target(image.view(piece.item, dtype, start, sizes), starts, is_mapped=True)

    @property
    def is_unchanged(self) -> bool:
        """Whether all that ``mapped`` has given is still what ``fill`` verified; ask after it has been copied."""
        return all(image.is_unchanged() for image in self._mapped.values() if image is not None)

    def close(self) -> None:
        """Let go of mapped images. Idempotent."""
        for image in self._mapped.values():
            if image is not None:
                image.close()

    def _image(self, source: Source) -> MappedImage | None:
        if source.own_place is not None and source.image not in self._mapped:
            self._mapped[source.image] = None
            with suppress(OSError):
                self._mapped[source.image] = MappedImage(source.image, source.own_place, source.index.size_bytes)
        return self._mapped.get(source.image)

    def _verify(self, pieces: Sequence[_Piece]) -> None:
        def work(queue: Iterator[_Piece]) -> None:
            for piece in queue:
                if (image := self._image(piece.source)) is not None:
                    image.verify(piece.item)

        self._in_threads(work, sorted(pieces, key=lambda piece: -piece.item.length))

    def _in_threads(self, work: Callable[[Iterator[_Share]], None], shares: Sequence[_Share]) -> None:
        """Have each thread take shares until there are none: an iterator of a list hands each out once."""
        queue, count = iter(shares), max(1, min(self._threads, len(shares)))
        with ThreadPoolExecutor(count, thread_name_prefix="slurmft-read") as pool:
            for done in [pool.submit(work, queue) for _ in range(count)]:
                done.result()

    def _unpacked(self, key: str, data: bytearray) -> Any:
        try:
            return from_bytes(data)
        except MemoryError:
            raise  # says nothing about the file
        except Exception as error:
            raise Damaged(Damage.UNREADABLE, self.holder(key), f"{key}: {error}") from error

    def _read(self, jobs: Sequence[_Job]) -> None:
        by_source: dict[int, list[_Job]] = {}
        for job in jobs:
            by_source.setdefault(job[0].source.index.shard, []).append(job)
        each = list(by_source.values())
        for start in range(0, len(each), MAX_OPEN):
            self._read_some([job for jobs_of_one in each[start : start + MAX_OPEN] for job in jobs_of_one])

    def _read_some(self, jobs: Sequence[_Job]) -> None:
        with ExitStack() as stack:
            files = {
                source.image: stack.enter_context(ImageFile(source.image, source.index))
                for source in {id(piece.source): piece.source for piece, _, _ in jobs}.values()
            }
            failed = threading.Event()
            largest_first = sorted(jobs, key=lambda job: -job[0].item.length)
            self._in_threads(lambda queue: _work(queue, files, failed), largest_first)


_Job = tuple[_Piece, "list[tuple[int, memoryview]]", "_Scatter | None"]
"""A piece, where its bytes go, and what is copied when they are there."""


class _Scatter(NamedTuple):
    """Values that do not follow each other in memory: read into a piece of their own first."""

    read: torch.Tensor
    to: torch.Tensor


def _work(queue: Iterator[_Job], files: Mapping[Path, ImageFile], failed: threading.Event) -> None:
    """Take jobs until there are none, or another thread has failed."""
    try:
        for piece, memory, scatter in queue:
            if failed.is_set():
                return
            files[piece.source.image].read(piece.item, memory)
            if scatter is not None:
                scatter.to.copy_(scatter.read)
    except BaseException:
        failed.set()
        raise


def _placed(piece: _Piece, target: Target, part: Box) -> tuple[list[tuple[int, memoryview]], _Scatter | None]:
    from_value, to_value = piece.box.run_of(part), target.box.run_of(part)
    if from_value is not None and to_value is not None:
        width = target.tensor.element_size()
        start, length = to_value * width, part.count * width
        return [(from_value * width, bytes_of(target.tensor)[start : start + length])], None
    whole = fresh(piece.item.sizes, target.tensor.dtype)
    scatter = _Scatter(whole[piece.box.slices(part)], target.tensor[target.box.slices(part)])
    return [(0, bytes_of(whole))], scatter


def _checked(key: str, pieces: Sequence[_Piece], holder: Holder, *, is_all: bool) -> StoredTensor:
    """Check that the pieces fit the whole. Indexes have a checksum: this finds errors of a writer, not of a disk."""
    first = pieces[0].item
    dtype = dtype_named(first.dtype)
    name = index_file(pieces[0].source.index.shard)
    if dtype is None:
        raise Damaged(Damage.UNREADABLE, name, f"{key} has dtype {first.dtype[:40]!r}, which this torch does not know")
    whole = Box((0,) * len(first.shape), first.shape)
    boxes = {piece.box for piece in pieces}
    for piece in pieces:
        item = piece.item
        fits = (item.kind, item.dtype, item.shape) == ("tensor", first.dtype, first.shape)
        inside = all(a + n <= m for a, n, m in zip(item.starts, item.sizes, item.shape, strict=True))
        if not fits or not inside or item.data_length != piece.box.count * dtype.itemsize:
            raise Damaged(Damage.UNREADABLE, name, f"the parts of {key} do not fit together")
    if is_all and sum(box.count for box in boxes) != whole.count:
        raise Damaged(Damage.UNREADABLE, name, f"parts of {key} are missing, or there twice")
    return StoredTensor(dtype, first.shape, max(len(pieces), holder.count if isinstance(holder, Spread) else 1))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own memory; the tensor must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def fresh(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """New memory of any content, in huge pages where that is allowed: to touch it then costs a tenth."""
    tensor = torch.empty(sizes, dtype=dtype)
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length > 0:  # advice only: its result does not matter
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a whole tensor: where it begins in each dimension, and its sizes."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Of its values."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None where they have nothing in common."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def run_of(self, part: Box) -> int | None:
        """At which of this box's values, row by row, ``part`` begins; None where they do not follow each other."""
        if not _is_run(part.sizes, self.sizes):
            return None
        offset = 0
        for start, own_start, own_size in zip(part.starts, self.starts, self.sizes, strict=True):
            offset = offset * own_size + start - own_start
        return offset

    def slices(self, part: Box) -> tuple[slice, ...]:
        """Where in this box ``part`` lies."""
        return tuple(
            slice(start - own, start - own + size)
            for start, own, size in zip(part.starts, self.starts, part.sizes, strict=True)
        )


def _is_run(part: Sequence[int], whole: Sequence[int]) -> bool:
    place = len(whole)
    while place and part[place - 1] == whole[place - 1]:
        place -= 1
    # The innermost dimension that is cut may have any size; all outer ones must be a single row.
    return all(size == 1 for size in part[: max(place - 1, 0)])


# --- A committed checkpoint as one file, for programs that know nothing of shards ---


def export_torch(entry: Entry, out: Path, *, with_optimizer: bool) -> int:
    """One torch.save of ``{"model": ..., "step": ..., "metrics": ...}``, and ``"optimizer"`` by parameter names.

    The whole state is in memory meanwhile. Returns the file's size in bytes.

    Raises:
        CheckpointError: the checkpoint is damaged; there is no file.
        OSError: the file could not be written.
    """
    leaves = _read(entry, with_optimizer=with_optimizer)
    try:
        tree = unflatten(leaves)
    except ValueError as error:
        raise CheckpointError(f"the keys of {entry.path} make no sense: {error}") from error
    value = {MODEL: tree.get(MODEL, {}), "step": entry.step, "metrics": dict(entry.metrics)}
    if with_optimizer:
        optimizer = tree.get(OPTIMIZER, {})
        value[OPTIMIZER] = {**optimizer, STATE: optimizer.get(STATE, {}), GROUPS: optimizer.get(GROUPS, [])}
    with _new_file(out) as path:
        torch.save(value, path)
    return out.stat().st_size


def export_safetensors(entry: Entry, out: Path, *, with_optimizer: bool) -> int:
    """One safetensors file: the model's tensors by their names, the optimizer's with ``optimizer.`` in front.

    Such a file holds tensors only: numbers and texts are kept as JSON in its metadata under ``slurmft``, the rest is
    left out. Returns the file's size in bytes.

    Raises:
        UsageError: safetensors is not installed, or does not take a tensor of this state.
        CheckpointError: the checkpoint is damaged; there is no file.
        OSError: the file could not be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError("safetensors is not installed here", hint="pip install safetensors") from error
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for path, value in _read(entry, with_optimizer=with_optimizer).items():
        name = key_of(path[1:] if path[0] == MODEL else path)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            tensors[name] = value
        elif _is_json(value):
            others[name] = value
    told = {"step": entry.step, "metrics": {key: repr(value) for key, value in entry.metrics.items()}, "values": others}
    with _new_file(out) as path_:
        try:
            save_file(tensors, path_, metadata={"format": "pt", "slurmft": json.dumps(told)})
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise UsageError(f"safetensors cannot hold this state: {error}", hint="--format torch can") from error
    return out.stat().st_size


def _read(entry: Entry, *, with_optimizer: bool) -> dict[KeyPath, Any]:
    """Every value of the model, and of the optimizer, verified."""
    parts = (MODEL, OPTIMIZER) if with_optimizer else (MODEL,)
    try:
        with reading(entry.path):
            stored = Stored(DiskSources(entry))
            targets = {
                key: Target(fresh(tensor.shape, tensor.dtype), (0,) * len(tensor.shape))
                for key, tensor in stored.tensors.items()
                if stored.path(key)[0] in parts
            }
            stored.fill(targets)
            objects = stored.load_objects([key for key in stored.objects if stored.path(key)[0] in parts])
    except Damaged as error:
        raise CheckpointError(f"{entry.path} cannot be exported: {error}", hint="try an older one") from error
    values: Mapping[str, Any] = {key: target.tensor for key, target in targets.items()} | objects
    return {stored.path(key): value for key, value in values.items()}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) is not None or value is None)
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """A path beside ``out`` that takes its place, durably, when all went well; otherwise nothing is left."""
    descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name[:100]}.", suffix=".tmp")
    path = Path(name)
    try:
        os.close(descriptor)
        yield path
        with opened(path) as written:
            os.fsync(written)
        path.chmod(mode_of_shown_files())
        path.replace(out)
        fsync_folder(out.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
