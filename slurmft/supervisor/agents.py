"""The supervisor's side of the control channel: connected agents, calls to them, their reports, and the end of those
that outlive it.

A malformed message closes the connection that it came by.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmft.config.run import RunConfig, roles_of
from slurmft.errors import StorageError
from slurmft.ipc import messages
from slurmft.ipc.channel import (
    LEAST_PATIENCE_S,
    MAX_LINE_BYTES,
    UNANSWERED,
    BadMessage,
    Channel,
    accept,
    keep_alive,
    listening_socket,
)
from slurmft.policy.values import Strangers
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.cluster import Cluster
from slurmft.supervisor.guardian import end_left_behind, guardians
from slurmft.system.background import overslept_s
from slurmft.system.files import read_bytes, read_json
from slurmft.system.processes import birth_of, children_of, lives, words_of

CALL_TIMEOUT_S = 10.0
TELL_TIMEOUT_S = 2.0
BROKEN_S = 1.0
"""How long an agent that has closed its connection may take to reconnect: it tries again every 0.2 s."""

TRIES, LOOK_S = 3, 0.02
MAX_STRANGERS, STRANGERS_PER_ADDRESS = 128, 32
"""Connections that have not proved themselves yet: when there are more, the oldest is closed."""

TOLD_REFUSALS = 10
"""Refused connections that are logged; a stranger must not fill the disk either. The others are counted."""

log = logging.getLogger(__name__)


class AgentLost(Exception):
    """The agent's connection is gone, or it does not answer."""


class CallFailed(AgentLost):
    """The agent is there, but could not do what it was asked for; its own words."""


class AgentLink:
    """One node's agent as the supervisor sees it. Survives a reconnection of the same agent."""

    def __init__(self, channel: Channel | None, hello: messages.Hello) -> None:
        self.node, self.host, self.pid = hello.node, hello.host, hello.pid
        self.birth = hello.birth or ""
        """Distinguishes it from others with its process id, of which each container may have its own."""

        self.address = channel.peer if channel is not None else ""
        self.channel: Channel | None = channel
        self.lender = hello.lender or ""
        """The job that lends this node; empty for one of the run's own job."""

        self.leaving = self.dropped = self.ready = False
        """leaving: its job is ending. dropped: it counts as lost for good. ready: torch is imported."""

        self.told: set[str] = set()
        """What has come already of the reports that each connection repeats."""

        self.last_heard = time.monotonic()
        self._next_id = 0
        self._waiting: dict[int, tuple[Callable[[bytes], Any], asyncio.Future[Any]]] = {}

    def is_same(self, other: AgentLink) -> bool:
        """Whether both are connections of one agent."""
        return (self.pid, self.birth) == (other.pid, other.birth)

    def is_barred(self, allowed: Collection[str]) -> bool:
        """Whether its node is kept off: others of the job, ``allowed``, are there in its place; empty for all."""
        return bool(allowed) and self.host not in allowed and not self.lender

    def has_told(self, report: messages.Report) -> bool:
        """Whether this report has come by an earlier connection of the agent; remembers it."""
        if not isinstance(report, messages.Lasting):
            return False
        words, before = repr(report), len(self.told)  # not its value: one with a NaN equals no other
        self.told.add(words)
        return len(self.told) == before

    async def call(self, call: messages.Call[messages.Answer], *, timeout_s: float = CALL_TIMEOUT_S) -> messages.Answer:
        """Ask the agent for something and wait for its reply.

        Raises:
            AgentLost: it is not connected, or does not reply in time.
        """
        number, future = self.ask(call)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise self.unanswered(call, timeout_s) from error
        finally:
            self.forget(number)

    def ask(self, call: messages.Call[messages.Answer]) -> tuple[int, asyncio.Future[messages.Answer]]:
        """Send a call; ``forget`` its number when the reply has come, or is not waited for any more.

        Raises:
            AgentLost: it is not connected.
        """
        return self._ask(call, call.reply_of)

    def ask_unread(self, call: messages.Call[Any]) -> tuple[int, asyncio.Future[bytes]]:
        """The same; its reply is not looked at yet (``Call.reply_of``)."""
        return self._ask(call, bytes)

    def _ask(self, call: messages.Call[Any], read: Callable[[bytes], Any]) -> tuple[int, asyncio.Future[Any]]:
        if self.channel is None:
            raise AgentLost(f"the agent on {self.host} is not connected")
        number = self._next_id = self._next_id + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = read, future
        self.channel.send(call.as_call(number))
        return number, future

    def tell(self, call: messages.Call[Any]) -> None:
        """Send a call without waiting for its reply; nothing where the agent is not connected."""
        if self.channel is not None:
            self.channel.send(call.as_call(UNANSWERED))

    def forget(self, number: int) -> None:
        """Nothing waits for this call's reply any more."""
        self._waiting.pop(number, None)

    def unanswered(self, call: messages.Call[Any], timeout_s: float) -> AgentLost:
        """The error of a call whose time is up."""
        return AgentLost(f"the agent on {self.host} did not answer {call.kind!r} within {timeout_s:.0f} s")

    def answered(self, head: messages.Reply, line: bytes) -> None:
        """Hand a reply to the call that waits for it.

        Raises:
            BadMessage: it cannot be a reply to that call.
        """
        if head.id not in self._waiting:  # its caller no longer waits
            return
        read, future = self._waiting[head.id]
        if head.error is not None:
            del self._waiting[head.id]
            if not future.done():
                future.set_exception(CallFailed(f"the agent on {self.host}: {head.error}"))
            return
        reply = read(line)  # before it is taken off: the end of the connection fails the call
        del self._waiting[head.id]
        if not future.done():
            future.set_result(reply)

    def disconnected(self) -> None:
        """Fail every call that waits."""
        self.channel = None
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentLost(f"the agent on {self.host} has gone"))
        self._waiting.clear()


