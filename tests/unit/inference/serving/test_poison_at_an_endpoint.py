"""Requests that crash engines: refused after the second, and remembered; those beside them are answered."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable

import pytest
from aiohttp import web
from serving_world import Handle, World, run, serving

from slurmft.policy.inference import has_crashed, poisonous

POISON = b'{"prompt": "POISON"}'


def crashes(at: Callable[[], World], name: str, *, crashed: bool = True) -> Handle:
    """An engine that a poisonous request kills."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if await request.read() == POISON:
            await asyncio.sleep(0.1)
            await at()[name].die(crashed=crashed)
            await asyncio.Event().wait()
        await asyncio.sleep(0.3)
        return web.json_response({"by": name})

    return handle


@pytest.mark.parametrize("beside", [0, 2, 12])
def test_a_request_that_crashes_two_replicas_is_refused_and_the_others_are_answered(beside: int) -> None:
    async def work() -> None:
        engines = {name: crashes(lambda: world, name) for name in ("n1/0#1.1", "n1/1#1.1", "n2/0#1.1", "n2/1#1.1")}
        async with serving(engines, concurrency=64, max_retries=3) as world:
            others = [asyncio.create_task(world.ask(body=b'{"n": %d}' % n)) for n in range(beside)]
            status, told = await world.ask(body=POISON)
            assert status == 422 and "has crashed" in told["error"]["message"], told
            assert [status for status, _ in await asyncio.gather(*others)] == [200] * beside
            dead = 4 - world.router.replicas.ready
            assert dead == 2 if beside < 4 else dead <= 3
            for _ in range(3):
                assert (await world.ask(body=POISON))[0] == 422, "it is remembered"
            assert world.router.replicas.ready == 4 - dead
            assert (await world.ask(body=b'{"n": -1}'))[0] == 200

    run(work())


def test_a_replica_that_is_killed_from_outside_makes_no_suspects() -> None:
    async def work() -> None:
        engines = {name: crashes(lambda: world, name, crashed=False) for name in ("n1/0#1.1", "n1/1#1.1", "n2/0#1.1")}
        async with serving(engines, max_retries=2) as world:
            status, told = await world.ask(body=POISON)
            assert status == 502 and "its replica is gone" in json.dumps(told)

    run(work())


@pytest.mark.parametrize(
    ("code", "crashed"),
    [(0, False), (1, True), (134, True), (-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGKILL, False),
     (-signal.SIGTERM, False)],
)  # fmt: skip
def test_how_an_engine_ends_says_whether_it_has_crashed(code: int, crashed: bool) -> None:
    assert has_crashed(code) == crashed


@pytest.mark.parametrize(
    ("crashes", "guilty"), [([], None), ([0], None), ([0, 0], None), ([0, 1], 1), ([1, 1, 0], None), ([2, 1, 1], 0)]
)
def test_only_a_single_suspect_is_to_blame(crashes: list[int], guilty: int | None) -> None:
    assert poisonous(crashes) == guilty
