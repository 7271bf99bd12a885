"""Small notes of the newest steps in shared memory, so that they outlive the process that writes them. No torch.

    <memory folder>/rank-<rank>.record     one rank's own state; /lead.record: what rank 0 alone has
    NOTES turns of equal size, each: number, step, format, generation, length, payload ... number again

A turn is only believed while both of its numbers agree: a note that was cut off is none.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.system.opening import open_regular, read_bytes

NOTES = 6
"""Of more steps than a host may be ahead of its GPU (``device_steps``)."""

_HEAD = struct.Struct("=qqqqq")
_NUMBER = struct.Struct("=q")
_FORMAT = 2
"""Lower ones were notes of steps that were not over."""

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
        _HEAD.pack_into(memory, at, self._number, step, _FORMAT, self.generation, length)
        place = at + _HEAD.size
        for part in parts:
            memory[place : place + len(part)] = part
            place += len(part)
        _NUMBER.pack_into(memory, at + capacity - _NUMBER.size, self._number)


def read_note(path: Path, step: int, generation: int) -> bytes | None:
    """The newest note of that step and generation; None where there is none."""
    try:
        memory = read_bytes(path)
    except OSError:
        return None
    capacity = len(memory) // NOTES
    if capacity <= OVERHEAD_BYTES:
        return None
    newest: tuple[int, bytes] | None = None
    for at in range(0, NOTES * capacity, capacity):
        number, noted, version, by, length = _HEAD.unpack_from(memory, at)
        (end,) = _NUMBER.unpack_from(memory, at + capacity - _NUMBER.size)
        if (
            number
            and number == end
            and (noted, version, by) == (step, _FORMAT, generation)
            and 0 < length <= capacity - OVERHEAD_BYTES
            and (newest is None or number > newest[0])
        ):
            newest = number, memory[at + _HEAD.size : at + _HEAD.size + length]
    return None if newest is None else newest[1]