async def ask_each(
    links: Sequence[AgentLink], call: messages.Call[messages.Answer], *, timeout_s: float
) -> list[messages.Answer | AgentLost]:
    """Each agent's reply, in order, or why there is none. With thousands of them, no task waits for each."""
    return await _replies(links, [call] * len(links), timeout_s=timeout_s)


async def call_each(
    links: Sequence[AgentLink], calls: Sequence[messages.Call[messages.Answer]], *, timeout_s: float
) -> list[messages.Answer]:
    """The same, of a call of its own to each; every reply is needed.

    Raises:
        AgentLost: one of them does not answer.
    """
    found = await _replies(links, calls, timeout_s=timeout_s, are_needed=True)
    for each in found:
        if isinstance(each, AgentLost):
            raise each
    return found


async def ask_unread(
    links: Sequence[AgentLink], call: messages.Call[Any], *, timeout_s: float
) -> list[bytes | AgentLost]:
    """As ``ask_each``, but the replies are not looked at, which would take most of the time: ``Call.reply_of``."""
    return await _replies(links, [call] * len(links), timeout_s=timeout_s, are_read=False)


async def _replies(
    links: Sequence[AgentLink], calls: Sequence[messages.Call[Any]], *, timeout_s: float, are_needed: bool = False,
    are_read: bool = True,
) -> list[Any]:  # fmt: skip
    found: list[Any] = [None] * len(links)
    asked: list[tuple[int, int, asyncio.Future[Any]]] = []
    for place, (link, call) in enumerate(zip(links, calls, strict=True)):
        try:
            asked.append((place, *(link.ask(call) if are_read else link.ask_unread(call))))
        except AgentLost as error:
            found[place] = error
    try:
        if asked and not (are_needed and any(found)):
            when = asyncio.FIRST_EXCEPTION if are_needed else asyncio.ALL_COMPLETED
            await asyncio.wait([future for _, _, future in asked], timeout=timeout_s, return_when=when)
    finally:
        for place, number, future in asked:
            links[place].forget(number)
            if future.done():
                found[place] = future.exception() or future.result()
            future.cancel()
    # where one error ends it, the others have done nothing wrong
    cause = next((each for each in found if isinstance(each, AgentLost)), None) if are_needed else None
    return [
        cause or link.unanswered(call, timeout_s) if each is None else each
        for link, call, each in zip(links, calls, found, strict=True)
    ]


