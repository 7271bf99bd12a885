"""Digests of a worker's state: at regular steps, before every save, and as one line that two runs can compare."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from slurmft.ipc.pages import DigestRing, Page
from slurmft.policy.reruns import is_left_out, left_out
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.trainer import streams
from slurmft.trainer.savers import SAVERS, host_group
from slurmft.trainer.streams import settle

# --- One line that two runs can compare: do they hold the same weights, bit for bit? ---


def weights_digest(model: torch.nn.Module) -> str:
    """sha256 in hex over the state dict's tensors in name order: name, dtype, shape, bytes.

    Equal exactly when every weight and buffer is equal bit for bit. A wrapper that renames weights (DDP's ``module.``)
    changes it: pass the model itself.
    """
    settle(model.parameters())  # an optimizer may have its own stream, which the copies below would not wait for
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))  # torch offers no buffer without numpy
    return digest.hexdigest()


# --- A digest of tensors in 64 bits, computed where they lie, with memory that does not grow with them ---
# On the host it is XXH3 of all bytes: one pass, at the speed of memory. On a device bytes are read as 32-bit words;
# each is multiplied by an odd 64-bit number of its position, and the products are summed modulo 2^64, and so are the
# sums of chunks: a single changed word always changes that digest; several changes, such as two swapped words or the
# same bit of two words, go unseen with a chance of about 2^-32. The two are never equal: the same state on a host and
# on a device has different digests, so replicas must be of one kind.

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


class HostDigester:
    """XXH3 of the bytes."""

    @torch.no_grad()
    def digest(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """One number for all of them, in their order; shape (), int64."""
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
        """As ``HostDigester.digest``, on the device, without waiting for it."""
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


Digester = HostDigester | DeviceDigester
"""Computes digests of tensors of one device."""


def digester_of(device: torch.device) -> Digester:
    """The one for tensors that lie there."""
    return HostDigester() if device.type == "cpu" else DeviceDigester(device)


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


# --- Digests of a worker's state at regular steps and before every save, left in its page for the agent ---
# No step waits: the device computes a digest behind its other work, and the number is picked up at a later step. Only
# the first three digests of an attempt are compared among the ranks themselves, tensor by tensor: what differs by
# design (seeds, running statistics of each rank's own batches) is found there, named, and left out from then on.

LEARNED = 3
"""Digests of an attempt in which the ranks look for what differs by design."""

SHOWN = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A digest that the device is still computing."""

    step: int
    group: int
    host_part: int
    number: torch.Tensor
    ready: streams.Event


class ReplicaDigests:
    """The digests of one session. All ranks call each method at the same steps."""

    def __init__(self, interval_steps: int, page: Page, *, world_size: int, is_lead: bool) -> None:
        self._interval = interval_steps if world_size > 1 else 0
        self._ring, self._is_lead = DigestRing(page), is_lead
        self._digesters: dict[torch.device, Digester] = {}
        self._left_out: frozenset[str] = frozenset()
        self._pending: list[_Pending] = []
        self._start = self._done = -1
        self._rounds = 0
        self._groups: dict[int, int] = {}

    @classmethod
    def from_environment(cls, page: Page, *, world_size: int, is_lead: bool) -> Self:
        """As the run's configuration says.

        Raises:
            ConfigError: a variable of the agent cannot be read.
        """
        settings = WorkerSettings.from_environment(os.environ)
        return cls(settings.digest_interval_steps, page, world_size=world_size, is_lead=is_lead)

    def begin(self, start: int) -> None:
        """The loop of steps begins after ``start`` steps."""
        self._start, self._done, self._rounds, self._left_out = start, -1, 0, frozenset()

    def at_boundary(self, step: int) -> None:
        """``step`` steps are complete: compute a digest if one is due, and pick up those that are ready."""
        if not self._interval:
            return
        if self._pending:
            self._collect(wait=False)
        if step % self._interval == 0 or step - self._start < LEARNED:
            self.at_save(step)

    def at_save(self, step: int) -> None:
        """The state after ``step`` steps is about to be saved: compute its digest, unless that was done."""
        if not self._interval or self._done == step:
            return
        self._done = step
        trained = SAVERS.trained
        if trained is None:
            if self._is_lead and not self._rounds:
                log.warning("no digests of replicas: no checkpoint manager has seen a model yet")
            self._rounds = max(1, self._rounds)
            return
        tensors = tensors_of(*trained)
        if self._rounds < LEARNED and step - self._start < LEARNED:
            self._learn(tensors, trained=step > self._start)
            self._rounds += 1
        if self._left_out:
            tensors = [one for one in tensors if not is_left_out(one.name, self._left_out)]
        self._digest(step, tensors)

    def flush(self) -> None:
        """Pick up all digests, waiting for the device."""
        if self._pending:
            self._collect(wait=True)

    def _digest(self, step: int, tensors: list[Named]) -> None:
        group = self._groups.get(len(tensors))
        if group is None:
            group = self._groups[len(tensors)] = group_of(tensors)
        host_part, device_part = 0, None
        for device in sorted({one.tensor.device for one in tensors}, key=str):
            found = self._digester(device).digest(one.tensor for one in tensors if one.tensor.device == device)
            if device_part is None and streams.of(device) is not None:
                device_part = found
            else:
                host_part += int(found)
        if device_part is None:
            self._ring.add(group, step, signed(host_part))
            return
        gpu = streams.of(device_part.device)
        if gpu is None:
            raise RuntimeError(f"{device_part.device} has gone")
        number = torch.empty((), dtype=torch.int64, pin_memory=True)
        gpu.copy(number, device_part)
        (ready := gpu.event()).record()
        self._pending.append(_Pending(step, group, host_part, number, ready))

    def _digester(self, device: torch.device) -> Digester:
        if device not in self._digesters:
            self._digesters[device] = digester_of(device)
        return self._digesters[device]

    def _collect(self, *, wait: bool) -> None:
        while self._pending:
            first = self._pending[0]
            while not first.ready.query():
                if not wait:
                    return
                time.sleep(streams.FIRST_LOOK_S)
            self._pending.pop(0)
            self._ring.add(first.group, first.step, signed(first.host_part + int(first.number)))

    def _learn(self, tensors: list[Named], *, trained: bool) -> None:
        """Find the tensors that differ between replicas by design. A collective, of the first steps only."""
        buffers = {one.name for one in tensors if one.is_buffer}
        group = group_of(tensors)
        most, least = _bounds(torch.tensor([group]))
        if most.equal(least):
            digests = [self._digester(one.tensor.device).digest([one.tensor]) for one in tensors]
            most, least = _bounds(torch.tensor([int(each) for each in digests], dtype=torch.int64))
            differing = {one.name for one, same in zip(tensors, (most == least).tolist(), strict=True) if not same}
        else:  # ranks hold different parts, and cannot compare them tensor by tensor
            differing = buffers
        found = left_out(differing, buffers=buffers, trained=trained, so_far=self._left_out)
        if (new := sorted(found - self._left_out)) and self._is_lead:
            more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
            log.warning("replicas are compared without %s%s: each rank has its own", ", ".join(new[:SHOWN]), more)
        if found != self._left_out:
            self._left_out, self._groups = found, {}


def _bounds(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest and the smallest of all ranks, of each number."""
    both = torch.cat([numbers, ~numbers])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=host_group())
    return both[: len(numbers)], ~both[len(numbers) :]
