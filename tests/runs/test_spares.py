"""Agents and nodes that go away while a run trains: real nodes of a real cluster lose their power or their network."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runs.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

NewRun = Callable[..., Run]
RESTARTS = {"num_in_job_restarts": 3}
LOST_TO_TRAINING_S = 10.0
"""On a machine that is busy with other things; 3 s of it are agent_timeout_s. bench/ has the figure of a quiet one."""


def assert_in_place(run: Run, undisturbed: str, *, attempts: int = 2) -> None:
    """It went on within one start of one job, and ended with the weights of an undisturbed run."""
    run.wait_until_done()
    started = [event.attempt for event in run.events("attempt started")]
    job = run.folder.jobs()[0]
    assert started == [f"{job}.0.{cycle}" for cycle in range(attempts)], run.story()
    assert not run.events("requeueing"), run.story()
    assert run.digest() == undisturbed


def seconds_between(run: Run, first: str, second: str, count: int) -> float:
    return run.events(second)[count - 1].seconds() - run.events(first)[0].seconds()


def pids_on(run: Run, node: str, pattern: str) -> list[str]:
    return run.lab.run_on_as_admin(node, ["pgrep", "-o", "-f", pattern], check=False).stdout.split()


@pytest.mark.parametrize("victim", ["agent", "zygote"])
def test_what_keeps_the_workers_is_killed(new_run: NewRun, undisturbed: str, victim: str) -> None:
    """The workers die with it; it is started again where it was, since there is no spare."""
    run = new_run(fault_tolerance=RESTARTS)
    run.submit()
    run.wait_for_step(28)
    workers = run.pids("n2")
    pattern = f"[s]lurmft agent {run.path}" if victim == "agent" else "[s]lurmft.launch.zygote"
    (pid,) = pids_on(run, "n2", pattern)
    run.lab.run_on_as_admin("n2", ["kill", "-KILL", pid])
    eventually(lambda: not set(run.pids("n2").values()) & set(workers.values()), 5, "the workers died with it")
    assert_in_place(run, undisturbed)
    assert [event.details["hosts"] for event in run.events("agents ready")] == [["n1", "n2"]] * 2
    assert [event.details["node"] for event in run.events("agent back")] == ["n2"] * (victim == "agent")


def test_a_node_dies_and_the_spare_takes_over(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run(spare_nodes=1, fault_tolerance=RESTARTS)
    run.submit()
    run.wait_for_step(30)
    hosts = run.events("agents ready")[0].details["hosts"]
    lab.kill_node(hosts[1])
    try:
        run.wait_for("first step", 2)
        assert_in_place(run, undisturbed)
    finally:
        lab.start_node(hosts[1])
    assert run.events("agents ready")[1].details["hosts"][0] == hosts[0], "the other one kept its ranks"
    assert run.events("first step")[1].details["resumed_from"] >= 25
    assert seconds_between(run, "agent lost", "first step", 2) < LOST_TO_TRAINING_S - 3.0
