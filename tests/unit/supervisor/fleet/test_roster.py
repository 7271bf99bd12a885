"""The crew's nodes as the policy sees them: real connections to a real pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from waiting import until_async

from slurmft.ipc.channel import Channel, connect
from slurmft.policy.decide import Members, Size, TooFew, Wait
from slurmft.policy.values import few
from slurmft.supervisor.agents import AgentPool
from slurmft.supervisor.crew import Roster

SECRET = b"s" * 64
HERE = "127.0.0.1"
WITHIN_S = 10.0


@asynccontextmanager
async def crew(*hosts: str, size: Size) -> AsyncIterator[tuple[AgentPool, Roster, dict[str, Channel], int]]:
    """One agent on each host, connected."""
    pool = AgentPool(SECRET, len(hosts))
    port = await pool.listen(HERE)
    channels = {host: await hello(port, node, host) for node, host in enumerate(hosts)}
    await asyncio.wait_for(pool.complete.wait(), WITHIN_S)
    try:
        yield pool, Roster(pool, size), channels, port
    finally:
        for channel in channels.values():
            channel.close()
        await pool.close()


async def hello(port: int, node: int, host: str, **more: Any) -> Channel:
    channel = await connect(HERE, port, SECRET)
    channel.send({"kind": "hello", "node": node, "host": host, "pid": 1, **more})
    return channel


def enlist(pool: AgentPool, roster: Roster, allowed: tuple[str, ...] = ()) -> list[str]:
    found = roster.next(allowed, waited_s=0.0)
    assert isinstance(found, Members)
    pool.members = roster.take(found)
    return [link.host for link in pool.members]


async def test_an_agent_that_was_replaced_ends_and_the_one_in_its_place_stays():
    async with crew("n1", "n2", size=Size(nodes=2, minimum=2, maximum=2)) as (pool, _roster, channels, port):
        pool.drop(pool.links[1])
        channels["n2"].close()
        channels["n2"] = await hello(port, 1, "n2", pid=2)  # by this name it is closed in the end
        await until_async(lambda: pool.links[1].channel is not None)
        late = await hello(port, 1, "n2")
        told = await asyncio.wait_for(late.receive(), WITHIN_S)
        assert told is not None
        assert told["kind"] == "shutdown"
        late.close()
        assert pool.links[1].pid == 2
        assert pool.links[1].channel is not None


async def test_a_spare_takes_the_place_of_a_lost_agent_and_the_lost_one_is_a_spare_when_it_is_back():
    async with crew("n1", "n2", "n3", size=Size(nodes=2, minimum=2, maximum=2)) as (pool, roster, channels, port):
        assert enlist(pool, roster) == ["n1", "n2"]
        assert roster.patience_s(pool.links[1], 3.0) == 3.0
        channels["n2"].close()
        await until_async(lambda: pool.links[1].channel is None)
        pool.drop(pool.links[1])
        assert enlist(pool, roster) == ["n1", "n3"]
        assert roster.patience_s(pool.links[2], 3.0) == 12.0, "nobody could step in now"
        channels["n2"] = await hello(port, 1, "n2")
        await until_async(lambda: pool.links[1].channel is not None)
        assert enlist(pool, roster) == ["n1", "n3"], "whoever took over stays"
        assert roster.can_go_on({"n3"})
        assert not roster.can_go_on({"n3", "n1"})


async def test_an_agent_that_has_just_hung_up_is_waited_for_and_one_that_is_lost_is_not():
    async with crew("n1", "n2", size=Size(nodes=2, minimum=2, maximum=2)) as (pool, roster, channels, _):
        enlist(pool, roster)
        channels["n2"].close()
        await until_async(lambda: pool.links[1].channel is None)
        assert isinstance(roster.next((), waited_s=0.0), Wait)
        pool.drop(pool.links[1])
        assert isinstance(roster.next((), waited_s=0.0), TooFew)
        roster.returning.add(1)
        assert isinstance(roster.next((), waited_s=0.0), Wait)
        assert isinstance(roster.next((), waited_s=100.0), TooFew)


async def test_nodes_to_keep_off_are_not_taken_though_they_live():
    async with crew("n1", "n2", "n3", size=Size(nodes=2, minimum=2, maximum=2)) as (pool, roster, _, __):
        assert enlist(pool, roster, ("n2", "n3")) == ["n2", "n3"]
        assert isinstance(roster.next(("n2",), waited_s=0.0), TooFew)


async def test_lent_nodes_come_on_top_when_their_torch_is_warm_also_ones_that_the_job_has_itself():
    async with crew("n1", "n2", size=Size(nodes=2, minimum=1, maximum=4)) as (pool, roster, channels, port):
        assert enlist(pool, roster, ("n1", "n2")) == ["n1", "n2"]
        for node, host in enumerate(("n1", "n9")):
            channels[f"lent {host}"] = await hello(port, node, host, lender="77")
        await until_async(lambda: len(pool.links) == 4)
        assert pool.complete.is_set()
        assert roster.newcomers(()) == (), "not ready"
        for host in ("n1", "n9"):
            channels[f"lent {host}"].send({"kind": "progress", "ranks": [], "generation": 0, "ready": True})
        await until_async(lambda: len(roster.newcomers(("n1", "n2"))) == 2)
        assert enlist(pool, roster, ("n1", "n2")) == ["n1", "n2", "n1", "n9"]
        assert [link.node for link in pool.members] == [0, 1, 2, 3]
        pool.links[2].leaving = True
        assert enlist(pool, roster) == ["n1", "n2", "n9"]


async def test_a_lender_that_comes_again_has_its_old_place():
    async with crew("n1", size=Size(nodes=1, minimum=1, maximum=2)) as (pool, roster, channels, port):
        for _ in range(2):
            channels["lent"] = await hello(port, 0, "n9", lender="77")
            await until_async(lambda: 1 in pool.links and pool.links[1].channel is not None)
            channels["lent"].close()
            await until_async(lambda: pool.links[1].channel is None)
            pool.drop(pool.links[1])
        assert sorted(pool.links) == [0, 1]
        assert enlist(pool, roster) == ["n1"]


@pytest.mark.parametrize("lender", ["", "a\nb", "x" * 300, 7])
async def test_a_hello_with_a_bad_lender_is_refused(lender: Any):
    async with crew("n1", size=Size(nodes=1, minimum=1, maximum=2)) as (pool, _, channels, port):
        channels["lent"] = await hello(port, 0, "n9", lender=lender)
        assert await asyncio.wait_for(channels["lent"].receive(), WITHIN_S) is None, "it hangs up"
        assert list(pool.links) == [0]


def test_many_names_are_cut_short():
    assert few(["a", "b"], 5) == "a, b"
    assert few([f"n{i}" for i in range(9)], 5) == "n0, n1, n2, n3, n4 and 4 more"
