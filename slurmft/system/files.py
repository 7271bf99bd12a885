"""Atomic, versioned files on a shared filesystem.

Owns how bytes become durable. Knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import select
import stat
import struct
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slurmft.errors import NewerFormat, StorageError, UsageError

# --- The one way to open a file that lies in a place where other users can write ---
# A shared folder may hold a FIFO, a socket, a device, a symbolic link or a file without end under any name that we
# read. Owns the checks that come before the first byte is believed; knows nothing of what the bytes mean.

STATE_LIMIT_BYTES = 16 << 20
"""Most bytes of a small state file: requests, claims, markers, verdicts, progress."""

LOG_LIMIT_BYTES = 256 << 20
"""Most bytes of a file that grows: a journal, an exclusion list. A million lines of 250 bytes."""

_CHUNK_BYTES = 1 << 20

Record = TypeVar("Record")


class UnsafeFile(OSError):
    """The file at a path must not be read or written there.

    It is an ``OSError`` (``EINVAL``, ``EFBIG`` or ``EPERM``), so that readers which already treat an unreadable file as
    damaged treat this one alike.
    """


def open_regular(
    path: str | Path, flags: int = os.O_RDONLY, *, mode: int = 0o600, follow: bool = True,
    owners: Collection[int] | None = None,
) -> int:  # fmt: skip
    """A descriptor of the regular file at ``path``. Never waits for a writer and never touches a device.

    The file is first opened as a name only (``O_PATH``), looked at, and then opened through that descriptor: the file
    that was checked is opened, even if names change meanwhile. With ``O_CREAT`` a missing file is created, never
    through a symbolic link; with ``O_EXCL`` as well, none that is there is opened.

    Args:
        follow: follow a symbolic link in the last part of the path.
        owners: user ids that may own the file, and have made a link that leads to it; None accepts every owner.

    Raises:
        UnsafeFile: it is not a regular file, or belongs to a user that is not in ``owners``.
        OSError: it cannot be opened.
    """
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    if follow and owners is not None:
        path = _target(path, owners)
    look = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    while True:
        try:
            name = os.open(path, look)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            try:
                return os.open(path, flags | os.O_EXCL, mode)
            except FileExistsError:  # another process created it in between, or it is a dangling link
                if Path(path).is_symlink():
                    raise UnsafeFile(errno.EINVAL, "is a symbolic link to nothing", str(path)) from None
                continue
        break
    try:
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        check_regular(path, os.fstat(name), owners=owners)
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            return os.open(f"/proc/self/fd/{name}", flags)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    finally:
        os.close(name)
    return _open_anew(path, flags, owners)


def _target(path: str | Path, owners: Collection[int]) -> str | Path:
    """Where to open: a symbolic link of a user who is not in ``owners`` would choose among the files of those who are.

    Raises:
        UnsafeFile: such a link lies there.
    """
    try:
        name = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # as the opening says
        return path
    try:
        status = os.fstat(name)
        if not stat.S_ISLNK(status.st_mode):
            return path
        if status.st_uid not in owners:
            raise UnsafeFile(errno.EPERM, f"is a symbolic link of user id {status.st_uid}", str(path))
        return Path(path).parent / os.readlink("", dir_fd=name)
    finally:
        os.close(name)


def _open_anew(path: str | Path, flags: int, owners: Collection[int] | None) -> int:
    """NFS: another host has replaced the file, and the name alone was looked up in this host's memory. Opening by name
    asks the server. Without following links it cannot end in a device."""
    descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW)
    try:
        check_regular(path, os.fstat(descriptor), owners=owners)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def opened(
    path: str | Path, flags: int = os.O_RDONLY, *, follow: bool = True, owners: Collection[int] | None = None
) -> Iterator[int]:
    """A descriptor of the regular file at ``path``, by default for reading; closed afterwards.

    Raises:
        UnsafeFile, OSError: as ``open_regular``.
    """
    descriptor = open_regular(path, flags, follow=follow, owners=owners)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_regular(path: str | Path, status: os.stat_result, *, owners: Collection[int] | None = None) -> None:
    """Return when ``status`` is that of a regular file of one of ``owners``.

    Raises:
        UnsafeFile: it is not.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFile(errno.EINVAL, f"is {_kind(status.st_mode)}, not a regular file", str(path))
    if owners is not None and status.st_uid not in owners:
        raise UnsafeFile(errno.EPERM, f"belongs to user id {status.st_uid}", str(path))


