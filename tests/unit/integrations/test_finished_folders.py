"""Which checkpoint folders count as finished."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from another_user import OTHER, needs_root

from slurmft.errors import Fenced
from slurmft.integrations import folders
from slurmft.storage.checkpoint_names import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE


def fill(parent: Path, step: int, *, ranks: int = 2, marked: bool = False) -> Path:
    """As the Trainer does it."""
    folder = parent / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    torch.save({"step": torch.ones(3)}, folder / "optimizer.pt")
    for rank in range(ranks):
        torch.save({"cpu": torch.zeros(5)}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if marked:
        folders.mark(folder, step, ranks)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_folders_of_the_trainer_count_until_slurmft_watches(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    fill(tmp_path, 10)
    assert folders.finished_steps(tmp_path) == [5, 10]
    folders.begin(tmp_path, 10)
    fill(tmp_path, 15)  # all of its files are there, and yet some rank may not have finished
    assert folders.finished_steps(tmp_path) == [5, 10]
    folders.mark(tmp_path / "checkpoint-15", 15, 2)
    assert folders.finished_steps(tmp_path) == [5, 10, 15]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state_1.pth", "trainer_state.json"])
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_a_cut_file_is_noticed(tmp_path: Path, name: str, marked: bool) -> None:
    folder = fill(tmp_path, 5, marked=marked)
    cut(folder / name)
    assert folders.finished_steps(tmp_path) == []


@pytest.mark.parametrize("name", ["rng_state_0.pth", "trainer_state.json"])
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_a_missing_file_is_noticed(tmp_path: Path, name: str, marked: bool) -> None:
    folder = fill(tmp_path, 5, marked=marked)
    (folder / name).unlink()
    assert folders.finished_steps(tmp_path) == []


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_the_second_last_is_taken_where_the_last_is_incomplete(tmp_path: Path, marked: bool) -> None:
    """transformers#35782, #35525 and #40790: a job that was killed in a save could not be started again."""
    for step in (5, 10):
        fill(tmp_path, step, marked=marked)
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    assert transformers_takes(tmp_path) == "checkpoint-10"
    assert folders.finished_steps(tmp_path) == [5]


def transformers_takes(parent: Path) -> str:
    """What ``resume_from_checkpoint=True`` resumes from, and fails with."""
    pytest.importorskip("transformers")
    from transformers.trainer_utils import get_last_checkpoint

    return Path(str(get_last_checkpoint(str(parent)))).name


def test_a_training_that_begins_earlier_believes_no_later_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would overwrite them one file after the other, and the old marker would speak for a mixture."""
    fill(tmp_path, 5, marked=True)
    fill(tmp_path, 10, marked=True)
    folders.begin(tmp_path, 5)
    assert folders.finished_steps(tmp_path) == [5]
    assert "checkpoint-10, of another training, is not resumed from" in caplog.text
    assert (tmp_path / "checkpoint-10" / "model.safetensors").exists(), "nothing is removed"


@needs_root
@pytest.mark.parametrize("marked", [True, False])
def test_folders_of_another_user_are_neither_believed_nor_touched(tmp_path: Path, marked: bool) -> None:
    fill(tmp_path, 10, marked=marked)
    theirs = fill(tmp_path, 999_999_999, marked=marked)
    for path in (theirs, *theirs.rglob("*")):
        os.lchown(path, OTHER, OTHER)
    before = sorted(path.name for path in theirs.rglob("*"))
    assert before
    assert folders.finished_steps(tmp_path) == [10]
    folders.begin(tmp_path, 10)
    folders.prune(tmp_path, limit=1, newest=10, best=None)
    assert sorted(path.name for path in theirs.rglob("*")) == before


@needs_root
@pytest.mark.parametrize("name", ["model.safetensors", folders.FINISHED_MARKER, "pickled/extra.bin"])
def test_a_file_that_another_user_has_put_into_our_folder_is_not_loaded(tmp_path: Path, name: str) -> None:
    folder = fill(tmp_path, 10, marked=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    os.chown(folder / name, OTHER, OTHER)
    assert folders.finished_steps(tmp_path) == []


@needs_root
def test_a_list_that_another_user_has_made_says_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    (tmp_path / folders.LIST).write_text(json.dumps({"format": 1, "unmarked": []}))
    os.chown(tmp_path / folders.LIST, OTHER, OTHER)
    assert folders.finished_steps(tmp_path) == [10]


def test_odd_neighbours_are_no_checkpoints(tmp_path: Path) -> None:
    fill(tmp_path, 5, marked=True)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    (tmp_path / "checkpoint-9").symlink_to(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / folders.FINISHED_MARKER).write_text("{")
    fill(tmp_path, 8)
    (tmp_path / "checkpoint-8" / folders.FINISHED_MARKER).write_text('{"format": 1, "step": 5, "files": {}}')
    assert folders.finished_steps(tmp_path) == [5]
    assert folders.finished_steps(tmp_path / "missing") == []


def test_a_marker_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = fill(tmp_path, 5)
    marker = {"format": 1, "step": 5, "files": {"../../etc/passwd": 1}}
    (folder / folders.FINISHED_MARKER).write_text(json.dumps(marker))
    assert folders.finished_steps(tmp_path) == []


def test_pruning_keeps_the_newest_finished_and_the_best(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        fill(tmp_path, step, marked=True)
    fill(tmp_path, 17)
    folders.begin(tmp_path, 20)
    folders.prune(tmp_path, limit=2, newest=20, best=str(tmp_path / "checkpoint-5"))
    assert sorted(folders.step_folders(tmp_path)) == [5, 20]
    folders.prune(tmp_path, limit=1, newest=20, best=str(tmp_path / "checkpoint-5"))
    assert sorted(folders.step_folders(tmp_path)) == [5, 20]


def test_nothing_is_removed_for_a_folder_that_is_not_finished(tmp_path: Path) -> None:
    fill(tmp_path, 5, marked=True)
    newest = fill(tmp_path, 10, marked=True)
    cut(newest / "optimizer.pt")
    folders.prune(tmp_path, limit=1, newest=10, best=None)
    assert folders.finished_steps(tmp_path) == [5]


def test_a_stale_attempt_marks_and_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "owner.json").write_text('{"format": 1, "generation": 3}')
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(run))
    monkeypatch.setenv(GENERATION_VARIABLE, "2")
    folder = fill(tmp_path / "out", 5)
    for forbidden in (
        lambda: folders.mark(folder, 5, 2),
        lambda: folders.begin(tmp_path / "out", 0),
        lambda: folders.prune(tmp_path / "out", limit=1, newest=5, best=None),
    ):
        with pytest.raises(Fenced):
            forbidden()
    assert not (folder / folders.FINISHED_MARKER).exists()


def test_an_empty_folder_stays_empty_until_the_first_save(tmp_path):
    """Scripts up to transformers 4.56 refuse one that is not, and so would each restart before it."""
    out = tmp_path / "out"
    for _ in range(2):
        folders.begin(out, 0)
        assert list(out.iterdir()) == []
    folders.about_to_save(out)
    half = out / "checkpoint-5"
    half.mkdir()
    (half / "trainer_state.json").write_text("{}")
    folders.begin(out, 5)
    assert folders.finished_steps(out) == []
