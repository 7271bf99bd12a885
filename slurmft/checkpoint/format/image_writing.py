"""Bytes from memory to a file that appears whole and durable: past the page cache where that is possible. No torch.

Direct writes cost half the time of buffered ones and hardly any processor, and leave the page cache to the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import xxhash

from slurmft.checkpoint.format.shard_index import ShardIndex

PIECE_BYTES = 16 << 20
_BUFFERED_BYTES = 4 << 20
_BEHIND_BYTES = 32 << 20
"""How much a buffered write may be ahead of the disk: the fsync at the end must not stall for long."""

_HASH_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_SYNC_AND_WAIT = 1 | 2 | 4
"""SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER of sync_file_range(2)."""

_TEMPORARY = ".tmp"

_KEPT = 3
"""A rank's places in memory, at most."""

Pace = Callable[[int], None]
"""Called with the bytes done so far; may sleep, and may raise to leave the work."""


class Mappings:
    """Files as memory. The newest few stay mapped: to map an image anew at every save costs as much as to hash it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], mmap.mmap] = {}

    @contextlib.contextmanager
    def of(self, descriptor: int, size_bytes: int) -> Iterator[memoryview]:
        """The first bytes of an open file.

        Raises:
            OSError: it is shorter.
        """
        status = os.fstat(descriptor)
        if status.st_size < size_bytes:
            raise OSError(errno.ENODATA, f"has fewer than {size_bytes} bytes")
        if not size_bytes:
            yield memoryview(b"")
            return
        memory = self._kept.pop((status.st_dev, status.st_ino), None)
        if memory is None or len(memory) < size_bytes:
            memory = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._kept[status.st_dev, status.st_ino] = memory  # keeps the file, and so its inode number
        for old in [*self._kept][: len(self._kept) - _KEPT]:
            del self._kept[old]
        with memoryview(memory) as whole, whole[:size_bytes] as view:
            yield view


class NewFile:
    """A file that takes its name when it is whole. Left before that, nothing of it stays, unless we are killed."""

    def __init__(self, folder: Path, name: str, *, mode: int) -> None:
        self._path = folder / name
        self._temporary = folder / f".{name}.{os.getpid()}-{os.urandom(4).hex()}{_TEMPORARY}"
        self._is_direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._temporary, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # the kernel may have made the file before it found that this filesystem has no direct writes
            self._temporary.unlink(missing_ok=True)
            self._descriptor = os.open(self._temporary, flags, 0o600)
            self._is_direct = False
        os.fchmod(self._descriptor, mode)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if kind is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def write(self, view: memoryview, pace: Pace) -> None:
        """Write all of ``view``.

        Raises:
            OSError: it was not.
        """
        done = self._write_directly(view, pace) if self._is_direct else 0
        if done < len(view):
            self._write_buffered(view, done, pace)

    def put_in_place(self) -> None:
        """Give it its name, over a leftover of the same name. Durable with the folder's own fsync."""
        os.replace(self._temporary, self._path)  # noqa: PTH105 - same folder, so the rename cannot cross filesystems

    def sync(self) -> None:
        """Return when it is on the disk."""
        os.fsync(self._descriptor)

    def _write_directly(self, view: memoryview, pace: Pace) -> int:
        """Whole blocks, as many as the filesystem takes in this way; returns the bytes written."""
        done, whole = 0, len(view) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            while done < whole:
                done += os.pwrite(self._descriptor, view[done : min(done + PIECE_BYTES, whole)], done)
                if done % _BLOCK_BYTES:
                    done -= done % _BLOCK_BYTES  # a short write, as before a full disk: the rest will say why
                    break
                pace(done)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return done

    def _write_buffered(self, view: memoryview, start: int, pace: Pace) -> None:
        done = synced = start
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done : done + _BUFFERED_BYTES], done)
            if done - synced >= 2 * _BEHIND_BYTES:
                _sync_range(self._descriptor, synced, _BEHIND_BYTES)
                synced += _BEHIND_BYTES
            pace(done)


def is_temporary(name: str) -> bool:
    """Whether a file in a checkpoint folder is one of ours that has not got its name yet."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def digests(view: memoryview, index: ShardIndex, pace: Pace) -> list[str]:
    """xxh3_128 of each item's bytes in hex, in order. Lets other threads run meanwhile."""
    found = []
    for item in index.items:
        digest, end = xxhash.xxh3_128(), item.offset + item.length
        for start in range(item.offset, end, _HASH_BYTES):
            digest.update(view[start : min(start + _HASH_BYTES, end)])
            pace(start)
        found.append(digest.hexdigest())
    return found


def _sync_range(descriptor: int, start: int, length: int) -> None:
    """Have part of a file written out. Where that is not possible, the fsync at the end does it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_AND_WAIT):
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            raise OSError(number, os.strerror(number))
