"""Digests of tensors: equal exactly when the bits are, for all kinds of tensors, in memory that does not grow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slurmft.worker.digests import state
from slurmft.worker.digests.state import Digester, group_of, tensors_of

CPU = torch.device("cpu")
DIGESTER = Digester(CPU)


def digest(*tensors: torch.Tensor) -> int:
    return int(DIGESTER.digest(tensors))


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    copy = tensor.clone().contiguous()
    data = copy.view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << (bit % 8)
    return copy


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5), torch.randn(3, dtype=torch.float64), torch.randn(5).bfloat16(), torch.randn(9).half()[1:],
        torch.tensor(1.5), torch.tensor([True, False, True]), torch.arange(11, dtype=torch.uint8)[3:],
        torch.randn(4, dtype=torch.complex64), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 4).t(), torch.randn(8, 8)[:, ::2],
    ],
    ids=["2d", "f64", "bf16", "f16-odd-offset", "scalar", "bool", "u8-odd", "complex", "channels-last", "t", "strided"],
)  # fmt: skip
def test_every_bit_counts(tensor: torch.Tensor) -> None:
    plain = tensor.clone(memory_format=torch.contiguous_format)
    bits = [*range(0, 8 * plain.nbytes, 13), 8 * plain.nbytes - 1]
    if tensor.dtype is torch.bool:
        bits = [0, 8, 16]
    original = digest(plain)
    assert original == digest(plain.clone())
    assert all(digest(flipped(plain, bit)) != original for bit in bits)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.data())
def test_swapped_elements_and_flips_of_the_same_bit_are_seen(number: int, data: st.DataObject) -> None:
    tensor = torch.arange(1, number + 1, dtype=torch.float32)
    first, second = data.draw(st.lists(st.integers(0, number - 1), min_size=2, max_size=2, unique=True))
    original = digest(tensor)
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    assert digest(swapped) != original
    bit = data.draw(st.integers(0, 31))
    assert digest(flipped(flipped(tensor, 32 * first + bit), 32 * second + bit)) != original


def test_the_same_change_in_two_tensors_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "WORDS_OF_HOST", 8)  # so that chunks end in and between tensors
    small, tensors = Digester(CPU), [torch.randn(13), torch.randn(3), torch.randn(40)]
    original = int(small.digest(tensors))
    assert int(small.digest([tensors[1], tensors[0], tensors[2]])) != original
    assert int(small.digest([flipped(each, 31) for each in tensors])) != original
    assert int(small.digest([each.clone() for each in tensors])) == original


def test_memory_does_not_grow_with_the_state() -> None:
    digester = Digester(CPU)
    large = torch.ones(16 * state.WORDS_OF_HOST)
    largest = 0
    real = torch.mul

    def watched(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, out.numel())
        return real(*args, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mul", watched)
        digester.digest([large])
    assert 0 < largest <= state.WORDS_OF_HOST


def test_parameters_buffers_and_moments_are_named_and_ranks_with_other_parts_are_another_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = group_of(tensors_of(model, optimizer))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    found = {one.name: one for one in tensors_of(model, optimizer)}
    assert {"0.weight", "0.weight#exp_avg", "0.weight#exp_avg_sq", "0.weight#step", "1.running_mean"} <= {*found}
    assert found["1.running_mean"].is_buffer
    assert group_of(list(found.values())) != before
