"""What others must not see or change: a process's private folder in shared memory, tokens in files, and tags by which a
stream of bytes is known.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.system.files import UnsafeFile, check_regular, read_bytes, read_text

# A process's private folder in shared memory, under a name that cannot be guessed, locked while its process lives.
#     <shared memory>/slurmft-<user id>-<random>/    mode 0700
#         lock                                       locked (flock) by the process that made the folder; names its heir
#
# Every user can create names in shared memory. An entry counts as ours only when it is a folder that belongs to this
# user and that no other user can write to. It is opened as a folder first and looked at through that descriptor, and
# nothing inside of a folder of another user is opened: a FIFO, a lease or a lock there would make us wait.

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only private folders with random names are made in it
LOCK = "lock"
MAX_DEPTH = 16
"""Folders in folders that are removed; no folder of ours is deeper than 3."""

UNFINISHED_S = 600.0
"""After so long no living process is still at making or removing its folder."""

KEPT_S = 120.0
"""So long after its process has last told that it lives, a folder with an heir is left to that one."""

_IS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder of this process; another process of this user removes it once this one has ended."""

    path: Path
    lock: int
    """Descriptor of the locked file."""

    def tell_alive(self) -> None:
        """The time in which an heir may come begins now."""
        os.utime(self.lock)

    def close(self, *, leave: bool = False) -> None:
        """Remove it with everything in it, or leave it to its heir."""
        with contextlib.suppress(OSError):
            self.tell_alive() if leave else remove_tree(self.path, owner=os.geteuid())
        with contextlib.suppress(OSError):
            os.close(self.lock)


def shared_memory() -> Path:
    """Where private folders are made: in memory, or among temporary files where there is no shared memory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def prefix(kind: str = "slurmft") -> str:
    """The prefix of the names of this user's private folders."""
    return f"{kind}-{os.geteuid()}-"


def make_private_folder(root: Path | None = None, *, heir: str = "") -> PrivateFolder:
    """A new private folder in ``root``; what killed processes of this user have left there is removed first.

    Args:
        root: a folder in which every user may make names; shared memory when empty.
        heir: the name by which a later process finds it (``left_to``), should this one be killed.

    Raises:
        OSError: it cannot be made.
    """
    root = root or shared_memory()
    remove_left_overs(root)
    path = Path(tempfile.mkdtemp(dir=root, prefix=prefix()))  # exclusively, with mode 0700
    draft = path / f".{LOCK}"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # where shared memory is full there is nothing to inherit either
            os.write(lock, heir.encode())
        draft.rename(path / LOCK)  # locked before it has its name: it is never seen free
    except BaseException:
        os.close(lock)
        raise
    return PrivateFolder(path, lock)


def remove_left_overs(root: Path) -> None:
    """Remove this user's private folders whose processes have ended.

    A lock shows whether its holder lives across namespaces of process ids; a process id would not.
    """
    for path in own_folders(root, prefix()):
        with contextlib.suppress(OSError):
            if is_left_over(path, owner=os.geteuid()):
                lock = (path / LOCK).lstat()
                if not lock.st_size or time.time() - lock.st_mtime > KEPT_S:
                    remove_tree(path, owner=os.geteuid())
            elif time.time() - path.lstat().st_mtime > UNFINISHED_S:
                path.rmdir()  # empty: its process was killed before it had made the lock, or after it had removed it


def left_to(heir: str) -> Path | None:
    """The folder in shared memory that a process of this user has left to ``heir``."""
    for path in own_folders(shared_memory(), prefix()):
        with contextlib.suppress(OSError):
            if is_left_over(path, owner=os.geteuid()) and read_bytes(path / LOCK, limit_bytes=8192) == heir.encode():
                return path
    return None


def own_folders(root: Path, name_prefix: str) -> list[Path]:
    """The folders in ``root`` with such a name that belong to this user and are private, sorted."""
    found, me = [], os.geteuid()
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            # another user may have made a hundred thousand: each costs one look
            if entry.name.startswith(name_prefix) and entry.stat(follow_symlinks=False).st_uid == me:
                found.append(Path(entry.path))
    return sorted(path for path in found if is_private(path))


@contextlib.contextmanager
def open_folder(path: Path, *, owner: int) -> Iterator[int]:
    """A descriptor of the folder at ``path``, which belongs to ``owner`` and is writable by no one else.

    Raises:
        UnsafeFile: it is another user's, or writable by others.
        OSError: it is not a folder, or cannot be opened.
    """
    descriptor = os.open(path, _IS_FOLDER)
    try:
        _check_folder(path, os.fstat(descriptor), owner)
        yield descriptor
    finally:
        os.close(descriptor)


