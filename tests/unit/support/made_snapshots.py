"""Shards of snapshots as a rank would have staged them, with random bytes."""

import os
from dataclasses import replace
from pathlib import Path

import xxhash

from slurmft.checkpoint.image_file import Item, ShardIndex, write_index
from slurmft.storage.checkpoint_names import Identity

KEY = b"k" * 64
"""Of the run whose copies these are."""


def items_of(data: bytes, lengths: list[int]) -> tuple[Item, ...]:
    """Items of these lengths that tile ``data``."""
    items, start = [], 0
    for number, length in enumerate(lengths):
        piece = data[start : start + length]
        items.append(
            Item(key=f"model.part{number}", kind="object", offset=start, length=length, data_offset=start,
                 data_length=length, digest=xxhash.xxh3_128(piece).hexdigest())
        )  # fmt: skip
        start += length
    return tuple(items)


def stage(
    folder: Path, name: str = "shard-0.a", *, shard: int = 0, shards: int = 2,
    identity: tuple[int, int, int] = (40, 3, 4), size: int = 3_000_000, hashed: bool = True, slack: int = 4096,
) -> tuple[Path, Path]:  # fmt: skip
    """An image and its index in ``folder``; returns their paths, index first. The file is longer than the image.

    A third of it is one object, the rest this shard's part of a tensor that is spread over all shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(size)
    items = items_of(data, [size // 3, 0, size - size // 3])
    part = replace(items[2], kind="tensor", dtype="uint8", shape=(shards * items[2].length,),
                   starts=(shard * items[2].length,), sizes=(items[2].length,))  # fmt: skip
    items = (*items[:2], part)
    if not hashed:
        items = tuple(replace(item, digest="") for item in items)
    index = ShardIndex(identity=Identity(*identity), shard=shard, shards=shards, size_bytes=size, items=items)
    (folder / f"{name}.image").write_bytes(data + bytes(slack))
    write_index(folder / f"{name}.json", index, durable=False)
    return folder / f"{name}.json", folder / f"{name}.image"


def flip_byte(path: Path, place: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))
