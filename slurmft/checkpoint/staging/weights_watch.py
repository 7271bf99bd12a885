"""Whether the state is still that of the last boundary: weights, schedule and scale, without a copy of them.

Just in time, the weights of a step are kept after the next step has begun. That is right only while nothing has changed
them. Steps of optimizers call a hook before they change anything; other changes of weights (a wrapper's own update, an
average that is swapped in for an evaluation, a graph that is replayed) are found by comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurmft.checkpoint.state import Trainee, unwrapped

MAX_SAMPLED = 32
"""Weights of which some values are compared: changes through ``.data`` leave torch's count of writes as it is."""

SAMPLE_VALUES = 16
_PLAIN = (bool, int, float, str)
_MAX_DEPTH = 2
_MAX_NESTED = 6


class WeightsWatch:
    """Compares the trainee now with what it was at the newest ``note``."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        weights = {id(one): one for one in unwrapped(trainee.model).parameters()}
        weights |= {id(one): one for group in trainee.optimizer.param_groups for one in group["params"]}
        self._ids, self._weights = weights.keys(), list(weights.values())
        self._versions: list[int] = []
        self._addresses: list[int] = []
        dense = [one for one in self._weights if (here := _here(one)).numel() and here.layout is torch.strided]
        self._sampled = dense[:: -(-len(dense) // MAX_SAMPLED) or 1]
        self._views: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []
        self._schedule: list[Any] = []

    def shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of ``optimizer`` changes weights that are watched, also where it is wrapped."""
        return any(id(one) in self._ids for group in optimizer.param_groups for one in group["params"])

    def note(self) -> None:
        """Note them at a boundary. Does not wait for a GPU."""
        self._versions = [_here(one)._version for one in self._weights]
        if (addresses := [_here(one).data_ptr() for one in self._sampled]) != self._addresses:
            self._addresses = addresses
            self._views = [_first_values(one) for one in self._sampled]
            self._samples = [one.clone() for one in self._views]
        elif self._views:
            torch._foreach_copy_(self._samples, self._views)
        self._schedule = _schedule(self._trainee)

    def weights_were_written(self) -> bool:
        """Whether torch has counted a write since ``note``; cheap."""
        return self._versions != [_here(one)._version for one in self._weights]

    def difference(self, *, of_values: bool = True) -> str:
        """The first change since ``note``; empty where there is none. Without ``of_values`` no kernel is launched."""
        if self.weights_were_written() or self._addresses != [_here(one).data_ptr() for one in self._sampled]:
            return "the weights were changed"
        if of_values and not all(map(torch.equal, self._samples, self._views)):
            return "the weights were changed"
        if self._schedule != _schedule(self._trainee):
            return "the learning rate, schedule or scale was changed before the weights were"
        return ""


def can_be_heard(optimizer: Any) -> bool:
    """Whether the step of this optimizer, or of one that it wraps, calls its hooks before it changes anything."""
    return any(getattr(getattr(type(one), "step", None), "hooked", False) for one in _with_inner(optimizer, _MAX_DEPTH))


def _with_inner(optimizer: Any, depth: int) -> Iterator[Any]:
    yield optimizer
    if depth:
        for value in getattr(optimizer, "__dict__", {}).values():
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, torch.optim.Optimizer):
                    yield from _with_inner(one, depth - 1)


def _here(weight: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, where it is spread over ranks."""
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def _first_values(weight: torch.Tensor) -> torch.Tensor:
    """A view of some of its values, wherever they lie."""
    view = _here(weight).detach()
    while view.dim() > 1:
        view = view[0]
    return view[:SAMPLE_VALUES] if view.dim() else view


def _schedule(trainee: Trainee) -> list[Any]:
    """The values that a scheduler or scaler changes; some trainers call theirs at the beginning of a step."""
    values: list[Any] = []
    for group in trainee.optimizer.param_groups:
        values += [mark for name, value in group.items() if name != "params" for mark in _marks(value, _MAX_DEPTH)]
    for part in (trainee.scheduler, trainee.scaler):
        values += _marks(part, _MAX_NESTED)
    return values


def _marks(value: Any, depth: int) -> Iterator[Any]:
    """Plain values, and how often tensors were written to, in a part's attributes, collections, and parts of its own.

    Not its ``state_dict()``: a scaler's waits for the GPU.
    """
    if type(value) in _PLAIN:
        yield value
    elif isinstance(value, torch.Tensor):
        yield id(value), value._version
    elif not depth or isinstance(value, torch.optim.Optimizer):
        return
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            yield from _marks(key, 0)
            yield from _marks(one, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for one in list(value):
            yield from _marks(one, depth - 1)
    elif hasattr(value, "state_dict"):
        yield from _marks(getattr(value, "__dict__", {}), depth)
