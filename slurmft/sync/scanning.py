"""What lies in a folder that a script writes to at the same time, and whether it is complete.

A file is taken when it has been quiet for a while, no process has it open for writing, and it does not look cut off.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurmft.errors import StorageError
from slurmft.sync.manifest import MAX_FILES, leading_outside, safe_path, stays_inside
from slurmft.system.opening import UnsafeFile, open_regular

INNER = ".slurmft"
"""Our own folder in the folder, where there can be none beside it."""

_WRITING = os.O_WRONLY | os.O_RDWR
_ZIP, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22 + 65535
_MAX_HEADER_BYTES = 100 << 20


class Look(NamedTuple):
    """What changes when a file does: also its inode's own time, which no program can set."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    mode: int


@dataclass(slots=True)
class Tree:
    """A folder's files, folders and links, by their paths below it. ``left_out``: neither, or with unusable names."""

    files: dict[str, Look] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def changed_since(self, other: Tree) -> list[str]:
        """Paths that are new, gone or different."""
        names = self.files.keys() | other.files.keys()
        found = [name for name in names if self.files.get(name) != other.files.get(name)]
        found += {*self.folders} ^ {*other.folders}
        return sorted(found + [name for name, _ in {*self.links.items()} ^ {*other.links.items()}])


def look(status: os.stat_result) -> Look:
    """The look of a file."""
    return Look(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, stat.S_IMODE(status.st_mode))


def scan(path: Path, exclude: Sequence[str] = ()) -> Tree:
    """Everything in ``path``; nothing where it is missing. No link is followed; what vanishes meanwhile is left out.

    Raises:
        StorageError: it has too many files, or is no folder of this user.
        OSError: it cannot be looked at.
    """
    tree = Tree()
    try:
        status = path.lstat()
    except FileNotFoundError:
        return tree
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise StorageError(f"{path} is not a folder of this user", hint="give the script a folder of its own")
    waiting = [""]
    while waiting:
        above = waiting.pop()
        for entry in _entries(path / above):
            name = f"{above}/{entry.name}" if above else entry.name
            if name == INNER or _is_excluded(name, exclude):
                continue
            if len(tree.files) + len(tree.folders) + len(tree.links) >= MAX_FILES:
                raise StorageError(f"{path} has more than {MAX_FILES} files", hint="exclude some of them (exclude)")
            if not safe_path(name):
                tree.left_out.append(name)
            elif _note(tree, name, entry):
                waiting.append(name)
    tree.folders.sort()
    for name in leading_outside(tree.links):
        del tree.links[name]
        tree.left_out.append(name)
    return tree


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns for each in (name, last))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return


def _note(tree: Tree, name: str, entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder to go into."""
    try:
        status = entry.stat(follow_symlinks=False)
        target = Path(entry.path).readlink().as_posix() if stat.S_ISLNK(status.st_mode) else ""
    except OSError:  # it is gone, or another thing by now; the next scan sees that
        return False
    if stat.S_ISREG(status.st_mode):
        tree.files[name] = look(status)
    elif stat.S_ISDIR(status.st_mode):
        tree.folders.append(name)
        return True
    elif target and stays_inside(name, target):
        tree.links[name] = target
    else:
        tree.left_out.append(name)
    return False


def open_for_writing(path: Path, names: Iterable[str]) -> set[str]:
    """Those of the files that a process of this machine, which we may look at, has open for writing."""
    wanted = {os.path.realpath(path / name): name for name in names}
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        try:
            numbers = [entry.name for entry in os.scandir(process / "fd")]
        except OSError:  # it has ended, or is another user's
            continue
        for number in numbers:
            try:
                name = wanted.get(os.readlink(process / "fd" / number))  # noqa: PTH115 - no Path for each descriptor
                if name is not None and _flags(process / "fdinfo" / number) & _WRITING:
                    found.add(name)
            except OSError:
                continue
    return found


def _flags(path: Path) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    return 0


def cut_off(path: Path, names: Iterable[str]) -> list[str]:
    """Those of the files whose beginning says that there should be more: torch's and numpy's zip files, safetensors.

    A writer that is killed leaves such a file, closed and quiet. Other formats do not say how long they are.
    """
    return [name for name in names if _is_cut_off(path / name)]


def _is_cut_off(path: Path) -> bool:
    try:
        descriptor = open_regular(path, follow=False)
    except (FileNotFoundError, UnsafeFile):
        return False
    try:
        size, head = os.fstat(descriptor).st_size, os.pread(descriptor, 8, 0)
        if head.startswith(_ZIP):
            return _ZIP_END not in os.pread(descriptor, _ZIP_END_BYTES, max(0, size - _ZIP_END_BYTES))
        if path.suffix == ".safetensors":
            return size < 8 or not _has_all_tensors(descriptor, int.from_bytes(head, "little"), size)
        # it was just opened: torch and numpy write something at once
        return size == 0 and path.suffix in (".pt", ".pth", ".ckpt", ".npz")
    finally:
        os.close(descriptor)


def _has_all_tensors(descriptor: int, header_bytes: int, size: int) -> bool:
    """Layout as of the safetensors format: the header's length, the header as JSON, and the tensors behind it."""
    import json

    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        return False
    try:
        header = json.loads(os.pread(descriptor, header_bytes, 8))
        ends = [int(each["data_offsets"][1]) for name, each in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return False
    return size == 8 + header_bytes + max(ends, default=0)
