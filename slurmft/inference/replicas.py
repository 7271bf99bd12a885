"""The replicas as a router sees them: it knows at once which are gone, from their own words and broken connections."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

import aiohttp
from aiohttp.client_proto import ResponseHandler

from slurmft.inference.gate import BEAT_S, CONTROL, REQUESTS, NotTheGate, ReplicaTold, RouterTold, knock
from slurmft.ipc.channel import BadMessage
from slurmft.ipc.messages import Members
from slurmft.policy.inference import Death, likeliest
from slurmft.policy.serving import Breaker, Load, Served, choose_replica, place_alone, within_lag
from slurmft.system.background import heard_awake, overslept_s

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientTimeout
    from aiohttp.tracing import Trace

KNOCK_S = 3.0
SILENT_S = 4 * BEAT_S
"""A replica that was not heard for so long gets nothing new: its node may be cut off."""

LOST_S = 8 * BEAT_S
"""After so long what it has is done elsewhere."""

KEPT_S = 4.0
"""How long an engine's connection is kept for the next request: servers close theirs after 5 s (uvicorn) and more."""

LONGEST = 1 << 15
"""Bytes of a header of an engine's answer; aiohttp's own limit is a quarter of what clients may send here."""

AGAIN_S = 0.2
TELL_S = 0.02
LOOK_S = 0.25
EMPTY_LOOK_S = 0.01

TURNS = itertools.count(1)

log = logging.getLogger(__name__)


class Leaving(Protocol):
    """Something that a replica works on."""

    deaths: list[Death]
    """Replicas that crashed while they worked on it."""

    sent_s: float
    """When the last one got it."""

    is_work: bool
    """It is more than a look at the engine."""

    patience: float
    """As ``patience_for``."""

    proof: tuple[str, str] | None
    """Path and model, where they make a smallest request."""

    def lost(self) -> None:
        """The replica is gone."""


class _FromEngine(ResponseHandler):
    """A connection to an engine; one on which more has come than its last answer is not used again: that would be taken
    for the answer to the next request, which is another client's."""

    def is_connected(self) -> bool:
        return super().is_connected() and not self.should_close


