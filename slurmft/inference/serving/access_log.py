"""A router's access log: a line of JSON for each request, on a shared disk that may be slow, full or silent."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
from pathlib import Path

from aiohttp import web

from slurmft.inference.serving.errand import TRIP
from slurmft.system.opening import write_bytes

EVERY_S = 0.5
MOST_LINES = 20_000
"""That wait for the disk; further ones are lost."""

MOST_BYTES = 64 << 20
CLIENT_GONE = 499
"""As nginx has it: the client has not waited for its answer."""

log = logging.getLogger(__name__)


class AccessLog:
    """Lines, written by a thread a moment later.

    Args:
        path: None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines, self._lost = path, list[str](), 0
        self._writing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Write from now on."""
        if self._path is not None:
            self._writing = asyncio.create_task(self._write_regularly())

    async def close(self) -> None:
        """Write what is there, where the disk takes it at once."""
        if self._writing is not None:
            self._writing.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._write(), EVERY_S)

    def note(self, request: web.BaseRequest, answer: web.StreamResponse | None, seconds: float) -> None:
        """A request has its answer, or has lost its client. The query is left out: it may hold what is secret."""
        if self._path is None or len(self._lines) >= MOST_LINES:
            self._lost += self._path is not None
            return
        trip, body = request[TRIP], getattr(answer, "body", None)
        self._lines.append(json.dumps({
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), "id": trip.id,
            "client": trip.client, "method": request.method, "path": trip.target.partition("?")[0][:2000],
            "status": CLIENT_GONE if answer is None else answer.status,
            "bytes": len(body) if isinstance(body, bytes) else 0 if answer is None else answer.body_length,
            "seconds": round(seconds, 4), "replica": trip.replica, "tries": trip.tries,
        }) + "\n")  # fmt: skip

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self._write()

    async def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._path is None or not lines:
            return
        try:
            await asyncio.to_thread(_append, self._path, "".join(lines).encode())
        except OSError as error:
            self._lost += len(lines)
            log.warning("the access log has lost %d lines so far: %s", self._lost, error)


def _append(path: Path, content: bytes) -> None:
    write_bytes(path, content, append=True, follow=False)
    if path.stat().st_size > MOST_BYTES:
        path.replace(path.with_suffix(".log.1"))
