"""Agents and nodes that go away while a run trains: real nodes of a real cluster lose their power or their network."""

from collections.abc import Callable

import pytest

from slurm.conftest import Run, eventually
from slurmft.checkpoint.catalog import Catalog
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
RESTARTS = {"num_in_job_restarts": 3}
LOST_TO_TRAINING_S = 10.0
"""On a machine that is busy with other things; 3 s of it are agent_timeout_s. bench/ has the figure of a quiet one."""


def assert_in_place(run: Run, undisturbed: str, *, attempts: int = 2) -> None:
    """It went on within one start of one job, and ended with the weights of an undisturbed run."""
    run.wait_until_done(180)
    started = [event.attempt for event in run.events("attempt started")]
    job = run.folder.jobs()[0]
    assert started == [f"{job}.0.{cycle}" for cycle in range(attempts)], run.story()
    assert not run.events("requeueing"), run.story()
    assert run.digest() == undisturbed


def seconds_between(run: Run, first: str, second: str, count: int) -> float:
    return run.events(second)[count - 1].seconds() - run.events(first)[0].seconds()


def agent_of(run: Run) -> str:
    """What its command line looks like; that of srun, on the batch host, holds the same words."""
    return f"^[^ ]*python[^ ]* .*slurmft agent {run.path}"


def pids_on(run: Run, node: str, pattern: str) -> list[str]:
    return run.lab.run_on_as_admin(node, ["pgrep", "-o", "-f", pattern], check=False).stdout.split()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["agent", pytest.param("zygote", marks=pytest.mark.soak)])
def test_what_keeps_the_workers_is_killed(new_run: NewRun, undisturbed: str, victim: str) -> None:
    """The workers die with it; it is started again where it was, since there is no spare."""
    run = new_run(fault_tolerance=RESTARTS)
    run.reach(28)
    workers = run.pids("n2")
    pattern = agent_of(run) if victim == "agent" else "[s]lurmft.agent.zygote"
    (pid,) = pids_on(run, "n2", pattern)
    run.lab.run_on_as_admin("n2", ["kill", "-KILL", pid])
    eventually(lambda: not set(run.pids("n2").values()) & set(workers.values()), 5, "the workers died with it")
    assert_in_place(run, undisturbed)
    assert [event.details["hosts"] for event in run.events("agents ready")] == [["n1", "n2"]] * 2
    assert [event.details["node"] for event in run.events("agent back")] == ["n2"] * (victim == "agent")


def test_a_node_dies_and_the_spare_takes_over(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run(spare_nodes=1, fault_tolerance=RESTARTS)
    run.submit()
    run.wait_for_saved(25)
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


@pytest.mark.soak
def test_a_spare_that_has_rehearsed_takes_over(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run(delay=1.0, spare_nodes=1, spares="rehearse", fault_tolerance=RESTARTS)
    run.submit()
    run.wait_for("spare rehearsed")
    [rehearsed] = run.events("spare rehearsed")
    hosts = run.events("agents ready")[0].details["hosts"]
    assert rehearsed.details["reason"] == "", run.story()
    assert rehearsed.details["node"] not in hosts
    run.wait_for_saved(25)
    lab.kill_node(hosts[1])
    try:
        assert_in_place(run, undisturbed)
    finally:
        lab.start_node(hosts[1])
    assert rehearsed.details["node"] in run.events("agents ready")[1].details["hosts"]


@pytest.mark.long
def test_both_halves_of_a_partition(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """All ranks are on the node that is cut off, so they could go on there. What they write counts no more."""
    run = new_run(
        delay=0.5, nodes=1, spare_nodes=1, nproc_per_node=4, checkpoint={"interval_steps": 5},
        fault_tolerance={**RESTARTS, "supervisor_lease_s": 12},
    )  # fmt: skip
    run.reach(7, within_s=120)
    host, spare = run.events("attempt started")[0].details["host"], "n2"
    run.lab.run_on_as_admin(host, ["kill", "-KILL", *pids_on(run, host, agent_of(run))])
    run.wait_for("first step", 2)  # off the host of the supervisor
    assert run.events("agents ready")[1].details["hosts"] == [spare], run.story()
    lab.partition(spare)
    try:
        run.wait_for("first step", 3)
        assert run.events("agents ready")[2].details["hosts"] == [host], run.story()
        eventually(lambda: not run.pids(spare), 30, "the isolated workers have ended by themselves")
        eventually(lambda: not pids_on(run, spare, agent_of(run)), 30, "and so has their agent")
    finally:
        lab.heal(spare)
    assert_in_place(run, undisturbed, attempts=3)
    resumed = run.events("first step")[2].details["resumed_from"]
    committed = Catalog(run.path / "checkpoints").committed()
    assert [entry.step for entry in committed if entry.generation == 2 and entry.step > resumed] == []
    assert max(entry.generation for entry in committed) == 3
