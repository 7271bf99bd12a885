"""Answers that a dead connection cuts off go on where they were: the same text and usage, nothing computed twice."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from word_engine import WordEngine

from slurmft.config.inference import InferenceConfig
from slurmft.errors import UsageError
from slurmft.inference.driver import Again, CallableEngine, HttpEngine, events_of
from slurmft.inference.ledger import Partials

TEXT = {"id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "prompt 1", "max_tokens": 200}}
CHAT = {
    "id": "a", "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "prompt 2"}], "max_tokens": 200},
}  # fmt: skip


class Dies(Exception):
    """The engine does, for the test."""


async def ask(
    app: web.Application, request: dict[str, Any], partials: Partials, setting: str = "always"
) -> dict[str, Any]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "continue_from_prefix": setting}
    found = HttpEngine(InferenceConfig.model_validate({"input": "x.jsonl", "engine": engine}), 0, partials)
    try:
        await found.start()
        return (await found.answer([request]))[0]
    finally:
        await found.close()
        await runner.cleanup()


def words(made: Counter[str], *, dies_after: int | None = None) -> web.Application:
    """An engine that breaks off behind so many tokens."""
    left = [dies_after]

    def on_token(digest: str) -> None:
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise Dies
        made[digest] += 1

    return WordEngine(0.002, on_token).app()  # so that pieces arrive before the end does


@pytest.mark.parametrize("request_", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("deaths", [[90], [1], [40, 30, 60]], ids=str)
def test_an_answer_that_was_cut_off_is_the_same_and_its_beginning_is_not_computed_again(request_, deaths):
    calm = asyncio.run(ask(words(Counter()), request_, Partials(), "never"))
    assert calm["response"]["body"]["usage"]["completion_tokens"] > 130, "long enough to be cut off"
    made: Counter[str] = Counter()
    partials = Partials()
    for tokens in deaths:
        with pytest.raises(Again):
            asyncio.run(ask(words(made, dies_after=tokens), request_, partials))
    found = asyncio.run(ask(words(made), request_, partials))
    assert found == calm
    assert len(partials) == 0
    repeated = sum(made.values()) - len(made)
    assert repeated <= 8 * len(deaths), "no more than since the last blank before each end"


def test_an_answer_that_was_streamed_is_as_one_that_was_not():
    for request in (TEXT, CHAT):
        calm = asyncio.run(ask(words(Counter()), request, Partials(), "never"))
        assert asyncio.run(ask(words(Counter()), request, Partials())) == calm


def test_without_being_asked_to_an_unknown_engine_is_not_streamed_from():
    async def plain(request: web.Request) -> web.Response:
        assert "stream" not in await request.json()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/health", plain_health), web.post("/{rest:.*}", plain)])
    partials = Partials()
    partials.note("a", "known", tokens=1)
    assert asyncio.run(ask(app, TEXT, partials, "auto"))["response"]["status_code"] == 200


async def plain_health(_request: web.Request) -> web.Response:
    return web.Response()


def test_an_engine_that_refuses_to_go_on_or_to_stream_is_asked_for_the_whole():
    asked: list[dict[str, Any]] = []

    async def strict(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"text": "all"}, status=400 if "stream" in asked[-1] else 200)

    app = web.Application()
    app.add_routes([web.get("/health", plain_health), web.post("/{rest:.*}", strict)])
    partials = Partials()
    partials.note("a", "known", tokens=1)
    found = asyncio.run(ask(app, TEXT, partials))
    assert found == {"response": {"status_code": 200, "body": {"text": "all"}}}
    assert [each["prompt"] for each in asked] == ["prompt 1known", "prompt 1", "prompt 1"]
    assert len(partials) == 0


def streaming(text: bytes, **headers: str) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        await response.write(text)
        return response

    app = web.Application()
    app.add_routes([web.get("/health", plain_health), web.post("/{rest:.*}", handle)])
    return app


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n', "ended before the answer did"),
        (b"data: [DONE]\n\n", "ended before the answer did"),
        (b"data: {\n\n", "not understood"),
        (b"data: []\n\n", "not understood"),
        (b'data: {"choices": 3}\n\n', "not understood"),
        (b'data: {"error": {"message": "EngineCore is dead", "code": 500}}\n\n', "HTTP 500: .*EngineCore is dead"),
        (b'data: {"object": "error", "message": "busy", "code": 429}\n\n', "HTTP 429: .*busy"),
    ],
)
def test_a_stream_that_breaks_or_tells_of_an_error_is_tried_again(text, words):
    with pytest.raises(Again, match=words):
        asyncio.run(ask(streaming(text), TEXT, Partials()))


def test_events_are_found_wherever_the_network_cuts_them():
    text = b': ping\r\n\r\ndata: {"n": 1}\r\n\r\nevent: x\ndata:{"n": "\xc3\xbc"}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'

    async def found(size: int) -> list[Any]:
        async def parts():
            for at in range(0, len(text), size):
                yield text[at : at + size]

        return [event async for event in events_of(parts(), limit_bytes=1000)]

    for size in (1, 2, 7, 1000):
        assert asyncio.run(found(size)) == [{"n": 1}, {"n": "ü"}]

    async def too_much() -> None:
        async def parts():
            yield b"x" * 1001

        [event async for event in events_of(parts(), limit_bytes=1000)]

    with pytest.raises(ValueError, match="more than"):
        asyncio.run(too_much())


GENERATORS = """
from word_engine import next_token

