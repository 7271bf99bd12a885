"""Ends after which a job must not run again, in the grace of a preemption and after one: newer Slurms would undo them.

On 22.05 the same happens by itself; ``test_releases`` runs these tests on newer releases as well.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually, preempt, submit_with
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import installed
from slurmft.policy.verdict import UNDONE_WITHIN_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
TRAINERS = Path(__file__).parent / "trainers"
REQUEUES_WITHIN_THE_GRACE = ("24.11", "26.05")


def release_of(lab: Lab) -> str:
    return lab.settings.release or installed()


def assert_over(run: Run, job: str, *, attempts: int) -> None:
    """Nothing of the job is left in the queue, not even to begin later, and nothing was trained meanwhile."""
    run.wait_until_out_of_queue(job, within_s=40)
    assert len(run.events("attempt started")) == attempts, run.story()


@pytest.fixture
def slow(new_run: NewRun, lab: Lab) -> Iterator[Callable[..., Run]]:
    """Makes a run whose saves take 5 s while it is being preempted, so that there is time for more."""
    marker = lab.home / "saves-take-five-seconds"
    marker.unlink(missing_ok=True)
    trainer = [sys.executable, str(TRAINERS / "slow_save.py"), "--steps", "200", "--step-delay", "0.1"]

    def make(*options: str, **changes: object) -> Run:
        command = [*trainer, "--save-delay", "5", "--slow-while", str(marker), *options]
        return new_run(command=command, checkpoint={"interval_steps": 1000}, **changes)

    yield make
    marker.unlink(missing_ok=True)


def preempt_with_slow_saves(run: Run) -> None:
    (run.lab.home / "saves-take-five-seconds").touch()
    preempt(run.lab)
    run.wait_for("stop requested")


def test_a_stop_in_the_grace_is_not_undone(slow: Callable[..., Run]) -> None:
    run = slow()
    job = run.reach(5)
    preempt_with_slow_saves(run)
    run.slurmft("stop", str(run.path), "--timeout", "60")
    assert run.events("will not continue"), run.story()
    assert_over(run, job, attempts=1)
    off = run.events("switching requeue off")
    assert [event.details["job"] for event in off] == [job]
    assert "grace of a preemption" in off[0].details["reason"]
    assert not run.events("requeue stays on")


def test_a_failed_validation_in_the_grace_is_not_tried_again(slow: Callable[..., Run]) -> None:
    run = slow("--save-exit", "17")
    job = run.reach(5)
    preempt_with_slow_saves(run)
    decision = run.wait_for("decision").details
    assert (decision["action"], decision["exit_code"]) == ("stop", 17), run.story()
    assert_over(run, job, attempts=1)
    assert run.events("switching requeue off")


@pytest.mark.long
def test_of_a_job_and_its_successor_only_the_successor_trains(new_run: NewRun, lab: Lab, undisturbed: str) -> None:
    run = new_run(preemption={"continue_by": "resubmit"})
    job = run.reach(10)
    preempt(lab)
    run.wait_for("resubmitted")
    run.wait_until_out_of_queue(job, within_s=40)
    run.wait_until_done()
    successor = run.folder.jobs()[1]
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{successor}.0.0"]
    assert "another job continues the run" in run.events("switching requeue off")[0].details["reason"]
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_stop_in_the_start_after_a_preemption_is_not_undone(new_run: NewRun, lab: Lab) -> None:
    run = new_run(delay=0.3)
    job = run.reach(10)
    preempt(lab)
    run.wait_for("first step", 2)
    run.slurmft("stop", str(run.path), "--timeout", "60")
    assert_over(run, job, attempts=2)
    assert "in an earlier start" in run.events("switching requeue off")[0].details["reason"]


@pytest.mark.soak
def test_a_calm_stop_leaves_the_job_to_be_requeued_by_hand(new_run: NewRun, lab: Lab, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(10)
    run.slurmft("stop", str(run.path), "--timeout", "60")
    run.wait_until_out_of_queue(job, within_s=40)
    assert not run.events("switching requeue off")
    stopped = run.events()[-1].at.timestamp()
    eventually(lambda: time.time() > stopped + UNDONE_WITHIN_S + 2, 40, "time for a person to think again")
    lab.run(["scontrol", "requeue", job])
    run.slurmft("requeue", str(run.path))  # or wait for Slurm's own 121 s
    run.wait_until_done()
    assert run.digest() == undisturbed


def test_a_job_that_slurm_requeues_all_the_same_ends_at_once(slow: Callable[..., Run], lab: Lab, moody: Path) -> None:
    run = slow()
    job = submit_with(run, moody)
    run.wait_for_step(5)
    preempt_with_slow_saves(run)
    (moody / "mode").write_text("refuse\n")
    run.slurmft("stop", str(run.path), "--timeout", "60")
    run.wait_for("requeue stays on")
    (moody / "mode").write_text("none\n")

    def state() -> str:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.strip()

    eventually(lambda: state() in ("", "PENDING"), 40, run.story)
    assert (state() == "PENDING") == (release_of(lab) in REQUEUES_WITHIN_THE_GRACE), run.story()
    if state():
        run.slurmft("requeue", str(run.path))  # or wait for Slurm's own 121 s
        told = run.wait_for("superfluous start")
        assert told.attempt.startswith(f"{job}.1.")
        assert told.details["earlier"] == f"{job}.0.0"
    assert_over(run, job, attempts=1)
