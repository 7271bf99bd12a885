"""The driver of one replica of an endpoint: starts its engine, and lets the routers of the run, and nobody else, to it.

    python -m slurmft.inference.gate      (forked by the agent's zygote)

Behind a gate's handshake the bytes of a connection pass unchanged, without a look into them: the engine may speak
any HTTP, and pays next to nothing for it. On a connection of its own each router says how many requests it has
there, and hears at once when the replica drains or its engine has ended.

It speaks with its agent as the driver of a batch does (``inference.driver``), and tells it how many requests the engine
works on, and whether bytes of answers or tokens came: by that the agent judges a hang. When the engine ends, or fails
whatever it is asked, the driver ends with its code; when the agent is gone, so is the driver.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError
from slurmft.inference import driver
from slurmft.inference.endpoint import OWN_CONFIG, WEIGHTS_LOOK_S, is_local, key_of, read_published
from slurmft.ipc.channel import BadMessage, Count, Fields, Seconds, keep_alive, listening_socket, written
from slurmft.policy.inference import has_crashed
from slurmft.policy.serving import FAILURES_TO_AVOID, Served
from slurmft.policy.values import Strangers
from slurmft.system.background import heard_awake, overslept_s
from slurmft.system.files import NONCE_BYTES, TAG_BYTES, derived_key, new_nonce
from slurmft.system.processes import allow_descriptors

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
PEER_LOST_S = 10.0
"""After which the kernel ends a connection whose other side is silent, such as that of a dead node."""


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
            keep_alive(connection, PEER_LOST_S)
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


class _End(asyncio.Protocol):
    """One end of a connection."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def end(self) -> None:
        """Hang up."""
        if self.transport is not None:
            self.transport.abort()


class _Visitor(_End):
    """A connection that has just come."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._nonce, self._answer = gate, new_nonce(), b""
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        if (connection := transport.get_extra_info("socket")) is not None:
            keep_alive(connection, PEER_LOST_S)
        for oldest in self._gate.strangers.admit(self, self._peer()):
            oldest.end()
        self._limit = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.transport.abort)
        self.transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None and self._limit is not None
        self._answer += data
        if len(self._answer) < ANSWER_BYTES:
            return
        self._limit.cancel()
        self._gate.strangers.forget(self)
        found = answered_well(self._gate.key, self._nonce, self._answer[:ANSWER_BYTES])
        if found is None:
            log.warning("refused a connection from %s: it does not hold the run's key", self._peer())
            self.end()
            return
        what, proof = found
        self.transport.write(proof)
        rest = self._answer[ANSWER_BYTES:]
        heir: _Control | _Through = _Control(self._gate) if what == CONTROL else _Through(self._gate)
        self.transport.set_protocol(heir)
        heir.connection_made(self.transport)
        if rest:
            heir.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._gate.strangers.forget(self)

    def _peer(self) -> str:
        return str(((self.transport and self.transport.get_extra_info("peername")) or ("?",))[0])


class _Control(_End):
    """A router's own connection."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._rest = gate, b""
        self.told = RouterTold(begun=0, done=0)
        self.turn = 0
        self.heard_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
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
        if self.transport is not None and not self.transport.is_closing():
            if self.transport.get_write_buffer_size() > 1 << 16:  # it has not listened for long
                self.end()
            else:
                self.transport.write(line)


class _Side(_End):
    """One end of a connection that passes through."""

    other: asyncio.Transport | None = None
    """Of the other end, where that is there."""

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume_reading()


class _Through(_Side):
    """The router's end; what comes before the engine's end is there waits."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._early = gate, b""
        self._opening: asyncio.Task[None] | None = None
        self.is_answered, self.is_work = True, False
        """Nothing has come since the engine's last byte; what came last is more than a look at the engine."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
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
        assert self.other is not None
        if self._early:
            self.other.write(self._early)
        self._early = b""
        if self.transport.is_closing():
            self.other.abort()
        else:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.is_answered:  # the head of a request: there is one at a time on a connection
            self.is_answered, self.is_work = False, not data.startswith(LOOKS)
        if self.other is not None and not self._early:
            self.other.write(data)
            return
        assert self.transport is not None
        self._early += data
        self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.through.discard(self)
        if self.other is not None:
            self.other.abort()  # the client is gone: an engine that goes on would work in vain


