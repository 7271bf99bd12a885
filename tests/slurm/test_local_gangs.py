"""One engine over several nodes, on this machine: whichever of its processes ends, all end, and begin again."""

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slurm.conftest import eventually
from slurm.test_local import SLURMFT
from slurm.test_local_serving import HERE, Endpoint

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ENGINE = "gang_engine.py"
COMMAND = [sys.executable, str(HERE / ENGINE), "--rank", "{node_rank}", "--nodes", "{nodes}", "--head", "{head}",
           "--head-port", "{head_port}", "--port", "{port}"]  # fmt: skip
GANG: dict[str, Any] = {"engine": {"command": COMMAND, "nodes": 2}, "replicas_per_node": 1}


class Gang(Endpoint):
    """An endpoint, or a batch, of one engine over two nodes, with a third node in reserve."""

    def __init__(self, path: Path, **changes: Any) -> None:
        super().__init__(path, **GANG, **changes)
        self.change(spare_nodes=1)

    def change(self, **keys: Any) -> None:
        self.config.write_text(yaml.safe_dump({**yaml.safe_load(self.config.read_text()), **keys}))

    def engine(self, rank: int) -> psutil.Process:
        """Of the gang that there is now."""
        found = [each for each in self.processes(ENGINE) if f"--rank {rank} " in " ".join(each.cmdline())]
        return found[-1]

    def agent_of(self, rank: int) -> psutil.Process:
        """That on whose node the engine has its process of this rank."""
        parents = self.engine(rank).parents()
        return next(each for each in parents if "agent" in each.cmdline())

    def kill(self, victim: str) -> None:
        match victim:
            case "head":
                self.engine(0).kill()
            case "member":
                self.engine(1).kill()
            case "agent of the member":
                self.agent_of(1).kill()
            case "agent of the head":
                self.agent_of(0).kill()
            case "supervisor":
                self.supervisor.kill()


VICTIMS = ["member", "agent of the head", "supervisor",
           *(pytest.param(each, marks=pytest.mark.soak) for each in ("head", "agent of the member"))]  # fmt: skip


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Gang]:
    found = Gang(tmp_path / "endpoint")
    found.slurmft("serve", str(found.config), "--cluster", "local")
    found.wait_for(2, 1)
    yield found
    found.slurmft("stop", str(found.folder.path), "--timeout", "30")
    eventually(lambda: found.processes(ENGINE) == [], 20, "a process of an engine is left")


@pytest.mark.parametrize("victim", VICTIMS)
def test_no_request_of_a_patient_client_fails_when_a_part_of_the_engine_dies(endpoint: Gang, victim: str) -> None:
    load = endpoint.load(60)
    eventually(lambda: (endpoint.folder.progress() or {}).get("step", 0) > 50, 60, endpoint.story)
    before = {each.pid for each in endpoint.processes(ENGINE)}
    endpoint.kill(victim)
    if victim == "supervisor":
        eventually(lambda: len(endpoint.events("endpoint opened")) == 2, 90, endpoint.story)
    else:
        eventually(lambda: len(endpoint.events("replica ready")) == 2, 90, endpoint.story)
    done = (endpoint.folder.progress() or {}).get("step", 0)
    eventually(lambda: (endpoint.folder.progress() or {}).get("step", 0) > done + 50, 60, endpoint.story)
    (endpoint.folder.path.parent / "enough").touch()
    told = json.loads(load.communicate(timeout=120)[0])
    assert told["errors"] == {}, f"{told}\n{endpoint.story()}"
    assert told["right"] == told["asked"] > 100, told
    after = {each.pid for each in endpoint.processes(ENGINE)}
    if victim == "supervisor":
        assert after == before and len(endpoint.events("gang formed")) == 1, endpoint.story()
        return
    assert len(after) == 2 and not after & before, "no process of it lives on without the others"
    died = endpoint.events("replica died")
    assert len(died) <= 1 and not endpoint.events("evidence"), "an end counts once for all of them"
    if victim in ("head", "member"):
        assert len(died) == 1 and len(endpoint.events("gang formed")) == 1
        assert ("member 1 on" in died[0].details["reason"]) == (victim == "member"), died[0]
    else:
        broken, formed = endpoint.events("gang broken")[0], endpoint.events("gang formed")[1]
        assert {0, 1, 2} - {*broken.details["numbers"]} <= {*formed.details["numbers"]}, endpoint.story()


