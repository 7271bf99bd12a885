"""One rank's own state at the newest step boundaries, in shared memory, so that it outlives the rank.

When a rank dies, healthy replicas still have the weights, but not the dead rank's random numbers and its place in the
data. Both are noted here after each step, and never before its end: random numbers that a rank draws at the end of a
step, perhaps in rare steps only, cannot be predicted.

    <memory folder>/rank-<rank>.record     six in turns: number, step, format, generation, length, JSON, number again
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import torch

from slurmft.errors import UsageError
from slurmft.system.opening import open_regular, read_bytes
from slurmft.trainer import rng

CAPACITY_BYTES = 256 * 1024
_HEAD = struct.Struct("=qqqqq")
_FORMAT = 2
"""Lower ones were notes of steps that were not over."""

_NUMBER = struct.Struct("=q")
NOTES = 6
"""Of more steps than a host may be ahead of its GPU (``device_steps``)."""

SIZE_BYTES = NOTES * CAPACITY_BYTES


def record_file(folder: Path, rank: int) -> Path:
    """Where ``rank`` notes its own state."""
    return folder / f"rank-{rank}.record"


class RankRecord:
    """The writing side: one rank's own, in one attempt.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        descriptor = open_regular(record_file(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(descriptor, 0, SIZE_BYTES)
            self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._number, self._generation = 0, generation
        self._random = _RandomText()

    def note(self, step: int, loader: dict[str, Any] | None) -> None:
        """Note this rank's generators and its place in the data as those after ``step`` steps.

        Raises:
            UsageError: the loader's state is more than JSON can hold.
        """
        text = b'{"rng":' + self._random.now() + b',"loader":' + _as_json(loader) + b"}"
        if len(text) > CAPACITY_BYTES - _HEAD.size - _NUMBER.size:
            raise UsageError(f"the loader's state has {len(text)} bytes")
        self._number += 1
        at, memory = self._number % NOTES * CAPACITY_BYTES, self._memory
        _NUMBER.pack_into(memory, at + CAPACITY_BYTES - _NUMBER.size, 0)
        _HEAD.pack_into(memory, at, self._number, step, _FORMAT, self._generation, len(text))
        memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        _NUMBER.pack_into(memory, at + CAPACITY_BYTES - _NUMBER.size, self._number)


def read_record(folder: Path, rank: int, step: int, generation: int) -> dict[str, Any] | None:
    """The own state of ``rank`` after ``step`` steps of that attempt, as a checkpoint holds it; None if unknown."""
    try:
        memory = read_bytes(record_file(folder, rank))
    except OSError:
        return None
    newest: tuple[int, bytes] | None = None
    for at in range(0, len(memory), CAPACITY_BYTES):
        block = memory[at : at + CAPACITY_BYTES]
        if len(block) < CAPACITY_BYTES:
            continue
        number, noted, version, by, length = _HEAD.unpack_from(block)
        (end,) = _NUMBER.unpack_from(block, CAPACITY_BYTES - _NUMBER.size)
        if (
            number
            and number == end
            and (noted, version, by) == (step, _FORMAT, generation)
            and 0 < length <= CAPACITY_BYTES - _HEAD.size - _NUMBER.size
            and (newest is None or number > newest[0])
        ):
            newest = number, block[_HEAD.size : _HEAD.size + length]
    return None if newest is None else _decoded(newest[1])


def _as_json(loader: dict[str, Any] | None) -> bytes:
    try:
        text = json.dumps(loader)
        if json.loads(text) == loader:
            return text.encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise UsageError("the loader's state is not made of plain numbers, strings, lists and dicts")


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        state = value["rng"]
        for name in ("torch", "cuda"):
            if name in state:
                state[name] = torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.uint8)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return {"rng": state} | ({} if value.get("loader") is None else {"loader": value["loader"]})


class _RandomText:
    """This process's generators in JSON; an unused generator costs a comparison."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}

    def now(self) -> bytes:
        parts = [self._part("python", random.getstate(), json.dumps)]
        parts.append(self._part("torch", torch.get_rng_state().numpy().tobytes(), _quoted))
        if (numpy := sys.modules.get("numpy")) is not None:
            state = numpy.random.get_state(legacy=False)
            inner = state["state"]
            key = (inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])
            parts.append(self._part("numpy", key, lambda _: json.dumps(rng.plain(state))))
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            parts.append(self._part("cuda", torch.cuda.get_rng_state().numpy().tobytes(), _quoted))
        return ("{" + ",".join(parts) + "}").encode()

    def _part(self, name: str, state: Any, encode: Any) -> str:
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = self._known[name] = (state, f'"{name}":{encode(state)}')
        return known[1]


def _quoted(raw: bytes) -> str:
    return f'"{raw.hex()}"'
