"""A save that a rank will not finish: it leaves a note in the folder, so that other ranks do not wait or write on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from slurmft.checkpoint.format.image_writing import is_temporary
from slurmft.checkpoint.format.shard_index import image_file, index_file
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import MANIFEST
from slurmft.storage.fence import check_fence
from slurmft.system.files import replace_atomically
from slurmft.system.opening import read_text

_SUFFIX = "_0.gone"
_MAX_NOTE_BYTES = 64 * 1024


def note_file(shard: int) -> str:
    """The small file that says that a shard will not come."""
    return f"__{shard}{_SUFFIX}"


def is_note(name: str) -> bool:
    """Whether a file says so."""
    return name.startswith("__") and name.endswith(_SUFFIX)


def give_up(folder: Path, shard: int, reason: str) -> None:
    """Free a shard's space in the folder of an uncommitted save, and leave a note there; rank 0 frees all of it.

    Never raises: remaining files are removed with the folder, after a later commit. Nothing is touched that may be
    committed: a shard whose receipt is there, and saves that a newer attempt has taken over.
    """
    try:
        check_fence()
    except StorageError:
        return
    if (folder / MANIFEST).exists() or (shard and (folder / index_file(shard)).exists()):
        return
    with contextlib.suppress(OSError):
        # only rank 0 looks around: a listing for each of ten thousand ranks would be a storm
        names = os.listdir(folder) if shard == 0 else [image_file(shard), index_file(shard)]  # noqa: PTH208
        for name in names:
            if not is_note(name):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
        _leave_note(folder / note_file(shard), reason[:1000])


def _leave_note(path: Path, reason: str) -> None:
    """With all of its text from its first moment, since others wait for it; without any where there is no room."""
    try:
        replace_atomically(path, reason.encode(errors="replace").decode(), durable=False)
    except OSError:
        path.touch(mode=0o600)


def reason_of(folder: Path, note: str) -> str:
    """Why the shard of a note will not come; empty where the disk had no room even for that."""
    try:
        return read_text(folder / note, errors="replace", limit_bytes=_MAX_NOTE_BYTES)
    except OSError:
        return ""


def remove_temporary(folder: Path, names: list[str]) -> None:
    """Remove temporary files of killed writers from a folder whose files are all in place."""
    for name in names:
        if is_temporary(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
