"""Each sample of an epoch once, in one order, over any sequence of stops and world sizes."""

import itertools

import pytest
import torch
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import slurmft
from slurmft.checkpoint import CheckpointManager
from slurmft.errors import DataError, UsageError
from slurmft.worker.data import ElasticLoader, ElasticSampler


def sampler(samples: int = 20, global_batch: int = 8, **options) -> ElasticSampler:
    return ElasticSampler(samples, global_batch, **{"rank": 0, "world_size": 1, "seed": 3, **options})


def one_step(ranks: list[ElasticSampler]) -> list[int]:
    """The next global batch, as its ranks take it together."""
    parts = [next(iter(rank)) for rank in ranks]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert tuple(map(len, parts)) == ranks[0].split().samples
    for rank in ranks:
        rank.advance()
    return [number for part in parts for number in part]


def consumed(samples: int, global_batch: int, tail: str, sizes_and_steps: list[tuple[int, int]]) -> list[list[int]]:
    """The global batches of a run that changes its world size, through its state alone."""
    state, taken = None, []
    for world_size, steps in sizes_and_steps:
        ranks = [
            sampler(samples, global_batch, rank=rank, world_size=world_size, tail=tail) for rank in range(world_size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        taken += [one_step(ranks) for _ in range(steps)]
        (state,) = {str(rank.state_dict()): rank.state_dict() for rank in ranks}.values()
    return taken


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(1, 60),
    st.integers(6, 20),
    st.sampled_from(["span", "short", "drop"]),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=6),
)
def test_any_sequence_of_world_sizes_and_stops_takes_what_one_rank_takes(samples, global_batch, tail, sizes_and_steps):
    if tail == "drop" and samples < global_batch:
        with pytest.raises(UsageError, match="leaves none"):
            sampler(samples, global_batch, tail=tail)
        return
    taken = consumed(samples, global_batch, tail, sizes_and_steps)
    steps = sum(steps for _, steps in sizes_and_steps)
    assert taken == consumed(samples, global_batch, tail, [(1, steps)])
    stream = list(itertools.chain(*taken))
    per_epoch = samples - samples % global_batch if tail == "drop" else samples
    for epoch in batched(stream, per_epoch):
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(samples))
        if len(epoch) == samples:
            assert set(epoch) == set(range(samples))
    assert all(len(batch) == global_batch for batch in taken if tail != "short")


def batched(stream: list[int], size: int) -> list[list[int]]:
    return [stream[first : first + size] for first in range(0, len(stream), size)]


def test_epochs_have_orders_of_their_own_and_the_seed_decides():
    stream = list(itertools.chain(*consumed(16, 8, "span", [(1, 4)])))
    first, second = stream[:16], stream[16:]
    assert first != second and sorted(first) == sorted(second)
    again = sampler(16, 8)
    assert [number for batch in again for number in batch] == first
    assert [number for batch in sampler(16, 8, seed=4) for number in batch] != first
    assert [number for batch in sampler(16, 8, shuffle=False) for number in batch] == list(range(16))


@pytest.mark.parametrize(("tail", "sizes"), [("span", [8, 8, 8]), ("short", [8, 8, 4]), ("drop", [8, 8])], ids=str)
def test_the_end_of_an_epoch(tail, sizes):
    plain = sampler(20, 8, tail=tail)
    assert [len(batch) for batch in plain] == sizes and len(plain) == len(sizes)
    for _ in sizes:
        plain.advance()
    assert (plain.epoch, plain.consumed) == (1, 4 if tail == "span" else 0)


def test_a_short_batch_smaller_than_the_world_leaves_ranks_without_samples():
    ranks = [sampler(10, 8, rank=rank, world_size=4, tail="short") for rank in range(4)]
    assert [[len(part) for part in rank] for rank in ranks] == [[2, 1], [2, 1], [2, 0], [2, 0]]


