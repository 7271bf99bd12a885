"""One kept folder: its contents and versions, its restore, and its uploads, in a thread of its own, since another one's
store may be silent.

In one piece, since restore and upload are the two directions of the same manifest and of the same record beside the
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import queue
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tenacity

from slurmft.config.sections import SyncConfig
from slurmft.errors import Fenced, NewerFormat, StorageError, StorageUnavailable
from slurmft.policy.values import NONE, Choice, Local, Version, decide
from slurmft.storage.patience import translated, writing
from slurmft.sync.stores import CHUNK_BYTES, FolderStore, Store, open_store
from slurmft.system.files import UnsafeFile, check_private, open_regular, opened, read_json, write_all, write_json
from slurmft.system.foreign_text import log_to_stderr
from slurmft.system.processes import die_with_parent

# --- manifest ---
# What a stored version consists of. It is written last; whatever it says is checked before anything is believed.
#
# <address>/<run>/<place>/versions/<generation>-<sequence>-<random>.json
# <address>/<run>/<place>/data/<sha256 of the content>
# <address>/<run>/<place>/begun/<generation>

FORMAT = 1
VERSIONS, DATA, BEGUN = "versions", "data", "begun"
MAX_FILES = 100_000
"""Of one folder, folders and links in it included."""

MAX_MANIFEST_BYTES = 128 << 20
MAX_FILE_BYTES = 1 << 50
MAX_PATH_BYTES = 4000
MAX_LINKS = 40
"""On the way of one link, as the kernel counts."""

_NAME = re.compile(r"(\d{12})-(\d{12})-[0-9a-f]{8}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file. ``path``: below the folder, with ``/``. ``mode``: its permissions. ``mtime_ns``: Unix time."""

    path: str
    size: int
    mode: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One version. ``links``: path and target of symbolic links that stay inside of the folder."""

    run: str
    version: Version
    files: tuple[Entry, ...]
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(each.size for each in self.files)

    def says_the_same(self, other: Manifest | None) -> bool:
        """Whether both have the same names and contents."""
        return other is not None and _content(self) == _content(other)

    def as_bytes(self) -> bytes:
        """As it is stored."""
        value = {
            "format": FORMAT, "run": self.run, "generation": self.version.generation,
            "sequence": self.version.sequence, "at": time.time(), "folders": self.folders, "links": self.links,
            "files": [[each.path, each.size, each.mode, each.mtime_ns, each.sha256] for each in self.files],
        }  # fmt: skip
        return json.dumps(value).encode()


def _content(manifest: Manifest) -> object:
    return {(each.path, each.sha256, each.mode) for each in manifest.files}, manifest.folders, manifest.links


def new_name(version: Version) -> str:
    """A name that sorts by version, and that no other writer takes."""
    return f"{VERSIONS}/{version.generation:012}-{version.sequence:012}-{secrets.token_hex(4)}.json"


def version_of(name: str) -> Version | None:
    """The version that a name in ``versions`` stands for; None where it is none of ours."""
    found = _NAME.fullmatch(name)
    return Version(int(found[1]), int(found[2])) if found else None


def is_blob(name: str) -> bool:
    """Whether a name in ``data`` is one of ours."""
    return _SHA256.fullmatch(name) is not None


def safe_path(path: str) -> bool:
    """Whether it names something below a folder, whatever folder that is."""
    return (
        isinstance(path, str)
        and 0 < len(path) <= MAX_PATH_BYTES
        and "\0" not in path
        and not path.startswith("/")
        and all(part not in ("", ".", "..") and len(part) <= 255 for part in path.split("/"))
    )


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path`` with this target ends below the folder, by the words alone."""
    if not target or target.startswith("/") or "\0" in target or len(target) > MAX_PATH_BYTES:
        return False
    depth = len(PurePosixPath(path).parent.parts)
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return False
    return True


def leading_outside(links: Mapping[str, str]) -> list[str]:
    """The links that end outside of the folder, or nowhere, when others on their way are followed as the kernel does;
    ``stays_inside`` has looked at each by itself."""
    found = []
    for start in links:
        here, left, followed = list[str](), start.split("/")[::-1], 0
        while left:
            part = left.pop()
            if part == "..":
                if not here:
                    found.append(start)
                    break
                here.pop()
            elif part not in ("", "."):
                here.append(part)
                if (target := links.get("/".join(here))) is not None:
                    followed += 1
                    if followed > MAX_LINKS:
                        found.append(start)
                        break
                    here.pop()
                    left += target.split("/")[::-1]
    return found


