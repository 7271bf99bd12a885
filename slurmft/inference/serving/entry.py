"""The process of one router, which its agent starts and starts again.

    python -m slurmft.inference.serving.entry      (forked by the agent's zygote)

Over a Unix socket in the agent's private folder it hears which replicas there are, one JSON object a line, and says
where it listens, then every second that it lives. When the agent is gone, so is the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import ssl
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from slurmft.config.config import load
from slurmft.config.inference import InferenceConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.inference.serving.certificates import context_for
from slurmft.inference.serving.endpoint import is_local, key_of, token_in, token_of
from slurmft.inference.serving.handshake import listening_socket
from slurmft.inference.serving.router import Router
from slurmft.inference.serving.router_settings import SETTINGS_VARIABLE, RouterSettings
from slurmft.system.agents_child import run_below_agent

ALIVE_S = 1.0
LEAVE_LOOK_S = 0.05
SWEEP_S = 1.0
KEPT_S = 75.0
"""How long a client's connection is kept for its next request."""

MAX_LINE_BYTES = 16 << 20
BACKLOG = 4096

log = logging.getLogger(__name__)


class RouterServer:
    """Listens for clients, and keeps slow and silent ones from holding connections."""

    def __init__(self, router: Router, config: InferenceConfig) -> None:
        assert config.serving is not None
        self._router, self._serving = router, config.serving
        self._busy: set[web.RequestHandler] = set()
        self._idle_since: dict[web.RequestHandler, float] = {}
        self._known: set[web.RequestHandler] = set()
        """Connections that have sent a request before."""

        self._server = web.Server(
            self._handle, handler_cancellation=True, keepalive_timeout=KEPT_S, access_log=None, auto_decompress=False,
            max_line_size=self._serving.max_header_bytes, max_field_size=self._serving.max_header_bytes,
            lingering_time=1.0, logger=_quiet_logger(),
        )  # fmt: skip
        self._is_leaving = False
        self._listener: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def listen(self, host: str | None, port: int, context: ssl.SSLContext | None = None) -> int:
        """Begin; returns the port.

        Args:
            context: for HTTPS with a certificate that the configuration does not name.

        Raises:
            SlurmftError: certificate and key cannot be used, or the port is taken.
        """
        if self._serving.tls_certificate is not None and self._serving.tls_key is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                if self._serving.tls_key.stat().st_mode & 0o077:
                    raise UsageError(f"inference.serving.tls_key: others may read {self._serving.tls_key}",
                                     hint=f"chmod 600 {self._serving.tls_key}")  # fmt: skip
                context.load_cert_chain(self._serving.tls_certificate, self._serving.tls_key)
            except (OSError, ssl.SSLError) as error:
                raise UsageError(f"inference.serving.tls_certificate and tls_key cannot be used: {error}") from error
        loop = asyncio.get_running_loop()
        handshake_s = self._serving.client_timeout_s if context is not None else None
        try:
            listening = listening_socket(host, port)
            self._listener = await loop.create_server(
                self._server, sock=listening, ssl=context, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:
            raise LaunchError(f"cannot listen on port {port}: {error.strerror or error}") from error
        self._sweeping = asyncio.create_task(self._sweep())
        return int(listening.getsockname()[1])

    async def leave(self) -> None:
        """Take no more connections; returns when those that are there have got the answer they wait for."""
        self._is_leaving = True
        if self._listener is not None:
            self._listener.close()
        while self._server.connections:
            for connection in list(self._server.connections):
                connection.close()  # once its request is answered ...
                if connection not in self._busy and connection.transport is not None:
                    connection.transport.close()  # ... which aiohttp does not do where there is none
            await asyncio.sleep(LEAVE_LOOK_S)

    async def close(self) -> None:
        """Take no more clients, and end those that are there."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._listener is not None:
            self._listener.close()
        await self._server.shutdown(0.1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._busy.add(connection)
        try:
            answer = await self._router.handle(request)
            if self._is_leaving and not answer.prepared:
                answer.force_close()  # a client that is not told sends its next request into the closed connection
            return answer
        finally:
            self._busy.discard(connection)
            self._known.add(connection)
            self._idle_since[connection] = time.monotonic()

    async def _sweep(self) -> None:
        """Cut off clients that take too long for a request line and its headers."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s, limit_s = time.monotonic(), self._serving.client_timeout_s
            connections = set(self._server.connections)
            self._known &= connections
            for gone in self._idle_since.keys() - connections:
                del self._idle_since[gone]
            for connection in connections:
                if connection in self._busy:
                    continue
                since_s = self._idle_since.setdefault(connection, now_s)
                is_late = now_s - since_s > limit_s + KEPT_S * (connection in self._known)
                if is_late and connection.transport is not None:
                    connection.transport.abort()


class _NoRequests(logging.Filter):
    """aiohttp logs requests that it cannot read with their text, where a token may be; the client is told enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _quiet_logger() -> logging.Logger:
    found = logging.getLogger(f"{__name__}.http")
    if not found.filters:
        found.addFilter(_NoRequests())
    return found


async def serve(settings: RouterSettings) -> int:
    """Route until the agent is gone; returns the exit code.

    Raises:
        SlurmftError: it cannot begin.
    """
    config = load(Path(settings.config))
    section = config.inference
    assert section is not None and section.serving is not None
    engine_token = token_in(section.engine.token_file) if section.engine.token_file is not None else ""
    router = Router(section, node=settings.node, token=token_of(config.run_folder), engine_token=engine_token,
                    key=key_of(config.run_folder))  # fmt: skip
    server = RouterServer(router, section)
    reader, writer = await asyncio.open_unix_connection(settings.socket, limit=MAX_LINE_BYTES)

    def say(**message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def say_alive() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            say(kind="alive", answered=router.answered)

    host, context = "127.0.0.1" if is_local(os.environ) else None, None
    if section.serving.tls_own:
        context = await asyncio.to_thread(context_for, config.run_folder, settings.hosts)
    port = await server.listen(host, settings.port, context)
    gc.collect()
    gc.freeze()  # what is there now stays: a full collection would hold requests up
    say(kind="ready", port=port)
    living = asyncio.create_task(say_alive())

    async def obey() -> None:
        leaving: asyncio.Task[None] | None = None
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                told = json.loads(line)
                router.replicas.take(told)
                if told.get("leave") and leaving is None:
                    leaving = asyncio.create_task(server.leave())
                    leaving.add_done_callback(lambda _task: obeying.cancel())

    obeying = asyncio.create_task(obey())
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await obeying
    finally:
        living.cancel()
        await server.close()
        await router.close()
        writer.close()
    return 0


def main() -> int:
    """Run the router that the environment describes."""
    return run_below_agent(lambda: serve(RouterSettings.from_text(os.environ.pop(SETTINGS_VARIABLE))))


if __name__ == "__main__":
    os._exit(main())
