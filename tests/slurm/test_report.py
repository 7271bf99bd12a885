"""What a report says that faults have cost is what they did cost, by the clock of the trainer itself."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from slurm.conftest import Run, preempt
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
CLOCKED = Path(__file__).parent / "trainers" / "clocked.py"
WITHIN_S = 1.0
HANGING = {"rank_section_timeouts": {"step": 6}, "rank_out_of_section_timeout": 60, "rank_heartbeat_timeout": 60}


def clocked(run: Run) -> list[tuple[int, float]]:
    """Steps and the times at which rank 0 has done them."""
    lines = Path(f"{run.path}.clock").read_text().splitlines()
    return [(int(step), float(at)) for step, at in map(str.split, lines)]


def interruptions(times: list[tuple[int, float]]) -> list[float]:
    """Seconds from the last step before each restart until the run was as far again, less the step that was due."""
    found = []
    for index, ((last, at), (step, _)) in enumerate(pairwise(times)):
        if step <= last or times[index + 1][1] - at > 3:
            again = next(later for number, later in times[index + 1 :] if number >= last)
            found.append(again - at)
    return found


def wait_until_as_far_again(run: Run, restarts: int) -> None:
    """Also after a failure right behind a checkpoint, which undoes no step: nothing is caught up with then."""
    run.wait_for("first step", 1 + restarts)
    run.wait_for_step(run.events("verdict")[-1].details["last_step"] + 1)


@pytest.mark.long
def test_a_report_knows_what_a_kill_a_hang_and_a_preemption_have_cost(new_run: NewRun, lab: Lab) -> None:
    run = new_run(
        checkpoint={"interval_steps": 25, "just_in_time": False},
        fault_tolerance={"num_in_job_restarts": 5, **HANGING},
    )
    run.configure(command=["python", str(CLOCKED), f"{run.path}.clock", "--steps", "200"])
    run.reach(40)
    run.slurmft("inject", str(run.path), "kill", "--rank", "2")
    wait_until_as_far_again(run, 1)
    run.wait_for_step(90)
    run.slurmft("inject", str(run.path), "stop", "--rank", "1")
    run.wait_for("worker hung")
    wait_until_as_far_again(run, 2)
    preempt(lab)
    run.wait_until_done()

    told = json.loads(run.slurmft("report", str(run.path), "--json"))
    story = f"{json.dumps(told, indent=1)}\n{clocked(run)}\n{run.story()}"
    ends = [end for end in told["ends"] if end["cause"] != "finished"]
    assert [end["cause"] for end in ends] == ["signal crash", "hang", "preempted"], story
    for end, seconds in zip(ends, interruptions(clocked(run)), strict=True):
        assert end["cost_s"] == pytest.approx(seconds, abs=WITHIN_S), story
    assert ends[1]["seconds"]["detection"] == pytest.approx(6, abs=3), story
    assert ends[2]["seconds"]["queue"] > 0 and not ends[2]["is_failure"], story
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"], rel=1e-3), story
    assert told["seconds"]["unknown"] < 0.01 * told["wall_s"], story
    assert told["failures"] == 2 and told["world_size"] == 4 and told["step"] == 200, story

    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(200)), "one curve over all of it"

    page = Path(f"{run.path}.html")
    run.slurmft("report", str(run.path), "--html", str(page))
    assert "signal crash" in page.read_text()
    assert "ETTR" in run.slurmft("report", str(run.path))
