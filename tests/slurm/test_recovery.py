"""Final weights bit-identical to an undisturbed run, whatever ended the job: 2 nodes x 2 ranks, real Slurm."""

import time
from collections.abc import Callable

import pytest

from slurm.conftest import Run, eventually, preempt
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
TERM_TO_FIRST_STEP_S = 60.0
"""Far below Slurm's own 121 s on a machine that is busy with other things; bench/ has the figure of a quiet one."""


def assert_one_stop(run: Run, cause: str, undisturbed: str, *, stops: int = 1) -> None:
    """One save and one continuation per stop, the same weights, and the time it took."""
    requests, stories = run.events("stop requested"), run.story()
    assert [event.details["cause"] for event in requests[:stops]] == [cause] * stops, stories
    verdicts = [event for event in run.events("verdict") if event.details["cause"] == cause]
    assert len(verdicts) == stops, stories
    for verdict in verdicts:
        step, first = verdict.details.get("saved_step"), verdict.details["first_step"]
        assert verdict.details["last_step"] == (first if step is None else step), stories
        assert step is None or run.output().count(f"saved step {step} ") == 1, stories
    assert len(run.events("requeued")) == stops, stories
    assert len(run.events("attempt started")) == stops + 1, stories
    assert run.digest() == undisturbed
    for event in run.events("first step")[1:]:
        assert event.details["seconds_since_stop_request"] < TERM_TO_FIRST_STEP_S + run_save_s(run), stories


def run_save_s(run: Run) -> float:
    lines = [line for line in run.output().splitlines() if " saved step " in line]
    return max(float(line.split(" in ")[1].split()[0]) for line in lines)


@pytest.mark.long
def test_a_short_time_limit(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    # the signal comes 5 to 35 s after the start
    run = new_run(delay=0.7, slurm={"time": "1"}, preemption={"signal_lead_s": 25})
    job = run.submit()
    run.wait_for("requeued")
    lab.run_as_admin(["scontrol", "update", f"JobId={job}", "TimeLimit=10"])  # once is enough
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("verdict")] == ["time limit", "finished"], run.story()
    assert run.folder.jobs() == [job]
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_time_limit(new_run: NewRun, undisturbed: str) -> None:
    # the signal comes after 70 to 100 s: late enough where a start takes 20 s, and before the last step
    run = new_run(delay=1.8, slurm={"time": "2"}, preemption={"signal_lead_s": 20})
    run.submit()
    run.wait_until_done(330)
    stops = len(run.events("stop agreed"))  # one more may be requested when nothing is left to do
    assert stops >= 1
    assert_one_stop(run, "time limit", undisturbed, stops=stops)


