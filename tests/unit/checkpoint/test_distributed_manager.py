"""The manager under its other names; and which checkpoints are kept for good."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slurmft
from slurmft.checkpoint import Catalog, DistributedCheckpointManager, Entry
from slurmft.checkpoint.retention import decide
from slurmft.errors import UsageError


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
    with pytest.raises(UsageError, match="keep_last_n is 0"):
        checkpoints.cleanup_old_checkpoints(0)
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
