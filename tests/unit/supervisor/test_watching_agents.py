"""How long the supervisor waits for a silent agent: agents of a large job report rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.config.sections import FaultToleranceConfig
from slurmft.policy.stop import longest_silence_s
from slurmft.storage.journal import EventName
from slurmft.supervisor.attempt import AttemptRunner

AGENTS = 2048


class Pool:
    """Agents that connect after the first look."""

    def __init__(self) -> None:
        self.links: dict[int, Any] = {}
        self.asked: list[float] = []
        self.second = asyncio.Event()

    def silent_for(self, seconds: float, now: float) -> list[Any]:
        self.asked.append(seconds)
        self.links = dict.fromkeys(range(AGENTS), SimpleNamespace(last_heard=now))
        if len(self.asked) == 2:
            self.second.set()
        return []

    def ping(self, ping: Any) -> None:
        pass


def test_the_silence_that_is_allowed_follows_the_agents_that_have_connected() -> None:
    async def watched() -> list[float]:
        runner, pool = AttemptRunner.__new__(AttemptRunner), Pool()
        parts: dict[str, Any] = {
            "_config": SimpleNamespace(fault_tolerance=FaultToleranceConfig(agent_timeout_s=1.0)),
            "_pool": pool, "_over": asyncio.Event(), "_hangs": SimpleNamespace(limits=dict),
            "_keeping": None,
        }  # fmt: skip
        for name, part in parts.items():
            setattr(runner, name, part)
        watching = asyncio.create_task(runner._watch_agents())
        await asyncio.wait_for(pool.second.wait(), 10)
        watching.cancel()
        return pool.asked

    first, second = asyncio.run(watched())
    assert first < second == longest_silence_s(AGENTS)


GONE, HERE = None, object()


@pytest.mark.parametrize(
    ("channels", "began", "told"),
    [
        pytest.param([GONE, GONE, GONE], True, [EventName.AGENTS_GONE], id="the step was ended"),
        pytest.param([GONE, HERE, GONE], True, [EventName.AGENT_LOST], id="others live"),
        pytest.param([GONE], True, [EventName.AGENT_LOST], id="the only one"),
        pytest.param([GONE, GONE], False, [EventName.AGENT_LOST], id="before workers were started"),
    ],
)
def test_agents_that_go_together_are_the_end_of_their_step(
    channels: Sequence[object], began: bool, told: list[EventName]
) -> None:
    links = [
        SimpleNamespace(node=node, host=f"n{node}", channel=channel, dropped=False, lender="", leaving=False)
        for node, channel in enumerate(channels)
    ]
    events: list[EventName] = []

    async def at_once(_: object) -> None:
        return

    def drop(link: SimpleNamespace) -> None:
        link.dropped = True

    async def gone() -> AttemptRunner:
        runner = AttemptRunner.__new__(AttemptRunner)
        parts: dict[str, Any] = {
            "_pool": SimpleNamespace(links=dict(enumerate(links)), members=[], drop=drop),
            "_crew": SimpleNamespace(reconnected=at_once, reviver=SimpleNamespace(lost=lambda *_, **__: None)),
            "stops": SimpleNamespace(began=began), "_over": asyncio.Event(), "lost": [], "_lost_early": [],
            "_cluster": SimpleNamespace(lost=set()),
            "_journal": SimpleNamespace(append=lambda event, **_: events.append(event)),
        }  # fmt: skip
        for name, part in parts.items():
            setattr(runner, name, part)
        link: Any = links[0]
        await runner._on_disconnect(link)
        return runner

    runner = asyncio.run(gone())
    assert events == told
    assert runner._over.is_set() == (told == [EventName.AGENTS_GONE])
    assert bool(runner._cluster.lost) == (told == [EventName.AGENT_LOST])
