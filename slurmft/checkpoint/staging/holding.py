"""Which files are in use at the moment: the image that a writer reads, the checkpoint that is being loaded. No torch.

Built on flock, whose lock ends with its holder, however that dies. Holders share; to change or remove the file a
process must lock it alone. Between processes of one node this always holds. Between nodes it holds where the filesystem
carries flock to its server: NFS from version 4 or Linux 2.6.12 on, Lustre mounted with ``flock``, GPFS, BeeGFS and
CephFS with locks switched on; not with NFS ``local_lock=flock`` or ``nolock``, nor Lustre ``localflock``. Where there
are no locks at all, no process counts as a holder: the newest two good checkpoints are never removed all the same, so
that a reader of the newest is safe until two more have been committed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmft.storage.checkpoint_names import MANIFEST
from slurmft.system.opening import UnsafeFile, open_regular

_PATIENCE_S = 1.0
_CLAIM = ".claim."


@contextlib.contextmanager
def holding(path: Path) -> Iterator[int]:
    """A descriptor to read ``path`` with; while it is open, others see that the file is in use.

    Raises:
        BlockingIOError: another process has it alone, to change or remove it.
        FileNotFoundError: it is gone, or was replaced meanwhile.
        OSError: it cannot be opened.
    """
    descriptor = open_regular(path)
    with _locked(path, descriptor, lambda: _patiently(lambda: _lock(descriptor, fcntl.LOCK_SH))):
        yield descriptor


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """A descriptor of ``path`` that no other process holds; new holders are refused until the end.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: it is gone, or was replaced meanwhile.
        OSError: it cannot be opened.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except UnsafeFile:
        raise
    except PermissionError:
        descriptor = open_regular(path)  # enough on a local filesystem
    with _locked(path, descriptor, lambda: _lock(descriptor, fcntl.LOCK_EX)):
        yield descriptor


def is_held(path: Path) -> bool:
    """Whether any process holds ``path`` now; False where it is gone, or cannot be locked."""
    try:
        with alone(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


class Claim:
    """Until it is released, or its process ends, others see that a save in ``folder`` goes on.

    The file is one of the temporary files of a save: should it be left behind, it goes with the commit or the folder.

    Raises:
        OSError: it cannot be claimed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{_CLAIM}{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._descriptor, fcntl.LOCK_SH)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The save has ended. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_claimed(folder: Path) -> bool:
    """Whether a live process has claimed ``folder``."""
    return any(is_held(path) for path in folder.glob(f"{_CLAIM}*"))


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around the reading of a committed checkpoint: it is not removed meanwhile. One rank may do it for all.

    Raises:
        BlockingIOError, FileNotFoundError: it is being removed, or is gone.
        OSError: its marker cannot be opened.
    """
    with holding(folder / MANIFEST):
        yield


@contextlib.contextmanager
def _locked(path: Path, descriptor: int, lock: Callable[[], None]) -> Iterator[None]:
    """Closes ``descriptor`` at the end."""
    try:
        lock()
        _check_in_place(path, descriptor)
        yield
    finally:
        # before the descriptor: a child that was forked meanwhile has it, too, and would go on holding the file
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
            raise


def _patiently(lock: Callable[[], None]) -> None:
    """``is_held`` has a file alone for a moment, and so does a process that removes it."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return lock()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _check_in_place(path: Path, descriptor: int) -> None:
    """The locked file may have been unlinked between open and lock; then the lock protects nothing."""
    there, here = os.stat(path), os.fstat(descriptor)  # noqa: PTH116 - a pair of equals
    if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
