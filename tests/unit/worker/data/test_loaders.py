"""Loaders that a checkpoint takes: torchdata's, slurmft's own, and any object with the two methods."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint.state import as_json, original
from slurmft.worker.data import ElasticLoader, ElasticSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own

BEFORE, AFTER = 3, 4


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[torch.Tensor]):
    """A stream whose state holds what people have in theirs, and weights_only refuses."""

    def __init__(self) -> None:
        self.at, self.newest = 0, deque([0], maxlen=2)
        self.chance = np.random.default_rng(5)
        self.seen = {Path("/shards/a b")}

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        while self.at < 40:
            self.at += 1
            self.newest.append(self.at)
            yield torch.tensor([self.at * workers + worker, self.newest[0], int(self.chance.integers(1000))])

    def state_dict(self) -> dict[str, Any]:
        # a copy: torchdata sends what differs from the state before, and finds nothing where both are one object
        return {"at": np.int64(self.at), "newest": self.newest.copy(), "chance": self.chance.bit_generator.state,
                "seen": self.seen}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["at"]) is np.int64
        assert state["seen"] == {Path("/shards/a b")}
        assert state["newest"].maxlen == 2
        self.at, self.newest, self.chance.bit_generator.state = int(state["at"]), state["newest"], state["chance"]


def loader_of(kind: str, workers: int) -> StatefulDataLoader[Any]:
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    if kind == "stream":
        return StatefulDataLoader(Stream(), batch_size=2, **options)
    if kind == "elastic":
        sampler = ElasticSampler(40, 4, rank=1, world_size=2, seed=3)
        return StatefulDataLoader(Numbers(), batch_sampler=sampler, **options)
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters())


@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "two workers"])
@pytest.mark.parametrize("kind", ["map", "stream", "elastic"])
def test_a_stateful_data_loader_goes_on_in_the_middle_of_an_epoch(kind, workers, tmp_path):
    torch.manual_seed(1)
    loader = loader_of(kind, workers)
    batches = iter(loader)
    for _ in range(BEFORE):
        next(batches)
    CheckpointManager(tmp_path).save(*trainee(), step=BEFORE, loader=loader)
    expected = [next(batches).tolist() for _ in range(AFTER)]

    torch.manual_seed(2)
    again = loader_of(kind, workers)
    loaded = CheckpointManager(tmp_path).load_latest(*trainee(), loader=again)
    resumed = iter(again)
    assert [next(resumed).tolist() for _ in range(AFTER)] == expected
    assert loaded.step == BEFORE


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_its_state_survives_as_text_too(kind):
    """In which form it is noted at every step, so that a dead rank's place in the data is known."""
    torch.manual_seed(1)
    loader = loader_of(kind, 0)
    batches = iter(loader)
    for _ in range(BEFORE):
        next(batches)
    text = json.dumps(as_json(loader.state_dict()))
    expected = [next(batches).tolist() for _ in range(AFTER)]
    torch.manual_seed(2)
    again = loader_of(kind, 0)
    again.load_state_dict(original(json.loads(text)))
    resumed = iter(again)
    assert [next(resumed).tolist() for _ in range(AFTER)] == expected


class Position:
    """The least that a loader is."""

    def __init__(self) -> None:
        self.at: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("at", [7, (1, "a"), np.float32(0.1), {"__slurmft__": "mine"}],
                         ids=["number", "tuple", "numpy", "our tag"])  # fmt: skip
def test_any_object_with_the_two_methods_is_a_loader(at, tmp_path):
    position = Position()
    position.at = at
    CheckpointManager(tmp_path).save(*trainee(), step=1, loader=position)
    other = Position()
    CheckpointManager(tmp_path).load_latest(*trainee(), loader=other)
    assert other.at == at
    assert type(other.at) is type(at)


def test_a_state_that_no_load_would_take_is_refused_at_the_save(tmp_path):
    position = Position()
    position.at = object()
    with pytest.raises(Exception, match="refuse") as caught:
        CheckpointManager(tmp_path).save(*trainee(), step=1, loader=position)
    assert "CheckpointError" in type(caught.value).__name__


def test_the_resumable_sampler_has_a_public_home():
    sampler = ElasticSampler(20, 4, rank=0, world_size=1)
    loader = ElasticLoader(StatefulDataLoader(Numbers(), batch_sampler=sampler), sampler)
    taken = [next(loader).tolist() for _ in range(2)]
    again = ElasticSampler(20, 4, rank=0, world_size=1)
    other = ElasticLoader(StatefulDataLoader(Numbers(), batch_sampler=again), again)
    other.load_state_dict(loader.state_dict())
    assert next(other).tolist() == next(loader).tolist()
    assert next(other).tolist() not in taken