class Model:
    made = []

    def __init__(self, device):
        self.dies_after = 10**9

    def __call__(self, bodies, *, prefixes):
        texts = list(prefixes)
        for _ in range(60 - max(len(text) for text in texts) // 4):
            new = [next_token(body["prompt"] + text) or "." for body, text in zip(bodies, texts)]
            texts = [text + piece for text, piece in zip(texts, new)]
            self.made.append(texts[0])
            if len(self.made) >= Model.limit:
                raise RuntimeError("dead")
            yield new
        return [{"text": text[:160]} for text in texts]

def no_prefixes(bodies): yield [""]
def odd(bodies, prefixes): yield "x"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "generators_of_a_test.py").write_text(GENERATORS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "generators_of_a_test", raising=False)
    return "generators_of_a_test"


def call(name: str, partials: Partials | None, before: Callable[[], None] = lambda: None) -> Any:
    async def main() -> Any:
        engine = CallableEngine(name, "cpu", 4, partials)
        await engine.start()
        before()
        return await engine.answer([{"id": "a", "body": {"prompt": "p"}}, {"id": "b", "body": {"prompt": "q"}}])

    return asyncio.run(main())


def test_a_generator_tells_what_it_has_and_goes_on_from_there(module):
    def limit(tokens: int) -> None:
        __import__(module).Model.limit = tokens

    calm = call(f"{module}:Model", None, lambda: limit(10**9))
    partials = Partials()
    with pytest.raises(Again, match="dead"):
        call(f"{module}:Model", partials, lambda: limit(len(__import__(module).Model.made) + 30))
    assert len(partials) == 2
    made = __import__(module).Model.made
    before = made[-2]
    begun = len(made)
    found = call(f"{module}:Model", partials, lambda: limit(10**9))
    assert [each["response"]["body"]["text"][:100] for each in found] == [
        each["response"]["body"]["text"][:100] for each in calm
    ]
    assert made[begun].startswith(before), "it went on from all that it had yielded"
    assert len(partials) == 0


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("no_prefixes", UsageError, "must take the keyword prefixes"), ("odd", Again, "must yield lists of 2 texts")],
)
def test_a_generator_that_will_not_do_says_why(module, name, error, words):
    with pytest.raises(error, match=words):
        call(f"{module}:{name}", Partials())
