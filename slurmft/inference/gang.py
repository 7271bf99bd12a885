"""One engine over several nodes: how its head gathers the members, and how each learns that the others are gone.

The driver of the head, which alone has an address and speaks with its agent as any replica's, listens for as many
members as are missing. Their agents start one driver each, which proves that it holds the run's key, and starts the
engine's command once the head says that all are there. That connection is the gang's life: when it breaks, or one
engine ends, all end, and the head begins another one. An engine for trials has no command of its own: its head says
when a trial begins, and it outlives them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping

from slurmft.errors import LaunchError
from slurmft.ipc.channel import (
    MAX_LINE_BYTES,
    BadMessage,
    Channel,
    Count,
    ExitCode,
    Message,
    Name,
    OpenPort,
    Rank,
    Words,
    accept,
    connect_to_any,
    keep_alive,
    listening_socket,
    read,
)
from slurmft.ipc.messages import ReplicaPlace

log = logging.getLogger(__name__)


class Joins(Message, frozen=True, kw_only=True, tag="joins"):
    """A member is there."""

    rank: Rank
    host: Name


class Starts(Message, frozen=True, kw_only=True, tag="starts"):
    """All are there: every one starts its part of the engine."""

    config: Name
    """Path in the run folder."""

    nodes: Count
    head: Name
    """Address of the head's node."""

    head_port: OpenPort
    """Free there, for what the engine's processes have to say to each other."""

    def words(self, rank: int) -> Mapping[str, str]:
        """What stands for the placeholders of the command."""
        return {"{node_rank}": str(rank), "{nodes}": str(self.nodes), "{head}": self.head,
                "{head_port}": str(self.head_port)}  # fmt: skip


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """A member's part of the engine has ended, with a code as ``Popen.returncode``."""

    code: ExitCode


class Tries(Message, frozen=True, kw_only=True, tag="tries"):
    """All start their ranks of a trial, whose parameters are in its folder."""

    number: Count
    """Of the head's tries."""

    trial: str
    head_port: OpenPort


class Asks(Message, frozen=True, kw_only=True, tag="asks"):
    """The ranks of a try are to save and end by themselves, or to end at once."""

    save: bool


class TryEnded(Message, frozen=True, kw_only=True, tag="try ended"):
    """A member has nothing left of a try."""

    number: Count
    code: ExitCode
    """That of the first of its ranks that has failed; 0: none has."""

    text: Words
    """The end of what that rank said."""


class Head:
    """The head's side, in its driver.

    Args:
        key: the run's.
        nodes: of the gang, this one included.
        config: path in the run folder.
        host: the only address to listen at; None: all.
        tell: sends a message to the agent.
    """

    def __init__(self, key: bytes, *, nodes: int, config: str, host: str | None, tell: Callable[..., None]) -> None:
        self._key, self._nodes, self._config, self._host, self._tell = key, nodes, config, host, tell
        self._members: dict[int, Channel] = {}
        self._ends: dict[int, asyncio.Future[TryEnded]] = {}
        self._number = 0
        loop = asyncio.get_running_loop()
        self._whole: asyncio.Future[int] = loop.create_future()
        self.broken: asyncio.Future[int] = loop.create_future()
        """The code with which the first member has ended, or that of a kill where it is gone without a word."""

        self._server: asyncio.Server | None = None

    async def gather(self) -> Mapping[str, str]:
        """Wait for all members and have them start; returns what stands for the placeholders of the head's command.

        Raises:
            LaunchError: one was lost meanwhile.
        """
        self._server = await asyncio.start_server(self._serve, sock=listening_socket(self._host), limit=MAX_LINE_BYTES)
        self._tell(kind="gathers", port=self._server.sockets[0].getsockname()[1])
        await asyncio.wait([self._whole, self.broken], return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            raise LaunchError("a member of the engine was lost before all were there (inference.engine.nodes)")
        # the address at which the first member has found this node
        starts = Starts(config=self._config, nodes=self._nodes, head_port=free_port(self._host or ""),
                        head=self._members[1].own_address.removeprefix("::ffff:"))  # fmt: skip
        self._send(starts)
        return starts.words(0)

    def begin_try(self, number: int, trial: str, port: int) -> list[asyncio.Future[TryEnded]]:
        """Have the members start their ranks of a trial; returns their ends."""
        self._number, loop = number, asyncio.get_running_loop()
        self._ends = {rank: loop.create_future() for rank in sorted(self._members)}
        self._send(Tries(number=number, trial=trial, head_port=port))
        return list(self._ends.values())

    def ask(self, *, save: bool) -> None:
        """Have the members' ranks of the last try save and end, or end at once."""
        self._send(Asks(save=save))

    def _send(self, message: Message) -> None:
        for channel in self._members.values():
            channel.send(message)

    def close(self) -> None:
        """End the gang, for a reason of this side's."""
        self.broken.cancel()
        for channel in self._members.values():
            channel.close()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member, code = None, -signal.SIGKILL.value
        try:
            channel, body = await accept(reader, writer, self._key)
            joins = Joins.parse(body, "what a member says")
            if not 0 < joins.rank < self._nodes or joins.rank in self._members:
                raise BadMessage(f"{joins.host} says it is member {joins.rank}, which there is already or never was")
            keep_alive(writer.get_extra_info("socket"))
            member, self._members[joins.rank] = joins, channel
            if len(self._members) == self._nodes - 1:
                self._whole.set_result(self._nodes)
            while (body_or_end := await channel.receive()) is not None:
                match read(body_or_end, Ended | TryEnded, "what a member says"):
                    case Ended(code=code):
                        break
                    case TryEnded(number=self._number) as end if not self._ends[joins.rank].done():
                        self._ends[joins.rank].set_result(end)
        except (BadMessage, TimeoutError, OSError) as error:
            log.warning("a member: %s", error)
        finally:
            writer.close()
        if member is not None and not self.broken.done():
            self._tell(kind="broken", rank=member.rank, host=member.host, code=code)
            self.broken.set_result(code)


async def join(head: ReplicaPlace, rank: int, key: bytes) -> Channel:
    """A member's side: the connection to its head, by the first of its addresses that answers.

    Raises:
        LaunchError: the head is not to be found.
    """
    try:
        channel = await connect_to_any(head.hosts, head.port, key)
    except (OSError, BadMessage) as error:
        raise LaunchError(f"{head.name}, the head of the engine, is not to be found: {error}") from error
    channel.send(Joins(rank=rank, host=socket.gethostname()))
    return channel


def free_port(host: str) -> int:
    """A port that nothing listens at on this node."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
