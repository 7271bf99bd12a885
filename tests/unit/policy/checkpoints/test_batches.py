"""Global batches spread over ranks and micro-batches: nothing lost, nothing counted twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmft.errors import UsageError
from slurmft.policy.worker_settings import split_batch


@pytest.mark.parametrize(
    ("global_batch", "world_size", "max_micro_batch", "samples", "micro_batches"),
    [
        (8, 2, 4, (4, 4), ((4,), (4,))),
        (8, 2, 2, (4, 4), ((2, 2), (2, 2))),
        (8, 3, 4, (3, 3, 2), ((3,), (3,), (2,))),
        (10, 3, 2, (4, 3, 3), ((2, 2), (2, 1), (2, 1))),
        (10, 4, 2, (3, 3, 2, 2), ((2, 1), (2, 1), (2,), (2,))),
        (3, 3, 100, (1, 1, 1), ((1,), (1,), (1,))),
    ],
)
def test_examples(global_batch, world_size, max_micro_batch, samples, micro_batches):
    split = split_batch(global_batch, world_size, max_micro_batch)
    assert split.samples == samples
    assert tuple(split.micro_batches(rank) for rank in range(world_size)) == micro_batches
    assert split.accumulation == max(map(len, micro_batches))


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 5000))
def test_every_sample_has_one_place_and_all_weights_add_up(global_batch, world_size, max_micro_batch):
    if world_size > global_batch:
        with pytest.raises(UsageError, match="idle"):
            split_batch(global_batch, world_size, max_micro_batch)
        return
    split = split_batch(global_batch, world_size, max_micro_batch)
    spans = [split.span(rank) for rank in range(world_size)]
    assert [place for first, end in spans for place in range(first, end)] == list(range(global_batch))
    assert max(split.samples) - min(split.samples) <= 1
    parts = [split.micro_batches(rank) for rank in range(world_size)]
    assert tuple(map(sum, parts)) == split.samples == tuple(sorted(split.samples, reverse=True))
    assert all(0 < size <= max_micro_batch for each in parts for size in each)
    assert split.accumulation == max(map(len, parts)) <= min(map(len, parts)) + 1
    assert sum(split.loss_scale(size) for each in parts for size in each) == pytest.approx(world_size)


def test_ten_thousand_ranks_cost_nothing():
    split = split_batch(4_000_003, 10_000, 7)
    assert split.accumulation == 58 and split.span(9_999)[1] == 4_000_003


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_the_gradient_is_that_of_the_whole_batch_on_any_world_size(world_size):
    torch.manual_seed(0)
    inputs, weight = torch.rand(23, 4, dtype=torch.double), torch.rand(4, dtype=torch.double, requires_grad=True)
    (whole,) = torch.autograd.grad((inputs @ weight).square().mean(), weight)
    split = split_batch(23, world_size, 3)
    total = torch.zeros_like(weight)
    for rank in range(world_size):
        first, end = split.span(rank)
        for part in inputs[first:end].split(list(split.micro_batches(rank))):
            loss = (part @ weight).square().mean() * split.loss_scale(len(part))
            total += torch.autograd.grad(loss, weight)[0]
    assert torch.allclose(total / world_size, whole, rtol=1e-12)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (8, 0, 1), (8, 2, 0), (-8, 2, 1), (8.0, 2, 1), (8, True, 1)])
def test_nonsense_is_refused(numbers):
    with pytest.raises(UsageError, match="positive"):
        split_batch(*numbers)
