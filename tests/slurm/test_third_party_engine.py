"""The journeys of batch inference with an engine that was not written here: ``transformers serve`` of Hugging Face.

Its model is tiny, random and made on the spot; it decodes greedily, so that every answer can be compared.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slurm.test_inference import BatchRun
from slurmft.lab.cluster import Lab

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "fastapi", "uvicorn")),
        reason="transformers serve is not installed (pip install 'slurmft[soak]')",
    ),
]

NewChat = Callable[..., "ChatRun"]
COUNT, TOKENS, CONCURRENCY, NODES = 300, 40, 2, 2
BAD = 40
"""A request that this engine answers with 500, again and again."""


class ChatRun(BatchRun):
    """A batch of chats."""

    ENGINE = "^[^ ]*python[^ ]* [^ ]*/transformers serve"

    def texts(self) -> dict[str, str]:
        """What the model has said to each request, as OpenAI's client understands it."""
        found = {}
        for record in self.answers():
            from openai.types.chat import ChatCompletion

            completion = ChatCompletion.model_validate(record["response"]["body"])
            assert completion.usage is not None
            assert 0 < completion.usage.completion_tokens <= TOKENS
            found[record["custom_id"]] = completion.choices[0].message.content or ""
        return found

    def assert_as_in(self, calm: dict[str, str]) -> None:
        self.wait_until_done(400)
        assert self.texts() == calm, self.story()
        assert [record["custom_id"] for record in self.answers()] == list(calm)
        (error,) = self.answers("errors.jsonl")
        assert (error["custom_id"], error["error"]["code"]) == (f"q{BAD}", "no_answer")
        assert "HTTP 500" in error["error"]["message"]


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    folder = lab.home / "tiny chat model"
    maker = Path(__file__).with_name("tiny_chat_model.py")
    subprocess.run([sys.executable, str(maker), str(folder)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    for path in (folder, *folder.iterdir()):
        os.chown(path, lab.uid, lab.gid)
    return folder


@pytest.fixture(scope="module")
def new_chat(lab: Lab, model: Path) -> NewChat:
    def make(name: str, **changes) -> ChatRun:
        folder = lab.home / "chats" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run = ChatRun(lab, folder / "run", folder / "batch.yaml")
        chat = {"model": str(model), "max_tokens": TOKENS, "temperature": 0}
        bodies = [
            {**chat, "messages": [{"role": "user", "content": f"What is {n} {chr(0x100 + n)}"}]} for n in range(COUNT)
        ]
        bodies[BAD]["messages"] = "nothing that it could answer"
        lines = [{"custom_id": f"q{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                 for n, body in enumerate(bodies)]  # fmt: skip
        (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "transformers", "serve", str(model),
                   "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu"]  # fmt: skip
        section = {
            "input": str(folder / "chats.jsonl"), "concurrency": CONCURRENCY, "engine": {"command": command},
            "hang_timeout_s": 10, "base_delay_s": 0.1, **changes.pop("inference", {}),
        }  # fmt: skip
        config = {
            "run_folder": str(run.path), "nodes": NODES, "inference": section, "slurm": {"partition": "low"},
            "fault_tolerance": {"agent_timeout_s": 3, "supervisor_lease_s": 6, "retry_delay_s": 0}, **changes,
        }  # fmt: skip
        run.config.write_text(yaml.safe_dump(config))
        for path in (folder.parent, folder, *folder.iterdir()):
            os.chown(path, lab.uid, lab.gid)
        return run

    return make


@pytest.fixture(scope="module")
def calm(new_chat: NewChat) -> dict[str, str]:
    """The answers of a run that was left alone."""
    run = new_chat("calm")
    run.submit()
    run.wait_until_done(400)
    texts = run.texts()
    run.assert_as_in(texts)
    assert not run.events("replica died"), run.story()
    assert run.repeated() == 0
    assert len(set(texts.values())) > COUNT // 2, "it says something of its own to most of them"
    return texts


@pytest.mark.parametrize("victim", ["engine", "driver", "supervisor"])
def test_one_process_is_killed(new_chat: NewChat, calm: dict[str, str], victim: str) -> None:
    run = new_chat(f"{victim}-killed")
    run.submit()
    run.wait_for_answers(20)
    node = run.nodes[0]
    match victim:
        case "engine":
            run.kill_processes(node, run.ENGINE)
        case "driver":
            run.kill(node)
        case _:
            run.kill_supervisor()
    run.assert_as_in(calm)
    assert bool(run.events("replica died")) == (victim != "supervisor"), run.story()
    assert not run.events("requeueing"), run.story()
    assert run.repeated() <= CONCURRENCY * (NODES if victim == "supervisor" else 1)


def test_it_is_stopped(new_chat: NewChat, calm: dict[str, str]) -> None:
    """Found by the missing answers; it has no counter of tokens to look at."""
    run = new_chat("hung")
    run.submit()
    run.wait_for_answers(20)
    run.kill_processes(run.nodes[0], run.ENGINE, "STOP")
    run.assert_as_in(calm)
    assert "hang_timeout_s" in run.events("replica died")[0].details["reason"]


def test_the_batch_is_stopped_and_goes_on(new_chat: NewChat, calm: dict[str, str]) -> None:
    run = new_chat("stopped")
    job = run.submit()
    run.wait_for_answers(20)
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)
    assert run.events("decision")[-1].details["action"] == "stop"
    run.submit()
    run.assert_as_in(calm)
    assert run.repeated() == 0
