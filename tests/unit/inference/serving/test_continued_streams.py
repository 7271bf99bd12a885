"""Streams whose engines or routers die go on elsewhere: the client sees the one that a calm engine would have sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from serving_world import TOKEN, Handle, World, run, serving
from waiting import until_async
from word_engine import WordEngine, next_token, prompt_of

from slurmft.inference import Client
from slurmft.inference.serving.listener import RouterServer
from slurmft.inference.serving.router import Router
from slurmft.policy.inference.kept_streams import KeptStreams

STREAMS = 50
BEGUN = 25
"""Tokens after which a client has got some, also on a busy machine."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALWAYS = {"command": ["engine", "{socket}"], "continue_from_prefix": "always"}


def words(made: Counter[str], *, pause_s: float = 0.003) -> Handle:
    """The word engine, without a server of its own."""

    def on_token(digest: str) -> None:
        made[digest] += 1

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await WordEngine(pause_s, on_token).complete(request)

    return handle


def asked(path: str, number: int, **keys: Any) -> dict[str, Any]:
    """A request for a stream."""
    prompt = (
        {"messages": [{"role": "user", "content": f"tell {number}"}]} if path == CHAT else {"prompt": f"p {number}"}
    )
    return {"model": "words", "max_tokens": 40 + number, "stream": True, **prompt, **keys}


def right(path: str, body: dict[str, Any]) -> str:
    context = prompt = prompt_of(path, body)
    for _ in range(body["max_tokens"]):
        if (token := next_token(context)) is None:
            break
        context += token
    return context.removeprefix(prompt)


async def streamed(world: World, path: str, body: dict[str, Any]) -> bytes:
    async with world.client.post(path, json=body) as answer:
        assert answer.status == 200
        return await answer.read()


def told(content: bytes) -> list[dict[str, Any]]:
    """The objects of a stream that ends as it should."""
    *events, last, rest = content.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", ""), content[-300:]
    return [json.loads(each.removeprefix("data: ")) for each in events]


def text_in(path: str, content: bytes) -> str:
    choices = [each["choices"][0] for each in told(content) if each["choices"]]
    return "".join(each["text"] if path == TEXT else each["delta"].get("content", "") for each in choices)


def error_in(content: bytes) -> str:
    last = content.decode().rstrip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: "), last
    return str(json.loads(last.partition("data: ")[2])["error"]["message"])


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_fifty_streams_are_those_of_a_calm_engine_byte_by_byte_when_one_dies_in_their_midst(path: str) -> None:
    async def work() -> None:
        bodies = [asked(path, number) for number in range(STREAMS)]
        calm: Counter[str] = Counter()
        async with serving({"a": words(calm)}, engine=ALWAYS, concurrency=64) as world:
            whole = await asyncio.gather(*(streamed(world, path, body) for body in bodies))
        assert [text_in(path, each) for each in whole] == [right(path, body) for body in bodies]
        made: Counter[str] = Counter()
        engines = {name: words(made) for name in "abc"}
        async with serving(engines, engine=ALWAYS, concurrency=64) as world:
            asking = [asyncio.create_task(streamed(world, path, body)) for body in bodies]
            await until_async(lambda: sum(made.values()) > 500)
            await world["a"].die()
            await until_async(lambda: sum(made.values()) > 1200)
            await world["b"].die()
            found = await asyncio.gather(*asking)
            assert len(world["c"].seen) > STREAMS // 2, "streams went on there"
        assert found == whole
        # beginning each text anew would cost some 750; what is on its way at a death depends on the machine
        assert sum(made.values()) <= sum(calm.values()) + 10 * STREAMS, "only what was on its way was made again"

    run(work())


@pytest.mark.parametrize("after", [0, 1, 7, 39, 40], ids=lambda after: f"after-{after}")
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_goes_on_from_any_token(path: str, options: dict[str, Any] | None, after: int) -> None:
    """Also from none, and where only its end is missing."""

    def dies(made: list[str]) -> Handle:
        def on_token(digest: str) -> None:
            made.append(digest)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            engine = WordEngine(0.001, on_token, events=after if "b" not in who else None)
            who.append("b")
            return await engine.complete(request)

        return handle

    async def work() -> None:
        nonlocal who
        body = asked(path, 0, **({"stream_options": options} if options else {}))
        who = ["b"]
        async with serving({"a": dies([])}, engine=ALWAYS) as world:
            calm = await streamed(world, path, body)
        who = []
        made: list[str] = []
        async with serving({"a": dies(made), "b": dies(made)}, engine=ALWAYS) as world:
            found = await streamed(world, path, body)
        assert text_in(path, found) == right(path, body)
        assert [each.get("usage") for each in told(found)][-1] == [each.get("usage") for each in told(calm)][-1]
        assert told(found) == told(calm)
        assert len(made) <= len(right(path, body)), made

    who: list[str] = []
    run(work())


