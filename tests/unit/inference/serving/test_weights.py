"""Weights that a trainer publishes: real drivers and HTTP engines, a router, and answers that say what made them."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from serving_world import answers, serving
from waiting import until_async

from slurmft.config.run import load
from slurmft.inference.driver import EXIT_SICK, SETTINGS_VARIABLE, ReplicaSettings
from slurmft.inference.endpoint import key_of, prepare, publish_weights, token_of
from slurmft.inference.router import Router, RouterServer
from slurmft.ipc.messages import Members, ReplicaPlace
from slurmft.policy.serving import Served

ENGINE = Path(__file__).parents[3] / "slurm" / "serving_engine.py"
WEIGHTS = {"update_path": "/load_weights", "version_path": "/version", "max_version_lag": 0}


class Endpoint:
    """Replicas with their drivers; the agent is played here, and the router is in this process."""

    def __init__(self, folder: Path, weights: dict[str, Any], engine: tuple[str, ...]) -> None:
        self.folder = folder
        command = [sys.executable, str(ENGINE), "--socket", "{socket}", "--delay", "0", *engine]
        given = {"engine": {"command": command}, "serving": {"weights": weights}, "base_delay_s": 0.01}
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump({"run_folder": str(folder), "inference": given}))
        prepare(folder, None)
        self.drivers: dict[str, asyncio.subprocess.Process] = {}
        self.ports: dict[str, int] = {}
        self.writers: list[asyncio.StreamWriter] = []

    async def begin(self) -> None:
        self.agent = await asyncio.start_unix_server(self._hear, self.folder / "s")
        config = load(self.config).inference
        assert config is not None
        token = token_of(self.folder)
        self.router = Router(config, node="n0", token=token, engine_token="", key=key_of(self.folder))
        self.server = RouterServer(self.router, config)
        port = await self.server.listen("127.0.0.1", 0)
        self.client = aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"})

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        self.writers.append(writer)
        while line := await reader.readline():
            told = json.loads(line)
            name = str(told["replica"]) if told["kind"] == "hello" else name
            if told["kind"] == "ready":
                self.ports[name] = told["port"]
                places = [ReplicaPlace(name=each, hosts=("127.0.0.1",), port=at) for each, at in self.ports.items()]
                told = Members(epoch=1, router=True, expected=len(places), replicas=tuple(places), closing=False)
                self.router.replicas.take(told)

    async def start(self, number: int) -> None:
        settings = ReplicaSettings(socket=str(self.folder / "s"), config=str(self.config), generation=1, node=0,
                                   replica=number, life=1, device="")  # fmt: skip
        environment = {**os.environ, SETTINGS_VARIABLE: settings.as_text(), "SLURMD_NODENAME": "127.0.0.1"}
        argv = [sys.executable, "-m", "slurmft.inference.gate"]
        self.drivers[str(number)] = await asyncio.create_subprocess_exec(*argv, env=environment)
        await until_async(lambda: self.router.ready == len(self.drivers))

    async def publish(self, version: int) -> None:
        """The weights are a text: ``weights VERSION``."""
        path = self.folder / f"w{version}"
        path.write_text(f"weights {version}")
        await asyncio.to_thread(publish_weights, path, version=version, to=self.folder)
        await self.router.look_for_weights(self.folder)

    async def ask(self) -> tuple[str | None, str]:
        """The version in the header, and the answer's own word on its weights."""
        async with self.client.post("/v1/completions", json={"model": "m", "prompt": "x"}) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers.get("X-Slurmft-Weights"), (await answer.json())["weights"]

    async def close(self) -> None:
        for writer in self.writers:  # a driver whose agent is gone ends, and its engine with it
            writer.close()
        for driver in self.drivers.values():
            await driver.wait()
        await self.client.close()
        await self.server.close()
        await self.router.close()
        self.agent.close()


@contextlib.asynccontextmanager
async def endpoint(folder: Path, *engine: str, **weights: Any) -> AsyncIterator[Endpoint]:
    world = Endpoint(folder, {**WEIGHTS, **weights}, engine)
    await world.begin()
    try:
        yield world
    finally:
        await world.close()


