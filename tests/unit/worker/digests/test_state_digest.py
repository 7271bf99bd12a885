"""Digests of tensors: equal exactly when the bits are, for all kinds of tensors, in memory that does not grow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slurmft.worker.digests import DeviceDigester, Digester, HostDigester, digester_of, group_of, tensors_of

CPU = torch.device("cpu")
WORDS = 1 << 12
HOST, DEVICE = HostDigester(), DeviceDigester(CPU, WORDS)
both = pytest.mark.parametrize("digester", [HOST, DEVICE], ids=["host", "device"])


def digest(digester: Digester, *tensors: torch.Tensor) -> int:
    return int(digester.digest(tensors))


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    copy = tensor.clone().contiguous()
    data = copy.view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << (bit % 8)
    return copy


@both
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
def test_every_bit_counts(digester: Digester, tensor: torch.Tensor) -> None:
    plain = tensor.clone(memory_format=torch.contiguous_format)
    bits = [*range(0, 8 * plain.nbytes, 13), 8 * plain.nbytes - 1]
    if tensor.dtype is torch.bool:
        bits = [0, 8, 16]
    original = digest(digester, plain)
    assert original == digest(digester, plain.clone())
    assert all(digest(digester, flipped(plain, bit)) != original for bit in bits)


@both
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.data())
def test_swapped_elements_and_flips_of_the_same_bit_are_seen(
    digester: Digester, number: int, data: st.DataObject
) -> None:
    tensor = torch.arange(1, number + 1, dtype=torch.float32)
    first, second = data.draw(st.lists(st.integers(0, number - 1), min_size=2, max_size=2, unique=True))
    original = digest(digester, tensor)
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    assert digest(digester, swapped) != original
    bit = data.draw(st.integers(0, 31))
    assert digest(digester, flipped(flipped(tensor, 32 * first + bit), 32 * second + bit)) != original


@pytest.mark.parametrize("small", [HOST, DeviceDigester(CPU, 8)], ids=["host", "device, chunks end everywhere"])
def test_the_same_change_in_two_tensors_is_seen(small: Digester) -> None:
    tensors = [torch.randn(13), torch.randn(3), torch.randn(40)]
    original = int(small.digest(tensors))
    assert int(small.digest([tensors[1], tensors[0], tensors[2]])) != original
    assert int(small.digest([flipped(each, 31) for each in tensors])) != original
    assert int(small.digest([each.clone() for each in tensors])) == original


def test_memory_does_not_grow_with_the_state() -> None:
    large = torch.ones(16 * WORDS)
    largest = 0
    real = torch.mul

    def watched(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, out.numel())
        return real(*args, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mul", watched)
        DEVICE.digest([large])
    assert 0 < largest <= WORDS


def test_tensors_in_memory_are_hashed_where_they_lie() -> None:
    assert isinstance(digester_of(CPU), HostDigester)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", None)
        patch.setattr(torch.Tensor, "contiguous", None)
        HOST.digest([torch.ones(1 << 12), torch.ones(4, 4)[1:]])


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
