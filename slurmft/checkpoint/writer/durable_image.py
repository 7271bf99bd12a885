"""One staged snapshot becomes a durable image with its receipt: read, hashed and written once. No torch."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from slurmft.checkpoint.format.image_writing import Mappings, NewFile, Pace, digests
from slurmft.checkpoint.format.shard_index import ShardIndex, image_file, index_file, read_index, write_index
from slurmft.checkpoint.staging.holding import holding
from slurmft.checkpoint.writer.abandoned_saves import note_file
from slurmft.checkpoint.writer.fault_points import reached
from slurmft.checkpoint.writer.progress_page import Lane, Progress, ProgressPage
from slurmft.checkpoint.writer.writer_task import Left, Task
from slurmft.errors import StorageError
from slurmft.system.files import fsync_folder
from slurmft.system.opening import UnsafeFile, trusted_owners

log = logging.getLogger(__name__)


class Pacing:
    """Work between two pieces: show progress, keep the bandwidth cap, and leave a save that was given up."""

    def __init__(self, task: Task, page: ProgressPage) -> None:
        self._task, self._page = task, page
        self.size_bytes = 0
        self._half_told = False

    def look(self, _done_bytes: int = 0) -> None:
        """Without a cap.

        Raises:
            Left: it is to be left.
        """
        self._page.tick(Lane.IMAGE)
        self._task.leave_if_stopped()

    def __call__(self, done_bytes: int) -> None:
        self._page.show(Progress(done_bytes, self.size_bytes))
        if not self._half_told and 2 * done_bytes >= self.size_bytes:
            self._half_told = True
            reached("image half written")
        self.look()
        self._task.throttle.pass_on(done_bytes, self.look)


def write_durably(task: Task, pace: Pacing, images: Mappings) -> int:
    """Image, metadata and receipt, all durable; returns the size of the image.

    Raises:
        Left: it was given up.
        OSError: it is not durable, and may be tried again.
        StorageError: the snapshot is not there, or not the one that was announced.
    """
    task.phase = "looking for an earlier try"
    if (size_bytes := _written_before(task, pace.look, images)) is not None:
        return size_bytes
    try:
        return _write(task, pace, images)
    except FileNotFoundError:
        # another writer of the same snapshot, taken for dead, has finished it and cleaned up
        if (size_bytes := _written_before(task, pace.look, images)) is not None:
            return size_bytes
        raise


def _write(task: Task, pace: Pacing, images: Mappings) -> int:
    request = task.request
    task.phase = "reading the image"
    with holding(request.image) as source:
        fingerprint, index = _staged(task)
        pace.size_bytes = index.size_bytes
        with images.of(source, index.size_bytes) as view:
            reached("request read")
            task.phase = "making the folder"
            with _opened(request.folder) as folder:
                reached("folder made")
                task.begin_claim()
                if request.shard and (folder / note_file(0)).exists():
                    raise Left("superseded", "rank 0 has given it up", is_lost=True)
                mode = folder.stat().st_mode & 0o666
                with _beside(lambda look: _hash(task, index, view, fingerprint, look), pace.look) as hashing:
                    _write_image(task, folder, view, mode, pace)
                    hashed, fingerprint = hashing.result()
                task.phase = "writing the receipt"
                if _fingerprint(request.snapshot) != fingerprint and _was_changed(task, source, index, hashed):
                    raise StorageError(f"{request.image} was changed while it was written")
                write_index(folder / index_file(request.shard), hashed, durable=True, mode=mode)
                task.written = hashed
                reached("receipt written")
    return index.size_bytes


def _written_before(task: Task, look: Pace, images: Mappings) -> int | None:
    """The size of the image where a writer before this one has finished it: the same as in memory, if it is there."""
    request = task.request
    try:
        receipt = read_index(request.folder / index_file(request.shard))
    except StorageError:
        return None
    if receipt is None or receipt.identity != request.identity or not receipt.is_hashed:
        return None
    with contextlib.suppress(StorageError, FileNotFoundError), holding(request.image) as source:
        _, index = _staged(task)
        with images.of(source, index.size_bytes) as view:
            if digests(view, index, look) != [item.digest for item in receipt.items]:
                return None
    return receipt.size_bytes


_Fingerprint = tuple[int, int, int]


def _fingerprint(path: Path) -> _Fingerprint | None:
    """Distinguishes versions of a small file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _staged(task: Task) -> tuple[_Fingerprint | None, ShardIndex]:
    """The snapshot's index, when it is the one that was announced.

    Raises:
        StorageError: it is not.
    """
    request = task.request
    fingerprint = _fingerprint(request.snapshot)
    index = read_index(request.snapshot)
    if index is None or (index.identity, index.shard) != (request.identity, request.shard):
        found = "nothing" if index is None else f"shard {index.shard} of {index.identity.folder_name}"
        raise StorageError(
            f"{request.snapshot} holds {found} instead of shard {request.shard} of {request.identity.folder_name}"
        )
    return fingerprint, index


