"""The control channel over real TCP: who is believed, what a stranger learns, and whose connection ends."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from of_each import of_each
from waiting import until_async

from slurmft.ipc import channel
from slurmft.ipc.channel import MAX_LINE_BYTES, BadMessage, Body, Channel, Fields, accept, connect, encoded
from slurmft.ipc.messages import Call, Kill, LookNow, Ping, Port, Propose
from slurmft.supervisor import agents
from slurmft.supervisor.agents import AgentLost, AgentPool

SECRET = b"a secret of this job"
HERE = "127.0.0.1"
WAIT_S = 5.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Accepts connections as the supervisor does, and remembers what came."""

    def __init__(self) -> None:
        self.port = 0
        self.channels: list[Channel] = []
        self.received: list[Body] = []
        self.refused: list[Exception] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_side, first = await accept(reader, writer, SECRET)
            self.channels.append(server_side)
            self.received.append(first)
            while (message := await server_side.receive()) is not None:
                self.received.append(message)
        except (BadMessage, TimeoutError) as error:
            self.refused.append(error)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, HERE, 0, limit=MAX_LINE_BYTES)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for opened in server.channels:
            opened.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def talking(port: int, secret: bytes = SECRET) -> AsyncIterator[Channel]:
    client = await connect(HERE, port, secret)
    try:
        yield client
    finally:
        client.close()
        with contextlib.suppress(OSError):
            await client._writer.wait_closed()


