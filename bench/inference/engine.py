"""A deterministic engine over HTTP that tells when it did what: ``engine.py PORT PAUSE_S LOG``.

``LOG`` gets the lines ``began|ended pid number time``; the number of a request is the last word of its prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time

from aiohttp import web


class Engine:
    """Answers each request after a pause, as many at a time as there are."""

    def __init__(self, pause_s: float, log: str) -> None:
        self._pause_s, self._pid = pause_s, os.getpid()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def complete(self, request: web.Request) -> web.Response:
        """SHA-256 of the prompt."""
        prompt = (await request.json())["prompt"]
        number = prompt.rpartition(" ")[2]
        self._note("began", number)
        await asyncio.sleep(self._pause_s)
        self._note("ended", number)
        return web.json_response({"text": hashlib.sha256(prompt.encode()).hexdigest()})

    def _note(self, what: str, number: str) -> None:
        os.write(self._log, f"{what} {self._pid} {number} {time.time():.6f}\n".encode())


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    engine = Engine(float(sys.argv[2]), sys.argv[3])
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", engine.complete), web.get("/health", healthy)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
