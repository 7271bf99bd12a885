"""OpenAI's batch files are taken as they are, and its own client package reads the output."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmft.config.inference import InferenceConfig
from slurmft.inference.driver import HttpEngine
from slurmft.inference.ledger import Output, open_ledger, segments_of, write_output
from slurmft.inference.requests import Batch, Requests, prepare
from slurmft.storage.queue import SegmentWriter

COMPLETION = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1763880000, "model": "m", "system_fingerprint": "fp",
    "choices": [
        {"index": 0, "finish_reason": "stop", "logprobs": {"content": [
            {"token": "Hä", "logprob": -0.30000000000000004, "bytes": [72, 195, 164], "top_logprobs": []}],
            "refusal": None},
         "message": {"role": "assistant", "content": "Hällo \"w\"\n\u2028\U0001f600", "refusal": None}},
    ],
    "usage": {"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24},
    "an_engines_own_key": {"deep": [1.5, None, True]},
}  # fmt: skip
EMBEDDING = {
    "object": "list", "model": "m", "data": [{"object": "embedding", "index": 0, "embedding": [0.1, -1e-30]}],
    "usage": {"prompt_tokens": 8, "total_tokens": 8},
}  # fmt: skip
REFUSAL = {"error": {"message": "unknown model", "type": "invalid_request_error", "param": None, "code": None}}

CHAT = {"model": "m", "messages": [{"role": "system", "content": "You are a helpful assistant."},
                                   {"role": "user", "content": "Hello world!"}], "max_tokens": 1000}  # fmt: skip
LINES = [
    {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {"custom_id": "request-2", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "Hello"}},
    {"custom_id": "request-3", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "model": "unknown"}},
]
"""As in OpenAI's guide to its Batch API."""


async def respond(request: web.Request) -> web.Response:
    if request.path == "/v1/embeddings":
        return web.json_response(EMBEDDING)
    known = (await request.json())["model"] == "m"
    return web.json_response(COMPLETION if known else REFUSAL, status=200 if known else 404)


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


async def answers_of(batch: Batch, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a real engine on this machine answers to each request of the batch."""
    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", respond), web.get("/health", healthy)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    section = InferenceConfig.model_validate({**config, "engine": {"url": f"http://127.0.0.1:{port}"}})
    engine = HttpEngine(section, 0)
    try:
        await engine.start()
        with Requests(batch.folder) as requests:
            return await engine.answer([requests.get(index) for index in range(batch.total)])
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The output of a batch of OpenAI's lines and one that is no request, answered over HTTP."""
    source = tmp_path / "batchinput.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in [*LINES, {"body": {}, "method": "GET"}]))
    config = {"input": str(source), "engine": {"url": "http://127.0.0.1:9"}, "on_bad_input": "report"}
    batch = prepare(InferenceConfig.model_validate(config), tmp_path / "inference")
    assert (batch.total, batch.bad) == (4, ((3, 4),))
    good = Batch(folder=batch.folder, total=3, bad=(), digest=batch.digest)
    answers = asyncio.run(answers_of(good, config))
    ledger = open_ledger(batch, 1)
    writer = SegmentWriter(segments_of(batch.folder) / "g000001-n0-r0-1-1.jsonl", {"generation": 1})
    end = writer.append({"index": index, **answer} for index, answer in enumerate(answers))
    ledger.commit([(writer.path.name, end, [[0, 3]])])
    assert write_output(batch, ledger, tmp_path / "output") == Output(answers=2, errors=2)
    writer.close()
    ledger.close()
    return tmp_path / "output"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_openais_own_types_read_the_answers(output: Path):
    from openai.types import CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion

    chat, embedding = lines_of(output / "answers.jsonl")
    for line in (chat, embedding):
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["error"] is None and line["response"]["status_code"] == 200
    assert [chat["custom_id"], embedding["custom_id"]] == ["request-1", "request-2"]
    read = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    assert read.choices[0].message.content == 'Hällo "w"\n\u2028\U0001f600'
    assert read.to_dict() == COMPLETION
    assert CreateEmbeddingResponse.model_validate(embedding["response"]["body"], strict=True).to_dict() == EMBEDDING


def test_openais_own_types_read_the_errors(output: Path):
    from openai.types import BatchError

    refused, broken = lines_of(output / "errors.jsonl")
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("request-3", 404)
    assert refused["response"]["body"] == REFUSAL
    assert (broken["custom_id"], broken["response"]) == ("batchinput.jsonl:4", None)
    error = BatchError.model_validate(broken["error"], strict=True)
    assert (error.code, error.message) == ("bad_request", "its method is 'GET'; only POST is known")


async def test_a_request_reaches_the_engine_as_openais_client_would_send_it(tmp_path: Path):
    """The same body from ``openai.OpenAI`` and from a batch line, as the server sees them."""
    import openai

    seen: list[tuple[str, Any]] = []

    async def note(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.json_response(COMPLETION)

    app = web.Application()
    app.add_routes([web.post("/{path:.*}", note), web.get("/health", healthy)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        await client.chat.completions.create(**CHAT)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]) + "\n")
    config = InferenceConfig.model_validate({"input": str(source), "engine": {"url": address}})
    engine = HttpEngine(config, 0)
    await engine.start()
    with Requests(prepare(config, tmp_path / "run").folder) as requests:
        await engine.answer([requests.get(0)])
    await engine.close()
    await runner.cleanup()
    assert seen == [("/v1/chat/completions", CHAT)] * 2
