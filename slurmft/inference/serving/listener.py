"""Where a router listens for clients: who may stay, how long, and what answers a request that cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
import traceback
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from slurmft.config.inference import InferenceConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.inference.serving.access_log import AccessLog
from slurmft.inference.serving.errand import TRIP, Trip, error_answer, is_last
from slurmft.inference.serving.handshake import listening_socket
from slurmft.inference.serving.router import Router
from slurmft.policy.inference.http_headers import request_id, target_of
from slurmft.policy.inference.rotation import Priority
from slurmft.policy.strangers import Strangers
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
"""For TLS, at most."""

TLS_STRANGERS = 1024
"""At most so many: each costs 256 KiB from its first byte on, in buffers of asyncio."""

ACCEPTED_AT_ONCE = 64
"""More could use up the descriptors before those of strangers are given back."""

UNREAD = {
    400: "this is no request that can be read",
    431: "a header, or the request line, is too long (inference.serving.max_header_bytes)",
}

log = logging.getLogger(__name__)

_Stranger: TypeAlias = "_Arrival | _Connection"


class RouterServer:
    """Listens for clients, and keeps slow and silent ones from holding connections."""

    def __init__(self, router: Router, config: InferenceConfig, access_log: Path | None = None) -> None:
        assert config.serving is not None
        self.access = AccessLog(access_log)
        self._router, self._serving = router, config.serving
        self._busy: set[web.RequestHandler] = set()
        self._idle_since: dict[web.RequestHandler, float] = {}
        self._known: set[web.RequestHandler] = set()
        """Connections that have sent a request before."""

        most = allow_descriptors(DESCRIPTORS) // STRANGERS_SHARE
        most = max(2, min(most, TLS_STRANGERS) if self._serving.is_https else most)
        self.strangers: Strangers[_Stranger] = Strangers(most, most // 2)
        """Connections that have not shown the token yet, from the moment when they are accepted."""

        self._arriving: set[asyncio.Task[None]] = set()
        self._server = web.Server(self._handle, handler_cancellation=True)
        self._is_leaving = False
        self._listener: socket.socket | None = None
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
        try:
            self._listener = listening = listening_socket(host, port)
            listening.listen(BACKLOG)
        except OSError as error:
            raise LaunchError(f"cannot listen on port {port}: {error.strerror or error}") from error
        asyncio.get_running_loop().add_reader(listening, self._accept, listening, context)
        self._sweeping = asyncio.create_task(self._sweep())
        self.access.begin()
        return int(listening.getsockname()[1])

    async def leave(self) -> None:
        """Take no more connections; returns when those that are there have got the answer they wait for."""
        self._is_leaving = True
        self._stop_listening()
        while self._arriving or self._server.connections:
            for connection in list(self._server.connections):
                connection.close()  # once its request is answered ...
                if connection not in self._busy and connection.transport is not None:
                    connection.transport.close()  # ... which aiohttp does not do where there is none
            await asyncio.sleep(LEAVE_LOOK_S)

    async def close(self) -> None:
        """Take no more clients, and end those that are there."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._stop_listening()
        for arriving in self._arriving:
            arriving.cancel()
        await self._server.shutdown(0.1)
        await self.access.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    for oldest in self.strangers.drop_oldest():
                        oldest.hang_up()
                return
            connection.setblocking(False)
            arrival = _Arrival(connection)
            self.admit(arrival, str(address[0]))
            arriving = asyncio.create_task(self._begin(arrival, context, str(address[0])))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)

    async def _begin(self, arrival: _Arrival, context: ssl.SSLContext | None, address: str) -> None:
        limit_s = min(self._serving.client_timeout_s, HANDSHAKE_S) if context is not None else None
        try:
            if context is not None:
                await arrival.first_byte(limit_s)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection(arrival, address), arrival.socket, ssl=context, ssl_handshake_timeout=limit_s
            )
        except OSError as error:  # what is no TLS as well
            log.debug("a connection from %s ended before it began: %s", address, error)
            traceback.clear_frames(error.__traceback__)  # asyncio's hold the error, and so the buffers, in a circle
        finally:
            self.strangers.forget(arrival)

    def admit(self, connection: _Stranger, address: str) -> None:
        """A connection is there. Those of strangers must not use up descriptors and memory; the oldest is the least
        likely to be a client's, which shows the token at once."""
        for oldest in self.strangers.admit(connection, address):
            oldest.hang_up()

    def _connection(self, arrival: _Arrival, address: str) -> _Connection:
        longest = self._serving.max_header_bytes
        return _Connection(
            self, self._server, arrival, address, loop=asyncio.get_running_loop(), keepalive_timeout=KEPT_S,
            access_log=None, auto_decompress=False, max_line_size=longest, max_field_size=longest,
            lingering_time=1.0, logger=log,
        )  # fmt: skip

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        self._busy.add(connection)
        began_s, answer = time.monotonic(), None
        target, host = target_of(request.raw_path)
        request[TRIP] = Trip(
            id=request_id(request.headers.get("X-Request-ID")), target=target, client=connection.address,
            priority=Priority.of(request.headers.get("X-Priority")),
            host=host or request.headers.get("Host") or connection.own_address,
        )  # fmt: skip
        try:
            is_known = self._router.knows(request)
            if is_known:
                self.strangers.forget(connection)
            answer = await self._router.handle(request, is_known=is_known)
            if not answer.prepared:
                answer.headers.update(self._router.headers_for(request))
                answer.headers.setdefault("Server", "slurmft")
                if self._is_leaving or is_last(request):
                    answer.force_close()  # a client that is not told sends its next request into the closed connection
            return answer
        finally:
            self.access.note(request, answer, time.monotonic() - began_s)
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


class _Arrival:
    """A connection before its first request can be read: with TLS, during the handshake."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    async def first_byte(self, limit_s: float | None) -> None:
        """Wait for it, or close the socket and raise ``OSError``: a silent one costs a socket, and no buffers."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.socket, ready.set)
        try:
            async with asyncio.timeout(limit_s):
                await ready.wait()
            if not self.socket.recv(1, socket.MSG_PEEK):
                raise ConnectionError("closed without a word")
        except BaseException:
            loop.remove_reader(self.socket)
            self.socket.close()
            raise
        loop.remove_reader(self.socket)

    def hang_up(self) -> None:
        """End it; its task notices."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _Connection(web.RequestHandler):
    """A client's connection."""

    __slots__ = ("_arrival", "_server", "address")

    def __init__(
        self, server: RouterServer, manager: web.Server, arrival: _Arrival, address: str, **settings: Any
    ) -> None:
        super().__init__(manager, **settings)
        self._server, self._arrival, self.address = server, arrival, address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.strangers.forget(self._arrival)
        self._server.admit(self, self.address)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.strangers.forget(self)
        super().connection_lost(exc)

    @property
    def own_address(self) -> str:
        """Where the client has found this router."""
        name = self.transport.get_extra_info("sockname") if self.transport is not None else None
        return f"{name[0]}:{name[1]}" if name else "replica"

    def hang_up(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()

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
        told = error_answer(status, UNREAD.get(status, "an error in the router"))
        answer = web.json_response(told, status=status, headers={"Server": "slurmft"})
        answer.force_close()
        return answer
