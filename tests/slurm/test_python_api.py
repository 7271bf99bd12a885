"""``slurmft.submit`` and the handle of a run, as a notebook uses them; without Slurm, and on the lab as its user."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slurmft
from slurm.conftest import TRAINER, eventually
from slurmft.lab.cluster import Lab

pytestmark = pytest.mark.timeout(300)


def submit_here(what: object, path: Path, **overrides: object) -> slurmft.RunHandle:
    return slurmft.submit(what, cluster="local", run_folder=path / "run", **overrides)  # type: ignore[arg-type]


def test_a_configuration_of_plain_values(tmp_path: Path) -> None:
    async def cell() -> None:  # where an event loop is running, as in a notebook
        check_a_configuration_of_plain_values(tmp_path)

    asyncio.run(cell())


def check_a_configuration_of_plain_values(tmp_path: Path) -> None:
    config = {"command": [*TRAINER, "--steps", "20"], "checkpoint": {"interval_steps": 5}}
    run = submit_here(config, tmp_path, nproc_per_node=2, checkpoint={"keep_last_n": 1})
    with pytest.raises(slurmft.RunBusy):
        submit_here(config, tmp_path)
    assert run.wait(120) == 0
    assert run.status().state == "finished"
    assert run.status().step == 20
    assert "final weights sha256" in run.logs()
    assert len(run.logs(1, lines=1).splitlines()) == 1
    assert run.explain()[0].event == "submitting"
    assert run.result() is None  # a command returns nothing
    with pytest.raises(slurmft.UsageError, match="is finished"):
        submit_here(config, tmp_path)
    assert slurmft.RunHandle(run.folder).wait(5) == 0  # a notebook that was opened anew


def test_a_callable_is_called_in_each_worker_and_returns_rank_0s_value(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()

    def work(base: int, *, factor: int) -> dict[str, int]:
        rank = int(os.environ["RANK"])
        (seen / str(rank)).touch()
        return {"rank": rank, "value": base * factor}

    run = submit_here(work, tmp_path, args=[6], kwargs={"factor": 7}, nproc_per_node=2)
    assert run.result(120) == {"rank": 0, "value": 42}
    assert {path.name for path in seen.iterdir()} == {"0", "1"}
    assert (run.folder / "call.pkl").stat().st_mode & 0o777 == 0o600
    assert (run.folder / "result.pkl").stat().st_mode & 0o777 == 0o600


def test_a_callable_that_is_killed_is_called_again(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def work() -> int:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        calls = len(pids.read_text().split())
        while calls == 1:
            time.sleep(0.1)
        return calls

    run = submit_here(work, tmp_path)
    eventually(lambda: pids.exists() and pids.read_text().endswith("\n"), 60, run.logs)
    with pytest.raises(TimeoutError):
        run.wait(0.1)
    os.kill(int(pids.read_text()), signal.SIGKILL)
    assert run.result(120) == 2
    assert "worker failed" in [event.event for event in run.explain()]


def test_a_callable_that_fails_is_told_with_its_traceback(tmp_path: Path) -> None:
    def work() -> None:
        raise ZeroDivisionError("of the user's own")

    run = submit_here(work, tmp_path, fault_tolerance={"num_in_job_restarts": 0, "num_job_retries_on_failure": 0})
    with pytest.raises(slurmft.RunFailed, match="of the user's own") as caught:
        run.result(120)
    assert "ZeroDivisionError" in caught.value.traceback
    assert caught.value.run_exit_code == run.wait(5) != 0


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    run = submit_here({"command": [*TRAINER, "--steps", "5000", "--step-delay", "0.05"]}, tmp_path)
    eventually(lambda: (run.status().step or 0) >= 3, 60, run.logs)
    assert "will save and end" in run.stop()
    assert run.wait(60) == 75
    with pytest.raises(slurmft.RunFailed, match="stopped by"):
        run.result(5)


@pytest.mark.slurm
def test_a_callable_on_the_lab_goes_on_after_a_requeue(lab: Lab) -> None:
    """A notebook of an ordinary user: submit, requeue by hand, result."""
    folder = lab.home / f"api-{os.getpid()}"
    program = f"""
import os, time, pathlib, slurmft
def work(name):
    counter = pathlib.Path({str(folder)!r} + ".starts")
    starts = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (starts + 1))
    while starts == 0:
        time.sleep(0.1)
    return f"hello {{name}} after {{starts}} requeues of job {{os.environ['SLURM_JOB_ID']}}"
run = slurmft.submit(work, args=["you"], run_folder={str(folder)!r}, nodes=1, slurm={{"time": 10}},
                     preemption={{"signal_lead_s": 60}})
while not pathlib.Path({str(folder)!r} + ".starts").exists():
    time.sleep(0.1)
print(run.status().state)
print(run.requeue())
print(run.result(200), "|", slurmft.RunHandle(run.folder).status().job)
"""
    done = lab.run([sys.executable, "-c", program], check=False, timeout=250)
    assert done.returncode == 0, done.stderr + done.stdout
    state, asked, said = done.stdout.splitlines()[-3:]
    assert state == "running"
    assert "requeue" in asked
    text, _, job = said.partition(" | ")
    assert text == f"hello you after 1 requeues of job {job}"


@pytest.mark.parametrize(
    ("what", "given", "message"),
    [
        ({"command": "x", "nodez": 1}, {}, "nodez"),
        ({"command": "x"}, {"args": [1]}, "for a callable"),
        (print, {"command": "x"}, "one of them"),
        (print, {"nodes": 0}, "nodes"),
        ({"command": "x"}, {"environment": {"A": object()}}, "environment.A"),
        ("no-such-file.yaml", {}, "no configuration file"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    tmp_path: Path, what: object, given: dict[str, object], message: str
) -> None:
    with pytest.raises(slurmft.UsageError, match=message):
        submit_here(what, tmp_path, **given)
    assert not (tmp_path / "run" / "jobs.json").exists()


def test_a_callable_or_result_of_another_user_is_not_unpickled(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    run = submit_here(lambda: 1, tmp_path)
    assert run.result(120) == 1
    os.chown(run.folder / "result.pkl", 65534, 65534)
    with pytest.raises(slurmft.StorageError, match="belongs to user id 65534"):
        run.result(5)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-python.md"


@pytest.mark.soak
def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    """On this machine instead of through Slurm."""
    command = [*TRAINER, "--steps", "20"]
    (tmp_path / "train.yaml").write_text(json.dumps({"command": command, "run_folder": "runs/first"}))
    parts = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(parts) == 2 and all('slurm={"time": 60}' in part for part in parts)
    script = "\n".join([*parts, "print(run.result())"]).replace('slurm={"time": 60}', 'cluster="local"')
    (tmp_path / "notebook.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["{'accuracy': 0.7}"]), result.stderr
    assert slurmft.RunHandle(tmp_path / "runs" / "first").status().state == "finished"
