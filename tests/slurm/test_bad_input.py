"""What Slurm itself refuses, or takes and never starts; and names that shells and sbatch would take apart."""

import json
import subprocess
from collections.abc import Callable

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def submit(run: Run, *options: str) -> subprocess.CompletedProcess[str]:
    return run.lab.run(["slurmft", "submit", str(run.path.with_suffix(".yaml")), *options], check=False, timeout=60)


@pytest.mark.parametrize(
    ("changes", "options", "message", "hint"),
    [
        ({"slurm": {"exclude": "nosuch"}}, [], "Invalid node name specified", "exclude or nodelist names a node"),
        ({}, ["--", "--exclude=n1,nosuch"], "Invalid node name specified", "exclude or nodelist names a node"),
        ({"slurm": {"exclude": "n[1-3]"}}, [], "Requested node configuration is not available", "slurm.exclude"),
        ({"slurm": {"partition": "nosuch"}}, [], "invalid partition specified: nosuch", "slurm.partition"),
        ({"slurm": {"gpus_per_node": 8}}, [], "generic resource", "slurm.gpus_per_node"),
        ({"slurm": {"constraint": "a100"}}, [], "Invalid feature specification", "slurm.constraint"),
        ({"slurm": {"mem": "99T"}}, [], "Memory specification can not be satisfied", "slurm.mem"),
        ({}, ["--", "--reservation=nosuch"], "reservation is invalid", "option reservation"),
    ],
    ids=str,
)
def test_what_sbatch_refuses_is_told_in_its_words(new_run: Callable[..., Run], changes, options, message, hint):
    run = new_run(**changes)
    done = submit(run, *options)
    assert done.returncode == 1
    assert done.stderr.count("sbatch refused the job: ") == done.stderr.count(message) == 1
    assert hint in done.stderr.split("hint: ")[1]
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert run.folder.jobs() == []
    assert not run.path.exists()  # what was never submitted leaves nothing


@pytest.mark.parametrize("changes", [{"nodes": 9}, {"slurm": {"cpus_per_task": 999}}], ids=str)
def test_a_request_that_can_never_start_is_told_at_once(new_run: Callable[..., Run], lab: Lab, changes):
    run = new_run(**changes)
    done = submit(run)
    (job,) = run.folder.jobs()
    assert done.returncode == 0
    assert f"job {job} waits, and as things are it cannot start" in done.stderr
    assert f"scancel {job}" in done.stderr
    state = json.loads(run.slurmft("status", str(run.path), "--json"))
    assert state["state"] == "waiting" and "as things are it cannot start" in state["detail"]
    assert "cancelled" in run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)


def test_a_request_that_fits_is_not_doubted(new_run: Callable[..., Run]):
    run = new_run(command=["true"], nodes=1, nproc_per_node=1)
    done = submit(run)
    assert done.returncode == 0 and "cannot start" not in done.stderr


def test_a_run_with_an_odd_name_goes_through_the_queue_and_is_found(new_run: Callable[..., Run]):
    run = new_run('it\'s "odd" ü $HOME 100% [x]', command=["python", "-c", "print('here')"], nodes=1, nproc_per_node=1)
    done = submit(run)
    assert done.returncode == 0, done.stderr
    run.wait_until_done(40)
    assert run.slurmft("logs", str(run.path)).strip() == "here"
    assert "attempt started" in run.slurmft("explain", str(run.path))
    assert json.loads(run.slurmft("status", str(run.path), "--json"))["state"] == "finished"


def test_a_controller_that_is_away_is_no_refusal(new_run: Callable[..., Run], lab: Lab):
    run = new_run()
    lab.stop_controller()
    try:
        done = submit(run)
    finally:
        lab.start_controller()
    assert done.returncode == 75
    assert "sbatch got no answer: " in done.stderr and "Unable to contact slurm controller" in done.stderr
    assert "hint: " in done.stderr
    eventually(lambda: lab.run(["squeue", "-h"], check=False).returncode == 0, 20, "the controller back")
