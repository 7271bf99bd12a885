"""Restarts in the allocation: the workers are gone and come back, the job, its agents and its weights do not notice."""

import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually
from slurmft.checkpoint.catalog import Catalog

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
NODES = ("n1", "n2")
AT_ONCE_S = 5.0
"""On an idle machine it takes a third of a second; this one runs several clusters at once."""

FAILING = Path(__file__).parent / "trainers" / "fails.py"
DIES_IN_A_SAVE = Path(__file__).parent / "trainers" / "dies_in_a_save.py"


def actions(run: Run) -> list[str]:
    return [event.details["action"] for event in run.events("decision")]


def assert_restarted(run: Run, job: str, times: int, digest: str) -> None:
    """In one start of one job, with one set of agents, and the weights are those of a run that was left alone."""
    story = run.story()
    assert actions(run) == [*["restart"] * times, "finish"], story
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.{n}" for n in range(times + 1)]
    assert run.digest() == digest
    # the run is complete first, since agents may take long to end
    eventually(lambda: not list(run.folder.attempts.glob("*/secret")), 30, "nobody is let in after the end")


def seconds_to_first_step(run: Run, number: int) -> float:
    """From the moment at which the supervisor learned of the failure to the next new step."""
    failed, first = run.events("worker failed")[number - 1], run.events("first step")[number]
    return first.seconds() - failed.seconds()


@pytest.mark.parametrize(
    "ranks", [(1,), pytest.param((2, 3), marks=pytest.mark.soak)], ids=["one rank", "all ranks of a node"]
)
def test_killed_workers_come_back_at_once(new_run: NewRun, undisturbed: str, ranks: tuple[int, ...]) -> None:
    run = new_run(fault_tolerance={"num_in_job_restarts": 3})
    job = run.reach(28)
    run.kill_between_steps("n1" if 1 in ranks else "n2", *ranks)
    run.wait_until_done()
    assert_restarted(run, job, 1, undisturbed)
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["rank"] in ranks) == ("signal crash", True)
    kept, first = run.events("state kept just in time")[0].details, run.events("first step")[1].details
    assert kept["step"] >= 28 and first["resumed_from"] == kept["step"], "a completed step was lost"
    assert seconds_to_first_step(run, 1) < AT_ONCE_S, run.story()


@pytest.mark.long
@pytest.mark.parametrize(
    ("faults", "delay", "budget"), [(4, 0.1, 3), pytest.param(20, 0.4, 20, marks=pytest.mark.soak)], ids=["4", "20"]
)
def test_many_faults_in_a_row(new_run: NewRun, undisturbed: str, faults: int, delay: float, budget: int) -> None:
    """A seeded sequence; each comes as soon as there is a new step, while writers are at work on the last save."""
    run = new_run(
        delay=delay, fault_tolerance={"num_in_job_restarts": budget}, checkpoint={"interval_steps": 5}
    )  # fmt: skip
    job = run.submit()
    chance = random.Random(7)
    for number in range(1, faults + 1):
        run.wait_for("first step", number)
        saved = (number - 1) * 50 // faults  # some progress in between, or the budget would be spent
        eventually(lambda at_least=saved: newest(run) >= min(at_least, 55), 60, run.story)
        rank = chance.randrange(4)
        run.kill(NODES[rank // 2], rank, signal=chance.choice(["KILL", "SEGV", "ABRT"]))
        run.wait_for("worker failed", number)
    run.wait_until_done()
    assert_restarted(run, job, faults, undisturbed)
    seconds = [seconds_to_first_step(run, number) for number in range(1, faults + 1)]
    assert statistics.median(seconds) < AT_ONCE_S, seconds


def newest(run: Run) -> int:
    """Step of the newest checkpoint."""
    return max((entry.step for entry in Catalog(run.path / "checkpoints").committed()), default=0)


def test_an_exception_in_one_rank(new_run: NewRun) -> None:
    run = new_run(command=["python", str(FAILING), "--rank", "3", "--times", "1"],
                  fault_tolerance={"num_in_job_restarts": 3})  # fmt: skip
    run.submit()
    run.wait_until_done()
    assert actions(run) == ["restart", "finish"], run.story()
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["rank"], verdict["node"]) == ("worker error", 3, "n2"), run.story()


@pytest.mark.long
def test_what_fails_again_and_again_goes_through_the_queue_and_then_ends(new_run: NewRun) -> None:
    run = new_run(command=["python", str(FAILING), "--rank", "0", "--times", "99"],
                  fault_tolerance={"num_in_job_restarts": 2, "num_job_retries_on_failure": 1})  # fmt: skip
    job = run.submit()
    run.wait_until_out_of_queue(job)
    assert actions(run) == ["restart", "restart", "continue", "restart", "restart", "stop"], run.story()
    assert [event.attempt for event in run.events("attempt started")] == [
        f"{job}.{start}.{cycle}" for start in range(2) for cycle in range(3)
    ]


@pytest.mark.soak
@pytest.mark.parametrize("step", [5, 10], ids=["the first", "another"])
def test_a_rank_killed_while_it_copies_a_save_costs_no_step(new_run: NewRun, step: int) -> None:
    """The others have copied theirs; the step counts as kept only because they keep it anew."""
    run = new_run(checkpoint={"interval_steps": 5}, fault_tolerance={"num_in_job_restarts": 3})
    marks = run.path.with_name(f"marks-of-{step}")
    marks.mkdir()
    os.chown(marks, run.lab.uid, run.lab.gid)
    run.configure(
        command=["env", f"DIES_AT={step}", "python", str(DIES_IN_A_SAVE), "--marks", str(marks), "--steps", "12"]
    )
    run.submit()
    run.wait_until_done()
    assert actions(run) == ["restart", "finish"], run.story()
    assert [event.details["step"] for event in run.events("state kept just in time")] == [step], run.story()
    assert run.events("first step")[-1].details["resumed_from"] == step, run.story()
