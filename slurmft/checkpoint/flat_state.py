"""The trainer's objects as a flat mapping of keys to tensors and objects, as they are stored and loaded.

The keys are those of torch.distributed.checkpoint for ``{"model": get_model_state_dict(...), "optimizer":
get_optimizer_state_dict(...)}``, so that it reads what is stored here. Unlike torch's own functions, these change
nothing: they do not step an optimizer that has no state yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from slurmft.checkpoint.flat_keys import KeyPath, flatten, key_of
from slurmft.checkpoint.state import Trainee, as_plain, unwrapped
from slurmft.errors import CheckpointError, UsageError
from slurmft.trainer.streams import settle

# --- parts ---
# Which part of the weights a rank has where they are spread over ranks, and these have replicas (FSDP2's HSDP).
#
# On a mesh of replicas by shards the ranks of one column have the same values, and one rank of each column, from any of
# the replicas, make the whole.


@dataclass(frozen=True, slots=True)
class Part:
    """One column of a mesh, or all of a state that every rank has."""

    number: int = 0
    """0 has what is not spread, too: counters, buffers, everything that is no tensor."""

    count: int = 1
    mesh: DeviceMesh | None = None

    def dimension_of(self, key: str, tensor: DTensor) -> int:
        """The dimension in which ``tensor`` is cut.

        Raises:
            UsageError: it is spread in another way than the weights: no replica is known to have it.
        """
        placements = tensor.placements
        is_alike = self.mesh is not None and tensor.device_mesh == self.mesh
        if not is_alike or [type(one) for one in placements] != [Replicate, Shard]:
            raise UsageError(f"{key} is spread over ranks in another way than the weights: {placements}")
        cut = placements[1]
        assert isinstance(cut, Shard)
        return cut.dim

    def parts_of(self, ranks: Iterable[int]) -> int:
        """How many different parts these ranks have."""
        return 1 if self.mesh is None else len({_column(self.mesh, rank) for rank in ranks})


WHOLE = Part()


def part_of(weights: Iterable[torch.Tensor], *, rank: int, world_size: int) -> Part:
    """The part of ``weights`` that this rank has; ``WHOLE`` where none is spread over ranks.

    Raises:
        UsageError: nothing is known of another rank with the same part; why.
    """
    spread = {id(one): one for one in weights if isinstance(one, DTensor)}
    if not spread:
        return WHOLE
    mesh = next(iter(spread.values())).device_mesh
    if any(one.device_mesh != mesh for one in spread.values()):
        raise UsageError("weights are spread over several meshes of ranks")
    if mesh.ndim == 1 or (mesh.ndim == 2 and mesh.size(0) == 1):
        raise UsageError("the state is spread over ranks, and no other has it")
    if mesh.ndim > 2:
        raise UsageError(f"the weights are spread over a mesh of {mesh.ndim} dimensions, not of replicas by shards")
    if mesh.size() != world_size:
        raise UsageError(f"the weights are spread over {mesh.size()} of {world_size} ranks")
    if 0 not in mesh.mesh[:, 0]:
        raise UsageError("rank 0 is not among the first shards of the mesh")
    part = Part(_column(mesh, rank), mesh.size(1), mesh)
    for one in spread.values():
        part.dimension_of("a weight", one)
    return part


def _column(mesh: DeviceMesh, rank: int) -> int:
    return int((mesh.mesh == rank).nonzero()[0, 1])


# --- The trainer's objects as a flat mapping of keys to tensors and objects, as they are stored and loaded ---

MODEL, OPTIMIZER, STATE, GROUPS, PARAMS = "model", "optimizer", "state", "param_groups", "params"
FACTS = "slurmft.facts"
"""The key of facts that a marker also holds: metrics, and how many ranks have a state of their own in it."""

BUFFERS_OF = "buffers_of"
"""Among the facts of a state that was kept just in time: the rank of its buffers."""

EXTRA = "extra"
HAS_EXTRA = "has_extra"
"""Among the same facts: the run has an ``extra``, here or among the notes of rank 0."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts that torch.compile and activation checkpointing of an inner module put into the names below it."""

_DENSE_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def rank_key(rank: int) -> str:
    """The key of one rank's own state: random number generators, loader."""
    return f"slurmft.rank.{rank}"


@dataclass(frozen=True, slots=True)
class FlatState:
    """One rank's part of a save. Tensors are the trainer's own: nothing is copied yet."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same keys in the same order on every rank; a DTensor stands for its part on this rank."""

    objects: dict[str, Any] = field(default_factory=dict)
    """The keys that this rank stores: rank 0 those that are equal everywhere, and each rank its own."""

    paths: dict[str, KeyPath] = field(default_factory=dict)
    """Each key in its pieces."""

    of_lead: set[str] = field(default_factory=set)
    """Tensors that are rank 0's: DDP leaves each rank with buffers of its own, and sends rank 0's before each step."""

    part: Part = WHOLE
    """Of a state that is kept just in time: what of it this rank has."""

    def put(self, key: str, value: Any) -> None:
        """Add an object under a key of its own."""
        self.objects[key], self.paths[key] = value, (key,)

    def _put(self, leaves: Iterable[tuple[KeyPath, Any]], *, with_objects: bool) -> None:
        for path, value in leaves:
            key = key_of(path)
            if key in self.paths:
                raise CheckpointError(f"two values of this model and optimizer have the name {key}")
            if is_dense(value):
                self.tensors[key] = value.detach() if value.requires_grad else value
            elif with_objects:
                self.objects[key] = value
            else:
                continue
            self.paths[key] = path


