"""The content of a checkpoint: the trainer's objects on one side, plain payloads on the other."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmft.errors import CheckpointError, UsageError
from slurmft.trainer import savers, stateful_loader
from slurmft.trainer.savers import SAVERS

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


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {TAG: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape),
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
        stateful_loader.mend()
        if not hasattr(self.model, "modules"):
            raise UsageError(f"the model is a {type(self.model).__name__}, no torch.nn.Module",
                             hint="several models: torch.nn.ModuleDict")  # fmt: skip
        if not all(hasattr(self.optimizer, one) for one in ("state_dict", "load_state_dict", "param_groups")):
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

    def restore_rng(self, own: Mapping[str, Any]) -> None:
        """Put the random number generators back to where ``rank_payload`` saw them."""
        savers.restore(own["rng"])

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
