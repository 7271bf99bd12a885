"""The forwarder: one address before routers that come and go, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slurmft.inference.endpoint import HighAvailabilityCluster, RouterAddress
from slurmft.operations.forwarding import Forwarder


async def router(name: str) -> asyncio.Server:
    """Answers each line with its name, and says nothing to a line of "wait"."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line != b"wait\n":
                writer.write(name.encode() + b" " + line)
        writer.close()

    return await asyncio.start_server(take, "127.0.0.1", 0)


def publish(folder: Path, *servers: asyncio.Server) -> None:
    found = [RouterAddress(number, f"n{number}", ("127.0.0.1",), server.sockets[0].getsockname()[1])
             for number, server in enumerate(servers)]  # fmt: skip
    HighAvailabilityCluster(tuple(found)).write(folder)


@asynccontextmanager
async def forwarding(folder: Path) -> AsyncIterator[int]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(Forwarder(folder).serve(0, port.set_result))
    try:
        yield await port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # the ends of connections
            await asyncio.wait([task], timeout=5)


async def ask(port: int, line: bytes = b"hi\n") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(line)
        return await asyncio.wait_for(reader.readline(), 20)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_connections_go_to_routers_that_live_and_wait_while_there_is_none(tmp_path: Path) -> None:
    a, b = await router("a"), await router("b")
    publish(tmp_path, a, b)
    async with forwarding(tmp_path) as port:
        assert {await ask(port) for _ in range(4)} == {b"a hi\n", b"b hi\n"}
        a.close()  # and is still named, as one on a node that has lost its power
        assert [await ask(port) for _ in range(4)] == [b"b hi\n"] * 4
        b.close()
        publish(tmp_path)
        waiting = asyncio.ensure_future(ask(port))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        c = await router("c")
        publish(tmp_path, c)
        assert await waiting == b"c hi\n"
        c.close()


async def test_an_end_of_either_side_is_passed_on_at_once(tmp_path: Path) -> None:
    ends: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line == b"cut\n":
            writer.transport.abort()
        else:
            ends.put_nowait(await reader.read())
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    publish(tmp_path, server)
    async with forwarding(tmp_path) as port:
        assert await ask(port, b"cut\n") == b""
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"stay\n")
        await writer.drain()
        writer.close()
        assert await asyncio.wait_for(ends.get(), 10) == b""
    server.close()
