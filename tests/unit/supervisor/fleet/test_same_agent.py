"""Which of two connections of one node belong to the same agent: process ids of containers say nothing."""

from __future__ import annotations

import asyncio

import pytest

from slurmft.ipc.channel import connect
from slurmft.supervisor.fleet.agents import AgentPool

SECRET = b"s" * 32


async def second_is_taken(first: dict[str, object], second: dict[str, object]) -> bool:
    pool = AgentPool(SECRET, 1)
    port = await pool.listen("127.0.0.1")
    channels = []
    try:
        for own in (first, second):
            channel = await connect("127.0.0.1", port, SECRET)
            channel.send({"kind": "hello", "node": 0, "host": "n1", **own})
            channels.append(channel)
            await asyncio.wait_for(pool.complete.wait(), 10)
        # the one that is not wanted is told to end, or its connection is closed
        told = [asyncio.create_task(channel.receive()) for channel in channels]
        done, _ = await asyncio.wait(told, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        return told[0] in done
    finally:
        for channel in channels:
            channel.close()
        await pool.close()


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        pytest.param({"pid": 2, "birth": "b:1"}, {"pid": 2, "birth": "b:1"}, True, id="it has reconnected"),
        pytest.param({"pid": 2, "birth": "b:1"}, {"pid": 2, "birth": "b:9"}, False, id="of another container"),
        pytest.param({"pid": 2, "birth": "b:1"}, {"pid": 3, "birth": "b:1"}, False, id="another process"),
        pytest.param({"pid": 2}, {"pid": 2}, True, id="without a birth"),
    ],
)
def test_an_agent_takes_its_own_place_alone(first: dict[str, object], second: dict[str, object], taken: bool):
    assert asyncio.run(second_is_taken(first, second)) is taken