@dataclass(frozen=True, slots=True)
class Between:
    """The model's values and names between two steps. Within one, FSDP has put others into their places, and to ask
    the model for its state would end that under the running step."""

    part: Part
    leaves: tuple[tuple[KeyPath, Any], ...]
    names: list[list[str]]

    @classmethod
    def steps(cls, trainee: Trainee, part: Part) -> Between:
        """As the model is now."""
        state = unwrapped(trainee.model).state_dict(keep_vars=True)  # first: it brings back what is between steps
        leaves = tuple(leaf for name, value in state.items() for leaf in _leaves_of(name, value))
        return cls(part, leaves, group_names(trainee))


def capture(
    trainee: Trainee, extra: Mapping[str, Any] | None, *, rank: int, settles: bool = False,
    between: Between | None = None,
) -> FlatState:  # fmt: skip
    """The present state, as views of the trainer's own tensors. Every rank calls it, in the same state.

    Args:
        settles: wait first until a device has computed all that it was asked for; never in a run that fails.
        between: in the middle of a step of a model whose weights are spread over ranks, what is asked of it then.

    Raises:
        UsageError: the model is of a kind that cannot be saved.
        CheckpointError: two values have the same name.
    """
    if settles:
        settle(trainee.model.parameters())
    state, leads = FlatState(part=between.part if between is not None else WHOLE), rank == 0
    state._put(between.leaves if between is not None else model_leaves(trainee.model), with_objects=leads)
    buffers = unwrapped(trainee.model).named_buffers(remove_duplicate=False)
    state.of_lead.update(key_of((MODEL, plain_name(name))) for name, _ in buffers)
    names = between.names if between is not None else group_names(trainee)
    state._put(_optimizer_leaves(trainee, names), with_objects=leads)
    objects: dict[str, Any] = {}
    if leads:
        parts = trainee.shared_parts().items()
        objects |= {name: as_plain(part.state_dict()) for name, part in parts if part is not None}
        objects[EXTRA] = as_plain(dict(extra or {}))
    objects[rank_key(rank)] = trainee.rank_payload()
    for key, value in objects.items():
        state.put(key, value)
    return state


def for_save(
    trainee: Trainee, extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None, metrics: Mapping[str, Any], *,
    rank: int, world_size: int,
) -> FlatState:  # fmt: skip
    """The present state with what rank 0 adds to it; of a function ``extra`` what it returns there now.

    Raises: as ``capture``; ValueError or TypeError where a metric is no number.
    """
    given = (extra() if rank == 0 else None) if callable(extra) else extra
    flat = capture(trainee, given, rank=rank, settles=True)
    if rank == 0:
        plain = {str(name): float(value) for name, value in metrics.items()}
        flat.put(FACTS, {"metrics": plain, "world_size": world_size})
    return flat


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether some of its weights are spread over ranks."""
    return any(isinstance(one, DTensor) for one in unwrapped(model).parameters())


def is_dense(value: Any) -> bool:
    """Whether it is a tensor whose values can be copied into rows of memory; others are stored as objects."""
    if type(value) in _DENSE_TYPES:
        return value.layout is torch.strided and not value.is_quantized and not value.is_nested
    return isinstance(value, DTensor) and is_dense(value._local_tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a checkpoint has it once, for all ranks."""
    return not isinstance(tensor, DTensor)


def number_of(tensor: torch.Tensor) -> int:
    """The sum of its bits, word by word: equal for equal values, computed where they lie."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return int(raw.view(torch.int32 if raw.numel() % 4 == 0 else torch.uint8).sum(dtype=torch.int64).item())


def model_leaves(model: torch.nn.Module) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of the model's state with its path."""
    for name, value in unwrapped(model).state_dict().items():
        yield from _leaves_of(name, value)


def _leaves_of(name: str, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    return flatten((MODEL, plain_name(name)), value, _is_tensor)


@functools.lru_cache(maxsize=1 << 16)
def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers of inner modules put into it."""
    return ".".join(piece for piece in name.split(".") if piece not in _WRAPPERS)


def group_names(trainee: Trainee) -> list[list[str]]:
    """The names of the optimizer's parameters, group by group: the model's, or for others their place."""
    names: dict[int, str] = {}
    for name, parameter in unwrapped(trainee.model).named_parameters():
        names.setdefault(id(parameter), plain_name(name))
    return [
        [names.get(id(parameter), f"group_{number}.param_{place}") for place, parameter in enumerate(group[PARAMS])]
        for number, group in enumerate(trainee.optimizer.param_groups)
    ]


def _optimizer_leaves(trainee: Trainee, names: list[list[str]]) -> Iterator[tuple[KeyPath, Any]]:
    flat_names = [name for group in names for name in group]
    state = trainee.optimizer.state_dict()
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    name_of = dict(zip(numbers, flat_names, strict=True))
    named = {name_of.get(number, number): value for number, value in state[STATE].items()}
    if named:
        for name, value in named.items():
            yield from flatten((OPTIMIZER, STATE, str(name)), value, _is_tensor)
    else:
        yield (OPTIMIZER, STATE), {}
    groups = [{**group, PARAMS: group_names} for group, group_names in zip(state[GROUPS], names, strict=True)]
    yield from flatten((OPTIMIZER, GROUPS), groups, _is_tensor)
    for name, value in state.items():
        if name not in (STATE, GROUPS):
            yield from flatten((OPTIMIZER, name), value, _is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
