"""Models in a node's memory, which outlive the engines that use them: a killed engine comes back without loading.

    $SLURMFT_MEMORY_DIR/weights/     in the agent's private folder; goes with the agent
        <id>.lock                    held (flock) as long as they live by all processes that use the files, and
                                     exclusively by the one that makes them
        <id>/                        the files
        <id>.json                    their sizes; there only while they are whole

An id stands for a model as it is now: another size or time of change of one of its files makes it another model. Models
that no process uses are removed before another one is made. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import own_memory_folder
from slurmft.system.files import check_private, check_regular, open_regular, opened, read_json, remove_tree, write_json
from slurmft.system.processes import fits

WEIGHTS = "weights"
MAX_DEPTH = 8
"""Folders in folders of a model; those of private folders are removed up to a depth of their own."""

log = logging.getLogger(__name__)


def stage_in_memory(path: str | Path) -> Path:
    """The copy of a file, or of a folder, in this node's memory; the first process of a run that asks makes it.

    Read it there as often as you like, and map it: all processes of the node share its pages. Hidden files of a folder
    are left out. A file that has changed is copied again. The copy is removed when the run ends on the node.

    Returns:
        Where the copy is; ``path`` itself, with a warning, where there is no room for it or it cannot be read, and
        without one where no agent of a run started this process.
    """
    source = Path(os.path.normpath(Path(path).absolute()))  # without "..", and with the names of links

    def copy(folder: Path) -> None:
        before = files_of(source)
        need_room(sum(size for _, size, _ in before), folder)
        for name, size, _ in before:
            target = folder / source.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(source / name, target, size)
        if files_of(source) != before:
            raise OSError(errno.EAGAIN, "has changed while it was copied")

    folder = kept(source, "", copy)
    return Path(path) if folder is None else folder / source.name


def kept(source: str | Path, version: str, fill: Callable[[Path], None]) -> Path | None:
    """The folder in this node's memory that ``fill`` has filled from ``source``, now or for a process before this one.

    It stays until this process ends, at least.

    Args:
        version: what else makes the content another one.
        fill: raises OSError where it cannot.

    Returns:
        None where it is not to be had: the reason has been logged, unless no agent started this process.
    """
    if (memory := own_memory_folder()) is None:
        return None
    try:
        where = Path(source).absolute()
        facts = str(where), version, files_of(where) if where.exists() else ()
        folder = memory / WEIGHTS
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
        place = folder / hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()[:16]
        _hold(place, fill)
    except (OSError, StorageError) as error:
        log.warning("%s is not kept in memory, so each start of an engine loads it anew: %s", source, error)
        return None
    return place


def need_room(size_bytes: int, folder: Path) -> None:
    """Return when so much more fits into the node's memory.

    Raises:
        OSError: it does not.
    """
    if why := fits(size_bytes, folder):
        raise OSError(errno.ENOSPC, why)


def files_of(source: Path) -> tuple[tuple[str, int, int], ...]:
    """A file, or all files below a folder but for hidden ones: names from ``source`` on, sizes, times of change.

    Raises:
        OSError: one cannot be looked at, is no regular file, or lies too deep.
    """
    if not source.is_dir():
        return (_facts(source, "."),)
    found = []
    for where, folders, names in os.walk(source, onerror=_raise, followlinks=True):
        folders[:] = [each for each in folders if not each.startswith(".")]
        inner = Path(where).relative_to(source)
        if len(inner.parts) > MAX_DEPTH:
            raise OSError(errno.ELOOP, "folders are nested too deeply", where)
        found += [_facts(Path(where, name), str(inner / name)) for name in names if not name.startswith(".")]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "holds no files", str(source))
    return tuple(sorted(found))


def _facts(path: Path, name: str) -> tuple[str, int, int]:
    status = path.stat()
    check_regular(path, status)
    return name, status.st_size, status.st_mtime_ns


def _raise(error: OSError) -> None:
    raise error


def _hold(place: Path, fill: Callable[[Path], None]) -> None:
    """Return when the files are whole. The lock is left open: the kernel lets go of it at the end of this process."""
    lock = open_regular(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, follow=False, owners={os.geteuid()})
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not _is_whole(place):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(place):  # another replica may have been first
                _remove_unused(place)
                _make(place, fill)
            fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        os.close(lock)
        raise


def _make(place: Path, fill: Callable[[Path], None]) -> None:
    _remove(place)  # what is left of one that was killed
    place.mkdir(mode=0o700)
    try:
        fill(place)
        sizes = {name: size for name, size, _ in files_of(place)}
        write_json(place.with_suffix(".json"), {"files": sizes}, durable=False)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(place)
        raise


def _is_whole(place: Path) -> bool:
    """Whether all files are there, as long as they were, and this user's."""
    owners = {os.geteuid()}
    try:
        check_private(place)
        for name, size in (read_json(place.with_suffix(".json"), owners=owners) or {})["files"].items():
            status = (place / name).lstat()
            check_regular(place / name, status, owners=owners)
            if status.st_size != size:
                return False
    except (OSError, StorageError, LookupError, AttributeError, TypeError):
        return False
    return True


def _remove_unused(but: Path) -> None:
    for path in but.parent.glob("*.lock"):
        with contextlib.suppress(OSError), opened(path, follow=False, owners={os.geteuid()}) as lock:
            if path.stem != but.name:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path.with_suffix(""))


def _remove(place: Path) -> None:
    place.with_suffix(".json").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        remove_tree(place, owner=os.geteuid())


def _copy(source: Path, target: Path, size: int) -> None:
    with opened(source) as reading, opened(target, os.O_WRONLY | os.O_CREAT, follow=False) as writing:
        done = 0
        while done < size and (part := os.sendfile(writing, reading, done, size - done)):
            done += part