def check_length(path: str | Path, descriptor: int, limit_bytes: int) -> int:
    """The size of the open file in bytes, before anything of it is read: a hole of a terabyte costs nothing to make.

    Raises:
        UnsafeFile: it is longer than ``limit_bytes``.
    """
    if (size := os.fstat(descriptor).st_size) > limit_bytes:
        raise UnsafeFile(errno.EFBIG, f"is longer than {limit_bytes} bytes", str(path))
    return size


def trusted_owners(folder: Path) -> set[int]:
    """Users whose files in ``folder`` are believed: its owner, root and this one.

    Raises:
        OSError: the folder cannot be looked at.
    """
    return {0, os.geteuid(), folder.stat().st_uid}


def read_bytes(
    path: str | Path, *, limit_bytes: int = STATE_LIMIT_BYTES, follow: bool = True,
    owners: Collection[int] | None = None,
) -> bytes:  # fmt: skip
    """The whole content of the regular file at ``path``.

    Raises:
        UnsafeFile: it is not a regular file, is longer than ``limit_bytes``, or belongs to a user not in ``owners``.
        OSError: it cannot be read.
    """
    with opened(path, follow=follow, owners=owners) as descriptor:
        # a file whose size is too large is not read; files of /proc have no size
        parts, room = [], 0 if os.fstat(descriptor).st_size > limit_bytes else limit_bytes + 1
        while room > 0 and (part := os.read(descriptor, min(room, _CHUNK_BYTES))):
            parts.append(part)
            room -= len(part)
    if room <= 0:
        raise UnsafeFile(errno.EFBIG, f"is longer than {limit_bytes} bytes", str(path))
    return b"".join(parts)


def read_lines(path: str | Path, *, limit_bytes: int, line_limit_bytes: int, start: int = 0) -> Iterator[bytes]:
    """The lines of the regular file at ``path`` from byte ``start`` on, without their ends; holds only a few at a time.

    Of a line that is longer than ``line_limit_bytes`` only the beginning comes: a hole of many megabytes, or an end
    that never comes, costs no more than the reading.

    Raises:
        UnsafeFile: it is not a regular file, or is longer than ``limit_bytes``.
        OSError: it cannot be read.
    """
    with opened(path) as descriptor:
        check_length(path, descriptor, limit_bytes)
        os.lseek(descriptor, start, os.SEEK_SET)
        line, left = b"", limit_bytes - start
        while left > 0 and (part := os.read(descriptor, min(left, _CHUNK_BYTES))):
            left -= len(part)
            first, *others = part.split(b"\n")
            line += first[: line_limit_bytes - len(line)]
            for other in others:
                yield line
                line = other[:line_limit_bytes]
        if line:
            yield line


def last_lines(path: str | Path, *, limit_bytes: int) -> Iterator[bytes]:
    """The lines in the last ``limit_bytes`` of the regular file at ``path``, without their ends, the newest first.

    Raises:
        UnsafeFile: it is not a regular file, or is longer than LOG_LIMIT_BYTES.
        OSError: it cannot be read.
    """
    with opened(path) as descriptor:
        at = check_length(path, descriptor, LOG_LIMIT_BYTES)
        floor, held = max(0, at - limit_bytes), b""
        while at > floor:
            begin = max(floor, at - _CHUNK_BYTES)
            held, *lines = (os.pread(descriptor, at - begin, begin) + held).split(b"\n")
            yield from reversed(lines)
            at = begin
        if floor == 0:
            yield held


def read_text(
    path: str | Path, *, limit_bytes: int = STATE_LIMIT_BYTES, errors: str = "strict", follow: bool = True,
    owners: Collection[int] | None = None,
) -> str:  # fmt: skip
    """The file as UTF-8 text with line ends as they are; see ``read_bytes``.

    Raises:
        UnicodeDecodeError: it is not UTF-8, and ``errors`` is ``strict``.
    """
    return read_bytes(path, limit_bytes=limit_bytes, follow=follow, owners=owners).decode("utf-8", errors)


def read_pipe(path: str | Path, *, limit_bytes: int, within_s: float) -> bytes:
    """The content of a pipe until its end, such as ``/dev/stdin``.

    Raises:
        UnsafeFile: more than ``limit_bytes`` came.
        OSError: it cannot be read, or did not end in time.
    """
    deadline, content = time.monotonic() + within_s, b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while len(content) <= limit_bytes:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(errno.ETIMEDOUT, f"the pipe did not end within {within_s:.0f} s", str(path))
            with contextlib.suppress(BlockingIOError):  # another reader was faster
                if not (part := os.read(descriptor, _CHUNK_BYTES)):
                    return content
                content += part
    finally:
        os.close(descriptor)
    raise UnsafeFile(errno.EFBIG, f"is longer than {limit_bytes} bytes", str(path))


