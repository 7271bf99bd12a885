"""What the writer does with a staged image, in one call: for tests of the format."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from slurmft.checkpoint.catalog import METADATA_FILE, Entry, FileRecord, metadata_bytes, write_marker
from slurmft.checkpoint.image import Layout
from slurmft.checkpoint.image_file import ShardIndex, image_file, index_file, read_index, write_index
from slurmft.checkpoint.loading import Prepared, prepare
from slurmft.checkpoint.reading import Source, Stored
from slurmft.checkpoint.state import FlatState, Trainee, capture
from slurmft.storage.checkpoint_names import Identity

IDENTITY = Identity(7, 0, 1)


def stage(state: FlatState, *, shard: int = 0, shards: int = 1) -> tuple[bytearray, ShardIndex]:
    layout = Layout.plan(state.tensors, shard=shard, shards=shards, paths=state.paths)
    packed = layout.pack(state.objects)
    memory = bytearray(layout.capacity_bytes(packed))
    layout.write_fixed(memory)
    for view, source in zip(layout.views(memory), layout.sources(state.tensors), strict=True):
        view.copy_(source)
    return memory, layout.with_objects(memory, packed, identity=IDENTITY, paths=state.paths)


def write(folder: Path, memory: bytearray, index: ShardIndex) -> ShardIndex:
    folder.mkdir(exist_ok=True)
    (folder / image_file(index.shard)).write_bytes(memory[: index.size_bytes])
    digests = [xxhash.xxh3_128(memory[i.offset : i.offset + i.length]).hexdigest() for i in index.items]
    hashed = index.with_digests(digests)
    write_index(folder / index_file(index.shard), hashed, durable=False)
    return hashed


def stored_in(folder: Path, index: ShardIndex) -> Stored:
    """A state of one shard."""
    return Stored({0: Source(image=folder / image_file(0), index=index)})


def save(folder: Path, trainee: Trainee, *, extra=None, rank: int = 0, ranks: int = 1) -> ShardIndex:
    return write(folder, *stage(capture(trainee, extra, rank=rank), shard=rank, shards=ranks))


def commit(folder: Path, ranks: int = 1) -> list[ShardIndex]:
    indexes = [read_index(folder / index_file(shard)) for shard in range(ranks)]
    (folder / METADATA_FILE).write_bytes(metadata_bytes(indexes))
    return indexes


def publish(directory: Path, identity: Identity, trainee: Trainee, *, metrics=None, ranks: int = 1) -> Path:
    """A committed checkpoint, marker and all, saved as if by ``ranks`` ranks."""
    folder = directory / identity.folder_name
    folder.mkdir(parents=True)
    for rank in range(ranks):
        memory, index = stage(capture(trainee, None, rank=rank), shard=rank, shards=ranks)
        write(folder, memory, replace(index, identity=identity))
    commit(folder, ranks)
    files = {}
    for path in folder.iterdir():
        raw = path.read_bytes()
        is_image = path.suffix == ".distcp"
        files[path.name] = FileRecord(len(raw), "" if is_image else xxhash.xxh3_128_hexdigest(raw))
    write_marker(
        Entry(
            step=identity.step,
            path=folder,
            metrics=metrics or {},
            committed_at=datetime(2030, 1, 1, tzinfo=UTC),
            generation=identity.generation,
            commit=identity.commit,
            attempt="",
            world_size=ranks,
            files=files,
        )
    )
    return folder


class InFolder(Mapping[int, Source]):
    """The shards in a folder, each read when it is asked for."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks

    def __getitem__(self, shard: int) -> Source:
        return Source(image=self.folder / image_file(shard), index=read_index(self.folder / index_file(shard)))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.ranks))

    def __len__(self) -> int:
        return self.ranks


def load(folder: Path, trainee: Trainee, *, rank: int = 0, ranks: int = 1) -> Prepared:
    return prepare(trainee, opened(folder, rank=rank, ranks=ranks), rank=rank, world_size=ranks)


def opened(folder: Path, *, rank: int | None, ranks: int) -> Stored:
    """As rank ``rank`` opens it; None: all indexes are read."""
    return Stored(InFolder(folder, ranks), own=rank)
