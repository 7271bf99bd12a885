"""Exit codes that mean something, and those that lie: plain scripts on real Slurm, 2 nodes x 2 ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runs.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

NewRun = Callable[..., Run]
TRAINER = Path(__file__).parent / "trainers" / "plain_end.py"
QUICK = {"preload": False}


def plain(new_run: NewRun, *words: str, **changes: object) -> Run:
    return new_run(command=["python", str(TRAINER), *words], fault_tolerance=QUICK, **changes)


def test_a_plain_scripts_own_exit_codes(new_run: NewRun) -> None:
    run = plain(new_run, "16", "42", exit_actions={"COMPLETE": "40-42", "RESCHEDULE": [16], "FAIL": "1"})
    run.submit()
    run.wait_until_done()
    first, second = [event.details for event in run.events("verdict")]
    assert (first["cause"], first["exit_code"]) == ("rerun elsewhere", 16), run.story()
    assert (second["cause"], second["exit_code"]) == ("finished", 42), run.story()
    assert [event.details["action"] for event in run.events("decision")] == ["continue", "finish"]
    assert run.folder.jobs() == list(run.job_states())


def test_an_exit_code_that_means_failure(new_run: NewRun) -> None:
    run = plain(new_run, "7", exit_actions={"FAIL": "5-9"})
    job = run.submit()
    run.wait_until_out_of_queue(job)
    decision = run.events("decision")[0].details
    assert (decision["action"], decision["exit_code"]) == ("stop", 7), run.story()
    assert decision["reason"].startswith("exit_actions maps 7 to FAIL: rank "), run.story()


@pytest.mark.parametrize("word", ["143", "killed"])
def test_a_verdict_file_beats_what_srun_reports(lab: Lab, new_run: NewRun, word: str) -> None:
    """Rank 3 wants its result computed elsewhere; then its exit code is another one, or its whole step is killed."""
    words = ["exits with 143" if word == "143" else word, "0"]
    run = plain(new_run, *words, slurm={"srun_args": ["--kill-on-bad-exit=1"]})
    run.submit()
    run.wait_until_done()
    verdict, story = run.events("verdict")[0].details, run.story()
    node = run.events("agents ready")[0].details["hosts"][1]
    assert (verdict["cause"], verdict["exit_code"], verdict["rerun"]) == ("rerun elsewhere", 16, "undecided"), story
    assert verdict["suspects"] == [{"node": node, "gpu": "", "rank": 3}], story
    assert "loss is NaN" in verdict["reason"], story
    assert run.events("decision")[0].details["exit_code"] == 16, story
    explained = run.slurmft("explain", str(run.path))
    assert "rerun elsewhere" in explained and "attempt" in explained
