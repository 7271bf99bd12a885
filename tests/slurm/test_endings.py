"""Ways in which a job can end that the training itself has no part in: its processes, its queue, its cluster."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually, preempt
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]


def assert_continued(run: Run, undisturbed: str, *, starts: int = 2) -> None:
    """One continuation after each end, one job, and the same weights."""
    assert len(run.events("attempt started")) == starts, run.story()
    assert len(run.folder.jobs()) == 1, run.story()
    assert run.digest() == undisturbed


def supervisor_of(run: Run) -> tuple[str, int, int]:
    """Its host, its process id there, and its guardian's."""
    owner = run.folder.owner()
    assert owner is not None
    parent = run.lab.run_on(owner.host, ["ps", "-o", "ppid=", "-p", str(owner.pid)]).stdout.strip()
    return owner.host, owner.pid, int(parent)


def children_of(lab: Lab, host: str, pid: int) -> list[str]:
    return lab.run_on(host, ["pgrep", "-P", str(pid)], check=False).stdout.split()


def kill(lab: Lab, host: str, *pids: int) -> None:
    lab.run_on(host, ["kill", "-9", *map(str, pids)])


# processes


def test_the_supervisor_is_killed(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """By hand, or by the kernel when memory runs out: the same signal."""
    run = new_run()
    run.submit()
    run.wait_for_saved(25)
    host, supervisor, _ = supervisor_of(run)
    kill(lab, host, supervisor)
    run.wait_for("attempt started", 2)
    run.wait_until_done()
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["saved_step"]) == ("supervisor lost", 25)
    assert_continued(run, undisturbed)


