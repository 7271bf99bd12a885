"""A job of a trainer, engines and an orchestrator on this machine: each is killed by itself, and nothing changes."""

import hashlib
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import psutil
import pytest
import yaml

from slurm.conftest import eventually
from slurm.test_just_in_time import kill_ranks
from slurm.test_local import PATIENCE_S, LocalRun
from slurmft.inference.endpoint import HighAvailabilityCluster
from slurmft.storage.run_folder import RunFolder

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
STEPS, RANKS = 60, 2


class Roles(LocalRun):
    """One run with three roles."""

    def __init__(self, path: Path, steps: int = STEPS) -> None:
        super().__init__(path)
        trainers = HERE / "trainers"
        self.config.write_text(yaml.safe_dump({
            "run_folder": str(path),
            "fault_tolerance": {"agent_timeout_s": 3, "supervisor_lease_s": 10, "retry_delay_s": 0},
            "roles": {
                "trainer": {
                    "command": [sys.executable, str(trainers / "from_queue.py"), str(steps)], "nodes": RANKS,
                    "checkpoint": {"interval_steps": 10},
                },
                "rollout": {
                    "engine": {"command": [sys.executable, str(HERE / "serving_engine.py"), "--socket", "{socket}"]},
                    "replicas": 2,
                },
                "orchestrator": {
                    "command": [sys.executable, str(trainers / "orchestrates.py"), str(steps), str(RANKS)],
                    "needs": ["rollout"], "nodes": 0, "fault_tolerance": {"preload": False},
                },
            },
        }))  # fmt: skip

    def role(self, name: str) -> LocalRun:
        """Its run."""
        run = object.__new__(LocalRun)
        run.folder = RunFolder(self.folder.path / "roles" / name)
        return run

    def events(self, event: str) -> list[dict]:
        return [each.details for each in self.folder.journal().read() if each.event == event]

    def story(self) -> str:
        return super().story() + "".join(
            f"\n== {name}\n{self.role(name).story()}" for name in ("trainer", "rollout", "orchestrator")
        )

    def wait_for_step(self, step: int) -> None:
        """Of the trainer."""
        self.role("trainer").wait_for_step(step)

    def processes(self, words: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if words in " ".join(process.cmdline()) and str(self.folder.path) in " ".join(
                    process.environ().values()
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Roles(tmp_path_factory.mktemp("roles") / "calm")
    run.submit()
    run.wait_until_done()
    assert [each["role"] for each in run.events("role started")] == ["rollout", "trainer", "orchestrator"], run.story()
    assert {each["role"]: each["done"] for each in run.events("role ended")} == {
        "orchestrator": True, "trainer": True, "rollout": False
    }, run.story()  # fmt: skip
    return run.role("trainer").digest()


def test_each_part_is_killed_alone_and_the_weights_are_those_of_the_calm_run(tmp_path: Path, calm: str) -> None:
    run = Roles(tmp_path / "killed")
    run.reach(5)
    kill_ranks(run.role("trainer"), 1)
    run.wait_for_step(15)
    for process in run.processes("serving_engine.py")[:1]:
        process.kill()
    run.wait_for_step(25)
    for process in run.processes("orchestrates.py")[:1]:
        process.kill()
    run.wait_until_done()
    assert run.role("trainer").digest() == calm
    starts = {name: len(run.role(name).events("attempt started")) for name in ("trainer", "rollout", "orchestrator")}
    assert starts["trainer"] == 2 and starts["rollout"] == 1, run.story()
    assert len(run.events("attempt started")) == 1, run.story()


@pytest.mark.long
def test_answers_are_of_weights_within_the_lag_whichever_part_is_killed(tmp_path: Path) -> None:
    run, notes, lag, steps = Roles(tmp_path / "versions"), tmp_path / "notes.jsonl", 1, 25
    config, trainers = yaml.safe_load(run.config.read_text()), HERE / "trainers"
    weights = {"update_path": "/load_weights", "version_path": "/version", "max_version_lag": lag}
    trainer = [sys.executable, str(trainers / "publishes.py"), str(steps), str(tmp_path)]
    config["roles"]["trainer"] |= {"command": trainer, "nodes": 1, "needs": ["rollout"]}
    config["roles"]["rollout"]["engine"]["command"] += ["--load", "0.2"]
    config["roles"]["rollout"]["serving"] = {"weights": weights}
    config["roles"]["orchestrator"]["command"] = [sys.executable, str(trainers / "asks.py"), str(notes)]
    run.config.write_text(yaml.safe_dump(config))
    run.reach(5)
    for process in run.processes("serving_engine.py")[:1]:
        process.kill()
    run.wait_for_step(16)
    kill_ranks(run.role("trainer"), 0)
    run.wait_until_done()
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    answers = [each for each in found if each["version"] is not None]
    for each in answers:
        made_by, version = each["answer"]["weights"], int(each["version"])
        assert made_by.rpartition("-")[2] == each["version"], each
        text = hashlib.sha256(f"{each['prompt']}{made_by}".encode()).hexdigest()
        assert each["answer"]["choices"][0]["text"] == text, each
        assert version >= min(each["before"] or 0, each["after"]) - lag, each
    lives = [life for life, _ in groupby(each["answer"]["weights"].rpartition("-")[0] for each in answers)]
    assert len(lives) == len(set(lives)) == 2, run.story()
    versions = {int(each["version"]) for each in answers}
    assert all(versions & {step - 2, step - 1, step} for step in range(steps)), "what the trainer has taken"


@pytest.mark.soak
def test_a_preemption_saves_all_roles_and_they_go_on(tmp_path: Path, calm: str) -> None:
    run = Roles(tmp_path / "preempted")
    run.reach(10)
    run.supervisor.terminate()
    run.wait_until_done()
    assert len(run.events("attempt started")) == 2, run.story()
    assert run.role("trainer").digest() == calm


@pytest.mark.soak
def test_a_stop_ends_all_roles_and_a_second_submission_goes_on(tmp_path: Path, calm: str) -> None:
    run = Roles(tmp_path / "stopped")
    run.reach(10)
    run.slurmft("stop", str(run.folder.path), "--timeout", "60")
    eventually(lambda: not run.processes("slurmft"), PATIENCE_S, run.story)
    assert run.folder.done() is None
    run.submit("--wait")
    assert run.role("trainer").digest() == calm


@pytest.mark.long
def test_a_role_whose_guardian_is_killed_is_begun_again_alone(tmp_path: Path, calm: str) -> None:
    run = Roles(tmp_path / "unguarded")
    run.reach(5)
    supervisor = run.role("trainer").supervisor
    others = [run.role(name).supervisor for name in ("rollout", "orchestrator")] + run.processes("serving_engine.py")
    guardian = supervisor.parent()
    assert guardian is not None and len(others) == 4
    guardian.suspend()  # else it would act in the supervisor's place
    supervisor.kill()
    guardian.kill()
    eventually(
        lambda: [each["role"] for each in run.events("role started")].count("trainer") == 2, PATIENCE_S, run.story
    )
    assert all(each.is_running() for each in others), run.story()
    run.wait_until_done()
    assert run.role("trainer").digest() == calm
    assert [each["role"] for each in run.events("role started")].count("trainer") == 2, run.story()
    assert len(run.events("attempt started")) == 1, run.story()


@pytest.mark.long
def test_roles_go_on_while_the_supervisor_of_the_job_is_killed(tmp_path: Path, calm: str) -> None:
    run = Roles(tmp_path / "supervised-anew")
    run.reach(5)
    for kills in (1, 2):
        run.supervisor.kill()
        eventually(lambda kills=kills: len(run.events("attempt started")) == 1 + kills, PATIENCE_S, run.story)
        run.wait_for_step(5 + 10 * kills)
    for process in run.processes("orchestrates.py")[:1]:
        process.kill()
    run.wait_until_done()
    assert run.role("trainer").digest() == calm
    assert [each["role"] for each in run.events("role started")] == ["rollout", "trainer", "orchestrator"], run.story()
    assert {each["role"]: each["code"] for each in run.events("role ended")} == {
        "trainer": 0, "orchestrator": 0, "rollout": 75
    }, run.story()  # fmt: skip
    for name in ("trainer", "rollout"):
        assert len(run.role(name).events("attempt started")) == 1, run.story()
    eventually(lambda: not run.processes("slurmft"), PATIENCE_S, run.story)


@pytest.mark.long
def test_roles_are_ended_where_nothing_follows_the_supervisor_that_was_killed(tmp_path: Path) -> None:
    run = Roles(tmp_path / "for-good")
    config = yaml.safe_load(run.config.read_text())
    config["fault_tolerance"] |= {"num_in_job_restarts": 0, "max_no_progress_cycles": 1}
    run.config.write_text(yaml.safe_dump(config))
    run.reach(5)
    for process in run.processes("from_queue.py"):
        process.suspend()  # they do not end by themselves
    run.supervisor.kill()
    eventually(lambda: not run.processes("slurmft") and not run.processes("from_queue.py"), PATIENCE_S, run.story)


@pytest.mark.long
def test_the_only_agent_of_an_endpoint_begins_again_in_place_at_its_port(tmp_path: Path, calm: str) -> None:
    run = Roles(tmp_path / "agentless")
    run.reach(5)
    rollout = run.role("rollout").folder
    routers = HighAvailabilityCluster.read(rollout.path).routers
    owners = [run.role(name).folder.owner() for name in ("rollout", "trainer", "orchestrator")]
    (agent,) = [each for each in run.processes(" slurmft agent ") if str(rollout.path) in " ".join(each.cmdline())]
    agent.kill()
    ready = lambda: [each.details for each in rollout.journal().read() if each.event == "router ready"]  # noqa: E731
    eventually(lambda: len(ready()) == 2, PATIENCE_S, run.story)
    assert ready()[0] == ready()[1] and ready()[0]["port"] == routers[0].port, run.story()
    run.wait_until_done()
    assert run.role("trainer").digest() == calm
    assert [run.role(name).folder.owner() for name in ("rollout", "trainer", "orchestrator")] == owners, run.story()
    assert len(run.events("role started")) == 3 and len(run.events("attempt started")) == 1, run.story()


def test_a_role_that_fails_for_good_ends_the_run_with_its_words(tmp_path: Path) -> None:
    run = Roles(tmp_path / "fails")
    config = yaml.safe_load(run.config.read_text())
    config["roles"]["orchestrator"] = {"command": [sys.executable, "-c", "raise ValueError('no such prompt')"]}
    config["fault_tolerance"]["num_job_retries_on_failure"] = 0
    run.config.write_text(yaml.safe_dump(config))
    result: subprocess.CompletedProcess[str] = run.submit("--wait", check=False)
    assert result.returncode == 1, run.story()
    decision = run.events("decision")[-1]
    assert "role orchestrator" in decision["reason"] and "no such prompt" in decision["reason"], run.story()
    eventually(lambda: not run.processes("slurmft"), PATIENCE_S, run.story)


def test_roles_on_this_machine_see_all_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    run = Roles(tmp_path / "gpus", steps=1)
    config = yaml.safe_load(run.config.read_text())
    command = [sys.executable, "-c", "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"]
    run.config.write_text(yaml.safe_dump({**config, "roles": {"a": {"command": command}}}))
    run.submit("--wait")
    (log,) = run.role("a").folder.attempts.glob("*/rank-0.log")
    assert log.read_text() == "sees 0,1,2\n"
