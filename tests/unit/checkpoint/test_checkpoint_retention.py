"""Which checkpoints stay: the newest, the best, never the damaged in place of the good."""

import json
import math
from pathlib import Path

import pytest
import torch

from slurmft.checkpoint import Catalog, CheckpointManager
from slurmft.errors import CheckpointError


class Run:
    """The least that can be saved."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters())


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def three(tmp_path: Path, run: Run) -> CheckpointManager:
    """Checkpoints of steps 1, 2 and 3."""
    checkpoints = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(run.model, run.optimizer, step=step, metrics={"loss": step})
    return checkpoints


def newest(checkpoints: CheckpointManager) -> Path:
    return Catalog(checkpoints.directory).committed()[0].path


def steps(folder: Path) -> list[int]:
    return [entry.step for entry in Catalog(folder).committed()]


def truncate(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"cut")


def test_the_last_n_and_the_best_are_kept(tmp_path, run, eventually):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=2)
    for step, loss in enumerate([5, 1, math.nan, -math.inf, 3, 4, 2]):
        checkpoints.save(run.model, run.optimizer, step=step, metrics={"loss": loss})
    eventually(lambda: steps(tmp_path) == [6, 5, 1])
    assert checkpoints.load_best(run.model, run.optimizer).step == 1


def test_best_may_mean_highest_and_may_be_missing(tmp_path, run, eventually):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=1, best_metric="accuracy", best_mode="max")
    for step, metrics in enumerate([{"accuracy": 0.2}, {"accuracy": 0.7}, {}, {"accuracy": 0.1}]):
        checkpoints.save(run.model, run.optimizer, step=step, metrics=metrics)
    eventually(lambda: steps(tmp_path) == [3, 2, 1])  # whatever is asked for, the newest two stay
    assert checkpoints.load_best(run.model, run.optimizer).step == 1
    assert CheckpointManager(tmp_path, save_best=False).load_latest(run.model, run.optimizer).step == 3
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* has a finite metric 'loss'"):
        CheckpointManager(tmp_path).load_best(run.model, run.optimizer)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_without_save_best_only_the_last_n_stay(tmp_path, run, eventually, number):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=number, save_best=False)
    for step in range(7):
        checkpoints.save(run.model, run.optimizer, step=step, metrics={"loss": step})
    checkpoints.close()
    eventually(lambda: steps(tmp_path) == [*range(6, 6 - number, -1)])


def test_a_damaged_best_gives_way_to_the_second_best(three, run):
    truncate(Catalog(three.directory).committed()[-1].path)
    loaded = three.load_best(run.model, run.optimizer)
    assert loaded.step == 2 and len(loaded.skipped) == 1


def test_going_back_never_removes_the_good_for_the_damaged(tmp_path, run, eventually):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=2, save_best=False)
    for step in (100, 200):
        checkpoints.save(run.model, run.optimizer, step=step)
    truncate(newest(checkpoints))
    assert checkpoints.load_latest(run.model, run.optimizer).step == 100
    checkpoints.save(run.model, run.optimizer, step=150)
    eventually(lambda: steps(tmp_path) == [150, 200, 100])  # the damaged 200 is not one of the two
    assert checkpoints.load_latest(run.model, run.optimizer).step == 150
    checkpoints.save(run.model, run.optimizer, step=180)
    eventually(lambda: steps(tmp_path) == [180, 150])


def test_an_unreadable_marker_goes_when_it_is_older_than_all_kept_but_never_a_newer_format(three, run, eventually):
    newer, garbage, _ = [entry.path for entry in reversed(Catalog(three.directory).committed())]
    value = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(value | {"format": 99}))
    (garbage / "manifest.json").write_text("{")
    for step in range(4, 8):
        three.save(run.model, run.optimizer, step=step)
    eventually(lambda: not garbage.exists())
    assert newer.exists()