@pytest.mark.parametrize(
    "keys",
    [{"n": 2}, {"logprobs": 1}, {"tools": [{}]}, {"seed": 1, "temperature": 0.7}, {"presence_penalty": 0.5},
     {"max_tokens": None}, {"response_format": {"type": "json_object"}}],
    ids=lambda keys: next(iter(keys)),
)  # fmt: skip
def test_what_cannot_be_continued_ends_with_an_error_event(keys: dict[str, Any]) -> None:
    async def work() -> None:
        made: Counter[str] = Counter()
        async with serving({"a": words(made), "b": words(made)}, engine=ALWAYS) as world:
            asking = asyncio.create_task(streamed(world, TEXT, {**asked(TEXT, 174), **keys}))
            await until_async(lambda: sum(made.values()) > BEGUN)
            await world["a"].die()
            assert "a request like this is not continued" in error_in(await asking)
            assert world["b"].seen == []

    run(work())


@pytest.mark.parametrize(("setting", "path"), [("never", TEXT), ("auto", TEXT), ("auto", CHAT)])
def test_an_engine_of_which_it_is_not_known_is_not_asked_to_go_on(setting: str, path: str) -> None:
    async def work() -> None:
        made: Counter[str] = Counter()
        engine = {**ALWAYS, "continue_from_prefix": setting}
        async with serving({"a": words(made), "b": words(made)}, engine=engine) as world:
            asking = asyncio.create_task(streamed(world, path, asked(path, 174)))
            await until_async(lambda: sum(made.values()) > BEGUN)
            await world["a"].die()
            assert "its replica is gone" in error_in(await asking)

    run(work())


def test_a_stop_string_with_a_half_on_each_side_of_the_seam_ends_the_stream() -> None:
    """An engine that holds nothing back has sent its first half before it died."""
    body = asked(TEXT, 3)
    text, context, tokens = right(TEXT, body), prompt_of(TEXT, body), []
    while len(tokens) < 20:
        tokens.append(next_token(context) or "")
        context += tokens[-1]
    seen = "".join(tokens[:10])
    stop = seen[-2:] + tokens[10][:2]
    assert stop not in seen and stop in text

    async def work() -> None:
        who: list[int] = []

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            who.append(1)
            return await WordEngine(0.001, lambda _: None, events=10 if len(who) == 1 else None).complete(request)

        async with serving({"a": handle, "b": handle}, engine=ALWAYS) as world:
            found = await streamed(world, TEXT, {**body, "stop": [stop, "never"]})
        assert text_in(TEXT, found) == seen
        assert told(found)[-1]["choices"][0]["finish_reason"] == "stop"

    run(work())


def test_blanks_that_a_chat_template_takes_away_come_once() -> None:
    pieces = ["one", " two", "\n\n", "three", " ", " ", "four"]

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        has = messages[-1]["content"].strip() if messages[-1]["role"] == "assistant" else ""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        left = list(pieces)
        while has.strip():
            has = has.removeprefix(left.pop(0))
        for number, piece in enumerate(left):
            if number == 3:  # ends in order, but without an end
                return answer
            await answer.write(_chunk(piece, None))
        await answer.write(_chunk("", "stop") + b"data: [DONE]\n\n")
        return answer

    async def work() -> None:
        async with serving({"a": handle, "b": handle, "c": handle}, engine=ALWAYS) as world:
            found = await streamed(world, CHAT, {**asked(CHAT, 1), "max_tokens": 100})
        assert text_in(CHAT, found) == "".join(pieces)

    run(work())


