"""Atomic, versioned files on a shared filesystem.

Owns how bytes become durable. Knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.system import opening

FORMAT = 1
"""Version written into every JSON file; a reader refuses anything newer and tolerates unknown keys."""

MOVE_AWAY = "move it away and run again"
"""The remedy for a damaged file."""


def refuse_uncreatable(folder: Path) -> None:
    """Return when ``folder`` is there and may be written to, or could be made; nothing is made.

    Raises:
        OSError: as making it would.
    """
    nearest = folder
    while True:
        try:
            status = nearest.stat()
            break
        except FileNotFoundError:
            if nearest.is_symlink():  # its target is missing
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(nearest)) from None
            nearest = nearest.parent
    code = 0
    if not stat.S_ISDIR(status.st_mode):
        code = errno.EEXIST if nearest == folder else errno.ENOTDIR
    elif nearest.parts[:2] in (("/", "proc"), ("/", "sys")):  # the kernel's own, independent of their modes
        code = errno.ENOENT if nearest.parts[1] == "proc" else errno.EPERM
    elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif not os.access(nearest, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        raise OSError(code, os.strerror(code), str(nearest))


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
    path: Path, content: str | bytes, *, mode: int = 0o600, durable: bool = True, group: int | None = None
) -> None:
    """Readers see the old file or the new one, never part of either; even after a power cut when it is ``durable``.

    The file gets the ``group`` that is given where its owner is a member of it.

    Raises:
        OSError: the old file is untouched and no temporary file is left.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with opening.naming(path), os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
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


def replace_link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target``; atomic. A link that is there already is replaced.

    Raises:
        OSError: something else than a link or a file is there, or it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        (link := Path(folder) / "link").symlink_to(target)
        link.replace(path)


def parse_json(text: str | bytes) -> Any:
    """The value in ``text``. A whole number of more than 20 digits comes as NaN: no reader believes it, and no
    arithmetic fails because of its size.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    return _DECODER.decode(text if isinstance(text, str) else text.decode())


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= 20 else math.nan


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def number(value: Any, *, limit: float = 1e15) -> float | None:
    """A number from a state file: finite and not beyond ``limit``; None for anything else."""
    return float(value) if type(value) in (int, float) and -limit <= value <= limit else None


def duration(value: Any) -> float:
    """A duration, or a Unix time, from a state file.

    Raises:
        ValueError: it is none.
    """
    if (found := number(value)) is None or found < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number of seconds")
    return found


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace ``path`` by ``value`` with the format version added; atomic, and durable unless that is not asked for.

    Raises:
        OSError: the old file is untouched.
    """
    text = json.dumps({"format": FORMAT, **value}, sort_keys=True) + "\n"
    replace_atomically(path, text, mode=mode, durable=durable)


def read_json(
    path: Path, *, limit_bytes: int = opening.STATE_LIMIT_BYTES, owners: Collection[int] | None = None
) -> dict[str, Any] | None:
    """The object in ``path``, or None when there is no such file.

    Args:
        owners: user ids that may own the file; None accepts every owner.

    Raises:
        StorageError: it is not a file of at most ``limit_bytes`` with a JSON object, or it belongs to a user that is
            not in ``owners``.
        NewerFormat: a newer slurmft wrote it.
    """
    try:
        text = opening.read_text(path, limit_bytes=limit_bytes, owners=owners)
    except FileNotFoundError:
        return None
    except opening.UnsafeFile as error:
        raise StorageError(f"cannot read {path}: it {error.strerror}", hint=MOVE_AWAY) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}", hint=MOVE_AWAY) from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} does not hold a JSON object", hint=MOVE_AWAY)
    if not isinstance(version := value.get("format"), int):
        raise StorageError(f"{path} does not say which format it has", hint=MOVE_AWAY)
    if version > FORMAT:
        raise NewerFormat(f"{path} has format {version!r}; this slurmft reads up to {FORMAT}", hint="upgrade slurmft")
    return value
