"""Exit codes that mean something, and those that lie: plain scripts on real Slurm, 2 nodes x 2 ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
TRAINER = Path(__file__).parent / "trainers" / "plain_end.py"


@pytest.mark.long
def test_a_verdict_file_beats_what_srun_reports(new_run: NewRun) -> None:
    """Rank 3 wants its result computed elsewhere, and ends with 143; then its whole step is killed; then it is done."""
    run = plain(new_run, "exits with 143", "killed", "42", exit_actions={"COMPLETE": "40-42", "FAIL": [1]})
    run.configure(slurm={"srun_args": ["--kill-on-bad-exit=1"]})
    run.submit()
    run.wait_until_done()
    *reruns, last = [event.details for event in run.events("verdict")]
    story = f"{run.story()}\n{run.slurmft('explain', str(run.path))}"
    for verdict, ready in zip(reruns, run.events("agents ready"), strict=False):
        assert (verdict["cause"], verdict["exit_code"], verdict["rerun"]) == ("rerun elsewhere", 16, "undecided"), story
        assert verdict["suspects"] == [{"node": ready.details["hosts"][1], "gpu": "", "rank": 3}], story
        assert (verdict["rank"], verdict["node"]) == (3, ready.details["hosts"][1]), story
        assert "loss is NaN" in verdict["reason"], story
    assert "exited with 143" in reruns[0]["reason"], story
    assert any(line.endswith("Killed") for line in reruns[1]["evidence"]), story
    assert [event.details["exit_code"] for event in run.events("decision")] == [16, 16, 0], story
    assert (last["cause"], last["exit_code"], len(reruns)) == ("finished", 42, 2), story


def test_an_exit_code_that_means_failure(new_run: NewRun) -> None:
    run = plain(new_run, "7", exit_actions={"RESCHEDULE": "11-20", "FAIL": "5-9"})
    job = run.submit()
    run.wait_until_out_of_queue(job)
    decision = run.events("decision")[0].details
    assert (decision["action"], decision["exit_code"]) == ("stop", 7), run.story()
    assert decision["reason"].startswith("exit_actions maps 7 to FAIL: rank "), run.story()


def plain(new_run: NewRun, *words: str, **changes: object) -> Run:
    return new_run(command=["python", str(TRAINER), *words], fault_tolerance={"preload": False}, **changes)
