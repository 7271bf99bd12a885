"""A deterministic engine over HTTP; some prompts make it die, hang, run out of memory or refuse.

python inference_engine.py PORT PAUSE_SECONDS

Those that begin with WAIT are answered when there is a file ``go`` beside it.
"""

import asyncio
import hashlib
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

BUSY = web.AppKey("busy", dict)


async def complete(request: web.Request) -> web.Response:
    prompt = (await request.json())["prompt"]
    match prompt.split()[0]:
        case "POISON":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "HANG":
            await asyncio.Event().wait()
        case "WAIT":
            while not Path(__file__).with_name("go").exists():
                await asyncio.sleep(0.05)
        case "BAD":
            return web.json_response({"error": "I do not like it"}, status=400)
        case "OOM" if request.app[BUSY]["now"] > 0:
            return web.json_response({"error": "CUDA out of memory"}, status=500)
    request.app[BUSY]["now"] += 1
    try:
        await asyncio.sleep(float(sys.argv[2]))
    finally:
        request.app[BUSY]["now"] -= 1
    return web.json_response({"text": hashlib.sha256(prompt.encode()).hexdigest()})


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked, so that a signal to a job step ends none
    app = web.Application()
    app[BUSY] = {"now": 0}
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/health", healthy)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
