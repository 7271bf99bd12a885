"""Any plain state under an id of its own, and the result of a load as a mapping."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from of_each import of_each

from slurmft import CheckpointManager
from slurmft.checkpoint import Catalog
from slurmft.errors import CheckpointError, UsageError

STATE = {
    "step": 7, "done": [1, 2.5, None, "text"], "weights": {"w": torch.arange(3)}, (1, 2): {"a"},
    "recent": deque([1], maxlen=3), "scores": np.float64(0.5),
}  # fmt: skip


def test_a_state_comes_back_by_its_id_and_the_newest_one_without(tmp_path):
    manager = CheckpointManager(tmp_path)
    assert manager.load_checkpoint() is None
    assert manager.load_checkpoint(3) is None and manager.load_checkpoint("best") is None
    manager.save_checkpoint(STATE, 7)
    manager.save_checkpoint({"step": 8}, checkpoint_id=8)
    assert manager.load_checkpoint() == {"step": 8}
    back = manager.load_checkpoint(checkpoint_id=7)
    assert back["step"] == 7 and back["done"] == STATE["done"] and back[1, 2] == {"a"}
    assert torch.equal(back["weights"]["w"], torch.arange(3)) and back["recent"].maxlen == 3
    assert back["scores"] == 0.5
    manager.close()
    other = CheckpointManager(tmp_path)
    assert other.load_checkpoint("7")["step"] == 7
    other.close()


def test_a_name_is_an_id_as_well_and_the_newest_of_a_name_counts(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last_n=9)
    manager.save_checkpoint([1], "before the sweep")
    manager.save_checkpoint([2], 40)
    manager.save_checkpoint([3], "before the sweep")
    assert manager.load_checkpoint("before the sweep") == [3]
    assert manager.load_checkpoint(40) == [2]
    assert manager.load_checkpoint("before") is None
    manager.wait()
    assert [entry.step for entry in Catalog(tmp_path).committed()] == [41, 40, 0]
    manager.close()


def test_each_id_of_many_in_a_row_is_there(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last_n=9)
    for number in range(6):
        manager.save_checkpoint({"number": number}, f"state {number}")
    assert [manager.load_checkpoint(f"state {number}") for number in range(6)] == [{"number": n} for n in range(6)]
    manager.close()


@of_each(checkpoint_id=[-1, 1.5, True, None, "", " ", "a\nb", b"7", [7], 10**30])
def test_what_is_no_id_is_refused_before_anything_is_written(checkpoint_id, tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UsageError, match="checkpoint_id is"):
        manager.save_checkpoint({}, checkpoint_id)
    assert not list(Path(tmp_path).glob("step*"))
    manager.close()


def test_a_state_that_cannot_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError):
        manager.save_checkpoint({"a function": lambda: 1}, 1)
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="contains itself"):
        manager.save_checkpoint(endless, 1)
    assert manager.load_checkpoint() is None
    manager.close()


def test_models_and_plain_states_are_told_apart(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    manager = CheckpointManager(tmp_path)
    manager.save(model, optimizer, step=1)
    with pytest.raises(CheckpointError):
        manager.load_checkpoint()
    manager.save_checkpoint({"a": 1}, 2)
    with pytest.raises(CheckpointError):
        manager.load_latest(model, optimizer)
    assert manager.load_checkpoint() == {"a": 1}
    manager.close()


def test_what_was_loaded_reads_as_a_mapping_too(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    manager = CheckpointManager(tmp_path)
    nothing = manager.load_latest(model, optimizer)
    assert not nothing and dict(nothing) == {} and nothing.step == 0
    manager.save(model, optimizer, step=12, metrics={"loss": 0.5}, extra={"best": 3, "step": "ours wins"})
    loaded = manager.load_latest(model, optimizer)
    assert loaded and (loaded["step"], loaded["best"], dict(loaded["metrics"])) == (12, 3, {"loss": 0.5})
    assert loaded.extra["step"] == "ours wins"
    assert loaded["path"] == loaded.path and loaded["world_size"] == 1
    with pytest.raises(KeyError):
        loaded["model_state_dict"]
    assert manager.load_from(loaded.path, model, optimizer) == manager.load_from(loaded["path"], model, optimizer)
    manager.close()


def test_old_states_are_cleaned_up_and_the_newest_id_is_told(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last_n=9)
    assert manager.get_latest_checkpoint_id() is None and manager.cleanup_old_checkpoints(keep_last=5) == 0
    for number in range(8):
        manager.save_checkpoint({"at": number}, number)
    assert manager.get_latest_checkpoint_id() == 7
    assert manager.cleanup_old_checkpoints(keep_last=5) == 3
    assert [entry.step for entry in Catalog(tmp_path).committed()] == [7, 6, 5, 4, 3]
    manager.save_checkpoint({"at": "end"}, "the end")
    assert manager.get_latest_checkpoint_id() == "the end"
    assert manager.load_checkpoint(manager.get_latest_checkpoint_id()) == {"at": "end"}
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(UsageError, match="keep_last is"):
            manager.cleanup_old_checkpoints(keep_last=wrong)
    manager.close()
