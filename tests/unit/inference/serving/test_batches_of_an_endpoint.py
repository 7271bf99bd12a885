"""``/v1/files`` and ``/v1/batches`` with the client of OpenAI, while a router that works on a batch dies."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from serving_world import TOKEN, World, serving
from waiting import until_async

from slurmft.inference import batches
from slurmft.inference.batches import Batches, form_in

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_S": 0.05, "BEAT_S": 0.1, "SILENT_S": 1.0, "AGAIN_S": 0.05}.items():
        monkeypatch.setattr(batches, name, value)


class Engine:
    """Answers with what it was asked; ``bad`` gets 400."""

    def __init__(self, *, pause_s: float = 0.0) -> None:
        self.asked, self.pause_s, self.priorities = Counter[str](), pause_s, set[str]()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        said = (await request.json())["messages"][0]["content"]
        self.asked[said] += 1
        await asyncio.sleep(self.pause_s)
        return web.json_response({"said": said}, status=400 if said == "bad" else 200)


def beside(world: World, folder: Path) -> Batches:
    """The side of a router for this folder."""
    router = world.router
    return Batches(
        folder, ready=lambda: router.ready, error=router.error, open_paths=world.config.engine.open_paths, slots=4,
        tries=2, token=TOKEN,
    )  # fmt: skip


def client(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=TOKEN, max_retries=0)


def content(*said: str, **more: Any) -> bytes:
    bodies = [{"messages": [{"role": "user", "content": each}], **more} for each in said]
    rows = [
        {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": each} for number, each in enumerate(bodies)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def begun(asks: openai.AsyncOpenAI, data: bytes) -> Any:
    file = await asks.files.create(file=("in.jsonl", data), purpose="batch")
    return await asks.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})


async def ended(asks: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(30):
        while batch.status in ("in_progress", "cancelling"):
            await asyncio.sleep(0.05)
            batch = await asks.batches.retrieve(batch.id)
    return batch


async def test_a_batch_is_answered_whole_and_in_order(tmp_path: Path) -> None:
    engine = Engine()
    async with serving({"a": engine}) as world:
        world.router.batches = beside(world, tmp_path / "batches")
        world.router.batches.begin(world.url)
        asks = client(world)
        said = [f"s{number}" for number in range(30)]
        said[7] = "bad"
        batch = await ended(asks, await begun(asks, content(*said)))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 29, 1)
        assert batch.metadata == {"a": "b"} and batch.output_file_id and batch.error_file_id
        rows = [json.loads(line) for line in (await asks.files.content(batch.output_file_id)).text.splitlines()]
        assert [(row["custom_id"], row["response"]["body"]["said"]) for row in rows] == [
            (f"c{number}", each) for number, each in enumerate(said) if each != "bad"
        ]  # fmt: skip
        (error,) = (await asks.files.content(batch.error_file_id)).text.splitlines()
        assert json.loads(error)["response"]["status_code"] == 400
        assert [each.id async for each in asks.batches.list()] == [batch.id]
        names = {each.filename async for each in asks.files.list()}
        assert names == {"in.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"}
        assert (await asks.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await asks.files.retrieve(batch.input_file_id)
        with pytest.raises(openai.AuthenticationError):
            await asks.with_options(api_key="wrong").batches.list()
        await asks.close()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (content("x", stream=True), "asks for a stream"), (content("x") + content("y"), "is there twice"),
        (content("x").replace(b"/v1/chat/completions", b"/load_model"), "not open"), (b"{\n", "not JSON"),
        (content("x").replace(b"/v1/chat/completions", b"/v1/completions"), "not the endpoint"), (b"", "no line"),
    ],
)  # fmt: skip
async def test_a_file_with_a_bad_line_is_refused_and_no_engine_sees_it(tmp_path: Path, data: bytes, told: str) -> None:
    engine = Engine()
    async with serving({"a": engine}, engine={"command": ["transformers", "{socket}"]}) as world:
        world.router.batches = beside(world, tmp_path / "batches")
        world.router.batches.begin(world.url)
        asks = client(world)
        batch = await begun(asks, data)
        assert batch.status == "failed" and told in batch.errors.data[0].message
        await asyncio.sleep(0.3)
        assert not engine.asked
        with pytest.raises(openai.NotFoundError):
            await asks.batches.create(input_file_id="../../etc/passwd", endpoint=CHAT, completion_window="24h")
        await asks.close()


async def test_another_router_goes_on_with_a_batch_whose_router_has_died(tmp_path: Path) -> None:
    engine = Engine(pause_s=0.05)
    async with serving({"a": engine}) as world, serving({"a": engine}) as other:
        first, second = beside(world, tmp_path / "batches"), beside(other, tmp_path / "batches")
        world.router.batches, other.router.batches = first, second
        first.begin(world.url)
        asks = client(other)
        batch = await begun(asks, content(*(f"s{number}" for number in range(60))))
        await until_async(lambda: len(engine.asked) > 15)
        second.begin(other.url)
        await asyncio.sleep(0.3)
        assert max(engine.asked.values()) == 1, "one router works on it"
        await first.close()  # as its death: nothing is said
        batch = await ended(asks, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        again = sum(engine.asked.values()) - 60
        assert 0 <= again <= 4, "at most those that were in flight"
        await asks.close()


async def test_a_batch_that_is_cancelled_keeps_what_it_has(tmp_path: Path) -> None:
    engine = Engine(pause_s=0.1)
    async with serving({"a": engine}) as world:
        world.router.batches = beside(world, tmp_path / "batches")
        world.router.batches.begin(world.url)
        asks = client(world)
        batch = await begun(asks, content(*(f"s{number}" for number in range(200))))
        await until_async(lambda: len(engine.asked) > 10)
        with pytest.raises(openai.BadRequestError):
            await asks.files.delete(batch.input_file_id)
        assert (await asks.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(asks, batch)
        assert batch.status == "cancelled" and 0 < batch.request_counts.completed < 200
        rows = (await asks.files.content(batch.output_file_id)).text.splitlines()
        assert len(rows) == batch.request_counts.completed
        await asks.close()


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_what_is_no_form_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="not a form"):
        form_in(kind, b"{}")
