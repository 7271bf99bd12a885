"""An engine for the tests of endpoints: OpenAI-shaped, deterministic, and it says who answered.

python serving_engine.py --port PORT | --socket PATH   [--delay SECONDS] [--load SECONDS] [--refuses N] [--ignores N]

A prompt of "BAD" gets 400, "SICK" 500, "DIE" ends the engine, "HANG" never gets an answer; {"tokens": n} makes n events
of a stream. ``/sleep`` is administrative; ``/echo`` returns what came. ``/load_weights`` takes new weights, a file, in
so many seconds; the first N times it refuses, or does not do it. Answers depend on them, and say what is in the file.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from aiohttp import web

DELAY_S = web.AppKey("delay", float)
WEIGHTS = {"text": "", "version": -1}


async def complete(request: web.Request) -> web.StreamResponse:
    given = await request.json()
    prompt = given.get("prompt") or given["messages"][-1]["content"]
    match prompt.split()[0]:
        case "BAD":
            return web.json_response({"error": {"message": "I do not like it"}}, status=400)
        case "SICK":
            return web.json_response({"error": {"message": "oops"}}, status=500)
        case "DIE":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "HANG":
            await asyncio.Event().wait()
    delay_s, weights = request.app[DELAY_S], WEIGHTS["text"]
    text = hashlib.sha256(f"{prompt}{weights}".encode()).hexdigest()
    if given.get("stream"):
        return await stream(request, text, int(given.get("tokens", 8)), delay_s)
    await asyncio.sleep(delay_s)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"}
    return web.json_response({"id": "c", "object": "chat.completion", "created": int(time.time()), "model": "m",
                              "choices": [choice], "pid": os.getpid(), "weights": weights})  # fmt: skip


async def stream(request: web.Request, text: str, tokens: int, delay_s: float) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for number in range(tokens):
        delta = {"content": text[number % len(text)]}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m",
                 "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}  # fmt: skip
        await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await asyncio.sleep(delay_s)
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 0,
                                                          "owned_by": "tests"}]})  # fmt: skip


async def echo(request: web.Request) -> web.Response:
    body = await request.read()
    headers = [[name, value] for name, value in request.headers.items()]
    told = {"method": request.method, "path": request.raw_path, "headers": headers, "body": body.decode("latin-1")}
    return web.json_response(told)


async def version(_request: web.Request) -> web.Response:
    return web.json_response({"version": WEIGHTS["version"]})


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--socket")
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--key", default="", help="answer 401 without it")
    for name in ("load", "refuses", "ignores"):
        parser.add_argument(f"--{name}", type=float, default=0)
    arguments = parser.parse_args()

    async def load_weights(request: web.Request) -> web.Response:
        given = await request.json()
        if arguments.refuses > 0:
            arguments.refuses -= 1
            return web.json_response({"error": {"message": "no memory"}}, status=400)
        await asyncio.sleep(arguments.load)
        if arguments.ignores > 0:
            arguments.ignores -= 1
        else:
            WEIGHTS.update(text=Path(given["path"]).read_text(), version=given["version"])
        return web.json_response({})

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if (
            arguments.key
            and request.path != "/health"
            and arguments.key not in request.headers.get("Authorization", "")
        ):
            return web.json_response({"error": {"message": "which key?"}}, status=401)
        return await handler(request)

    app = web.Application(client_max_size=1 << 30, middlewares=[check])
    app[DELAY_S] = arguments.delay
    app.add_routes([
        web.post("/v1/chat/completions", complete), web.post("/v1/completions", complete),
        web.get("/v1/models", models),
        web.get("/health", healthy), web.post("/sleep", healthy),
        web.post("/load_weights", load_weights), web.get("/version", version), web.route("*", "/echo{rest:.*}", echo),
    ])  # fmt: skip
    where = {"path": arguments.socket} if arguments.socket else {"host": "127.0.0.1", "port": arguments.port}
    web.run_app(app, **where, print=None, access_log=None)


if __name__ == "__main__":
    main()