class _ToEngine(_Side):
    """The engine's end."""

    def __init__(self, gate: Gate, router: _Through) -> None:
        self._gate, self._router, self.other = gate, router, router.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._router.other = self.transport

    def data_received(self, data: bytes) -> None:
        self._gate.moved = self._gate.moved or self._router.is_work
        self._router.is_answered = True
        if self.other is not None:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.close()  # after what was written has gone out


# --- The driver: starts the engine, and tells the agent what it works on ---

TELL_S = 0.05
DRAINED_LOOK_S = 0.02
SICK_LOOK_S = 0.25
QUEUED_S, QUEUED_LOOK_S = 10.0, 0.005
"""How long a connection waits for an engine that does not keep up with taking them."""

SHUT_S = 3.0
DESCRIPTORS = 65_536
"""What a gate wants, where the hard limit allows it: two for each request, of all routers."""

LAST_WORDS_S = 0.1
"""Between the last word to the routers and the end, so that they hear it before the connection ends."""


class ServingDriver:
    """One replica, from its engine's start to its end."""

    def __init__(self, settings: driver.ReplicaSettings, config: InferenceConfig, run_folder: Path) -> None:
        self._settings, self._config = settings, config
        self._run_folder = run_folder
        self._engine = driver.HttpEngine(
            config, settings.replica, head=driver.head_of(settings, config, run_folder, self._send)
        )
        self._gate = Gate(key_of(run_folder), self._connect)
        self._host = "127.0.0.1" if is_local(os.environ) else None
        self._writer: asyncio.StreamWriter | None = None
        self._refuses_since_s = 0.0
        self._shut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._proving: asyncio.Task[None] | None = None
        self._working = self._proved = 0
        """Requests that the agent knows of, and the smallest ones that were asked."""

    async def run(self) -> int:
        """Work until the agent says so or the engine ends; returns the exit code.

        Raises:
            SlurmftError: the engine cannot be started.
        """
        reader, self._writer = await asyncio.open_unix_connection(self._settings.socket, limit=driver.MAX_LINE_BYTES)
        self._send(kind="hello", replica=self._settings.replica, life=self._settings.life)
        hearing = asyncio.create_task(self._hear(reader))
        try:
            await self._engine.start()
            if Path(self._settings.config).name != OWN_CONFIG:
                await self._engine.canary()  # of an update: the old engine is not given up for one that refuses all
            allow_descriptors(DESCRIPTORS)  # not the engine's, which has been started
            if self._config.serving and self._config.serving.weights.update_path:
                self._gate.keep()  # until it has what is published
            port = await self._gate.listen(self._host)
            self._send(kind="ready", slots=self._config.concurrency, port=port)
            return await self._work(hearing)
        finally:
            self._gate.close()
            await self._engine.close()

    async def _work(self, hearing: asyncio.Task[None]) -> int:
        ended = asyncio.create_task(self._engine.ended())
        sick = asyncio.create_task(self._watch_failures())
        outdated = asyncio.create_task(self._keep_weights())
        progress = driver.watch_progress(self._engine, self._config.hang_timeout_s, self._load, self._send)
        tasks = [asyncio.create_task(work) for work in (self._tell_load(), progress)]
        waits: list[asyncio.Future[Any]] = [hearing, ended, sick, outdated, self._shut, *tasks]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, sick, outdated):
            if task.done() and (error := task.exception()) is not None:
                raise error
        ended_before = self._gate.ended
        self._gate.say("ended", crashed=ended.done() and has_crashed(ended.result()))
        if sick.done():
            await asyncio.sleep(LAST_WORDS_S)
            sys.stderr.write(f"slurmft: the engine fails every request: {sick.result()}\n")
            return driver.EXIT_SICK
        if ended.done():
            await asyncio.sleep(LAST_WORDS_S)
            # what has come in the last moment counts, and what its end has ended does not
            self._tell(self._gate.in_flight + self._gate.ended - ended_before, 0)
            sys.stderr.write(f"slurmft: the engine has ended with {ended.result()}\n")
            return driver.exit_code_of(ended.result())
        if outdated.done():
            sys.stderr.write(f"slurmft: the engine does not take the published weights: {outdated.result()}\n")
            return driver.EXIT_SICK
        if self._shut.done():
            sys.stderr.write(f"slurmft: the engine lives, and has taken no connection for {SHUT_S:.0f} s\n")
            return driver.EXIT_SICK
        return 0

    async def _connect(self, protocol: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(self._engine.place, str):
                await loop.create_unix_connection(protocol, sock=await unix_connection(self._engine.place))
            else:
                await loop.create_connection(protocol, "127.0.0.1", self._engine.place)
        except (ConnectionRefusedError, FileNotFoundError):  # one that waits for its own processes at its end
            self._refuses_since_s = self._refuses_since_s or time.monotonic()
            if time.monotonic() - self._refuses_since_s > SHUT_S and not self._shut.done():
                self._shut.set_result(None)
            raise
        self._refuses_since_s = 0.0

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Return when there is nothing more to do: the agent is gone, or all that was in flight is finished."""
        while line := await reader.readline():
            kind = json.loads(line)["kind"]
            if kind == "prove":
                self._gate.suspect(is_suspected=True)
                self._proving = asyncio.create_task(self._prove())
            elif kind == "drain":
                self._gate.say("draining")
                while self._gate.in_flight:
                    await asyncio.sleep(DRAINED_LOOK_S)
                return

    async def _tell_load(self) -> None:
        ended = 0
        while True:
            await asyncio.sleep(TELL_S)
            moved, self._gate.moved = self._gate.moved, False
            if moved:
                self._send(kind="progress")
            new, ended = self._gate.ended - ended, self._gate.ended
            self._tell(self._gate.working, new)

    def _tell(self, working: int, completed: int) -> None:
        more, self._working = working - self._working, working
        if more or completed:
            self._send(kind="load", more=more, completed=completed)

    def _load(self) -> driver.InHand:
        return driver.InHand(self._working, self._gate.ended + self._proved, self._gate.patience)

    async def _prove(self) -> None:
        if await driver.works(self._engine, self._gate.proof(is_answered=False)):
            self._send(kind="progress")
        self._proved += 1

    async def _watch_failures(self) -> str:
        """Return, with the reason, when the engine lives and fails whatever it is asked."""
        good = bad = row = 0
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(SICK_LOOK_S)
            (good_before, bad_before), (good, bad) = (good, bad), self._gate.outcomes
            row += max(0, bad - bad_before)
            if good > good_before or not row:
                row, since_s = 0, time.monotonic()
            if row < FAILURES_TO_AVOID:
                continue
            proof = self._gate.proof(is_answered=True)
            if await driver.works(self._engine, proof):
                row, self._proved = 0, self._proved + 1
            # without a small request to ask it, what fails may all be of one client's making
            elif proof is not None or time.monotonic() - since_s > self._config.hang_timeout_s:
                return f"{row} in a row{', and the smallest one' if proof else ''}"

    async def _keep_weights(self) -> str:
        """Give the engine the newest published weights, again and again; returns why where it hangs over them.

        Routers begin nothing on it from the first look at a publication until the engine has it: after an update that
        failed what it has is unknown.
        """
        assert self._config.serving is not None
        settings, failed, told = self._config.serving.weights, 0, ""
        if settings.update_path is None:
            return await asyncio.Future[str]()
        while True:
            try:
                newest = await asyncio.to_thread(read_published, self._run_folder)
                if newest is not None and newest.served != self._gate.weights:
                    await self._gate.emptied()
                    await self._engine.take_weights(settings, newest.path, newest.version)
                    log.info("the engine has version %d of the weights, from %s", newest.version, newest.path)
                    self._gate.weights = newest.served
                self._gate.resume()
            except TimeoutError:
                return f"no answer to {settings.update_path} within {settings.update_timeout_s:g} s"
            except (driver.Again, StorageError) as error:
                if str(error) != told:
                    log.warning("the engine does not have the published weights, trying again: %s", error)
                told, failed = str(error), failed + 1
                await asyncio.sleep(min(self._config.max_delay_s, self._config.base_delay_s * 2.0 ** min(failed, 30)))
            else:
                failed, told = 0, ""
                await asyncio.sleep(WEIGHTS_LOOK_S)

    def _send(self, **message: Any) -> None:
        if message["kind"] == "progress":
            self._gate.suspect(is_suspected=False)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


async def unix_connection(path: str) -> socket.socket:
    """A connection to a Unix socket, also while more clients come than it takes at once.

    The kernel refuses one that finds the queue full with EAGAIN, which asyncio takes for "will be connected soon".

    Raises:
        OSError: nothing listens there, or the queue stays full.
    """
    until_s = time.monotonic() + QUEUED_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(path)
        except BlockingIOError:
            connection.close()
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(QUEUED_LOOK_S)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


if __name__ == "__main__":
    os._exit(driver.drive(ServingDriver))
