"""Small notes of the newest steps in shared memory, so that they outlive the process that writes them, and those that a
keeper takes from other nodes. No torch.

    <memory folder>/rank-<rank>.record     one rank's own state; /lead.record: what rank 0 alone has
    NOTES turns of equal size, each: number, step, format, generation, length, digest, payload ... number again

A turn is only believed while both of its numbers agree and its payload has that digest: a note that was cut off is
none, and so is one that is being written over, whatever order another core sees the stores in.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import xxhash

from slurmft.checkpoint.replicas import SILENCE_S, BadCopy, Wire
from slurmft.errors import UsageError
from slurmft.storage.checkpoint_names import MAX_STEP
from slurmft.system.files import open_regular
from slurmft.system.memory_limits import fits

# --- note file ---

NOTES = 6
"""Of more steps than a host may be ahead of its GPU (``just_in_time.DeviceSteps``)."""

MAX_CAPACITY_BYTES = 8 << 20
"""Of one note, with its frame."""

_HEAD = struct.Struct("=qqqqqQ")
_NUMBER = struct.Struct("=q")
_FORMAT = 3
"""Below 2 were notes of steps that were not over; 2 had no digest."""

OVERHEAD_BYTES = _HEAD.size + _NUMBER.size


class NoteFile:
    """The writing side, of one generation.

    Args:
        capacity_bytes: of one note, with its frame.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, path: Path, generation: int, capacity_bytes: int) -> None:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(descriptor, 0, NOTES * capacity_bytes)
            self._memory = mmap.mmap(descriptor, NOTES * capacity_bytes)
        finally:
            os.close(descriptor)
        self._number, self.generation, self.capacity_bytes = 0, generation, capacity_bytes

    def note(self, step: int, *parts: bytes | memoryview) -> None:
        """Note the parts, one behind the other, as those after ``step`` steps.

        Raises:
            UsageError: they do not fit.
        """
        length, capacity = sum(map(len, parts)), self.capacity_bytes
        if length > capacity - OVERHEAD_BYTES:
            raise UsageError(f"it has {length} bytes")
        self._number += 1
        at, memory = self._number % NOTES * capacity, self._memory
        _NUMBER.pack_into(memory, at + capacity - _NUMBER.size, 0)
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        _HEAD.pack_into(memory, at, self._number, step, _FORMAT, self.generation, length, digest.intdigest())
        place = at + _HEAD.size
        for part in parts:
            memory[place : place + len(part)] = part
            place += len(part)
        _NUMBER.pack_into(memory, at + capacity - _NUMBER.size, self._number)


def read_note(path: Path, step: int, generation: int) -> bytes | None:
    """The newest note of that step and generation; None where there is none."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        capacity = os.fstat(descriptor).st_size // NOTES
        if not OVERHEAD_BYTES < capacity <= MAX_CAPACITY_BYTES:
            return None
        found = [_turn(descriptor, number * capacity, capacity, step, generation) for number in range(NOTES)]
    except (OSError, struct.error):  # begun anew meanwhile
        return None
    finally:
        os.close(descriptor)
    return max((one for one in found if one is not None), default=(0, None))[1]


def _turn(descriptor: int, at: int, capacity: int, step: int, generation: int) -> tuple[int, bytes] | None:
    """The number and the payload of a turn, where it is of that step and generation, and whole.

    Only such a payload is read, and before the number behind it, which its writer takes away first.
    """
    number, noted, version, by, length, digest = _HEAD.unpack(os.pread(descriptor, _HEAD.size, at))
    if (noted, version, by) != (step, _FORMAT, generation) or not 0 < length <= capacity - OVERHEAD_BYTES:
        return None
    payload = os.pread(descriptor, length, at + _HEAD.size)
    (end,) = _NUMBER.unpack(os.pread(descriptor, _NUMBER.size, at + capacity - _NUMBER.size))
    is_whole = number > 0 and number == end and xxhash.xxh3_64_intdigest(payload) == digest
    return (number, payload) if is_whole else None


# --- note taking ---
# Notes of other nodes' ranks, as a keeper takes them into ``peers/`` of its memory folder. No torch.

TAKER_PAUSE_S = 24 * 3600.0
"""Between two notes: a step may be long."""

_NAME = re.compile(r"rank-\d{1,8}|lead")


class NoteTaker:
    """Takes notes from all connections of one keeper.

    Args:
        fence: the oldest generation whose notes are taken.
    """

    def __init__(self, peers: Path, fence: Callable[[], int]) -> None:
        self._peers, self._fence = peers, fence
        self._files: dict[str, NoteFile] = {}
        self._changing = threading.Lock()

    def take(self, wire: Wire, message: Mapping[str, object]) -> NoReturn:
        """Take this note, and all that follow on the connection, until it ends.

        Raises:
            BadCopy, OSError: it has ended, or violates the protocol.
        """
        while True:
            wire.silence_s, wire.deadline = SILENCE_S, time.monotonic() + SILENCE_S
            numbers = [message.get(name) for name in ("note", "generation", "capacity", "bytes")]
            step, generation, capacity, length = (one if type(one) is int else -1 for one in numbers)
            name = message.get("name")
            if not (isinstance(name, str) and _NAME.fullmatch(name) and 0 <= step <= MAX_STEP and generation >= 0
                    and 0 < length < capacity <= MAX_CAPACITY_BYTES):  # fmt: skip
                raise BadCopy("it is no note")
            payload = wire.receive_blob(length)
            wire.send({"answer": self._kept(name, step, generation, capacity, payload)})
            wire.silence_s, wire.deadline = TAKER_PAUSE_S, time.monotonic() + TAKER_PAUSE_S
            message = wire.receive()

    def _kept(self, name: str, step: int, generation: int, capacity: int, payload: bytes) -> str:
        """``kept``, or why not."""
        if generation < (fence := self._fence()):
            return f"generation {generation} is over: this is generation {fence}"
        with self._changing:
            file = self._files.get(name)
            if file is not None and file.generation > generation:
                return f"generation {generation} is over: this is generation {file.generation}"
            try:
                if file is None or (file.generation, file.capacity_bytes) != (generation, capacity):
                    if reason := fits(NOTES * capacity, self._peers):
                        return f"no room: {reason}"
                    self._files.pop(name, None)  # where there is no room, its memory has no file behind it any more
                    file = self._files[name] = NoteFile(self._peers / f"{name}.record", generation, capacity)
                file.note(step, payload)
            except (OSError, UsageError) as error:
                return f"not kept: {error}"
        return "kept"
