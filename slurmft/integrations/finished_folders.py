"""Which of a framework's checkpoint folders are finished on every rank: those with a marker, written last.

    output/checkpoint-40/...                  files of the framework, from all ranks
    output/checkpoint-40/slurmft_finished.json    step, ranks, and the size in bytes of each file beside it
    output/slurmft_checkpoints.json           folders without a marker that were there before the first one

A folder without a marker counts only where slurmft has never watched its parent, or has found it there at first; its
files are then looked at for what is missing or cut off.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.storage.fence import check_fence
from slurmft.system.files import fsync_folder, read_json, write_json
from slurmft.system.opening import opened, read_part, trusted_owners

MARKER, LIST = "slurmft_finished.json", "slurmft_checkpoints.json"
_FOLDER = re.compile(r"checkpoint-([0-9]{1,15})")
_END_OF_ZIP, _END_BYTES, _ZIP_TAIL_BYTES = b"PK\x05\x06", 22, 65_557
_MAX_HEADER_BYTES = 100_000_000

log = logging.getLogger(__name__)


def step_folders(parent: Path) -> dict[int, Path]:
    """The folders ``checkpoint-STEP`` in ``parent`` by step, lowest first; none where there is no such parent.

    Those of users who are not trusted there count for nothing, independent of what lies in them.

    Raises:
        OSError: it cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        found, owners = dict[int, Path](), trusted_owners(parent)
        for entry in entries:
            if not (match := _FOLDER.fullmatch(entry.name)) or not entry.is_dir(follow_symlinks=False):
                continue
            if (owner := entry.stat(follow_symlinks=False).st_uid) in owners:
                found[int(match[1])] = Path(entry.path)
            else:
                log.warning("%s belongs to user id %d, and is ignored", entry.path, owner)
        return dict(sorted(found.items()))
    return {}


def finished_steps(parent: Path) -> list[int]:
    """The steps whose folders are finished, lowest first.

    Raises:
        OSError: the folder cannot be read.
    """
    older = _older(parent)
    return [step for step, folder in step_folders(parent).items() if _is_finished(folder, step, older)]


def begin(parent: Path, start: int) -> None:
    """A training that goes on from step ``start`` will save in ``parent``: believe no folder of a later step, which it
    may write anew. The first time, remember which folders without a marker are there. One process calls this.

    Raises:
        OSError: it cannot be written there.
        StorageError: a newer attempt owns the run.
    """
    check_fence()
    parent.mkdir(parents=True, exist_ok=True)
    older, folders = _older(parent), step_folders(parent)
    if older is None:
        older = {folder.name for folder in folders.values() if not (folder / MARKER).exists()}
    for step, folder in folders.items():
        if step > start:
            if _is_finished(folder, step, older):
                log.warning(
                    "training goes on from step %d: %s, of another training, is not resumed from", start, folder
                )
            with contextlib.suppress(FileNotFoundError):
                (folder / MARKER).unlink()
    if not folders and not (parent / LIST).exists():
        return  # scripts up to transformers 4.56 refuse a folder that is not empty: until the first save
    kept = sorted(older & {folder.name for step, folder in folders.items() if step <= start})
    write_json(parent / LIST, {"unmarked": kept}, mode=0o644)


def about_to_save(parent: Path) -> None:
    """Before the first save of a folder that ``begin`` has left empty: what is there from now on needs a marker.

    Raises:
        OSError: it cannot be written there.
    """
    if not (parent / LIST).exists():
        parent.mkdir(parents=True, exist_ok=True)
        write_json(parent / LIST, {"unmarked": []}, mode=0o644)


def make_durable(folder: Path) -> None:
    """Return when everything in ``folder`` is on the disk, as far as this host has written it.

    Raises:
        OSError: it cannot be.
    """
    for path in _files(folder):
        with opened(path) as descriptor:
            os.fsync(descriptor)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        fsync_folder(path)


def mark(folder: Path, step: int, ranks: int) -> None:
    """Every rank has written its part of ``folder``: it may be resumed from. One process calls this, last of all.

    Raises:
        OSError: it is not marked.
        Fenced: a newer attempt owns the run.
    """
    check_fence()
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    write_json(folder / MARKER, {"step": step, "ranks": ranks, "files": files}, mode=0o644)
    fsync_folder(folder.parent)


