"""One file of a checkpoint: written durably with its hash, verified before it is believed.

Knows how bytes reach the disk and come back; knows nothing of ranks, folders or what the values mean.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
import xxhash
from torch.serialization import get_unsafe_globals_in_checkpoint

from slurmft.checkpoint.catalog import FileRecord
from slurmft.errors import CheckpointError

_READ_BYTES = 4 << 20


class Damage(IntEnum):
    """What is wrong with a file; an integer, so that ranks can tell each other."""

    NONE = 0
    MISSING = 1
    TRUNCATED = 2
    CHANGED = 3
    UNREADABLE = 4
    NEWER = 5
    MISFIT = 6
    QUARANTINED = 7
    GIVEN_UP = 8
    """Quarantined, and where nothing else is left the run begins anew."""

    @property
    def text(self) -> str:
        """Reads on after the file's name."""
        return _DAMAGE_TEXT[self]


_DAMAGE_TEXT = {
    Damage.NONE: "is intact",
    Damage.MISSING: "is missing",
    Damage.TRUNCATED: "has the wrong size",
    Damage.CHANGED: "has the wrong digest",
    Damage.UNREADABLE: "cannot be read",
    Damage.NEWER: "was written by a newer slurmft",
    Damage.QUARANTINED: "belongs to a quarantined checkpoint",
    Damage.GIVEN_UP: "belongs to a quarantined checkpoint",
    Damage.MISFIT: "does not fit this model or optimizer",
}


class Damaged(Exception):
    """A file of a checkpoint cannot be used; never leaves this package."""

    def __init__(self, damage: Damage, file_name: str, detail: str = "") -> None:
        super().__init__(f"{file_name} {damage.text}" + (f": {detail}" if detail else ""))
        self.damage = damage
        self.file_name = file_name


class _HashingFile:
    """Passes bytes on to a file and hashes them on the way: reading them back would cost a second pass.

    After a failed write it swallows the rest and keeps the error for ``record``: torch's archive writer is C++ that
    buries or aborts on an exception from below, while "disk full" is what the user needs to see.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._size_bytes = 0
        self._error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self._error is None:
            try:
                self._stream.write(data)
            except OSError as error:
                self._error = error
            self._hash.update(data)
            self._size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: ``write_payload`` flushes once, where an error can be handled."""

    def record(self) -> FileRecord:
        if self._error is not None:
            raise self._error
        return FileRecord(self._size_bytes, self._hash.hexdigest())


def write_payload(path: Path, payload: dict[str, Any]) -> FileRecord:
    """Write a new file durably (fsync) and say what was written. The folder's own fsync is the caller's.

    Raises:
        OSError: the file could not be written completely.
        CheckpointError: the payload holds something that ``weights_only`` would refuse at load; better told now than
            at the resume that needs it.
    """
    with path.open("xb") as stream:
        hashing = _HashingFile(stream)
        torch.save(payload, cast("IO[bytes]", hashing))
        record = hashing.record()
        stream.flush()
        os.fsync(stream.fileno())
    if unsafe := get_unsafe_globals_in_checkpoint(path):
        raise CheckpointError(
            f"{path.name} would hold {', '.join(sorted(unsafe))}, which torch.load(weights_only=True) refuses",
            hint="save plain numbers, strings, lists, dicts and tensors only",
        )
    return record


def verify_file(path: Path, record: FileRecord) -> None:
    """Return when the file's bytes are exactly those that were written.

    Raises:
        Damaged: they are not, or cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size != record.size_bytes:
                raise Damaged(Damage.TRUNCATED, path.name)
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except FileNotFoundError:
        raise Damaged(Damage.MISSING, path.name) from None
    except OSError as error:
        raise Damaged(Damage.UNREADABLE, path.name, str(error)) from error
    if digest.hexdigest() != record.xxh3:
        raise Damaged(Damage.CHANGED, path.name)


def read_payload(path: Path) -> dict[str, Any]:
    """The values in a file, tensors on the CPU.

    Raises:
        Damaged: torch cannot load it, or it holds no dict.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Damaged(Damage.MISSING, path.name) from None
    except MemoryError:
        raise  # says nothing about the file
    except Exception as error:
        # Damaged bytes make torch raise RuntimeError, UnpicklingError, EOFError, KeyError, UnicodeDecodeError, ...
        raise Damaged(Damage.UNREADABLE, path.name, f"{type(error).__name__}: {error}") from error
    if not isinstance(payload, dict):
        raise Damaged(Damage.UNREADABLE, path.name, "it holds no dict")
    return payload
