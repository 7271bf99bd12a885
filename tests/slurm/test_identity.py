"""Whose job it is, and who owns the run: numbers that Slurm gives again, supervisors that Slurm has given up."""

import os
import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]


def state_of(lab: Lab, job: str) -> str:
    return lab.run(["squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T"], check=False).stdout.strip()


def users_processes(run: Run, node: str) -> str:
    """Those that have ended, and whose parent is a slurmstepd that stands still, do not count."""
    argv = ["ps", "-u", run.lab.user, "-o", "stat=,pid=,args="]
    lines = run.lab.run_on_as_admin(node, argv, check=False).stdout.splitlines()
    return "\n".join(line for line in lines if not line.startswith("Z"))


@pytest.fixture
def older_controller(lab: Lab) -> Iterator[Callable[[], None]]:
    """Keeps the controller's state of now; called, it kills the controller and starts it from that."""
    lab.stop_controller()  # it saves its state as it ends
    kept = lab.folder / "state.kept"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(lab.folder / "state", kept)
    lab.start_controller()

    def go_back() -> None:
        lab.crash_controller()
        shutil.rmtree(lab.folder / "state")
        shutil.copytree(kept, lab.folder / "state")
        lab.start_controller()

    yield go_back
    shutil.rmtree(kept, ignore_errors=True)


def make_old(run: Run) -> None:
    """As if nothing had been written for an hour: what was written just now is left alone."""
    long_ago = time.time() - 3600
    for path in (run.path, *run.path.rglob("*")):
        os.utime(path, (long_ago, long_ago))


def test_a_number_that_went_to_another_job_is_left_alone(
    lab: Lab, new_run: NewRun, older_controller: Callable[[], None]
) -> None:
    """The controller was killed before it had saved the submissions, and gives the jobs' numbers once more."""
    runs = [new_run(f"number-{name}", nodes=1) for name in ("rescued", "stopped")]
    jobs = [run.submit() for run in runs]
    for run in runs:
        run.wait_for("workers started")
    for node in lab.nodes:  # a controller that does not know the jobs has slurmd end them, sooner or later
        lab.run_on_as_admin(node, ["pkill", "-KILL", "-u", lab.user], check=False)
    older_controller()
    argv = ["sbatch", "--parsable", "-t", "30", "-o", "/dev/null", "--wrap", "sleep 1500"]
    others = [lab.run(argv, cwd=lab.home).stdout.strip() for _ in jobs]
    assert others == jobs, "the same numbers"
    eventually(lambda: {state_of(lab, job) for job in others} == {"RUNNING"}, 30, runs[0].story)
    what = ["squeue", "-h", "-j", ",".join(others), "-o", "%i %T %S %r %V %k %N"]
    before = lab.run(what).stdout

    rescued, stopped = runs
    for run in runs:
        make_old(run)
        assert "RUNNING" not in run.slurmft("status", str(run.path)), run.slurmft("status", str(run.path))
    assert "is not running" in stopped.slurmft("stop", str(stopped.path))
    assert "is not running" in lab.run(["slurmft", "requeue", str(stopped.path)], check=False).stderr
    assert "goes on as job" in rescued.slurmft("requeue", "--rescue", str(rescued.path)), rescued.story()
    assert "nothing had to be rescued" in stopped.slurmft("requeue", "--rescue", str(stopped.path))
    (new,) = rescued.folder.jobs()[1:]
    assert new not in others
    rescued.slurmft("stop", str(rescued.path))
    rescued.wait_until_out_of_queue(new)
    assert len(rescued.events("resubmitted")) == 1
    assert stopped.folder.jobs() == [jobs[1]]
    assert lab.run(what).stdout == before, "another job was touched"


def test_the_variables_of_a_crontab_change_nothing(lab: Lab, new_run: NewRun) -> None:
    variables = ["SLURM_CLUSTERS=elsewhere", "SQUEUE_STATES=PENDING", "SQUEUE_USERS=root"]
    run = new_run(steps=200, nodes=1)
    job = run.reach(3)

    def in_cron(*argv: str) -> str:
        done = lab.run(["env", *variables, "slurmft", *argv], check=False, timeout=90)
        return done.stdout + done.stderr

    assert "nothing had to be rescued" in in_cron("requeue", "--rescue", str(run.path))
    assert "running" in in_cron("status", str(run.path))
    assert f"has job {job}" in in_cron("submit", str(run.config))
    assert "will save and end" in in_cron("stop", str(run.path))
    run.wait_until_out_of_queue(job)
    assert run.folder.jobs() == [job]
    assert len(run.events("attempt started")) == 1


@pytest.mark.soak
def test_a_batch_host_that_slurm_has_given_up_does_not_take_the_run_back(
    lab: Lab, new_run: NewRun, undisturbed: str
) -> None:
    """Its daemons stand still for longer than SlurmdTimeout, so that Slurm requeues the job and cannot end what is left
    of its first start. That goes on."""
    run = new_run(
        delay=1.0,
        checkpoint={"interval_steps": 5},
        fault_tolerance={"num_in_job_restarts": 3, "supervisor_lease_s": 10},
    )
    job = run.submit()
    run.wait_for_saved(5)
    hosts = run.events("agents ready")[0].details["hosts"]

    def send(name: str, pattern: str, *options: str) -> None:
        for host in hosts:
            lab.run_on_as_admin(host, ["pkill", f"-{name}", *options, pattern], check=False)

    send("STOP", "slurmd|slurmstepd", "-x")
    try:
        # a second requeue would be one too many: only the begin time, or Slurm's own 121 s would be waited for
        eventually(lambda: state_of(lab, job) == "PENDING" or len(run.events("attempt started")) > 1, 90, run.story)
        lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        run.wait_for("first step", 2)
        for host in hosts:  # by themselves: nothing there is in a state to end them
            eventually(lambda node=host: not users_processes(run, node), 60, run.story)
    finally:
        send("CONT", "slurmd|slurmstepd", "-x")
    run.wait_until_done(180)
    starts = [event.attempt for event in run.events("attempt started")]
    assert starts == [f"{job}.0.0", f"{job}.1.0"], run.story()
    assert not run.events("requeueing") and not run.events("resubmitting"), run.story()
    assert run.folder.jobs() == [job]
    assert run.digest() == undisturbed


def test_a_run_is_removed_only_when_no_job_of_it_is_left(lab: Lab, new_run: Callable[..., Run]) -> None:
    run = new_run(steps=5000)
    job = run.submit("--", "--begin=now+1hour")
    asked = ["slurmft", "rm", str(run.path), "--yes"]

    def refused(state: str) -> bool:
        done = lab.run(asked, check=False)
        return done.returncode == 2 and f"has job {job} in state {state}" in done.stderr

    assert refused("PENDING"), run.story()
    lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    run.wait_for("first step")
    assert refused("RUNNING"), run.story()
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)
    assert run.slurmft(*asked[1:]).startswith("removed ")
    assert not run.path.exists() and run.path.parent.exists()
