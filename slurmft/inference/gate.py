"""The gate of one replica, which lets the run's routers through to the engine and no one else; and one address for an
endpoint, on the machine of its clients.

Behind a gate's handshake the bytes of a connection pass unchanged, without a look into them: the engine may speak
any HTTP, and pays next to nothing for it. On a connection of its own each router says how many requests it has
there, and hears at once when the replica drains or its engine has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurmft.errors import StorageError
from slurmft.inference.endpoint import HighAvailabilityCluster, RouterAddress
from slurmft.ipc.channel import BadMessage, Count, Fields, Seconds, listening_socket, written
from slurmft.policy.serving import Served
from slurmft.policy.values import Strangers
from slurmft.system.background import heard_awake, overslept_s
from slurmft.system.files import NONCE_BYTES, TAG_BYTES, derived_key, new_nonce

# --- handshake ---
# How a router and a replica's gate prove to each other that they hold the run's key, before a byte of a request flows.
#
#     gate    nonce (32 bytes)
#     router  nonce (32 bytes), what for (1 byte), tag over both nonces
#     gate    tag over both nonces
#
# Without it, any user of the cluster could use an engine, or pose as one on a port that has become free.

REQUESTS, CONTROL = b"r", b"c"
"""What a connection is for: one engine connection, or words between router and gate."""

ANSWER_BYTES = NONCE_BYTES + 1 + TAG_BYTES


class NotTheGate(OSError):
    """The other side does not hold the run's key."""


def tag_of_router(key: bytes, gate: bytes, router: bytes, what: bytes) -> bytes:
    """The router's proof."""
    return derived_key(key, "router to gate", gate, router, what)


def tag_of_gate(key: bytes, gate: bytes, router: bytes) -> bytes:
    """The gate's proof."""
    return derived_key(key, "gate to router", gate, router)


def answered_well(key: bytes, nonce: bytes, answer: bytes) -> tuple[bytes, bytes] | None:
    """What a connection is for, and the gate's proof, where a router's answer is right."""
    router, what, tag = answer[:NONCE_BYTES], answer[NONCE_BYTES : NONCE_BYTES + 1], answer[NONCE_BYTES + 1 :]
    is_right = hmac.compare_digest(tag, tag_of_router(key, nonce, router, what))
    return (what, tag_of_gate(key, nonce, router)) if is_right and what in (REQUESTS, CONTROL) else None


async def knock(host: str, port: int, key: bytes, what: bytes) -> socket.socket:
    """A connection to a gate, on which both sides have proved themselves. The caller limits the time.

    Raises:
        OSError: no connection, or ``NotTheGate``.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    errors: list[OSError] = []
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_lost_peers(connection)
            await loop.sock_connect(connection, address)
            gate, mine = await _exactly(connection, NONCE_BYTES), new_nonce()
            await loop.sock_sendall(connection, mine + what + tag_of_router(key, gate, mine, what))
            if not hmac.compare_digest(await _exactly(connection, TAG_BYTES), tag_of_gate(key, gate, mine)):
                raise NotTheGate(f"what listens at {host}:{port} is not this run's replica")
        except OSError as error:
            connection.close()
            errors.append(error)
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise errors[-1] if errors else OSError(f"{host} has no address")


async def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        if not (part := await asyncio.get_running_loop().sock_recv(connection, count - len(content))):
            raise NotTheGate("the connection has ended before the other side proved itself")
        content += part
    return content


def notice_lost_peers(connection: socket.socket, within_s: int = 10) -> None:
    """Have the kernel end a connection whose other side is silent for about so long, such as that of a dead node."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, within_s * 2 // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, within_s // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # the others do nothing while data is under way
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * within_s)


# --- The gate of one replica: it lets the run's routers through to the engine, and no one else ---

HANDSHAKE_S = 5.0
BEAT_S = 0.5
SILENT_S = 8 * BEAT_S
"""A router that was not heard for so long has nothing in flight here any more: its node may be dead."""

SOON_S = 0.05
"""After which routers hear that another one has begun or ended requests here."""

EMPTY_LOOK_S = 0.01
MAX_LINE_BYTES = 4096
MAX_STRANGERS = 256
"""Connections that have not proved themselves yet, in all and of one address. One more ends the oldest: routers prove
themselves within milliseconds, and no other client can hold descriptors, or keep them out."""

STRANGERS_PER_ADDRESS = 128
"""A router opens as many connections at once as requests come to it in a burst."""

LOOKS = (b"GET ", b"HEAD ", b"OPTIONS ")
"""Requests that cost an engine nothing: one that hangs may answer them."""