def test_iterating_does_not_move_the_position_and_advancing_does():
    plain = sampler()
    first = next(iter(plain))
    assert next(iter(plain)) == first and plain.position == 0
    plain.advance()
    assert next(iter(plain)) != first and plain.position == 8


def test_another_global_batch_goes_on_at_the_same_sample():
    before, after = sampler(20, 8, shuffle=False), sampler(20, 5, shuffle=False)
    before.advance()
    after.load_state_dict(before.state_dict())
    assert next(iter(after)) == [8, 9, 10, 11, 12]
    dropping = sampler(20, 16, shuffle=False, tail="drop")
    dropping.load_state_dict(before.state_dict())
    assert (dropping.epoch, dropping.consumed) == (1, 0), "12 samples fill no batch of 16"


def test_a_batch_may_be_larger_than_the_data():
    plain = sampler(3, 8, shuffle=False)
    assert list(plain) == [[0, 1, 2, 0, 1, 2, 0, 1]]
    plain.advance()
    assert (plain.epoch, plain.consumed, list(plain)) == (2, 2, [[2, 0, 1, 2, 0, 1, 2, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 21}, "samples 21"),
        ({"seed": 4}, "seed 4"),
        ({"shuffle": False}, "shuffle False"),
        ({"format": 2}, "format 2"),
        ({"format": None}, "format None"),
        ({"consumed": 20}, "not a position"),
        ({"consumed": -1}, "not a position"),
        ({"epoch": "1"}, "not a position"),
        ({"epoch": float("nan")}, "not a position"),
        ({"consumed": None}, "not a position"),
    ],
    ids=str,
)
def test_a_state_that_means_nothing_here_is_refused_and_changes_nothing(change, message):
    plain = sampler()
    plain.advance()
    with pytest.raises(DataError, match=message):
        plain.load_state_dict({**plain.state_dict(), **change})
    assert plain.position == 8


@pytest.mark.parametrize(
    "arguments",
    [
        {"samples": 0},
        {"samples": 2.5},
        {"global_batch": 0},
        {"rank": 1},
        {"rank": -1},
        {"world_size": 9},
        {"world_size": 0},
        {"tail": "pad"},
    ],
    ids=str,
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(UsageError):
        sampler(**arguments)


def test_rank_and_world_size_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next(iter(slurmft.ElasticSampler(20, 8, shuffle=False))) == [4, 5, 6, 7]


class Recorded:
    """A data set that knows which of its samples were fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> int:
        self.fetched.append(number)
        return number


def loader(workers: int = 0, **options) -> tuple[ElasticLoader, Recorded]:
    data, plain = Recorded(), sampler(**options)
    torchs = DataLoader(data, batch_sampler=plain, num_workers=workers, generator=torch.Generator())
    return ElasticLoader(torchs, plain), data


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_fetched_ahead_is_not_taken(workers):
    first, _ = loader(workers)
    taken = [next(first).tolist() for _ in range(4)]  # beyond the end of the epoch
    state = first.state_dict()
    rest = [next(first).tolist() for _ in range(3)]
    second, _ = loader(workers)
    second.load_state_dict(state)
    assert [next(second).tolist() for _ in range(3)] == rest
    assert sorted([*itertools.chain(*taken, *rest)][:40]) == sorted([*range(20)] * 2)


def test_a_loader_without_batches_says_so():
    with pytest.raises(UsageError, match="batch_sampler"):
        next(ElasticLoader([], sampler()))


def test_checkpoints_carry_it_to_another_world_size(tmp_path):
    """Saved by one rank; the second of two ranks has no file of its own and borrows the position."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saving, _ = loader(shuffle=False)
    next(saving)
    CheckpointManager(tmp_path).save(model, optimizer, step=1, loader=saving)
    loading, _ = loader(shuffle=False, rank=1, world_size=2)
    assert CheckpointManager(tmp_path).load_latest(model, optimizer, loader=loading).step == 1
    assert next(loading).tolist() == [12, 13, 14, 15]