def withdraw(folder: Path) -> None:
    """The folder is about to be written anew, or removed."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MARKER).unlink()
        fsync_folder(folder)


def prune(parent: Path, *, limit: int, newest: int, best: str | None) -> None:
    """Keep ``limit`` finished folders: that of step ``newest``, the ``best`` one, and the newest others; both of the
    former also where the limit is lower. Unfinished ones of earlier steps go, too.

    Raises:
        OSError: the folder cannot be read.
        Fenced: a newer attempt owns the run.
    """
    check_fence()
    folders, finished = step_folders(parent), finished_steps(parent)
    if newest not in finished:  # without it the others are all there is
        return
    protected = {newest} | {step for step, folder in folders.items() if best and folder.name == Path(best).name}
    others = [step for step in finished if step not in protected]
    room = max(0, limit - len(protected))
    going = others[: max(0, len(others) - room)]
    going += [step for step in folders if step < newest and step not in finished and step not in protected]
    for step in going:
        withdraw(folders[step])
        shutil.rmtree(folders[step], ignore_errors=True)


def _older(parent: Path) -> set[str] | None:
    """Names of folders that count without a marker; None where all do, as no list was ever written there."""
    try:
        if (parent / LIST).is_symlink() or (parent / LIST).lstat().st_uid not in trusted_owners(parent):
            log.warning("%s is another user's, or a link, and is ignored", parent / LIST)
            return None
        listed = read_json(parent / LIST, owners=trusted_owners(parent))
    except FileNotFoundError:
        return None
    except StorageError as error:  # a damaged list is none of names
        log.warning("%s; folders without a marker are not resumed from", error.what)
        return set()
    if listed is None:
        return None
    names = listed.get("unmarked")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _is_finished(folder: Path, step: int, older: set[str] | None) -> bool:
    try:
        owners = trusted_owners(folder.parent)
        if strangers := [path for path in (folder, *folder.rglob("*")) if path.lstat().st_uid not in owners]:
            raise StorageError(f"{strangers[0]} is another user's")
        marker = read_json(folder / MARKER, owners=owners)
    except (OSError, StorageError) as error:
        log.warning("%s is not resumed from: %s", folder, error)
        return False
    try:
        if marker is not None:
            return _fits(marker, folder, step)
        return (older is None or folder.name in older) and _looks_whole(folder, step)
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s is not resumed from: %s", folder, error)
        return False


def _fits(marker: dict[str, Any], folder: Path, step: int) -> bool:
    files = marker.get("files")
    if not isinstance(files, dict) or marker.get("step") != step:
        return False
    wrong = [name for name, size in files.items() if ".." in Path(name).parts or _size(folder / name) != size]
    if wrong:
        log.warning("%s is not resumed from: %s is not what was saved (%d files in all)", folder, wrong[0], len(wrong))
    return not wrong


def _looks_whole(folder: Path, step: int) -> bool:
    """A folder of the Trainer that it finished before slurmft watched: its last file is there, and none is cut off."""
    state = json.loads(read_part(folder / "trainer_state.json", 0, _MAX_HEADER_BYTES))
    if not isinstance(state, dict) or state.get("global_step") != step:
        return False
    ranks = sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob("rng_state_[0-9]*.pth"))
    if ranks != list(range(len(ranks))):
        return False
    return all(_is_whole_file(path) for path in _files(folder))


def _is_whole_file(path: Path) -> bool:
    if path.suffix in (".pt", ".pth", ".bin"):
        tail = read_part(path, -_ZIP_TAIL_BYTES, _ZIP_TAIL_BYTES)  # torch's files are archives, with their table last
        at = tail.rfind(_END_OF_ZIP)
        return at >= 0 and len(tail) == at + _END_BYTES + int.from_bytes(
            tail[at + _END_BYTES - 2 : at + _END_BYTES], "little"
        )
    if path.suffix == ".safetensors":  # github.com/huggingface/safetensors: a length, a header, and that much data
        length = int.from_bytes(read_part(path, 0, 8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            return False
        header = json.loads(read_part(path, 8, length))
        ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
        return path.stat().st_size == 8 + length + max(ends, default=0)
    return True


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != MARKER and not path.name.startswith("."):
            yield path


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1
