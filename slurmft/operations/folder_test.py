"""A real try of what slurmft needs of a filesystem: exclusive files, replacing, locks, and what time it is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

from slurmft.policy.site.doctor import FolderFacts
from slurmft.system.files import replace_atomically


def try_folder(path: Path) -> FolderFacts:
    """What works where ``path`` is or will be: in its nearest folder that exists. Leaves nothing behind."""
    there = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmft-doctor-", dir=there) as name:
            return _tried(there, Path(name), began_s)
    except OSError as error:
        return FolderFacts(path=str(there), error=error.strerror or str(error))


def _tried(there: Path, folder: Path, began_s: float) -> FolderFacts:
    one = folder / "one"
    descriptor = os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(descriptor)
    try:
        os.close(os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        exclusive = False
    except FileExistsError:
        exclusive = True
    before = time.time()
    replace_atomically(one, "new")
    at = one.stat().st_mtime
    return FolderFacts(
        path=str(there), exclusive=exclusive, renames=one.read_text(encoding="utf-8") == "new", flock=_flock(one),
        clock_offset_s=0.0 if before - 1 <= at <= time.time() + 1 else at - before, took_s=time.monotonic() - began_s,
    )  # fmt: skip


def _flock(path: Path) -> str:
    """Whether a lock keeps a second opening of the same file out."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(path.open("r+", encoding="utf-8"))
        second = stack.enter_context(path.open("r+", encoding="utf-8"))
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "works"
        except OSError as error:
            return error.strerror or str(error)
        return "two hold it at once"