Connect = Callable[[Callable[[], asyncio.Protocol]], Any]
"""Opens a connection to the engine, for a protocol."""

log = logging.getLogger(__name__)


class ReplicaTold(Fields, frozen=True, kw_only=True):
    """What a gate tells its routers."""

    phase: str
    """``ready``, ``draining`` or ``ended``."""

    in_flight: Count
    """Requests of all routers."""

    crashed: bool = written(False)
    suspected: bool = written(False)
    turn: Count = written(0)
    """Of the router that is told, when it has the engine for that request alone; 0: it has not."""

    kept: Count = written(0)
    """The round in which routers begin nothing, since one waits for its turn; 0: they may."""

    weights: tuple[Count, Count] | None = None
    """Branch and version of the published weights that it has taken."""


class RouterTold(Fields, frozen=True, kw_only=True):
    """What a router tells a gate: numbers of requests since their connection."""

    begun: Count
    done: Count
    working: Count = written(0)
    """Of those that it has here, those that an engine has to work on, and ..."""

    patience: Seconds = written(1.0)
    """... the most that one of them needs."""

    proof: tuple[str, str, bool] | None = None
    """Path and model of a request that shows how small ones look, and whether it was answered."""

    outcomes: tuple[Count, Count] = written((0, 0))
    """How many the engine has answered, and how many it has failed."""

    turn: Count = written(0)
    """It wants the engine for one request alone, a new number for each; 0: it does not."""

    yields: Count = written(0)
    """The newest round that it has heard of: it begins nothing in it."""


class Gate:
    """Listens for routers.

    Args:
        connect: opens a connection to the engine.
    """

    def __init__(self, key: bytes, connect: Connect) -> None:
        self.key, self.connect = key, connect
        self.phase, self._crashed = "ready", False
        self.strangers: Strangers[_Visitor] = Strangers(MAX_STRANGERS, STRANGERS_PER_ADDRESS)

        self.moved = False
        """Bytes of an answer, other than to GET, came from the engine since the last look."""

        self.is_suspected = False
        """The engine makes no progress: routers avoid it, and where it ends so, what it had was the reason perhaps."""

        self._routers: set[_Control] = set()
        self._line: list[_Control] = []
        """Routers that want the engine for one request alone; it is kept for them, and the first one has it."""

        self._round = 0
        """How often it was kept, after it was free."""

        self._own = _Control(self)
        """Stands in the line for the driver, which wants the engine with nothing on it."""

        self.through: set[_Through] = set()
        """Connections of routers to the engine."""

        self.weights: Served | None = None
        """Published ones that the engine has taken."""

        self._gone = 0
        self._server: asyncio.Server | None = None
        self._beats: asyncio.Task[None] | None = None
        self._soon: asyncio.TimerHandle | None = None

    async def listen(self, host: str | None) -> int:
        """Begin; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Visitor(self), sock=listening_socket(host))
        self._beats = asyncio.create_task(self._beat())
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()
        if self._beats is not None:
            self._beats.cancel()
        if self._soon is not None:
            self._soon.cancel()

    def say(self, phase: str, *, crashed: bool = False) -> None:
        """Tell all routers: ``draining`` (nothing new, please) or ``ended`` (the engine is gone, by its own fault)."""
        self.phase, self._crashed = phase, crashed
        self._tell_all()

    def suspect(self, *, is_suspected: bool) -> None:
        """Tell all routers that the engine makes no progress, or does so again."""
        if self.is_suspected != is_suspected:
            self.is_suspected = is_suspected
            self._tell_all()

    @property
    def in_flight(self) -> int:
        """Requests that the routers have here."""
        return sum(each.told.begun - each.told.done for each in self._routers)

    @property
    def working(self) -> int:
        """Those of them that an engine has to work on."""
        return sum(each.told.working for each in self._routers)

    @property
    def patience(self) -> float:
        """The most that one of them needs."""
        return max((each.told.patience for each in self._routers), default=1.0)

    def proof(self, *, is_answered: bool) -> dict[str, Any] | None:
        """A request that shows how small ones look: path and model. ``is_answered``: one with an answer."""
        found = (each.told.proof for each in self._routers if each.told.proof is not None)
        best = max(found, key=lambda each: each[2], default=None)
        if best is None or is_answered > best[2]:
            return None
        return {"id": "proof", "url": best[0], "body": {"model": best[1]}}

    @property
    def outcomes(self) -> tuple[int, int]:
        """Requests that the engine has answered, and that it has failed, as those routers say that are there."""
        told = [each.told.outcomes for each in self._routers]
        return sum(good for good, _ in told), sum(bad for _, bad in told)

    @property
    def ended(self) -> int:
        """Requests that have ended. Those of a router that is gone have."""
        return self._gone + sum(each.told.done for each in self._routers)

    def joined(self, router: _Control) -> None:
        """A router has proved itself."""
        self._routers.add(router)
        router.tell(self._words(router))

    def left(self, router: _Control) -> None:
        """Its connection has ended."""
        self._routers.discard(router)
        self._gone += router.told.begun
        self.line_up(router, 0)

    def line_up(self, router: _Control, turn: int) -> None:
        """A router wants the engine for one request alone (each has a ``turn`` of its own); 0: no more."""
        router.turn, self._round = turn, self._round + (not self._line)
        self._line = [each for each in self._line if each is not router] + [router] * (turn > 0)
        self._tell_all()

    def keep(self) -> None:
        """Have routers begin nothing, until ``resume``."""
        if not self._own.turn:
            self.line_up(self._own, 1)

    async def emptied(self) -> None:
        """``keep``, and return when the engine has nothing to do."""
        self.keep()
        while self.in_flight or not self._is_next(self._own):
            await asyncio.sleep(EMPTY_LOOK_S)
        for each in list(self.through):
            each.end()  # of a router that was silent, which would take what comes now for an answer of before

    def resume(self) -> None:
        """Routers may begin requests again, which ``weights`` answer."""
        if self._own.turn:
            self.line_up(self._own, 0)

    def changed(self) -> None:
        """A router has begun or ended requests."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SOON_S, self._tell_soon)

    def _tell_soon(self) -> None:
        self._soon = None
        self._tell_all()

    async def _beat(self) -> None:
        while True:
            asleep_s = await overslept_s(BEAT_S)
            for router in list(self._routers):
                router.heard_s = heard_awake(router.heard_s, asleep_s)
                if time.monotonic() - router.heard_s > SILENT_S:
                    log.warning("a router was silent for %.1f s; what it had in flight is over", SILENT_S)
                    router.end()
            self._tell_all()

    def _tell_all(self) -> None:
        for router in self._routers:
            router.tell(self._words(router))

    def _is_next(self, router: _Control) -> bool:
        """Whose turn it is begins when all others have said that they begin nothing more."""
        others = self._routers - {router}
        return self._line[:1] == [router] and all(each.told.yields == self._round for each in others)

    def _words(self, router: _Control) -> bytes:
        weights = self.weights
        told = ReplicaTold(phase=self.phase, in_flight=self.in_flight, crashed=self._crashed,
                           suspected=self.is_suspected, turn=router.turn * self._is_next(router),
                           kept=self._round * bool(self._line),
                           weights=None if weights is None else (weights.branch, weights.version))  # fmt: skip
        return told.as_line()