def read_part(path: str | Path, start: int, limit_bytes: int) -> bytes:
    """Up to ``limit_bytes`` from byte ``start`` of the regular file at ``path``, from its end where that is negative.

    Raises:
        UnsafeFile: it is not a regular file.
        OSError: it cannot be read.
    """
    with opened(path) as descriptor:
        return os.pread(descriptor, limit_bytes, start if start >= 0 else max(0, os.fstat(descriptor).st_size + start))


def write_bytes(path: str | Path, content: bytes, *, append: bool = False, follow: bool = True) -> None:
    """Write ``content`` into the regular file at ``path``, creating it for this user alone; not atomic.

    Raises:
        UnsafeFile: something else lies there.
        OSError: it cannot be written; a part of it may have been.
    """
    with opened(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC), follow=follow) as descriptor:
        write_all(descriptor, content)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of ``content``, in as many pieces as the kernel takes.

    Raises:
        OSError: it cannot be written; a part of it may have been.
    """
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


@contextlib.contextmanager
def appending(path: str | Path) -> Iterator[int]:
    """A descriptor for the output of a process that goes to the end of the regular file at ``path``; closed afterwards.

    Raises:
        UnsafeFile: something else lies there.
        OSError: it cannot be opened.
    """
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        os.set_blocking(descriptor, True)
        yield descriptor


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Errors of operations on a descriptor do not say which file it is of: they get ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def append_line(path: str | Path, line: str) -> None:
    """Add a line durably, by one write; a torn line of a dead writer is closed off first.

    Raises:
        UnsafeFile: something else than a regular file lies there.
        OSError: it cannot be written; a part of the line may have been, which readers skip.
    """
    with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor, naming(path):
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        text = ("\n" * torn + line + "\n").encode()
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)


def _kind(mode: int) -> str:
    for is_kind, words in (
        (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a symbolic link"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
    ):  # fmt: skip
        if is_kind(mode):
            return words
    return "something else"


# --- Atomic, versioned files on a shared filesystem ---

FORMAT = 1
"""Version written into every JSON file; a reader refuses anything newer and tolerates unknown keys."""

MOVE_AWAY = "move it away and run again"
"""The remedy for a damaged file."""


def refuse_uncreatable(folder: Path) -> None:
    """Return when ``folder`` is there and may be written to, or could be made; nothing is made.

    Raises:
        OSError: as making it would.
    """
    nearest = folder
    while True:
        try:
            status = nearest.stat()
            break
        except FileNotFoundError:
            if nearest.is_symlink():  # its target is missing
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(nearest)) from None
            nearest = nearest.parent
    code = 0
    if not stat.S_ISDIR(status.st_mode):
        code = errno.EEXIST if nearest == folder else errno.ENOTDIR
    elif nearest.parts[:2] in (("/", "proc"), ("/", "sys")):  # the kernel's own, independent of their modes
        code = errno.ENOENT if nearest.parts[1] == "proc" else errno.EPERM
    elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif not os.access(nearest, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        raise OSError(code, os.strerror(code), str(nearest))


def fsync_folder(folder: Path) -> None:
    """Make renames and unlinks inside ``folder`` survive a power cut.

    Filesystems that cannot fsync a folder (some network ones answer EINVAL) keep the guarantees they have.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mode_of_shown_files() -> int:
    """The mode of a new file that is to be shown to others, unless the user's umask says no."""
    os.umask(mask := os.umask(0o077))
    return 0o666 & ~mask