@contextlib.asynccontextmanager
async def stranger(port: int) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(HERE, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_messages_arrive_whole_in_order_and_both_ways():
    async with serving() as server, talking(server.port) as client:
        sent = [{"kind": "a", "n": n, "text": "ü\n" * n} for n in range(50)]
        for message in sent:
            client.send(message)
        await until_async(lambda: len(server.received) == 50)
        assert server.received == sent
        server.channels[0].send({"kind": "b"})
        server.channels[0].send({"kind": "c"})
        assert [await client.receive(), await client.receive()] == [{"kind": "b"}, {"kind": "c"}]


async def test_the_end_of_a_connection_is_none():
    async with serving() as server, talking(server.port) as client:
        client.send({"kind": "a"})
        await until_async(lambda: server.channels)
        server.channels[0].close()
        assert await client.receive() is None


async def test_a_client_with_another_secret_is_refused():
    async with serving() as server, talking(server.port, b"another secret") as client:
        client.send({"kind": "hello"})
        await until_async(lambda: server.refused)
        assert "not authentic" in str(server.refused[0])
        assert server.received == []
        assert await client.receive() is None


async def test_a_server_with_another_secret_is_not_believed():
    """The proof is mutual: who has taken the supervisor's port cannot command an agent."""

    async def impostor(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"0" * 32 + b"\n" + b"f" * 64 + b' {"kind":"kill"}\n')
        await asyncio.sleep(0)
        writer.close()

    listener = await asyncio.start_server(impostor, HERE, 0)
    async with listener, talking(listener.sockets[0].getsockname()[1]) as client:
        with pytest.raises(BadMessage, match="not authentic"):
            await client.receive()


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.9\r\n", b"", b"x" * 31 + b"\n", b"HTTP/1.1 400 Bad\r\n\r\n"])
async def test_another_kind_of_server_is_recognised(greeting):
    async def other(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    listener = await asyncio.start_server(other, HERE, 0)
    async with listener:
        with pytest.raises(BadMessage, match="is not a slurmft supervisor"):
            await connect(HERE, listener.sockets[0].getsockname()[1], SECRET)


async def test_a_stranger_learns_a_nonce_and_nothing_else():
    async with serving() as server:
        nonces = set()
        for _ in range(3):
            async with stranger(server.port) as (reader, writer):
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                answer = await reader.read()
                assert len(answer) == 33
                assert int(answer, 16) >= 0
                nonces.add(answer)
        assert len(nonces) == 3
        assert server.received == []


class Recorder:
    """A man in the middle: passes lines on, keeps them, and may change them."""

    def __init__(self, change: Callable[[list[bytes]], list[bytes]] = lambda lines: lines) -> None:
        self.change, self.lines, self.target = change, [], 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(HERE, self.target)
        try:
            writer.write(await their_reader.readline())
            self.lines = [await reader.readline() for _ in range(4)]  # the client's nonce and three messages
            with contextlib.suppress(OSError):
                for line in self.change(self.lines):
                    their_writer.write(line)
                await their_reader.read()
        finally:
            their_writer.close()
            writer.close()


async def three_messages_through(recorder: Recorder) -> Server:
    async with serving() as server:
        recorder.target = server.port
        listener = await asyncio.start_server(recorder.serve, HERE, 0)
        async with listener, talking(listener.sockets[0].getsockname()[1]) as client:
            for number in (1, 2, 3):
                client.send({"kind": "m", "n": number})
            await until_async(lambda: server.refused or len(server.received) == 3)
        return server


def flipped(line: bytes, position: int) -> bytes:
    return line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]


@pytest.mark.parametrize(
    ("change", "arrived"),
    [
        pytest.param(lambda lines: lines, 3, id="unchanged"),
        pytest.param(lambda lines: [*lines[:2], lines[1], *lines[2:]], 1, id="a line replayed"),
        pytest.param(lambda lines: [lines[0], lines[2], lines[1], lines[3]], 0, id="lines out of order"),
        pytest.param(lambda lines: [*lines[:2], lines[3]], 1, id="a line left out"),
        pytest.param(lambda lines: [*lines[:2], flipped(lines[2], -3), lines[3]], 1, id="a body changed"),
        pytest.param(lambda lines: [*lines[:2], flipped(lines[2], 5), lines[3]], 1, id="a proof changed"),
        pytest.param(lambda lines: [flipped(lines[0], 0), *lines[1:]], 0, id="the nonce changed"),
        pytest.param(lambda lines: [*lines[:2], lines[2][65:], lines[3]], 1, id="a proof missing"),
        pytest.param(lambda lines: [*lines[:2], b"\xff" * 90 + b"\n", lines[3]], 1, id="garbage"),
        pytest.param(lambda lines: [*lines[:2], b"\n", lines[3]], 1, id="an empty line"),
        pytest.param(lambda lines: [*lines[:2], b"x" * (MAX_LINE_BYTES + 9) + b"\n"], 1, id="oversized"),
    ],
)
async def test_changed_lines_are_refused(change, arrived):
    server = await three_messages_through(Recorder(change))
    assert [message["n"] for message in server.received] == [1, 2, 3][:arrived]
    assert bool(server.refused) == (arrived < 3)


async def test_a_recorded_session_cannot_be_replayed():
    recorder = Recorder()
    await three_messages_through(recorder)
    async with serving() as server, stranger(server.port) as (_, writer):
        writer.writelines(recorder.lines)
        await until_async(lambda: server.refused)
        assert server.received == []


async def test_a_message_cannot_be_sent_back_to_its_sender():
    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(secrets.token_hex(16).encode() + b"\n")
        await reader.readline()
        writer.write(await reader.readline())
        writer.close()

    listener = await asyncio.start_server(mirror, HERE, 0)
    async with listener, talking(listener.sockets[0].getsockname()[1]) as client:
        client.send({"kind": "kill"})
        with pytest.raises(BadMessage, match="not authentic"):
            await client.receive()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "is not a message"),
        (b"{}", "is not a message"),
        (b'{"kind":1}', "is not a message"),
        (b"{", "is not JSON"),
    ],
)
async def test_an_authentic_line_must_be_a_message(body, message):
    async with serving() as server, talking(server.port) as client:
        client._writer.write(client._mac(b"c", 0, body) + b" " + body + b"\n")
        await until_async(lambda: server.refused)
        assert message in str(server.refused[0])


@pytest.mark.parametrize(
    "sent",
    [b"", b"short\n", b"0" * 32 + b"\n", b"0" * 32 + b"\nxyz"],
    ids=["nothing", "no nonce", "a nonce", "half a line"],
)
async def test_a_handshake_that_dawdles_is_ended(monkeypatch, sent):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with serving() as server, stranger(server.port) as (reader, writer):
        writer.write(sent)
        await until_async(lambda: server.refused)
        assert len(await reader.read()) == 33


async def test_a_drip_of_bytes_does_not_prolong_the_handshake(monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.15)
    async with serving() as server, stranger(server.port) as (_, writer):
        for _ in range(200):
            if server.refused:
                break
            with contextlib.suppress(OSError):
                writer.write(b"0")
                await writer.drain()
            await asyncio.sleep(0.01)
        assert isinstance(server.refused[0], TimeoutError)


