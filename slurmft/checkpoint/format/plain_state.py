"""Values of everyday types that ``torch.load(weights_only=True)`` refuses, as values that it takes, and back.

States of loaders and data sets hold numpy's numbers and arrays, sets, deques, ranges and paths. Each is kept as a dict
with a tag; tensors and plain values stay what they are. A type that is not known here stays, too: the save then says
that a load would refuse it, unless ``torch.serialization.add_safe_globals`` allows it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from slurmft.errors import CheckpointError

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