class _Visitor(asyncio.Protocol):
    """A connection that has just come."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._nonce, self._answer = gate, new_nonce(), b""
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            notice_lost_peers(connection)
        self._transport = transport
        for oldest in self._gate.strangers.admit(self, self._peer()):
            oldest.end()
        self._limit = asyncio.get_running_loop().call_later(HANDSHAKE_S, transport.abort)
        transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None and self._limit is not None
        self._answer += data
        if len(self._answer) < ANSWER_BYTES:
            return
        self._limit.cancel()
        self._gate.strangers.forget(self)
        found = answered_well(self._gate.key, self._nonce, self._answer[:ANSWER_BYTES])
        if found is None:
            log.warning("refused a connection from %s: it does not hold the run's key", self._peer())
            self._transport.abort()
            return
        what, proof = found
        self._transport.write(proof)
        rest = self._answer[ANSWER_BYTES:]
        heir: _Control | _Through = _Control(self._gate) if what == CONTROL else _Through(self._gate)
        self._transport.set_protocol(heir)
        heir.connection_made(self._transport)
        if rest:
            heir.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._gate.strangers.forget(self)

    def end(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _peer(self) -> str:
        return str(((self._transport and self._transport.get_extra_info("peername")) or ("?",))[0])


class _Control(asyncio.Protocol):
    """A router's own connection."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._rest = gate, b""
        self.told = RouterTold(begun=0, done=0)
        self.turn = 0
        self.heard_s = time.monotonic()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._gate.joined(self)

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        is_news = False
        try:
            for line in lines:
                told, before = RouterTold.parse(line, "what a router says"), self.told
                begun = max(before.begun, told.begun)
                done = min(max(before.done, told.done), begun)
                self.told = replace(told, begun=begun, done=done, proof=told.proof or before.proof)
                now = told.begun, told.done, told.yields
                is_news = is_news or now != (before.begun, before.done, before.yields)
                if told.turn != self.turn:
                    self._gate.line_up(self, told.turn)
            if is_news:
                self._gate.changed()
        except BadMessage:
            self.end()
        if len(self._rest) > MAX_LINE_BYTES:
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.left(self)

    def tell(self, line: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._transport.get_write_buffer_size() > 1 << 16:  # it has not listened for long
                self._transport.abort()
            else:
                self._transport.write(line)

    def end(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


class _Side(asyncio.Protocol):
    """One end of a connection that passes through."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.close()  # after what was written has gone out


class _Through(_Side):
    """The router's end; what comes before the engine's end is there waits."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate, self._early = gate, b""
        self._opening: asyncio.Task[None] | None = None
        self.is_answered, self.is_work = True, False
        """Nothing has come since the engine's last byte; what came last is more than a look at the engine."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._gate.through.add(self)
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        assert self.transport is not None
        try:
            await self._gate.connect(lambda: _ToEngine(self._gate, self))
        except OSError as error:
            log.debug("the engine takes no connection: %s", error)
            self.transport.abort()
            return
        assert self.other is not None and self.other.transport is not None
        if self._early:
            self.other.transport.write(self._early)
        self._early = b""
        if self.transport.is_closing():
            self.other.transport.abort()
        else:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.is_answered:  # the head of a request: there is one at a time on a connection
            self.is_answered, self.is_work = False, not data.startswith(LOOKS)
        if self.other is not None and self.other.transport is not None and not self._early:
            self.other.transport.write(data)
            return
        assert self.transport is not None
        self._early += data
        self.transport.pause_reading()

    def end(self) -> None:
        """Hang up."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.through.discard(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()  # the client is gone: an engine that goes on would work in vain


class _ToEngine(_Side):
    def __init__(self, gate: Gate, router: _Through) -> None:
        super().__init__()
        self._gate, self._router, self.other = gate, router, router

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) and self.other is not None
        self.transport = transport
        self.other.other = self

    def data_received(self, data: bytes) -> None:
        self._gate.moved = self._gate.moved or self._router.is_work
        self._router.is_answered = True
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)


