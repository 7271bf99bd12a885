"""An engine whose behaviour is read from a file at each request: what real engines do when they are not well.

python behaving_engine.py PORT FOLDER

FOLDER/behaviour: "fails" (500 to every request), "hangs" (takes requests, and answers but /health and /v1/models), else
well. A request with ``pause`` takes so many seconds, where there is FOLDER/serial one after the other; its tokens are
counted at its end, or while it goes on, as FOLDER/counter says ("end", "live"; else there is no counter).
"""

import asyncio
import os
import sys
from pathlib import Path

from aiohttp import web

FOLDER = Path(sys.argv[2])
STEP_S = 0.1
made = 0


def said(name: str) -> str:
    path = FOLDER / name
    return path.read_text().strip() if path.exists() else ""


async def complete(request: web.Request) -> web.Response:
    global made  # noqa: PLW0603 - the engine's counter
    asked = await request.json()
    with (FOLDER / "asked").open("a") as log:
        log.write(f"{os.getpid()} {asked.get('max_tokens')} {asked.get('prompt', '')[:40]}\n")
    if said("behaviour") == "fails":
        return web.json_response({"error": {"message": "CUDA error: device-side assert triggered"}}, status=500)
    if said("behaviour") == "hangs":
        await asyncio.Event().wait()
    if asked.get("status"):
        return web.json_response({"error": {"message": "as asked for"}}, status=int(asked["status"]))
    lock: asyncio.Lock = request.app["lock"]
    async with lock if said("serial") else asyncio.Lock():
        steps = int(float(asked.get("pause", 0.02)) / STEP_S)
        for _ in range(steps):
            await asyncio.sleep(STEP_S)
            made += said("counter") == "live"
        made += steps * (said("counter") == "end")
    choice = {"index": 0, "text": "done", "finish_reason": "stop"}
    return web.json_response({"model": asked["model"], "choices": [choice], "pid": os.getpid()})


async def metrics(_request: web.Request) -> web.Response:
    return web.Response(text=f"tokens_total {made}\n")


async def models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m"}]})


def main() -> None:
    app = web.Application(client_max_size=1 << 28)
    app["lock"] = asyncio.Lock()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models), web.get("/health", models),
                    web.get("/metrics", metrics)])  # fmt: skip
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
