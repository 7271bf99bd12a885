"""Reading a committed checkpoint to the last byte, without torch: does everything match its marker?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from slurmft.checkpoint.catalog import Entry
from slurmft.checkpoint.holding import reading
from slurmft.checkpoint.image_file import (
    Damage,
    Damaged,
    ImageFile,
    Item,
    ShardIndex,
    image_file,
    index_file,
    verified_index,
)
from slurmft.system.files import opened

THREADS = 2
SHOWN = 5
"""Damages that are reported of one image; a lost disk would make thousands."""

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One damaged file."""

    file: str
    text: str
    """A sentence about the file that begins with its name."""


def verify(entry: Entry, tick: Callable[[int], None] = lambda _size_bytes: None) -> list[Problem]:
    """Everything that is wrong with a checkpoint; empty when all of it can be loaded. Nothing is changed.

    Args:
        tick: called with the bytes that have been read since the last call; from several threads.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then its use cannot be shown to others: the newest two stay in any case
            stack.enter_context(reading(entry.path))
        return _problems(entry, tick)


def _problems(entry: Entry, tick: Callable[[int], None]) -> list[Problem]:
    problems = []
    shards = {name for shard in range(entry.world_size) for name in (image_file(shard), index_file(shard))}
    missing = sorted(shards - entry.files.keys())
    problems += [Problem(name, f"{name} is not listed by the marker") for name in missing[:SHOWN]]
    for shard in range(entry.world_size):
        problems += _check_shard(entry, shard, tick)
    for name in sorted(entry.files.keys() - shards):
        problems += _check_whole(entry, name, tick)
    return problems


def _check_shard(entry: Entry, shard: int, tick: Callable[[int], None]) -> list[Problem]:
    image, name = image_file(shard), index_file(shard)
    if name not in entry.files or image not in entry.files:
        return []  # reported already
    try:
        index = verified_index(entry.path / name, entry.files[name].size_bytes, entry.files[name].xxh3)
        identity = index.identity
        if (identity.folder_name, index.shard, index.shards) != (entry.path.name, shard, entry.world_size):
            raise Damaged(Damage.UNREADABLE, name, f"it is of shard {index.shard} of {identity.folder_name}")
        tick(entry.files[name].size_bytes)
        if not index.size_bytes == entry.files[image].size_bytes == (entry.path / image).stat().st_size:
            raise Damaged(Damage.TRUNCATED, image)
        with ImageFile(entry.path / image, index) as file:
            return _check_items(file, index, tick)
    except FileNotFoundError:
        return [Problem(image, str(Damaged(Damage.MISSING, image)))]
    except OSError as error:
        return [Problem(image, str(Damaged(Damage.UNREADABLE, image, str(error))))]
    except Damaged as damaged:
        return [Problem(damaged.file_name, str(damaged))]


def _check_items(file: ImageFile, index: ShardIndex, tick: Callable[[int], None]) -> list[Problem]:
    def check(item: Item) -> Problem | None:
        try:
            file.read(item)
        except Damaged as damaged:
            return Problem(damaged.file_name, str(damaged))
        tick(item.length)
        return None

    with ThreadPoolExecutor(THREADS, thread_name_prefix="slurmft-verify") as pool:
        found = [problem for problem in pool.map(check, index.items) if problem is not None]
    if len(found) > SHOWN:
        name = file.path.name
        return [*found[:SHOWN], Problem(name, f"{name} has {len(found) - SHOWN} more damaged items")]
    return found


def _check_whole(entry: Entry, name: str, tick: Callable[[int], None]) -> Iterable[Problem]:
    record, hasher, size_bytes = entry.files[name], xxhash.xxh3_128(), 0
    try:
        with opened(entry.path / name) as descriptor:
            while size_bytes <= record.size_bytes and (block := os.read(descriptor, _BLOCK_BYTES)):
                hasher.update(block)
                size_bytes += len(block)
                tick(len(block))
        if size_bytes != record.size_bytes:
            raise Damaged(Damage.TRUNCATED, name)
        if record.xxh3 and hasher.hexdigest() != record.xxh3:
            raise Damaged(Damage.CHANGED, name)
    except FileNotFoundError:
        return [Problem(name, str(Damaged(Damage.MISSING, name)))]
    except OSError as error:
        return [Problem(name, str(Damaged(Damage.UNREADABLE, name, error.strerror or str(error))))]
    except Damaged as damaged:
        return [Problem(name, str(damaged))]
    return []
