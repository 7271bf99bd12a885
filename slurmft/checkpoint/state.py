"""The content of a checkpoint: the trainer's objects on one side, a flat mapping of keys to tensors and objects, as
they are stored, on the other.

The keys of a stored state are those of torch.distributed.checkpoint for ``{"model": get_model_state_dict(...),
"optimizer": get_optimizer_state_dict(...)}``, so that it reads what is stored here. Unlike torch's own functions,
these change nothing: they do not step an optimizer that has no state yet.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from slurmft.errors import CheckpointError, UsageError
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS
from slurmft.trainer.streams import settle

# --- Nested state as one flat mapping and back, with the very keys of torch.distributed.checkpoint. No torch ---

KeyPath = tuple[str | int, ...]
"""From the outermost key to the value: a string in a dict, a number in a list."""


@functools.lru_cache(maxsize=1 << 16)
def key_of(path: KeyPath) -> str:
    """``optimizer.param_groups.0.lr``"""
    return ".".join(map(str, path))


def flatten(path: KeyPath, value: Any, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[KeyPath, Any]]:
    """Each leaf below ``value`` with its path.

    Dicts are entered, and lists that hold a tensor or a dict somewhere; everything else is a leaf. Beyond torch's own
    rule, a dict that is empty, or has a key that is not a string, is a leaf: it comes back as it was.
    """
    if is_tensor(value):  # first: there are thousands, and the training loop waits
        yield path, value
    elif isinstance(value, Mapping) and value and all(type(key) is str for key in value):
        for key, each in value.items():
            yield from flatten((*path, key), each, is_tensor)
    elif isinstance(value, list) and any(_opens(each, is_tensor) for each in value):
        for place, each in enumerate(value):
            yield from flatten((*path, place), each, is_tensor)
    else:
        yield path, value


def _opens(value: Any, is_tensor: Callable[[Any], bool]) -> bool:
    if isinstance(value, list):
        return any(_opens(each, is_tensor) for each in value)
    return isinstance(value, Mapping) or is_tensor(value)


class _Node(dict[str | int, Any]):
    """A dict or list that is being put together; list items may come in any order."""


def unflatten(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The reverse of ``flatten``, for leaves in any order.

    Raises:
        ValueError: two paths contradict each other, or a list has gaps.
    """
    root = _Node()
    for path, value in leaves.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, _Node())
            if not isinstance(node, _Node):
                raise ValueError(f"{step!r} of {key_of(path)} is a value and holds values")
        if path[-1] in node:
            raise ValueError(f"{key_of(path)} is there twice")
        node[path[-1]] = value
    return {str(key): _closed(value) for key, value in root.items()}


