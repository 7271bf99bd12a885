"""A StatefulDataLoader goes on where it was: in the order of its epoch, with all draws, whatever asks it and when.

Runs end in an epoch after the first: the order of epoch 0 is that of a sampler that was told nothing.
"""

import contextlib
import importlib
import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from slurmft import CheckpointManager, start_session
from slurmft.checkpoint.just_in_time import JustInTime
from slurmft.checkpoint.state import Trainee
from slurmft.errors import UsageError
from slurmft.integrations.lightning import EpochData
from slurmft.ipc.pages import StopAction
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS
from slurmft.worker.data import ElasticLoader, ElasticSampler
from slurmft.worker.session import PlannedStop

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own

PER_EPOCH, END = 5, 14


class Augmented(Dataset[torch.Tensor]):
    """Draws from all three generators, in whichever process it is read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(torch.rand(1)), random.random(), np.random.rand()], dtype=torch.float64)


class Keeping(Augmented):
    """With a state of its own, which knows its keys."""

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.read)], dtype=torch.float64)])

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state.keys() == {"read"}
        self.read = state["read"]


class Script:
    """A training script: what it makes, its idiom, and the batches that it has seen."""

    def __init__(self, folder: Any, *, workers: int, own: bool, data: type = Augmented, shuffle: bool = False) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        generator = torch.Generator().manual_seed(5) if own else None
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        rows = data()
        self.sampler = None if shuffle else DistributedSampler(rows, num_replicas=2, rank=1, seed=3)
        how: dict[str, Any] = {"sampler": self.sampler} if self.sampler else {"shuffle": True}
        batch_size = 8 if shuffle else 4
        self.loader = StatefulDataLoader(rows, batch_size=batch_size, generator=generator, **how, **options)
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = CheckpointManager(folder)
        self.seen: list[Any] = []

    def load(self) -> int:
        return self.manager.load_latest(self.model, self.optimizer, loader=self.loader).step

    def save(self, step: int) -> None:
        self.manager.save(self.model, self.optimizer, step=step, loader=self.loader, async_save=False)
        self.manager.close()

    def batches(self, step: int) -> Iterator[torch.Tensor]:
        """The recipe of the docs."""
        for epoch in itertools.count(max(0, step - 1) // PER_EPOCH):
            if self.sampler is not None:
                self.sampler.set_epoch(epoch)
            yield from self.loader

    def train(self, start: int, end: int) -> list[Any]:
        batches = self.batches(start)
        for step in range(start, end):
            self.seen.append((step, next(batches).tolist(), torch.rand(1).item()))
        return self.seen

    def train_on(self, start: int, end: int) -> list[Any]:
        """Another idiom: the iterator is made where an epoch begins by the step's number."""
        batches = None
        for step in range(start, end):
            if batches is None or step % PER_EPOCH == 0:
                self.sampler.set_epoch(step // PER_EPOCH)
                batches = iter(self.loader)
            self.seen.append((step, next(batches).tolist(), torch.rand(1).item()))
        return self.seen


KINDS = [
    pytest.param({"workers": 0, "own": False}, id="in the process"),
    pytest.param({"workers": 2, "own": False}, id="two workers"),
    pytest.param({"workers": 2, "own": True}, id="two workers, own generator"),
    pytest.param({"workers": 0, "own": False, "shuffle": True}, id="shuffle"),
    pytest.param({"workers": 1, "own": True, "shuffle": True}, id="shuffle by own generator, a worker"),
    pytest.param({"workers": 2, "own": False, "data": Keeping}, id="data with a state, two workers"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [2 * PER_EPOCH, 2 * PER_EPOCH + 3], ids=["last step of an epoch", "third epoch"])
def test_what_follows_a_resume_is_what_an_undisturbed_run_reads_and_draws(kind, stop, tmp_path):
    expected = Script(tmp_path / "undisturbed", **kind).train(0, END)
    before = Script(tmp_path / "run", **kind)
    before.train(0, stop)
    before.save(stop)
    after = Script(tmp_path / "run", **kind)
    start = after.load()
    after.save(start)  # as the save that follows a load from memory
    again = Script(tmp_path / "run", **kind)
    assert again.load() == stop
    assert again.train(stop, END) == expected[stop:]


@pytest.mark.parametrize("stop", [PER_EPOCH, 2 * PER_EPOCH, 2 * PER_EPOCH + 1])
def test_an_iterator_that_is_made_by_the_number_of_the_step_begins_the_next_epoch(stop, tmp_path):
    expected = Script(tmp_path / "undisturbed", workers=0, own=False).train_on(0, END)
    before = Script(tmp_path / "run", workers=0, own=False)
    before.train_on(0, stop)
    before.save(stop)
    after = Script(tmp_path / "run", workers=0, own=False)
    assert after.train_on(after.load(), END) == expected[stop:]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_is_made_before_the_epoch_is_set_has_the_order_of_its_epoch(workers, tmp_path):
    expected = Script(tmp_path / "undisturbed", workers=workers, own=False).train(0, END)
    stop = 2 * PER_EPOCH + 2
    before = Script(tmp_path / "run", workers=workers, own=False)
    before.train(0, stop)
    before.save(stop)
    after = Script(tmp_path / "run", workers=workers, own=False)
    after.load()
    batches = iter(after.loader)
    after.sampler.set_epoch(2)
    read = [next(batches)[:, 0].tolist() for _ in range(2)]
    assert read == [[row[0] for row in batch] for _, batch, _ in expected[stop : stop + 2]]


class Stateless(IterableDataset[float]):
    """Each worker reads shards of its own."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        for shard in range(info.id if info else 0, 9, info.num_workers if info else 1):
            yield from (10.0 * shard + row for row in range(7))


class Drawn(Sampler[Any]):
    """A sampler of one's own: a new order for each epoch."""

    def __init__(self, *, batches: bool = False) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(40)[:20]
        return iter(order.view(5, 4).tolist() if self.batches else order.tolist())


def torchs(kind: Any, *given: Any, seed: int | None = None, **options: Any) -> Any:
    def generator() -> torch.Generator | None:
        return None if seed is None else torch.Generator().manual_seed(seed)

    return lambda: {"sampler": kind(*given, generator=generator(), **options), "batch_size": 4}


@dataclass(frozen=True, eq=False)
class Frozen(Sampler[int]):
    samples: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class Fixed(BatchSampler):
    """Its sampler cannot be replaced."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last = 4, False

    @property
    def sampler(self) -> Any:
        return Frozen(20)


def kept_and_weighted() -> dict[str, Any]:
    sampler = WeightedRandomSampler(range(1, 41), 20)
    return {"sampler": sampler, "batch_size": 4, "num_workers": 1, "persistent_workers": True}


def kept_workers() -> dict[str, Any]:
    return {"sampler": DistributedSampler(range(40), num_replicas=2, rank=1, seed=3), "batch_size": 4,
            "num_workers": 1, "persistent_workers": True}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "options"),
    [
        pytest.param(Augmented, torchs(WeightedRandomSampler, range(1, 41), 20), id="weighted"),
        pytest.param(Augmented, torchs(WeightedRandomSampler, range(1, 41), 20, seed=2), id="weighted, own generator"),
        pytest.param(Augmented, torchs(SubsetRandomSampler, range(3, 23)), id="part of the data"),
        pytest.param(Augmented, torchs(RandomSampler, range(40), replacement=True, num_samples=20), id="replacement"),
        pytest.param(Augmented, lambda: {"sampler": Drawn(), "batch_size": 4}, id="a sampler of one's own"),
        pytest.param(Augmented, lambda: {"batch_sampler": Drawn(batches=True)}, id="batches of one's own"),
        pytest.param(Augmented, lambda: {"sampler": Drawn(), "batch_size": 4, "num_workers": 2}, id="its own, workers"),
        pytest.param(Augmented, lambda: {"sampler": Frozen(20), "batch_size": 4}, id="one that nothing is set on"),
        pytest.param(
            Augmented,
            lambda: {"batch_sampler": BatchSampler(RandomSampler(range(20)), 4, drop_last=False)},
            id="torch's batches",
        ),
        pytest.param(Augmented, lambda: {"batch_sampler": Fixed()}, id="batches whose sampler cannot be replaced"),
        pytest.param(Augmented, kept_and_weighted, id="weighted, workers that are kept"),
        pytest.param(Augmented, lambda: {"sampler": [*range(20)], "batch_size": 4}, id="a list"),
        pytest.param(Augmented, kept_workers, id="workers that are kept over epochs"),
        pytest.param(Stateless, lambda: {"batch_size": 4}, id="a stream without a state"),
        pytest.param(Stateless, lambda: {"batch_size": 4, "num_workers": 2}, id="a stream without a state, workers"),
    ],
)
def test_an_order_that_was_drawn_is_the_same_after_two_resumes(data, options):
    savers.mend()
    seen: dict[bool, list[Any]] = {}
    for is_undisturbed in (True, False):
        seen[is_undisturbed] = []
        torch.manual_seed(7)
        state, start = {}, 0
        for end in (13,) if is_undisturbed else (3, 7, 13):
            drawn = torch.get_rng_state()
            loader = StatefulDataLoader(data(), **options())
            loader.load_state_dict(state)
            torch.set_rng_state(drawn)
            batches = epochs_of(loader, max(0, start - 1) // PER_EPOCH)
            seen[is_undisturbed] += [
                (next(batches).flatten().tolist()[:1], torch.rand(1).item()) for _ in range(start, end)
            ]
            state, start = loader.state_dict(), end
    assert seen[False] == seen[True]


def test_two_loaders_that_are_read_together_draw_from_one_generator():
    def both() -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        samplers = [RandomSampler(range(40), generator=generator) for _ in range(2)]
        return [StatefulDataLoader(range(40), sampler=each, batch_size=4) for each in samplers]

    savers.mend()
    loaders = both()
    expected = [[batch.tolist() for batch in pair] for pair in zip(*loaders, strict=True)]
    loaders = both()
    read = zip(*loaders, strict=True)
    begun = [[batch.tolist() for batch in next(read)] for _ in range(3)]
    states, loaders = [each.state_dict() for each in loaders], both()
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    assert begun + [[batch.tolist() for batch in pair] for pair in zip(*loaders, strict=True)] == expected


def epochs_of(loader: Any, first: int) -> Iterator[Any]:
    for epoch in itertools.count(first):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


class Shy:
    """A loader that would make its iterator if it was asked before its first batch."""

    def __init__(self) -> None:
        self.at, self.has_begun = 0, False

    def __next__(self) -> int:
        self.has_begun = True
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        assert self.has_begun, "it was asked before its first batch"
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("ends", [[None], [3, None], [3, 3, 7, None]], ids=["fresh", "resumed", "stopped at once"])
def test_between_a_load_and_the_first_batch_no_loader_is_asked(ends, tmp_path, monkeypatch):
    """Neither by saves at the loop's begin, nor by what is noted for just in time."""
    seen: list[int] = []
    for end in ends:
        with start_session() as session:
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader, manager = Shy(), CheckpointManager(tmp_path / "c")
            start = manager.load_latest(model, optimizer, loader=loader).step
            manager._rescue = rescue = JustInTime(tmp_path, lambda *_: None)
            SAVERS.is_armed = True
            with SAVERS.before_step(start):
                rescue.arm(Trainee(model, optimizer, loader=loader), step=start)

            def save(step, of=(manager, model, optimizer, loader)):
                of[0].save(of[1], of[2], step=step, loader=of[3])

            try:
                for step in session.steps(start=start, until=10, save=save):
                    seen.append(next(loader))
                    if step + 1 == end:
                        session._signal.pending = True
                        monkeypatch.setattr(session._agreement, "at", lambda _tick: StopAction.SAVE_AND_STOP)
            except PlannedStop:
                pass
            assert not rescue.reason
            SAVERS.is_armed = False
            manager.close()
    assert seen == list(range(1, 11))


@pytest.mark.parametrize("name", ["loader", "scheduler", "scaler"])
def test_a_part_without_a_state_is_refused_at_the_load_already(name, tmp_path):
    model = torch.nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UsageError, match=f"{name}=.*state_dict") as caught:
        manager.load_latest(model, torch.optim.SGD(model.parameters()), **{name: [1, 2]})
    assert caught.value.hint


def fetches_from_its_loader(script: Script) -> None:
    next(iter(script.loader))


def draws(_script: Script) -> None:
    torch.randint(5, (1,))


def makes_its_iterator(script: Script) -> None:
    iter(script.loader)


@pytest.mark.parametrize(("ahead", "what"), [(fetches_from_its_loader, "a batch was taken"), (draws, "random numbers"),
                                             (makes_its_iterator, ""), (lambda _script: None, "")])  # fmt: skip
@pytest.mark.parametrize("is_resumed", [False, True], ids=["fresh", "resumed"])
def test_what_is_done_ahead_of_the_loop_is_said(ahead, what, is_resumed, tmp_path, caplog):
    script = Script(tmp_path, workers=0, own=False)
    if is_resumed:
        script.train(0, 7)
        script.save(7)
        script = Script(tmp_path, workers=0, own=False)
    with start_session() as session, caplog.at_level(logging.WARNING):
        start = script.load()
        ahead(script)
        for _ in session.steps(start=start, until=start + 1, save=lambda _step: None):
            pass
    told = [record.getMessage() for record in caplog.records if "between the load" in record.getMessage()]
    assert [what in one for one in told] == ([True] if what else [])


def test_a_batch_of_an_elastic_loader_that_is_taken_ahead_is_said(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    sampler = ElasticSampler(40, 4, rank=0, world_size=1)
    loader: Any = ElasticLoader([[0], [1]], sampler)
    with start_session() as session, caplog.at_level(logging.WARNING):
        CheckpointManager(tmp_path).load_latest(model, torch.optim.SGD(model.parameters()), loader=loader)
        next(loader)
        list(session.steps(start=0, until=1, save=lambda _step: None))
    assert "a batch was taken" in caplog.text


@pytest.mark.parametrize(("way", "is_said"), [("break", True), ("exit 0", True), ("send", False), ("end", False),
                                              ("exit 3", False), ("raise", False)])  # fmt: skip
def test_a_loop_that_is_left_without_a_word_is_said(way, is_said, caplog):
    def run() -> None:
        with start_session() as session:
            steps = session.steps(start=0, until=5, save=lambda _step: None)
            for step in steps:
                if step == 2 and way == "break":
                    break
                if step == 2 and way.startswith("exit"):
                    raise SystemExit(int(way[-1]))
                if step == 2 and way == "raise":
                    raise RuntimeError(way)
                if step == 2 and way == "send":
                    with pytest.raises(StopIteration):
                        steps.send(True)
                    break

    with caplog.at_level(logging.WARNING), contextlib.suppress(SystemExit, RuntimeError):
        run()
    assert ("was left in step 2" in caplog.text) == is_said


def test_a_seed_seeds_all_generators(tmp_path):
    drawn = []
    for _ in range(2):
        with start_session(seed=2**40 + 1):
            drawn.append((np.random.rand(), random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def in_lightning(script: Script, saved: dict[str, Any], epoch: int) -> tuple[Any, Any]:
    """Its fetcher at the begin of an epoch, as Lightning gets there: the iterator is made before the epoch is set."""
    fetchers = pytest.importorskip("lightning.pytorch.loops.fetchers")
    combined = importlib.import_module("lightning.pytorch.utilities.combined_loader").CombinedLoader([script.loader])
    fetcher = fetchers._PrefetchDataFetcher()
    fetcher.setup(combined)
    combined._load_state_dicts(saved.get("loaders", []))
    iter(fetcher)
    script.sampler.set_epoch(epoch)
    current = SimpleNamespace(current=SimpleNamespace(ready=saved.get("batches", 0)))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=current), _combined_loader=combined)
    data = EpochData(SimpleNamespace(fit_loop=loop, is_global_zero=False))
    data.resume(saved)
    data.begin_epoch(lambda _fetcher: None, fetcher)
    return data, fetcher


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_lightning_reads_on_in_the_order_of_the_epoch(workers, tmp_path):
    data, batches = in_lightning(first := Script(tmp_path, workers=workers, own=False), {}, 2)
    read = [next(batches)[0][0][:, 0].tolist() for _ in range(3)]
    assert len(first.loader) == PER_EPOCH
    saved = {**data.state(between_epochs=False), "batches": 3, "rng": savers.capture()}
    read += [next(batches)[0][0].tolist() for _ in range(2)]
    _, again = in_lightning(Script(tmp_path, workers=workers, own=False), saved, 2)
    assert [next(again)[0][0].tolist() for _ in range(2)] == read[3:]