async def test_a_message_that_is_too_long_is_not_sent():
    async with serving() as server, talking(server.port) as client:
        with pytest.raises(ValueError, match="is too long"):
            client.send({"kind": "a", "text": "x" * MAX_LINE_BYTES})
        client.send({"kind": "a", "text": "x" * (MAX_LINE_BYTES - 200)})
        await until_async(lambda: server.received)


async def test_a_handshake_that_times_out_closes_its_socket(monkeypatch):
    """An agent tries again every 0.2 s: against a frozen supervisor each try would cost one more open socket."""
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
            ended.set()
        finally:
            writer.close()

    opened: list[asyncio.StreamWriter] = []
    real = asyncio.open_connection

    async def remember(*arguments: Any, **options: Any) -> Streams:
        streams = await real(*arguments, **options)
        opened.append(streams[1])  # so that the garbage collector does not do the work
        return streams

    monkeypatch.setattr(asyncio, "open_connection", remember)
    listener = await asyncio.start_server(silent, HERE, 0)
    try:
        with pytest.raises(TimeoutError):
            await connect(HERE, listener.sockets[0].getsockname()[1], SECRET)
        async with asyncio.timeout(0.5):
            await ended.wait()
    finally:
        listener.close()
        opened[0].close()


async def test_nobody_listening_is_an_oserror():
    async with serving() as server:
        port = server.port
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await connect(HERE, port, SECRET)


# the pool


class Answered(Fields, frozen=True, kw_only=True):
    """What these agents say."""

    node: int | None = None
    n: int | None = None
    life: int | None = None


class Ask(Call[Answered], frozen=True, kw_only=True, tag="ask"):
    """What they are asked."""

    n: int | None = None


class Agent:
    """A node's agent as far as the pool can tell: says hello, answers calls."""

    def __init__(self, client: Channel, node: int, answer: Callable[[Body], Body | None]) -> None:
        self.client, self.node, self.answer = client, node, answer
        self.calls: list[Body] = []

    async def serve(self) -> None:
        while (message := await self.client.receive()) is not None:
            self.calls.append(message)
            if (reply := self.answer(message)) is not None:
                self.client.send({"kind": "reply", "id": message["id"], **reply})


@contextlib.asynccontextmanager
async def pooling(expected: int) -> AsyncIterator[tuple[AgentPool, int]]:
    pool = AgentPool(SECRET, expected)
    port = await pool.listen(HERE)
    try:
        yield pool, port
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def agent(
    port: int, node: int, answer: Callable[[Body], Body | None] = lambda _: {}, **hello: Any
) -> AsyncIterator[Agent]:
    async with talking(port) as client:
        client.send({"kind": "hello", "node": node, "host": f"n{node}", "pid": 1, **hello})
        served = Agent(client, node, answer)
        task = asyncio.create_task(served.serve())
        try:
            yield served
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def events_of(pool: AgentPool, count: int) -> list[tuple[int, str]]:
    async with asyncio.timeout(WAIT_S):
        return [(link.node, report.kind) for link, report in [await pool.events.get() for _ in range(count)]]


async def test_the_pool_is_complete_when_every_node_has_reported():
    async with pooling(2) as (pool, port), agent(port, 1):
        await until_async(lambda: 1 in pool.links)
        assert not pool.complete.is_set()
        async with agent(port, 0):
            await asyncio.wait_for(pool.complete.wait(), WAIT_S)
            assert [pool.links[node].host for node in sorted(pool.links)] == ["n0", "n1"]
            assert pool.links[0].address == HERE
            assert {link.host for link in pool.silent_for(5.0, 10**9)} == {"n0", "n1"}
            assert pool.silent_for(5.0, time.monotonic()) == []


async def test_all_nodes_are_asked_at_once_and_answer_in_their_order():
    async with pooling(2) as (pool, port):
        async with (
            agent(port, 1, lambda m: {"node": 1, "n": m["n"]}),
            agent(port, 0, lambda m: {"node": 0, "n": m["n"]}),
        ):
            await pool.complete.wait()
            replies = await asyncio.gather(*(pool.call_all(Ask(n=number)) for number in range(40)))
        assert [[reply.node for reply in both] for both in replies] == [[0, 1]] * 40
        assert [both[0].n for both in replies] == list(range(40))


