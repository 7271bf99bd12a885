"""An endpoint in front of an engine that was not written here, ``transformers serve``, asked by the client of OpenAI.

Its model is tiny, random and made on the spot; it decodes greedily, so that every answer can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slurm.conftest import eventually
from slurm.test_local_serving import Endpoint
from slurmft.inference.serving.endpoint import HighAvailabilityCluster, token_of

if TYPE_CHECKING:
    import openai

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "fastapi", "uvicorn")),
        reason="transformers serve is not installed (pip install 'slurmft[soak]')",
    ),
]

STREAMS, TOKENS, REPLICAS = 8, 300, 2
HANG_S = 20.0
BROKEN = "broken"
BEGUN = 10
"""Pieces of a stream after which its engine may die."""

Text = tuple[str, str | None]
"""A text, and why it ended."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    maker = Path(__file__).with_name("tiny_chat_model.py")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(maker), str(folder), "ascii"], check=True, env=offline)
    return folder


@pytest.fixture(scope="module")
def endpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    command = ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", f"{Path(sys.executable).parent}/transformers", "serve",
               str(model), "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu"]  # fmt: skip
    engine = {"command": command}
    found = Endpoint(tmp_path_factory.mktemp("run") / "endpoint", engine=engine, replicas_per_node=1,
                     hang_timeout_s=HANG_S, startup_timeout_s=300)  # fmt: skip
    found.slurmft("serve", str(found.config), "--cluster", "local")
    eventually(lambda: ready(found) == REPLICAS, 300, found.story)
    yield found
    found.slurmft("stop", str(found.folder.path), "--timeout", "60")
    eventually(lambda: engines(found) == [], 20, "an engine has outlived its driver")


def ready(endpoint: Endpoint) -> int:
    routers = HighAvailabilityCluster.read(endpoint.folder.path).routers
    return min((endpoint.status(each.urls[0]) for each in routers), default=-1) if len(routers) == 2 else -1


def engines(endpoint: Endpoint) -> list[int]:
    return [each.pid for each in endpoint.processes("transformers serve")]


async def texts(endpoint: Endpoint, model: Path, begun: list[int]) -> list[Text]:
    """Streams at the same time, from the first router; ``begun`` counts the pieces of each."""
    url = HighAvailabilityCluster.read(endpoint.folder.path).routers[0].urls[0]

    async def one(client: openai.AsyncOpenAI, number: int) -> Text:
        text, reason = "", None
        asked: dict[str, Any] = {"model": str(model), "prompt": f"Tell me of {number}: ", "max_tokens": TOKENS - number}
        try:
            async for part in await client.completions.create(**asked, temperature=0, stream=True):
                begun[number] += 1
                text += "".join(each.text or "" for each in part.choices)
                reason = next((each.finish_reason for each in part.choices if each.finish_reason), reason)
        except openai.APIError:
            reason = BROKEN
        return text, reason

    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=token_of(endpoint.folder.path), max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=endpoint.trusted),
    ) as client:  # fmt: skip
        return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))


def test_chats(endpoint: Endpoint, model: Path) -> None:
    url = HighAvailabilityCluster.read(endpoint.folder.path).routers[0].urls[0]
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=token_of(endpoint.folder.path), max_retries=0,
                       http_client=openai.DefaultHttpxClient(verify=endpoint.trusted)) as client:  # fmt: skip
        asked: Any = {"model": str(model), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
        whole = client.chat.completions.create(**asked, temperature=0)
        assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 40
        parts = list(client.chat.completions.create(**asked, temperature=0, stream=True))
        text = "".join(each.delta.content or "" for part in parts for each in part.choices)
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model=str(model), messages="nothing that it could answer")  # type: ignore[arg-type]


def test_the_streams_of_a_killed_engine_are_right_or_end_with_an_error(endpoint: Endpoint, model: Path) -> None:
    calm = asyncio.run(texts(endpoint, model, [0] * STREAMS))
    assert len(set(calm)) > STREAMS // 2 and all(len(text) > TOKENS // 2 for text, _ in calm), calm
    before = engines(endpoint)

    async def disturbed() -> list[Text]:
        begun = [0] * STREAMS
        asking = asyncio.create_task(texts(endpoint, model, begun))
        while not any(BEGUN <= each < TOKENS // 2 for each in begun):
            assert not asking.done(), "it is too late to kill one in the midst of a stream"
            await asyncio.sleep(0.001)
        os.kill(before[0], 9)
        return await asking

    found = asyncio.run(disturbed())
    broken = [text for text in found if text[1] == BROKEN]
    assert 0 < len(broken) < STREAMS, found
    assert all(mine in (right, (mine[0], BROKEN)) and right[0].startswith(mine[0])
               for mine, right in zip(found, calm, strict=True)), found  # fmt: skip
    eventually(lambda: len(endpoint.events("replica died")) == 1, 20, endpoint.story)
    eventually(lambda: ready(endpoint) == REPLICAS, 300, endpoint.story)
    assert asyncio.run(texts(endpoint, model, [0] * STREAMS)) == calm


def test_a_long_answer_costs_nothing_and_a_stopped_engine_is_found_by_impatient_clients(
    endpoint: Endpoint, model: Path
) -> None:
    """``transformers serve`` works on one request at a time and counts no tokens."""
    url = HighAvailabilityCluster.read(endpoint.folder.path).routers[0].urls[0]
    deaths = len(endpoint.events("replica died"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key=token_of(endpoint.folder.path), max_retries=0,
                       http_client=openai.DefaultHttpxClient(verify=endpoint.trusted)) as client:  # fmt: skip
        asked: Any = {"model": str(model), "prompt": "hello", "temperature": 0}
        client.completions.create(**asked, max_tokens=4 * TOKENS, timeout=600)
        assert len(endpoint.events("replica died")) == deaths, endpoint.story()
        victim = engines(endpoint)[0]
        os.kill(victim, 19)

        def is_found() -> bool:
            with contextlib.suppress(openai.APITimeoutError):
                client.completions.create(**asked, max_tokens=4, timeout=3)
            return len(endpoint.events("replica died")) > deaths

        eventually(is_found, 2 * HANG_S + 30, endpoint.story)
        reason = endpoint.events("replica died")[-1].details["reason"]
        assert "hang_timeout_s" in reason and victim not in engines(endpoint), reason
        for _ in range(20):
            client.completions.create(**asked, max_tokens=4, timeout=60)
    eventually(lambda: ready(endpoint) == REPLICAS, 300, endpoint.story)
