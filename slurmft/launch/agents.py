"""The supervisor's side of the control channel: who has connected, calls to them, and what they report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.launch.channel import MAX_LINE_BYTES, BadMessage, Channel, Message, accept

CALL_TIMEOUT_S = 10.0
NO_CALL = -1
MAX_STRANGERS = 64
"""Connections that have not proved themselves yet; more are closed at once."""

log = logging.getLogger(__name__)


class AgentLost(Exception):
    """The agent's connection is gone, or it does not answer."""


class AgentLink:
    """One node's agent as the supervisor sees it. Survives a reconnection of the same agent."""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.node = int(hello["node"])
        self.host = str(hello["host"])
        self.pid = int(hello["pid"])
        self.address = channel.peer
        self.channel: Channel | None = channel
        self.last_heard = time.monotonic()
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Message]] = {}

    async def call(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **fields: Any) -> Message:
        """Ask the agent for something and wait for its reply.

        Raises:
            AgentLost: it is not connected, or does not reply in time.
        """
        if self.channel is None:
            raise AgentLost(f"the agent on {self.host} is not connected")
        call_id = self._next_id = self._next_id + 1
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self.channel.send({"kind": kind, "id": call_id, **fields})
        try:
            async with asyncio.timeout(timeout_s):
                reply: Message = await future
                return reply
        except TimeoutError as error:
            raise AgentLost(f"the agent on {self.host} did not answer {kind!r} within {timeout_s:.0f} s") from error
        finally:
            self._waiting.pop(call_id, None)

    def answered(self, message: Message) -> None:
        """Hand a reply to the call that waits for it.

        Raises:
            BadMessage: it is no reply to anything.
        """
        call_id = message.get("id", NO_CALL)
        if not isinstance(call_id, int):
            raise BadMessage(f"a reply from {self.host} has the id {call_id!r}")
        future = self._waiting.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(message)

    def disconnected(self) -> None:
        """Fail every call that waits."""
        self.channel = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentLost(f"the agent on {self.host} has gone"))
        self._waiting.clear()


class AgentPool:
    """Listens for the attempt's agents. Reports go to ``events`` as ``(link, message)``."""

    def __init__(self, secret: bytes, expected: int) -> None:
        self._secret, self._expected = secret, expected
        self._server: asyncio.Server | None = None
        self._strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.links: dict[int, AgentLink] = {}
        self.events: asyncio.Queue[tuple[AgentLink, Message]] = asyncio.Queue()
        self.complete = asyncio.Event()

    async def listen(self, host: str | None) -> int:
        """Open the port; None listens on every interface. Returns the port."""
        # one socket: given no host, start_server opens one per address family, each with a port of its own
        if host is None and socket.has_dualstack_ipv6():
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server((host or "", 0))
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

    async def call_all(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **fields: Any) -> list[Message]:
        """Ask every agent, in the order of the nodes.

        Raises:
            AgentLost: one of them does not answer.
        """
        links = [self.links[node] for node in sorted(self.links)]
        return await asyncio.gather(*(link.call(kind, timeout_s=timeout_s, **fields) for link in links))

    async def tell_all(self, kind: str, **fields: Any) -> None:
        """Ask every agent that can still be reached; the others are somebody else's finding."""
        links = list(self.links.values())
        results: Sequence[Any] = await asyncio.gather(
            *(link.call(kind, timeout_s=2.0, **fields) for link in links), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                log.debug("%s: %s", kind, result)

    async def wait_until_gone(self, timeout_s: float) -> bool:
        """Whether every agent has closed its connection, which it does when its workers are dead, in that time."""
        deadline = time.monotonic() + timeout_s
        while any(link.channel is not None for link in self.links.values()):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def silent_since(self, now: float) -> Mapping[str, float]:
        """Seconds since each agent was last heard of, by host."""
        return {link.host: now - link.last_heard for link in self.links.values()}

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
        if self._strangers >= MAX_STRANGERS:
            return None
        self._strangers += 1
        try:
            channel, hello = await accept(reader, writer, self._secret)
            link = AgentLink(channel, hello)
        except (BadMessage, TimeoutError, OSError, KeyError, ValueError, TypeError) as error:
            log.warning("refused a connection: %s", error or type(error).__name__)
            return None
        finally:
            self._strangers -= 1
        if not 0 <= link.node < self._expected:
            log.warning("refused agent %d on %s: the run has %d nodes", link.node, link.host, self._expected)
            return None
        if (old := self.links.get(link.node)) is not None and old.channel is not None:
            old.channel.close()
        self.links[link.node] = link
        if len(self.links) == self._expected:
            self.complete.set()
        return link

    async def _listen_to(self, link: AgentLink, channel: Channel) -> None:
        try:
            while (message := await channel.receive()) is not None:
                link.last_heard = time.monotonic()
                if message["kind"] == "reply":
                    link.answered(message)
                else:
                    self.events.put_nowait((link, message))
        except BadMessage as error:
            log.warning("closed the connection of %s: %s", link.host, error)
        finally:
            link.disconnected()
            if self.links.get(link.node) is link:
                self.events.put_nowait((link, {"kind": "disconnected"}))
