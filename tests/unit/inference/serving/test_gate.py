"""The gate of a replica lets in who holds the run's key, by every address, and nobody else."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import pytest
from serving_world import KEY, answers, serving
from waiting import until_async

from slurmft.inference.gate import CONTROL, REQUESTS, STRANGERS_PER_ADDRESS, Gate, NotTheGate, knock, unix_connection
from slurmft.system.files import NONCE_BYTES, TAG_BYTES


async def end(writer: asyncio.StreamWriter) -> None:
    """Close a connection that may have been reset."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def refuse(_protocol: object) -> None:
    raise ConnectionRefusedError


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
async def test_one_port_answers_on_every_address(host: str | None) -> None:
    gate = Gate(KEY, refuse)
    port = await gate.listen(host)
    for address in ("127.0.0.1", "localhost"):
        connection = await knock(address, port, KEY, CONTROL)
        reader, writer = await asyncio.open_connection(sock=connection)
        assert json.loads(await reader.readline()) == {"phase": "ready", "in_flight": 0, "crashed": False,
                                                       "suspected": False, "turn": 0, "kept": 0}  # fmt: skip
        await end(writer)
    gate.close()


async def test_routers_have_the_engine_for_one_request_alone_in_turn_and_when_all_others_have_said_so() -> None:
    gate = Gate(KEY, refuse)
    port, said = await gate.listen("127.0.0.1"), dict[str, asyncio.StreamWriter]()
    heard: dict[str, dict[str, int]] = {name: {} for name in "abc"}

    async def listen(name: str) -> None:
        connection = await knock("127.0.0.1", port, KEY, CONTROL)
        reader, said[name] = await asyncio.open_connection(sock=connection)
        while line := await reader.readline():
            heard[name] = json.loads(line)

    def say(name: str, **told: int) -> None:
        said[name].write(json.dumps({"begun": 0, "done": 0, **told}).encode() + b"\n")

    async def until_has_turn(name: str, turn: int) -> None:
        await until_async(lambda: heard[name]["turn"] == turn)
        assert [heard[other]["turn"] for other in "abc" if other != name] == [0, 0]

    listening = [asyncio.create_task(listen(name)) for name in "abc"]
    await until_async(lambda: all(heard.values()))
    say("a", turn=7)
    await until_async(lambda: all(each["kept"] for each in heard.values()))
    first = heard["a"]["kept"]
    say("b", yields=first, begun=1)
    await until_async(lambda: heard["a"]["in_flight"] == 1)
    assert heard["a"]["turn"] == 0, "one has not said yet what it had begun before"
    say("c", yields=first)
    await until_has_turn("a", 7)
    say("b", yields=first, begun=1, done=1, turn=8)
    say("a", yields=first, turn=9)  # its next one is behind that of the other
    await until_has_turn("b", 8)
    await end(said["b"])
    await until_async(lambda: heard["a"]["turn"] == 9)
    say("a")
    await until_async(lambda: heard["c"]["kept"] == 0)
    say("a", turn=10)
    await until_async(lambda: heard["c"]["kept"] > first)
    say("c", yields=first)
    await until_async(lambda: heard["a"]["kept"] > first)
    assert heard["a"]["turn"] == 0, "that was said of another time"
    say("c", yields=heard["c"]["kept"])
    await until_async(lambda: heard["a"]["turn"] == 10)
    for name in "ac":
        await end(said[name])
    gate.close()
    await asyncio.gather(*listening, return_exceptions=True)


@pytest.mark.parametrize(
    "say", [b"", b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n" + b" " * 100, b"\x00" * 65, b"r" * 500]
)
async def test_who_does_not_hold_the_key_gets_a_nonce_and_nothing_else(say: bytes) -> None:
    async with serving({"a": answers("a")}) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world["a"].port)
        writer.write(say)
        writer.write_eof()
        found = b""
        with contextlib.suppress(ConnectionError):
            found = await asyncio.wait_for(reader.read(), 10)
        assert len(found) in (0, NONCE_BYTES)  # a reset may overtake it
        assert world["a"].seen == []
        await end(writer)


async def test_a_wrong_key_is_refused_by_both_sides() -> None:
    async with serving({"a": answers("a")}) as world:
        with pytest.raises(OSError):
            await knock("127.0.0.1", world["a"].port, b"another" * 8, REQUESTS)

    ended = asyncio.Event()

    async def pose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"n" * NONCE_BYTES + b"t" * TAG_BYTES)
        await reader.read()
        await end(writer)
        ended.set()

    async with await asyncio.start_server(pose, "127.0.0.1", 0) as poser:
        with pytest.raises(NotTheGate):
            await knock("127.0.0.1", poser.sockets[0].getsockname()[1], KEY, REQUESTS)
        await ended.wait()