def replace_atomically(
    path: Path, content: str | bytes, *, mode: int = 0o600, durable: bool = True, group: int | None = None
) -> None:
    """Readers see the old file or the new one, never part of either; even after a power cut when it is ``durable``.

    The file gets the ``group`` that is given where its owner is a member of it.

    Raises:
        OSError: the old file is untouched and no temporary file is left.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with naming(path), os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            if group is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), -1, group)
            os.fchmod(stream.fileno(), mode)
            if durable:
                os.fsync(stream.fileno())
        os.replace(name, path)  # noqa: PTH105 - same folder, so the rename cannot cross filesystems
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def replace_link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target``; atomic. A link that is there already is replaced.

    Raises:
        OSError: something else than a link or a file is there, or it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        (link := Path(folder) / "link").symlink_to(target)
        link.replace(path)


def parse_json(text: str | bytes) -> Any:
    """The value in ``text``. A whole number of more than 20 digits comes as NaN: no reader believes it, and no
    arithmetic fails because of its size.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    return _DECODER.decode(text if isinstance(text, str) else text.decode())


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= 20 else math.nan


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def number(value: Any, *, limit: float = 1e15) -> float | None:
    """A number from a state file: finite and not beyond ``limit``; None for anything else."""
    return float(value) if type(value) in (int, float) and -limit <= value <= limit else None


def duration(value: Any) -> float:
    """A duration, or a Unix time, from a state file.

    Raises:
        ValueError: it is none.
    """
    if (found := number(value)) is None or found < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number of seconds")
    return found


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace ``path`` by ``value`` with the format version added; atomic, and durable unless that is not asked for.

    Raises:
        OSError: the old file is untouched.
    """
    text = json.dumps({"format": FORMAT, **value}, sort_keys=True) + "\n"
    replace_atomically(path, text, mode=mode, durable=durable)


def read_json(
    path: Path, *, limit_bytes: int = STATE_LIMIT_BYTES, owners: Collection[int] | None = None
) -> dict[str, Any] | None:
    """The object in ``path``, or None when there is no such file.

    Args:
        owners: user ids that may own the file; None accepts every owner.

    Raises:
        StorageError: it is not a file of at most ``limit_bytes`` with a JSON object, or it belongs to a user that is
            not in ``owners``.
        NewerFormat: a newer slurmft wrote it.
    """
    try:
        text = read_text(path, limit_bytes=limit_bytes, owners=owners)
    except FileNotFoundError:
        return None
    except UnsafeFile as error:
        raise StorageError(f"cannot read {path}: it {error.strerror}", hint=MOVE_AWAY) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}", hint=MOVE_AWAY) from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} does not hold a JSON object", hint=MOVE_AWAY)
    if not isinstance(version := value.get("format"), int):
        raise StorageError(f"{path} does not say which format it has", hint=MOVE_AWAY)
    if version > FORMAT:
        raise NewerFormat(f"{path} has format {version!r}; this slurmft reads up to {FORMAT}", hint="upgrade slurmft")
    return value


def read_as(
    kind: type[Record], path: Path, *, limit_bytes: int = STATE_LIMIT_BYTES, owners: Collection[int] | None = None
) -> Record | None:
    """The record in ``path``, or None when there is no such file.

    Args:
        kind: a dataclass; the types of its fields say what is believed. Other keys are those of a newer version.

    Raises:
        StorageError: as ``read_json``, or it is not of this kind; names the field.
        NewerFormat: a newer slurmft wrote it.
    """
    if (value := read_json(path, limit_bytes=limit_bytes, owners=owners)) is None:
        return None
    import msgspec  # a process that reads no record does not wait for it: a zygote, a writer

    try:
        return msgspec.convert(value, kind)
    except ValueError as error:  # of msgspec, or a text that no encoding knows
        raise StorageError(f"{path} is damaged: {error}", hint=MOVE_AWAY) from error


# --- What others must not see or change: private folders in shared memory, tokens in files, and tags of messages ---

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

IS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags with which a folder is opened, and nothing else; no link to one either."""


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
    descriptor = os.open(path, IS_FOLDER)
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
        inner = os.open(name, IS_FOLDER, dir_fd=folder)
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


# --- A token, or a URL that is one, in a file: never on a command line ---

MAX_TOKEN_BYTES = 4096


def checked_url(url: str, where: str) -> str:
    """The URL itself.

    Raises:
        UsageError: it is none; the message says where it was, and does not repeat it.
    """
    if not url.startswith(("https://", "http://")) or any(sign.isspace() or not sign.isprintable() for sign in url):
        raise UsageError(f"{where} does not hold one URL", hint="one line that begins with https://")
    return url


def url_in(path: Path, *, owners: Collection[int] | None = None) -> str:
    """The URL in a file of one of ``owners``.

    Raises:
        UsageError: it cannot be read, or there is none in it.
    """
    try:
        text = read_text(path, owners=owners, limit_bytes=MAX_TOKEN_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    return checked_url(text.strip(), str(path))


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
