"""What submitit's parameters become in a configuration."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from of_each import of_each
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from slurmft import Executor, UsageError
from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.inference.trials import add
from slurmft.operations import executor as module
from slurmft.operations.executor import Job, RunHandle, _Watch, keys_of
from slurmft.storage.run_folder import RunFolder


@of_each(
    given__keys=[
        ({}, {}),
        ({"timeout_min": 60, "name": "a"}, {"slurm": {"time": 60, "job_name": "a"}}),
        ({"slurm_time": 7, "timeout_min": 60}, {"slurm": {"time": 7}}),
        ({"slurm_timeout_min": 7, "slurm_mem_gb": 2}, {"slurm": {"time": 7, "mem": "2048M"}}),
        ({"nproc_per_node": 2, "cpus_per_task": 3}, {"nproc_per_node": 2, "slurm": {"cpus_per_task": 6}}),
        ({"mem_gb": 1.5}, {"slurm": {"mem": "1536M"}}),
        (
            {"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 3, "gpus_per_node": 4},
            {"nodes": 2, "nproc_per_node": 4, "slurm": {"cpus_per_task": 12, "gpus_per_node": 4}},
        ),
        (
            {"slurm_ntasks_per_node": 4, "slurm_gpus_per_task": 1},
            {"nproc_per_node": 4, "slurm": {"gpus_per_node": 4}},
        ),
        ({"slurm_signal_delay_s": 90}, {"preemption": {"signal_lead_s": 90}}),
        (
            {"slurm_signal_delay_s": 90, "preemption": {"signal": "SIGUSR2"}},
            {"preemption": {"signal_lead_s": 90, "signal": "SIGUSR2"}},
        ),
        (
            {"slurm_additional_parameters": {"mail-type": "END"}, "slurm": {"nice": 5}, "slurm_qos": "low"},
            {"slurm": {"mail_type": "END", "nice": 5, "qos": "low"}},
        ),
        ({"slurm_array_parallelism": 8, "local_anything": 1, "debug_setup": 2, "slurm_max_num_timeout": 3}, {}),
        (
            {"spare_nodes": 1, "checkpoint": {"interval_steps": 5}},
            {"spare_nodes": 1, "checkpoint": {"interval_steps": 5}},
        ),
    ]
)
def test_parameters(given: dict[str, Any], keys: dict[str, Any]) -> None:
    assert keys_of(given) == keys


@of_each(
    given=[
        {"cpus_per_task": "2", "tasks_per_node": 2},
        {"tasks_per_node": "2"},
        {"slurm_gpus_per_task": "a100:2"},
        {"slurm_array_parallelism": 0},
        {"slurm_array_parallelism": -1},
        {"slurm_array_parallelism": "two"},
        {"mem_gb": "4"},
        {"mem_gb": float("inf")},
        {"slurm_additional_parameters": "nice"},
        {"run_folder": "elsewhere"},
    ]
)
def test_values_that_cannot_be_used_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given)).removeprefix("slurm_")):
        keys_of(given)


class Views:
    """``overviews`` and ``RunHandle`` of runs of which all go on, and some are missing; counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.others_s, self.another = 0.0, threading.Event()
        self.missing: set[str] = set()
        self.ended: set[str] = set()
        monkeypatch.setattr(module.control, "overviews", self.overviews)
        monkeypatch.setattr(module, "RunHandle", lambda folder: SimpleNamespace(exit_code=lambda _: self.code(folder)))

    def overviews(self, runs: Sequence[Any]) -> list[Any]:
        self.asked.append(len(runs))
        if self.others_s:
            self.another.wait(self.others_s) if len(self.asked) == 1 else self.another.set()
        return [SimpleNamespace(state="running") for _ in runs]

    def code(self, folder: Path) -> int | None:
        if folder.name in self.missing:
            raise StorageError(f"no {folder.name}")
        return 0 if folder.name in self.ended else None


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> Views:
    monkeypatch.setattr(Job, "watch", _Watch())
    return Views(monkeypatch)


def test_two_hundred_jobs_are_one_question(views: Views, tmp_path: Path) -> None:
    jobs = [Job(tmp_path / str(number), str(number)) for number in range(200)]
    assert not any(job.done() for job in jobs)
    assert views.asked == [200]


def test_a_job_whose_folder_is_gone_hides_no_other(views: Views, tmp_path: Path) -> None:
    gone, other = Job(tmp_path / "gone", "1"), Job(tmp_path / "other", "2")
    views.missing, views.ended = {"gone"}, {"other"}
    assert other.done()
    with pytest.raises(StorageError, match="no gone"):
        gone.done()
    gone.cancel_at_deletion().__del__()
    gone.cancel_at_deletion(False)


