"""Facts that a worker leaves in its attempt's folder for the supervisor, beside logs and errors. Never commands."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.system.files import read_as, write_json

BATCH_FILE = "micro-batch.json"
RESUMING_FILE = "resuming.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedBatches:
    """The micro-batches that a trainer asked for, and the number of pieces in which it had to compute them."""

    asked: tuple[int, ...]
    divisor: int

    def __post_init__(self) -> None:
        if not self.asked or min(*self.asked, self.divisor) <= 0:
            raise ValueError("there is no such micro-batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resuming:
    checkpoint: str = ""
    source: str = ""


def note_batches(folder: Path, asked: Collection[int], divisor: int) -> None:
    """Leave it; a folder that cannot take it does not end the attempt."""
    with contextlib.suppress(OSError):
        write_json(folder / BATCH_FILE, {"asked": sorted(asked), "divisor": divisor}, durable=False)


def noted_batches(folder: Path) -> AskedBatches | None:
    """The facts that were left; None where there are none that can be believed."""
    with contextlib.suppress(StorageError):
        return read_as(AskedBatches, folder / BATCH_FILE)
    return None


def note_resuming(folder: Path, checkpoint: str, *, source: str = "") -> None:
    """Leave the name of the checkpoint folder that is about to be read, and from where; a later one replaces it."""
    with contextlib.suppress(OSError):
        write_json(folder / RESUMING_FILE, {"checkpoint": checkpoint, "source": source}, durable=False)


def noted_resuming(folder: Path) -> str | None:
    """The checkpoint that the attempt began with, as far as is known."""
    with contextlib.suppress(StorageError):
        found = read_as(_Resuming, folder / RESUMING_FILE)
        if found is not None and found.checkpoint and Path(found.checkpoint).name == found.checkpoint:
            return found.checkpoint
    return None


def noted_source(folder: Path) -> str:
    """Where the attempt's state was read from, in words; empty where nothing was read, or that is unknown."""
    with contextlib.suppress(StorageError):
        return (read_as(_Resuming, folder / RESUMING_FILE) or _Resuming()).source[:500]
    return ""
