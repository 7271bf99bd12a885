"""An endpoint in front of engines that were not written here, asked by clients that were not either.

The engines are ``transformers serve``, llama.cpp's server and LitServe; their models are tiny, random and made on the
spot, and decode greedily, so that every answer can be compared. ``make soak`` installs and builds all of them.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm.conftest import eventually
from slurm.test_local_serving import Endpoint
from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, headers_file, token_of

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
HERE, BUILT = Path(__file__).parent, Path(__file__).parents[2] / "build"

STREAMS, TOKENS, REPLICAS = 8, 300, 2
HANG_S = 20.0
SUSPECTED_S = 0.6 * HANG_S
"""From half of it on an engine is a suspect."""

MOST_TOKENS = 1000
BROKEN = "broken"
BEGUN = 10
"""Pieces of a stream after which its engine may die."""

Text = tuple[str, str | None]
"""A text, and why it ended."""


@dataclass(frozen=True)
class Engine:
    """One kind of engine."""

    name: str
    seen_as: str
    """In its command."""

    needs: tuple[str, ...]
    """Packages."""

    def start(self, folder: Path) -> tuple[str, list[str]]:
        """Name of its model, which is made, and command."""
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if self.name == "LitServe":
            return "words", [sys.executable, str(HERE / "litserve_engine.py"), "{port}"]
        maker, *words = {"transformers": ("tiny_chat_model.py", "ascii")}.get(self.name, ("tiny_gguf_model.py",))
        model = str(folder / "tiny")
        subprocess.run([sys.executable, str(HERE / maker), model, *words], check=True, env=offline)
        if self.name == "transformers":
            program = f"{Path(sys.executable).parent}/transformers"
            return model, ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", program, "serve", model,
                           "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu"]  # fmt: skip
        server = BUILT / "llama" / "out" / "bin" / "llama-server"
        if not server.exists():
            pytest.skip("llama.cpp's server is not built (make build/llama/out/bin/llama-server)")
        return model, [str(server), "--model", model, "--alias", model, "--host", "127.0.0.1", "--port", "{port}",
                       "--metrics", "--parallel", "1", "--threads", "1", "--ctx-size", "4096", "--no-cache-prompt",
                       "--jinja"]  # fmt: skip


ENGINES = (Engine("transformers", "transformers serve", ("transformers", "fastapi", "uvicorn")),
           Engine("llama.cpp", "llama-server", ("gguf",)),
           Engine("LitServe", "litserve_engine.py", ("litserve",)))  # fmt: skip


@dataclass
class Running:
    """An endpoint in front of one of them."""

    engine: Engine
    model: str
    endpoint: Endpoint

    @property
    def url(self) -> str:
        return HighAvailabilityCluster.read(self.endpoint.folder.path).routers[0].urls[0]

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token_of(self.endpoint.folder.path), max_retries=0,
                             http_client=openai.DefaultHttpxClient(verify=self.endpoint.trusted))  # fmt: skip

    def asked(self, content: str = "hello", max_tokens: int = 40) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens,
                "temperature": 0}  # fmt: skip

    def engines(self) -> list[int]:
        return [each.pid for each in self.endpoint.processes(self.engine.seen_as)]

    def deaths(self) -> list[dict[str, Any]]:
        return [event.details for event in self.endpoint.events("replica died")]

    def wait(self) -> None:
        eventually(lambda: ready(self.endpoint) == REPLICAS, 300, self.endpoint.story)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: engine.name)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = request.param
    if missing := [name for name in engine.needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed (pip install 'slurmft[soak]')")
    model, command = engine.start(tmp_path_factory.mktemp("model"))
    endpoint = Endpoint(tmp_path_factory.mktemp("run") / "endpoint", engine={"command": command}, replicas_per_node=1,
                        hang_timeout_s=HANG_S, startup_timeout_s=300)  # fmt: skip
    found = Running(engine, model, endpoint)
    endpoint.slurmft("serve", str(endpoint.config), "--cluster", "local")
    found.wait()
    yield found
    endpoint.slurmft("stop", str(endpoint.folder.path), "--timeout", "60")
    eventually(lambda: found.engines() == [], 20, "an engine has outlived its driver")


def ready(endpoint: Endpoint) -> int:
    routers = HighAvailabilityCluster.read(endpoint.folder.path).routers
    return min((endpoint.status(each.urls[0]) for each in routers), default=-1) if len(routers) == 2 else -1


async def texts(running: Running, begun: list[int]) -> list[Text]:
    """Streams at the same time, from the first router; ``begun`` counts the pieces of each."""

    async def one(client: Any, number: int) -> Text:
        text, reason = "", None
        asked = running.asked(f"Tell me of {number}: ", TOKENS - number)
        try:
            async for part in await client.chat.completions.create(**asked, stream=True):
                begun[number] += 1
                text += "".join(each.delta.content or "" for each in part.choices)
                reason = next((each.finish_reason for each in part.choices if each.finish_reason), reason)
        except openai.APIError:
            reason = BROKEN
        return text, reason

    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key=token_of(running.endpoint.folder.path), max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=running.endpoint.trusted),
    ) as client:  # fmt: skip
        return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))


def test_the_client_of_openai(running: Running) -> None:
    with running.client() as client:
        whole = client.chat.completions.create(**running.asked())
        assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 40
        parts = list(client.chat.completions.create(**running.asked(), stream=True))
        text = "".join(each.delta.content or "" for part in parts for each in part.choices)
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model=running.model, messages="nothing that it could answer")


def right_answer(running: Running) -> str:
    with running.client() as client:
        return str(client.chat.completions.create(**running.asked()).choices[0].message.content)


def test_curl(running: Running) -> None:
    run_folder = running.endpoint.folder.path

    def curl(**more: Any) -> str:
        argv = ["curl", "-sSN", "--fail", "--cacert", str(ca_file(run_folder)), "-H", f"@{headers_file(run_folder)}",
                "-H", "Content-Type: application/json", "-d", json.dumps({**running.asked(), **more}),
                f"{running.url}/v1/chat/completions"]  # fmt: skip
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=100).stdout

    right = right_answer(running)
    assert json.loads(curl())["choices"][0]["message"]["content"] == right
    events = [line[6:] for line in curl(stream=True).splitlines() if line.startswith("data: ") and "[DONE]" not in line]
    pieces = [choice["delta"].get("content") for event in events for choice in json.loads(event)["choices"]]
    assert "".join(piece or "" for piece in pieces) == right


def test_the_client_of_litellm(running: Running) -> None:
    python, run_folder = BUILT / "litellm" / "bin" / "python", running.endpoint.folder.path
    if not python.exists():
        pytest.skip("LiteLLM is not installed (make build/litellm/bin/litellm)")
    token = run_folder / "serving" / "token"
    argv = [
        str(python),
        str(HERE / "litellm_client.py"),
        running.url,
        str(token),
        str(ca_file(run_folder)),
        running.model,
    ]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    told = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=200, env=environment).stdout
    assert json.loads(told) == [right_answer(running)] * 2


def test_the_streams_of_a_killed_engine_are_right_or_end_with_an_error(running: Running) -> None:
    calm = asyncio.run(texts(running, [0] * STREAMS))
    assert len(set(calm)) > STREAMS // 2 and all(len(text) > TOKENS // 2 for text, _ in calm), calm
    before, deaths = running.engines(), len(running.deaths())

    async def disturbed() -> list[Text]:
        begun = [0] * STREAMS
        asking = asyncio.create_task(texts(running, begun))
        while not any(BEGUN <= each < TOKENS // 2 for each in begun):
            assert not asking.done(), "it is too late to kill one in the midst of a stream"
            await asyncio.sleep(0.001)
        os.kill(before[0], signal.SIGKILL)
        return await asking

    found = asyncio.run(disturbed())
    broken = [text for text in found if text[1] == BROKEN]
    assert 0 < len(broken) < STREAMS, found
    assert all(mine in (right, (mine[0], BROKEN)) and right[0].startswith(mine[0])
               for mine, right in zip(found, calm, strict=True)), found  # fmt: skip
    eventually(lambda: len(running.deaths()) == deaths + 1, 20, running.endpoint.story)
    running.wait()
    assert asyncio.run(texts(running, [0] * STREAMS)) == calm


def test_a_long_answer_costs_nothing_and_a_stopped_engine_is_found_by_impatient_clients(running: Running) -> None:
    """Each works on one request at a time; only llama.cpp's server counts tokens meanwhile."""
    deaths = len(running.deaths())
    with running.client() as client:
        began_s = time.monotonic()
        client.chat.completions.create(**running.asked(max_tokens=100), timeout=600)
        in_time = int(SUSPECTED_S / (time.monotonic() - began_s) * 100)
        client.chat.completions.create(**running.asked(max_tokens=min(in_time, MOST_TOKENS)), timeout=600)
        assert len(running.deaths()) == deaths, running.endpoint.story()
        victim = running.engines()[0]
        for each in (psutil.Process(victim), *psutil.Process(victim).children(recursive=True)):
            each.suspend()

        def is_found() -> bool:
            with contextlib.suppress(openai.APITimeoutError):
                client.chat.completions.create(**running.asked(max_tokens=4), timeout=3)
            return len(running.deaths()) > deaths

        eventually(is_found, 2 * HANG_S + 30, running.endpoint.story)
        reason = running.deaths()[-1]["reason"]
        assert "hang_timeout_s" in reason and victim not in running.engines(), reason
        for _ in range(20):
            client.chat.completions.create(**running.asked(max_tokens=4), timeout=60)
    running.wait()
