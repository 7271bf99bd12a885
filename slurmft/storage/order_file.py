"""The file by which a user asks a run for a fault: believed only when the run's own user has written it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.storage.patience import writing
from slurmft.system.files import FORMAT, parse_json, write_json
from slurmft.system.opening import open_regular

ORDER_FILE = "INJECT"
MAX_AGE_S = 300.0
"""An older order was meant for an attempt that is gone; clocks of machines may differ by less."""

MAX_BYTES = 4096


def is_pending(run: Path) -> bool:
    """Whether an order waits to be taken."""
    return (run / ORDER_FILE).exists()


def give_order(run: Path, order: Mapping[str, Any]) -> None:
    """Leave an order for the run's supervisor, readable by this user alone.

    Raises:
        StorageError: it cannot be written.
    """
    with writing(run / ORDER_FILE):
        write_json(run / ORDER_FILE, order, mode=0o600)


def withdraw_order(run: Path) -> None:
    """Remove the order that waits, if one still does."""
    (run / ORDER_FILE).unlink(missing_ok=True)


def take_order(run: Path) -> dict[str, Any] | None:
    """The order that waits, removing it; None when there is none.

    Raises:
        StorageError: the file is not an order of this user; it is removed all the same.
    """
    path = run / ORDER_FILE
    try:
        descriptor = open_regular(path, follow=False, owners={os.getuid()})
        try:
            status, text = os.fstat(descriptor), os.read(descriptor, MAX_BYTES)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, not ours, or not ours to read
        path.unlink(missing_ok=True)
        raise StorageError(f"{path} is not to be trusted: it {error.strerror}") from error
    path.unlink(missing_ok=True)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StorageError(f"{path} can be read or written by others (mode {stat.S_IMODE(status.st_mode):o})")
    if time.time() - status.st_mtime > MAX_AGE_S:
        raise StorageError(f"{path} is {time.time() - status.st_mtime:.0f} s old: it was meant for an earlier attempt")
    return _parsed(text, path)


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict) or type(value.get("format")) is not int or value["format"] > FORMAT:
        raise StorageError(f"{path} is not an order that this slurmft understands")
    return value
