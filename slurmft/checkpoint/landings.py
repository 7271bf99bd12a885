"""Where the tensors of a stored state are read to, before any of the trainer's objects is touched."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from slurmft.checkpoint.format.flat_state import PARAMS, is_dense
from slurmft.checkpoint.format.image import local
from slurmft.checkpoint.format.reading import Stored, Target, fresh
from slurmft.checkpoint.state import Trainee, unwrapped


@dataclass(frozen=True, slots=True)
class Landing:
    """A tensor that is being read, and its target."""

    target: Target
    like: DTensor | None = None
    """Spread over ranks in the same way; None for a plain tensor."""

    is_whole: bool = False
    """Whether each rank reads all of it although ``like`` is spread over ranks."""

    into: torch.Tensor | None = None
    """A tensor of the optimizer that takes the values itself, as its memory is there already."""

    def value(self) -> torch.Tensor:
        if self.into is not None:
            with torch.no_grad():
                local(self.into).copy_(self.target.tensor)
            return self.into
        if self.like is None:
            return self.target.tensor
        if self.is_whole:
            mesh = self.like.device_mesh
            return DTensor.from_local(self.target.tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return DTensor.from_local(
            self.target.tensor,
            self.like.device_mesh,
            self.like.placements,
            run_check=False,
            shape=self.like.shape,
            stride=self.like.stride(),
        )


def landing_of(stored: Stored, key: str, like: object, *, may_map: bool = False) -> Landing:
    """Where a stored tensor is read to, in the place of ``like`` (a tensor of the trainer, or any value).

    Args:
        may_map: its values are copied out of it once, and it is not kept.
    """
    there = stored.tensors[key]
    spread = like if isinstance(like, DTensor) else None
    is_whole = spread is not None and tuple(spread.shape) != there.shape
    if is_whole and there.pieces == 1:
        spread, is_whole = None, False
    starts, sizes = _own_box(None if is_whole else spread, there.shape)
    target = stored.mapped(key, starts, sizes) if may_map else None
    return Landing(target or Target(fresh(sizes, there.dtype), starts), spread, is_whole=is_whole)


def _own_box(like: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the part begins that this rank holds, and its sizes; all of it but where ``like`` is spread over ranks."""
    if not isinstance(like, DTensor):
        return (0,) * len(shape), shape
    (chunk,) = like.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def landing_in_place(stored: Stored, key: str, here: torch.Tensor) -> Landing | None:
    """Into the optimizer's present tensor, which shares its memory with nothing; None where that is of another kind."""
    there, inside = stored.tensors[key], local(here)
    if not is_dense(here) or (tuple(here.shape), here.dtype) != (there.shape, there.dtype):
        return None
    starts, sizes = _own_box(here, there.shape)
    if tuple(inside.shape) != sizes or not inside.is_contiguous():
        return None
    target = stored.mapped(key, starts, sizes)
    return Landing(target, into=here) if target is not None else None


class Apart:
    """Which of an optimizer's present tensors may take what is loaded themselves: nothing else lies in their memory.

    None of them where the optimizer has a ``load_state_dict`` of its own, which may begin with clearing them.
    """

    def __init__(self, trainee: Trainee) -> None:
        optimizer = trainee.optimizer
        own = getattr(optimizer.load_state_dict, "__func__", None) is torch.optim.Optimizer.load_state_dict
        hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
        self._is_used = own and not hooks
        groups = (one for group in optimizer.param_groups for one in group[PARAMS])
        weights = (*unwrapped(trainee.model).parameters(), *unwrapped(trainee.model).buffers(), *groups)
        self._taken = {one.untyped_storage().data_ptr() for each in weights if is_dense(one := local(each))}
        self._places: list[tuple[int, int]] = []

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether this one may, which takes its place."""
        inside = local(tensor)
        if not self._is_used or not is_dense(inside) or inside.untyped_storage().data_ptr() in self._taken:
            return False
        begin, end = inside.data_ptr(), inside.data_ptr() + inside.nbytes
        place = bisect.bisect_left(self._places, (begin, end))
        neighbours = self._places[max(place - 1, 0) : place + 1]
        if any(start < end and begin < stop for start, stop in neighbours):
            return False
        self._places.insert(place, (begin, end))
        return True
