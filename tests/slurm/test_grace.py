"""The time a stop has and the time it takes, on real Slurm: what submit says of it, and what the journal does."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slurm.conftest import Run, preempt
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
SLOW_SAVE = Path(__file__).parent / "trainers" / "slow_save.py"
INTERVAL_STEPS = 25


@pytest.fixture(scope="module")
def slow_while(lab: Lab) -> Path:
    """While this file exists, saves of these tests' runs take longer than any grace."""
    return lab.home / "saves-are-slow"


@pytest.fixture
def command(slow_while: Path) -> list[str]:
    slow_while.unlink(missing_ok=True)
    trainer = ["python", str(SLOW_SAVE), "--steps", "50", "--step-delay", "0.1"]
    return [*trainer, "--save-delay", "60", "--slow-while", str(slow_while)]


@pytest.fixture(scope="module")
def left_alone(lab: Lab, slow_while: Path) -> Run:
    """The same training as in all of these tests, in a workload of its own (another environment), undisturbed."""
    run = Run(lab, lab.home / "grace" / "left-alone")
    run.path.parent.mkdir()
    lab.run_as_admin(["chown", f"{lab.user}:", str(run.path.parent)])
    config = {
        "command": ["python", str(SLOW_SAVE), "--steps", "50", "--step-delay", "0.05",
                    "--slow-while", str(slow_while)],
        "run_folder": str(run.path),
        "nodes": 2,
        "nproc_per_node": 2,
        "checkpoint": {"interval_steps": INTERVAL_STEPS},
        "slurm": {"partition": "low", "time": "10"},
    }  # fmt: skip
    run.path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    run.submit()
    run.wait_until_done()
    return run


def try_submitting(run: Run, *options: str) -> subprocess.CompletedProcess[str]:
    """``slurmft submit``, expected to change nothing."""
    return run.lab.run(["slurmft", "submit", str(run.path.with_suffix(".yaml")), *options], check=False, timeout=60)


@pytest.mark.long
def test_a_save_longer_than_the_grace_is_told_and_the_newest_checkpoint_continues(
    lab: Lab, new_run: NewRun, command: list[str], slow_while: Path, left_alone: Run
) -> None:
    run = new_run(command=command)
    run.reach(INTERVAL_STEPS + 5)
    run.wait_for_saved(INTERVAL_STEPS)
    slow_while.touch()
    preempt(lab)
    overdue = run.wait_for("stop overdue").details
    slow_while.unlink()
    run.wait_until_done()

    requested = run.events("stop requested")[0].details
    grace_s = lab.settings.grace_s
    assert requested["cause"] == "preempted"
    assert grace_s - 5 < requested["seconds_left"] < grace_s, "what is left after the requeue's share"
    assert grace_s - 6 < overdue["unfinished_save_s"] < grace_s, run.story()
    verdict = run.events("verdict")[0].details
    lost = verdict["last_step"] - INTERVAL_STEPS
    assert verdict["saved_step"] == INTERVAL_STEPS
    assert lost >= 5
    assert overdue["steps_at_risk"] == lost
    assert run.events("stop without a save")[0].details["steps_at_risk"] == lost
    assert run.events("decision")[0].details["exit_code"] == 74
    assert not run.events("stop saved")
    assert "THE SAVE OF THIS STOP DID NOT FINISH" in run.story()
    assert run.events("first step")[1].details["resumed_from"] == INTERVAL_STEPS
    assert run.digest() == left_alone.digest()

    again = new_run("longer-than-the-grace-again", command=command)
    told = try_submitting(again, "--strict").stderr
    assert f"partition low leaves {grace_s} s (GraceTime)" in told
    assert "a save that was cut off at" in told
    assert f"up to {INTERVAL_STEPS} steps" in told
    assert not again.path.exists()


@pytest.mark.long
def test_what_a_stop_took_and_what_a_preemption_without_grace_cost_is_in_the_journal(
    lab: Lab, new_run: NewRun, command: list[str], slow_while: Path, left_alone: Run
) -> None:
    run = new_run("without-grace", command=command, slurm={"partition": "nograce"})
    told = try_submitting(run, "--strict")
    assert told.returncode == 2
    assert "warning: a preemption in partition nograce leaves no grace (GraceTime 0)" in told.stderr
    assert f"KillWait alone, {lab.settings.kill_wait_s} s" in told.stderr
    assert f"the newest periodic checkpoint continues, and up to {INTERVAL_STEPS} steps" in told.stderr
    assert not run.path.exists(), "refused, and nothing created"
    assert lab.run(["squeue", "-h"]).stdout == ""

    job = run.reach(5)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_for("first step", 2)
    run.wait_for_step(INTERVAL_STEPS + 5)
    run.wait_for_saved(INTERVAL_STEPS)
    slow_while.touch()
    preempt(lab)
    run.wait_for("stop without a save")
    slow_while.unlink()
    run.wait_until_done()

    stopped, preempted = (event.details for event in run.events("verdict")[:2])
    requested, saved = run.events("stop requested")[0].details, run.events("stop saved")[0].details
    assert saved["step"] == stopped["saved_step"] == stopped["last_step"]
    assert 0 < saved["seconds"] < 10
    assert saved["seconds"] + saved["seconds_left"] == pytest.approx(requested["seconds_left"], abs=0.01)
    assert preempted["saved_step"] == INTERVAL_STEPS
    lost = [event.details["steps_at_risk"] for event in run.events("stop without a save")]
    assert lost == [preempted["last_step"] - INTERVAL_STEPS]
    assert lost[0] > 0
    assert [event.details["steps_at_risk"] for event in run.events("stop overdue")] == lost
    assert run.events("placed"), "told before the kill, so that it does not wait Slurm's 121 s"
    assert run.digest() == left_alone.digest()


def test_the_second_submission_knows_what_the_first_one_measured(left_alone: Run) -> None:
    again = Run(left_alone.lab, left_alone.path.with_name("again"))
    config = yaml.safe_load(left_alone.path.with_suffix(".yaml").read_text()) | {"run_folder": str(again.path)}
    again.path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    dry_run = try_submitting(again, "--dry-run", "--strict")
    assert dry_run.returncode == 0
    assert dry_run.stdout.startswith("#!/bin/")
    note, *rest = dry_run.stderr.splitlines()
    assert re.match(r"grace: a stop needs [3-5][. ]", note), f"3 s for the requeue, a short step, a short save: {note}"
    assert note.endswith(f"and has 120 s at the time limit, {again.lab.settings.grace_s} s at a preemption")
    assert rest == []
    hurried = try_submitting(again, "--dry-run", "--set", "preemption.signal_lead_s=3").stderr
    assert "but Slurm signals only 3 s before the time limit: set preemption.signal_lead_s to at least 10" in hurried
    other = try_submitting(again, "--dry-run", "--set", "nodes=1").stderr
    assert "longest step and save are unknown" in other, "another workload"
    assert not again.path.exists()