async def test_every_answer_is_of_the_newest_weights_and_says_so_also_of_a_later_engine(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as world:
        await world.start(0)
        assert await world.ask() == (None, "")
        for version in (0, 3, 4):
            await world.publish(version)
            assert await asyncio.gather(*(world.ask() for _ in range(8))) == [(str(version), f"weights {version}")] * 8
        await world.start(1)
        found = {await world.ask() for _ in range(4)}
        await until_async(lambda: all(each["weights"] == 4 for each in world.router.status()["each"].values()))
        assert found == {("4", "weights 4")}
        world.drivers.pop("0").kill()
        assert {await world.ask() for _ in range(4)} == {("4", "weights 4")}


async def test_requests_in_flight_keep_their_weights_while_new_ones_are_published(tmp_path: Path) -> None:
    """The header is that of the weights that made the answer, however requests and publications meet."""
    async with endpoint(tmp_path, "--delay", "0.05", max_version_lag=2) as world:
        await world.start(0)
        await world.start(1)
        await world.publish(1)
        found, is_over = list[tuple[str | None, str]](), False

        async def client() -> None:
            while not is_over:
                found.append(await world.ask())

        clients = [asyncio.create_task(client()) for _ in range(4)]
        for version in range(2, 9):
            await world.publish(version)
            before = len(found)
            await until_async(lambda before=before: len(found) > before + 4)
        is_over = True
        await asyncio.gather(*clients)
        wrong = [each for each in found if each[0] is not None and each[1] != f"weights {each[0]}"]
        assert not wrong and len({each[0] for each in found}) > 2


async def test_an_update_that_is_refused_or_not_made_is_tried_again_and_nothing_is_asked_meanwhile(
    tmp_path: Path,
) -> None:
    for kind in ("refuses", "ignores"):
        folder = tmp_path / kind
        folder.mkdir(mode=0o700)
        async with endpoint(folder, f"--{kind}", "3") as world:
            await world.publish(5)
            await world.start(0)
            assert await world.ask() == ("5", "weights 5")


async def test_a_slow_update_holds_requests_up_and_one_that_takes_too_long_ends_the_engine(tmp_path: Path) -> None:
    async with endpoint(tmp_path, "--load", "1.5", update_timeout_s=60) as world:
        await world.start(0)
        await world.publish(1)
        assert await world.ask() == ("1", "weights 1")
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["inference"]["engine"]["command"][-1] = "3600"
    config["inference"]["serving"]["weights"]["update_timeout_s"] = 0.5
    world.config.write_text(yaml.safe_dump(config))
    world.drivers, world.ports = {}, {}
    await world.begin()
    try:
        await world.start(0)
        assert await world.drivers["0"].wait() == EXIT_SICK
    finally:
        await world.close()


@pytest.fixture
def routed() -> contextlib.AbstractAsyncContextManager[Any]:
    weights = {"update_path": "/load", "max_version_lag": 1}
    return serving({"a": answers("a"), "b": answers("b")}, {"weights": weights})


async def has(world: Any, name: str, weights: Served) -> None:
    world[name].gate.weights = weights
    world[name].gate.keep()
    world[name].gate.resume()
    await until_async(lambda: world.router.replicas.by_name[name].weights == weights)


async def test_an_engine_that_is_too_far_behind_gets_nothing_until_it_has_caught_up(routed: Any) -> None:
    await has(routed, "a", Served(1, 3))
    await has(routed, "b", Served(1, 5))
    routed.router.replicas.newest = Served(1, 5)
    assert {(await routed.ask())[1]["by"] for _ in range(6)} == {"b"}
    await has(routed, "a", Served(1, 4))
    found = await asyncio.gather(*(routed.ask() for _ in range(6)))
    assert {answer["by"] for _, answer in found} == {"a", "b"}


async def test_requests_wait_while_all_have_weights_of_a_branch_that_was_given_up(routed: Any) -> None:
    for name in "ab":
        await has(routed, name, Served(1, 410))
    routed.router.replicas.newest = Served(2, 405)
    waiting = asyncio.create_task(routed.ask())
    await until_async(lambda: routed.router.waiting == 1)
    assert (await routed.ask(headers={"X-Request-Timeout": "0.2"}))[0] == 504
    assert routed["a"].seen == routed["b"].seen == [] and not waiting.done()
    await has(routed, "b", Served(2, 405))
    assert await waiting == (200, {"by": "b"})


async def test_an_engine_s_own_word_on_publications_is_not_passed_on() -> None:
    async def forge(_request: Any) -> Any:
        return web.json_response({}, headers={"x-slurmft-weights": "99"})

    async with serving({"a": forge}) as world:
        async with world.client.post("/v1/x", data=b"{}") as answer:
            assert "X-Slurmft-Weights" not in answer.headers
        await has(world, "a", Served(1, 0))
        async with world.client.post("/v1/x", data=b"{}") as answer:
            assert answer.headers.getall("X-Slurmft-Weights") == ["0"]