@pytest.mark.soak
def test_nobody_is_left_to_act_but_cron(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """The guardian is killed as well: Slurm ends the job with its batch step, and requeues nothing."""
    run = new_run(delay=0.3)
    job = run.reach(30)
    host, supervisor, guardian = supervisor_of(run)
    kill(lab, host, guardian, supervisor)
    run.wait_until_out_of_queue(job)
    assert '"state": "stopped"' in run.slurmft("status", str(run.path), "--json")
    rescue = ["env", f"SLURMFT_RUNS={run.path.parent}", "slurmft", "requeue", "--rescue"]
    assert "the run goes on as job" in lab.run(rescue).stdout
    assert "nothing had to be rescued" in lab.run(rescue).stdout, "once is enough"
    run.wait_until_done()
    assert run.folder.jobs() == [job], "it is still in the memory of Slurm"
    assert run.digest() == undisturbed


@pytest.mark.long
def test_an_agent_is_killed(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    run.reach(30)
    other = run.events("agents ready")[0].details["hosts"][1]
    lab.run_on(other, ["pkill", "-9", "-f", "slurmft agent"])
    run.wait_for("attempt started", 2)
    run.wait_until_done()
    assert other in run.events("verdict")[0].details["reason"]
    assert_continued(run, undisturbed)


# the queue


@pytest.mark.soak
def test_seven_preemptions_in_a_row(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """After the fifth exit within a grace newer Slurms hold a job; ours requeues itself, so none is counted."""
    run = new_run(delay=0.3)
    job = run.submit()
    for number in range(1, 8):
        run.wait_for("first step", number)
        preempt(lab)
        run.wait_for("requeued", number)
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("stop requested")] == ["preempted"] * 7
    assert_continued(run, undisturbed, starts=8)
    # such a Slurm requeues after exit 0 as well
    run.wait_until_out_of_queue(job)
    lab.run_as_admin(["scontrol", "requeue", job])
    eventually(lambda: "PENDING" in lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout, 20, "back in the queue")
    lab.run_as_admin(["scontrol", "update", f"JobId={job}", "StartTime=now+2"])
    run.wait_for("already finished")
    assert len(run.events("attempt started")) == 8


@pytest.mark.soak
def test_requeuehold_and_release(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(30)
    lab.run(["scontrol", "requeuehold", job])
    eventually(lambda: "PENDING" in lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout, 60, run.story)
    assert "held" in run.slurmft("status", str(run.path), "--json").lower()
    run.slurmft("requeue", str(run.path))  # releases it, and spares it the 121 s
    run.wait_until_done()
    assert_continued(run, undisturbed)


@pytest.mark.soak
def test_suspend_and_resume(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """Longer than anybody's patience; nobody may take the other one's silence for death afterwards."""
    run = new_run(fault_tolerance={"supervisor_lease_s": 4})
    job = run.reach(20)
    lab.run_as_admin(["scontrol", "suspend", job])
    time.sleep(12)  # the time itself is what is tested
    lab.run_as_admin(["scontrol", "resume", job])
    run.wait_until_done()
    assert run.events("was suspended")
    assert_continued(run, undisturbed, starts=1)


DEAF = """import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(600)"""


@pytest.mark.parametrize("partition", ["low", pytest.param("cancel", marks=pytest.mark.soak)])
def test_a_scancel_in_the_grace_of_a_preemption_is_not_undone(lab: Lab, new_run: NewRun, partition: str) -> None:
    run = new_run(slurm={"partition": partition})
    deaf = f"{run.path}.deaf-"
    run.configure(command=["python", "-c", DEAF, deaf])
    job = run.submit()
    eventually(lambda: all(Path(f"{deaf}{rank}").exists() for rank in range(4)), 60, run.story)
    preempt(lab)
    run.wait_for("stop requested")
    lab.run(["scancel", job])
    run.wait_until_out_of_queue(job)
    assert not run.events("requeued") + run.events("resubmitted"), run.story()
    assert len(run.folder.jobs()) == len(run.events("attempt started")) == 1


@pytest.mark.soak
def test_a_scancel_that_ends_the_shell_around_the_supervisor_is_a_scancel(lab: Lab, new_run: NewRun) -> None:
    """Without exec, bash is the batch step's process, and dies of Slurm's TERM before we can ask why."""
    run = new_run()
    wrap = f"slurmft run '{run.config}'; exit $?"
    options = ["--parsable", "-p", "low", "-N", "2", "--ntasks-per-node=1", "-o", "/dev/null", "--requeue"]
    job = lab.run(["sbatch", *options, "--wrap", wrap], cwd=lab.home).stdout.strip()
    run.wait_for_step(5)
    lab.run(["scancel", job])
    run.wait_until_out_of_queue(job)
    eventually(lambda: run.events("decision"), 20, run.story)
    assert run.events("decision")[-1].details["action"] == "stop", run.story()
    assert len(run.events("attempt started")) == 1


def test_two_submissions_at_once(new_run: NewRun) -> None:
    run = new_run(slurm={"begin": "now+1hour"})
    argv = ["slurmft", "submit", str(run.config)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: run.lab.run(argv, check=False), range(3)))
    assert sorted(result.returncode for result in results) == [0, 2, 2]
    (job,) = run.folder.jobs()
    assert all(f"has job {job} in state PENDING" in result.stderr for result in results if result.returncode)
    assert f"cancelled the waiting job {job}" in run.slurmft("stop", str(run.path))


def test_a_copied_run_folder_is_refused(lab: Lab, new_run: NewRun) -> None:
    """It names the original's jobs: stopping the copy must not cancel them."""
    run = new_run()
    run.reach(5)
    copy = run.path.with_name(f"{run.path.name} copy")
    lab.run(["cp", "-a", str(run.path), str(copy)], check=False)  # a temporary file may be gone before it is copied
    for verb in (["stop"], ["requeue"], ["save"]):
        refused = lab.run(["slurmft", *verb, str(copy)], check=False)
        assert refused.returncode != 0
        assert f"is a copy of {run.path}" in refused.stderr
    assert not (copy / "KILL").exists()
    copied = lab.run(["slurmft", "submit", str(run.config), "--set", f"run_folder={copy}"], check=False)
    assert copied.returncode != 0
    assert f"is a copy of {run.path}" in copied.stderr


# the nodes


@pytest.mark.parametrize(
    ("which", "no_kill"),
    [
        pytest.param(1, False, id="worker node"),
        pytest.param(0, False, id="batch host", marks=pytest.mark.soak),
        pytest.param(1, True, id="worker node, --no-kill", marks=pytest.mark.soak),
    ],
)
def test_a_node_dies(lab: Lab, new_run: NewRun, undisturbed: str, which: int, no_kill: bool) -> None:
    run = new_run(slurm={"no_kill": no_kill})
    job = run.submit()
    run.wait_for_saved(25)
    host = run.events("agents ready")[0].details["hosts"][which]
    lab.kill_node(host)
    try:
        eventually(lambda: "PENDING" in lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout
                   or len(run.events("attempt started")) > 1, 90, run.story)  # fmt: skip
        if len(run.events("attempt started")) == 1:
            run.slurmft("requeue", str(run.path))
        run.wait_for("attempt started", 2)
    finally:
        lab.start_node(host)
    run.wait_until_done(180)
    assert run.events("first step")[1].details["resumed_from"] >= 25
    assert_continued(run, undisturbed)
