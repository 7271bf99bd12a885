"""A node's pool hands requests to drivers, and passes on what a dead one leaves; the drivers here are only sockets."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until_async

from slurmft.config.inference import EngineConfig, InferenceConfig
from slurmft.inference.pool import ReplicaPool
from slurmft.ipc.messages import ReplicaDied, ReplicaPhase, RequestsReturned, RequestsWanted, Sent

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

    async def next_message(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await asyncio.wait_for(self._reader.readline(), 10))
        return found

    async def handed_over(self, count: int) -> list[int]:
        """The next requests, at least so many."""
        found: list[int] = []
        while len(found) < count:
            found += (await self.heard())["indexes"]
        return found

    async def heard(self) -> dict[str, Any]:
        """The next message."""
        message: dict[str, Any] = json.loads(await asyncio.wait_for(self._reader.readline(), 10))
        return message


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # the path of a socket must be short
        yield Path(name)


async def until_told(reports: list[Sent], kind: type[Sent], count: int = 1) -> Any:
    async with asyncio.timeout(10):
        while len(found := [each for each in reports if isinstance(each, kind)]) < count:
            await asyncio.sleep(0.01)
    return found[-1]


def pool_in(folder: Path, reports: list[Sent]) -> ReplicaPool:
    config = InferenceConfig(
        input=folder / "none", engine=EngineConfig(url="http://localhost:1"), replicas_per_node=2, concurrency=SLOTS
    )
    return ReplicaPool(
        config, run_folder=folder, folder=folder, node=0, host="n0", start=lambda number, socket, life: None,
        kill=lambda number: None, last_words=lambda number: "", report=reports.append,
    )  # fmt: skip


async def test_a_replica_lives_on_under_the_next_supervisor(folder: Path) -> None:
    """What its engine has is finished and does not count; what waits in its driver is dropped."""
    reports: list[Sent] = []
    pool = pool_in(folder, reports)
    await pool.begin(epoch=1, generation=1)
    driver = await Driver.connect(pool, 0)
    await until_told(reports, RequestsWanted)
    pool.lease([(0, 8)], [], 1)
    had = await driver.handed_over(6)
    reports.clear()
    await pool.begin(epoch=2, generation=2)
    assert (await until_told(reports, ReplicaPhase, 2)).epoch == 2
    told = {each.replica: each for each in reports if isinstance(each, ReplicaPhase)}
    assert (told[0].phase, told[0].life) == ("ready", 1)
    assert (await driver.heard())["kind"] == "revoke"
    pool.lease([(0, 8)], [], 2)
    driver.say(kind="dropped", count=2)
    driver.say(kind="completed", indexes=had[:SLOTS], epoch=1)
    assert await driver.handed_over(6) == list(range(6))
    assert (pool.replicas[0].generation, pool.replicas[0].void) == (1, 0)
    await driver.close()
    await pool.close()


async def test_what_an_engine_had_not_begun_goes_to_the_next_one_and_what_it_had_is_told(folder: Path) -> None:
    reports: list[Sent] = []
    pool = pool_in(folder, reports)
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


async def test_where_text_of_a_request_lies_is_passed_on_but_not_for_one_that_is_tried_alone(folder: Path) -> None:
    config = InferenceConfig(input=folder / "none", engine=EngineConfig(url="http://localhost:1"), concurrency=SLOTS)
    reports: list[Sent] = []
    pool = ReplicaPool(
        config, run_folder=folder, folder=folder, node=0, host="n0", start=lambda number, socket, life: None,
        kill=lambda number: None, last_words=lambda number: "", report=reports.append,
    )  # fmt: skip
    await pool.begin(epoch=1, generation=1)
    driver = await Driver.connect(pool, 0)
    await until_told(reports, RequestsWanted)
    pool.lease([(0, 2)], [], 1, ["one"])
    pool.lease([(2, 3)], [], 1)
    assert (await driver.next_message()).get("partials") == ["one"]
    assert "partials" not in await driver.next_message()
    driver.say(kind="completed", indexes=[0, 1, 2], epoch=1)
    await until_told(reports, RequestsWanted, 2)
    pool.lease([(5, 6)], [], 1, ["two"])
    assert (await driver.next_message())["partials"] == ["two"]
    driver.say(kind="completed", indexes=[5], epoch=1)
    await asyncio.sleep(0.05)
    pool.lease([(7, 8)], [], 1, ["three"])
    await driver.next_message()
    driver.say(kind="completed", indexes=[7], epoch=1)
    await asyncio.sleep(0.05)
    pool.lease([], [7], 1)
    message = await driver.next_message()
    assert message["indexes"] == [7] and "partials" not in message
    await driver.close()
    await pool.close()


async def test_suspects_are_alone_one_at_a_time_while_the_other_replica_goes_on(folder: Path) -> None:
    reports: list[Sent] = []
    pool = pool_in(folder, reports)
    await pool.begin(epoch=1, generation=1)
    drivers = [await Driver.connect(pool, number) for number in (0, 1)]
    await until_told(reports, RequestsWanted, 2)
    pool.lease([(0, 40)], [], 1)
    had = [await driver.handed_over(6) for driver in drivers]
    for driver, indexes in zip(drivers, had, strict=True):  # both have proved to work
        driver.say(kind="completed", indexes=indexes[:1], epoch=1)
    await until_async(lambda: all(each.answered for each in pool.replicas))
    pool.lease([], [40, 41, 42], 1)
    async with asyncio.timeout(10):
        while not any(each.alone for each in pool.replicas):
            for driver, replica in zip(drivers, pool.replicas, strict=True):
                if not replica.alone:
                    driver.say(kind="completed", indexes=list(replica.in_flight)[:1], epoch=1)
            await asyncio.sleep(0.01)
    one, other = sorted(pool.replicas, key=lambda each: not each.alone)
    assert list(one.in_flight) == [40] and not other.alone and not {41, 42} & set(other.in_flight)
    drivers[one.number].say(kind="completed", indexes=[40], epoch=1)
    await until_async(lambda: list(one.in_flight) == [41])
    assert len(other.in_flight) > 1 and not other.alone
    for driver in drivers:
        await driver.close()
    await pool.close()


async def test_what_is_still_in_flight_at_the_end_of_a_stop_is_saved_before_the_driver_is_killed(folder: Path) -> None:
    config = InferenceConfig(input=folder / "none", engine=EngineConfig(url="http://localhost:1"), concurrency=SLOTS)
    reports: list[Sent] = []
    killed: list[int] = []
    pool = ReplicaPool(
        config, run_folder=folder, folder=folder, node=0, host="n0", start=lambda number, socket, life: None,
        kill=killed.append, last_words=lambda number: "", report=reports.append,
    )  # fmt: skip
    await pool.begin(epoch=1, generation=1)
    driver = await Driver.connect(pool, 0)
    await until_told(reports, RequestsWanted)
    pool.lease([(0, 2)], [], 1)
    await driver.next_message()
    draining = asyncio.create_task(pool.drain(2.5))
    assert [(await driver.next_message())["kind"] for _ in range(2)] == ["drain", "give back"]
    assert killed == [], "it has a moment for that"
    pool.on_exit(0, 0)
    await draining
    returned = await until_told(reports, RequestsReturned)
    assert returned.runs == ((0, 2),) and killed == []
    await driver.close()
    await pool.close()