async def test_replies_that_come_in_another_order_find_their_calls():
    held: list[Body] = []
    async with pooling(1) as (pool, port), agent(port, 0, held.append) as node:
        await pool.complete.wait()
        calls = [asyncio.create_task(pool.links[0].call(Ask(n=n))) for n in range(3)]
        await until_async(lambda: len(held) == 3)
        for message in reversed(held):
            node.client.send({"kind": "reply", "id": message["id"], "n": message["n"]})
        assert [(await call).n for call in calls] == [0, 1, 2]


async def test_replies_that_nobody_waits_for_change_nothing():
    async with pooling(1) as (pool, port), agent(port, 0) as node:
        await pool.complete.wait()
        for odd in ({"id": 999}, {"id": -1}):
            node.client.send({"kind": "reply", **odd})
        node.client.send({"kind": "progress", "ranks": []})
        assert await events_of(pool, 1) == [(0, "progress")]
        assert await pool.links[0].call(Ping()) is not None


async def test_a_reply_with_an_impossible_id_is_a_bad_message():
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    async with pooling(1) as (pool, port), agent(port, 0) as node:
        await pool.complete.wait()
        node.client.send({"kind": "reply", "id": "x"})
        assert await events_of(pool, 1) == [(0, "disconnected")]
        await asyncio.sleep(0.05)
    assert raised == []


async def test_an_agent_that_does_not_answer_is_lost():
    async with pooling(1) as (pool, port), agent(port, 0, lambda _: None):
        await pool.complete.wait()
        with pytest.raises(AgentLost, match="the agent on n0 did not answer 'ask' within 0 s"):
            await pool.links[0].call(Ask(), timeout_s=0.05)


async def test_calls_fail_at_once_when_the_agent_goes():
    async with pooling(1) as (pool, port):
        async with agent(port, 0, lambda _: None) as node:
            await pool.complete.wait()
            link = pool.links[0]
            call = asyncio.create_task(link.call(Ask(), timeout_s=30))
            await until_async(lambda: node.calls)
        with pytest.raises(AgentLost, match="has gone"):
            await call
        assert await events_of(pool, 1) == [(0, "disconnected")]
        with pytest.raises(AgentLost, match="is not connected"):
            await link.call(Ask())
        await pool.tell_all(Kill())  # none may be left


async def test_a_node_that_reconnects_takes_its_place():
    async with pooling(1) as (pool, port), agent(port, 0, lambda _: {"life": 1}):
        await pool.complete.wait()
        first = pool.links[0]
        async with agent(port, 0, lambda _: {"life": 2}):
            await until_async(lambda: pool.links[0] is not first and first.channel is None)
            assert await pool.call_all(Ask()) == [Answered(life=2)]
            assert pool.events.empty(), "the old connection's end is nobody's finding"


@pytest.mark.parametrize("hello", [{"node": 2}, {"node": -1}, {"node": "x"}, {"node": None}, {"pid": []}], ids=str)
async def test_an_agent_that_does_not_belong_is_refused(hello):
    async with pooling(2) as (pool, port), agent(port, 0):
        await until_async(lambda: pool.links)
        async with talking(port) as client:
            client.send({"kind": "hello", "node": 1, "host": "x", "pid": 1} | hello)
            assert await client.receive() is None
        assert list(pool.links) == [0]
        assert await pool.call_all(Ping()) != []


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 4096,
        b"x" * (MAX_LINE_BYTES * 2),
        b"0" * 32 + b"\n" + b"f" * 64 + b' {"kind":"hello"}\n',
    ],
    ids=["http", "zeros", "oversized", "forged"],
)
async def test_strangers_do_not_disturb_the_others(nonsense):
    async with pooling(1) as (pool, port), agent(port, 0, lambda m: {"n": m["n"]}):
        await pool.complete.wait()
        for number in range(5):
            async with stranger(port) as (reader, writer):
                with contextlib.suppress(OSError):
                    writer.write(nonsense)
                    writer.write_eof()
                with contextlib.suppress(OSError):
                    assert len(await reader.read()) <= 33
            assert (await pool.call_all(Ask(n=number)))[0].n == number
        assert pool.events.empty()


async def test_a_forged_line_ends_its_own_connection_only():
    async with pooling(2) as (pool, port), agent(port, 0), agent(port, 1) as other:
        await pool.complete.wait()
        other.client._writer.write(b"f" * 64 + b' {"kind":"exited","code":1}\n')
        assert await events_of(pool, 1) == [(1, "disconnected")]
        assert await pool.links[0].call(Ping()) is not None


