"""TRL's GRPOTrainer and engines of its policy as roles: each is killed, the job is stopped, the weights stay the same.

Engines are a small server with a model of Hugging Face, and vLLM itself where ``build/vllm`` has it (``make soak``).
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from extras import needs

from slurm.conftest import eventually
from slurm.test_just_in_time import kill_ranks
from slurm.test_local_roles import Roles

# not of `make test`: the package dill, which comes with datasets, opens /dev/null to write when torch is imported, and
# in the lab's OCI containers nobody may
pytestmark = [needs("trl", "datasets", "openai"), pytest.mark.timeout(1200), pytest.mark.soak]
HERE = Path(__file__).parent
STEPS, PATIENCE_S = 30, 500.0
VLLM = HERE.parents[1] / "build" / "vllm" / "bin" / "python"
"""An environment of its own: its packages are not compatible with ours."""

OWN = [sys.executable, str(HERE / "trl_engine.py"), "--socket", "{socket}"]
OF_VLLM = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--port", "{port}", "--enforce-eager",
           "--dtype=float32", "--max-model-len=64", "--no-enable-prefix-caching", "--model"]  # fmt: skip
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
               "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
LARGEST_DIFFERENCE = 1e-4
"""Of log-probabilities of the same weights: sums are made in another order. One step changes them by some 0.3."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    subprocess.run([sys.executable, str(HERE / "tiny_chat_model.py"), str(folder)], check=True)
    return folder


class Learning(Roles):
    """A trainer of TRL and its engines."""

    def __init__(self, path: Path, model: Path, engine: list[str], replicas: int) -> None:
        super().__init__(path)
        config = yaml.safe_load(self.config.read_text())
        script = [sys.executable, str(HERE / "trainers" / "trl_grpo.py"), str(model), str(path / "out"), str(STEPS)]
        body = '{"method": "reload_weights", "kwargs": {"weights_path": "{path}"}}'
        serving = {"weights": {"update_path": "/collective_rpc", "update_body": body, "max_version_lag": 0}}
        config["roles"] = {
            "trainer": {"command": script, "needs": ["rollout"], "nproc_per_node": 2},
            "rollout": {"engine": {"command": [*engine, str(model)]}, "replicas": replicas, "serving": serving},
        }
        self.config.write_text(yaml.safe_dump({**config, "environment": ENVIRONMENT}))

    def rows(self) -> dict[tuple[int, int, int], list]:
        """Step, rank and number of a row -> prompt, answer and reward that were learned from, the same in all lives."""
        found: dict[tuple[int, int, int], list] = {}
        for line in (self.folder.path / "out" / "rows.jsonl").read_text().splitlines():
            step, rank, number, differs, prompt, ids, reward = json.loads(line)
            assert ids and math.isfinite(reward) and differs < LARGEST_DIFFERENCE, line
            row = [prompt, ids, reward]
            assert found.setdefault((step, rank, number), row) == row, f"{line}\n{self.story()}"
        return found

    def count(self, role: str, event: str) -> int:
        return sum(each.event == event for each in self.role(role).folder.journal().read())


@pytest.mark.parametrize(
    ("engine", "replicas"),
    [
        pytest.param(OWN, 2, id="own"),
        pytest.param(OF_VLLM, 1, id="vllm", marks=pytest.mark.skipif(
            not VLLM.exists(), reason="vLLM is not in build/vllm (make soak)")),
    ],
)  # fmt: skip
def test_trainer_engines_and_job_end_in_between_and_the_weights_are_those_of_a_calm_run(
    tmp_path: Path, model: Path, engine: list[str], replicas: int
) -> None:
    calm = Learning(tmp_path / "calm", model, engine, replicas)
    calm.submit()
    eventually(lambda: calm.folder.done() is not None, PATIENCE_S, calm.story)
    assert (calm.count("trainer", "attempt started"), calm.count("rollout", "replica died")) == (1, 0), calm.story()
    run = Learning(tmp_path / "killed", model, engine, replicas)
    run.submit()
    eventually(lambda: ((run.role("trainer").folder.progress() or {}).get("step") or 0) >= 5, PATIENCE_S, run.story)
    engines = run.processes(" ".join(engine[1:3]))
    assert len(engines) == replicas
    for process in engines:
        process.kill()
    eventually(lambda: run.count("rollout", "replica ready") == 2 * replicas, PATIENCE_S, run.story)
    kill_ranks(run.role("trainer"), 1)
    eventually(lambda: run.count("trainer", "first step") == 2, PATIENCE_S, run.story)
    run.slurmft("stop", str(run.folder.path), "--timeout", "90")
    assert run.folder.done() is None, run.story()
    run.submit()
    eventually(lambda: run.folder.done() is not None, PATIENCE_S, run.story)

    assert run.rows() == calm.rows()
    assert sorted(run.rows()) == [(step, rank, number) for step in range(STEPS) for rank in (0, 1) for number in (0, 1)]
    assert run.role("trainer").digest() == calm.role("trainer").digest()
    assert (run.count("rollout", "replica died"), run.count("rollout", "attempt started")) == (replicas, 2), run.story()
    paths = sorted(run.role("trainer").folder.attempts.glob("*/rank-0.log"), key=lambda path: path.stat().st_mtime)
    starts = [re.findall(r"resumed from (?:None|\S+-(\d+))", path.read_text()) for path in paths]
    assert [len(each) for each in starts] == [1, 1, 1] and starts[0] == [""], run.story()
    assert 4 <= int(starts[1][0]) < int(starts[2][0]) < STEPS
