"""An endpoint without Slurm and without processes: engines, gates and a router in one event loop, over real sockets."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from waiting import until_async

from slurmft.config.inference import InferenceConfig
from slurmft.inference.gate import Gate
from slurmft.inference.router import Router, RouterServer
from slurmft.ipc.messages import Members, ReplicaPlace

TOKEN, KEY = "a-token-of-these-tests", b"k" * 64
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """One engine behind its gate."""

    name: str
    handle: Handle
    seen: list[str] = field(default_factory=list)
    gate: Gate | None = None
    port: int = 0

    async def start(self) -> None:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            self.seen.append(request.raw_path)
            return await self.handle(request)

        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "e.sock")
        self._runner = web.ServerRunner(
            web.Server(answer, auto_decompress=False, access_log=None), shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.UnixSite(self._runner, path).start()

        async def connect(protocol: Any) -> None:
            await asyncio.get_running_loop().create_unix_connection(protocol, path)

        self.gate = Gate(KEY, connect)
        self.port = await self.gate.listen("127.0.0.1")

    async def die(self, *, crashed: bool = False) -> None:
        """As the death of its process: every connection breaks at once."""
        assert self.gate is not None
        self.gate.say("ended", crashed=crashed)
        self.gate.close()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def close(self) -> None:
        await self.die()
        await self._runner.cleanup()
        self._folder.cleanup()


class World:
    """A router with its engines, and a client that shows the token."""

    def __init__(self, config: InferenceConfig, engines: dict[str, Handle]) -> None:
        self.config = config
        self.engines = {name: Engine(name, handle) for name, handle in engines.items()}

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    async def start(self) -> None:
        for engine in self.engines.values():
            await engine.start()
        self.router = Router(self.config, node="n0", token=TOKEN, engine_token="", key=KEY)
        self.server = RouterServer(self.router, self.config)
        self.port = await self.server.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.port}"
        self.name_members(*self.engines)
        self.client = aiohttp.ClientSession(f"{self.url}/", headers={"Authorization": f"Bearer {TOKEN}"})
        await until_async(lambda: self.router.replicas.ready == len(self.engines))

    def name_members(self, *names: str, expected: int | None = None, closing: bool = False) -> None:
        places = tuple(ReplicaPlace(name=name, hosts=("127.0.0.1",), port=self[name].port) for name in names)
        expected = len(self.engines) if expected is None else expected
        self.router.replicas.take(Members(epoch=1, router=True, expected=expected, replicas=places, closing=closing))

    async def ask(self, path: str = "/v1/x", *, headers: dict[str, str] | None = None, body: bytes = b"{}") -> Any:
        """Status, and the answer as JSON."""
        async with self.client.post(path, data=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.read() or b"null")

    async def close(self) -> None:
        await self.client.close()
        await self.server.close()
        await self.router.close()
        for engine in self.engines.values():
            await engine.close()


@contextlib.asynccontextmanager
async def serving(
    engines: dict[str, Handle], serving: dict[str, Any] | None = None, **keys: Any
) -> AsyncIterator[World]:
    """A world that lives as long as the block."""
    given = {
        "engine": {"command": ["engine", "{socket}"], "allow_paths": ["/"]},
        "serving": serving or {},
        "concurrency": 4,
        "base_delay_s": 0.01,
    }
    world = World(InferenceConfig(**{**given, **keys}), engines)
    await world.start()
    try:
        yield world
    finally:
        await world.close()


def answers(name: str, *, delay_s: float = 0.0, status: int = 200) -> Handle:
    """An engine that says who it is."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(delay_s)
        return web.json_response({"by": name}, status=status)

    return handle


def streams(parts: list[bytes], *, delay_s: float = 0.01, kind: str = "text/event-stream") -> Handle:
    """An engine that sends these parts one after the other."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": kind})
        await answer.prepare(request)
        for part in parts:
            await answer.write(part)
            await asyncio.sleep(delay_s)
        return answer

    return handle


async def never(request: web.BaseRequest) -> web.StreamResponse:
    """An engine that never answers."""
    await asyncio.Event().wait()
    raise AssertionError


def run(work: Awaitable[None], within_s: float = 60) -> None:
    """One test's work, within a limit."""

    async def limited() -> None:
        async with asyncio.timeout(within_s):
            await work

    asyncio.run(limited())