# --- One address for an endpoint, on the machine of its clients: each connection goes on to a router that lives ---
# Bytes pass unread, TLS included. A node that is powered off says nothing on its connections: the kernel asks it, and
# ends them after about 4 s. While no router is reached, as between two jobs, connections wait.

CONNECT_S, AGAIN_S = 1.0, 0.2
AVOIDED_S = 5.0
"""How long a router that was not reached is tried after the others."""

WAIT_S = 300.0
"""How long a connection waits for a router."""

LOST_S = 4
MOST = 1024
"""Connections at a time; one more waits until another one has ended."""


class Forwarder:
    """Passes connections at a port of the loopback address on to the routers of the run."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._turn = run_folder, 0
        self._avoided: dict[tuple[str, int], float] = {}
        self._room = asyncio.Semaphore(MOST)

    async def serve(self, port: int, on_ready: Callable[[int], None]) -> None:
        """Listen until cancelled; ``on_ready`` is given the port.

        Raises:
            OSError: the port is taken.
        """
        server = await asyncio.start_server(self._take, sock=listening_socket("127.0.0.1", port))
        async with server:
            on_ready(int(server.sockets[0].getsockname()[1]))
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            async with self._room:
                found = await self._connect(reader)
                ends.append(found[1])
                ways = [asyncio.ensure_future(_pass(*way)) for way in ((reader, found[1]), (found[0], writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:  # no router; TimeoutError as well
            pass
        finally:
            for end in ends:
                end.close()

    async def _connect(self, client: asyncio.StreamReader) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(WAIT_S):
            while not client.at_eof():
                for host, port in self._routers():
                    with contextlib.suppress(OSError):
                        async with asyncio.timeout(CONNECT_S):
                            reader, writer = await asyncio.open_connection(host, port)
                        notice_lost_peers(writer.get_extra_info("socket"), LOST_S)
                        return reader, writer
                    self._avoided[host, port] = time.monotonic() + AVOIDED_S
                await asyncio.sleep(AGAIN_S)
        raise ConnectionResetError("the client is gone")

    def _routers(self) -> list[tuple[str, int]]:
        """By turns; those that were not reached lately come last."""
        routers: tuple[RouterAddress, ...] = ()
        with contextlib.suppress(StorageError, OSError):
            routers = HighAvailabilityCluster.read(self._run_folder).routers
        self._turn += 1
        now_s, found = time.monotonic(), [routers[(self._turn + place) % len(routers)] for place in range(len(routers))]
        places = [(host, each.port) for each in found for host in each.hosts]
        return sorted(places, key=lambda place: self._avoided.get(place, 0.0) > now_s)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
