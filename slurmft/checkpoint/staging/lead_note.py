"""What rank 0 alone has at a boundary, noted after each step: the run's ``extra``, and buffers, such as BatchNorm's.

DDP leaves each rank with buffers of its own, and those of rank 0 count: it sends them to all before every step. So they
must outlive rank 0. Where its model lies on a GPU they are not noted, as the host must not wait for them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slurmft.checkpoint.format.plain_state import as_json
from slurmft.checkpoint.staging.note_file import OVERHEAD_BYTES, NoteFile, read_note
from slurmft.errors import UsageError
from slurmft.storage.memory_folder import PEERS
from slurmft.trainer.savers import SAVERS
from slurmft.trainer.streams import is_on_device

Extra = Callable[[], Mapping[str, Any]]

EXTRA_BYTES = 256 * 1024
MAX_BUFFER_BYTES = 4 << 20
"""More is not noted: a copy of them after each step would cost more than a failure that hits rank 0."""

_LENGTH = struct.Struct("=q")
_ALIGNED = 64


def lead_file(folder: Path) -> Path:
    """Where rank 0 notes."""
    return folder / "lead.record"


@dataclass(frozen=True, slots=True)
class LeadNote:
    """One note, as it is read."""

    era: int
    """As in ``rank_records``."""

    extra: Mapping[str, Any] | None
    """In types that JSON takes (``plain_state.original`` turns them back); None where the run gives none."""

    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    has_buffers: bool = False


class LeadRecord:
    """The writing side, on rank 0, in one attempt.

    Args:
        extra: asked after every step; None where the run has none.
        buffers: copies of the model's buffers; their values are noted when ``note`` is called.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, generation: int, extra: Extra | None, buffers: Mapping[str, torch.Tensor]) -> None:
        self.extra = extra
        self._live = list(buffers.values()) if can_be_noted(buffers) else []
        self.has_buffers = bool(self._live)
        self._raw, self._views = _room(self._live)
        self._names = json.dumps(
            [[name, _short(one.dtype), list(one.shape)] for name, one in buffers.items()] if self._live else []
        ).encode()
        capacity = EXTRA_BYTES + len(self._names) + len(self._raw) + OVERHEAD_BYTES
        self.file = NoteFile(lead_file(folder), generation, capacity)

    def note(self, step: int) -> bytes:
        """Note what is so after ``step`` steps; returns the note.

        Raises:
            UsageError: the extra is more than JSON can hold, or too long.
        """
        extra = b"null" if self.extra is None else _as_json(self.extra() or {})  # as a save takes it
        if self._views:
            torch._foreach_copy_(self._views, self._live)
        text = b'{"era":%d,"extra":%b,"buffers":%b}' % (SAVERS.loads, extra, self._names)
        payload = b"".join((_LENGTH.pack(len(text)), text, self._raw.numpy().tobytes()))
        try:
            self.file.note(step, payload)
        except UsageError as error:
            raise UsageError(f"extra is too long: {error.what}") from None
        return payload


def can_be_noted(buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether there are some, in main memory, and small."""
    values = buffers.values()
    plain = all(one.layout is torch.strided and not is_on_device(one) for one in values)
    return plain and 0 < sum(one.nbytes for one in values) <= MAX_BUFFER_BYTES


def read_lead(folder: Path, step: int, generation: int) -> LeadNote | None:
    """Rank 0's note on that step of that attempt; None where neither rank 0 nor a copy of it is on this node."""
    payload = raw_lead(folder, step, generation)
    return None if payload is None else decoded(payload)


def raw_lead(folder: Path, step: int, generation: int) -> bytes | None:
    """The same, as it travels."""
    for place in (folder, folder / PEERS):
        if (payload := read_note(lead_file(place), step, generation)) is not None:
            return payload
    return None


def decoded(payload: bytes) -> LeadNote | None:
    """A note's content; None where it is damaged."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        value = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
        raw = torch.frombuffer(bytearray(payload[_LENGTH.size + length :]) or bytearray(1), dtype=torch.uint8)
        likes = [(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in value["buffers"]]
        views = _views(raw, [(dtype, shape) for _, dtype, shape in likes])
        buffers = {name: view.clone() for (name, _, _), view in zip(likes, views, strict=True)}
        extra = value["extra"]
        if not (type(value["era"]) is int and (extra is None or isinstance(extra, dict))):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, struct.error):
        return None
    return LeadNote(value["era"], extra, buffers, has_buffers=bool(buffers))


def _as_json(extra: Mapping[str, Any]) -> bytes:
    value = as_json(dict(extra))
    try:
        text = json.dumps(value)
        if json.dumps(json.loads(text)) == text:  # as text: NaN is a value, too
            return text.encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise UsageError("extra is not made of plain numbers, strings, lists, dicts and small tensors")


def _room(likes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    raw = torch.zeros(sum(_aligned(one.nbytes) for one in likes), dtype=torch.uint8)
    return raw, _views(raw, [(one.dtype, one.shape) for one in likes])


def _views(raw: torch.Tensor, likes: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.Tensor]:
    views, at = [], 0
    for dtype, shape in likes:
        length = shape.numel() * dtype.itemsize
        views.append(raw[at : at + length].view(dtype).view(shape))
        at += _aligned(length)
    return views


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
