"""Whether the supervisor of an attempt still writes, by the file server's clock alone.

Slurm's answer that a job is gone may be wrong: filtered, of another cluster, of a controller that has lost its state. A
live supervisor touches a file of its attempt every second, which needs no Slurm.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.storage.patience import translated
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.system.opening import open_regular

FRESH_S = 30.0
"""A supervisor that has written since then is not rescued. It is 30 times as long as it pauses between two touches."""

_NAME = "alive"


def touch(run: RunFolder, attempt: Attempt) -> None:
    """Note that the attempt's supervisor lives.

    Raises:
        OSError: the run folder cannot be written.
    """
    path = run.attempts / str(attempt) / _NAME
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def newest(run: RunFolder, owner: Owner) -> float | None:
    """Time of the newest sign of the owner's, by the file server's clock; None where there is none."""
    attempt = f"{owner.job}.{owner.restart}.{owner.cycle}"
    times = [_modified(run.attempts / attempt / _NAME)]
    with contextlib.suppress(StorageError):
        if (run.progress() or {}).get("attempt") == attempt:  # all that earlier versions write
            times.append(_modified(run.path / "progress.json"))
    return max((at for at in times if at is not None), default=None)


def is_fresh(run: RunFolder, owner: Owner) -> bool:
    """Whether the owner has given a sign of life within ``FRESH_S`` seconds.

    Raises:
        StorageError: the run folder cannot be written, which is how the file server is asked for the time.
    """
    now, at = _now(run.path), newest(run, owner)
    return at is not None and now - at < FRESH_S


def seconds_since(run: RunFolder, path: Path) -> float | None:
    """How long ago ``path`` was written, by the file server's clock; None where there is no such file.

    Raises:
        StorageError: the run folder cannot be written.
    """
    now, at = _now(run.path), _modified(path)
    return None if at is None else now - at


def _now(folder: Path) -> float:
    """The file server's time: that of a file that is written now. It also makes a network filesystem look anew."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as stream:
            stream.write(b"?")
            stream.flush()
            return os.fstat(stream.fileno()).st_mtime
    except OSError as error:
        raise translated(f"cannot write {folder}", error) from error


def _modified(path: Path) -> float | None:
    try:
        descriptor = open_regular(path)  # opening asks the file server, a mere stat may not
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
