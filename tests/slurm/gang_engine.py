"""An engine of several processes, which refuses to start and to answer without all of them.

python gang_engine.py --rank RANK --nodes NODES --head HEAD --head-port PORT --port PORT   [--delay SECONDS]

The first process answers as ``inference_engine.py`` and ``serving_engine.py`` do, once it has asked each other one; the
others are asked over a connection to the first, and say which answer is right. None of them ends because another does.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket

from aiohttp import web


class Peers:
    """The first process's connections to the others, one question at a time."""

    def __init__(self, count: int) -> None:
        self._count, self._turn = count, asyncio.Lock()
        self._connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.are_there = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append((reader, writer))
        if len(self._connections) == self._count:
            self.are_there.set()

    async def answers(self, prompt: str) -> list[str]:
        """What each other process says; waits for ever for one that is gone, as collectives do."""
        async with self._turn:
            found = []
            for reader, writer in self._connections:
                writer.write(json.dumps(prompt).encode() + b"\n")
                if not (line := await reader.readline()):
                    await asyncio.Event().wait()
                found.append(line.decode().strip())
            return found


async def be_asked(head: str, port: int) -> None:
    """As any other process: answer the first one until killed."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(head, port)
            break
        except OSError:
            await asyncio.sleep(0.1)
    while line := await reader.readline():
        writer.write(hashlib.sha256(json.loads(line).encode()).hexdigest().encode() + b"\n")
    await asyncio.Event().wait()


async def answer(arguments: argparse.Namespace) -> None:
    peers = Peers(arguments.nodes - 1)
    await asyncio.start_server(peers.serve, port=arguments.head_port, family=socket.AF_INET)
    await peers.are_there.wait()

    async def complete(request: web.Request) -> web.Response:
        given = await request.json()
        prompt = given.get("prompt") or given["messages"][-1]["content"]
        await asyncio.sleep(arguments.delay)
        (text, *_) = await peers.answers(prompt)
        message = {"role": "assistant", "content": text}
        return web.json_response({"text": text, "choices": [{"index": 0, "message": message, "text": text}],
                                  "pid": os.getpid()})  # fmt: skip

    async def healthy(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete), web.post("/v1/completions", complete),
                    web.get("/health", healthy)])  # fmt: skip
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", arguments.port).start()
    await asyncio.Event().wait()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parser = argparse.ArgumentParser()
    for name in ("rank", "nodes", "head-port", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--delay", type=float, default=0.05)
    arguments = parser.parse_args()
    if arguments.rank:
        asyncio.run(be_asked(arguments.head, arguments.head_port))
    else:
        asyncio.run(answer(arguments))


if __name__ == "__main__":
    main()
