"""How long the supervisor waits for a silent agent: agents of a large job report rarely."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from slurmft.config.fault_tolerance import FaultToleranceConfig
from slurmft.policy.timing.fleet import longest_silence_s
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
