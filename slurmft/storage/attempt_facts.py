"""Facts that a worker leaves in its attempt's folder for the supervisor, beside logs and errors. Never commands."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.system.files import read_json, write_json

BATCH_FILE = "micro-batch.json"
RESUMING_FILE = "resuming.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedBatches:
    """The micro-batches that a trainer asked for, and the number of pieces in which it had to compute them."""

    asked: tuple[int, ...]
    divisor: int


def note_batches(folder: Path, asked: Collection[int], divisor: int) -> None:
    """Leave it; a folder that cannot take it does not end the attempt."""
    with contextlib.suppress(OSError):
        write_json(folder / BATCH_FILE, {"asked": sorted(asked), "divisor": divisor}, durable=False)


def noted_batches(folder: Path) -> AskedBatches | None:
    """The facts that were left; None where there are none that can be believed."""
    with contextlib.suppress(StorageError):
        value = read_json(folder / BATCH_FILE) or {}
        asked, divisor = value.get("asked"), value.get("divisor")
        if isinstance(asked, list) and asked and _positive(*asked, divisor):
            return AskedBatches(asked=tuple(asked), divisor=int(divisor or 1))
    return None


def note_resuming(folder: Path, checkpoint: str, *, source: str = "") -> None:
    """Leave the name of the checkpoint folder that is about to be read, and from where; a later one replaces it."""
    with contextlib.suppress(OSError):
        write_json(folder / RESUMING_FILE, {"checkpoint": checkpoint, "source": source}, durable=False)


def noted_resuming(folder: Path) -> str | None:
    """The checkpoint that the attempt began with, as far as is known."""
    with contextlib.suppress(StorageError):
        name = (read_json(folder / RESUMING_FILE) or {}).get("checkpoint")
        if isinstance(name, str) and name and Path(name).name == name:
            return name
    return None


def noted_source(folder: Path) -> str:
    """Where the attempt's state was read from, in words; empty where nothing was read, or that is unknown."""
    with contextlib.suppress(StorageError):
        source = (read_json(folder / RESUMING_FILE) or {}).get("source")
        if isinstance(source, str):
            return source[:500]
    return ""


def _positive(*values: object) -> bool:
    return all(type(value) is int and value > 0 for value in values)
