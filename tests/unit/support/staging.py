"""Snapshots as a worker stages them, made of random bytes: what the tests of the writer hand over."""

import contextlib
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from waiting import until

from slurmft.checkpoint.catalog import Catalog, Entry, read_entry
from slurmft.checkpoint.image_file import Item, ShardIndex, image_file, index_file, read_index, write_index
from slurmft.checkpoint.write_requests import CommitOrder, Progress, Report, WriterClient, WriteRequest
from slurmft.storage.checkpoint_names import MANIFEST, Identity


@dataclass
class Memory:
    """One node's memory folder, and the checkpoint folder that its writers write to."""

    memory: Path
    checkpoints: Path

    def stage(
        self, step: int, *, commit: int = 0, shard: int = 0, shards: int = 1, generation: int = 0,
        size_bytes: int = 300_000, slot: str = "a", keep: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None, **details: object,
    ) -> WriteRequest:  # fmt: skip
        identity = Identity(step, generation, commit or step)
        self.memory.mkdir(exist_ok=True)
        base = self.memory / f"shard-{shard}.{slot}"
        image = base.with_suffix(f".{slot}.image")
        image.write_bytes(random.Random(f"{identity} {shard}").randbytes(size_bytes))
        cuts = sorted({0, size_bytes // 3, size_bytes * 2 // 3, size_bytes})
        items = tuple(
            Item(key=f"model.{number}", kind="object", offset=start, length=end - start,
                 data_offset=start, data_length=end - start)
            for number, (start, end) in enumerate(itertools.pairwise(cuts))
        )  # fmt: skip
        index = ShardIndex(identity=identity, shard=shard, shards=shards, size_bytes=size_bytes, items=items)
        snapshot = base.with_suffix(f".{slot}.json")
        write_index(snapshot, index, durable=False)
        order = CommitOrder(metrics=metrics or {"loss": 1.0}, **keep or {})
        return WriteRequest(
            identity=identity, shard=shard, shards=shards, snapshot=snapshot, image=image,
            folder=self.checkpoints / identity.folder_name, commit=order if shard == 0 else None, **details,
        )  # fmt: skip

    def steps(self) -> list[int]:
        """Committed ones, newest first, every byte of them verified."""
        steps = []
        for entry in Catalog(self.checkpoints).committed():
            try:
                verify(entry)
            except (OSError, AssertionError):
                if (entry.path / MANIFEST).exists():  # else it was pruned meanwhile
                    raise
            else:
                steps.append(entry.step)
        return steps


def verify(entry: Entry) -> None:
    """All files are there, whole, and what was staged; and no others."""
    names = {path.name for path in entry.path.iterdir()} - {"manifest.json"}
    assert names == set(entry.files), names ^ set(entry.files)
    for name, record in entry.files.items():
        content = (entry.path / name).read_bytes()
        assert len(content) == record.size_bytes
        assert not record.xxh3 or xxhash.xxh3_128_hexdigest(content) == record.xxh3
    for shard in range(entry.world_size):
        index = read_index(entry.path / index_file(shard))
        assert index is not None and index.is_hashed
        image = (entry.path / image_file(shard)).read_bytes()
        identity = Identity(entry.step, entry.generation, entry.commit)
        assert image == random.Random(f"{identity} {shard}").randbytes(index.size_bytes)
        for item in index.items:
            assert xxhash.xxh3_128_hexdigest(image[item.offset : item.offset + item.length]) == item.digest
    assert read_entry(entry.path) is not None


class Client(WriterClient):
    """A client that remembers what it heard."""

    def __init__(self, *, on_report: Callable[[Report], None] = lambda _: None, **details: Any) -> None:
        self.heard: list[Report] = []
        self._polled = 0

        def hear(report: Report) -> None:
            self.heard.append(report)
            on_report(report)

        super().__init__(on_report=hear, **details)

    def poll(self) -> list[Report]:
        """What was heard since the last call."""
        heard = self.heard[self._polled :]
        self._polled += len(heard)
        return heard

    def end_of(self, identity: Identity, within_s: float = 30.0) -> Report | None:
        """The final report on a save."""
        deadline = time.monotonic() + within_s
        while not (found := [one for one in self.heard if one.identity == identity and one.final]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        return found[0]

    def progress(self) -> Progress:
        """Of the image that is being written."""
        return writer.page.progress() if (writer := self._writer) else Progress(0, 0)


def ended(client: Client, request: WriteRequest) -> Report:
    """What became of a save."""
    report = client.end_of(request.identity)
    assert report is not None
    return report


def begun(client: WriterClient, request: WriteRequest) -> WriteRequest:
    """A save of which a part is written."""
    client.submit(request)
    until(lambda: client.progress().done_bytes)
    return request


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where a sync costs nothing; its name would need quotes in a shell."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="slurmft test's \n", dir=base) as folder:
        yield Path(folder)
