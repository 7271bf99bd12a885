"""Where a router listens for clients: who may stay, how long, and what answers a request that cannot be read."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from slurmft.config.inference import InferenceConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.inference.serving.errand import error_answer, is_last
from slurmft.inference.serving.handshake import listening_socket
from slurmft.inference.serving.router import Router
from slurmft.system.processes import allow_descriptors

LEAVE_LOOK_S = 0.05
SWEEP_S = 1.0
KEPT_S = 75.0
"""How long a client's connection is kept for its next request."""

BACKLOG = 4096
DESCRIPTORS = 65_536
"""What a router wants, where the hard limit allows it: two for each request, one for each client that is idle."""

STRANGERS_SHARE = 8
"""One of so many descriptors may belong to connections that have not shown the token yet."""

HANDSHAKE_S = 10.0
"""For TLS, at most: connections within it are not counted."""

UNREAD = {
    400: "this is no request that can be read",
    431: "a header, or the request line, is too long (inference.serving.max_header_bytes)",
}

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

        self.strangers: dict[web.RequestHandler, None] = {}
        """Connections that have not shown the token yet, the oldest one first."""

        self.most_strangers = allow_descriptors(DESCRIPTORS) // STRANGERS_SHARE
        self._server = web.Server(self._handle, handler_cancellation=True)
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
        handshake_s = min(self._serving.client_timeout_s, HANDSHAKE_S) if context is not None else None
        try:
            listening = listening_socket(host, port)
            self._listener = await loop.create_server(
                self._accepted, sock=listening, ssl=context, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
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

    def came(self, connection: web.RequestHandler) -> None:
        """A connection is there. Those of strangers must not use up the descriptors; the oldest is the least likely to
        be a client's, which shows the token at once."""
        if len(self.strangers) >= self.most_strangers:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()
        self.strangers[connection] = None

    def gone(self, connection: web.RequestHandler) -> None:
        """It has ended."""
        self.strangers.pop(connection, None)

    def _accepted(self) -> web.RequestHandler:
        longest = self._serving.max_header_bytes
        return _Connection(
            self, self._server, loop=asyncio.get_running_loop(), keepalive_timeout=KEPT_S, access_log=None,
            auto_decompress=False, max_line_size=longest, max_field_size=longest, lingering_time=1.0, logger=log,
        )  # fmt: skip

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._busy.add(connection)
        try:
            is_known = self._router.knows(request)
            if is_known:
                self.strangers.pop(connection, None)
            answer = await self._router.handle(request, is_known=is_known)
            if not answer.prepared and (self._is_leaving or is_last(request)):
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


class _Connection(web.RequestHandler):
    """A client's connection."""

    __slots__ = ("_server",)

    def __init__(self, server: RouterServer, manager: web.Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.gone(self)
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """As the router's own errors, and no word of the request in log or answer, as aiohttp has it: a token may be
        in it, and answers of errors are what people log and send on."""
        if isinstance(exc, HttpProcessingError):
            status = 431 if isinstance(exc, LineTooLong) else status
        else:
            log.error("a request has failed in the router", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        answer = web.json_response(error_answer(status, UNREAD.get(status, "an error in the router")), status=status)
        answer.force_close()
        return answer
