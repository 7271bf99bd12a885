"""The port of a node's router where another agent has taken over, and where another process has taken the port."""

import asyncio
from pathlib import Path

from slurmft.agent.inference import NodeRouter
from slurmft.config.inference import ServingConfig
from slurmft.ipc.messages import Members


def test_a_router_begins_at_the_port_of_the_one_before_and_elsewhere_where_that_is_taken(tmp_path: Path) -> None:
    started: list[int] = []

    async def live(config: ServingConfig) -> list[int]:
        started.clear()
        router = NodeRouter(
            config, max_restarts=3, folder=tmp_path, hosts=("n1",), start=lambda _socket, port: started.append(port),
            kill=lambda: None, last_words=lambda: "address in use", report=lambda _: None,
        )  # fmt: skip
        router.begin(1, 40001)
        await router.take(Members(epoch=1, router=True, expected=1, replicas=()))
        router.on_exit(1)
        async with asyncio.timeout(60):
            while len(started) < 2:
                await asyncio.sleep(0.01)
        await router.close()
        return started

    assert asyncio.run(live(ServingConfig())) == [40001, 0]
    assert asyncio.run(live(ServingConfig(port=8000))) == [8000, 8000], "the one that was asked for is never left"
