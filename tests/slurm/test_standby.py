"""The batch host dies, or is cut off, and a standby supervisor on another node of the job takes over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
FAULTS = {"num_in_job_restarts": 3, "standby_supervisor": True}
LOST_TO_TRAINING_S = 20.0
"""At a load of 50 on two cores it took up to 12 s."""


@pytest.fixture
def run_with_standby(new_run: NewRun) -> NewRun:
    def make(**changes: Any) -> Run:
        run = new_run(**{"spare_nodes": 1, "fault_tolerance": FAULTS, **changes})
        run.submit()
        run.wait_for("standby ready")
        return run

    return make


def batch_host(run: Run) -> str:
    return str(run.events("attempt started")[0].details["host"])


def standby_host(run: Run) -> str:
    return str(run.events("standby ready")[-1].details["node"])


@contextmanager
def without_power(lab: Lab, node: str) -> Iterator[None]:
    lab.kill_node(node)
    try:
        yield
    finally:
        eventually(lambda: lab.node_states().get(node, "").startswith("DOWN"), 60, f"{node} is DOWN")
        lab.start_node(node)


def assert_done(run: Run, undisturbed: str, *, attempts: int = 2) -> None:
    """It ended within one start of one job, which is out of the queue, with the weights of an undisturbed run."""
    run.wait_until_done(120)
    (job,) = run.folder.jobs()
    run.wait_until_out_of_queue(job, run.lab.settings.slurmd_timeout_s + 60)  # it is completing until a loss is noticed
    started = [event.attempt for event in run.events("attempt started")]
    assert started == [f"{job}.0.{cycle}" for cycle in range(attempts)], run.story()
    assert not run.events("requeueing"), run.story()
    assert run.digest() == undisturbed


def test_the_batch_host_dies(lab: Lab, run_with_standby: NewRun, undisturbed: str) -> None:
    """Between two steps, so that its ranks' notes have been sent: no step is lost."""
    run = run_with_standby(delay=0.2, checkpoint={"interval_steps": 25, "peer_copies": 1})
    run.wait_for_saved(25)
    run.wait_for_step(32)  # between two saves
    run.kill_between_steps(batch_host(run), signal="STOP")
    cut = time.time()
    with without_power(lab, batch_host(run)):
        resumed = run.wait_for("first step", 2, within_s=30)
        took_s = resumed.seconds() - cut
        print(f"power cut to the first step: {took_s:.2f} s")
        assert_done(run, undisturbed)
    assert took_s < LOST_TO_TRAINING_S, run.story()
    assert resumed.details["resumed_from"] >= 32, run.story()
    (kept,) = run.events("state kept just in time")
    assert kept.details["step"] == resumed.details["resumed_from"], run.story()
    verdicts = [event.details for event in run.events("verdict")]
    assert [each["cause"] for each in verdicts] == ["node lost", "finished"]
    assert verdicts[0]["node"] == batch_host(run)


@pytest.mark.soak
def test_a_frozen_supervisor_wakes_up_when_it_is_none_any_more(
    run_with_standby: NewRun, undisturbed: str
) -> None:  # fmt: skip
    run = run_with_standby(delay=0.3)
    run.wait_for_saved(25)
    owner = run.folder.owner()
    assert owner is not None
    run.lab.run_on_as_admin(owner.host, ["kill", "-STOP", str(owner.pid)])
    try:
        run.wait_for("first step", 2, within_s=30)
    finally:
        run.lab.run_on_as_admin(owner.host, ["kill", "-CONT", str(owner.pid)])
    run.wait_for("superseded", within_s=20)
    assert run.folder.done() is None, "too fast to show anything"
    assert_done(run, undisturbed)
    assert len(run.events("standby took over")) == 1


@pytest.mark.soak
def test_the_batch_host_is_cut_off(lab: Lab, run_with_standby: NewRun, undisturbed: str) -> None:
    """It can write to the run folder all the time, so that only its own insight ends its lease."""
    run = run_with_standby(delay=0.3)
    run.wait_for_saved(25)
    host, cut = batch_host(run), time.time()
    lab.partition(host)
    try:
        resumed = run.wait_for("first step", 2, within_s=60)
        print(f"partition to the first step: {resumed.seconds() - cut:.2f} s")
        run.wait_for("superseded", within_s=30)
        eventually(lambda: not run.pids(host), 30, "no worker is left on the node that is cut off")
        assert_done(run, undisturbed)
    finally:
        lab.heal(host)
    assert len(run.events("standby took over")) == 1
    assert len(run.events("decision")) == 2, "the supervisor that was cut off decided nothing"


@pytest.mark.soak
@pytest.mark.parametrize("how", ["stop", "requeue", "cancel"])
def test_the_life_of_the_job_goes_on_after_it(
    lab: Lab, run_with_standby: NewRun, undisturbed: str, how: str
) -> None:  # fmt: skip
    run = run_with_standby(delay=0.5)
    (job,) = run.folder.jobs()
    run.wait_for_saved(25)
    with without_power(lab, batch_host(run)):
        run.wait_for("first step", 2, within_s=30)
        if how == "cancel":
            lab.run(["scancel", job])
        else:
            run.slurmft(how, str(run.path))
        if how == "requeue":
            run.wait_for("requeued", within_s=60)
        else:
            run.wait_until_out_of_queue(job, 60)
    if how != "requeue":
        assert run.folder.done() is None
        assert len(run.events("first step")) == 2
        if how == "stop":
            assert run.events("decision")[-1].details["action"] == "stop"
        return
    run.wait_until_done(240)
    assert run.digest() == undisturbed
    assert [event.attempt for event in run.events("attempt started")][-1] == f"{job}.1.0"


@pytest.mark.soak
def test_the_node_of_the_standby_dies(lab: Lab, run_with_standby: NewRun) -> None:
    run = run_with_standby(delay=0.3)
    first = standby_host(run)
    with without_power(lab, first):
        run.wait_for("standby lost", within_s=20)
        run.wait_for("standby ready", 2, within_s=60)
        assert standby_host(run) not in {first, batch_host(run)}
    assert not run.events("standby took over")


@pytest.mark.soak
def test_a_killed_supervisor_on_a_living_node_is_the_guardians(run_with_standby: NewRun, undisturbed: str) -> None:
    run = run_with_standby(delay=0.2)
    run.wait_for_saved(25)
    owner = run.folder.owner()
    assert owner is not None
    run.lab.run_on_as_admin(owner.host, ["kill", "-KILL", str(owner.pid)])
    run.wait_for("supervisor lost", within_s=20)
    run.wait_until_done(240)
    assert not run.events("standby took over"), run.story()
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_with_fewer_nodes(lab: Lab, run_with_standby: NewRun) -> None:
    run = run_with_standby(spare_nodes=0, elastic={"min_nodes": 1})
    run.wait_for_saved(25)
    host, cut = batch_host(run), time.time()
    with without_power(lab, host):
        resumed = run.wait_for("first step", 2, within_s=40)
        print(f"power cut to the first step on fewer nodes: {resumed.seconds() - cut:.2f} s")
        run.wait_until_done(120)
    assert run.events("agents ready")[1].details["hosts"] == [standby_host(run)]