def _chunk(piece: str, reason: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": piece}, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "x", "created": 1, "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("second", ["refuses", "fails", "talks nonsense", "dies"])
def test_where_no_replica_can_go_on_the_client_is_told(second: str) -> None:
    made: Counter[str] = Counter()

    async def bad(request: web.BaseRequest) -> web.StreamResponse:
        if second == "dies":
            assert request.transport is not None
            request.transport.abort()
        if second == "talks nonsense":
            return web.Response(body=b"data: [1\n\n", headers={"Content-Type": "text/event-stream"})
        return web.json_response({}, status=400 if second == "refuses" else 500)

    async def work() -> None:
        async with serving({"a": words(made), "b": bad}, engine=ALWAYS) as world:
            asking = asyncio.create_task(streamed(world, TEXT, asked(TEXT, 174)))
            await until_async(lambda: sum(made.values()) > BEGUN)
            await world["a"].die()
            content = await asking
            assert b"\n\nevent: error\n" in content
            assert "the answer has no end" in error_in(content)

    run(work())


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_our_client_goes_on_with_another_router(path: str) -> None:
    async def work() -> None:
        made: Counter[str] = Counter()
        async with serving({"a": words(made), "b": words(made)}, engine=ALWAYS, concurrency=64) as world:
            other = Router(world.config, node="n1", token=TOKEN, engine_token="", key=world.router.replicas._key)
            server = RouterServer(other, world.config)
            urls = [world.url, f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"]
            places = [{"name": name, "hosts": ["127.0.0.1"], "port": world[name].port} for name in "ab"]
            other.replicas.take({"expected": 2, "replicas": places})
            await until_async(lambda: other.replicas.ready == 2)
            bodies = [asked(path, number) for number in range(20)]
            async with Client(urls, token=TOKEN) as client:

                async def ask(body: dict[str, Any]) -> bytes:
                    return b"".join([part async for part in client.stream_async(path, body, timeout_s=30)])

                whole = await asyncio.gather(*(ask(body) for body in bodies))
                made.clear()
                asking = [asyncio.create_task(ask(body)) for body in bodies]
                await until_async(lambda: sum(made.values()) > 300)
                for connection in server._server.connections:
                    if connection.transport is not None:
                        connection.transport.abort()  # as its death does
                await server.close()
                assert await asyncio.gather(*asking) == whole
            assert [text_in(path, each) for each in whole] == [right(path, body) for body in bodies]
            await other.close()

    run(work())


def test_our_client_goes_on_where_its_router_could_not() -> None:
    """A router that gave up, such as for a request that is a rest itself, may be no end for its client."""
    number = [0]

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        number[0] += 1
        return await WordEngine(0.001, lambda _: None, events=15 if number[0] < 4 else None).complete(request)

    async def work() -> None:
        body = asked(CHAT, 174)
        async with serving({"a": handle, "b": handle}, engine=ALWAYS, max_retries=0) as world:
            async with Client([world.url], token=TOKEN) as client:
                found = b"".join([part async for part in client.stream_async(CHAT, body, timeout_s=30)])
            assert text_in(CHAT, found) == right(CHAT, body)
            assert b"error" not in found
            assert number[0] == 4
            plain = await streamed(world, CHAT, body)
            assert text_in(CHAT, plain) == right(CHAT, body)

    run(work())


def test_our_client_gets_the_error_of_a_stream_that_cannot_go_on() -> None:
    async def dies(request: web.BaseRequest) -> web.StreamResponse:
        return await WordEngine(0.001, lambda _: None, events=15).complete(request)

    async def work() -> None:
        async with serving({"a": dies}, engine=ALWAYS) as world, Client([world.url], token=TOKEN) as client:
            body = asked(TEXT, 174, n=2)
            assert "is not continued" in error_in(b"".join([part async for part in client.stream_async(TEXT, body)]))

    run(work())


def test_a_router_that_keeps_too_much_passes_streams_on_and_gives_back_what_it_kept() -> None:
    async def work() -> None:
        made: Counter[str] = Counter()
        bodies = [asked(CHAT, number) for number in range(2)]
        engines = {name: words(made) for name in "ab"}
        async with serving(engines, engine=ALWAYS, concurrency=64) as world:
            world.router.kept = KeptStreams(time.monotonic, most_bytes=1000)
            asking = [asyncio.create_task(streamed(world, CHAT, body)) for body in bodies]
            await until_async(lambda: sum(made.values()) > 2 * BEGUN)
            assert world.router.kept_bytes <= 1000
            await world["a"].die()
            await world["b"].die()
            assert all("too much for all streams" in error_in(each) for each in await asyncio.gather(*asking))
            assert world.router.kept_bytes == 0

    run(work())