def test_threads_may_ask_at_once(views: Views, tmp_path: Path) -> None:
    jobs = [Job(tmp_path / str(number), str(number)) for number in range(20)]
    views.ended = {str(number) for number in range(20)}
    views.others_s = 0.5  # the first question takes that long, or until there is another
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(job.done, force_check=True) for job in jobs * 8]
        assert all(answer.result() for answer in answers)
    assert views.asked == [20]


def test_a_batch_is_submitted_by_the_first_use_of_a_job(
    views: Views, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(tmp_path, cluster="local")
    monkeypatch.setattr(executor, "_submit_one", lambda *_: Job(tmp_path / "a", "1"))
    for use in (lambda job: job.done(), lambda job: job.state, lambda job: job.run):
        with executor.batch(allow_implicit_submissions=True):
            use(executor.submit(print))
    with executor.batch(), pytest.raises(AttributeError, match="forbidden"):
        executor.submit(print).done()


def test_an_array_is_taken_back_for_an_argument_that_cannot_be_pickled(
    views: Views, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(tmp_path, cluster="local", tasks_per_node=2)
    cancelled: list[str] = []
    monkeypatch.setattr(Job, "cancel", lambda self, check=True: cancelled.append(self.job_id))
    submit_one = executor._submit_one

    def first_or(delayed: DelayedSubmission, at: int, count: int) -> Job:
        return Job(tmp_path / "first", "first") if at == 0 else submit_one(delayed, at, count)

    monkeypatch.setattr(executor, "_submit_one", first_or)
    with pytest.raises(TypeError, match="pickle"):
        executor.map_array(print, [1, threading.Lock()])
    assert cancelled == ["first"]
    assert list(tmp_path.iterdir()) == []
    executor.update_parameters(tasks_per_node=1)  # a sweep
    with pytest.raises(TypeError, match="pickle"):
        executor.map_array(print, [1, threading.Lock()])
    assert list(tmp_path.iterdir()) == []


def test_an_array_that_waits_for_another_job_still_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(tmp_path, cluster="local", slurm_array_parallelism=1, slurm_dependency="afterok:7",
                        checkpoint={"keep_last_n": 3})  # fmt: skip
    asked: list[dict[str, Any]] = []

    def refuse(*_: Any, keys: dict[str, Any], **__: Any) -> None:
        asked.append(keys)
        raise UsageError("enough")

    monkeypatch.setattr(module, "submitted", refuse)
    executor.update_parameters(name="n" * 300)
    with pytest.raises(UsageError, match="enough"):
        executor.map_array(print, [1, 2])
    assert asked[0]["slurm"]["dependency"] == "afterok:7,singleton"
    assert executor.cluster == "local"


def test_an_array_is_one_sweep_of_so_many_jobs_as_may_run_at_a_time(
    views: Views, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunConfig] = []

    def submit(settings: RunConfig, **_: Any) -> Any:
        asked.append(settings)
        add(settings.run_folder, settings.trials)
        return SimpleNamespace(made=SimpleNamespace(job="7", where="slurm"))

    monkeypatch.setattr(module, "submit_trials", submit)
    executor = Executor(tmp_path, cluster="slurm", slurm_array_parallelism=4, timeout_min=60, name="many")
    with executor.batch():
        jobs = [executor.submit(print, number, sep="-") for number in range(1000)]
    assert [job.job_id for job in jobs] == [f"7_{number}" for number in range(1000)]
    [settings] = asked
    assert settings.trials is not None and (settings.trials.max_jobs, settings.trials.per_node) == (4, 1)
    assert settings.slurm.time == "60"
    assert jobs[17].submission().args == (17,)
    assert not any(job.done() for job in jobs) and jobs[0].state == "PENDING"
    assert views.asked == [1], "one run, and one question"
    jobs[3].cancel()
    assert jobs[3].done()
    assert "cancelled" in str(jobs[3].exception())
    executor = Executor(tmp_path, cluster="slurm")
    executor.map_array(print, range(300))
    assert asked[1].trials is not None and asked[1].trials.max_jobs == 256


@pytest.mark.parametrize(
    ("stored", "message"), [(None, "sys.exit"), (b"", "damaged"), (b"\x80\x04\x95\xff", "damaged")]
)
def test_a_job_without_a_result_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bytes | None, message: str
) -> None:
    monkeypatch.setattr(Job, "watch", _Watch())
    monkeypatch.setattr(Job, "wait", lambda _: None)
    monkeypatch.setattr(RunHandle, "wait", lambda *_: 0)
    run = RunFolder(tmp_path)
    run.call.write_bytes(b"")
    if stored is not None:
        run.result.write_bytes(stored)
    error = Job(tmp_path, "1").exception()
    assert isinstance(error, UncompletedJobError)
    assert message in str(error)
