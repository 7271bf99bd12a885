"""Requests that crash engines: refused after the second, and remembered; those beside them are answered."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from serving_world import TOKEN, Handle, World, serving
from waiting import until_async

from slurmft.config.inference import InferenceConfig
from slurmft.inference.driver import SETTINGS_VARIABLE, ReplicaSettings
from slurmft.inference.endpoint import key_of, prepare
from slurmft.inference.pool import ReplicaPool
from slurmft.inference.router import Router, RouterServer
from slurmft.ipc.messages import Members, ReplicaDied, ReplicaPhase, ReplicaPlace, Sent
from slurmft.policy.inference import has_crashed

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
async def test_a_request_that_crashes_two_replicas_is_refused_and_the_others_are_answered(beside: int) -> None:
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


async def test_suspects_are_alone_on_several_replicas_at_once_and_others_go_on() -> None:
    """Engines that hang need minutes to be killed: behind each other most suspects would only meet their deadlines."""
    together, seen = asyncio.Barrier(3), set[bytes]()
    ordinary: list[int] = []

    def engine(name: str) -> Handle:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            if b"POISON" in body:
                if body in seen:
                    await together.wait()
                    ordinary.extend([status for status, _ in await asyncio.gather(*map(ask, range(12)))])
                seen.add(body)
                await world[name].die(crashed=True)
                await asyncio.Event().wait()
            return web.json_response({"by": name})

        return handle

    def ask(number: int, word: str = "n") -> Any:
        return world.ask(body=json.dumps({word: number}).encode(), headers={"X-Request-Timeout": "20"})

    engines = {f"n{number}/0#1.1": engine(f"n{number}/0#1.1") for number in range(9)}
    async with serving(engines, concurrency=64, max_retries=3) as world:
        found = await asyncio.gather(*(ask(number, "POISON") for number in range(3)))
        assert [status for status, _ in found] == [422] * 3, found
        assert ordinary == [200] * 36 and world.router.replicas.ready == 3
        assert world.router.suspects == 0 and not any(load.kept for load in world.router.replicas.loads())


async def test_what_a_request_has_crashed_is_held_against_the_same_one_until_it_is_answered() -> None:
    """Its clients ask again after an error: it is alone from then on, and no other request is lost with it."""
    engines = {name: crashes(lambda: world, name) for name in ("n1/0#1.1", "n1/1#1.1", "n2/0#1.1", "n2/1#1.1")}
    async with serving(engines, concurrency=64, max_retries=0) as world:
        many = [asyncio.create_task(world.ask(body=b'{"n": %d}' % n)) for n in range(12)]
        await until_async(lambda: world.router.in_flight == 12)
        assert (await world.ask(body=POISON))[0] == 502
        assert sorted(status for status, _ in await asyncio.gather(*many)) == [200] * 9 + [502] * 3
        others: list[int] = []
        for status in (502, 422):
            beside = asyncio.gather(*(world.ask(body=b'{"n": %d}' % n) for n in range(12)))
            assert (await world.ask(body=POISON))[0] == status
            others += [found for found, _ in await beside]
        assert others == [200] * 24
        assert world.router.replicas.ready == 1
        assert len(world.router._blamed) == 1, "those that were answered are suspects no more"


async def test_a_replica_that_is_killed_from_outside_makes_no_suspects() -> None:
    engines = {name: crashes(lambda: world, name, crashed=False) for name in ("n1/0#1.1", "n1/1#1.1", "n2/0#1.1")}
    async with serving(engines, max_retries=2) as world:
        status, told = await world.ask(body=POISON)
        assert status == 502 and "its replica is gone" in json.dumps(told)


@pytest.mark.parametrize(
    ("code", "crashed"),
    [(0, False), (1, True), (134, True), (-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGKILL, False),
     (-signal.SIGTERM, False)],
)  # fmt: skip
def test_how_an_engine_ends_says_whether_it_has_crashed(code: int, crashed: bool) -> None:
    assert has_crashed(code) == crashed


WORDS = Path(__file__).parents[2] / "support" / "word_engine.py"
HANG_S = 3.0


class Node:
    """A node with its replicas as processes, watched as by its agent, and two routers."""

    def __init__(self, folder: Path, replicas: int) -> None:
        given = {"engine": {"command": [sys.executable, str(WORDS), "{port}", "0.02", "/dev/null"]},
                 "serving": {"routers": 2}, "replicas_per_node": replicas, "hang_timeout_s": HANG_S,
                 "max_retries": 6, "max_restarts": 2, "base_delay_s": 0.01}  # fmt: skip
        self.file = folder / "config.yaml"
        self.file.write_text(yaml.safe_dump({"run_folder": str(folder), "inference": given}))
        prepare(folder, None)
        self.config = InferenceConfig(**given)
        self.deaths: list[ReplicaDied] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._places: dict[int, ReplicaPlace] = {}
        self.pool = ReplicaPool(
            self.config, run_folder=folder, folder=folder, node=0, host="n0", start=self._start, kill=self._kill,
            last_words=lambda number: "", report=self._report,
        )  # fmt: skip
        self.routers = [
            Router(self.config, node=f"n{each}", token=TOKEN, engine_token="", key=key_of(folder)) for each in "01"
        ]
        self.servers = [RouterServer(each, self.config) for each in self.routers]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def begin(self) -> list[int]:
        await self.pool.begin(epoch=1, generation=1)
        ports = [await each.listen("127.0.0.1", 0) for each in self.servers]
        wanted = self.config.replicas_per_node
        await until_async(lambda: all(each.replicas.ready == wanted for each in self.routers))
        return ports

    async def close(self) -> None:
        self._is_over = True
        for number in list(self._processes):
            self._kill(number)
        await asyncio.gather(*self._tasks)
        for each in (self.pool, *self.servers, *self.routers):
            await each.close()

    def _start(self, number: int, socket: str, life: int) -> None:
        settings = ReplicaSettings(socket=socket, config=str(self.file), generation=1, node=0, replica=number,
                                   life=life, device="")  # fmt: skip

        async def live() -> None:
            environment = {**os.environ, SETTINGS_VARIABLE: settings.as_text(), "SLURMD_NODENAME": "127.0.0.1"}
            argv = [sys.executable, "-m", "slurmft.inference.gate"]
            process = await asyncio.create_subprocess_exec(*argv, env=environment, start_new_session=True)
            self._processes[number] = process
            code = await process.wait()
            del self._processes[number]
            if not self._is_over:
                self.pool.on_exit(number, code)

        if not self._is_over:
            self._tasks.add(asyncio.create_task(live()))

    def _kill(self, number: int) -> None:
        if number in self._processes:
            os.killpg(self._processes[number].pid, signal.SIGKILL)

    def _report(self, sent: Sent) -> None:
        match sent:
            case ReplicaDied():
                self.deaths.append(sent)
                self._places.pop(sent.replica, None)
            case ReplicaPhase(phase="ready"):
                name = f"n0.0/{sent.replica}#{sent.life}.{sent.port}"
                self._places[sent.replica] = ReplicaPlace(name=name, hosts=("127.0.0.1",), port=sent.port)
        members = Members(epoch=1, router=True, expected=len(self.pool.replicas), replicas=tuple(self._places.values()))
        for router in self.routers:
            router.replicas.take(members)


@pytest.mark.long
async def test_two_requests_that_stall_engines_at_the_same_time_are_told_from_twenty_that_do_not() -> None:
    """With real drivers and engines, which are killed as they hang: no engine dies without cause."""
    with tempfile.TemporaryDirectory() as name:
        node = Node(Path(name), 3)
        try:
            ports = await node.begin()
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as client:

                async def ask(number: int, **more: Any) -> tuple[int, dict[str, Any]]:
                    body = {"model": "words", "prompt": f"once {number}", "max_tokens": 20, **more}
                    url = f"http://127.0.0.1:{ports[number % 2]}/v1/completions"
                    async with client.post(url, json=body) as answer:
                        return answer.status, await answer.json()

                assert [status for status, _ in await asyncio.gather(*map(ask, range(6)))] == [200] * 6
                ordinary = [asyncio.create_task(ask(number)) for number in range(10)]
                await until_async(lambda: sum(each.load for each in node.routers) == 10)
                stalling = [asyncio.create_task(ask(number, stall=600)) for number in (0, 1)]
                ordinary += [asyncio.create_task(ask(number)) for number in range(10, 20)]
                found = await asyncio.gather(*ordinary)
                assert [status for status, _ in found] == [200] * 20, found
                for status, told in await asyncio.gather(*stalling):
                    assert status == 422 and "this request has crashed" in told["error"]["message"], told
                assert all("hang_timeout_s" in each.how and each.failures == 0 for each in node.deaths)
                assert len(node.deaths) <= 6, "each request one in company, and two alone"
                assert not any(each.suspects for each in node.routers)
                await until_async(lambda: all(each.replicas.ready for each in node.routers))
                await until_async(lambda: not any(load.kept for each in node.routers for load in each.replicas.loads()))
                assert (await ask(0))[0] == (await ask(1))[0] == 200
                assert (await ask(0, stall=600))[0] == 422, "it is remembered"
        finally:
            await node.close()