def _closed(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    kinds = {type(key) for key in value}
    if kinds == {str}:
        return {key: _closed(each) for key, each in value.items()}
    if kinds != {int} or value.keys() != set(range(len(value))):
        raise ValueError(f"{sorted(map(str, value))[:5]} are the keys of neither a dict nor a list")
    return [_closed(value[place]) for place in range(len(value))]


# --- Values of everyday types that ``torch.load(weights_only=True)`` refuses, as values that it takes, and back ---
# States of loaders and data sets hold numpy's numbers and arrays, sets, deques, ranges and paths. Each is kept as a
# dict with a tag; tensors and plain values stay what they are. A type that is not known here stays, too: the save then
# says that a load would refuse it, unless ``torch.serialization.add_safe_globals`` allows it.

TAG = "__slurmft__"
MAX_JSON_TENSOR_BYTES = 64 * 1024
"""Larger ones are data and no position: as text, they would cost more than they are worth."""

_SIMPLE = (bool, int, float, str, type(None))


def as_plain(value: Any) -> Any:
    """``value`` in types that a load takes; ``original`` turns it back.

    Raises:
        CheckpointError: it contains itself, or is nested too deeply.
    """
    return _guarded(_Encoder(is_json=False).encode, value)


def as_json(value: Any) -> Any:
    """As ``as_plain``, in types that survive JSON unchanged: tuples, small tensors, bytes and keys too.

    Raises:
        CheckpointError: it contains itself, or is nested too deeply.
    """
    return _guarded(_Encoder(is_json=True).encode, value)


def original(value: Any) -> Any:
    """The argument of ``as_plain`` or ``as_json``; values without tags are returned as they are.

    Raises:
        CheckpointError: a tag is of a newer slurmft, or what it holds is damaged.
    """
    return _guarded(_decode, value)


def _guarded(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except RecursionError as error:
        raise CheckpointError("a state that is to be saved contains itself, or is nested too deeply") from error


class _Encoder:
    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SIMPLE:
            return value
        if kind in (dict, OrderedDict):
            return self._mapping(value)
        if kind is list:
            return [self.encode(each) for each in value]
        if kind is tuple:
            items = [self.encode(each) for each in value]
            return {TAG: "tuple", "items": items} if self._is_json else tuple(items)
        if isinstance(value, torch.Tensor):
            return _tensor(value) if self._is_json and _is_small(value) else value
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self._numpy(value)
        return self._other(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        kind: type[dict[Any, Any]] = OrderedDict if type(value) is OrderedDict else dict
        fits = all(type(key) is str for key in value) if self._is_json else all(map(_is_simple_key, value))
        if fits and TAG not in value and not (self._is_json and kind is OrderedDict):
            return kind((key, self.encode(each)) for key, each in value.items())
        items = [[self.encode(key), self.encode(each)] for key, each in value.items()]
        return {TAG: "dict" if kind is dict else "OrderedDict", "items": items}

    def _numpy(self, value: Any) -> Any:
        try:
            array = value.reshape(value.shape or 1)
            tensor = torch.tensor(array.astype(array.dtype.newbyteorder("=")))  # a copy: it may be read-only
        except (TypeError, ValueError):  # text and objects
            return value
        return {TAG: "numpy", "is_scalar": type(value).__name__ != "ndarray", "shape": list(value.shape),
                "values": self.encode(tensor)}  # fmt: skip

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if kind in (set, frozenset, deque):
            limit = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            return {TAG: kind.__name__, "items": [self.encode(each) for each in value], **limit}
        if kind in (range, slice):
            return {TAG: kind.__name__, "items": [self.encode(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, PurePath):
            return {TAG: "path", "items": [str(value)]}
        if self._is_json and kind is Counter:  # torch takes it as it is; JSON would make texts of its keys
            return {TAG: "Counter", "items": [[self.encode(key), self.encode(number)] for key, number in value.items()]}
        if self._is_json and kind is complex:
            return {TAG: "complex", "items": [value.real, value.imag]}
        if kind in (bytes, bytearray) and (self._is_json or not value):  # torch's own load refuses empty ones
            return {TAG: kind.__name__, "items": [value.hex()]}
        return value


def _is_simple_key(key: Any) -> bool:
    return type(key) in _SIMPLE or (type(key) is tuple and all(map(_is_simple_key, key)))


def _is_small(value: torch.Tensor) -> bool:
    fits = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    return fits and value.nbytes <= MAX_JSON_TENSOR_BYTES


def name_of_dtype(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {TAG: "tensor", "dtype": name_of_dtype(value.dtype), "shape": list(value.shape),
            "hex": raw.numpy().tobytes().hex()}  # fmt: skip


def _decode(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        if TAG not in value:
            return kind((key, _decode(each)) for key, each in value.items())
        return _tagged(value)
    if kind in (list, tuple):
        return kind(_decode(each) for each in value)
    return value


def _tagged(value: Mapping[str, Any]) -> Any:
    name = value[TAG]
    try:
        if name == "tensor":
            return _from_tensor(value)
        if name == "numpy":
            return _from_numpy(value)
        items = [_decode(each) for each in value["items"]]
        if name == "deque":
            return deque(items, value["maxlen"])
        if name in _FROM_ITEMS:
            return _FROM_ITEMS[name](items)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"a saved {str(name)[:40]!r} is damaged: {error!r}") from error
    raise CheckpointError(f"a saved value is a {str(name)[:40]!r}, which this slurmft does not know",
                          hint="upgrade slurmft, or resume with the one that saved")  # fmt: skip


def _from_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{value['dtype']} is not a dtype")
    raw = bytearray.fromhex(value["hex"])
    if not raw:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(value["shape"])


def _from_numpy(value: Mapping[str, Any]) -> Any:
    array = _decode(value["values"]).numpy()
    return array[0] if value["is_scalar"] else array.reshape(value["shape"])


_FROM_ITEMS: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
    "set": set,
    "frozenset": frozenset,
    "range": lambda items: range(*items),
    "slice": lambda items: slice(*items),
    "path": lambda items: Path(items[0]),
    "complex": lambda items: complex(*items),
    "bytes": lambda items: bytes.fromhex(items[0]),
    "bytearray": lambda items: bytearray.fromhex(items[0]),
}


# --- The content of a checkpoint: the trainer's objects on one side, plain payloads on the other ---

log = logging.getLogger(__name__)


LOADER, SCHEDULER, SCALER = "loader", "scheduler", "scaler"


UNSUPPORTED = {
    "FullyShardedDataParallel": "use torch.distributed.fsdp.fully_shard (FSDP2), or DistributedDataParallel",
    "ZeroRedundancyOptimizer": "use torch.distributed.fsdp.fully_shard (FSDP2), whose optimizer is sharded with it",
}
"""Classes with state that differs from rank to rank under names that no other rank knows."""


class Stateful(Protocol):
    """Schedulers, gradient scalers, loaders: objects whose state can be saved and restored.

    A loader may also have ``shared_position(state_dict)``: the part of such a state that is the same on every rank, or
    None. A run with another number of ranks goes on from that; without it, each rank's position is its own, and only
    the same number of ranks can resume.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


SEVERAL_OPTIMIZERS = "several: pass one, and the state of the others as extra= (docs/how-to/checkpoints.md)"


@dataclass(frozen=True, slots=True)
class Trainee:
    """The objects of one training script that a checkpoint covers."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    loader: Stateful | None = None

    def __post_init__(self) -> None:
        """Raises UsageError where some of it has no state that could be saved, or none that other ranks could use."""
        savers.mend()
        if not hasattr(self.model, "modules"):
            raise UsageError(f"the model is a {type(self.model).__name__}, no torch.nn.Module",
                             hint="several models: torch.nn.ModuleDict")  # fmt: skip
        if isinstance(self.optimizer, (tuple, list, dict)):  # else a wrapper, or what stands for a copied one
            raise UsageError(f"the optimizer is a {type(self.optimizer).__name__}, no torch.optim.Optimizer",
                             hint=SEVERAL_OPTIMIZERS)  # fmt: skip
        for kind in (*map(type, self.model.modules()), type(self.optimizer)):
            if hint := UNSUPPORTED.get(kind.__name__):
                raise UsageError(f"state within {kind.__name__} cannot be saved here", hint=hint)
        for name, part in self.parts.items():
            if part is not None and not all(hasattr(part, one) for one in ("state_dict", "load_state_dict")):
                raise UsageError(
                    f"{name}= is a {type(part).__name__}, which has no state_dict() and load_state_dict()",
                    hint="pass torchdata's StatefulDataLoader, or an ElasticLoader around this one"
                    if name == LOADER
                    else f"leave {name}= out, or pass an object that has both",
                )

    @property
    def parts(self) -> dict[str, Stateful | None]:
        """All objects beside model and optimizer, by the name that their state is stored under."""
        return {**self.shared_parts(), LOADER: self.loader}

    def rank_payload(self) -> dict[str, Any]:
        """Each rank's own state."""
        payload: dict[str, Any] = {"rng": savers.capture()}
        if self.loader is not None:
            payload[LOADER] = as_plain(self.loader_state())
        return payload

    def loader_state(self) -> Any:
        """Where the loader is. Until the first step after a load that is what was loaded, and empty at step 0: some
        loaders that are asked make their iterator, in the order of an epoch that the script has not set yet.
        """
        if self.loader is None:
            return None
        if SAVERS.first_step is not None:
            if (loaded := SAVERS.loaded) is None or loaded.loader is not self.loader:
                if SAVERS.first_step == 0:
                    return {}
            elif loaded.state is not None and loaded.step == SAVERS.first_step:
                return original(copy.deepcopy(loaded.state))
        return self.loader.state_dict()

    def shared_parts(self) -> dict[str, Stateful | None]:
        """Parts that are equal on every rank beside model and optimizer, by the name that they are stored under."""
        return {SCHEDULER: self.scheduler, SCALER: self.scaler}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences between a checkpoint and the objects that it is loaded into."""

    missing: frozenset[str] = frozenset()
    """Names of ``Trainee.parts`` that may start anew where the checkpoint has no state for them."""

    cast: bool = False
    """Weights may be of another dtype than the model's."""

    @classmethod
    def of(cls, allow_missing: Collection[str], *, allow_cast: bool) -> Tolerance:
        """Raises UsageError where ``allow_missing`` names something else than a scheduler, scaler or loader."""
        given = {allow_missing} if isinstance(allow_missing, str) else {*allow_missing}
        if unknown := sorted(given - {LOADER, SCHEDULER, SCALER}):
            raise UsageError(
                f"allow_missing names {', '.join(map(repr, unknown))}",
                hint=f"it takes {LOADER!r}, {SCHEDULER!r} and {SCALER!r}",
            )
        return cls(frozenset(given), cast=allow_cast)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DDP and ``torch.compile``, whose wrappers rename every weight."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def position_number(loader: Stateful | None, own: Mapping[str, Any]) -> int:
    """63 bits of the position in ``own`` that every rank must have alike; 0 where each has one of its own."""
    position = shared_position(loader, own)
    if position is None:
        return 0
    text = json.dumps(as_json(position), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 or 1


def shared_position(loader: Stateful | None, own: Mapping[str, Any]) -> Any:
    """The part of the loader's state in ``own`` that is the same on every rank; None where there is none."""
    if own.get(LOADER) == {}:  # saved before the first batch
        return {}
    of = getattr(loader, "shared_position", None)
    return of(original(own[LOADER])) if of is not None and LOADER in own else None


def load_part(name: str, part: Stateful | None, payload: Mapping[str, Any]) -> None:
    """Give ``part`` the state that was stored for it; a state or part without a counterpart is logged.

    Raises:
        CheckpointError: it cannot take that state.
    """
    if part is not None and name in payload:
        if name == LOADER and payload[name] == {}:  # saved before the first batch: it is as it was made
            return
        try:
            part.load_state_dict(original(copy.deepcopy(payload[name])))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the {name} cannot take up the state that the checkpoint has for it: {error!r}",
                hint=f"pass a {name} of the kind that was saved; with a re-run machine, that is the machine",
            ) from error
    elif part is not None:
        log.warning("the checkpoint holds no %s state: the %s starts anew, as allow_missing says", name, name)
    elif name in payload:
        log.warning("the checkpoint holds %s state, and no %s was passed to load it into", name, name)


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
        return cls(part, tuple(_model_leaves(state)), group_names(trainee))


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
    model = unwrapped(trainee.model)
    state._put(between.leaves if between is not None else _model_leaves(model.state_dict()), with_objects=leads)
    buffers = model.named_buffers(remove_duplicate=False)
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


def _model_leaves(state: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a model's state with its path."""
    for name, value in state.items():
        yield from flatten((MODEL, plain_name(name)), value, _is_tensor)


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
