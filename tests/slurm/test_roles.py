"""A job of a trainer, engines and an orchestrator on the lab: preempted, requeued, and its processes are killed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm.conftest import PATIENCE_S, Run, eventually, preempt
from slurm.test_endings import kill, supervisor_of
from slurmft.lab.cluster import Lab
from slurmft.scheduler.slurm import expand

HERE = Path(__file__).parent
STEPS = 60


def roles(new_run: Callable[..., Run], name: str, steps: int = STEPS, **trainer: Any) -> Run:
    run = new_run(name)
    trainers = HERE / "trainers"
    config: dict[str, Any] = yaml.safe_load(run.config.read_text())
    for key in ("command", "nodes", "nproc_per_node", "checkpoint"):
        del config[key]
    config["fault_tolerance"] = {"agent_timeout_s": 3, "supervisor_lease_s": 10, "retry_delay_s": 0}
    config["roles"] = {
        "trainer": {
            "command": ["python", str(trainers / "from_queue.py"), str(steps)], "nodes": 2,
            "checkpoint": {"interval_steps": 10}, **trainer,
        },
        "rollout": {"engine": {"command": ["python", str(HERE / "serving_engine.py"), "--socket", "{socket}"]}},
        "orchestrator": {
            "command": ["python", str(trainers / "orchestrates.py"), str(steps), "2"], "needs": ["rollout"], "nodes": 0,
            "fault_tolerance": {"preload": False},
        },
    }  # fmt: skip
    run.config.write_text(yaml.safe_dump(config))
    return run


def role(run: Run, name: str) -> Run:
    return Run(run.lab, run.path / "roles" / name)


def story(run: Run) -> str:
    return run.story() + "".join(
        f"\n== {name}\n{role(run, name).story()}" for name in ("trainer", "rollout", "orchestrator")
    )


def wait_for_step(run: Run, step: int) -> None:
    trainer = role(run, "trainer").folder
    eventually(lambda: ((trainer.progress() or {}).get("step") or 0) >= step, PATIENCE_S, lambda: story(run))


@pytest.mark.long
def test_roles_are_preempted_together_and_lose_a_node_alone(lab: Lab, new_run: Callable[..., Run]) -> None:
    calm = roles(new_run, "roles-calm")
    calm.submit()
    eventually(lambda: calm.folder.done() is not None, PATIENCE_S, lambda: story(calm))

    run = roles(new_run, "roles-preempted")
    run.submit()
    wait_for_step(run, 10)
    preempt(lab)
    wait_for_step(run, 20)
    eventually(lambda: run.folder.done() is not None, PATIENCE_S, lambda: story(run))
    assert len(run.events("attempt started")) == 2, story(run)
    assert role(run, "trainer").digest() == role(calm, "trainer").digest(), story(run)
    print(story(run), file=sys.stderr)


@pytest.mark.long
def test_a_role_begins_again_alone_and_roles_go_on_without_the_supervisor_of_the_job(
    lab: Lab, new_run: Callable[..., Run]
) -> None:
    run = roles(new_run, "roles-unguarded")
    run.submit()
    wait_for_step(run, 10)
    owners = [role(run, name).folder.owner() for name in ("rollout", "orchestrator")]
    host, supervisor, guardian = supervisor_of(role(run, "trainer"))
    kill(lab, host, guardian, supervisor)
    eventually(lambda: len(role(run, "trainer").events("attempt started")) == 2, PATIENCE_S, lambda: story(run))
    ended, started = run.events("role ended")[0], run.events("role started")[-1]
    assert ended.details.get("begins_again") == "1 of 3", story(run)
    # its agents on other nodes have ended with their srun: the lease of 10 s need not run out
    assert (started.at - ended.at).total_seconds() < 5, story(run)

    wait_for_step(run, 20)
    host, supervisor, _ = supervisor_of(run)
    kill(lab, host, supervisor)
    eventually(lambda: run.folder.done() is not None, PATIENCE_S, lambda: story(run))
    assert [each.attempt.rpartition(".")[2] for each in run.events("attempt started")] == ["0", "1"], story(run)
    assert len(run.events("role started")) == 4, story(run)
    assert [role(run, name).folder.owner() for name in ("rollout", "orchestrator")] == owners, story(run)
    (last,) = [each for each in role(run, "trainer").events("verdict") if each.details["cause"] == "finished"]
    assert last.details["last_step"] == STEPS, story(run)


@pytest.mark.long
def test_roles_in_two_components_of_a_heterogeneous_job_go_on_as_such_a_job(
    lab: Lab, new_run: Callable[..., Run]
) -> None:
    calm = roles(new_run, "components-calm")
    calm.submit()
    eventually(lambda: calm.folder.done() is not None, PATIENCE_S, lambda: story(calm))

    run = roles(new_run, "components", slurm={"partition": "cancel"}, environment={"STEP_S": "0.4"})
    job, trainer = run.submit(), role(run, "trainer")
    wait_for_step(run, 5)
    assert_each_role_is_in_its_component(run, job)

    trainer.kill(nodes_of(run)["trainer"][1], 1)
    eventually(lambda: len(trainer.events("attempt started")) == 2, PATIENCE_S, lambda: story(run))
    wait_for_step(run, 15)
    assert len(run.events("attempt started")) == 1, story(run)

    preempt(lab)
    eventually(lambda: len(run.events("attempt started")) == 2, PATIENCE_S, lambda: story(run))
    wait_for_step(run, 25)
    assert_each_role_is_in_its_component(run, job)

    lab.run_as_admin(["scontrol", "requeue", job])
    eventually(lambda: len(run.events("attempt started")) == 3, PATIENCE_S, lambda: story(run))
    wait_for_step(run, 35)
    assert_each_role_is_in_its_component(run, job)

    eventually(lambda: run.folder.done() is not None, PATIENCE_S, lambda: story(run))
    assert trainer.digest() == role(calm, "trainer").digest(), story(run)


def nodes_of(run: Run) -> dict[str, list[str]]:
    """The nodes of each role in its newest start."""
    return {event.details["role"]: event.details["nodes"] for event in run.events("role started")}


def assert_each_role_is_in_its_component(run: Run, job: str) -> None:
    rows = run.lab.run(["squeue", "-h", "-j", job, "-o", "%i %P %N"]).stdout.splitlines()
    components = {name: (partition, expand(nodes)) for name, partition, nodes in map(str.split, rows)}
    found = nodes_of(run)
    assert components == {f"{job}+0": ("low", found["rollout"]), f"{job}+1": ("cancel", found["trainer"])}, story(run)
    assert found["orchestrator"] == found["rollout"], story(run)
