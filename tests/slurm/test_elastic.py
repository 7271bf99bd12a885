"""Runs whose number of nodes changes while they train: fewer when one dies, more when others lend theirs."""

from collections.abc import Callable

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
SMALL = {
    "nproc_per_node": 1,
    "checkpoint": {"interval_steps": 10},
    "fault_tolerance": {"num_in_job_restarts": 3, "supervisor_lease_s": 8},
}


def sizes(run: Run) -> list[int]:
    return [event.details["world_size"] for event in run.events("workers started")]


def wait_for_size(run: Run, size: int, count: int) -> None:
    """The ``count``-th attempt trains, on ``size`` ranks, from what the one before had saved or kept."""
    run.wait_for("first step", count, within_s=120)
    assert sizes(run)[count - 1] == size, run.story()
    if count > 1:
        ended = run.events("verdict")[count - 2]
        kept = [
            event.details["step"] for event in run.events("state kept just in time") if event.attempt == ended.attempt
        ]
        expected = max(ended.details["saved_step"], *kept, 0)
        assert run.events("first step")[count - 1].details["resumed_from"] == expected, run.story()


@pytest.mark.long
def test_four_then_three_then_five(lab: Lab, new_run: NewRun) -> None:
    """A node dies: three go on at once. Two are lent: five from the next checkpoint on. They are taken back: three."""
    run = new_run(steps=2000, nodes=4, elastic={"min_nodes": 1, "max_nodes": 5}, **SMALL)
    job = run.submit()
    wait_for_size(run, 4, 1)
    run.wait_for_step(12)
    lost = run.events("agents ready")[0].details["hosts"][3]
    lab.kill_node(lost)
    try:
        wait_for_size(run, 3, 2)
        run.wait_for("node given back", within_s=30)
    finally:
        lab.start_node(lost)
    lender = run.slurmft("join", str(run.path), "--nodes", "2", "--", "--time=5").split("job ")[1].split(",")[0]
    wait_for_size(run, 5, 3)
    lab.run(["scancel", lender])
    wait_for_size(run, 3, 4)
    run.slurmft("stop", str(run.path), "--timeout", "30")
    assert run.folder.jobs() == [job]
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.{cycle}" for cycle in range(4)]
    assert [event.details["cause"] for event in run.events("verdict")][1:3] == ["resized", "resized"], run.story()
    assert all(event.details["saved_step"] == event.details["last_step"] for event in run.events("verdict")[1:])
    eventually(lambda: not lab.run(["squeue", "-h", "-j", lender], check=False).stdout, 20, "the lender has ended")


@pytest.mark.soak
def test_down_to_its_least_size_in_the_allocation_and_below_it_through_the_queue(lab: Lab, new_run: NewRun) -> None:
    run = new_run(steps=2000, nodes=3, elastic={"min_nodes": 2, "max_nodes": 3}, **SMALL)
    job = run.submit()
    wait_for_size(run, 3, 1)
    run.wait_for_step(12)
    hosts = run.events("agents ready")[0].details["hosts"]
    try:
        for count, lost in enumerate((hosts[2], hosts[1]), start=1):
            lab.kill_node(lost)
            run.wait_for("decision", count)
            if count == 1:
                wait_for_size(run, 2, 2)
        assert [event.details["action"] for event in run.events("decision")] == ["restart", "continue"], run.story()
        assert run.wait_for("requeued").details["job"] == job, run.story()
    finally:
        for lost in hosts[1:]:
            lab.start_node(lost)
    run.wait_for("first step", 3)
    assert run.events("attempt started")[-1].attempt == f"{job}.1.0", run.story()
    assert sizes(run)[-1] >= 2, run.story()
    run.slurmft("stop", str(run.path), "--timeout", "30")