def test_preemption(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    run.reach(10)
    preempt(lab)
    run.wait_until_done()
    assert_one_stop(run, "preempted", undisturbed)
    job = run.folder.jobs()[0]
    eventually(lambda: run.job_states() == {job: "COMPLETED"}, 20, lambda: f"{run.job_states()}\n{run.story()}")


@pytest.mark.soak
def test_term_three_times_in_a_row(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(10)
    for _ in range(3):
        lab.run(["scancel", "--signal=TERM", job])
    run.wait_until_done()
    assert_one_stop(run, "signalled", undisturbed)


@pytest.mark.soak
def test_two_stops_in_one_run(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(10)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_for("first step", 2)
    run.wait_for_step(30)
    preempt(lab)
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("stop requested")] == ["signalled", "preempted"]
    assert len(run.events("attempt started")) == 3
    assert run.digest() == undisturbed


def test_manual_requeue(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """It kills srun and with it the workers at once, so the newest periodic checkpoint continues."""
    run = new_run()
    job = run.submit()
    run.wait_for_saved(25)
    lab.run(["scontrol", "requeue", job])
    eventually(lambda: "PENDING" in lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout, 30, run.story)
    run.slurmft("requeue", str(run.path))  # or wait for Slurm's own 121 s
    run.wait_until_done()
    assert run.digest() == undisturbed
    assert run.events("first step")[1].details["resumed_from"] >= 25
    assert not run.events("requeued"), "Slurm requeued it; a second requeue would be one too many"


@pytest.mark.long
def test_slurmft_requeue_saves_first_and_switches_requeueing_on(new_run: NewRun, undisturbed: str) -> None:
    run = new_run(slurm={"requeue": False})
    run.reach(10)
    run.slurmft("requeue", str(run.path))
    run.wait_until_done()
    assert_one_stop(run, "requeued by user", undisturbed)


@pytest.mark.long
def test_stop_and_submit_again(new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    first = run.reach(10)
    run.slurmft("stop", str(run.path), "--timeout", "30")
    run.wait_until_out_of_queue(first)
    assert run.events("verdict")[-1].details["saved_step"] >= 10
    assert run.events("requeued") == run.events("resubmitted") == []
    assert "stopped by slurmft-lab" in run.slurmft("status", str(run.path), "--json")
    run.submit()
    run.wait_until_done()
    assert len(run.folder.jobs()) == 2
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_save_on_demand_disturbs_nothing(new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    run.reach(10)
    (run.path / "SAVE").touch()
    step = run.wait_for("save requested").details["step"]
    eventually(lambda: f"saved step {step} " in run.output(), 10, lambda: f"a save at {step}\n{run.story()}")
    run.wait_until_done()
    assert run.digest() == undisturbed
    assert len(run.events("attempt started")) == 1


def test_scancel_ends_the_run(lab: Lab, new_run: NewRun) -> None:
    run = new_run()
    job = run.reach(5)
    lab.run(["scancel", job])
    run.wait_until_out_of_queue(job)
    time.sleep(3.0)  # longer than a requeue takes: nothing may come
    assert list(run.job_states()) == [job]
    assert len(run.events("attempt started")) == 1
    eventually(lambda: f"by {lab.user}" in run.slurmft("status", str(run.path), "--json"), 20, "who cancelled it")
    assert run.job_states()[job].startswith("CANCELLED"), run.story()
    assert "the job was cancelled (scancel)" in run.slurmft("status", str(run.path), "--json")
    assert run.events("requeued") == run.events("resubmitted") == []
    assert run.folder.jobs() == [job]


def test_a_preemption_that_cancels_is_continued_by_a_successor(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run(slurm={"partition": "cancel"})
    run.reach(10)
    preempt(lab)
    run.wait_until_done()
    assert len(run.folder.jobs()) == 2
    assert len(run.events("resubmitted")) == 1
    assert run.events("first step")[1].details["resumed_from"] == run.events("verdict")[0].details["saved_step"]
    assert run.digest() == undisturbed


def test_a_finished_run_is_told_by_every_reading_verb_and_not_run_again(lab: Lab, new_run: NewRun) -> None:
    run = new_run(steps=5, delay=0.0)
    run.submit()
    run.wait_until_done()
    assert "all 4 ranks finished at step 5" in run.slurmft("explain", str(run.path))
    assert "finished" in run.slurmft("status", str(run.path))
    assert "final weights sha256" in run.slurmft("logs", str(run.path))
    assert "rank 3" in run.slurmft("logs", str(run.path), "--rank", "3")
    again = lab.run(["sbatch", "--parsable", "--wait", str(run.folder.script)], cwd=lab.home).stdout.strip()
    assert len(run.events("attempt started")) == 1
    assert run.events("already finished")[0].attempt == f"{again}.0.0"
    refused = lab.run(["slurmft", "submit", str(run.path.with_suffix(".yaml"))], check=False)
    assert refused.returncode == 2
    assert f"finished at step {5}" in refused.stderr


@pytest.mark.long
def test_a_job_that_lost_its_batch_host_is_rescued(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run(slurm={"no_kill": True})
    job = run.submit()
    run.wait_for_saved(25)
    batch_host = run.events("agents ready")[0].details["hosts"][0]
    lab.kill_node(batch_host)
    try:
        eventually(
            lambda: lab.node_states().get(batch_host, "").startswith("DOWN"),
            60,
            lambda: f"{batch_host} down\n{run.story()}",
        )
        state = lab.run(["squeue", "-h", "-j", job, "-o", "%T %B %N"]).stdout.split()
        assert state[0] == "RUNNING", "Slurm itself does not notice"
        rescued = eventually(
            lambda: "requeued" in (out := run.slurmft("requeue", str(run.path), "--rescue")) and out, 30, run.story()
        )
        assert batch_host in rescued
    finally:
        lab.start_node(batch_host)
    run.wait_until_done(180)
    assert run.events("first step")[1].details["resumed_from"] >= 25
    assert run.digest() == undisturbed
