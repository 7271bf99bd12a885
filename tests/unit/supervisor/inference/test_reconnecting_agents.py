"""Agents of an inference run whose connection ends while a new supervisor takes them over."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until_async

from slurmft.config.sections import FaultToleranceConfig
from slurmft.ipc.channel import UNANSWERED, Channel, connect
from slurmft.ipc.messages import Done, Failed, as_reply
from slurmft.policy import life
from slurmft.storage.journal import EventName
from slurmft.supervisor.agents import AgentPool
from slurmft.supervisor.crew import BROKEN_S, Crew
from slurmft.supervisor.inference import InferenceAttempt
from slurmft.supervisor.stops import Machine

SECRET = b"s" * 32


class Coordinator:
    """Knows who takes part."""

    all_down = False

    def __init__(self) -> None:
        self.agents: dict[int, str] = {}
        self.epochs = 0

    def join(self, node: int, host: str, _send: object) -> int:
        self.agents[node], self.epochs = host, self.epochs + 1
        return self.epochs

    def lose(self, node: int) -> int:
        self.agents.pop(node, None)
        return 0


class Supervised:
    """An attempt of one agent; ``events`` has what the journal would."""

    def __init__(self, *, takes_over: bool) -> None:
        self.events: list[EventName] = []
        self.pool, self.coordinator = AgentPool(SECRET, 1), Coordinator()
        crew, self.attempt = Crew.__new__(Crew), InferenceAttempt.__new__(InferenceAttempt)
        crew.pool, crew._settled_s = self.pool, time.monotonic() + 60 if takes_over else 0.0
        crew.reviver = SimpleNamespace(lost=lambda *_, **__: None)  # type: ignore[assignment]
        parts: dict[str, Any] = {
            "_config": SimpleNamespace(fault_tolerance=FaultToleranceConfig()), "_crew": crew, "_pool": self.pool,
            "_cluster": SimpleNamespace(size=lambda _: 1, lost=set(), attempt="7.0.1", nodes=()),
            "_journal": SimpleNamespace(append=lambda event, **_: self.events.append(event)), "_joined": {},
            "_coordinator": self.coordinator, "_start": SimpleNamespace(generation=2), "_lost": {}, "_problem": "",
            "_gangs": None,
            "_background": SimpleNamespace(start=lambda work: self.tasks.append(asyncio.ensure_future(work))),
            "stops": (stops := Machine(life.Rules(), {})),
        }  # fmt: skip
        stops.joined = set()  # type: ignore[attr-defined]
        self.over = stops.over
        for name, part in parts.items():
            setattr(self.attempt, name, part)
        self.tasks: list[asyncio.Future[Any]] = []

    async def begin(self) -> int:
        port = await self.pool.listen("127.0.0.1")
        self.tasks += [
            asyncio.ensure_future(self.attempt._take_in_agents()),
            asyncio.ensure_future(self.attempt._handle_events()),
        ]
        return port

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.pool.close()


async def asked_to_begin(port: int) -> tuple[Channel, int]:
    """An agent's connection that was asked to take part, and the number of that call."""
    channel = await connect("127.0.0.1", port, SECRET)
    channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
    while True:
        message = await asyncio.wait_for(channel.receive(), 20)
        assert message is not None
        if message["id"] != UNANSWERED:
            return channel, message["id"]


@pytest.mark.parametrize("takes_over", [True, False])
async def test_an_agent_that_comes_back_late_is_kept_where_it_has_outlived_a_supervisor(takes_over: bool) -> None:
    one = Supervised(takes_over=takes_over)
    port = await one.begin()
    try:
        channel, _ = await asked_to_begin(port)
        channel.close()
        await asyncio.sleep(2 * BROKEN_S)  # it is slow
        channel, number = await asked_to_begin(port)
        channel.send(as_reply(number, Done()))
        await until_async(lambda: EventName.NODE_ANSWERS in one.events)
        channel.close()
    finally:
        await one.end()
    lost = [] if takes_over else [EventName.AGENT_LOST]
    assert one.events == [*lost, EventName.NODE_ANSWERS]


async def test_an_agent_that_cannot_begin_is_no_lost_node() -> None:
    one = Supervised(takes_over=False)
    port = await one.begin()
    try:
        channel, number = await asked_to_begin(port)
        channel.send(as_reply(number, Failed(error="/dev/shm/x: No space left on device")))
        await asyncio.wait_for(one.over.wait(), 20)
        channel.close()
    finally:
        await one.end()
    assert one.events == [] and one.attempt._lost == {}
    assert "/dev/shm/x: No space left on device" in one.attempt.stops.state.problem