def check_private(path: Path) -> None:
    """Return when ``path`` is a folder of this user that no other user can write to.

    Raises:
        UnsafeFile: it is not.
        OSError: it cannot be looked at.
    """
    _check_folder(path, os.lstat(path), os.geteuid())


def is_private(path: Path) -> bool:
    """Whether ``path`` is a folder of this user that no other user can write to."""
    with contextlib.suppress(OSError):
        check_private(path)
        return True
    return False


def is_left_over(path: Path, *, owner: int) -> bool:
    """Whether the private folder of ``owner`` has a lock that no process holds. Never waits, and writes nothing."""
    try:
        with open_folder(path, owner=owner) as folder:
            check_regular(path / LOCK, os.stat(LOCK, dir_fd=folder, follow_symlinks=False), owners={owner})
            lock = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        check_regular(path / LOCK, os.fstat(lock), owners={owner})
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def remove_tree(path: Path, *, owner: int, depth: int = MAX_DEPTH) -> None:
    """Remove the folder of ``owner`` with all that is in it. No link is followed, and nothing but folders is opened.

    Args:
        depth: folders in folders; of deeper ones nothing more is removed.

    Raises:
        OSError: something in it could not be removed.
    """
    with open_folder(path, owner=owner) as folder:
        _empty(folder, depth)
    path.rmdir()


def _empty(folder: int, depth: int) -> None:
    if not depth:
        raise OSError(errno.ELOOP, "folders are nested too deeply")
    with os.scandir(folder) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    names.sort(key=lambda each: each[0] == LOCK)  # last: when we are killed before that, it is still left over
    for name, is_folder in names:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
            continue
        inner = os.open(name, _IS_FOLDER, dir_fd=folder)
        try:
            _empty(inner, depth - 1)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)


def _check_folder(path: Path, status: os.stat_result, owner: int) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFile(errno.ENOTDIR, "is not a folder", str(path))
    if status.st_uid != owner:
        raise UnsafeFile(errno.EPERM, f"belongs to user id {status.st_uid}", str(path))
    if status.st_mode & 0o022:
        raise UnsafeFile(errno.EPERM, "can be written to by other users", str(path))


# --- authentication ---
# Keys for one purpose each, and tags by which a stream of bytes proves that it was sent by a holder of its key.
#
# HMAC-SHA256 throughout: of the keyed hashes in Python's standard library it is the fastest on processors with
# instructions for SHA, which is what clusters have (``bench/results/peer_copies.md``).

TAG_BYTES = hashlib.sha256().digest_size
NONCE_BYTES = 32

_LENGTH = struct.Struct("!Q")
_PIECE = struct.Struct("!QQ?")


def new_nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def derived_key(key: bytes, purpose: str, *context: bytes) -> bytes:
    """A key for one purpose in one context, such as a connection's nonces; it reveals neither ``key`` nor others.

    The lengths of all parts go into it, so that no two contexts look alike.
    """
    mac = hmac.new(key, b"slurmft 2 ", hashlib.sha256)
    for part in (purpose.encode(), *context):
        mac.update(_LENGTH.pack(len(part)) + part)
    return mac.digest()


class PieceTags:
    """The tags of one stream of known length, piece by piece.

    Each tag covers the piece's place in the stream, its length and whether it is the last one. So pieces that were
    changed, repeated, left out, swapped, cut or taken from another stream are detected.

    Args:
        key: of this stream alone.
        size_bytes: of the whole stream.
    """

    def __init__(self, key: bytes, size_bytes: int) -> None:
        self._key, self._left_bytes, self._number = key, size_bytes, 0

    def next_tag(self, piece: bytes | memoryview) -> bytes:
        """The tag of the next piece."""
        self._left_bytes -= len(piece)
        head = _PIECE.pack(self._number, len(piece), self._left_bytes <= 0)
        self._number += 1
        mac = hmac.new(self._key, head, hashlib.sha256)
        mac.update(piece)
        return mac.digest()

    def is_next(self, piece: bytes | memoryview, tag: bytes | memoryview) -> bool:
        """Whether this is the next piece, with its tag. Compared in constant time."""
        return hmac.compare_digest(self.next_tag(piece), tag)


# --- A token in a file that its owner alone can read: never on a command line ---

MAX_TOKEN_BYTES = 4096


def token_in(path: Path, *, at_least: int = 16) -> str:
    """The token in a file that its owner alone can read.

    Raises:
        UsageError: others can, it is another user's, it cannot be read, or holds no token.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others may read the token in {path}", hint=f"chmod 600 {path}")
        token = read_text(path, owners={os.geteuid()}, limit_bytes=MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {path}: {error}") from error
    if len(token) < at_least or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UsageError(f"{path} must hold one token of at least {at_least} printable characters without spaces")
    return token
