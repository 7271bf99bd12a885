"""``slurmft quickstart --infer`` on this machine: the trained GPT answers every prompt, though a replica is killed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.cli.submit import CONFIG, PROMPTS
from slurmft.examples.byte_gpt_engine import CHECKPOINTS_VARIABLE, Generator

pytestmark = pytest.mark.timeout(500)
LITTLE = "[python, -m, slurmft.examples.byte_gpt, --steps, '2', --limit-bytes, '200000', --eval-batches, '1']"


def slurmft(folder: Path, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run([sys.executable, "-m", "slurmft", *words], capture_output=True, text=True, timeout=400,
                          cwd=folder, env=environment, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_newest_model_answers_every_prompt_while_a_replica_is_killed(tmp_path):
    slurmft(tmp_path, "submit", str(CONFIG), "--cluster", "local", "--wait", "--set", f"command={LITTLE}",
            "--set", "run_folder=runs/quickstart-20260101-000000", "--set", "nproc_per_node=1")  # fmt: skip
    told = slurmft(tmp_path, "quickstart", "--infer")
    table = dict(re.findall(r"^  (requests|answered|errors|replicas killed|answers) +(.+)$", told, re.MULTILINE))
    assert table["replicas killed"] == "1 (died: 1, started again: 1)", told
    assert (table["requests"], table["answered"], table["errors"]) == (str(PROMPTS), str(PROMPTS), "0")
    answers = [json.loads(line) for line in Path(table["answers"]).read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"prompt-{number}" for number in range(PROMPTS)]
    (requests,) = (tmp_path / "runs").glob("infer-*/requests.jsonl")
    prompts = [json.loads(line)["prompt"] for line in requests.read_text().splitlines()]
    assert len(prompts) == PROMPTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHECKPOINTS_VARIABLE, str(tmp_path / "runs/quickstart-20260101-000000/checkpoints"))
        alone = Generator("cpu")
    for number in (0, PROMPTS // 2, PROMPTS - 1):
        assert alone([{"prompt": prompts[number]}]) == [answers[number]["response"]["body"]]
