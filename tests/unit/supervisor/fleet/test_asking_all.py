"""One question to all agents: replies in order, and the error of the agent that is gone, not of its neighbours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import Hello, Kill, Port, ReservedPort, parse_report
from slurmft.supervisor.agents import AgentLink, AgentLost, ask_each, ask_unread, call_each


class Agent:
    """The other end of a link's channel, which answers at once, goes away, or is silent."""

    peer = ""

    def __init__(self, node: int, answer: Any = None, *, goes: bool = False) -> None:
        self.link = AgentLink(self, Hello(node=node, host=f"n{node}", pid=1))  # type: ignore[arg-type]
        self.answer, self.goes = answer, goes

    def send(self, message: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        if self.goes:
            loop.call_soon(self.link.disconnected)
        elif self.answer is not None:
            line = encoded({"kind": "reply", "id": message["id"], **self.answer})
            loop.call_soon(self.link.answered, parse_report(line), line)


def links(*agents: Agent) -> list[AgentLink]:
    return [agent.link for agent in agents]


def test_replies_come_in_the_order_of_the_agents_with_the_reason_of_each_that_is_missing() -> None:
    async def asked() -> list[Any]:
        silent, gone = Agent(1), Agent(2, goes=True)
        unconnected = AgentLink(None, Hello(node=3, host="n3", pid=1))
        every = [Agent(0, {"port": 7}).link, silent.link, gone.link, unconnected, Agent(4, {"port": 9}).link]
        found = await ask_each(every, Port(), timeout_s=0.05)
        assert not any(link._waiting for link in every), "nothing is left behind"
        return found

    first, silent, gone, unconnected, last = asyncio.run(asked())
    assert (first, last) == (ReservedPort(port=7), ReservedPort(port=9))
    assert "the agent on n1 did not answer 'port' within" in str(silent)
    assert str(gone) == "the agent on n2 has gone"
    assert str(unconnected) == "the agent on n3 is not connected"


def test_where_all_are_needed_the_one_that_is_gone_is_named_at_once() -> None:
    async def called() -> None:
        await call_each(links(Agent(0), Agent(1, goes=True)), [Kill(), Kill()], timeout_s=60.0)

    with pytest.raises(AgentLost, match=r"^the agent on n1 has gone$"):
        asyncio.run(asyncio.wait_for(called(), 10))


def test_a_reply_that_is_not_looked_at_is_no_reason_to_hang_up() -> None:
    found = asyncio.run(_unread())
    assert found == [b'{"kind":"reply","id":1,"port":"none"}']


async def _unread() -> list[Any]:
    return await ask_unread(links(Agent(0, {"port": "none"})), Port(), timeout_s=5.0)
