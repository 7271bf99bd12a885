"""The owner of a run folder: conditions before anything in it is executed, submitted, followed or changed.

A run folder is trusted because of its owner, so each check asks the filesystem and never a file's content. Readers
need none of this; every verb that acts does.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmft.errors import StorageError

MAX_LINKS = 40
"""Symbolic links in one path, as the kernel counts."""


def user_name(user_id: int) -> str:
    """The user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user id {user_id}"


def refuse_foreign(folder: Path, *, folders: Sequence[Path], files: Sequence[Path]) -> None:
    """Return when ``folder`` and those of ``folders`` and ``files`` that exist are the caller's.

    Raises:
        StorageError: one of them belongs to another user, is not what its name says, or everyone may write to it.
        OSError: the folder cannot be looked at.
    """
    link, status = os.lstat(folder), folder.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.getuid()):
        raise StorageError(f"{folder} is a symbolic link that {user_name(link.st_uid)} made",
                           hint="name the run folder itself")  # fmt: skip
    if status.st_uid != os.getuid():
        hint = "choose another run_folder, or ask its owner"
        if os.getuid() == 0:
            hint = f"act as its owner: runuser -u {user_name(status.st_uid)} -- slurmft ..."
        raise StorageError(f"the run folder {folder} belongs to user id {status.st_uid}, not to you", hint=hint)
    if status.st_mode & stat.S_IWOTH:
        raise StorageError(f"the run folder {folder} is writable by everybody", hint=f"chmod o-w {folder}")
    for path, is_kind in (*((path, stat.S_ISDIR) for path in folders), *((path, stat.S_ISREG) for path in files)):
        for found in _statuses(path):
            if found.st_uid != os.getuid():
                raise StorageError(
                    f"{path} belongs to user id {found.st_uid}, not to you",
                    hint="another user can write to this run folder: chmod go-w it, then look at what was changed",
                )
            if not is_kind(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                kind = "folder" if is_kind is stat.S_ISDIR else "regular file"
                raise StorageError(f"{path} is not a {kind}", hint="move it away")


def refuse_replaceable(folder: Path, *, parts: Sequence[Path]) -> None:
    """Return when no user but the caller and root could put another folder, or other ``parts``, in their place.

    For unattended actions. A user who may write to a folder can rename its content, so each folder on the way
    counts, links followed. An ordinary user trusts the owners and groups of the folders above; root trusts root alone.

    Raises:
        StorageError: one could.
        OSError: a folder cannot be looked at.
    """
    for step, status, above in _steps(folder):
        if os.getuid() == 0 and (above.st_uid != 0 or above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise StorageError(f"others than root may write to {step.parent}, above a run of root's",
                               hint="keep root's runs where all folders above are writable by root alone")  # fmt: skip
        is_sticky = above.st_mode & stat.S_ISVTX and status.st_uid in (0, os.getuid(), above.st_uid)
        if above.st_mode & stat.S_IWOTH and not is_sticky:
            raise StorageError(f"every user may replace {step}: {step.parent} is writable by everybody",
                               hint=f"chmod +t {step.parent}")  # fmt: skip
    status = folder.stat()
    if _others_may_write(status):
        raise StorageError(f"other users may write to the run folder {folder}", hint=f"chmod go-w {folder}")
    if not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return  # no other user gets that far, with any modes inside
    for path in parts:
        if any(_others_may_write(found) for found in _statuses(path) if not stat.S_ISLNK(found.st_mode)):
            raise StorageError(f"other users may write to {path}", hint=f"chmod go-w {path}")


def followed(path: Path) -> Path:
    """``path`` with its symbolic links resolved: those that the caller or root made where no other may replace them.

    Raises:
        StorageError: another link is on the way: its maker chose the target.
    """
    try:
        for step, status, above in _steps(path):
            if not stat.S_ISLNK(status.st_mode):
                continue
            trusted = {0, os.geteuid()}
            is_sticky = above.st_mode & stat.S_ISVTX
            if not {status.st_uid, above.st_uid} <= trusted or (_others_may_write(above) and not is_sticky):
                raise StorageError(
                    f"{step} is a symbolic link that others than you can make or replace; it is not followed",
                    hint="name the file itself, or move the link to a folder that only you can write to",
                )
    except OSError:
        pass  # the rest is still to be made, or its use says what is wrong
    return Path(os.path.realpath(path))


def _statuses(path: Path) -> list[os.stat_result]:
    """That of ``path`` and, where it is a symbolic link, of its target, as far as they exist."""
    found: list[os.stat_result] = []
    with contextlib.suppress(FileNotFoundError):
        found.append(os.lstat(path))
        if stat.S_ISLNK(found[0].st_mode):
            found.append(path.stat())
    return found


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and (os.getuid() == 0 or not _is_private(status.st_gid))


def _is_private(group_id: int) -> bool:
    """Whether the group is the caller's own and has no other member, as many systems give one to each user."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result, os.stat_result]]:
    """Each name on the way from / to ``path``, links followed: where, its own status, that of the folder it lies in."""
    here, left, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        status = os.lstat(step)
        yield step, status, os.lstat(here)
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        if (links := links + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.readlink()
        if target.is_absolute():
            here = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
