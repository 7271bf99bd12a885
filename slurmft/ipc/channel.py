"""The control channel: JSON lines over TCP, each one authenticated with the job's secret.

On connect the server sends a nonce, and the client's first message must prove that it knows the secret; the key of a
connection is derived from the secret and both sides' nonces, and each line is bound to its direction and its place in
the sequence. So a stranger that connects, replays or injects lines changes nothing, and only closes its own connection.
Lines are authentic, not confidential: no secret travels in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_LINE_BYTES = 256 * 1024
UNANSWERED = 0
"""The id of a message without a reply."""

HANDSHAKE_TIMEOUT_S = 10.0
LEAST_PATIENCE_S, LONGEST_PATIENCE_S = 20.0, 86_400.0
PROBE_S, MAX_PROBES = 5, 100

Body = dict[str, Any]
"""A message as JSON: an object with its kind (``reports``, ``calls``)."""


class BadMessage(Exception):
    """The peer sent something that is not an authentic message; its connection must be closed."""


class Channel:
    """One authenticated connection. Build it with ``accept`` or ``connect``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, is_server: bool
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._mine, self._theirs = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = self._received = 0
        self.peer = str((writer.get_extra_info("peername") or ("?",))[0])
        self.own_address = str((writer.get_extra_info("sockname") or ("",))[0])
        """This side's, at which the other's node surely finds this one."""

    def send(self, message: Body | msgspec.Struct) -> None:
        """Queue one message; lost without notice when the peer is gone (its reader notices)."""
        body = encoded(message)
        if len(body) > MAX_LINE_BYTES - 100:
            raise ValueError(f"a control message of {len(body)} bytes is too long")
        if not self._writer.is_closing():
            self._writer.write(self._mac(self._mine, self._sent, body) + b" " + body + b"\n")
            self._sent += 1

    async def receive(self) -> Body | None:
        """The next message; None when the peer has closed the connection.

        Raises:
            BadMessage: the line is too long, not authentic, or not a JSON object.
        """
        line = await self.receive_line()
        return None if line is None else body_of(line)

    async def receive_line(self) -> bytes | None:
        """The same, not read yet.

        Raises:
            BadMessage: the line is too long, or not authentic.
        """
        line = await _read_line(self._reader)
        if line is None:
            return None
        mac, _, body = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
            raise BadMessage(f"a line from {self.peer} is not authentic")
        self._received += 1
        return body

    async def drain(self) -> None:
        """Wait until what was sent has left this process; errors of a dead peer are left to its reader."""
        try:
            await self._writer.drain()
        except OSError:
            return

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        text = direction + str(number).encode() + b" " + body
        return hmac.digest(self._key, text, "sha256").hex().encode()  # four times as fast as an object


def encoded(message: Body | msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """As JSON, in which NaN and infinities are null; a metric is NaN then, as earlier versions take no null there."""
    try:
        return msgspec.json.encode(message).replace(b'"metric":null', b'"metric":NaN')  # a quote in a text is escaped
    except UnicodeEncodeError:  # a name that is not UTF-8
        return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()


def body_of(line: bytes) -> Body:
    """The message that a line holds; NaN and infinities, which earlier versions send as such, are None.

    Raises:
        BadMessage: it holds none.
    """
    try:
        message = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:  # the second one: brackets in brackets
        raise BadMessage("a line is not JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessage("a line is not a message")
    return message


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> tuple[Channel, Body]:
    """The server's side: the connection and its first message, once the client has proved that it knows the secret.

    Raises:
        BadMessage: it did not.
        TimeoutError: it took longer than HANDSHAKE_TIMEOUT_S.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        nonce = secrets.token_hex(16).encode()
        writer.write(nonce + b"\n")
        theirs = await _read_line(reader)
        if theirs is None or len(theirs) != 32:
            raise BadMessage("no handshake")
        channel = Channel(reader, writer, _key(secret, nonce, theirs), is_server=True)
        first = await channel.receive()
        if first is None:
            raise BadMessage("no first message")
        return channel, first


def keep_alive(writer: asyncio.StreamWriter, patience_s: float = LEAST_PATIENCE_S) -> None:
    """Let the kernel detect that the peer's node is gone, also on an idle connection, but not before ``patience_s``."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in keep_alive_options(patience_s).items():
        if (number := getattr(socket, option, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


def keep_alive_options(patience_s: float) -> dict[str, int]:
    """Names of the socket's options and their values; seconds, but for the time-out of what was sent."""
    patience_s = min(max(patience_s, LEAST_PATIENCE_S), LONGEST_PATIENCE_S)
    probe_s = max(PROBE_S, math.ceil(patience_s / MAX_PROBES))
    return {
        "TCP_KEEPIDLE": probe_s, "TCP_KEEPINTVL": probe_s, "TCP_KEEPCNT": math.ceil(patience_s / probe_s),
        "TCP_USER_TIMEOUT": math.ceil(patience_s * 1000),
    }  # fmt: skip


async def connect(host: str, port: int, secret: bytes) -> Channel:
    """The client's side. The server stays silent until the first message proves us; send it at once.

    Raises:
        OSError: no server listens there, or not in time.
        BadMessage: the peer is not a server of this protocol.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        try:
            theirs = await _read_line(reader)
            if theirs is None or len(theirs) != 32:
                raise BadMessage(f"{host}:{port} is not a slurmft supervisor")
        except BaseException:  # a time-out is a cancellation in here
            writer.close()
            raise
        nonce = secrets.token_hex(16).encode()
        writer.write(nonce + b"\n")
        return Channel(reader, writer, _key(secret, theirs, nonce), is_server=False)


def _key(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.new(secret, b"slurmft control 1 " + server_nonce + b" " + client_nonce, hashlib.sha256).digest()


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise BadMessage("a line is too long") from error
    except OSError:
        return None
    return line[:-1] if line.endswith(b"\n") else None
