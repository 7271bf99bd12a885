"""Saves in a framework's own format: folders that all ranks fill, files with a digest, markers written last."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from slurmft.checkpoint.agreement import Guard, failure
from slurmft.checkpoint.catalog import own_generation
from slurmft.errors import CheckpointError, StorageError
from slurmft.storage.checkpoint_names import check_fence
from slurmft.system.files import fsync_folder, opened, read_json, read_part, trusted_owners, write_json
from slurmft.trainer.savers import Team

# --- checked files ---
# Files of ``torch.save`` that end with a digest of themselves, and the look at any such file before it is loaded.
#
# The digest is in the comment that archives such as torch's may have, so that ``torch.load`` reads them anywhere. In a
# file without one, the checksums of the parts are looked at, which torch itself does not do.

_HEX, _WORDS = 64, b"slurmft sha256 "
_MARK = (len(_WORDS) + _HEX).to_bytes(2, "little") + _WORDS
"""The end of an archive: the length of its comment, and the comment, of which only the digest is missing."""

_CHUNK_BYTES = 1 << 20
_AS_A_FOLDER = 0x10
_DAMAGES = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError, OverflowError)


def packed(state: Any) -> io.BytesIO:
    """What ``torch.save`` writes, with checksums also where the script has switched them off."""
    buffer, wanted = io.BytesIO(), get_crc32_options()
    set_crc32_options(True)
    try:
        torch.save(state, buffer)
    finally:
        set_crc32_options(wanted)
    return buffer


def with_digest(buffer: io.BytesIO) -> bytes:
    """The content of the file; ``buffer`` is what ``packed`` has returned, and changed."""
    buffer.seek(-2, os.SEEK_END)
    buffer.write(_MARK)
    with buffer.getbuffer() as content:
        digest = hashlib.sha256(content).hexdigest()
    buffer.seek(0, os.SEEK_END)
    buffer.write(digest.encode())
    return buffer.getvalue()


def verify(stream: BinaryIO, path: Path) -> None:
    """Return when the file is as it was written; ``stream`` is at its beginning, then and before.

    Raises:
        CheckpointError: it is torn or damaged, or torch has not written it.
    """
    try:
        wrong = _wrong(stream)
    except _DAMAGES as error:
        wrong = str(error) or type(error).__name__
    if wrong:
        raise CheckpointError(f"{path} is torn or damaged, and not loaded: {wrong}", hint="take an older checkpoint")
    stream.seek(0)


def _wrong(stream: BinaryIO) -> str | None:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - len(_MARK) - _HEX))
    tail = stream.read()
    stream.seek(0)
    if tail.startswith(_MARK):
        digest, left = hashlib.sha256(), size - _HEX
        while left and (part := stream.read(min(left, _CHUNK_BYTES))):
            digest.update(part)
            left -= len(part)
        return None if digest.hexdigest().encode() == tail[-_HEX:] else "its digest is another one"
    if tail[-2:] != b"\0\0":  # the length of a comment
        return "its end is missing"
    with zipfile.ZipFile(stream) as archive:  # torch compresses nothing, and would read a folder as empty
        odd = [one.filename for one in archive.infolist() if one.compress_type or one.external_attr & _AS_A_FOLDER]
        return odd[0] if odd else archive.testzip()


# --- Which of a framework's checkpoint folders are finished on every rank: those with a marker, written last ---
#     output/checkpoint-40/...                  files of the framework, from all ranks
#     output/checkpoint-40/slurmft_finished.json    step, ranks, and the size in bytes of each file beside it
#     output/slurmft_checkpoints.json           folders without a marker that were there before the first one
#
# A folder without a marker counts only where slurmft has never watched its parent, or has found it there at first; its
# files are then looked at for what is missing or cut off.

FINISHED_MARKER, LIST = "slurmft_finished.json", "slurmft_checkpoints.json"
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
        older = {folder.name for folder in folders.values() if not (folder / FINISHED_MARKER).exists()}
    for step, folder in folders.items():
        if step > start:
            if _is_finished(folder, step, older):
                log.warning(
                    "training goes on from step %d: %s, of another training, is not resumed from", start, folder
                )
            with contextlib.suppress(FileNotFoundError):
                (folder / FINISHED_MARKER).unlink()
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
    write_json(folder / FINISHED_MARKER, {"step": step, "ranks": ranks, "files": files}, mode=0o644)
    fsync_folder(folder.parent)


def withdraw(folder: Path) -> None:
    """The folder is about to be written anew, or removed."""
    with contextlib.suppress(FileNotFoundError):
        (folder / FINISHED_MARKER).unlink()
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
        marker = read_json(folder / FINISHED_MARKER, owners=owners)
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
        if path.is_file() and not path.is_symlink() and path.name != FINISHED_MARKER and not path.name.startswith("."):
            yield path


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1


# --- marked folders: they count once a marker is in them ---
#     <root>/step-000000000000042.3.0/    42 steps, saved by generation 3 of the run, its first try
#         ...                             whatever the ranks write
#         complete.json                   written last, by rank 0: names and sizes of all files
#
# A folder without its marker, or with files that differ from it, is never resumed from.

COMPLETE_MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{15})\.(\d{1,9})\.(\d{1,9})")


@dataclass(frozen=True, slots=True, order=True)
class FolderVersion:
    """Which folder of them; a later one is greater."""

    step: int
    generation: int
    serial: int

    @property
    def name(self) -> str:
        return f"step-{self.step:015d}.{self.generation}.{self.serial}"


@dataclass(frozen=True, slots=True)
class Save:
    """A complete one."""

    place: FolderVersion
    path: Path
    world_size: int
    """Ranks that wrote it."""


class MarkedFolders:
    """The saves below one folder. Every method but ``complete`` is a collective of all ranks.

    Args:
        root: on a filesystem that every rank sees; made when it is missing.
        keep: so many complete saves are kept, at least 1.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self._keep = root, max(1, keep)

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Let every rank write its files with ``fill(folder)``, then mark the folder and remove old ones.

        ``fill`` may hold collectives, and must not leave them early on one rank only.

        Raises:
            CheckpointError: nothing was saved, and older saves are untouched; raised by all ranks alike.
            Fenced: a newer attempt owns the run.
        """
        team, guard, serial = Team(), Guard(), 0
        generation = own_generation()
        if team.is_lead:
            with guard:
                self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
                taken = [one.serial for one in self._places() if (one.step, one.generation) == (step, generation)]
                serial = max(taken, default=-1) + 1
                (self.root / FolderVersion(step, generation, serial).name).mkdir(mode=0o700)
        row = team.from_lead([guard.code, serial, generation])
        place = FolderVersion(step, row[2], row[1])
        folder = self.root / place.name
        self._agree(team, guard, [row[0]] if row[0] else [], folder)
        with guard:
            fill(folder)
        self._agree(team, guard, [one[0] for one in team.exchange([guard.code])], folder)
        with guard:  # not earlier: another rank's temporary file would be gone between its listing and its opening
            _sync(folder, everything=team.is_lead)
        self._agree(team, guard, [one[0] for one in team.exchange([guard.code])], folder)
        if team.is_lead:
            with guard:
                check_fence()
                write_json(
                    folder / COMPLETE_MARKER, {"step": step, "world_size": team.world_size, "files": _sizes(folder)}
                )
                fsync_folder(self.root)
        self._agree(team, guard, team.from_lead([guard.code]), folder)
        if team.is_lead:
            self._remove_old(place)
        return folder

    def newest(self) -> Save | None:
        """The newest save that every rank finds complete; None where there is none.

        Raises:
            CheckpointError: the folder cannot be read, or there are marked saves and none of them can be used.
        """
        team, guard, found, marked = Team(), Guard(), list[Save](), 0
        if team.is_lead:
            with guard:
                found = self.complete()
                marked = sum((self.root / one.name / COMPLETE_MARKER).exists() for one in self._places())
        code, number, marked = team.from_lead([guard.code, len(found), marked])
        if code:
            raise failure(f"{self.root} cannot be read", [code], team, guard)
        for index in range(number):
            mine = found[index].place if team.is_lead else FolderVersion(0, 0, 0)
            place = FolderVersion(*team.from_lead([mine.step, mine.generation, mine.serial]))
            save = self._usable(place)
            if all(row[0] for row in team.exchange([int(save is not None)])):
                return save
        if marked:
            raise CheckpointError(
                f"none of the {marked} marked saves in {self.root} can be used; the log says why",
                hint="restore their files, or move the folder away to begin anew",
            )
        return None

    def complete(self) -> list[Save]:
        """All complete saves as this process sees them, newest first."""
        found = (self._usable(place) for place in sorted(self._places(), reverse=True))
        return [save for save in found if save is not None]

    def _places(self) -> list[FolderVersion]:
        try:
            names = [entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return [FolderVersion(*map(int, match.groups())) for name in names if (match := _NAME.fullmatch(name))]

    def _usable(self, place: FolderVersion) -> Save | None:
        folder = self.root / place.name
        try:
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise StorageError("another user owns it, or may write there")
            marker = read_json(folder / COMPLETE_MARKER, owners={os.getuid()})
            if marker is None:
                return None  # not finished, or under way
            if marker.get("files") != (found := _sizes(folder)):
                raise StorageError(f"it does not hold the files of its marker, but {found}")
            return Save(place, folder, int(marker["world_size"]))
        except (OSError, StorageError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is not resumed from: %s", folder, error)
            return None

    def _agree(self, team: Team, guard: Guard, codes: Sequence[int], folder: Path) -> None:
        if any(codes):
            raise failure(f"{folder} was not saved", codes, team, guard)

    def _remove_old(self, newest: FolderVersion) -> None:
        """Keep the newest complete ones; what was never finished by this or an earlier attempt goes as well."""
        kept = {save.place for save in self.complete()[: self._keep]}
        for place in self._places():
            if place in kept or place >= newest:
                continue
            folder = self.root / place.name
            try:
                (folder / COMPLETE_MARKER).unlink(missing_ok=True)  # first: half a folder must not look complete
                shutil.rmtree(folder)
            except OSError as error:
                log.warning("an old save stays: %s", error)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below ``folder`` but the marker."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[:1] != ".")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files if path.name != COMPLETE_MARKER}


def _sync(folder: Path, *, everything: bool) -> None:
    """Make what was written durable. A folder inside holds the parts of several ranks: each one syncs it."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            fsync_folder(path)
        elif everything or path.parent != folder:
            with opened(path) as descriptor:
                os.fsync(descriptor)
    fsync_folder(folder)


# --- The few collectives of the adapters: before and after a save, and before a load; none in the steps between ---

COMPARED = 64
"""Of so many newest folders the ranks find those that all of them can read."""


def wait_for_all() -> None:
    """Return when every rank is here; at once where ranks are not connected."""
    Team().least([0])


def common_steps(parent: Path) -> list[int]:
    """The newest steps whose folders every rank finds finished, lowest first; this rank's own where ranks are not
    connected.

    Raises:
        OSError: the folder cannot be read.
    """
    steps = finished_steps(parent)[-COMPARED:]
    found = [set(row) - {-1} for row in Team().exchange([*steps, *[-1] * (COMPARED - len(steps))])]
    common = sorted(set.intersection(*found))
    if not common and any(found):
        lacking = [rank for rank, each in enumerate(found) if not each]
        log.warning("ranks %s find no finished checkpoint in %s, others do: is it on a shared disk?", lacking, parent)
    return common
