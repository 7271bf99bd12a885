"""An endpoint in front of an engine that was not written here, ``transformers serve``, asked by the client of OpenAI.

Its model is tiny, random and made on the spot; it decodes greedily, so that every answer can be compared.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import urllib.request
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
    engine = {"command": command, "continue_from_prefix": "always"}
    found = Endpoint(tmp_path_factory.mktemp("run") / "endpoint", engine=engine, replicas_per_node=1,
                     hang_timeout_s=60, startup_timeout_s=300)  # fmt: skip
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


def tried_again(endpoint: Endpoint) -> float:
    """Streams of the first router that went on with another engine, and requests that were done again."""
    url = HighAvailabilityCluster.read(endpoint.folder.path).routers[0].urls[0]
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/metrics", headers=endpoint.headers), context=endpoint.trusted
    ) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("slurmft_tries_again_total{"))


async def texts(endpoint: Endpoint, model: Path, begun: list[int]) -> list[Text]:
    """Streams at the same time, from the first router; ``begun`` counts the pieces of each."""
    url = HighAvailabilityCluster.read(endpoint.folder.path).routers[0].urls[0]

    async def one(client: openai.AsyncOpenAI, number: int) -> Text:
        text, reason = "", None
        asked: dict[str, Any] = {"model": str(model), "prompt": f"Tell me of {number}: ", "max_tokens": TOKENS - number}
        async for part in await client.completions.create(**asked, temperature=0, stream=True):
            begun[number] += 1
            text += "".join(each.text or "" for each in part.choices)
            reason = next((each.finish_reason for each in part.choices if each.finish_reason), reason)
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


def test_a_killed_engine_costs_the_streams_of_the_client_of_openai_nothing(endpoint: Endpoint, model: Path) -> None:
    calm = asyncio.run(texts(endpoint, model, [0] * STREAMS))
    assert len(set(calm)) > STREAMS // 2 and all(len(text) > TOKENS // 2 for text, _ in calm), calm
    for _ in range(2):
        deaths = len(endpoint.events("replica died"))
        before = engines(endpoint)

        async def disturbed(victims: list[int]) -> list[Text]:
            begun = [0] * STREAMS
            asking = asyncio.create_task(texts(endpoint, model, begun))
            while not any(BEGUN <= each < TOKENS // 2 for each in begun):
                assert not asking.done(), "it is too late to kill one in the midst of a stream"
                await asyncio.sleep(0.001)
            os.kill(victims[0], 9)
            return await asking

        assert asyncio.run(disturbed(before)) == calm, endpoint.story()
        eventually(lambda: len(endpoint.events("replica died")) == deaths + 1, 20, endpoint.story)  # noqa: B023
        eventually(lambda: ready(endpoint) == REPLICAS, 300, endpoint.story)
        assert len(set(engines(endpoint)) - set(before)) == 1
    assert asyncio.run(texts(endpoint, model, [0] * STREAMS)) == calm
    assert tried_again(endpoint) > 0, "requests went on elsewhere"