class AgentPool:
    """Listens for the attempt's agents. Reports go to ``events``, each with its link."""

    def __init__(self, secret: bytes, expected: int, *, patience_s: float = 0.0) -> None:
        self._secret, self._expected, self._patience_s = secret, expected, patience_s
        self._server: asyncio.Server | None = None
        self._strangers: Strangers[asyncio.StreamWriter] = Strangers(MAX_STRANGERS, STRANGERS_PER_ADDRESS)
        self._refused = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.links: dict[int, AgentLink] = {}
        self._lent: dict[tuple[str, int], int] = {}
        self.members: list[AgentLink] = []
        """Those that take part in the present attempt, in the order of their ranks; empty before there is one."""

        self.generation: int | None = None
        """Of the attempt that they work for; None between two, where what they report of workers is nobody's."""

        self.is_over = False
        """All are to end; one that connects only now is told so."""

        self.events: asyncio.Queue[tuple[AgentLink, messages.Report]] = asyncio.Queue()
        self.complete = asyncio.Event()

    async def listen(self, host: str | None, listener: socket.socket | None = None) -> int:
        """Take agents in, by a socket that is open already (``listening_socket``) or by a new one. Returns the port."""
        listener = listener or listening_socket(host)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_LINE_BYTES)
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for link in self.links.values():
            if link.channel is not None:
                link.channel.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def call_all(self, call: messages.Call[messages.Answer]) -> list[messages.Answer]:
        """Ask every member, in the order of the ranks; before there are any, all agents, in the order of the nodes.

        Raises:
            AgentLost: one of them does not answer.
        """
        links = self.members or [self.links[node] for node in sorted(self.links)]
        return await self.call_each(links, [call] * len(links), timeout_s=CALL_TIMEOUT_S)

    async def call_each(
        self,
        links: Sequence[AgentLink],
        calls: Sequence[messages.Call[messages.Answer]],
        *,
        timeout_s: float,
        tries: int = TRIES,
    ) -> list[messages.Answer]:
        """The same, of a call of its own to each; where a connection broke and came back, to all of them again.

        Raises:
            AgentLost: one of them does not answer.
        """
        try:
            return await call_each([self._newest(link) for link in links], calls, timeout_s=timeout_s)
        except AgentLost as error:
            if isinstance(error, CallFailed) or tries < 2 or not await self.are_back(links):
                raise
        return await self.call_each(links, calls, timeout_s=timeout_s, tries=tries - 1)

    def _newest(self, link: AgentLink) -> AgentLink:
        """The connection that has taken the place of this one; itself where its agent is lost for good."""
        return link if link.dropped else self.links.get(link.node, link)

    async def are_back(self, links: Sequence[AgentLink], within_s: float = BROKEN_S) -> bool:
        """Whether all of them are connected, or are so again within this time; at once where one is lost."""
        deadline_s = time.monotonic() + within_s
        while not all((newest := self._newest(link)).channel for link in links):
            if newest.dropped or time.monotonic() > deadline_s:
                return False
            deadline_s += await overslept_s(LOOK_S)  # while this process was stopped it could not take them in
        return True

    def ping(self, ping: messages.Ping) -> None:
        """Send a sign of life to every agent that can be reached; there is no reply."""
        for link in self.links.values():
            link.tell(ping)

    async def ask(
        self, links: Sequence[AgentLink], call: messages.Call[messages.Answer], *, timeout_s: float
    ) -> list[messages.Answer | AgentLost]:
        """Each one's reply, or why there is none; asked again where its connection broke and came back."""
        asked = [self._newest(link) for link in links]
        found = await ask_each(asked, call, timeout_s=timeout_s)
        for _ in range(TRIES - 1):
            broken = [
                place for place, reply in enumerate(found)
                if isinstance(reply, AgentLost) and asked[place].channel is None and not asked[place].dropped
            ]  # fmt: skip
            if broken:
                await self.are_back([asked[place] for place in broken])
            broken = [place for place in broken if self._newest(asked[place]).channel is not None]
            if not broken:
                break
            again = await ask_each([self._newest(asked[place]) for place in broken], call, timeout_s=timeout_s)
            for place, reply in zip(broken, again, strict=True):
                asked[place], found[place] = self._newest(asked[place]), reply
        return found

    async def tell_all(self, call: messages.Call[Any], *, timeout_s: float = TELL_TIMEOUT_S) -> None:
        """Ask every agent that can be reached, member or not."""
        await self.ask(list(self.links.values()), call, timeout_s=timeout_s)

    @staticmethod
    def drop(link: AgentLink) -> None:
        """Disconnect an agent that counts as lost; pending calls to it fail, and it does not get them later either."""
        link.dropped = True
        if link.channel is not None:
            link.channel.abort()
            link.disconnected()

    async def wait_until_gone(self, timeout_s: float) -> bool:
        """Whether every agent has closed its connection, which it does when its workers are dead, in that time."""
        deadline = time.monotonic() + timeout_s
        while any(link.channel is not None for link in self.links.values()):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def places(self, per_node: int) -> Mapping[int, str]:
        """Host of each rank of the present attempt."""
        return {
            place * per_node + local: link.host for place, link in enumerate(self.members) for local in range(per_node)
        }

    def silent_for(self, seconds: float, now: float) -> list[AgentLink]:
        """Agents that are connected, and have not reported for so long."""
        return [link for link in self.links.values() if link.channel and now - link.last_heard > seconds]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):
            link = await self._admit(reader, writer)
            if link is not None and link.channel is not None:
                await self._listen_to(link, link.channel)
        writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AgentLink | None:
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        for one in self._strangers.admit(writer, address):
            one.transport.abort()
        try:
            channel, hello = await accept(reader, writer, self._secret)
            self._strangers.forget(writer)
            keep_alive(writer.get_extra_info("socket"), max(self._patience_s, LEAST_PATIENCE_S))
            link = AgentLink(channel, messages.parse_hello(hello))
            if link.lender:  # nodes of another job come behind our own
                link.node = self._lent.setdefault((link.lender, link.node), self._expected + len(self._lent))
            elif link.node >= self._expected:
                raise BadMessage(
                    f"it says it is node {link.node} ({link.host}), but the run has {self._expected} nodes"
                )
        except (BadMessage, TimeoutError, OSError) as error:
            self._tell_refusal(str(error) or type(error).__name__)
            return None
        finally:
            self._strangers.forget(writer)
        return self._placed(link)

    def _placed(self, link: AgentLink) -> AgentLink | None:
        """The connection in the place of its node; None where another agent has that."""
        if self.is_over:
            link.tell(messages.Shutdown())
        old = self.links.get(link.node)
        if old is not None and not old.dropped and not old.is_same(link):
            if old.channel is not None:
                # a lost agent that was replaced: the two would take the connection from each other for ever
                self._tell_refusal(f"{link.host} has another agent, process {old.pid}")
                link.tell(messages.Shutdown())
                return None
            if self.generation is not None and old in self.members:
                return None  # it has no workers, and would be taken for the one that has: that one is given up first
        if old is not None:
            if old.channel is not None:
                old.channel.close()
            link.told = old.told if old.is_same(link) else link.told
            if not old.dropped:
                self.members = [link if member is old else member for member in self.members]
        if link.lender or (old is not None and old.dropped):
            self.events.put_nowait((link, messages.Connected()))
        self.links[link.node] = link
        if sum(node < self._expected for node in self.links) == self._expected:
            self.complete.set()
        return link

    def _take(self, link: AgentLink, report: messages.Report) -> None:
        """Hand a report on, unless it was on its way when its attempt ended, or another connection has told more."""
        link.ready = link.ready or (isinstance(report, messages.ProgressReport) and report.ready)
        is_old = isinstance(report, messages.ProgressReport) and self.links.get(link.node) is not link
        if report.generation in (None, self.generation) and not is_old and not link.has_told(report):
            self.events.put_nowait((link, report))

    def _tell_refusal(self, why: str) -> None:
        self._refused += 1
        if self._refused <= TOLD_REFUSALS or self._refused % 1000 == 0:
            log.warning("refused a connection: %s (%d so far)", why, self._refused)

    async def _listen_to(self, link: AgentLink, channel: Channel) -> None:
        try:
            while (line := await channel.receive_line()) is not None:
                link.last_heard = time.monotonic()
                report = messages.parse_report(line)
                if isinstance(report, messages.Reply):
                    link.answered(report, line)
                else:
                    self._take(link, report)
        except BadMessage as error:
            log.warning("closed the connection of %s: %s", link.host, error)
        finally:
            link.disconnected()
            if self.links.get(link.node) is link:
                self.events.put_nowait((link, messages.Disconnected()))