def parse(content: bytes, *, run: str, version: Version) -> Manifest:
    """A stored version.

    Raises:
        NewerFormat: a newer slurmft wrote it.
        StorageError: it is damaged, of another run or version, or names something outside of its folder.
    """
    try:
        value = json.loads(content)
        if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
            raise NewerFormat(f"version {version} has format {value['format']}; this slurmft reads up to {FORMAT}",
                              hint="upgrade slurmft")  # fmt: skip
        found = Manifest(
            run=str(value["run"]),
            version=Version(int(value["generation"]), int(value["sequence"])),
            files=tuple(_entry(each) for each in value["files"]),
            folders=tuple(map(str, value["folders"])),
            links=tuple((str(path), str(target)) for path, target in value["links"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise StorageError(f"version {version} is damaged: {error!r}"[:300]) from error
    if (found.run, found.version) != (run, version):
        raise StorageError(f"version {version} says that it is {found.version} of {found.run[:80]!r}")
    _check(found)
    return found


def _entry(row: Any) -> Entry:
    path, size, mode, mtime_ns, sha256 = row
    numbers: Mapping[str, Any] = {"size": size, "mode": mode, "mtime_ns": mtime_ns}
    if any(type(each) is not int for each in numbers.values()) or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"{path!r} has {numbers}"[:200])
    if not isinstance(sha256, str) or not is_blob(sha256) or not 0 <= mtime_ns < 1 << 63:
        raise ValueError(f"{path!r} has no digest, or an impossible time"[:200])
    return Entry(path=path, size=size, mode=mode & 0o755 | 0o400, mtime_ns=mtime_ns, sha256=sha256)


def _check(manifest: Manifest) -> None:
    """Every name lies below the folder, none occurs twice, and nothing lies in what is no folder."""
    paths = [*(each.path for each in manifest.files), *manifest.folders, *(path for path, _ in manifest.links)]
    if len(paths) > MAX_FILES:
        raise StorageError(f"version {manifest.version} has {len(paths)} files; at most {MAX_FILES}")
    if bad := next((path for path in paths if not safe_path(path)), None):
        raise StorageError(f"version {manifest.version} names {bad[:80]!r}, which is not below a folder")
    if bad_link := next((path for path, target in manifest.links if not stays_inside(path, target)), None):
        raise StorageError(f"version {manifest.version} has a link out of its folder: {bad_link[:80]!r}")
    if bad_links := leading_outside(dict(manifest.links)):
        raise StorageError(f"version {manifest.version} has a link out of its folder by others: {bad_links[0][:80]!r}")
    folders = set(manifest.folders)
    if len(set(paths)) != len(paths):
        raise StorageError(f"version {manifest.version} has a name twice")
    for path in paths:
        above = path.rpartition("/")[0]
        if above and above not in folders:
            raise StorageError(f"version {manifest.version} has {path[:80]!r} in what is not a folder")


# --- What lies in a folder that a script writes to at the same time, and whether it is complete ---
# A file is taken when it has been quiet for a while, no process has it open for writing, and it does not look cut off.

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
    with contextlib.suppress(FileNotFoundError, UnsafeFile), opened(path, follow=False) as descriptor:
        size, head = os.fstat(descriptor).st_size, os.pread(descriptor, 8, 0)
        if head.startswith(_ZIP):
            return _ZIP_END not in os.pread(descriptor, _ZIP_END_BYTES, max(0, size - _ZIP_END_BYTES))
        if path.suffix == ".safetensors":
            return size < 8 or not _has_all_tensors(descriptor, int.from_bytes(head, "little"), size)
        # it was just opened: torch and numpy write something at once
        return size == 0 and path.suffix in (".pt", ".pth", ".ckpt", ".npz")
    return False


def _has_all_tensors(descriptor: int, header_bytes: int, size: int) -> bool:
    """Layout as of the safetensors format: the header's length, the header as JSON, and the tensors behind it."""
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        return False
    try:
        header = json.loads(os.pread(descriptor, header_bytes, 8))
        ends = [int(each["data_offsets"][1]) for name, each in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return False
    return size == 8 + header_bytes + max(ends, default=0)


# --- The state beside a kept folder: which version its files are of, and of which run and attempt ---

RECORD, ASIDE, LOCK = "state.json", "aside", "lock"
MAX_RECORD_BYTES = 128 << 20


def own_folder(path: Path) -> Path:
    """Our private folder for ``path``: beside it, else in it. Both are on its filesystem, so that files can be renamed.

    Raises:
        StorageError: neither can be made, or another user has made it.
    """
    beside, inside = path.parent / f".{path.name}{INNER}", path / INNER
    for place in (inside, beside):
        if place.is_dir():
            return _checked(place)
    with writing(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_dev == path.parent.stat().st_dev:
        with contextlib.suppress(OSError):
            beside.mkdir(mode=0o700)
            return _checked(beside)
    with writing(inside):
        inside.mkdir(mode=0o700)
    return _checked(inside)


def _checked(place: Path) -> Path:
    try:
        check_private(place)
    except OSError as error:
        raise StorageError(f"{place} {error.strerror}: it is not believed", hint="remove it") from error
    return place


class Record:
    """Reads and writes the state of one folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.own = path, own_folder(path)
        self.aside = self.own / ASIDE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for another process of this machine that restores the same folder; two nodes may share its filesystem.

        Raises:
            StorageError: the lock cannot be made.
        """
        with writing(self.own / LOCK):
            descriptor = open_regular(self.own / LOCK, os.O_RDWR | os.O_CREAT, follow=False)
        try:
            with writing(self.own / LOCK):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> Mapping[str, Any]:
        with contextlib.suppress(StorageError):  # damaged: its files are of an unknown run
            return read_json(self.own / RECORD, limit_bytes=MAX_RECORD_BYTES, owners={os.geteuid()}) or {}
        return {}

    def local(self, tree: Tree) -> Local:
        """What the folder has, as far as the record and the files say."""
        value = self._read()
        try:
            known = {str(name): Look(*map(int, numbers)) for name, numbers in value.get("files", {}).items()}
            return Local(
                has_files=bool(tree.files or tree.links),
                run=str(value.get("run", "")),
                version=Version(*map(int, value.get("version", (-1, -1)))),
                generation=int(value.get("generation", -1)),
                changed=known != tree.files,
                damaged=bool(value.get("restoring")) or bool(cut_off(self.path, tree.files)),
            )
        except (TypeError, ValueError, AttributeError):
            return Local(has_files=bool(tree.files or tree.links))

    def write(self, tree: Tree, *, run: str, version: Version, generation: int, restoring: bool = False) -> None:
        """Note what its files are now.

        Raises:
            StorageError: it cannot be written.
        """
        files = {name: [*each] for name, each in tree.files.items()}
        value = {"run": run, "version": [*version], "generation": generation, "files": files, "restoring": restoring}
        with writing(self.own / RECORD):
            write_json(self.own / RECORD, value)

    def note_use(self, *, run: str, generation: int) -> None:
        """Note that an attempt uses the files as they are; the version that they came from stays known.

        Raises:
            StorageError: it cannot be written.
        """
        value = self._read()
        same = value if value.get("run") == run else {}
        with writing(self.own / RECORD):
            write_json(self.own / RECORD, {**same, "run": run, "generation": generation, "restoring": False})

    def set_aside(self, *, keep: bool, goes_on: bool = False) -> bool:
        """Move everything out of the folder; what was set aside before is removed. Returns whether there was anything.

        Args:
            goes_on: an earlier restore did not come to its end; what it has set aside stays.

        Raises:
            StorageError: something cannot be moved; run again, it goes on with the rest.
        """
        with writing(self.path):
            entries = [entry for entry in self.path.iterdir() if entry.name != INNER]
            if not goes_on:
                shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir(mode=0o700, exist_ok=True)
            for entry in entries:
                if (there := self.aside / entry.name).is_dir() and not there.is_symlink():
                    shutil.rmtree(there)
                entry.rename(there)
            if not keep:
                shutil.rmtree(self.aside, ignore_errors=True)
        return bool(entries)

    def remove_partial_restores(self, prefix: str) -> None:
        """Remove what restores that were killed have left."""
        for each in self.own.glob(f"{prefix}*"):
            shutil.rmtree(each, ignore_errors=True)


# --- restoring ---
# One folder's restore: fetched into a folder of our own, checked by digest, then moved to where the script looks.

INCOMING = "incoming-"
THREADS = 4
SPARE_BYTES = 16 << 20
"""Disk space that a restore leaves free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a node has now. ``version``: empty where nothing is stored. ``aside``: where what was there is now."""

    choice: Choice
    reason: str
    version: str
    files: int = 0
    size_bytes: int = 0
    aside: str = ""


def _stored(store: Store) -> list[tuple[Version, str]]:
    """The versions in a store, whole or not, and what they are called there; newest first."""
    names = store.names(VERSIONS)
    found = ((version, f"{VERSIONS}/{name}") for name in names if (version := version_of(name)) is not None)
    return sorted(found, reverse=True)


def newest(store: Store, run: str) -> Manifest | None:
    """The newest version that is complete; None where there is none.

    Raises:
        StorageError: it cannot be found out. Nothing is said then, rather than that there is none.
    """
    versions = _stored(store)
    blobs = store.names(DATA) if versions else {}
    for version, name in versions:
        content = store.read(name, limit_bytes=MAX_MANIFEST_BYTES)
        try:
            found = parse(content, run=run, version=version)
        except NewerFormat:
            raise
        except StorageError as error:
            log.warning("left out: %s", error.what)
            continue
        if all(blobs.get(each.sha256) == each.size for each in found.files):
            return found
        log.warning("left out: version %s has lost contents", version)
    return None


def restore(
    record: Record, store: Store, found: Manifest | None, *, run: str, generation: int, follows_lead: bool,
    exclude: Sequence[str] = (),
) -> Restored:  # fmt: skip
    """Give the folder what the script is to find, and note that this attempt uses it.

    Raises:
        StorageError: it cannot be fetched, is damaged, or does not fit on the disk; the folder is as it was.
    """
    record.remove_partial_restores(INCOMING)
    tree = _scanned(record.path, exclude)
    local = record.local(tree)
    decision = decide(local, found.version if found else None, run=run, follows_lead=follows_lead)
    version, aside = local.version if local.run == run else NONE, ""
    if decision.choice is Choice.KEEP:
        record.note_use(run=run, generation=generation)
        told = "" if version == NONE else str(version)
        return Restored(choice=decision.choice, reason=decision.reason, version=told, files=len(tree.files))
    with contextlib.ExitStack() as stack:
        incoming = None
        if decision.choice is Choice.RESTORE and found is not None:
            incoming = stack.enter_context(_incoming(record))
            _fetch(record.path, store, found, incoming)
            version = found.version
        record.write(Tree(), run=run, version=version, generation=generation, restoring=True)
        goes_on = local.run == run and local.damaged and not tree.files
        if record.set_aside(keep=decision.spare_old, goes_on=goes_on) and decision.spare_old:
            aside = str(record.aside)
        with writing(record.path):
            for each in incoming.iterdir() if incoming is not None else ():
                each.rename(record.path / each.name)
    tree = _scanned(record.path, exclude)
    record.write(tree, run=run, version=version, generation=generation)
    return Restored(
        choice=decision.choice, reason=decision.reason, version=str(version) if found else "", aside=aside,
        files=len(found.files) if found else 0, size_bytes=found.size_bytes if found else 0,
    )  # fmt: skip


def _scanned(path: Path, exclude: Sequence[str]) -> Tree:
    try:
        return scan(path, exclude)
    except OSError as error:
        raise translated(f"cannot read {path}", error) from error


@contextlib.contextmanager
def _incoming(record: Record) -> Iterator[Path]:
    with writing(record.own):
        place = Path(tempfile.mkdtemp(prefix=INCOMING, dir=record.own))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _fetch(path: Path, store: Store, found: Manifest, incoming: Path) -> None:
    """Make the version in ``incoming``."""
    with writing(incoming):
        free = os.statvfs(incoming)
    if found.size_bytes + SPARE_BYTES > free.f_bavail * free.f_frsize:
        raise StorageUnavailable(
            f"{path} has {free.f_bavail * free.f_frsize >> 20} MiB free, the stored version needs "
            f"{found.size_bytes + SPARE_BYTES >> 20}",
            hint="free space on the node, or start on others",
        )
    with writing(incoming):
        for folder in sorted(found.folders):
            (incoming / folder).mkdir(mode=0o700)
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda entry: _fetch_one(path, store, entry, incoming / entry.path), found.files):
            pass
    with writing(incoming):
        for name, target in found.links:
            (incoming / name).symlink_to(target)


def _fetch_one(path: Path, store: Store, entry: Entry, target: Path) -> None:
    with writing(target):
        descriptor = open_regular(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow=False)
    try:
        if not _copied(path / entry.path, entry, descriptor):
            digest, size = hashlib.sha256(), 0
            for chunk in store.chunks(f"{DATA}/{entry.sha256}"):
                size += len(chunk)
                if size > entry.size:
                    break
                digest.update(chunk)
                with writing(target):
                    write_all(descriptor, chunk)
            if size != entry.size or digest.hexdigest() != entry.sha256:
                raise StorageError(f"{entry.path} as it is stored is not what was stored", hint="its digest differs")
        with writing(target):
            os.fchmod(descriptor, entry.mode)
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(descriptor)


def _copied(source: Path, entry: Entry, descriptor: int) -> bool:
    """Whether the file was here already and could be copied instead of fetched."""
    with contextlib.suppress(OSError), opened(source, follow=False) as own:
        if os.fstat(own).st_size != entry.size:
            return False
        digest = hashlib.sha256()
        with writing(source):
            while chunk := os.read(own, CHUNK_BYTES):
                digest.update(chunk)
                write_all(descriptor, chunk)
            if digest.hexdigest() == entry.sha256:
                return True
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
    return False


# --- One folder's uploads: contents first, the manifest last, and the garbage after that ---

QUIET_S = 1.0
"""How long files must not have changed before they are taken, by this process's own clock."""

QUIET_AT_THE_END_S = 0.2
"""The same when all workers have ended."""

HELD_OPEN_S = 30.0
"""A file that is open for writing and has not changed for so long is taken: logs stay open for the whole run."""

NAMED = 3
"""Files that an error names."""


class StillChanging(StorageUnavailable):
    """Files change faster than they can be taken."""


class Throttle:
    """Spreads bytes over time; shared by threads.

    Args:
        bytes_per_s: 0 for no limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    def take(self, count: int) -> None:
        """Return when ``count`` bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now_s = time.monotonic()
            wait_s = max(0.0, self._free_at_s - now_s)
            self._free_at_s = max(now_s, self._free_at_s) + count / self._rate
        time.sleep(wait_s)


class Uploader:
    """Stores versions of one folder, for one attempt.

    Args:
        generation: of the attempt; nothing is stored once a newer one has begun.
        newest: the newest version that is stored.
        moves: called whenever a piece of a file was read, or is about to be; from any thread.
    """

    def __init__(
        self, store: Store, record: Record, *, run: str, generation: int, newest: Manifest | None, keep: int,
        exclude: Sequence[str], bytes_per_s: float, moves: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._store, self._record, self._path = store, record, record.path
        self._run, self._generation, self._keep, self._exclude = run, generation, keep, tuple(exclude)
        self._throttle = Throttle(bytes_per_s)
        self._newest, self._moves = newest, moves
        self._sequence = max((each.sequence for each, _ in _stored(store) if each.generation == generation), default=0)
        self._blobs = dict(store.names(DATA))
        self._digests: dict[str, tuple[Look, str]] = {}
        self._stored_tree: Tree | None = None
        self._quiet_since: dict[str, tuple[Look, float]] = {}
        if isinstance(store, FolderStore):
            for folder in (DATA, VERSIONS):
                store.remove_partly_written(folder)

    def upload(self, *, at_end: bool, patience_s: float) -> Manifest | None:
        """Store what the folder holds now; None where that is stored already.

        Raises:
            StillChanging: the files did not come to rest within ``patience_s`` seconds.
            Fenced: a newer attempt has begun.
            StorageError: it cannot be read or stored.
        """
        deadline_s = time.monotonic() + patience_s
        if self._stored_tree is not None and not self._scan().changed_since(self._stored_tree):
            return None
        while True:
            tree = self._at_rest(deadline_s, QUIET_AT_THE_END_S if at_end else QUIET_S)
            try:
                self._digest(tree)
                self._send(tree)
            except _Changed as error:
                self._refuse_late(deadline_s, [str(error)])
                continue
            if not (changed := self._scan().changed_since(tree)):
                break
            self._refuse_late(deadline_s, changed)
        found = self._publish(tree)
        self._stored_tree = tree
        version = found.version if found is not None else self._newest.version if self._newest else NONE
        self._record.write(tree, run=self._run, version=version, generation=self._generation)
        if found is not None:
            collect_garbage(self._store, self._run, keep=self._keep)
        return found

    def _scan(self) -> Tree:
        return _scanned(self._path, self._exclude)

    def _at_rest(self, deadline_s: float, quiet_s: float) -> Tree:
        """The folder, once nothing in it changes."""
        while True:
            self._moves()
            before = self._scan()
            time.sleep(quiet_s)
            tree = self._scan()
            busy = tree.changed_since(before)
            now_s = time.monotonic()
            since = self._quiet_since
            self._quiet_since = {
                name: since[name] if name in since and since[name][0] == each else (each, now_s)
                for name, each in tree.files.items()
            }
            fresh = [name for name, (_, since_s) in self._quiet_since.items() if now_s - since_s < HELD_OPEN_S]
            busy += sorted(open_for_writing(self._path, fresh) - {*busy})
            if not busy:
                known = self._stored_tree.files if self._stored_tree else {}
                if torn := cut_off(self._path, [name for name, it in tree.files.items() if known.get(name) != it]):
                    raise StorageUnavailable(
                        f"{self._path} is not uploaded: {_named(torn)} ends in the middle",
                        hint="its writer was killed, or writes in pieces; the version before it stays the newest one",
                    )
                return tree
            self._refuse_late(deadline_s, busy)

    def _refuse_late(self, deadline_s: float, changing: Sequence[str]) -> None:
        if time.monotonic() > deadline_s:
            raise StillChanging(
                f"{self._path} is not uploaded: {_named(changing)} did not stop changing",
                hint="leave files out that are always written to: sync.exclude",
            )

    def _digest(self, tree: Tree) -> None:
        new = [name for name, each in tree.files.items() if self._digests.get(name, (None, ""))[0] != each]
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(lambda name: self._digest_of(name, tree.files[name]), new))
        self._digests = {name: found for name, found in self._digests.items() if name in tree.files}
        self._digests |= {name: (tree.files[name], digest) for name, digest in zip(new, digests, strict=True)}

    def _digest_of(self, name: str, expected: Look) -> str:
        digest = hashlib.sha256()
        for chunk in self._content(name, expected):
            digest.update(chunk)
        return digest.hexdigest()

    def _content(self, name: str, expected: Look) -> Iterator[bytes]:
        """The file's bytes.

        Raises:
            _Changed: it is not the one that was looked at, or was changed meanwhile.
        """
        path = self._path / name
        try:
            with opened(path, follow=False) as descriptor:
                left = expected.size
                while left > 0 and look(os.fstat(descriptor)) == expected:
                    if not (chunk := os.read(descriptor, min(left, CHUNK_BYTES))):
                        break
                    left -= len(chunk)
                    self._moves()
                    yield chunk
                if left or look(os.fstat(descriptor)) != expected:
                    raise _Changed(name)
        except FileNotFoundError:
            raise _Changed(name) from None
        except OSError as error:
            raise translated(f"cannot read {path}", error) from error

    def _send(self, tree: Tree) -> None:
        """Have every content stored."""
        wanted = {self._digests[name][1]: name for name in tree.files}
        missing = [
            (digest, name) for digest, name in wanted.items() if self._blobs.get(digest) != tree.files[name].size
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            sent = pool.map(lambda each: self._send_one(each[0], each[1], tree.files[each[1]]), missing)
            for digest, size in sent:
                self._blobs[digest] = size

    def _send_one(self, digest: str, name: str, expected: Look) -> tuple[str, int]:
        seen = hashlib.sha256()

        def checked() -> Iterator[bytes]:
            for chunk in self._content(name, expected):
                self._throttle.take(len(chunk))
                seen.update(chunk)
                yield chunk
            if seen.hexdigest() != digest:  # with the same times and size: memory-mapped
                raise _Changed(name)

        self._store.write(f"{DATA}/{digest}", checked(), size=expected.size)
        return digest, expected.size

    def _publish(self, tree: Tree) -> Manifest | None:
        """Write the manifest; None where the newest one says the same."""
        files = tuple(
            Entry(path=name, size=each.size, mode=each.mode & 0o777, mtime_ns=max(0, each.mtime_ns),
                  sha256=self._digests[name][1])
            for name, each in sorted(tree.files.items())
        )  # fmt: skip
        version = Version(self._generation, self._sequence + 1)
        found = Manifest(run=self._run, version=version, files=files, folders=tuple(tree.folders),
                         links=tuple(sorted(tree.links.items())))  # fmt: skip
        if found.says_the_same(self._newest) or (self._newest is None and not files):
            return None
        self._refuse_fenced()
        blobs = self._store.names(DATA)
        if lost := [each.path for each in files if blobs.get(each.sha256) != each.size]:
            self._blobs = dict(blobs)
            raise StorageUnavailable(f"{len(lost)} files of {self._path} were removed where they are stored")
        self._store.write(new_name(version), [content := found.as_bytes()], size=len(content))
        self._newest, self._sequence = found, version.sequence
        return found

    def _refuse_fenced(self) -> None:
        begun = [int(name) for name in self._store.names(BEGUN) if name.isdecimal() and len(name) <= 12]
        if max(begun, default=0) > self._generation:
            raise Fenced(f"{self._path} is not uploaded: a newer attempt of the run has begun")


def begin(store: Store, generation: int) -> None:
    """Note that an attempt has begun, so that older ones, cut off and still alive, store and remove nothing more.

    Raises:
        StorageError: it cannot be noted.
    """
    names = store.names(BEGUN)
    store.write(f"{BEGUN}/{generation}", [b"1"], size=1)
    older = [name for name in names if name.isdecimal() and int(name) < generation]
    store.remove(f"{BEGUN}/{name}" for name in older)


def collect_garbage(store: Store, run: str, *, keep: int) -> None:
    """Remove versions beyond the newest ``keep``, then contents that no version needs.

    A kill in between leaves contents that the next one removes. Unless every version that stays can be read, no
    contents are removed.

    Raises:
        StorageError: it could not be done.
    """
    blobs = store.names(DATA)  # first: what is stored later belongs to a version that is not seen here
    kept: list[Manifest] = []
    versions = _stored(store)
    for version, name in versions[:keep]:
        content = store.read(name, limit_bytes=MAX_MANIFEST_BYTES)
        try:
            kept.append(parse(content, run=run, version=version))
        except StorageError as error:
            log.warning("nothing is removed beside a version that cannot be read: %s", error.what)
            return
    store.remove(name for _, name in versions[keep:])
    needed = {each.sha256 for manifest in kept for each in manifest.files}
    store.remove(f"{DATA}/{name}" for name in blobs if is_blob(name) and name not in needed)


class _Changed(Exception):
    """A file is not what it was."""


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name)[1:-1] for name in names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


# --- folder ---

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
PATIENCE_S = 60.0
"""How long one upload waits for files to come to rest."""

SILENT_S = 120.0
"""A regular upload that has sent nothing for so long has failed, as far as is told: its store may hang for ever."""

Say = Callable[[Mapping[str, Any]], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the agent wants done. ``number``: comes back in the answer. ``place``: of the node among the run's."""

    action: str
    number: int
    run: str = ""
    place: int = 0
    generation: int = 0
    within_s: float = 0.0


class KeptFolder:
    """Carries out orders, and uploads in between.

    Args:
        say: sends a message to the agent; from any thread.
    """

    def __init__(self, config: SyncConfig, index: int, say: Say) -> None:
        self._config, self._index, self._say = config, index, say
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._wanted = threading.Event()
        """There is an order: whatever waits for a better time gives way."""

        self._order: Order | None = None
        self._uploader: Uploader | None = None
        self._next_s: float | None = None
        self._failing = self._told_first = False
        self._moved_s: float | None = None
        """When the regular upload that is under way has last come on; None where none is."""

        threading.Thread(target=self._work, daemon=True, name=f"sync {index}").start()
        threading.Thread(target=self._watch, daemon=True, name=f"sync {index} watch").start()

    def take(self, order: Order) -> None:
        """Have it carried out; returns at once."""
        self._orders.put(order)
        self._wanted.set()

    def _work(self) -> None:
        while True:
            try:
                wait_s = None if self._next_s is None else max(0.0, self._next_s - time.monotonic())
                order = self._orders.get(timeout=wait_s)
            except queue.Empty:
                self._upload_regularly()
                continue
            if self._orders.empty():
                self._wanted.clear()
            problem = ""
            try:
                self._carry_out(order)
            except StorageError as error:
                problem = str(error)
            self._say({"kind": "done", "folder": self._index, "number": order.number, "problem": problem[:2000]})

    def _watch(self) -> None:
        """Tell of a store that does not answer: the thread that waits for it cannot."""
        while True:
            time.sleep(SILENT_S / 8)
            moved_s = self._moved_s
            if moved_s is not None and not self._failing and (silent_s := time.monotonic() - moved_s) > SILENT_S:
                what = f"{self._config.path} is not uploaded: {self._config.url} has not answered for {silent_s:.0f} s"
                self._fail(StorageUnavailable(what, hint="training goes on, and the upload when it answers"))

    def _moves(self) -> None:
        self._moved_s = time.monotonic()

    def _carry_out(self, order: Order) -> None:
        if order.action == "upload":
            self._upload_last(order.within_s)
            return
        self._order, self._uploader, self._next_s = order, None, None
        self._failing = self._told_first = False
        if order.action == "restore":
            self._restore(order)
        if self._stores:
            self._next_s = time.monotonic() + self._config.frequency

    @property
    def _stores(self) -> bool:
        """This node's folder is stored."""
        return self._order is not None and (self._config.each_node or self._order.place == 0)

    def _store(self, order: Order) -> Store:
        place = f"node-{order.place}" if self._config.each_node else "lead"
        return open_store(self._config.url, f"{order.run}/{place}")

    def _restore(self, order: Order) -> None:
        began_s = time.monotonic()
        for attempt in self._retrying(within_s=self._config.restore_timeout_s):
            with attempt:
                store = self._store(order)
                if self._stores:
                    begin(store, order.generation)
                found = newest(store, order.run)
                record = Record(self._config.path)
                with record.locked():
                    done = restore(
                        record, store, found, run=order.run, generation=order.generation,
                        follows_lead=not self._stores, exclude=self._config.exclude,
                    )  # fmt: skip
        what = {Choice.KEEP: "kept", Choice.RESTORE: "restored", Choice.SET_ASIDE: "set aside"}[done.choice]
        aside = f"; what was there is in {done.aside}" if done.aside else ""
        self._tell(what, done.reason + aside, version=done.version, files=done.files, size=done.size_bytes,
                   began_s=began_s)  # fmt: skip

    def _upload_regularly(self) -> None:
        self._moves()
        try:
            for attempt in self._retrying(within_s=None):
                with attempt:
                    self._moves()
                    self._upload(at_end=False, patience_s=PATIENCE_S)
        except Fenced as error:
            self._fail(error)
            self._next_s = None
            return
        except StorageError as error:
            self._fail(error)
        finally:
            self._moved_s = None
        self._next_s = time.monotonic() + self._config.frequency

    def _upload_last(self, within_s: float) -> None:
        """The workers have ended: what is there now is what the next attempt is to find."""
        self._next_s = None
        if not self._stores:
            return
        try:
            for attempt in self._retrying(within_s=within_s):
                with attempt:
                    self._upload(at_end=True, patience_s=within_s)
        except StorageError as error:
            self._fail(error)
            raise
        finally:
            self._moved_s = None

    def _upload(self, *, at_end: bool, patience_s: float) -> None:
        if (order := self._order) is None:
            return
        began_s = time.monotonic()
        if self._uploader is None:
            store = self._store(order)
            self._uploader = Uploader(
                store, Record(self._config.path), run=order.run, generation=order.generation,
                newest=newest(store, order.run), keep=self._config.keep, exclude=self._config.exclude,
                bytes_per_s=self._config.bandwidth_mb_s * 1e6, moves=self._moves,
            )  # fmt: skip
        found = self._uploader.upload(at_end=at_end, patience_s=patience_s)
        if self._failing:
            self._failing = False
            self._tell("works again", "")
        if found is not None and (at_end or not self._told_first):
            self._told_first = True
            self._tell("uploaded", "at the end" if at_end else "the first of this attempt", version=str(found.version),
                       files=len(found.files), size=found.size_bytes, began_s=began_s)  # fmt: skip

    def _retrying(self, within_s: float | None) -> tenacity.Retrying:
        stop = tenacity.stop_when_event_set(self._wanted)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StorageUnavailable),
            wait=tenacity.wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)
            + tenacity.wait_random(0, FIRST_PAUSE_S),
            stop=stop if within_s is None else stop | tenacity.stop_after_delay(within_s),
            sleep=tenacity.sleep_using_event(self._wanted),
            before_sleep=self._before_sleep,
            reraise=True,
        )

    def _before_sleep(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, StorageError):
            self._uploader = None  # what is stored is looked up again
            self._fail(error)

    def _fail(self, error: StorageError) -> None:
        """Say so once in a row of failures."""
        if not self._failing:
            log.warning("%s", error.what)
            self._tell("failed", str(error))
        self._failing = True

    def _tell(
        self, what: str, reason: str, *, version: str = "", files: int = 0, size: int = 0, began_s: float | None = None
    ) -> None:
        took_s = 0.0 if began_s is None else time.monotonic() - began_s
        self._say(
            {"kind": "event", "what": what, "path": str(self._config.path), "reason": reason[:2000],
             "version": version, "files": files, "bytes": size, "took_s": round(took_s, 3)}
        )  # fmt: skip


# --- The process that keeps a node's folders: a store that does not answer must not block the agent ---
# It reads lines of JSON, first the settings of the folders and then orders, and writes lines of JSON. It ends with its
# agent.

NICE = 10
EXIT_INTERNAL = 70


def main() -> None:
    """Serve until the standard input ends."""
    log_to_stderr("slurmft: %(message)s")
    die_with_parent()
    os.nice(NICE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the agent says when to stop
        signal.signal(number, lambda _number, _frame: None)
    threading.excepthook = _end_with
    lock = threading.Lock()

    def say(message: Mapping[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    folders: list[KeptFolder] = []
    for line in sys.stdin:
        value = json.loads(line)
        if not folders:
            folders = [KeptFolder(SyncConfig.model_validate(each), at, say) for at, each in enumerate(value["folders"])]
            continue
        for folder in folders:
            folder.take(Order(**value))
    os._exit(0)  # a thread may be waiting for a store for ever


def _end_with(arguments: threading.ExceptHookArgs) -> None:
    log.error("internal error: %r", arguments.exc_value, exc_info=arguments.exc_value)
    os._exit(EXIT_INTERNAL)


if __name__ == "__main__":
    main()
