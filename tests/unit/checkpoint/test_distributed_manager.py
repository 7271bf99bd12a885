"""The manager under its other names; and which checkpoints are kept for good."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slurmft
from slurmft.checkpoint import Catalog, DistributedCheckpointManager, Entry
from slurmft.checkpoint.catalog import decide
from slurmft.errors import CheckpointError, UsageError


@pytest.fixture
def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters())


def test_a_script_that_knows_these_names_saves_loads_and_cleans_up(tmp_path, trainee):
    model, optimizer = trainee
    checkpoints = slurmft.DistributedCheckpointManager(tmp_path, keep_last_n=4, save_best=False)
    start = checkpoints.load_checkpoint(model, optimizer)
    assert (start.step, start.epoch, start.path) == (0, 0, None)
    for step in range(1, 5):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save_checkpoint(
            model, optimizer, step, epoch=step // 2, metrics={"loss": step}, extra={"a": (step,)}
        )
        checkpoints.wait()
    assert checkpoints.cleanup_old_checkpoints() == 0
    assert checkpoints.cleanup_old_checkpoints(keep_last_n=2) == 2
    assert checkpoints.cleanup_old_checkpoints(keep_last_n=1) == 0, "the newest two stay whatever is asked for"
    assert [entry.step for entry in Catalog(tmp_path).committed()] == [4, 3]
    checkpoints.close()

    other = DistributedCheckpointManager(tmp_path)
    newest = other.load_checkpoint(model, optimizer)
    assert (newest.step, newest.epoch, dict(newest.extra), dict(newest.metrics)) == (4, 2, {"a": (4,)}, {"loss": 4.0})
    best = other.load_checkpoint(model, optimizer, "best")
    assert (best.step, best.epoch) == (3, 1)
    assert model.weight.eq(3).all()
    other.close()


def test_without_an_epoch_nothing_more_is_stored(tmp_path, trainee):
    checkpoints = DistributedCheckpointManager(tmp_path)
    checkpoints.save_checkpoint(*trainee, 7)
    checkpoints.wait()
    loaded = checkpoints.load_checkpoint(*trainee)
    assert (loaded.step, loaded.epoch, dict(loaded.extra)) == (7, 0, {})
    checkpoints.close()


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("load_checkpoint", {"which": "newest"}, "which is 'newest'; it is 'latest' or 'best'"),
        ("save_checkpoint", {"step": 1, "extra": {"epoch": 3}}, "extra has a key 'epoch'"),
    ],
    ids=["which", "epoch twice"],
)
def test_what_makes_no_sense_is_refused(method, arguments, named, tmp_path, trainee):
    checkpoints = DistributedCheckpointManager(tmp_path)
    with pytest.raises(UsageError, match=named):
        getattr(checkpoints, method)(*trainee, **arguments)
    with pytest.raises(UsageError, match="keep_last is 0"):
        checkpoints.cleanup_old_checkpoints(0)
    checkpoints.close()


def test_the_number_of_checkpoints_may_stand_behind_the_directory(tmp_path, trainee):
    """As ``DistributedCheckpointManager('./checkpoints', 3)``."""
    checkpoints = DistributedCheckpointManager(tmp_path, 3)
    assert checkpoints.manager.settings.keep_last_n == 3
    checkpoints.close()


# keep_every


def entry(step: int, commit: int) -> Entry:
    return Entry(
        step=step, path=Path(f"/c/{commit}"), metrics={}, committed_at=datetime(2026, 1, 1, tzinfo=UTC), generation=0,
        commit=commit, attempt="", world_size=1, files={},
    )  # fmt: skip


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 90), st.integers(1, 4))
def test_the_first_checkpoint_since_every_multiple_stays_for_good(gaps, keep_every, keep_last_n):
    kept: list[Entry] = []
    steps: list[int] = []
    for commit, gap in enumerate(gaps, 1):
        steps.append((steps[-1] if steps else 0) + gap)
        kept.insert(0, entry(steps[-1], commit))
        gone = decide(kept, keep_last_n=keep_last_n, keep_every=keep_every).remove
        kept = [one for one in kept if one not in gone]
    present = {one.step for one in kept}
    firsts = {min(step for step in steps if step // keep_every == number) for number in
              {step // keep_every for step in steps} - {0}}  # fmt: skip
    assert present == firsts | set(steps[-max(2, keep_last_n) :])


def test_a_script_that_counts_epochs_saves_and_resumes_by_them(tmp_path, trainee):
    model, optimizer = trainee
    checkpoints = DistributedCheckpointManager(checkpoint_dir=tmp_path)
    state = checkpoints.load_checkpoint(model, optimizer)
    assert not state and state.get("epoch", -1) == -1
    with pytest.raises(KeyError):
        state["epoch"]
    for epoch in range(state["epoch"] + 1 if state else 0, 3):
        with torch.no_grad():
            model.weight.fill_(epoch)
        checkpoints.save_checkpoint(model, optimizer, epoch, {"loss": 1 / (epoch + 1)})
        checkpoints.wait()  # of saves that overlap, the newest is enough
    checkpoints.save_checkpoint(model, optimizer, epoch=3, metrics={"loss": 0.1})
    checkpoints.wait()
    state = checkpoints.load_checkpoint(model, optimizer)
    assert state and (state["epoch"], state["step"], dict(state["metrics"])) == (3, 3, {"loss": 0.1})
    paths = {entry.step: entry.path for entry in Catalog(tmp_path).committed()}
    assert {*state} == {"epoch", "step", "metrics", "path"} and state["path"] == paths[3]
    state = checkpoints.load_checkpoint(model, optimizer, checkpoint_path=str(paths[1]))
    assert (state["epoch"], dict(state["metrics"])) == (1, {"loss": 0.5})
    assert model.weight.eq(1).all()
    checkpoints.close()


def test_an_epoch_of_its_own_beside_the_step(tmp_path, trainee):
    checkpoints = DistributedCheckpointManager(tmp_path)
    checkpoints.save_checkpoint(*trainee, step=400, epoch=2, extra={"note": "a"})
    checkpoints.wait()
    state = checkpoints.load_checkpoint(*trainee, None)
    assert (state["step"], state["epoch"], state["note"]) == (400, 2, "a")
    checkpoints.close()


def test_a_checkpoint_of_another_folder_can_be_loaded_and_is_not_touched(tmp_path, trainee):
    theirs = DistributedCheckpointManager(tmp_path / "theirs")
    path = theirs.save_checkpoint(*trainee, 9)
    theirs.wait()
    theirs.close()
    ours = DistributedCheckpointManager(tmp_path / "ours")
    assert ours.load_checkpoint(*trainee, path)["step"] == 9
    ours.save_checkpoint(*trainee, 1)
    ours.wait()
    assert [entry.commit for entry in Catalog(tmp_path / "ours").committed()] == [1]
    ours.close()


@pytest.mark.parametrize(
    ("path", "error", "named"),
    [
        ("missing", CheckpointError, "there is no checkpoint missing"),
        ("file.pt", CheckpointError, "is a file, and checkpoints of slurmft are folders"),
        ("", UsageError, "checkpoint_path is ''"),
        (7, UsageError, "checkpoint_path is 7"),
    ],
)
def test_a_path_without_a_checkpoint_is_named(path, error, named, tmp_path, trainee, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.pt").write_bytes(b"not ours")
    checkpoints = DistributedCheckpointManager(tmp_path / "run")
    with pytest.raises(error, match=named):
        checkpoints.load_checkpoint(*trainee, checkpoint_path=path)
    checkpoints.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "neither a step nor an epoch"),
        ({"step": None, "epoch": None}, "neither a step nor an epoch"),
        ({"step": "12"}, "step is '12'; it is an integer"),
        ({"epoch": 1.5}, "epoch is 1.5; it is an integer"),
        ({"step": True}, "step is True; it is an integer"),
        ({"step": 1, "metrics": 0.3}, "metrics is 0.3; it is a dict of numbers"),
    ],
)
def test_a_save_needs_a_number(arguments, named, tmp_path, trainee):
    checkpoints = DistributedCheckpointManager(tmp_path)
    with pytest.raises(UsageError, match=named):
        checkpoints.save_checkpoint(*trainee, **arguments)
    assert Catalog(tmp_path).committed() == []
    checkpoints.close()
