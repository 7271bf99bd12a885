"""Slurm itself is away, slow, or says no at the moment of the requeue. The commands are the real ones behind a wrapper
that can be told to misbehave; the controller that is away is really stopped."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually, submit_with
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]


def stop_while(run: Run, moody: Path, mode: str) -> str:
    """Submit it, and send a TERM while the commands behave like that; returns the job id."""
    job = submit_with(run, moody)
    run.wait_for_step(20)
    (moody / "mode").write_text(f"{mode}\n")
    run.lab.run(["scancel", "--signal=TERM", job])
    return job


@pytest.mark.soak
def test_an_answer_after_the_timeout_is_no_second_requeue(
    lab: Lab, new_run: NewRun, undisturbed: str, moody: Path
) -> None:
    run = new_run()
    job = stop_while(run, moody, "late")
    run.wait_for("attempt started", 2)
    run.wait_until_done()
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{job}.1.0"]
    assert run.digest() == undisturbed


def test_a_successor_that_was_submitted_unheard_is_found(
    lab: Lab, new_run: NewRun, undisturbed: str, moody: Path
) -> None:
    run = new_run(preemption={"continue_by": "resubmit"})
    stop_while(run, moody, "late")
    run.wait_until_done()
    assert sum(" sbatch " in line for line in (moody / "calls").read_text().splitlines()) == 2, "the first, one more"
    assert len(run.folder.jobs()) == len(run.events("attempt started")) == 2
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_site_that_refuses_requeueing_gets_a_successor_once(
    lab: Lab, new_run: NewRun, undisturbed: str, moody: Path
) -> None:
    run = new_run()
    job = stop_while(run, moody, "refuse")
    run.wait_until_done()
    first, second = run.folder.jobs()
    assert first == job
    assert f"{first} > {second}" in run.slurmft("status", str(run.path))
    assert len(run.events("resubmitted")) == 1
    assert run.digest() == undisturbed


@pytest.mark.long
def test_the_controller_is_away_when_the_job_is_requeued(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(20)
    lab.run(["scancel", "--signal=TERM", job])
    lab.stop_controller()
    try:
        run.wait_for("requeueing")
        time.sleep(35)  # the time itself is what is tested
    finally:
        lab.start_controller()
    run.wait_for("requeued", within_s=60)
    run.wait_for("attempt started", 2, within_s=100)
    run.wait_until_done()
    assert run.folder.jobs() == [job]
    assert len(run.events("stop requested")) == 1
    assert run.digest() == undisturbed


def test_nothing_is_requeued_that_was_cancelled_meanwhile(lab: Lab, new_run: NewRun, moody: Path) -> None:
    """The TERM, then silence, then a scancel: what people do when they think that it hangs."""
    run = new_run()
    job = stop_while(run, moody, "fail")
    run.wait_for("requeueing")
    lab.run(["scancel", job])
    eventually(lambda: not lab.run(["squeue", "-h", "-t", "R", "-j", job], check=False).stdout, 30, run.story)
    (moody / "mode").write_text("none\n")
    run.wait_until_out_of_queue(job)
    assert len(run.events("attempt started")) == 1
    assert not run.events("requeued"), run.story()