def test_an_update_goes_back_when_a_node_of_the_gang_falls_silent(tmp_path: Path) -> None:
    """Not only when the new engine, which never becomes ready, would have had to be."""
    run = Gang(tmp_path / "endpoint")
    run.change(fault_tolerance={"agent_timeout_s": 3})
    run.slurmft("serve", str(run.config), "--cluster", "local")
    run.wait_for(2, 1)
    config = yaml.safe_load(run.config.read_text())
    config["inference"]["engine"]["command"] = [sys.executable, "-c", "import time; time.sleep(600)", *COMMAND[1:]]
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(config))
    update = subprocess.Popen([*SLURMFT, "serve", "--update", str(tmp_path / "new.yaml")], stderr=subprocess.PIPE)
    silent: list[psutil.Process] = []
    try:
        eventually(lambda: len(run.processes("time.sleep")) == 2, 60, run.story)
        agent = run.agent_of(1)
        silent = [agent, *agent.children(recursive=True)]
        for process in silent:
            process.suspend()
        eventually(lambda: run.events("update went back"), 60, run.story)
        assert "nothing was heard" in run.events("agent lost")[0].details["reason"], run.story()
        assert "is gone" in run.events("update went back")[0].details["reason"], run.story()
        assert update.wait(60) == 75
        eventually(lambda: len(run.events("replica ready")) == 2, 90, run.story)
    finally:
        update.kill()
        update.communicate()
        for process in silent:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.slurmft("stop", str(run.folder.path), "--timeout", "60")
    eventually(lambda: run.processes(ENGINE) == [], 20, "a process of an engine is left")


def test_an_update_goes_on_when_a_node_in_reserve_is_lost(endpoint: Gang, tmp_path: Path) -> None:
    go, config = tmp_path / "go", yaml.safe_load(endpoint.config.read_text())
    waits = f'while [ ! -e {go} ]; do sleep 0.1; done; exec "$@"'
    config["inference"]["engine"]["command"] = ["/bin/sh", "-c", waits, "new-engine", *COMMAND]
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(config))
    used = {endpoint.agent_of(0).pid, endpoint.agent_of(1).pid}
    beside = endpoint.agent_of(0).parent()
    assert beside is not None
    reserve = [each for each in beside.children() if "agent" in each.cmdline() and each.pid not in used]
    assert len(reserve) == 1, reserve
    with subprocess.Popen([*SLURMFT, "serve", "--update", str(tmp_path / "new.yaml")]) as update:
        eventually(lambda: len(endpoint.processes("new-engine")) == 2, 60, endpoint.story)
        reserve[0].kill()
        eventually(lambda: endpoint.events("agent lost"), 60, endpoint.story)
        go.touch()
        assert update.wait(60) == 0, endpoint.story()
    assert endpoint.events("update done") and not endpoint.events("update went back"), endpoint.story()


@pytest.mark.parametrize("victim", ["member", "agent of the head"])
def test_a_batch_has_every_answer_once_when_a_part_of_the_engine_dies(tmp_path: Path, victim: str) -> None:
    batch = Gang(tmp_path / "batch", concurrency=4)
    prompts = [f"prompt {number}" for number in range(120)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    section = {**yaml.safe_load(batch.config.read_text())["inference"], "input": str(tmp_path / "in.jsonl")}
    del section["serving"]
    batch.change(inference=section)
    batch.slurmft("infer", str(batch.config), "--cluster", "local")
    eventually(lambda: (batch.folder.progress() or {}).get("step", 0) > 20, 90, batch.story)
    batch.kill(victim)
    eventually(lambda: batch.folder.done() is not None, 90, batch.story)
    lines = (batch.folder.path / "output" / "answers.jsonl").read_text().splitlines()
    found = [json.loads(line)["response"]["body"]["text"] for line in lines]
    assert found == [hashlib.sha256(each.encode()).hexdigest() for each in prompts], batch.story()
    eventually(lambda: batch.processes(ENGINE) == [], 20, "a process of an engine is left")
