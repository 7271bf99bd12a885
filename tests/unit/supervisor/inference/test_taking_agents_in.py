"""Agents of inference are taken in one beside the other."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until_async

from slurmft.errors import LaunchError
from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import Hello, Reply
from slurmft.policy import life
from slurmft.storage.journal import EventName
from slurmft.supervisor.agents import AgentLink, AgentPool
from slurmft.supervisor.inference import InferenceAttempt
from slurmft.system.background import Background


class Wire:
    """The connection of one agent, which answers calls only where ``answers``."""

    peer = "127.0.0.1"

    def __init__(self, *, answers: bool) -> None:
        self.answers, self.sent, self.link = answers, list[str](), None

    def send(self, call: dict[str, Any]) -> None:
        self.sent.append(call["kind"])
        if self.answers:
            reply = Reply(id=call["id"])
            asyncio.get_running_loop().call_soon(self.link.answered, reply, encoded(reply))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Nothing is open."""


class Seen(InferenceAttempt):
    """An attempt of which only the watch over its agents runs."""

    def __init__(self, links: dict[int, AgentLink]) -> None:
        self.told: list[tuple[str, str]] = []
        self.lost: list[tuple[str, bool]] = []
        self._cluster: Any = SimpleNamespace(size=lambda _config: len(links), lost=set(), attempt="1.0.0", nodes=())
        self._start: Any = SimpleNamespace(generation=1)
        self._pool = AgentPool(b"", len(links))
        self._pool.links = links
        self._gangs = None
        self._crew: Any = SimpleNamespace(reconnect_s=1.0, reconnected=self._at_once)
        self._joined, self._background = {}, Background()
        self.stops: Any = SimpleNamespace(joined=set(), over=asyncio.Event())
        self._coordinator: Any = SimpleNamespace(join=lambda node, host, send: 1)
        self._journal: Any = SimpleNamespace(append=lambda event, node, **_: self.told.append((event, node)))

    async def _at_once(self, link: AgentLink) -> None:
        """No connection comes back."""

    def _lose(self, link: AgentLink, reason: str, *, hung_up: bool) -> None:
        link.dropped = True
        self.lost.append((link.host, hung_up))


def agents(*answer: bool) -> dict[int, AgentLink]:
    links = {}
    for node, answers in enumerate(answer):
        wire = Wire(answers=answers)
        hello = Hello(node=node, host=f"n{node}", pid=1, birth=None, lender=None)
        links[node] = wire.link = AgentLink(wire, hello)  # type: ignore[arg-type, assignment]
    return links


async def test_an_agent_that_does_not_answer_keeps_no_other_one_waiting() -> None:
    links = agents(False, True, True)
    seen = Seen(links)
    watching = asyncio.create_task(seen._take_in_agents())
    await until_async(lambda: len(seen.told) == 2)
    assert sorted(seen.told) == [(EventName.NODE_ANSWERS, "n1"), (EventName.NODE_ANSWERS, "n2")]
    assert [wire.sent.count("replicas") for wire in map(lambda link: link.channel, links.values())] == [1] * 3
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await seen._background.cancel_all()


@pytest.mark.parametrize("is_closed", [True, False])
async def test_an_agent_that_ends_meanwhile_is_started_again_and_one_that_is_silent_may_have_lost_its_node(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmft.supervisor.inference.BEGIN_S", 0.2)
    links = agents(False)
    seen = Seen(links)
    if is_closed:
        asyncio.get_running_loop().call_later(0.05, links[0].disconnected)
    await seen._take_in(links[0])
    if is_closed:
        assert seen.lost == []  # it may come back by another connection
        await seen._on_disconnect(links[0])
    assert (seen.lost, seen.told) == ([("n0", is_closed)], [])


async def test_why_agents_are_missing_is_looked_for_where_srun_was_started() -> None:
    """In the folder of the first attempt of this start, which a later one has not."""
    seen, fed = Seen({}), list[life.Event]()

    async def never() -> bool:
        return False

    async def ended() -> list[int]:
        return [1]

    seen._config: Any = SimpleNamespace(fault_tolerance=SimpleNamespace(launch_timeout_s=-1.0))
    seen._slurm: Any = SimpleNamespace(outside=None)
    seen._folder: Any = SimpleNamespace(path="7.0.1", last_words=lambda: "")
    seen._crew.folder = SimpleNamespace(path="7.0.0", last_words=lambda: "; srun: no such partition")
    seen._crew.all_ended, seen._are_begun_again = ended, never  # type: ignore[method-assign]
    seen._journal.append = lambda *_, **__: None
    seen.stops.planned, seen.stops.feed = None, fed.append
    with pytest.raises(LaunchError) as caught:
        await seen._first_agent()
    assert caught.value.hint == "see srun.err in 7.0.0"
    await seen._watch_processes()
    assert fed == [life.Ended("all agents ended, with [1]; srun: no such partition")]
