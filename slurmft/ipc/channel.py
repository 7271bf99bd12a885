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
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec

MAX_LINE_BYTES = 256 * 1024
UNANSWERED = 0
"""The id of a message without a reply."""

HANDSHAKE_TIMEOUT_S = 10.0
LEAST_PATIENCE_S, LONGEST_PATIENCE_S = 20.0, 86_400.0
PROBE_S, MAX_PROBES = 5, 100

Body = dict[str, Any]
"""A message as JSON: an object with its kind (``ipc.messages``)."""


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
        """Close the connection; what was sent arrives, as soon as it can."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection; what has not left this machine is not sent any more."""
        self._writer.transport.abort()

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
    message = _json(line)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessage("a line is not a message")
    return message


def _json(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:  # the second one: brackets in brackets
        raise BadMessage("a line is not JSON") from error


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


def keep_alive(connection: socket.socket, patience_s: float = LEAST_PATIENCE_S) -> None:
    """Let the kernel detect that the peer's node is gone, also on an idle connection, but not before ``patience_s``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in keep_alive_options(patience_s).items():
        if (number := getattr(socket, option, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


def keep_alive_options(patience_s: float) -> dict[str, int]:
    """Names of the socket's options and their values; seconds, but for the time-out of what was sent."""
    patience_s = min(patience_s, LONGEST_PATIENCE_S)
    probe_s = max(1, min(PROBE_S, math.floor(patience_s / 4)), math.ceil(patience_s / MAX_PROBES))
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


async def connect_to_any(hosts: Sequence[str], port: int, secret: bytes) -> Channel:
    """As ``connect``, to the first of the server's names and addresses that answers.

    Raises:
        OSError, BadMessage: of the last one, where none does; or there is no address.
    """
    last: OSError | BadMessage = OSError("there is no address")
    for host in hosts:
        try:
            return await connect(host, port, secret)
        except (OSError, BadMessage) as error:  # TimeoutError as well
            last = error
    raise last


def listening_socket(host: str | None, port: int = 0) -> socket.socket:
    """A socket that listens at ``host``, or on every interface, of IPv6 as well; at a free port where none is given.

    One socket, with one port: given no host, asyncio would open one for each address family.

    Raises:
        OSError: another process has the port.
    """
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host or "", port))


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


# --- What the fields of a control message may hold, and how messages are read from JSON ---
# class Place(Fields, frozen=True, kw_only=True):
#     rank: Rank
#     sections: tuple[Text200, ...]
#
# Place.parse(line, "a report")    # BadMessage names the field that is missing or malformed

_LENIENT = {"at", "attached_at", "loop_at", "step_at", "copied", "copy_interval", "copy_share_ppm", "ready", "count"}
"""Optional fields on which no reader relies: a value that does not fit counts as missing."""


class Fields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one JSON object. Keys that it does not know are those of a newer version."""

    @classmethod
    def parse(cls, found: bytes | Body, what: str) -> Self:
        """The object that a line of JSON holds, or that was read from one.

        Raises:
            BadMessage: names ``what``, and the field that is missing or malformed.
        """
        return read(found, cls, what)  # type: ignore[no-any-return]

    def as_text(self) -> str:
        """As JSON, for the environment of a process."""
        return encoded(self).decode()

    def as_line(self) -> bytes:
        """As JSON, for a pipe or a local socket."""
        return encoded(self) + b"\n"

    def as_mapping(self) -> Body:
        """The inverse of ``parse``."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class Message(Fields, frozen=True, tag_field="kind"):
    """Fields with a kind, which is written first: the ``tag`` of their class."""

    @property
    def kind(self) -> str:
        """Tells it from others."""
        return kind_of(type(self))


class Report:
    """One of the messages in ``ipc.messages``, from an agent, or one of the connection's own events."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """As of any message."""
        raise NotImplementedError

    @property
    def generation(self) -> int | None:
        """Of the attempt that it is about; None where it is about none."""
        return None


class Sent(Message, Report, frozen=True):
    """A report that an agent sends."""


def kind_of(message: type[msgspec.Struct]) -> str:
    """What its ``kind`` is in JSON."""
    return str(message.__struct_config__.tag)


def written(default: Any) -> Any:
    """A default that is sent all the same, as earlier versions need the field; others are left out."""
    return msgspec.field(default_factory=lambda: default)


def read(found: bytes | Body, kind: Any, what: str) -> Any:
    """An object of this class, or of one of this union.

    Raises:
        BadMessage: names ``what``, and the field that is missing or malformed.
    """
    if isinstance(found, bytes):
        try:
            return msgspec.json.decode(found, type=kind)
        except (ValueError, RecursionError):  # what is no JSON for msgspec may be for json: NaN, half a surrogate pair
            found = _json(found)
    while True:
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            name = str(error).rpartition(".")[2].rstrip("`")
            if name not in _LENIENT or (less := _without(found, name)) == found:
                raise BadMessage(f"{what}: {re.sub(_REGEX, ' of printable characters', str(error))}") from None
            found = less
        except UnicodeEncodeError:
            raise BadMessage(f"{what}: a key, or a value, is not text") from None


def _without(found: Any, name: str) -> Any:
    """Without the key of that name, in lists of objects as well."""
    if isinstance(found, list):
        return [_without(each, name) for each in found]
    if isinstance(found, dict):
        return {key: _without(value, name) if key == "ranks" else value for key, value in found.items() if key != name}
    return found


# Types of fields that occur more than once

_REGEX = r" matching regex '.*'"
_PRINTABLE = (
    r"[^\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ud800-\uf8ff\ufeff"
    r"\ufff0-\uffff\U000e0000-\U0010ffff]"
)
"""Neither control characters nor those that are invisible or change how a line is shown."""

MAX_RUNS = 100_000
"""In one message; a line of the channel has room for less."""

Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
SlotValue = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What a slot of a shared page holds."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ExitCode = Annotated[int, msgspec.Meta(ge=-128, le=255)]
OpenPort = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortNumber = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Finite."""

Printable = Annotated[str, msgspec.Meta(pattern=rf"\A{_PRINTABLE}*\Z")]
Name = Annotated[Printable, msgspec.Meta(min_length=1, max_length=255)]

BeginsAsName = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{_PRINTABLE}{{255}}|{_PRINTABLE}{{1,254}}\Z)")]
Words = Annotated[str, msgspec.Meta(max_length=4000)]
Text200 = Annotated[str, msgspec.Meta(max_length=200)]
Text255 = Annotated[str, msgspec.Meta(max_length=255)]
Ranks = tuple[Rank, ...]
Request = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""The number of a request, or the one behind the last."""

Requests = Annotated[tuple[Request, ...], msgspec.Meta(max_length=MAX_RUNS)]
Runs = Annotated[tuple[tuple[Request, Request], ...], msgspec.Meta(max_length=MAX_RUNS)]
"""Pairs of the first, and the one behind the last."""

Hosts = Annotated[tuple[Text255, ...], msgspec.Meta(max_length=16)]
"""Names and addresses of one node, best first."""

Held = tuple[tuple[Name, Seconds], ...]
"""Sections: name, and for how many seconds each has been open."""


class HasRuns:
    """A message with ``runs``, none of which is empty."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """A ``ValueError`` makes the message a malformed one."""
        runs: Runs = self.runs  # type: ignore[attr-defined]
        if any(first >= last for first, last in runs):
            raise ValueError("`runs` holds an empty one")
