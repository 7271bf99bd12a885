"""One folder's restore: fetched into a folder of our own, checked by digest, then moved to where the script looks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import NewerFormat, StorageError, StorageUnavailable
from slurmft.policy.synced_folders import NONE, Choice, decide
from slurmft.storage.patience import translated, writing
from slurmft.sync import manifest as stored
from slurmft.sync.manifest import Entry, Manifest
from slurmft.sync.record import Record
from slurmft.sync.scanning import Tree, scan
from slurmft.sync.stores import CHUNK_BYTES, Store
from slurmft.system.opening import UnsafeFile, open_regular

INCOMING = "incoming-"
THREADS = 4
SPARE_BYTES = 16 << 20
"""Disk space that a restore leaves free."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a node has now. ``version``: empty where nothing is stored. ``aside``: where what was there is now."""

    choice: Choice
    reason: str
    version: str
    files: int = 0
    size_bytes: int = 0
    aside: str = ""


def newest(store: Store, run: str) -> Manifest | None:
    """The newest version that is complete; None where there is none.

    Raises:
        StorageError: it cannot be found out. Nothing is said then, rather than that there is none.
    """
    names = store.names(stored.VERSIONS)
    versions = sorted(
        ((version, name) for name in names if (version := stored.version_of(name)) is not None), reverse=True
    )
    blobs = store.names(stored.DATA) if versions else {}
    for version, name in versions:
        content = store.read(f"{stored.VERSIONS}/{name}", limit_bytes=stored.MAX_MANIFEST_BYTES)
        try:
            found = stored.parse(content, run=run, version=version)
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
            for chunk in store.chunks(f"{stored.DATA}/{entry.sha256}"):
                size += len(chunk)
                if size > entry.size:
                    break
                digest.update(chunk)
                with writing(target):
                    _write(descriptor, chunk)
            if size != entry.size or digest.hexdigest() != entry.sha256:
                raise StorageError(f"{entry.path} as it is stored is not what was stored", hint="its digest differs")
        with writing(target):
            os.fchmod(descriptor, entry.mode)
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(descriptor)


def _copied(source: Path, entry: Entry, descriptor: int) -> bool:
    """Whether the file was here already and could be copied instead of fetched."""
    try:
        own = open_regular(source, follow=False)
    except (OSError, UnsafeFile):
        return False
    try:
        if os.fstat(own).st_size != entry.size:
            return False
        digest = hashlib.sha256()
        with writing(source):
            while chunk := os.read(own, CHUNK_BYTES):
                digest.update(chunk)
                _write(descriptor, chunk)
            if digest.hexdigest() == entry.sha256:
                return True
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
    finally:
        os.close(own)
    return False


def _write(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]
