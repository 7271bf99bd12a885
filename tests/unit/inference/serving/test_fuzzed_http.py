"""Garbage on the router's port: no crash, no leak from one request into the answer to another, no place lost."""

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from serving_world import TOKEN, World, run, serving
from waiting import until_async

SEED = int(os.environ.get("SLURMFT_FUZZ_HTTP", "19"))
AT_ONCE, PATIENCE_S = 50, 0.3

HEADERS = [
    "Host: h", f"Authorization: Bearer {TOKEN}", "Authorization: Bearer no", "Content-Length: 5", "Content-Length: -1",
    "Content-Length: 99999999999999999999", "Content-Length: 5, 6", "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked, identity", "Transfer-Encoding : chunked", "Connection: close", "Connection: upgrade",
    "Upgrade: websocket", "Expect: 100-continue", "Expect: nothing", "X-Request-Timeout: nan", "X-Priority: low",
    "Content-Encoding: gzip", " folded", "No colon", "X-\x00: a", "X: \xff\xfe", "Accept-Encoding: br", "TE: trailers",
    "X-Long: " + "x" * 9000, ":", "Cookie: a=b", "Range: bytes=0-1", "Host: evil",
]  # fmt: skip
METHODS = [
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "HEAD",
    "CONNECT",
    "TRACE",
    "get",
    "PRI",
    "M-SEARCH",
    "\x00",
    "G ET",
]
PATHS = ["/v1/x", "/", "*", "http://h/x", "//x", "/x?" + "y" * 9000, "/%", "/%zz", "/\xff", "/a b", "/sleep", "/status",
         "/metrics", "/..", "/x#f", "h:80", "", "/x%00", "/" + "a/" * 500]  # fmt: skip
BODIES = [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"ffffffffffffffff\r\n",
          b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n", b"\x00" * 100, b"{" * 1000]  # fmt: skip


def garbage(chance: random.Random) -> bytes:
    """One input: a request with wrong parts, or with bytes changed, doubled, cut or put in."""

    def mostly(right: str, others: list[str]) -> str:
        return right if chance.random() < 0.8 else chance.choice(others)

    version = mostly("HTTP/1.1", ["HTTP/1.0", "HTTP/2.0", "HTTP/1", "HTTP/9.9", ""])
    path = mostly(f"/v1/x?{chance.randrange(99)}", PATHS)
    headers = chance.sample(HEADERS, chance.choice([0, 0, 1, 2, 5]))
    headers += [each for each in ("Host: h", f"Authorization: Bearer {TOKEN}") if chance.random() < 0.9]
    chance.shuffle(headers)
    body = b"" if chance.random() < 0.5 else chance.choice(BODIES)
    if body and chance.random() < 0.5:
        headers.append(f"Content-Length: {len(body)}")
    lines = [f"{mostly(chance.choice(METHODS[:5]), METHODS)} {path} {version}", *headers, "", ""]
    text = bytearray("\r\n".join(lines).encode("latin-1") + body)
    for _ in range(chance.choice([0, 0, 0, 0, 1, 3])):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                text[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 5)))
            case 2:
                del text[at : at + chance.randint(1, 20)]
            case _:
                text[at:at] = text[max(0, at - 20) : at]
    return bytes(text)


async def echo(request: web.BaseRequest) -> web.Response:
    """The path alone: whatever else came must not show up in another one's answer."""
    await request.read()
    return web.json_response({"path": request.raw_path})


async def throw(world: World, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    answer = b""
    try:
        writer.write(content)
        async with asyncio.timeout(PATIENCE_S):  # part of a request has no answer, and a whole one keeps the connection
            while part := await reader.read(1 << 16):
                answer += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_no_input_breaks_the_router_or_leaks_into_another_answer(count: int, caplog: pytest.LogCaptureFixture) -> None:
    chance, seen = random.Random(SEED), Counter[str]()

    async def work() -> None:
        troubles: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        async with serving({"a": echo}, {"client_timeout_s": 2.0}, concurrency=200) as world:
            for first in range(0, count, AT_ONCE):
                inputs = [garbage(chance) for _ in range(min(AT_ONCE, count - first))]
                mine = [f"/mine/{first}-{number}" for number in range(5)]
                answers, own = await asyncio.gather(
                    asyncio.gather(*(throw(world, each) for each in inputs)),
                    asyncio.gather(*(world.ask(path) for path in mine)),
                )
                for content, answer in zip(inputs, answers, strict=True):
                    assert answer == b"" or answer.startswith(b"HTTP/"), (SEED, content, answer)
                    assert b"/mine/" not in answer, (SEED, content, answer)
                    assert b" 500 " not in answer.partition(b"\r\n")[0], (SEED, content, answer)
                    seen[answer.split(b" ", 2)[1][:1].decode() if answer else "none"] += 1
                assert own == [(200, {"path": path}) for path in mine], SEED
            await until_async(lambda: world.router.in_flight == 0 and world.router.waiting == 0, 20)
            # the gate says a moment later what it has of all routers
            await until_async(lambda: world.router.replicas.by_name["a"].in_flight == 0)
            assert world.router.replicas.by_name["a"].breaker.failures == 0, "no client makes a replica look sick"
            assert "/smuggled" not in json.dumps(world["a"].seen)
            assert troubles == []

    run(work(), within_s=600)
    assert min(seen["2"], seen["4"]) > count / 10, f"both sides of the parser are reached: {seen}"
    assert TOKEN[:10] not in caplog.text, "what clients send by mistake is in no log"