async def test_of_too_many_strangers_the_oldest_goes_and_an_agent_is_let_in(monkeypatch):
    monkeypatch.setattr(agents, "STRANGERS_PER_ADDRESS", 3)
    async with pooling(2) as (pool, port), agent(port, 0), contextlib.AsyncExitStack() as stack:
        await until_async(lambda: 0 in pool.links)
        crowd = [await stack.enter_async_context(stranger(port)) for _ in range(3)]
        for reader, _ in crowd:
            assert len(await reader.readexactly(33)) == 33
        async with stranger(port) as (reader, _):
            assert len(await reader.readexactly(33)) == 33
            with contextlib.suppress(ConnectionResetError):
                assert await crowd[0][0].read() == b""
            async with agent(port, 1):
                await asyncio.wait_for(pool.complete.wait(), WAIT_S)
                assert len(await pool.call_all(Ping())) == 2
        assert pool.links[0].channel is not None
        for _, writer in crowd:
            writer.close()
        await until_async(lambda: len(pool._strangers) == 0)


async def test_closing_the_pool_ends_every_connection():
    async with contextlib.AsyncExitStack() as stack:
        async with pooling(1) as (pool, port):
            client = await stack.enter_async_context(talking(port))
            client.send({"kind": "hello", "node": 0, "host": "n0", "pid": 1})
            reader, _ = await stack.enter_async_context(stranger(port))
            await asyncio.wait_for(pool.complete.wait(), WAIT_S)
            await reader.readexactly(33)
        assert await client.receive() is None
        assert await reader.read() == b""


async def test_the_secret_is_in_no_line():
    recorder = Recorder()
    await three_messages_through(recorder)
    assert all(SECRET not in line for line in recorder.lines)
    assert json.loads(recorder.lines[1].partition(b" ")[2]) == {"kind": "m", "n": 1}, "authentic, not confidential"


# authentic and malformed: whoever knows the secret may still be broken

FACTS: Body = {
    "rank": 0, "state": 2, "attached": True, "step": 5, "until": 9, "saved": -1, "durable": -1,
    "resumed": 0, "first_step_at": 1.5,
    "answered": -1, "metric": 0.25, "first_step_s": 0.5, "longest_step_s": 0.25, "saves": 0, "save_s": 0.0,
    "saving_s": 0.0, "since_saved_s": 1.0, "save_failures": 0, "save_errno": 0, "save_cost_s": 0.0,
}  # fmt: skip
EXITED: Body = {"kind": "exited", "code": 0, "killed": False, **FACTS}


def without(message: Body, key: str) -> Body:
    return {name: value for name, value in message.items() if name != key}


GOOD_REPORTS = [
    EXITED,
    EXITED | {"code": -9, "something": "new", "longest_step_s": 1.5},
    {"kind": "progress", "ranks": [], "ready": True},
    {"kind": "progress", "ranks": [FACTS, FACTS | {"rank": 1, "metric": float("nan"), "save_s": 0}]},
    {"kind": "signal", "name": "SIGTERM", "count": 1, "at": 1.5},
    {"kind": "a kind of tomorrow", "ranks": None},
]

BAD_REPORTS = [
    {"kind": "disconnected"},
    {"kind": "hello", "node": 0, "host": "n0", "pid": 1},
    {"kind": "signal"},
    {"kind": "signal", "name": 15},
    {"kind": "signal", "name": "x" * 999},
    {"kind": "signal", "name": "a\nb"},
    {"kind": "progress"},
    {"kind": "progress", "ranks": None},
    {"kind": "progress", "ranks": {}},
    {"kind": "progress", "ranks": [None]},
    {"kind": "progress", "ranks": [[]]},
    {"kind": "exited"},
    *({"kind": "progress", "ranks": [FACTS, without(FACTS, key)]} for key in FACTS),
    *(without(EXITED, key) for key in ("code", "killed", "rank", "state")),
    *(
        EXITED | {key: value}
        for key in ("rank", "code", "step", "state")
        for value in (None, "1", 1.5, True, [1], 2**64)
    ),
    *(EXITED | {key: value} for key in ("attached", "killed") for value in (None, 1, "true")),
    EXITED | {"rank": -1},
    EXITED | {"state": 99},
    EXITED | {"code": 300},
    EXITED | {"first_step_at": float("nan")},
    EXITED | {"metric": "low"},
    EXITED | {"longest_step_s": "slow"},
    EXITED | {"save_s": float("inf")},
]

