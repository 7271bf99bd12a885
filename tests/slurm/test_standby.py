"""The batch host dies, or is cut off, and a standby supervisor on another node of the job takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
FAULTS = {"num_in_job_restarts": 3, "standby_supervisor": True}
LOST_TO_TRAINING_S = 10.0


@pytest.fixture
def run_with_standby(new_run: NewRun) -> Callable[..., Run]:
    def make(**changes: object) -> Run:
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


def newest_step(run: Run) -> int:
    return int((run.folder.progress() or {}).get("step") or 0)


def test_the_batch_host_dies(lab: Lab, run_with_standby: Callable[..., Run], undisturbed: str) -> None:
    run = run_with_standby()
    run.wait_for_saved(25)
    (job,) = run.folder.jobs()
    with without_power(lab, batch_host(run)):
        cut = run.events("first step")[0].seconds()
        run.wait_for("standby took over", within_s=20)
        run.wait_for("first step", 2, within_s=20)
        run.wait_until_done(120)
        run.wait_until_out_of_queue(job, 60)
    assert cut
    assert run.folder.jobs() == [job]
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{job}.0.1"], run.story()
    assert run.events("first step")[1].details["resumed_from"] >= 25
    assert run.digest() == undisturbed
