"""Small notes of the newest steps in shared memory, so that they outlive the process that writes them. No torch.

    <memory folder>/rank-<rank>.record     one rank's own state; /lead.record: what rank 0 alone has
    NOTES turns of equal size, each: number, step, format, generation, length, digest, payload ... number again

A turn is only believed while both of its numbers agree and its payload has that digest: a note that was cut off is
none, and so is one that is being written over, whatever order another core sees the stores in.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import xxhash

from slurmft.errors import UsageError
from slurmft.system.opening import open_regular

NOTES = 6
"""Of more steps than a host may be ahead of its GPU (``device_steps``)."""

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
