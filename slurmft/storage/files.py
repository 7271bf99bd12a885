"""Atomic, versioned files on a shared filesystem.

Owns how bytes become durable. Knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError

FORMAT = 1
"""Version written into every JSON file; a reader refuses anything newer and tolerates unknown keys."""


def fsync_folder(folder: Path) -> None:
    """Make renames and unlinks inside ``folder`` survive a power cut.

    Filesystems that cannot fsync a folder (some network ones answer EINVAL) keep the guarantees they have.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_atomically(
    path: Path, text: str, *, mode: int = 0o600, durable: bool = True, group: int | None = None
) -> None:
    """Readers see the old file or the new one, never part of either; even after a power cut when it is ``durable``.

    The file gets the ``group`` that is given where its owner is a member of it.

    Raises:
        OSError: the old file is untouched and no temporary file is left.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if group is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), -1, group)
            os.fchmod(stream.fileno(), mode)
            if durable:
                os.fsync(stream.fileno())
        os.replace(name, path)  # noqa: PTH105 - same folder, so the rename cannot cross filesystems
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace ``path`` by ``value`` with the format version added; atomic, and durable unless that is not asked for.

    Raises:
        OSError: the old file is untouched.
    """
    text = json.dumps({"format": FORMAT, **value}, sort_keys=True) + "\n"
    replace_atomically(path, text, mode=mode, durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, or None when there is no such file.

    Raises:
        StorageError: the file is not a JSON object.
        NewerFormat: a newer slurmft wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}", hint="move it away and run again") from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} does not hold a JSON object", hint="move it away and run again")
    if not isinstance(version := value.get("format"), int):
        raise StorageError(f"{path} does not say which format it has", hint="move it away and run again")
    if version > FORMAT:
        raise NewerFormat(f"{path} has format {version!r}; this slurmft reads up to {FORMAT}", hint="upgrade slurmft")
    return value