BAD_BODIES = [
    b"", b" ", b"null", b"1", b'"x"', b"[]", b"{}", b'{"kind":1}', b'{"kind":null}', b"{", b'{"kind":"a"',
    b"\xff\xfe{}", b'{"kind":"progress","ranks":' + b"[" * 100_000, b'{"kind":' * 20_000,
    b'{"kind":"signal","name":' + b"9" * 5000 + b"}",
    b'{"kind":"exited","code":1e999}', b'{"kind":"progress","ranks":[{"rank":' + b"9" * 4000 + b"}]}", b"\x00" * 200,
]  # fmt: skip


CALLS: dict[str, Call[Any]] = {"port": Port(), "look": LookNow(), "propose": Propose(tick=1, action=1)}


def write_body(client: Channel, body: bytes) -> None:
    """Any bytes, with the right proof."""
    client._writer.write(client._mac(client._mine, client._sent, body) + b" " + body + b"\n")
    client._sent += 1


async def test_well_formed_reports_are_passed_on():
    async with pooling(1) as (pool, port), agent(port, 0) as node:
        for report in GOOD_REPORTS:
            node.client.send(report)
        assert await events_of(pool, len(GOOD_REPORTS)) == [(0, report["kind"]) for report in GOOD_REPORTS]
        assert await pool.links[0].call(Ping()) is not None


@of_each(report=BAD_REPORTS)
async def test_a_malformed_report_closes_its_connection_and_goes_no_further(report):
    async with pooling(2) as (pool, port), agent(port, 0), agent(port, 1) as broken:
        await pool.complete.wait()
        broken.client.send(report)
        assert await events_of(pool, 1) == [(1, "disconnected")]
        assert pool.events.empty()
        assert await pool.links[0].call(Ping()) is not None


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("port", {}),
        ("port", {"port": "80"}),
        ("port", {"port": 0}),
        ("port", {"port": True}),
        ("look", {}),
        ("look", {"looks": 5}),
        ("look", {"looks": [5]}),
        ("look", {"looks": [[True, 1, True]]}),
        ("propose", {"looks": [[True, "1", True, 0]]}),
        ("look", {"looks": [[1, 1, True, 0]]}),
    ],
    ids=str,
)
async def test_a_malformed_reply_fails_its_call_and_closes_its_connection(kind, reply):
    async with pooling(2) as (pool, port), agent(port, 0), agent(port, 1, lambda _: reply):
        await pool.complete.wait()
        with pytest.raises(AgentLost, match="has gone"):
            await pool.links[1].call(CALLS[kind])
        assert await events_of(pool, 1) == [(1, "disconnected")]
        assert await pool.links[0].call(Ping()) is not None


@pytest.mark.parametrize(
    ("kind", "reply"),
    [("port", {"port": 1234}), ("look", {"looks": [[True, 2, True, -1]]}), ("propose", {"looks": []})],
    ids=str,
)
async def test_a_well_formed_reply_is_handed_over(kind, reply):
    async with pooling(1) as (pool, port), agent(port, 0, lambda _: reply):
        await pool.complete.wait()
        assert json.loads(encoded(await pool.links[0].call(CALLS[kind]))) == reply


HELLO: Body = {"kind": "hello", "node": 1, "host": "n1", "pid": 7}
BAD_HELLOS = [
    *(without(HELLO, key) for key in ("node", "host", "pid")),
    *(HELLO | {"node": value} for value in (-1, 2, 99, "1", 1.0, True, None, [1], 2**70)),
    *(HELLO | {"host": value} for value in ("", 5, None, "a\nb", "x" * 999)),
    *(HELLO | {"pid": value} for value in (-1, "7", None, 2**40)),
    HELLO | {"kind": "progress"},
    EXITED,
]


