"""An engine that streams ten events, 2 ms apart, and costs next to nothing itself.

python engine.py --port PORT | --socket PATH
"""

from __future__ import annotations

import argparse
import asyncio

from aiohttp import web

EVENTS, PAUSE_S = 10, 0.002
EVENT = (
    b'data: {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", '
    b'"choices": [{"index": 0, "delta": {"content": "%d"}, "finish_reason": null}]}\n\n'
)


async def stream(request: web.BaseRequest) -> web.StreamResponse:
    if request.method == "GET":
        return web.Response()
    await request.read()
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for number in range(EVENTS):
        await answer.write(EVENT % number)
        await asyncio.sleep(PAUSE_S)
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--socket")
    given = parser.parse_args()
    runner = web.ServerRunner(web.Server(stream, access_log=None))
    await runner.setup()
    where = web.UnixSite(runner, given.socket) if given.socket else web.TCPSite(runner, "127.0.0.1", given.port)
    await where.start()
    await asyncio.Event().wait()


asyncio.run(serve())
