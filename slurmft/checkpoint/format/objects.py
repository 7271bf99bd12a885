"""Values that are not tensors, as the bytes of torch.save: small, and checked to load without running code."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from slurmft.errors import CheckpointError

_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Packed:
    """One object, ready to be placed in an image."""

    key: str
    data: bytes


class ObjectPacker:
    """Packs the same keys again and again; unchanged values cost a comparison."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, bytes]] = {}

    def pack(self, objects: Mapping[str, Any]) -> list[Packed]:
        """Each object's bytes, in order; later changes of the objects do not matter.

        Raises:
            CheckpointError: one of them would be refused at load, which is reported now rather than at the resume.
        """
        packed, fresh = [], {}
        for key, value in objects.items():
            known = self._last.get(key)
            if known is not None and _is_same(known[0], value):
                fresh[key] = known
            else:
                data = to_bytes(key, value)
                if _is_plain(value) and not _has_tensor(value):
                    fresh[key] = copy.deepcopy(value), data  # a copy: the value may grow in place
                packed.append(Packed(key, data))
                continue
            packed.append(Packed(key, known[1]))
        self._last = fresh
        return packed


def to_bytes(key: str, value: Any) -> bytes:
    """``value`` in the form of torch.save.

    Raises:
        CheckpointError: it cannot be saved, or torch.load(weights_only=True) refuses it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        if _is_plain(value):
            return stream.getvalue()
        stream.seek(0)
        unsafe = sorted(get_unsafe_globals_in_checkpoint(stream))
        if not unsafe:
            from_bytes(stream.getvalue())
            return stream.getvalue()
        reason, cause = f"it holds {', '.join(unsafe)}", None
    except Exception as error:  # noqa: BLE001 - any error of the object's own code
        reason, cause = f"{type(error).__name__}: {str(error)[:300]}", error
    raise CheckpointError(
        f"{key} cannot be part of a checkpoint, torch.load(weights_only=True) would refuse it: {reason}",
        hint="save plain numbers, strings, lists, dicts and tensors only",
    ) from cause


def from_bytes(data: bytes | bytearray | memoryview) -> Any:
    """The reverse of ``to_bytes``, tensors on the CPU; runs no code that the bytes bring along."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _is_plain(value: Any) -> bool:
    """Whether it is made of nothing but what torch.load(weights_only=True) always takes."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind in (list, tuple):
        return all(_is_plain(each) for each in value)
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return bool(kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


def _is_same(first: Any, second: Any) -> bool:
    """Equal in type and value, to the last bit of a number."""
    if type(first) is not type(second):
        return False
    if type(first) in (list, tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if type(first) in (dict, OrderedDict):
        return list(first) == list(second) and all(_is_same(first[key], second[key]) for key in first)
    if type(first) is float:
        return bool(first.hex() == second.hex())  # 0.0 is not -0.0 here, and NaN is NaN
    return bool(first == second)
