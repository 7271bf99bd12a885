"""A digest of tensors in 64 bits, computed where they lie, with memory that does not grow with them.

On the host it is XXH3 of all bytes: one pass, at the speed of memory. On a device bytes are read as 32-bit words; each
is multiplied by an odd 64-bit number of its position, and the products are summed modulo 2^64, and so are the sums of
chunks: a single changed word always changes that digest; several changes, such as two swapped words or the same bit of
two words, go unseen with a chance of about 2^-32. The two are never equal: the same state on a host and on a device
has different digests, so replicas must be of one kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

WORDS = 4 << 20
"""Words of one chunk: many enough for a GPU to be busy, few enough for its cache."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


@dataclass(frozen=True, slots=True)
class Named:
    """One tensor of the state: this rank's part of it."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    place: tuple[int, ...]
    """Which part, where it is sharded; empty where every rank has all of it."""


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Named]:
    """Parameters, buffers and the optimizer's tensors, in the same order on every rank."""
    found: list[Named] = []
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        found.append(_named(name, parameter, is_buffer=False))
    found += [_named(name, buffer, is_buffer=True) for name, buffer in model.named_buffers()]
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            name = names.get(parameter, f"parameter {number}")
            found += [
                _named(f"{name}#{key}", value, is_buffer=False)
                for key, value in sorted(state.items())
                if isinstance(value, torch.Tensor)
            ]
    return found


def group_of(tensors: Sequence[Named]) -> int:
    """A number that is equal for ranks which hold the same part of the same state, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(digest_size=8)
    for one in tensors:
        digest.update(f"{one.name} {tuple(one.tensor.shape)} {one.tensor.dtype} {one.place}\n".encode())
    return int.from_bytes(digest.digest(), "big") >> 1


class Digester(Protocol):
    """Computes digests of tensors of one device."""

    def digest(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """One number for all of them, in their order; shape (), int64, on the device, without waiting for it."""


def digester_of(device: torch.device) -> Digester:
    """The one for tensors that lie there."""
    return HostDigester() if device.type == "cpu" else DeviceDigester(device)


class HostDigester:
    """XXH3 of the bytes."""

    @torch.no_grad()
    def digest(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """As ``Digester``."""
        state = xxhash.xxh3_64()
        for tensor in tensors:
            if (data := _bytes(tensor)) is not None:
                state.update(data.numpy().data)
        return torch.tensor(signed(state.intdigest()))


class DeviceDigester:
    """Sums of weighted words, by operations that every device has."""

    def __init__(self, device: torch.device, words: int = WORDS) -> None:
        self._words = words
        self._weights = _weights(0, words, device)
        self._products = torch.empty(words, dtype=torch.int64, device=device)
        self._packed = torch.empty(words, dtype=torch.int32, device=device)

    @torch.no_grad()
    def digest(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """As ``Digester``."""
        sums = [self._sum(parts) for parts in self._chunks(tensors)]
        if not sums:
            return torch.zeros((), dtype=torch.int64, device=self._weights.device)
        return (torch.stack(sums) * _weights(self._words, len(sums), self._weights.device)).sum()

    def _sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        number = sum(part.numel() for part in parts)
        words = parts[0] if len(parts) == 1 else torch.cat(list(parts), out=self._packed[:number])
        return torch.mul(words, self._weights[:number], out=self._products[:number]).sum()

    def _chunks(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        pending, number = list[torch.Tensor](), 0
        for tensor in tensors:
            for words in _words(tensor):
                for part in torch.split(words, self._words):
                    if number + part.numel() > self._words:
                        yield pending
                        pending, number = [], 0
                    pending.append(part)
                    number += part.numel()
        if pending:
            yield pending


def _named(name: str, tensor: torch.Tensor, *, is_buffer: bool) -> Named:
    place: tuple[int, ...] = ()
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        place = tuple(
            number
            for number, placement in zip(coordinate, tensor.placements, strict=False)
            if not isinstance(placement, Replicate)
        )
        tensor = tensor.to_local()
    return Named(name, tensor, is_buffer, place)


def _bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """All bytes of a tensor: a view of most, a copy where they are not in one piece. None where there are none."""
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).contiguous()
    return tensor.view(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All bytes of a tensor as 32-bit words: a view of most, and up to three single bytes."""
    if (data := _bytes(tensor)) is None:
        return
    whole = data.numel() // 4 * 4
    if whole:
        aligned = data[:whole] if data.storage_offset() % 4 == 0 else data[:whole].clone()
        yield aligned.view(torch.int32)
    if whole < data.numel():
        yield data[whole:].to(torch.int32)


def signed(number: int) -> int:
    """Modulo 2^64, as a signed integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _weights(first: int, number: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of the positions from ``first`` on, the same on every device."""
    mixed = torch.arange(first + 1, first + number + 1, dtype=torch.int64, device=device) * _ODD
    for shift in (30, 27):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _MIX
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1
