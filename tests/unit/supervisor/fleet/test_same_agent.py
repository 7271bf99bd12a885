"""An agent and its connections: which are of the same one, what each of them repeats, and when one is given up."""

from __future__ import annotations

import asyncio
import socket

import pytest

from slurmft.ipc.channel import connect, keep_alive_options
from slurmft.ipc.messages import Failed, Port, ReservedPort, SignalReport, as_reply
from slurmft.supervisor.agents import AgentPool, CallFailed

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


def test_what_an_agent_repeats_on_a_new_connection_is_heard_once():
    async def heard() -> list[object]:
        pool = AgentPool(SECRET, 1)
        port = await pool.listen("127.0.0.1")
        reports = []
        try:
            for name in ("SIGUSR1", "SIGUSR1", "SIGTERM"):
                channel = await connect("127.0.0.1", port, SECRET)
                channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
                channel.send(SignalReport(name=name, count=1, at=1.0).as_mapping())
                channel.send(SignalReport(name=name, count=1, at=1.0).as_mapping())
                channel.send(SignalReport(name=f"after {name}", count=None, at=float(len(reports))).as_mapping())
                while not reports or not str(getattr(reports[-1], "name", "")).startswith("after"):
                    reports.append((await asyncio.wait_for(pool.events.get(), 10))[1])
                reports.append(None)
                channel.close()
            return [one.name for one in reports if isinstance(one, SignalReport)]
        finally:
            await pool.close()

    names = asyncio.run(heard())
    assert [name for name in names if not str(name).startswith("after")] == ["SIGUSR1", "SIGTERM"]


def test_a_call_that_fails_in_the_agent_is_an_answer_and_the_connection_goes_on():
    async def outcome() -> tuple[str, int]:
        pool = AgentPool(SECRET, 1)
        port = await pool.listen("127.0.0.1")
        channel = await connect("127.0.0.1", port, SECRET)
        try:
            channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
            await asyncio.wait_for(pool.complete.wait(), 10)
            link, told = pool.links[0], ""
            for reply in (Failed(error="/dev/shm: No space left on device"), ReservedPort(port=7)):
                asked = asyncio.create_task(link.call(Port()))
                message = await asyncio.wait_for(channel.receive(), 10)
                assert message is not None
                channel.send(as_reply(message["id"], reply))
                try:
                    found = (await asked).port
                except CallFailed as error:
                    told = str(error)
            return told, found
        finally:
            channel.close()
            await pool.close()

    told, port = asyncio.run(outcome())
    assert told == "the agent on n1: /dev/shm: No space left on device"
    assert port == 7


@pytest.mark.parametrize("patience_s", [0.1, 20.0, 90.0, 720.0, 1e9])
def test_the_kernel_does_not_give_a_connection_up_before_the_supervisor_does(patience_s: float):
    options = keep_alive_options(patience_s)
    least_s = min(max(patience_s, 20.0), 86_400.0)
    assert options["TCP_USER_TIMEOUT"] / 1000 >= least_s
    assert options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"] >= least_s
    assert 1 <= options["TCP_KEEPCNT"] <= 127 and options["TCP_KEEPIDLE"] <= 32_767
    with socket.socket() as one:
        for name, value in options.items():
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def test_a_pool_has_the_patience_of_its_run():
    async def timeout_ms() -> int:
        pool = AgentPool(SECRET, 1, patience_s=720.0)
        port = await pool.listen("127.0.0.1")
        channel = await connect("127.0.0.1", port, SECRET)
        try:
            channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
            await asyncio.wait_for(pool.complete.wait(), 10)
            taken = pool.links[0].channel
            assert taken is not None
            there = taken._writer.get_extra_info("socket")
            return int(there.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        finally:
            channel.close()
            await pool.close()

    assert asyncio.run(timeout_ms()) == 720_000