class Attacker:
    """One of ten thousand: its number chooses what it sends. Returns when the pool has closed its connection."""

    def __init__(self, port: int, recorded: list[bytes]) -> None:
        self.port, self.recorded = port, recorded
        self.kinds = [self.a_stranger, self.a_wrong_secret, self.a_replay, self.authentic_nonsense, self.a_bad_hello,
                      self.a_bad_report]  # fmt: skip

    async def attack(self, number: int) -> None:
        await self.kinds[number % len(self.kinds)](number // len(self.kinds))

    async def a_stranger(self, number: int) -> None:
        lines = [b"GET / HTTP/1.1\r\n\r\n", b"", b"\n", b"\x00" * 99 + b"\n", b"0" * 31 + b"\n", b"0" * 33 + b"\n",
                 b"0" * 32 + b"\n", b"0" * 32 + b"\n" + b"f" * 64 + b' {"kind":"hello"}\n', b"0" * 32 + b"\n \n",
                 b"0" * 32 + b"\n" + b"f" * 64, b"x" * (MAX_LINE_BYTES + 9), "é".encode() * 16 + b"\nx\n"]  # fmt: skip
        line = lines[number % len(lines)]
        await self.raw(line if number % 40 == 10 or len(line) < 1000 else b"x\n")

    async def a_wrong_secret(self, number: int) -> None:
        await self.signed([HELLO], secret=secrets.token_bytes(number % 64))

    async def a_replay(self, number: int) -> None:
        await self.raw(b"".join(self.recorded[: 1 + number % len(self.recorded)]))

    async def authentic_nonsense(self, number: int) -> None:
        await self.signed([BAD_BODIES[number % len(BAD_BODIES)]])

    async def a_bad_hello(self, number: int) -> None:
        await self.signed([BAD_HELLOS[number % len(BAD_HELLOS)]])

    async def a_bad_report(self, number: int) -> None:
        """From an agent that belongs to the run: node 1."""
        bad = [
            *BAD_REPORTS,
            *BAD_BODIES,
            {"kind": "reply"},
            {"kind": "reply", "id": "1"},
            {"kind": "reply", "id": True},
        ]
        await self.signed([HELLO, bad[number % len(bad)]])

    async def raw(self, content: bytes) -> None:
        async with stranger(self.port) as (reader, writer):
            with contextlib.suppress(OSError):
                writer.write(content)
                writer.write_eof()
            with contextlib.suppress(OSError):
                assert len(await reader.read()) in (0, 33)

    async def signed(self, messages: list[Body | bytes], secret: bytes = SECRET) -> None:
        async with talking(self.port, secret) as client:
            for message in messages:
                write_body(client, message if isinstance(message, bytes) else json.dumps(message).encode())
            with contextlib.suppress(BadMessage):
                assert await client.receive() is None


class Told(logging.Handler):
    """Counts what is logged of refused connections."""

    refusals = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.refusals += record.getMessage().startswith("refused a connection")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_ten_thousand_malformed_messages_close_only_their_own_connections(monkeypatch):
    """Beside them a node goes on answering; nothing of them reaches the supervisor, and nothing is left of them."""
    attackers, rounds = 10_000, 12
    told = Told()
    monkeypatch.setattr(agents.log, "propagate", False)  # the records that pytest keeps would count as a leak of ours
    monkeypatch.setattr(agents.log, "handlers", [told])
    recorder = Recorder()
    await three_messages_through(recorder)
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    async with pooling(2) as (pool, port), agent(port, 0, lambda m: {"n": m["n"]}):
        await until_async(lambda: pool.links)
        steady, attacker = pool.links[0], Attacker(port, recorder.lines)
        answers, others, before = 0, set(), (0, 0, 0)

        async def crowd(first: int) -> None:
            for number in range(first, attackers, rounds):
                await attacker.attack(number)
                if number == attackers // 2:
                    nonlocal before
                    before = (open_files(), len(asyncio.all_tasks()), resident_bytes())

        async def ask() -> None:
            nonlocal answers
            while True:
                assert (await steady.call(Ask(n=answers), timeout_s=WAIT_S)).n == answers
                answers += 1
                while not pool.events.empty():
                    link, report = pool.events.get_nowait()
                    others.add((link.node, report.kind))
                await asyncio.sleep(0.002)

        asking = asyncio.create_task(ask())
        await asyncio.gather(*(crowd(first) for first in range(rounds)))
        await until_async(lambda: len(pool._tasks) == 1)
        assert not asking.done() and answers > 100
        asking.cancel()
        assert others == {(1, "disconnected")}
        assert pool.links[0] is steady and steady.channel is not None
        assert set(pool.links) == {0, 1} and pool.links[1].channel is None
        assert len(pool._strangers) == 0
        assert raised == []
        assert open_files() <= before[0] and len(asyncio.all_tasks()) <= before[1]
        assert resident_bytes() - before[2] < 8 * 1024 * 1024
        assert pool._refused > 5000
        assert told.refusals < 30, "a stranger could fill the disk"