# --- Agents that outlive their supervisor within a job: found by the one that follows, and taken over or ended ---
# Replicas of an inference run live and die alone, and their engines take minutes to load. So where a signal has ended
# the supervisor, the guardian spares the processes that started the agents; the next supervisor listens at the same
# port, with the same secret, and gives every agent new leases of a generation of its own. Ranks of a trainer need a
# restart anyway: their agents are ended. Roles of a job have supervisors of their own, which go on as well.

OUTLIVING_LOOK_S = 0.05
END_S = 5.0

EXIT_UNKNOWN = 255
"""The end of a process that is another one's child."""


def outliving(config: RunConfig) -> Callable[[int], bool]:
    """By its id: whether a process starts agents, or is one, of an inference run, or supervises a role; blocking."""
    lives_on = {("run", str(RunFolder(role.config.run_folder).config)) for role in roles_of(config)}
    if config.inference is not None:
        lives_on.add(("agent", str(RunFolder(config.run_folder).config)))
    return lambda pid: not lives_on.isdisjoint(itertools.pairwise(words_of(pid)))


class Orphan:
    """A process of the lost supervisor's, now the guardian's child; used as a ``asyncio.subprocess.Process`` is."""

    def __init__(self, pid: int) -> None:
        self.pid, self._birth = pid, birth_of(pid)

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        return None if lives(self.pid, self._birth) else EXIT_UNKNOWN

    async def wait(self) -> int:
        """Return when it has ended."""
        while (code := self.returncode) is None:
            await asyncio.sleep(OUTLIVING_LOOK_S)
        return code

    def terminate(self) -> None:
        """SIGTERM: srun ends its step at once."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class Outlived:
    """The agents of a lost supervisor, or its roles, as the next one finds them."""

    attempt: Attempt
    """In its folder they find their supervisor."""

    processes: tuple[Orphan, ...]
    secret: bytes = field(default=b"", repr=False)
    listener: socket.socket | None = None
    """At the port where agents look for it; they are heard from now on."""

    def end(self) -> None:
        """End them, where nothing follows that needs them; blocking."""
        if self.listener is not None:
            self.listener.close()
        end_orphans(self.processes)


def end_orphans(orphans: Sequence[Orphan]) -> None:
    """End these processes, children of our guardian, and what they started; blocking."""
    deadline = time.monotonic() + END_S
    for orphan in orphans:
        orphan.terminate()
    while any(orphan.returncode is None for orphan in orphans) and time.monotonic() < deadline:
        time.sleep(OUTLIVING_LOOK_S)
    for orphan in orphans:
        orphan.kill()
    end_left_behind(lambda pid: pid == os.getpid(), parents=guardians(), gentle_s=0.0)


def find_outlived(config: RunConfig, run: RunFolder, cluster: Cluster) -> Outlived | None:
    """The agents that the guardian has spared; None where there are none, and none that cannot be taken over are left.

    Blocking; for a process that acts in the place of a lost supervisor, as a child of its guardian.
    """
    guardian, outlives = os.getppid(), outliving(config)
    orphans = tuple(Orphan(pid) for pid, _ in children_of(guardian) if pid != os.getpid() and outlives(pid))
    if not orphans:
        return None
    if config.roles:
        return Outlived(attempt=cluster.attempt, processes=orphans)
    try:
        if (attempt := crew_of(run)) is None:
            raise OSError("nothing says where they look for their supervisor")
        folder = run.attempts / str(attempt)
        where = read_json(folder / "control.json") or {}
        secret = read_bytes(folder / "secret", owners={os.geteuid()})
        listener = listening_socket(cluster.listen_host, int(where["port"]))
    except (OSError, StorageError, KeyError, TypeError, ValueError, OverflowError) as error:
        log.warning("the agents cannot be taken over, and are ended: %s", error)
        end_orphans(orphans)
        return None
    return Outlived(attempt=attempt, secret=secret, listener=listener, processes=orphans)


def crew_of(run: RunFolder) -> Attempt | None:
    """The attempt in whose folder the run's agents find their supervisor; None when there is none now.

    Raises:
        StorageError: the run folder cannot be read.
    """
    owner = run.owner()
    if owner is None:
        return None
    for cycle in range(owner.cycle, -1, -1):
        attempt = Attempt(job=owner.job, restart=owner.restart, cycle=cycle)
        try:
            if all((run.attempts / str(attempt) / name).exists() for name in ("secret", "control.json")):
                return attempt
        except OSError as error:
            raise StorageError(f"cannot look into {run.attempts}: {error.strerror}") from error
    return None
