"""Faults on purpose in real runs: what the last look before the kill finds, and weights that know nothing of it."""

import json
from collections.abc import Callable

import pytest

from slurm.conftest import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]


@pytest.mark.long
def test_a_kill_and_an_exception_are_blamed_on_their_ranks_and_leave_no_trace(
    new_run: NewRun, undisturbed: str
) -> None:
    run = new_run()
    run.reach(10)
    run.slurmft("inject", str(run.path), "kill", "--rank", "2")
    run.wait_for("decision")
    killed = run.events("last look")[-1].details["culprits"]
    assert [(each["rank"], each["reason"]) for each in killed] == [(2, "was ended by signal 9")], run.story()
    told = run.slurmft("explain", str(run.path))
    host = run.events("agents ready")[0].details["hosts"][1]
    assert f"culprit    rank 2 on {host}" in told
    assert f"files      {run.folder.attempts}/" in told

    run.wait_for("first step", 2)
    run.slurmft("inject", str(run.path), "exception", "--rank", "1")
    run.wait_for("worker failed", 2)
    run.wait_until_done()
    assert "InjectedFault: injected by slurmft inject, at step" in run.output(1)
    verdict = run.events("verdict")[1].details
    assert (verdict["cause"], verdict["rank"]) == ("worker error", 1), run.story()
    assert [event.details["ranks"] for event in run.events("fault injected")] == [[2], [1]]
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_stopped_rank_is_told_from_those_that_wait_for_it(new_run: NewRun) -> None:
    run = new_run(preemption={"stop_timeout_s": 2})
    job = run.reach(5)
    run.slurmft("inject", str(run.path), "stop", "--rank", "1")
    run.slurmft("stop", str(run.path))
    event = run.wait_for("last look")
    run.wait_until_out_of_queue(job)
    assert [(each["rank"], each["reason"]) for each in event.details["culprits"]] == [
        (1, "is stopped (SIGSTOP, or a debugger)")
    ], run.story()
    assert event.details["seconds"] < 1.0, "those that can answer do so at once"
    victims = "\n".join(event.details["victims"])
    assert all(str(rank) in victims for rank in (0, 2, 3)), run.story()
    folder = run.folder.attempts / event.attempt
    assert {path.name for path in folder.glob("stacks-*")} == {f"stacks-rank-{rank}.txt" for rank in (0, 2, 3)}
    assert "byte_gpt.py" in (folder / "stacks-rank-2.txt").read_text()
    ranks = [rank for path in folder.glob("evidence-*.json") for rank in json.loads(path.read_text())["ranks"]]
    assert {rank["rank"]: rank["kind"] for rank in ranks}[1] == "stopped"
    told = run.slurmft("explain", str(run.path))
    assert "the newest look at the ranks" in told
    assert "culprit    rank 1 on" in told
