"""A node's pool hands requests to drivers, and passes on what a dead one leaves; the drivers here are only sockets."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.inference import EngineConfig, InferenceConfig
from slurmft.inference.pool import ReplicaPool
from slurmft.ipc.reports import ReplicaDied, RequestsWanted, Sent

SLOTS = 4


class Driver:
    """The other end of a replica's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, pool: ReplicaPool, number: int) -> Driver:
        driver = cls(*await asyncio.open_unix_connection(pool.socket))
        driver.say(kind="hello", replica=number, life=1)
        driver.say(kind="ready", slots=SLOTS)
        return driver

    def say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        self._writer.close()
        await self._reader.read()  # until the pool has let go of it, too

    async def handed_over(self, count: int) -> list[int]:
        """The next requests, at least so many."""
        found: list[int] = []
        while len(found) < count:
            found += json.loads(await asyncio.wait_for(self._reader.readline(), 10))["indexes"]
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # the path of a socket must be short
        yield Path(name)


async def until_told(reports: list[Sent], kind: type[Sent], count: int = 1) -> Any:
    async with asyncio.timeout(10):
        while len(found := [each for each in reports if isinstance(each, kind)]) < count:
            await asyncio.sleep(0.01)
    return found[-1]


def test_what_an_engine_had_not_begun_goes_to_the_next_one_and_what_it_had_is_told(folder: Path) -> None:
    async def run() -> None:
        config = InferenceConfig(
            input=folder / "none", engine=EngineConfig(url="http://localhost:1"), replicas_per_node=2, concurrency=SLOTS
        )
        reports: list[Sent] = []
        pool = ReplicaPool(
            config, run_folder=folder, folder=folder, node=0, host="n0", start=lambda number, socket, life: None,
            kill=lambda number: None, last_words=lambda number: "", report=reports.append,
        )  # fmt: skip
        await pool.begin(epoch=1, generation=1)
        first, second = [await Driver.connect(pool, number) for number in (0, 1)]
        await until_told(reports, RequestsWanted, 2)
        pool.lease([(0, 12)], [], 1)
        had, has = await first.handed_over(6), await second.handed_over(6)
        first.say(kind="begun", indexes=had[:SLOTS])
        second.say(kind="begun", indexes=has[:SLOTS])
        await asyncio.sleep(0.05)
        pool.on_exit(0, -9)
        died = await until_told(reports, ReplicaDied)
        assert died.in_flight == tuple(had[:SLOTS])
        pool.lease([(had[0], had[0] + 1)], [], 1)
        assert await second.handed_over(1) == had[:1], "at once, although it has as many as it may"
        second.say(kind="completed", indexes=has[:3], epoch=1)
        assert await second.handed_over(2) == had[SLOTS:]
        for driver in (first, second):
            await driver.close()
        await pool.close()

    asyncio.run(run())
