"""What the writer does with a staged image, in one call: for tests of the format."""

from __future__ import annotations

from pathlib import Path

import xxhash

from slurmft.checkpoint.dcp_metadata import METADATA_FILE, metadata_bytes
from slurmft.checkpoint.flat_state import FlatState, capture
from slurmft.checkpoint.image import Layout
from slurmft.checkpoint.landing import Prepared, prepare
from slurmft.checkpoint.reading import Stored
from slurmft.checkpoint.shard_index import ShardIndex, image_file, index_file, read_index, write_index
from slurmft.checkpoint.state import Trainee
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


def save(folder: Path, trainee: Trainee, *, extra=None, rank: int = 0, ranks: int = 1) -> ShardIndex:
    return write(folder, *stage(capture(trainee, extra, rank=rank), shard=rank, shards=ranks))


def commit(folder: Path, ranks: int = 1) -> list[ShardIndex]:
    indexes = [read_index(folder / index_file(shard)) for shard in range(ranks)]
    (folder / METADATA_FILE).write_bytes(metadata_bytes(indexes))
    return indexes


def load(folder: Path, trainee: Trainee, *, rank: int = 0, ranks: int = 1) -> Prepared:
    stored = Stored.in_folder(folder, [read_index(folder / index_file(shard)) for shard in range(ranks)])
    return prepare(trainee, stored, rank=rank)
