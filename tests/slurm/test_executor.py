"""``slurmft.Executor``: programs written for submitit, with one import changed; here, and on the lab as its user."""

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.helpers import DelayedSubmission

import slurmft
from slurm.conftest import eventually
from slurmft.lab.cluster import Lab
from slurmft.operations.executor import Job
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder

pytestmark = pytest.mark.timeout(400)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers know no tests
ONCE = {"num_in_job_restarts": 0, "num_job_retries_on_failure": 0}


def executor_here(path: Path, **parameters: Any) -> slurmft.Executor:
    executor = slurmft.Executor(folder=path / "%j", cluster="local")
    executor.update_parameters(timeout_min=5, **parameters)
    return executor


def test_results_of_all_tasks_and_of_an_array(tmp_path: Path) -> None:
    executor = executor_here(tmp_path, tasks_per_node=2, name="adds")

    def add(left: int, right: int) -> int:
        print("this is task", os.environ["RANK"])
        return left + right + 100 * int(os.environ["RANK"])

    with executor.batch():
        jobs = [executor.submit(add, 1, 2), executor.submit(add, 3, right=4)]
    assert [job.results() for job in jobs] == [[3, 103], [7, 107]]
    job = jobs[0]
    assert (job.num_tasks, job.state, job.task(1).result()) == (2, "COMPLETED", 103)
    assert "this is task 1" in (job.task(1).stdout() or "")
    assert job.paths.folder == tmp_path / "adds-1"
    assert pickle.loads(pickle.dumps(job)).results() == [3, 103]
    assert job.submission().args == (1, 2)
    executor.update_parameters(tasks_per_node=1)
    array = executor.map_array(add, [1, 2], [10, 20])
    assert [job.result() for job in array] == [11, 22]
    assert array[1].paths.folder == tmp_path / "adds-3" / "trials" / "1"
    assert "this is task 0" in (array[1].stdout() or "")
    assert pickle.loads(pickle.dumps(array[0])).results() == [11]


