"""Asking the GPU and the network after a failure, and making the group anew: with real ranks over gloo."""

from typing import Any

import pytest
import torch
from of_each import of_each
from ranks import reports_of_ranks

import slurmft
from slurmft.errors import UsageError
from slurmft.ipc.pages import PAGE_VARIABLE

RANK = """
import json, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from slurmft import detect_network_failure, handle_nccl_timeout

folder, rank, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
has_answered = folder / "answered"
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
answers = [detect_network_failure(timeout_seconds=10)]
if what == "hang" and rank == 1:
    while not has_answered.exists():
        time.sleep(0.005)
elif what == "hang":
    answers.append(detect_network_failure(timeout_seconds=0.3))
    has_answered.touch()
else:
    for _ in range(2):
        answers.append(handle_nccl_timeout(retry_seconds=0.1))
        answers.append(detect_network_failure(10))
    total = torch.ones(1)
    dist.all_reduce(total)
    answers.append(total.item())
(folder / f"report-{rank}.json").write_text(json.dumps(answers))
"""


def test_two_ranks_make_their_group_anew_and_reach_each_other(tmp_path):
    assert reports_of_ranks(RANK, tmp_path, 2, "anew", meet=True) == [[None, True, None, True, None, 2.0]] * 2


def test_a_rank_that_does_not_take_part_is_a_timeout(tmp_path):
    assert reports_of_ranks(RANK, tmp_path, 2, "hang", meet=True) == [[None, "TIMEOUT"], [None]]


def test_without_a_group_there_is_an_answer_and_nothing_is_made_anew(monkeypatch, caplog):
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    assert slurmft.detect_network_failure() == "COMMUNICATION_ERROR"
    assert slurmft.handle_nccl_timeout() is False
    assert "there is no process group" in caplog.text


def test_under_an_agent_the_group_is_left_to_the_restart(monkeypatch, caplog):
    monkeypatch.setenv(PAGE_VARIABLE, "/somewhere")
    assert slurmft.handle_nccl_timeout() is False
    assert "the agent restarts all ranks" in caplog.text


def test_a_machine_without_a_gpu_says_so():
    if torch.cuda.is_available():
        assert slurmft.detect_gpu_failure() is None
    else:
        assert slurmft.detect_gpu_failure() == "CUDA_UNAVAILABLE"


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "OOM"),
        ("CUDA error: unspecified launch failure", "CUDA_ERROR"),
        ("no kernel", "UNKNOWN_GPU_ERROR"),
    ],
)
def test_the_words_of_a_broken_gpu(message, answer, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", broken)
    assert slurmft.detect_gpu_failure() == answer


def test_a_gpu_that_computes_wrongly_is_an_error(monkeypatch, caplog):
    wrong = torch.ones(100, 100)
    wrong[3, 4] = 1.5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: wrong)
    assert slurmft.detect_gpu_failure() == "CUDA_ERROR"
    assert "computes wrongly" in caplog.text


@of_each(seconds=[0, -1, float("nan"), float("inf"), "30", None, True])
def test_a_timeout_that_is_none_is_refused(seconds):
    with pytest.raises(UsageError, match="timeout_seconds is"):
        slurmft.detect_network_failure(timeout_seconds=seconds)


def test_the_batch_is_halved_down_to_one():
    assert [slurmft.handle_gpu_oom(size) for size in (32, 3, 1)] == [16, 1, 1]
    assert slurmft.handle_gpu_oom() is None


@pytest.mark.parametrize("size", [0, -4, 1.5, "8", True])
def test_a_batch_size_that_is_none_is_refused(size):
    with pytest.raises(UsageError, match="batch_size is"):
        slurmft.handle_gpu_oom(size)