def _was_changed(task: Task, source: int, *same: ShardIndex) -> bool:
    """Not by another writer of the same snapshot, nor by a worker that took its whole memory folder away at its end."""
    request = task.request
    return read_index(request.snapshot) not in same and _is_in_place(request.image, source)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """The checkpoint folder, made if need be, by a name that stays with it: its replacement is never written to.

    Raises:
        Left: it was removed meanwhile.
    """
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent.parent)
    with contextlib.suppress(FileExistsError):
        # On a network filesystem this node may still remember that the folder did not exist.
        os.mkdir(folder)  # noqa: PTH102 - pathlib's exist_ok looks at that same stale memory
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if (owner := os.fstat(descriptor).st_uid) not in trusted_owners(folder.parent):
            raise UnsafeFile(errno.EPERM, f"belongs to user id {owner}", str(folder))
        yield Path(f"/proc/self/fd/{descriptor}")
        if not _is_in_place(folder, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE) and not _is_in_place(folder, descriptor):
            raise Left("superseded", "its folder was removed", is_lost=True) from error
        raise
    finally:
        os.close(descriptor)


def _is_in_place(folder: Path, descriptor: int) -> bool:
    try:
        there, here = folder.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


_Hashed = tuple[ShardIndex, _Fingerprint | None]


@contextlib.contextmanager
def _beside(work: Callable[[Pace], _Hashed], look: Pace) -> Iterator[Future[_Hashed]]:
    """Have ``work`` done in a thread meanwhile; it is over when this is left, early if there was an error."""
    future: Future[_Hashed] = Future()
    stopped = threading.Event()

    def look_and_stop(done_bytes: int) -> None:
        if stopped.is_set():
            raise Left("superseded")
        look(done_bytes)

    def target() -> None:
        try:
            future.set_result(work(look_and_stop))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)

    thread = threading.Thread(target=target, daemon=True, name="hash")
    thread.start()
    try:
        yield future
    finally:
        stopped.set()
        thread.join()


def _hash(task: Task, index: ShardIndex, view: memoryview, fingerprint: _Fingerprint | None, look: Pace) -> _Hashed:
    """The index with digests, put in place of the one without at once: a restart from memory wants them."""
    if index.is_hashed:  # a writer before this one did it
        task.on_hashed(task.request)
        return index, fingerprint
    hashed = index.with_digests(digests(view, index, look))
    snapshot = task.request.snapshot
    if _fingerprint(snapshot) == fingerprint:
        try:
            write_index(snapshot, hashed, durable=False)
            fingerprint = _fingerprint(snapshot)
            task.on_hashed(task.request)
        except OSError as error:
            log.warning("%s gets no digests: %s", snapshot, error)
    task.tell("hashed", size_bytes=index.size_bytes)
    reached("hashed")
    return hashed, fingerprint


def _write_image(task: Task, folder: Path, view: memoryview, mode: int, pace: Pace) -> None:
    task.phase = "writing the image"
    with NewFile(folder, image_file(task.request.shard), mode=mode) as file:
        reached("image begun")
        file.write(view, pace)
        reached("image written")
        task.phase = "syncing the image"
        file.sync()
        reached("image synced")
        file.put_in_place()
    reached("image in place")
