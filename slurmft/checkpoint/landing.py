"""A stored state on its way into the trainer's objects: checked for fit, read and verified, and only then applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from slurmft.checkpoint.damage import Damage, Damaged
from slurmft.checkpoint.flat_keys import Path, unflatten
from slurmft.checkpoint.flat_state import (
    GROUPS,
    MODEL,
    OPTIMIZER,
    PARAMS,
    STATE,
    group_names,
    is_dense,
    plain_name,
    rank_key,
    refuse_unsupported,
)
from slurmft.checkpoint.plain_state import original
from slurmft.checkpoint.reading import Stored, StoredTensor, Target, fresh
from slurmft.checkpoint.shard_index import index_file
from slurmft.checkpoint.state import Trainee, load_part, unwrapped

_RANK_KEYS = rank_key(0)[:-1]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rank's part of a state, read and verified. The trainer's objects have not been touched."""

    trainee: Trainee
    is_own: bool
    """False when this rank did not exist in the run that saved, and borrows rank 0's loader position."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]

    @property
    def extra(self) -> Mapping[str, Any]:
        """What ``save(extra=...)`` was given."""
        value: Mapping[str, Any] = original(self.shared.get("extra", {}))
        return value

    def apply(self) -> None:
        """Load everything; the random number generators last, so that nothing draws from them in between.

        Raises:
            CheckpointError: a scheduler, scaler or loader cannot take what is stored for it.
        """
        load_part("loader", self.trainee.loader, self.own)  # first: it refuses other data, and the model is still whole
        unwrapped(self.trainee.model).load_state_dict(_landed(self.model))
        self.trainee.optimizer.load_state_dict(_landed(self.optimizer))
        for name, part in self.trainee.shared_parts().items():
            load_part(name, part, self.shared)
        if self.is_own:
            self.trainee.restore_rng(self.own)


def prepare(trainee: Trainee, stored: Stored, *, rank: int) -> Prepared:
    """Read this rank's part of ``stored`` into new memory and verify it; the trainer's objects stay as they are.

    Raises:
        Damaged: the state does not fit these objects (the keys are named), or is not what was written.
        UsageError: the model is of a kind that cannot be loaded.
    """
    refuse_unsupported(trainee.model)
    own_key = rank_key(rank) if rank_key(rank) in stored.objects else rank_key(0)
    wanted = [key for key in stored.objects if not key.startswith(_RANK_KEYS) or key == own_key]
    objects = stored.load_objects(wanted)
    leaves: dict[Path, Any] = {stored.path(key): value for key, value in objects.items()}
    landings = _model_landings(trainee, stored) | _optimizer_landings(trainee, stored, leaves)
    stored.fill({key: landing.target for key, landing in landings.items()})
    leaves |= {stored.path(key): landing for key, landing in landings.items()}
    try:
        tree = unflatten(leaves)
        return Prepared(
            trainee=trainee,
            is_own=own_key == rank_key(rank),
            model=_with_raw_names(trainee, tree.get(MODEL, {})),
            optimizer=_with_numbers(trainee, tree[OPTIMIZER]),
            shared=tree,
            own=tree.get(own_key, {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _misfit(f"its keys make no sense: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Landing:
    """A tensor that is being read, and what it is to become."""

    target: Target
    like: DTensor | None = None
    """Spread over ranks in the same way; None for a plain tensor."""

    is_whole: bool = False
    """Whether each rank reads all of it although ``like`` is spread over ranks."""

    def value(self) -> torch.Tensor:
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


def _landing(stored: StoredTensor, like: object) -> _Landing:
    """Where a stored tensor is read to, in the place of ``like`` (a tensor of the trainer, or whatever)."""
    if isinstance(like, DTensor) and tuple(like.shape) == stored.shape:
        (chunk,) = like.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return _Landing(Target(fresh(tuple(chunk.sizes), stored.dtype), tuple(chunk.offsets)), like)
    whole = Target(fresh(stored.shape, stored.dtype), (0,) * len(stored.shape))
    if isinstance(like, DTensor) and stored.pieces > 1:
        return _Landing(whole, like, is_whole=True)
    return _Landing(whole)


def _model_landings(trainee: Trainee, stored: Stored) -> dict[str, _Landing]:
    present = {plain_name(name): value for name, value in unwrapped(trainee.model).state_dict().items()}
    keys = [key for key in (*stored.tensors, *stored.objects) if stored.path(key)[0] == MODEL]
    names = {str(stored.path(key)[1]) if len(stored.path(key)) > 1 else key for key in keys}
    if missing := sorted(present.keys() - names):
        raise _misfit(f"it lacks {_some(missing)}")
    if unknown := sorted(names - present.keys()):
        raise _misfit(f"this model has no {_some(unknown)}")
    landings = {}
    for key in keys:
        name, there = str(stored.path(key)[1]), stored.tensors.get(key)
        here: Any = present[name] if len(stored.path(key)) == 2 else None
        if is_dense(here):
            shape = list(here.shape)
            if there is None or list(there.shape) != shape:
                raise _misfit(f"{name} is {list(there.shape) if there else 'no tensor'} there and {shape} here")
        if there is not None:
            landings[key] = _landing(there, here)
    return landings


def _optimizer_landings(trainee: Trainee, stored: Stored, leaves: Mapping[Path, Any]) -> dict[str, _Landing]:
    names = group_names(trainee)
    _check_groups(names, leaves)
    flat = [name for group in names for name in group]
    parameters = [parameter for group in trainee.optimizer.param_groups for parameter in group[PARAMS]]
    by_name = dict(zip(flat, parameters, strict=True))
    landings = {}
    for key, there in stored.tensors.items():
        path, like = stored.path(key), None
        if path[0] != MODEL:
            if path[:2] == (OPTIMIZER, STATE) and len(path) > 3:
                like = _present_state(trainee, by_name.get(str(path[2])), path[3:])
            landings[key] = _landing(there, like)
    return landings


def _present_state(trainee: Trainee, parameter: torch.Tensor | None, path: Path) -> object:
    """What the optimizer has there now, or where it has nothing yet, the parameter itself."""
    value: Any = trainee.optimizer.state.get(parameter) if parameter is not None else None
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value if isinstance(value, torch.Tensor) else parameter


def _check_groups(here: Sequence[Sequence[str]], leaves: Mapping[Path, Any]) -> None:
    there = {path[2]: value for path, value in leaves.items() if path[:2] == (OPTIMIZER, GROUPS) and path[-1] == PARAMS}
    if not there:
        raise _misfit("it has no optimizer state")
    counts = [len(there[number]) for number in sorted(there)]
    if len(counts) != len(here):
        raise _misfit(f"the optimizer has {len(counts)} parameter groups there and {len(here)} here")
    for number, names in enumerate(here):
        if missing := sorted(set(names) - set(there[number])):
            raise _misfit(f"optimizer group {number} lacks {_some(missing)}")
        if unknown := sorted(set(there[number]) - set(names)):
            raise _misfit(f"optimizer group {number} has no {_some(unknown)} here")


def _with_raw_names(trainee: Trainee, model: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that the model itself uses."""
    return {name: model[plain_name(name)] for name in unwrapped(trainee.model).state_dict()}


def _with_numbers(trainee: Trainee, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of ``Optimizer.load_state_dict``: parameters by their places in this optimizer."""
    names = group_names(trainee)
    flat = [name for group in names for name in group]
    number_of = {name: number for number, name in enumerate(flat)}
    groups = [
        {**group, PARAMS: [number_of[name] for name in here]}
        for group, here in zip(optimizer[GROUPS], names, strict=True)
    ]
    state = {number_of.get(name, name): value for name, value in optimizer.get(STATE, {}).items()}
    return {**optimizer, STATE: state, GROUPS: groups}


def _landed(value: Any) -> Any:
    """With tensors in the place of landings."""
    if isinstance(value, _Landing):
        return value.value()
    if type(value) is dict:
        return {key: _landed(each) for key, each in value.items()}
    if type(value) is list:
        return [_landed(each) for each in value]
    return value


def _misfit(problem: str) -> Damaged:
    return Damaged(Damage.MISFIT, index_file(0), problem)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
