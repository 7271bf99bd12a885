"""Checkpoint folders as thousands of ranks leave them: real layouts and indexes, and images of the ranks that load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from slurmft.checkpoint.image import Layout
from slurmft.checkpoint.image_file import Holders, Item, ShardIndex, Spread, image_file, index_file, write_index
from slurmft.checkpoint.state import FACTS, rank_key
from slurmft.storage.checkpoint_names import Identity

LAYERS, VALUES = 60, 64
"""Of a spread state: weights, each with two moments; and values of each on one rank."""

DENSE, DENSE_VALUES = 300, 2048
"""Of a state that every rank has: tensors, and values of each."""


def dense_tensors() -> dict[str, torch.Tensor]:
    """DDP: weights that every rank has, above the size that shard 0 keeps alone."""
    return {f"model.layer{number}.weight": torch.full((DENSE_VALUES,), float(number)) for number in range(DENSE)}


def spread_tensors(rank: int) -> dict[str, torch.Tensor]:
    """FSDP: one rank's own part of each weight and of its two moments."""
    names = [f"layers.{number}.attention.weight" for number in range(LAYERS)]
    keys = [f"model.{name}" for name in names]
    keys += [f"optimizer.state.{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    return {key: torch.full((VALUES,), float(rank + place)) for place, key in enumerate(keys)}


def write_dense(folder: Path, identity: Identity, ranks: int) -> None:
    """Every rank's shard of a state that all have, with its image."""
    tensors = dense_tensors()
    for rank in range(ranks):
        layout = Layout.plan(tensors, shard=rank, shards=ranks)
        _write(folder, layout, tensors, rank, identity)


def write_spread(folder: Path, identity: Identity, ranks: int, with_image: Iterable[int]) -> None:
    """Every rank's index of a state that is spread over all; the images of some."""
    wanted = set(with_image)
    steps = {f"optimizer.state.layers.{n}.attention.weight.step": torch.tensor(7.0) for n in range(LAYERS)}
    for rank in range(ranks):
        parts = spread_tensors(rank)
        tensors = {**parts, **steps} if rank == 0 else parts
        layout = Layout.plan(tensors, shard=0, shards=1)  # its own part; where that lies in the whole is put in below
        rows: Holders | None = None
        if rank == 0:
            rows = Holders.of({**dict.fromkeys(parts, Spread(0, 1, ranks, 0)), **dict.fromkeys(steps, 0)})
        _write(folder, layout, tensors, rank, identity, spread=(ranks, rows), with_image=rank in wanted)


def _write(
    folder: Path, layout: Layout, tensors: dict[str, torch.Tensor], rank: int, identity: Identity, *,
    spread: tuple[int, Holders | None] | None = None, with_image: bool = True,
) -> None:  # fmt: skip
    ranks = spread[0] if spread is not None else layout.shards
    objects: dict[str, object] = {rank_key(rank): {"rng": rank}}
    if rank == 0:
        objects |= {FACTS: {"metrics": {}, "world_size": ranks}, "extra": {}}
    packed = layout.pack(objects)
    memory = bytearray(layout.size_bytes(packed))
    layout.write_fixed(memory)
    for view, source in zip(layout.views(memory), layout.sources(tensors), strict=True):
        view.copy_(source)
    index = layout.with_objects(memory, packed, identity=identity)
    if spread is not None:
        items = tuple(_placed(item, rank, ranks) for item in index.items)
        index = replace(index, shard=rank, shards=ranks, items=items, texts=(), holders=spread[1])
    index = index.with_digests(list(_digests(index, memory)))
    write_index(folder / index_file(rank), index, durable=False)
    if with_image:
        (folder / image_file(rank)).write_bytes(memory)


def _placed(item: Item, rank: int, ranks: int) -> Item:
    if item.kind != "tensor" or not item.shape:
        return item
    return replace(item, shape=(VALUES * ranks,), starts=(VALUES * rank,), sizes=(VALUES,))


def _digests(index: ShardIndex, memory: bytearray) -> Iterator[str]:
    view = memoryview(memory)
    for item in index.items:
        yield xxhash.xxh3_128_hexdigest(view[item.offset : item.offset + item.length])