class _ToGate(aiohttp.BaseConnector):
    """Connections to an engine, by way of its replica's gate."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(limit=0, keepalive_timeout=KEPT_S)
        self._replica = replica

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        connection = await self._replica.knock(REQUESTS)
        try:
            _, protocol = await self._loop.create_connection(lambda: _FromEngine(self._loop), sock=connection)
        except BaseException:
            connection.close()
            raise
        return protocol


class Replica:
    """One life of one replica.

    Args:
        on_change: called when it comes or goes.
        on_room: called when it may take more.
    """

    def __init__(
        self, name: str, hosts: Collection[str], port: int, key: bytes, *, on_change: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name, self._hosts, self._port, self._key = name, list(hosts), port, key
        self._on_change, self._on_room = on_change, on_room
        self.errands: set[Leaving] = set()
        """What is to be told at once when it is lost."""

        self.phase = ""
        """As it says itself; empty before its first word."""

        self.has_crashed = False
        """Its engine has ended by its own fault, or was ended as it made no progress."""

        self.is_suspected, self._suspected_s = False, math.inf
        """Its engine makes no progress, and since when this router knows."""

        self.proof: tuple[str, str, bool] | None = None
        """Path and model of a request that it was asked, and whether it has answered that."""

        self._good = self._bad = 0
        """Requests that it has answered, and that it has failed, since the connection to its gate."""

        self.begun = self.done = 0
        """Requests of this router."""

        self._others = 0
        self._answered_s = 0.0
        self._turn = self._has_turn = self._round = 0
        """That in which a suspect of this router wants to be alone on it, the one that its gate says it is, and that in
        which it is kept for suspects."""

        self.is_taken = False
        """A suspect of this router is alone on it, or waits for that."""

        self.weights: Served | None = None
        """Published ones that answer what is begun on it now; they stay the same while it has something to do."""

        self._heard_s = 0.0
        self.breaker = Breaker()
        self.gone = asyncio.Event()
        """It has ended, or is lost; replaced when it is heard again after all."""

        self._base = 0
        self.session = aiohttp.ClientSession(
            connector=_ToGate(self), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None), trust_env=False, max_line_size=LONGEST, max_field_size=LONGEST,
        )  # fmt: skip
        self._writer: asyncio.StreamWriter | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._life = asyncio.ensure_future(self._live())

    @property
    def in_flight(self) -> int:
        """Requests that it has, of all routers as far as is known."""
        return self.begun - self.done + self._others

    def load(self, now_s: float, newest: Served | None = None, max_lag: int | None = None) -> Load | None:
        """For the choice, while these are the newest weights; None where it is not in the rotation."""
        if self.phase != "ready" or self.gone.is_set() or now_s - self._heard_s > SILENT_S:
            return None
        is_avoided, is_kept = self.is_suspected or self.breaker.is_open(now_s), bool(self._turn or self._round)
        return Load(self.name, self.in_flight, avoided=is_avoided, kept=is_kept, taken=self.is_taken,
                    proven=self._good > 0, stale=not within_lag(self.weights, newest, max_lag))  # fmt: skip

    def takes(self, errand: Leaving) -> None:
        """It works on this from now on."""
        self.errands.add(errand)
        errand.sent_s = time.monotonic()
        if self.proof is None and errand.proof is not None:
            self.proof = (*errand.proof, False)

    def leaves(self, errand: Leaving) -> None:
        """It does not work on this any more."""
        self.errands.discard(errand)

    def did(self, *, well: bool) -> None:
        """It has answered a request that is more than a look, or had no answer of its own."""
        now_s = time.monotonic()
        self.breaker = self.breaker.succeeded() if well else self.breaker.failed(now_s)
        self._answered_s = now_s if well else self._answered_s
        self._good, self._bad = self._good + well, self._bad + (not well)
        self._tell_soon()

    def begin(self) -> None:
        """It gets a request."""
        self.begun += 1
        self._tell_soon()

    def end(self) -> None:
        """One has ended, however."""
        self.done += 1
        self._tell_soon()
        self._on_room()

    def keep(self, *, is_wanted: bool) -> None:
        """Have it for one request alone, behind those of other routers; or no longer."""
        if is_wanted or self._turn:
            self._turn = next(TURNS) if is_wanted else 0
            self._tell()

    def keep_empty(self) -> None:
        """Have it for one request alone, from now on."""
        if not self._turn:
            self.keep(is_wanted=True)

    async def emptied(self) -> bool:
        """Wait until it has nothing else to do, and begin a suspect on it; whether it came to that."""
        self.is_taken = True
        self.keep_empty()
        while not (self.gone.is_set() or self.is_suspected):
            if self._has_turn == self._turn and not self.in_flight:
                self.begin()
                return True
            await asyncio.sleep(EMPTY_LOOK_S)
        self.is_taken = False
        self.keep(is_wanted=False)
        return False

    async def knock(self, what: bytes) -> socket.socket:
        """A connection to its gate.

        Raises:
            OSError: there is none to be had.
        """
        error: OSError = OSError("no address")
        for host in list(self._hosts):
            try:
                async with asyncio.timeout(KNOCK_S):
                    connection = await knock(host, self._port, self._key, what)
            except OSError as refusal:  # TimeoutError as well
                error = refusal
                continue
            if self._hosts[0] != host:
                self._hosts.remove(host)
                self._hosts.insert(0, host)
            return connection
        raise error

    async def close(self) -> None:
        """Let go of it."""
        self._life.cancel()
        if self._telling is not None:
            self._telling.cancel()
        self._lose()
        await asyncio.gather(self._life, return_exceptions=True)
        await self.session.close()

    def look(self, now_s: float) -> None:
        """Whether it was heard lately."""
        if self._heard_s and now_s - self._heard_s > LOST_S:
            self._lose()

    def slept(self, seconds: float) -> None:
        """This process was stopped for so long, and could not hear."""
        self._heard_s = heard_awake(self._heard_s, seconds) if self._heard_s else 0.0

    async def _live(self) -> None:
        """Connect, and listen until the end; a gate that is not reached is tried until it is not named any more."""
        while True:
            beats = None
            try:
                connection = await self.knock(CONTROL)
                reader, self._writer = await asyncio.open_connection(sock=connection)
                self._base, self._good, self._bad = self.done, 0, 0
                self._tell()
                beats = asyncio.ensure_future(self._beat())
                while line := await reader.readline():
                    self._hear(ReplicaTold.parse(line, f"what {self.name} says"))
                self._lose()  # the gate is gone, and that means its process
                await asyncio.sleep(AGAIN_S)
            except NotTheGate as error:
                log.debug("%s: %s", self.name, error)
                await asyncio.sleep(AGAIN_S)
            except (OSError, ValueError, BadMessage) as error:
                log.debug("%s: %s", self.name, error)
                if self._heard_s:
                    self._lose()
                await asyncio.sleep(AGAIN_S)
            finally:
                if beats is not None:
                    beats.cancel()
                if self._writer is not None:
                    self._writer.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._tell()

    def _hear(self, told: ReplicaTold) -> None:
        self._heard_s = time.monotonic()
        self._others = max(0, told.in_flight - (self.begun - self.done))
        before, self.phase = (self.phase, self.gone.is_set()), told.phase
        self.weights = told.weights and Served(*told.weights)
        if self.is_suspected != told.suspected:
            self.is_suspected, self._suspected_s = told.suspected, self._heard_s if told.suspected else math.inf
        kept, self._round, self._has_turn = self._round, told.kept, told.turn
        if self._round != kept:
            self._tell()  # with what was begun before: from now on it gets nothing more
        if self.phase == "ended":
            self.has_crashed = told.crashed
            self._lose()
            return
        if self.gone.is_set():
            self.gone = asyncio.Event()
        if before != (self.phase, False):
            log.info("%s is %s", self.name, self.phase)
            self._on_change()
        self._on_room()

    def _lose(self) -> None:
        if not self.gone.is_set():
            self.gone.set()
            how = "a crash" if self.has_crashed else "a hang" if self.is_suspected else ""
            is_alone = sum(each.is_work for each in self.errands) == 1 and not self._others
            # the next to be tried alone is what came last before it answered nothing more
            errands = sorted(self.errands, key=lambda each: abs(each.sent_s - self._answered_s))
            blamed = [each for each in errands if each.is_work and each.sent_s < self._suspected_s] if how else []
            near = likeliest(blamed) + likeliest(sorted(blamed, key=lambda each: -each.sent_s))
            for errand in errands:
                if errand in blamed:
                    errand.deaths.append(Death(self.name, alone=is_alone, how=how, near=errand in near))
                errand.lost()
            self._on_change()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._words().as_line())

    def _words(self) -> RouterTold:
        """What the gate is told."""
        working = [each.patience for each in self.errands if each.is_work]
        return RouterTold(
            begun=self.begun - self._base, done=self.done - self._base, working=len(working),
            patience=max(working, default=1.0), proof=self.proof, outcomes=(self._good, self._bad),
            turn=self._turn, yields=self._round,
        )  # fmt: skip


class Replicas:
    """All replicas that the supervisor has named."""

    def __init__(self, key: bytes, on_change: Callable[[], None], on_room: Callable[[], None]) -> None:
        self._key, self._on_change, self._on_room = key, on_change, on_room
        self.by_name: dict[str, Replica] = {}
        self.expected, self.wanted, self.closing = 0, 0, False
        self.newest: Served | None = None
        """The newest weights that were published, and ..."""

        self.max_lag: int | None = None
        """... how many versions behind them a replica that gets requests may be."""

        self._closing: set[asyncio.Task[None]] = set()
        self._watching = asyncio.ensure_future(self._watch())

    def take(self, members: Members) -> None:
        """The members as the agent passed them on: those that are not named any more are gone."""
        self.expected, self.closing = members.expected, bool(members.closing)
        self.wanted = members.expected if members.wanted is None else members.wanted
        named = {each.name: each for each in members.replicas}
        for name in [name for name in self.by_name if name not in named]:
            self._forget(self.by_name.pop(name))
        for name, each in named.items():
            if name not in self.by_name:
                self.by_name[name] = Replica(
                    name, each.hosts, each.port, self._key, on_change=self._on_change, on_room=self._on_room
                )
        self._on_change()

    def choose(self, limit: int, without: Collection[str]) -> Replica | None:
        """The one that takes the next request; None where none has room."""
        name = choose_replica(self.loads(), limit=limit, without=without)
        return None if name is None else self.by_name[name]

    def place_alone(self, without: Collection[str] | None) -> Replica | None:
        """The one for another suspect of this router, which has failed ``without``; None: there is none.

        It is the only one that is kept with no suspect on it.
        """
        name = None if without is None else place_alone(self.loads(), without)
        for each in self.by_name.values():
            if each.name != name and not each.is_taken:
                each.keep(is_wanted=False)
        return None if name is None else self.by_name[name]

    def loads(self) -> list[Load]:
        """Of those in the rotation."""
        now_s = time.monotonic()
        loads = (each.load(now_s, self.newest, self.max_lag) for each in self.by_name.values())
        return [load for load in loads if load is not None]

    @property
    def ready(self) -> int:
        """How many are in the rotation."""
        return len(self.loads())

    async def close(self) -> None:
        """Let go of all."""
        self._watching.cancel()
        for replica in self.by_name.values():
            self._forget(replica)
        self.by_name = {}
        await asyncio.gather(self._watching, *self._closing, return_exceptions=True)

    def _forget(self, replica: Replica) -> None:
        task = asyncio.ensure_future(replica.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch(self) -> None:
        ready = -1
        while True:
            asleep_s = await overslept_s(LOOK_S)
            for replica in self.by_name.values():
                if asleep_s:
                    replica.slept(asleep_s)
                replica.look(time.monotonic())
            if (now := self.ready) != ready:
                ready = now
                self._on_change()