async def test_strangers_do_not_keep_routers_out() -> None:
    async with serving({"a": answers("a")}) as world:
        gate = world["a"].gate
        assert gate is not None
        place = "127.0.0.1", world["a"].port
        strangers = [await asyncio.open_connection(*place) for _ in range(STRANGERS_PER_ADDRESS + 9)]
        await until_async(lambda: len(gate.strangers) == STRANGERS_PER_ADDRESS)
        assert await world.ask() == (200, {"by": "a"})
        await asyncio.gather(*(end(writer) for _, writer in strangers))
        await until_async(lambda: not gate.strangers)


async def test_requests_are_counted_once_also_those_of_a_router_that_is_gone() -> None:
    gate = Gate(KEY, refuse)
    port = await gate.listen("127.0.0.1")
    reader, writer = await asyncio.open_connection(sock=await knock("127.0.0.1", port, KEY, CONTROL))
    writer.write(b'{"begun": 5, "done": 2}\n')
    while gate.in_flight != 3:
        await reader.readline()
    assert gate.ended == 2
    writer.write(b'{"begun": 6, "done": 2}\n')
    while gate.in_flight != 4:
        await reader.readline()
    await end(writer)
    async with asyncio.timeout(10):
        while gate.in_flight:
            await asyncio.sleep(0.01)
    assert gate.ended == 6
    gate.close()


@pytest.mark.parametrize("by", ["a value", "a key"])
async def test_a_router_may_name_any_model_and_is_hung_up_on_where_it_makes_no_sense(by: str) -> None:
    """Clients choose the names: one that no encoding knows must not cost a router its replicas."""
    gate = Gate(KEY, refuse)
    port = await gate.listen("127.0.0.1")
    _, writer = await asyncio.open_connection(sock=await knock("127.0.0.1", port, KEY, CONTROL))
    writer.write(b'{"begun": 3, "done": 1, "outcomes": [1, 0], "proof": ["/v1/x", "\\ud800", true]}\n')
    await until_async(lambda: gate.in_flight == 2)
    assert gate.outcomes == (1, 0)
    assert gate.proof(is_answered=True) == {"id": "proof", "url": "/v1/x", "body": {"model": "\ud800"}}
    writer.write(b'{"begun": 3, "done": 2}\n')
    await until_async(lambda: gate.in_flight == 1)
    assert gate.proof(is_answered=True) is not None, "the newest word has none"
    writer.write(b'{"begun": "4", "done": 2}\n' if by == "a value" else b'{"begun": 3, "done": 2, "\\udcff": 1}\n')
    await until_async(lambda: gate.ended == 3)
    await end(writer)
    gate.close()


async def test_a_router_that_falls_silent_has_nothing_in_flight_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the replica would be taken for one that hangs: the connection of a dead node does not end by itself."""
    monkeypatch.setattr("slurmft.inference.gate.SILENT_S", 1.0)
    gate = Gate(KEY, refuse)
    port = await gate.listen("127.0.0.1")
    reader, writer = await asyncio.open_connection(sock=await knock("127.0.0.1", port, KEY, CONTROL))
    writer.write(b'{"begun": 5, "done": 0}\n')
    while gate.in_flight != 5:
        await reader.readline()
    async with asyncio.timeout(10):
        while gate.in_flight:
            await asyncio.sleep(0.01)
    assert gate.ended == 5
    await end(writer)
    gate.close()


async def test_a_router_that_waits_for_a_long_answer_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmft.inference.gate.SILENT_S", 1.0)
    async with serving({"a": answers("a", delay_s=2.5)}) as world:
        gate = world["a"].gate
        assert gate is not None
        asked = asyncio.create_task(world.ask())
        await until_async(lambda: gate.in_flight == 1)
        assert await asked == (200, {"by": "a"})
        assert gate.in_flight + gate.ended == 1


async def test_more_connections_than_an_engine_takes_at_once_wait(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        listening.setblocking(False)
        asking = [asyncio.create_task(unix_connection(path)) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert 0 < sum(each.done() for each in asking) < 8, "its queue is full"
        taken = [await asyncio.get_running_loop().sock_accept(listening) for _ in asking]
        connections = await asyncio.gather(*asking)
        for each in connections:
            each.sendall(b"x")  # asyncio's own would be said to be connected, and are not
        for (each, _), own in zip(taken, connections, strict=True):
            assert await asyncio.get_running_loop().sock_recv(each, 1) == b"x"
            each.close()
            own.close()
    with pytest.raises(ConnectionRefusedError):
        await unix_connection(path)
