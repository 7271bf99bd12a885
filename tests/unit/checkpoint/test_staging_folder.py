"""Snapshots that do not fit into memory lie beside the checkpoints: found by the next start, and removed after it."""

import errno
from pathlib import Path

import pytest
import torch
from listener import Listener
from made_snapshots import stage

from slurmft.checkpoint import Catalog, CheckpointManager, snapshots
from slurmft.checkpoint.memory_sources import MAX_SHARDS, scan
from slurmft.checkpoint.write_requests import VARIABLE
from slurmft.errors import CheckpointError
from slurmft.policy.checkpoints import Tier
from slurmft.trainer.savers import SAVERS


@pytest.fixture
def little_memory(monkeypatch) -> None:
    monkeypatch.setattr(snapshots, "fits", lambda _bytes, folder: "" if folder.name == ".staging" else "it is small")


def trained(steps: int):
    torch.manual_seed(1)
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()
    return model, optimizer


def fail_to_commit(monkeypatch, folder: Path, step: int, generation: int = 0) -> torch.nn.Module:
    """A save of which only what was staged is left."""
    monkeypatch.setenv("SLURMFT_GENERATION", str(generation))
    monkeypatch.setenv(VARIABLE, f"before marker={errno.EROFS}")
    checkpoints, objects = CheckpointManager(folder), trained(step)
    checkpoints.save(*objects, step=step, async_save=True)
    with pytest.raises(CheckpointError):
        checkpoints.wait()
    checkpoints.close()
    monkeypatch.delenv(VARIABLE)
    return objects[0]


@pytest.mark.parametrize("then", ["memory is large enough", "memory is still too small"])
@pytest.mark.parametrize("has_agent", [True, False])
def test_what_was_staged_there_is_found_again_and_goes_when_it_is_durable(
    tmp_path, monkeypatch, request, little_memory, then, has_agent
):
    if has_agent:
        request.getfixturevalue("memory")
    folder = tmp_path / "checkpoints"
    saved = fail_to_commit(monkeypatch, folder, 2)
    staging = folder / ".staging"
    assert [path.name for path in staging.glob("*.json")] == ["shard-0.a.json"]
    if then == "memory is large enough":
        monkeypatch.setattr(snapshots, "fits", lambda *_: "")
    checkpoints, (model, optimizer) = CheckpointManager(folder), trained(0)
    loaded = checkpoints.load_latest(model, optimizer)
    assert (loaded.step, loaded.is_durable, loaded.source) == (2, False, "the staging folder: step 2, all 1 shards")
    assert torch.equal(model.weight, saved.weight)
    checkpoints.wait()
    assert [entry.step for entry in Catalog(folder).committed()] == [2]
    assert staging.exists() == (then == "memory is still too small")
    checkpoints.save(model, optimizer, step=3, async_save=False)
    checkpoints.close()
    assert not staging.exists()


def test_what_is_not_durable_yet_stays_there(tmp_path, monkeypatch, little_memory):
    folder = tmp_path / "checkpoints"
    fail_to_commit(monkeypatch, folder, 2)
    assert list((folder / ".staging").glob("*.image"))
    checkpoints, objects = CheckpointManager(folder), trained(0)
    monkeypatch.setenv(VARIABLE, f"before marker={errno.EROFS}")
    checkpoints.load_latest(*objects)  # saves again, which fails again
    checkpoints.close()
    assert list((folder / ".staging").glob("*.image"))


def test_a_state_that_kills_is_begun_with_only_so_often_also_on_new_nodes(tmp_path, monkeypatch, little_memory):
    folder, begun = tmp_path / "checkpoints", []
    CheckpointManager(folder).save(*trained(1), step=1, async_save=False)
    fail_to_commit(monkeypatch, folder, 2)
    for generation in range(1, 5):
        monkeypatch.setenv("SLURMFT_GENERATION", str(generation))
        monkeypatch.setenv(VARIABLE, f"before marker={errno.EROFS}")
        checkpoints = CheckpointManager(folder)
        begun.append(checkpoints.load_latest(*trained(0)).step)
        checkpoints.close()
        monkeypatch.delenv(VARIABLE)
    assert begun == [2, 2, 1, 1]


def test_a_step_that_is_kept_just_in_time_there_is_found_too(tmp_path, monkeypatch, memory, little_memory):
    monkeypatch.setattr(SAVERS, "listener", Listener())
    folder, (model, optimizer) = tmp_path / "checkpoints", trained(0)
    checkpoints = CheckpointManager(folder)
    checkpoints.save(model, optimizer, step=0, async_save=False)
    for step in (1, 2):
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()
        SAVERS.at_boundary(step)
    SAVERS.rescue()
    checkpoints.close()
    assert list((folder / ".staging").glob("shard-0.*.json"))
    assert not list(memory.glob("*.image")) and list(memory.glob("*.record"))
    other, fresh = trained(0)
    loaded = CheckpointManager(folder).load_latest(other, fresh)
    assert loaded.step == 2 and torch.equal(other.weight, model.weight)
    SAVERS.is_armed = False


def test_a_node_offers_its_own_first_and_of_large_worlds_nothing_else(tmp_path):
    for rank in range(4):
        stage(tmp_path, identity=(5, 0, 5), shard=rank, shards=4, name=f"shard-{rank}.a")
        stage(tmp_path, identity=(6, 0, 6), shard=rank, shards=MAX_SHARDS + 1, name=f"shard-{rank}.b")
    found = scan(None, None, tmp_path, range(2, 4), patience_s=0)
    assert {one.tier for one in found} == {Tier.STAGING}
    assert [one.index.shard for one in found if one.name[0] == 5] == [0, 1, 2, 3]
    assert [one.index.shard for one in found if one.name[0] == 6] == [2, 3]


def test_a_process_of_the_same_attempt_that_only_loads_does_not_save_it_again(tmp_path, monkeypatch, little_memory):
    """An evaluation that the trainer has started: its own save would prune the one that is under way."""
    folder = tmp_path / "checkpoints"
    fail_to_commit(monkeypatch, folder, 2, generation=3)
    before = {path: path.stat().st_mtime_ns for path in (folder / ".staging").glob("shard-*")}
    checkpoints = CheckpointManager(folder)
    loaded = checkpoints.load_latest(*trained(0))
    checkpoints.wait()
    assert (loaded.step, loaded.is_durable) == (2, False) and Catalog(folder).committed() == []
    assert {path: path.stat().st_mtime_ns for path in (folder / ".staging").glob("shard-*")} == before
