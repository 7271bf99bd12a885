"""What a hostile client, or an engine that breaks the rules of HTTP, cannot do to others."""

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import Callable

import aiohttp
import pytest
from serving_world import KEY, TOKEN, Engine, Handle, World, answers, serving, streams
from waiting import until_async

from slurmft.inference.gate import Gate
from slurmft.policy.values import Strangers

SHOWN = f"Host: h\r\nAuthorization: Bearer {TOKEN}\r\n"
GET, POST = f"GET /v1/x HTTP/1.1\r\n{SHOWN}", f"POST /v1/x HTTP/1.1\r\n{SHOWN}"
SMUGGLED = f"GET /smuggled HTTP/1.1\r\n{SHOWN}\r\n"


async def said(world: World, text: str, *, later: str = "") -> bytes:
    """All that the router answers, until it closes the connection or nothing more comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    answer = b""
    writer.write(text.encode("latin-1"))
    if later:
        await asyncio.sleep(0.1)
        writer.write(later.encode("latin-1"))
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(0.5):
            while part := await reader.read(1 << 16):
                answer += part
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (POST + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
        (POST + "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
        (POST + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (POST + "Content-Length: +2\r\n\r\n{}", 400),
        (POST + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
        (POST + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
        (POST + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST.replace("1.1", "1.0") + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
        (GET.replace("\r\n", "\n") + "\n", 400),
        (GET + "X: a\nY: b\r\n\r\n", 400),
        (GET + "X: a\rY: b\r\n\r\n", 400),
        (GET + "X: a\r\n b\r\n\r\n", 400),
        (GET + "X: a\0b\r\n\r\n", 400),
        (POST + "Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n", 400),
        (GET + "Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + SMUGGLED, 501),
        (f"CONNECT h:80 HTTP/1.1\r\n{SHOWN}\r\n" + SMUGGLED, 400),
    ],
)  # fmt: skip
async def test_nothing_is_smuggled_and_no_error_repeats_what_came(text: str, status: int) -> None:
    async with serving({"a": answers("a")}) as world:
        answer = await said(world, text)
        assert answer.split(b" ", 2)[1] == str(status).encode(), answer
        assert answer.count(b"HTTP/1.") == 1 and TOKEN[:8].encode() not in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status
        assert world["a"].seen == []


async def test_a_body_that_turns_out_to_be_none_is_refused_and_its_place_is_free() -> None:
    async with serving({"a": answers("a")}, {"client_timeout_s": 0.2}) as world:
        half = POST + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
        answer = await said(world, half, later="zz\r\n" + SMUGGLED)
        assert answer.split(b" ", 2)[1] in (b"400", b"408") and answer.count(b"HTTP/1.") == 1, answer
        assert TOKEN[:8].encode() not in answer and world["a"].seen == []
        await until_async(lambda: world.router.in_flight == 0)


@pytest.mark.parametrize("engine", [answers("a"), streams([b"data: 1\n\n"])])
@pytest.mark.parametrize("is_later", [True, False])
async def test_trailers_are_no_headers_of_the_next_request(engine: Handle, is_later: bool) -> None:
    async with serving({"a": engine}) as world:
        trailer = f"Authorization: Bearer {TOKEN}\r\n\r\n"
        first = POST + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailer
        following = "GET /v1/y HTTP/1.1\r\nHost: h\r\n\r\n"
        later = following if is_later else ""
        answer = await said(world, first if is_later else first + following, later=later)
        assert answer.count(b"HTTP/1.1 200") == answer.count(b"Connection: close") == 1, answer
        assert world["a"].seen == ["/v1/x"]


async def test_a_client_of_http_1_0_sees_where_its_answer_ends() -> None:
    async with serving({"a": streams([b"data: 1\n\n"])}) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        keep = "Connection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"
        writer.write((POST.replace("1.1", "1.0") + keep).encode())
        answer = await asyncio.wait_for(reader.read(), 10)  # until the end of the connection
        assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"\r\n\r\ndata: 1\n\n")
        writer.close()


async def test_strangers_that_hold_connections_open_do_not_keep_clients_out() -> None:
    async with serving({"a": answers("a", delay_s=0.5)}) as world:
        world.server.strangers = Strangers(5, 5)
        asked = asyncio.create_task(world.ask())
        await until_async(lambda: len(world["a"].seen) == 1)
        strangers = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(20)]
        await until_async(lambda: len(world.server.strangers) == 5)
        assert await asked == (200, {"by": "a"}), "a client whose request waits is no stranger"
        ended = [reader for reader, _ in strangers if reader.at_eof() or reader.exception() is not None]
        assert len(ended) == 15
        assert await world.ask() == (200, {"by": "a"})
        for _, writer in strangers:
            writer.close()
        await until_async(lambda: not world.server.strangers)


async def test_strangers_of_one_address_do_not_close_those_of_another() -> None:
    async with serving({"a": answers("a")}) as world:
        world.server.strangers = Strangers(8, 4)
        slow = await asyncio.open_connection("127.0.0.1", world.port, local_addr=("127.0.0.3", 0))
        await until_async(lambda: len(world.server.strangers) == 1)
        others = [
            await asyncio.open_connection("127.0.0.1", world.port, local_addr=("127.0.0.2", 0)) for _ in range(40)
        ]
        await until_async(lambda: len(world.server.strangers) == 5)
        slow[1].write((GET + "\r\n").encode())
        assert (await asyncio.wait_for(slow[0].readline(), 10)).startswith(b"HTTP/1.1 200")
        for _, writer in [slow, *others]:
            writer.close()


async def test_a_low_limit_of_descriptors_keeps_no_client_out() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        async with serving({"a": answers("a")}) as world:
            silent = [socket.socket() for _ in range(300)]  # made before, as the limit is that of clients as well here
            highest = max(each.fileno() for each in silent)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 30, limits[1]))
            world.server.strangers = Strangers(10, 10)
            for each in silent:
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", world.port))
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(OSError, aiohttp.ClientError):
                        if await world.ask() == (200, {"by": "a"}):
                            break
                    await asyncio.sleep(0)
            for each in silent:
                each.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# Engines

RIGHT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class RawEngine(Engine):
    """One that writes what a test says as the answer to ``/bad``, in pieces, and right answers to all else."""

    bad: tuple[bytes, ...] = ()

    async def start(self) -> None:
        self.loop, self.transports = asyncio.get_running_loop(), list[asyncio.Transport]()
        self.server = await self.loop.create_server(lambda: _Speaker(self), "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]

        async def connect(protocol: Callable[[], asyncio.Protocol]) -> None:
            await self.loop.create_connection(protocol, "127.0.0.1", port)

        self.gate = Gate(KEY, connect)
        self.port = await self.gate.listen("127.0.0.1")

    async def close(self) -> None:
        assert self.gate is not None
        self.gate.close()
        self.server.close()
        for transport in self.transports:
            transport.abort()
        await asyncio.sleep(0.05)  # for the other ends of these connections


class _Speaker(asyncio.Protocol):
    def __init__(self, engine: RawEngine) -> None:
        self.engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.engine.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        for number, part in enumerate(self.engine.bad if b" /bad " in data else (RIGHT,)):
            self.engine.loop.call_later(0.02 * number, self.transport.write, part)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ((RIGHT + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL",), 200),
        ((RIGHT, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"), 200),
        ((RIGHT, b"EVIL"), 200),
        ((b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + RIGHT,), 200),
        ((b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nEVIL",), 502),
        ((b"HTTP/1.1 042 X\r\nContent-Length: 2\r\n\r\n{}",), 502),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} EVIL",), 502),
        ((b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\n{}",), 502),
        ((b"HTTP/1.1 200 OK\r\nX: a\0b\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",), 502),
        ((b"HTTP/1.1 204 No Content\r\n\r\n", b"EVIL HTTP/1.1 200 OK\r\n\r\n"), 204),
        ((b"\x00 garbage\r\n\r\n",), 502),
    ],
)  # fmt: skip
async def test_what_an_engine_says_beyond_an_answer_reaches_no_other_client(
    bad: tuple[bytes, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving_world.Engine", RawEngine)
    monkeypatch.setattr(RawEngine, "bad", bad)
    async with serving({"a": answers("unused")}, max_retries=0) as world:
        for _ in range(3):
            async with world.client.get("/bad") as answer:
                assert answer.status == status
                assert b"EVIL" not in await answer.read()
            await asyncio.sleep(0.05)
            async with world.client.get("/good") as answer:
                assert (answer.status, await answer.read()) == (200, b"{}")


@pytest.mark.parametrize("length", [b"Content-Length: 777\r\n", b"Content-Length: 7777777\r\n", b""])
async def test_head_has_the_length_of_the_engine_and_a_body_sent_all_the_same_is_dropped(
    length: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving_world.Engine", RawEngine)
    monkeypatch.setattr(RawEngine, "bad", (b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", b"HTTP/1.1 200 EVIL"))
    async with serving({"a": answers("unused")}) as world:
        for _ in range(3):
            async with world.client.head("/bad") as answer:
                given = f"Content-Length: {answer.headers['Content-Length']}\r\n" if length else ""
                assert (answer.status, given.encode()) == (200, length)
            async with world.client.get("/good") as answer:
                assert (answer.status, await answer.read()) == (200, b"{}")