def test_an_exception_is_told_as_by_submitit(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of the user's own")

    job = executor_here(tmp_path, fault_tolerance=ONCE).submit(fail)
    error = job.exception()
    assert isinstance(error, FailedJobError) and "of the user's own" in str(error)
    assert job.state == "FAILED"
    with pytest.raises(FailedJobError, match="ZeroDivisionError"):
        job.result()


def test_of_an_array_one_call_raises_one_ends_its_process_one_is_cancelled_and_the_others_have_results(
    tmp_path: Path,
) -> None:
    def work(what: str) -> Any:
        match what:
            case "raise":
                raise ZeroDivisionError("of the user's own")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "wait":
                time.sleep(600)
            case "lock":
                return threading.Lock()
        return what * 3

    executor = executor_here(tmp_path)
    cancelled, *others = executor.map_array(work, ["wait", "a", "raise", "exit", "kill", "b", "lock"])
    assert [others[at].result() for at in (0, 4)] == ["aaa", "bbb"]
    error = others[1].exception()
    assert isinstance(error, FailedJobError) and "ZeroDivisionError: of the user's own" in str(error)
    assert "exit code 3" in str(others[2].exception()) and "SIGKILL" in str(others[3].exception())
    assert "cannot pickle" in str(others[5].exception())
    eventually(lambda: cancelled.state == "RUNNING", 90, cancelled.run.logs)
    cancelled.cancel()
    with pytest.raises(UncompletedJobError, match="cancelled"):
        cancelled.result()
    states = [job.state for job in (cancelled, *others)]
    assert states == ["CANCELLED", "COMPLETED", "FAILED", "FAILED", "FAILED", "COMPLETED", "FAILED"]
    assert cancelled.run.wait(60) == 0


def test_an_array_goes_on_where_checkpoint_says_and_ends_with_its_last_call(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    executor = executor_here(tmp_path, slurm_array_parallelism=2)
    with executor.batch():
        jobs = [executor.submit(Counting(folder), until) for folder, until in zip(folders, (200, 10**6), strict=True)]
    run = RunFolder(jobs[0].run.folder)
    eventually(lambda: min(map(counted, folders)) > 20, 90, jobs[0].run.logs)
    assert jobs[0].run.requeue()
    (count, began_at) = jobs[0].result()
    assert count == 200 and len(began_at) == 2 and began_at[1] > 20
    assert (folders[0] / "asked").read_text() == "0"
    jobs[1].cancel()
    with pytest.raises(UncompletedJobError):
        jobs[1].result()
    assert (folders[1] / "asked").read_text() == "00"
    eventually(lambda: jobs[1].watch.look(run.path, force=True)[1], 60, jobs[0].run.logs)


class Counting:
    """Counts to a number, and keeps its place as submitit's documents show."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self, until: int, began_at: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        began_at = (*began_at, self.count)
        self.now = began_at
        rank = os.environ["RANK"]
        while self.count < until:
            self.count += 1
            (self.folder / f"count-{rank}").write_text(str(self.count))
            time.sleep(0.05)
        return self.count, began_at

    def checkpoint(self, until: int, began_at: tuple[int, ...] = ()) -> DelayedSubmission:
        (self.folder / "asked").open("a").write(os.environ["RANK"])
        return DelayedSubmission(self, until, began_at=self.now)


def counted(folder: Path, rank: int = 0) -> int:
    try:
        return int((folder / f"count-{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0


def starts(job: Job) -> int:
    return [event.event for event in job.run.explain()].count(EventName.WORKERS_STARTED)


@pytest.mark.long
def test_a_preempted_job_goes_on_where_checkpoint_says(tmp_path: Path) -> None:
    """Only rank 0 is asked, once although the signal comes three times, and a rank that is killed costs no more."""
    job = executor_here(tmp_path, tasks_per_node=2).submit(Counting(tmp_path), 400)
    run = RunFolder(job.paths.folder)
    eventually(lambda: counted(tmp_path) > 20 and counted(tmp_path, 1) > 20, 90, job.run.logs)
    owner = run.owner()
    assert owner is not None
    for _ in range(3):
        os.kill(owner.pid, signal.SIGTERM)
    asked = tmp_path / "asked"
    eventually(lambda: starts(job) == 2, 90, job.run.logs)
    (tmp_path / "count-1").unlink()
    eventually(lambda: counted(tmp_path, 1) > 20, 90, job.run.logs)
    assert not job.done(force_check=True)
    slurmft_kill = [sys.executable, "-m", "slurmft", "inject", str(run.path), "kill", "--rank", "1"]
    assert os.spawnv(os.P_WAIT, sys.executable, slurmft_kill) == 0
    (count, began_at), (_, others) = job.results()
    assert count == 400
    assert began_at == others
    assert len(began_at) == 2 and began_at[1] > 20
    assert asked.read_text() == "0"
    assert starts(job) == 3


def test_a_cancelled_job_has_no_result(tmp_path: Path) -> None:
    job = executor_here(tmp_path).submit(Counting(tmp_path), 10**6)
    eventually(lambda: counted(tmp_path) > 2, 90, job.run.logs)
    assert job.state == "RUNNING"
    job.cancel()
    with pytest.raises(UncompletedJobError, match="stopped by"):
        job.result()
    assert isinstance(job.exception(), UncompletedJobError)
    assert job.submission().kwargs["began_at"] == (0,)


@pytest.mark.long
@pytest.mark.slurm
def test_a_program_of_submitits_with_one_import_changed(lab: Lab) -> None:
    """As an ordinary user: an array of which one job runs at a time, and one that is requeued by hand while it runs."""
    folder = lab.home / f"executor-{os.getpid()}"
    program = f"""
import os, pathlib, sys, time
from submitit.helpers import DelayedSubmission
from slurmft import Executor as AutoExecutor

class Counting:
    def __init__(self):
        self.count = 0
    def __call__(self, name, until):
        began, beside = self.count, pathlib.Path({str(folder)!r}, "beside")
        beside.touch(exist_ok=False)  # two at a time would meet
        while self.count < until:
            self.count += 1
            pathlib.Path({str(folder)!r}, name).write_text(str(self.count))
            time.sleep(0.05)
        beside.unlink()
        name = "_".join(os.environ[f"SLURM_ARRAY_{{part}}_ID"] for part in ("JOB", "TASK"))
        return began, self.count, int(os.environ["SLURM_NTASKS"]), name
    def checkpoint(self, name, until):
        pathlib.Path({str(folder)!r}, "beside").unlink()
        return DelayedSubmission(self, name, until)

executor = AutoExecutor(folder={str(folder)!r})
executor.update_parameters(timeout_min=10, slurm_partition="low", slurm_signal_delay_s=60, name="counting",
                           slurm_array_parallelism=1, slurm_additional_parameters={{"nice": 1}})
jobs = executor.map_array(Counting(), ["a", "b"], [300, 10])
while not pathlib.Path({str(folder)!r}, "a").exists():
    time.sleep(0.1)
print(jobs[0].run.requeue(), jobs[1].state)
for job in jobs:
    print(*job.result(), job.job_id)
"""
    done = lab.run([sys.executable, "-c", program], check=False, timeout=350)
    assert done.returncode == 0, done.stderr + done.stdout
    asked, *results = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert asked[-1] == "PENDING"
    (began, *first), (nothing, *second) = results
    assert int(began) > 0 and nothing == "0"
    assert (first[:2], second[:2]) == (["300", "1"], ["10", "1"])
    assert (first[2], second[2]) == (first[3], second[3])


PREEMPTED = """
import collections, os, pathlib, subprocess, sys, time
from submitit.helpers import DelayedSubmission
from slurmft import Executor as AutoExecutor

folder = pathlib.Path(sys.argv[1])

class Counting:
    def __init__(self):
        self.count, self.places = 0, []
    def __call__(self, name, until):
        self.places = [*self.places, (os.environ["SLURM_JOB_ID"], os.environ["SLURMD_NODENAME"], self.count)]
        while self.count < until:
            self.count += 1
            (folder / f"new-{name}").write_text(repr(self.places[-1]))
            (folder / f"new-{name}").replace(folder / f"count-{name}")
            time.sleep(0.05)
        return name, self.count, self.places
    def checkpoint(self, name, until):
        return DelayedSubmission(self, name, until)

def at(name):
    path = folder / f"count-{name}"
    return eval(path.read_text()) if path.exists() else None

executor = AutoExecutor(folder=folder / "runs")
executor.update_parameters(timeout_min=10, slurm_partition="low", cpus_per_task=8, slurm_array_parallelism=3)
jobs = executor.map_array(Counting(), range(6), [200] * 6)
own = jobs[0].job_id.partition("_")[0]
while len({place[1] for name in range(6) if (place := at(name))}) < 3:
    time.sleep(0.1)
pilot = next(place for name in range(6) if (place := at(name)) and place[0] != own)
subprocess.run(["sbatch", "-p", "high", "-w", pilot[1], "--exclusive", "-t", "1", "-o", "/dev/null",
                "--wrap", "srun sleep 5"], check=True)
for job in jobs:
    name, count, places = job.result()
    print("RESULT", name, count, len(places), places[-1][2], places[0][:2] == pilot[:2], places)
print("STATES", *(job.state for job in jobs), len(jobs[0].run.status().jobs))
"""


@pytest.mark.long
@pytest.mark.slurm
def test_a_call_of_an_array_goes_on_where_checkpoint_said_after_a_pilot_was_preempted(lab: Lab) -> None:
    """Six calls in three jobs, and the node of one that lends it is taken away by a job with more priority."""
    folder = Path(tempfile.mkdtemp(prefix="array-", dir=lab.home))
    os.chown(folder, lab.uid, lab.gid)
    done = lab.run([sys.executable, "-c", PREEMPTED, str(folder)], check=False, timeout=350)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line.split(maxsplit=6) for line in done.stdout.splitlines()]
    results = [line[1:] for line in lines if line[0] == "RESULT"]
    assert [each[:2] for each in results] == [[str(name), "200"] for name in range(6)]
    again = [each for each in results if each[2] != "1"]
    assert any(each[4] == "True" and int(each[3]) > 0 for each in again), done.stdout
    assert ["STATES", *["COMPLETED"] * 6, "1"] == done.stdout.split("\n")[-2].split(), done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodez": 2}, "unknown parameter nodez"),
        ({"slurm_partitoin": "low"}, "partitoin"),
        ({"slurm_setup": ["module load cuda"]}, "setup is not possible here"),
        ({"checkpoint": {"interval_steps": -1}}, "interval_steps"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused_at_once(tmp_path: Path, given: Any, message: str) -> None:
    executor = executor_here(tmp_path, nodes=2)
    with pytest.raises(slurmft.UsageError, match=message):
        executor.update_parameters(**given)
    assert executor.parameters == {"timeout_min": 5, "nodes": 2}
    with pytest.raises(slurmft.UsageError, match="no cluster 'debug'"):
        slurmft.Executor(tmp_path, cluster="debug")


def test_an_array_is_submitted_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_here(tmp_path, tasks_per_node=2)
    made: list[Any] = []
    submit_one = executor._submit_one

    def refuse_the_third(*given: Any) -> Any:
        if len(made) == 2:
            raise slurmft.SlurmError("no more jobs")
        made.append(submit_one(*given))
        return made[-1]

    monkeypatch.setattr(executor, "_submit_one", refuse_the_third)
    with pytest.raises(slurmft.SlurmError, match="no more jobs"):
        executor.map_array(Counting(tmp_path), [10**6] * 3)
    for job in made:
        assert isinstance(job.exception(), UncompletedJobError)
