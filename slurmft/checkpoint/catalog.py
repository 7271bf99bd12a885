"""The content of a checkpoint directory: names, markers, order; which checkpoints are kept, and the removal of others;
reading one to the last byte, to see whether everything matches its marker; and the index that torch reads. No torch.

    <checkpoint_dir>/step-00000100.g7.c12/     step 100, written by generation 7, the 12th commit of this directory
        .metadata          the index of torch.distributed.checkpoint, which torch reads and slurmft never does
        __3_0.distcp       the image of shard 3 (``checkpoint.image_file``)
        __3_0.json         its index with the digests of all its items; written when the image is durable
        manifest.json      the commit marker: names every file with its size; written last
        quarantined.json   written by a supervisor: runs die from this one (storage.checkpoint_names)

The commit number grows by one with every save, also when steps go back. It decides which checkpoint is newest, so that
a run which went back to an older step (and commits lower steps again) is followed, not the branch that it left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from stat import S_ISLNK
from typing import Any

import xxhash

from slurmft.checkpoint.image_file import (
    MAX_WORLD,
    Damage,
    Damaged,
    ImageFile,
    Item,
    ShardIndex,
    alone,
    damage_in,
    image_file,
    index_file,
    is_claimed,
    reading,
    verified_index,
)
from slurmft.checkpoint.write_requests import LIFETIME_S, BestMode, CommitOrder
from slurmft.errors import NewerFormat, StorageError
from slurmft.storage.checkpoint_names import (
    GENERATION_VARIABLE,
    MANIFEST,
    MAX_NUMBER,
    Identity,
    Names,
    check_fence,
    names_in,
    newest_first,
    read_digests,
    read_quarantine,
)
from slurmft.system.files import UnsafeFile, fsync_folder, opened, read_json, trusted_owners, write_json

log = logging.getLogger(__name__)

SHOWN = 3
MAX_MARKER_BYTES = 64 * 1024 * 1024
"""A marker has some 170 bytes for each rank."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file as its writer produced it."""

    size_bytes: int
    xxh3: str = ""
    """xxh3_128 of its bytes in hex; empty for an image, whose digests are in its index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One committed checkpoint, as its marker describes it. Its files have not been verified."""

    step: int
    path: Path
    metrics: Mapping[str, float]
    committed_at: datetime
    generation: int
    commit: int
    attempt: str
    world_size: int
    files: Mapping[str, FileRecord]
    quarantine: str = ""
    """Why runs do not begin with it any more; empty for a good one."""

    @property
    def identity(self) -> Identity:
        return Identity(self.step, self.generation, self.commit)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files, the marker not counted."""
        return sum(record.size_bytes for record in self.files.values())


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a checkpoint directory that carries a checkpoint's name; each list is sorted newest first."""

    committed: list[Entry] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    """Folders whose marker exists but cannot be believed, with the reason."""
    uncommitted: list[Path] = field(default_factory=list)
    """Saves that are running now, or that never finished."""
    foreign: list[tuple[Path, str]] = field(default_factory=list)
    """Folders of users who are not trusted there, with the reason; they count for nothing."""

    @property
    def unusable(self) -> list[tuple[Path, str]]:
        """Folders with a checkpoint's name and without a valid marker."""
        return [*self.unreadable, *self.foreign]


class Catalog:
    """The checkpoints of one directory, read from their markers alone: cheap, and safe beside a running trainer."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def committed(self) -> list[Entry]:
        """Committed checkpoints, newest commit first; empty when the directory does not exist."""
        return self.scan().committed

    def scan(self) -> Contents:
        """One look at the directory.

        Raises:
            StorageError: the directory exists but cannot be listed.
        """
        names = self._names()
        contents = self.read(names.believed)
        contents.unreadable[:0] = self._with_paths(names.damaged)
        contents.foreign.extend(self._with_paths(names.foreign))
        return contents

    def read(self, identities: Iterable[Identity], known: Mapping[Identity, Entry] | None = None) -> Contents:
        """What the markers in these folders say; those of ``known`` checkpoints are not read again."""
        contents = Contents()
        for identity in identities:
            path = self.folder / identity.folder_name
            try:
                entry = (known or {}).get(identity) or read_entry(path)
            except StorageError as error:
                contents.unreadable.append((path, error.what))
                continue
            if entry is None:
                contents.uncommitted.append(path)
            else:
                contents.committed.append(entry)
        return contents

    def identities(self) -> list[Identity]:
        """Every folder of ours with a checkpoint's name, committed or not, newest first.

        Raises:
            StorageError: the directory exists but cannot be listed.
        """
        return self._names().believed

    def has_names(self) -> bool:
        """Whether anything there has a checkpoint's name, of any kind.

        Raises:
            StorageError: the directory exists but cannot be listed.
        """
        names = self._names()
        return bool(names.believed or names.damaged or names.foreign)

    def newest_commit(self) -> int:
        """The number of the newest commit, or of a try of one; 0 where there is none.

        Ignored folders are logged here: once before the first save, and once for each load.

        Raises:
            StorageError: as ``identities``; or no number is left to count on with.
        """
        names = self._names()
        strange = [reason for _, reason in (*names.damaged, *names.foreign)]
        for reason in strange[:SHOWN]:
            log.warning("not a checkpoint: %s", reason)
        if (more := len(strange) - SHOWN) > 0:
            log.warning("%s: %d more of other users, or with impossible numbers", self.folder, more)
        newest = names.believed[0].commit if names.believed else 0
        if newest >= MAX_NUMBER:
            raise StorageError(f"{self.folder / names.believed[0].folder_name} has the last number that there is",
                               hint="move it away")  # fmt: skip
        return newest

    def _with_paths(self, found: Iterable[tuple[Identity, str]]) -> list[tuple[Path, str]]:
        return [(self.folder / identity.folder_name, reason) for identity, reason in found]

    def _names(self) -> Names:
        try:
            return names_in(self.folder)
        except FileNotFoundError:
            return Names([], [], [])
        except OSError as error:
            raise StorageError(f"cannot list {self.folder}: {error}") from error


def read_entry(path: Path) -> Entry | None:
    """The marker of one checkpoint folder, or None when it was never committed.

    Raises:
        NewerFormat: a newer slurmft wrote it.
        StorageError: the marker cannot be read or does not belong to this folder.
    """
    value = _marker(path)
    if value is None:
        return None
    try:
        return _entry(path, value)
    except KeyError as error:
        raise StorageError(f"{path / MANIFEST} is not a checkpoint's marker: it lacks {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StorageError(f"{path / MANIFEST} is not a checkpoint's marker: {error}") from error


def _marker(path: Path) -> dict[str, Any] | None:
    marker = path / MANIFEST
    try:
        owners = trusted_owners(path.parent)
        owner = path.stat().st_uid
        marker.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {marker}: {error.strerror}") from error
    if owner not in owners:  # that user wrote all of its content, even if it is a copy
        raise StorageError(f"{path} belongs to user id {owner}")
    return read_json(marker, limit_bytes=MAX_MARKER_BYTES, owners=owners)


def write_marker(entry: Entry) -> None:
    """Commit ``entry``: after this returns, the checkpoint exists, also after a power cut.

    Raises:
        OSError: there is no marker.
    """
    value = {
        "step": entry.step,
        "generation": entry.generation,
        "commit": entry.commit,
        "attempt": entry.attempt,
        "world_size": entry.world_size,
        "committed_at": entry.committed_at.isoformat(),
        # JSON has no NaN and no infinity; other readers of the marker would refuse the whole file
        "metrics": {name: one if math.isfinite(one) else str(one) for name, one in entry.metrics.items()},
        "files": {name: {"bytes": one.size_bytes, "xxh3": one.xxh3} for name, one in entry.files.items()},
    }
    # The folder was made under the user's umask; the marker must be readable by the same people as the files beside it.
    write_json(entry.path / MANIFEST, value, mode=entry.path.stat().st_mode & 0o644)


def is_newer_format(path: Path) -> bool:
    """Whether a newer slurmft wrote this checkpoint; such a one is skipped, and never removed."""
    try:
        _marker(path)
    except NewerFormat:
        return True
    except StorageError:
        return False
    return False


def _entry(path: Path, value: Mapping[str, Any]) -> Entry:
    identity = Identity(*(_integer(value, key) for key in ("step", "generation", "commit")))
    if identity.folder_name != path.name:
        raise ValueError(f"it belongs to {identity.folder_name[:80]}")
    committed_at = datetime.fromisoformat(value["committed_at"])
    if committed_at.tzinfo is None:
        raise ValueError("committed_at has no time zone")
    committed_at.astimezone(UTC)  # a year that no clock can show
    if any("sha256" in one for one in value["files"].values()):
        raise ValueError("it is of an older kind (shared.pt and rank files), which this slurmft does not read")
    files = {name: FileRecord(_integer(one, "bytes"), str(one["xxh3"])) for name, one in value["files"].items()}
    if not 0 <= (world_size := _integer(value, "world_size")) <= MAX_WORLD:
        raise ValueError(f"it names {world_size} ranks")
    if any(Path(name).name != name or name in ("", "..") or "\0" in name for name in files):
        raise ValueError("a file name leaves the folder")
    return Entry(
        step=identity.step,
        path=path,
        metrics={str(name): float(number) for name, number in value["metrics"].items()},
        committed_at=committed_at,
        generation=identity.generation,
        commit=identity.commit,
        attempt=str(value.get("attempt", "")),
        world_size=world_size,
        files=files,
        quarantine=(mark.reason or "quarantined") if (mark := read_quarantine(path)) is not None else "",
    )


def index_of(entry: Entry, shard: int) -> ShardIndex:
    """The index of one of its shards, as it was committed.

    Raises:
        Damaged: its bytes are not those that the marker names, or it belongs to another checkpoint.
    """
    name = index_file(shard)
    if name not in entry.files or image_file(shard) not in entry.files:
        raise Damaged(Damage.MISSING, name, "the marker does not list it")
    index = verified_index(entry.path / name, entry.files[name].size_bytes, entry.files[name].xxh3)
    if (index.identity, index.shard, index.shards) != (entry.identity, shard, entry.world_size):
        raise Damaged(Damage.UNREADABLE, name, f"it is of shard {index.shard} of {index.identity.folder_name}")
    return index


def _integer(value: Mapping[str, Any], key: str) -> int:
    number = value[key]
    if type(number) is not int or number < 0:
        raise ValueError(f"{key} is {str(number)[:40]!r}")
    return number


# --- retention ---
# Which checkpoints stay. Pure: entries in, entries out.

KEPT_QUARANTINED = 2
"""Enough to look into why runs die from them."""

NEVER_REMOVED = 2
"""The newest good checkpoint may turn out damaged when it is needed; then there is still one."""


def by_merit(entries: Sequence[Entry], metric: str, mode: BestMode) -> list[Entry]:
    """Entries that have a finite ``metric``, the best first, of equals the newest first.

    Not a number and infinity are never best: a diverged run must not push out its last good state.
    """
    sign = 1 if mode == "min" else -1
    known = [entry for entry in entries if math.isfinite(entry.metrics.get(metric, math.nan))]
    return sorted(known, key=lambda entry: (sign * entry.metrics[metric], -entry.commit))


@dataclass(frozen=True, slots=True)
class Retention:
    """The checkpoints that may be removed now."""

    remove: list[Entry]
    """Oldest first."""

    oldest_kept_commit: int
    """Checkpoints committed before this one are no longer needed as evidence either."""


def decide(
    newest_first: Sequence[Entry],
    *,
    keep_last_n: int,
    keep_every: int = 0,
    best: Entry | None = None,
    distrusted: Collection[Path] = (),
    verified: Collection[Path] = (),
) -> Retention:
    """Keep the newest commits of ``keep_last_n`` different steps, the first at or after every multiple of
    ``keep_every`` steps (saves that are spaced by time hit none), and ``best``.

    A distrusted checkpoint (a load found it damaged, or it is quarantined) does not count as one of the kept, so that
    the last good one is never removed in its favour. It stays as evidence until it is older than the newest
    ``keep_last_n``; of the quarantined ones, of any age, the newest ``KEPT_QUARANTINED`` stay. The newest
    ``NEVER_REMOVED`` good commits always stay, and so does the newest of ``verified``, on which all replicas agreed.
    """
    quarantined = [entry.path for entry in newest_first if entry.quarantine]
    bad = {*distrusted, *quarantined}
    good = [entry for entry in newest_first if entry.path not in bad]
    newest_of_step: dict[int, Entry] = {}
    for entry in good:
        newest_of_step.setdefault(entry.step, entry)
    last = list(newest_of_step.values())[:keep_last_n]
    sure = next((entry for entry in good if entry.path in verified), None)
    kept = {entry.path for entry in (*last, *good[:NEVER_REMOVED], *(each for each in (best, sure) if each))}
    if keep_every:
        first_since = {step // keep_every: entry for step, entry in sorted(newest_of_step.items(), reverse=True)}
        kept |= {entry.path for entry in first_since.values() if entry.step >= keep_every}
    oldest_kept = min((entry.commit for entry in last), default=0)
    evidence = {entry.path for entry in newest_first if entry.path in bad and entry.commit > oldest_kept}
    stays = ((kept | evidence) - set(quarantined)) | set(quarantined[:KEPT_QUARANTINED])
    return Retention([entry for entry in reversed(newest_first) if entry.path not in stays], oldest_kept)


# --- folders ---
# Folders of a checkpoint directory: begun, cleaned up, pruned. For rank 0 only; no torch.


def own_generation() -> int:
    """The generation of this attempt; 0 outside a run."""
    return int(os.environ.get(GENERATION_VARIABLE) or 0)


def remove_left_overs(directory: Path) -> None:
    """Before the first save of a manager: remove what saves that never committed have left behind.

    What cannot be removed is logged and stays. So does a save that may still live: one of a newer generation, or of
    this one, and any that a writer has claimed. Outside of a run generations cannot be told apart, and only saves
    without a possible writer are removed now; the rest goes after a later commit.
    """
    try:
        check_fence()
    except StorageError:
        return  # fenced, or the owner is unknown: nothing is removed on a guess
    mine = own_generation()
    for identity in Catalog(directory).identities():
        folder = directory / identity.folder_name
        is_over = identity.generation < mine or (mine == 0 == identity.generation and _is_untouched(folder))
        if is_over and not (folder / MANIFEST).exists() and not is_claimed(folder):
            log.info("removing %s: its save never finished", folder)
            remove_folder(folder)


def _is_untouched(folder: Path) -> bool:
    """Whether every writer that has worked there has ended, as far as clocks show."""
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - newest > LIFETIME_S


class Pruner:
    """Removes what retention no longer keeps; reads each marker once, so that a save costs the same after a thousand.

    A failure is reported, and does no harm: the kept checkpoints are not affected.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Identity, Entry] = {}

    def prune(self, keep: CommitOrder, tick: Callable[[], None] = lambda: None) -> list[str]:
        """What could not be removed, and why. ``tick`` is called after every file.

        Raises:
            StorageError: the directory cannot be listed; nothing was removed.
        """
        catalog = Catalog(self._directory)
        found = catalog.read(catalog.identities(), self._known)
        # ten thousand ranks make long lists
        self._known = {entry.identity: replace(entry, files={}) for entry in found.committed}
        retention = self._decide(keep, must_look=bool(found.unreadable))
        problems = [remove_folder(entry.path, tick) for entry in retention.remove]
        newest = max((identity.commit for identity in self._known), default=0)
        problems += [remove_folder(path, tick) for path in found.uncommitted if self._is_useless(path, newest)]
        for path, reason in found.unreadable:
            identity = Identity.parse(path.name)
            if identity and identity.commit < retention.oldest_kept_commit and not is_newer_format(path):
                log.info("removing %s: older than every kept checkpoint, and unusable: %s", path, reason)
                problems.append(remove_folder(path, tick))
        return [problem for problem in problems if problem]

    def _decide(self, keep: CommitOrder, *, must_look: bool) -> Retention:
        """Decide by the supervisor's present marks, where something may go: on the newest, and on those to go."""
        in_order = newest_first(self._known)
        retention = self._retention(in_order, keep)
        if not retention.remove and not must_look:
            return retention  # to look at each of a thousand marks would be slow
        if self._look_at_marks(in_order[: keep.keep_last_n + NEVER_REMOVED + KEPT_QUARANTINED]):
            retention = self._retention(in_order, keep)
        if self._look_at_marks(entry.identity for entry in retention.remove):
            retention = self._retention(in_order, keep)
        return retention

    def _retention(self, in_order: Iterable[Identity], keep: CommitOrder) -> Retention:
        entries = [self._known[identity] for identity in in_order]
        distrusted = {self._directory / name for name in keep.distrusted}
        good = [entry for entry in entries if entry.path not in distrusted and not entry.quarantine]
        best = by_merit(good, keep.best_metric, keep.best_mode)[:1] if keep.best_metric else []
        return decide(
            entries,
            keep_last_n=keep.keep_last_n,
            keep_every=keep.keep_every,
            best=best[0] if best else None,
            distrusted=distrusted,
            verified=self._verified(entries),
        )

    def _verified(self, entries: Iterable[Entry]) -> set[Path]:
        """Those on which all replicas agreed."""
        try:
            record = read_digests(self._directory)
        except NewerFormat as error:
            log.warning("%s", error.what)
            return set()
        return {entry.path for entry in entries if record.is_verified(entry.step, entry.generation)}

    def _look_at_marks(self, identities: Iterable[Identity]) -> bool:
        """Whether a mark has come or gone since the last look."""
        changed = False
        for identity in identities:
            entry = self._known[identity]
            mark = read_quarantine(entry.path)
            quarantine = "" if mark is None else mark.reason or "quarantined"
            if quarantine != entry.quarantine:
                self._known[identity] = replace(entry, quarantine=quarantine)
                changed = True
        return changed

    def _is_useless(self, uncommitted: Path, newest_commit: int) -> bool:
        """A save that never finished, and never will: a later one has, and no writer holds on to it."""
        mine, identity = own_generation(), Identity.parse(uncommitted.name)
        if identity is None or identity.commit >= newest_commit or identity.generation > mine > 0:
            return False
        return not is_claimed(uncommitted)


def remove_folder(folder: Path, tick: Callable[[], None] = lambda: None) -> str:
    """Remove one checkpoint; why it could not be, or nothing. One that is being read stays as it is.

    The marker goes first, durably: a reader in between, or after a crash, sees a save that never finished instead of a
    damaged checkpoint.
    """
    try:
        status = folder.lstat()
        if S_ISLNK(status.st_mode):  # its target may be anything
            raise UnsafeFile(errno.EINVAL, "is a symbolic link", str(folder))
        if status.st_uid not in trusted_owners(folder.parent):
            raise UnsafeFile(errno.EPERM, f"belongs to user id {status.st_uid}", str(folder))
        with contextlib.suppress(FileNotFoundError, UnsafeFile), alone(folder / MANIFEST):
            (folder / MANIFEST).unlink()
            fsync_folder(folder)
        _remove_entry(folder / MANIFEST)  # a link to nowhere, or no file at all
        with os.scandir(folder) as entries:
            for entry in entries:
                _remove_entry(Path(entry.path))
                tick()
        folder.rmdir()
    except BlockingIOError:
        log.info("%s stays for now: another process is reading it", folder)
        return f"{folder} is being read"
    except FileNotFoundError:
        return ""  # another process has removed it
    except OSError as error:
        log.warning("cannot remove %s: %s", folder, error)
        return f"cannot remove {folder}: {error}"
    return ""


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- Reading a committed checkpoint to the last byte, without torch: does everything match its marker? ---

THREADS = 2
PROBLEMS_SHOWN = 5
"""Damages that are reported of one image; a lost disk would make thousands."""

_BLOCK_BYTES = 4 << 20


def verify(entry: Entry, tick: Callable[[int], None] = lambda _size_bytes: None) -> list[str]:
    """Everything that is wrong with a checkpoint: sentences that begin with a file's name; empty when all of it can be
    loaded. Nothing is changed.

    Args:
        tick: called with the bytes that have been read since the last call; from several threads.
    """
    shards = {name for shard in range(entry.world_size) for name in (image_file(shard), index_file(shard))}
    missing = sorted(shards - entry.files.keys())
    problems = [f"{name} is not listed by the marker" for name in missing[:PROBLEMS_SHOWN]]
    with reading(entry.path):
        for shard in range(entry.world_size):
            if {image_file(shard), index_file(shard)} <= entry.files.keys():
                problems += _check_shard(entry, shard, tick)
        for name in sorted(entry.files.keys() - shards):
            problems += _check_whole(entry, name, tick)
    return problems


def _check_shard(entry: Entry, shard: int, tick: Callable[[int], None]) -> list[str]:
    image = image_file(shard)
    try:
        index = index_of(entry, shard)
        tick(entry.files[index_file(shard)].size_bytes)
        with damage_in(image):
            size_bytes = (entry.path / image).stat().st_size
        if not index.size_bytes == entry.files[image].size_bytes == size_bytes:
            raise Damaged(Damage.TRUNCATED, image)
        with ImageFile(entry.path / image, index) as file:
            return _check_items(file, index, tick)
    except Damaged as damaged:
        return [str(damaged)]


def _check_items(file: ImageFile, index: ShardIndex, tick: Callable[[int], None]) -> list[str]:
    def check(item: Item) -> str:
        try:
            file.read(item)
        except Damaged as damaged:
            return str(damaged)
        tick(item.length)
        return ""

    with ThreadPoolExecutor(THREADS, thread_name_prefix="slurmft-verify") as pool:
        found = [problem for problem in pool.map(check, index.items) if problem]
    if len(found) > PROBLEMS_SHOWN:
        return [*found[:PROBLEMS_SHOWN], f"{file.path.name} has {len(found) - PROBLEMS_SHOWN} more damaged items"]
    return found


def _check_whole(entry: Entry, name: str, tick: Callable[[int], None]) -> list[str]:
    record, hasher, size_bytes = entry.files[name], xxhash.xxh3_128(), 0
    try:
        with damage_in(name), opened(entry.path / name) as descriptor:
            while size_bytes <= record.size_bytes and (block := os.read(descriptor, _BLOCK_BYTES)):
                hasher.update(block)
                size_bytes += len(block)
                tick(len(block))
        if size_bytes != record.size_bytes:
            raise Damaged(Damage.TRUNCATED, name)
        if record.xxh3 and hasher.hexdigest() != record.xxh3:
            raise Damaged(Damage.CHANGED, name)
    except Damaged as damaged:
        return [str(damaged)]
    return []


# --- metadata ---
# The ``.metadata`` of a checkpoint: torch.distributed.checkpoint's own index, made from the indexes of all shards.
# It is a pickle of torch's classes. It is written out here by hand, so that the process that commits a checkpoint needs
# no torch (it costs seconds and hundreds of megabytes); slurmft itself never reads it.

METADATA_FILE = ".metadata"

_CLASSES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
"""Of torch's format; since then, lists and dicts inside of a state are spread out."""

_HeldItem = tuple[int, Item]
"""A shard's number, and one of its items."""


def metadata_bytes(indexes: Sequence[ShardIndex]) -> bytes:
    """The content of ``.metadata`` beside the images of these shards, which are all of one checkpoint."""
    stored: dict[str, list[_HeldItem]] = {}
    for index in indexes:
        for item in index.items:
            stored.setdefault(item.key, []).append((index.shard, item))
    out = _Pickle()
    kinds = _dict([(out.text(key), _kind(out, parts)) for key, parts in stored.items()])
    paths = _dict([(out.text(key), out.path(parts[0][1].path or (key,))) for key, parts in stored.items()])
    places = _dict([place for parts in stored.values() for place in _places(out, parts)])
    return out.done(
        out.instance(
            _CLASSES, "Metadata", state_dict_metadata=kinds, planner_data=paths, storage_data=places,
            storage_meta=pickle.NONE, version=out.text(_VERSION),
        )
    )  # fmt: skip


def _kind(out: _Pickle, parts: Sequence[_HeldItem]) -> bytes:
    first = parts[0][1]
    if first.kind == "object":
        return out.instance(_CLASSES, "BytesStorageMetadata")
    chunks = [
        out.instance(_CLASSES, "ChunkStorageMetadata", offsets=out.size(item.starts), sizes=out.size(item.sizes))
        for _, item in parts
    ]
    return out.instance(
        _CLASSES, "TensorStorageMetadata", properties=out.properties(first.dtype), size=out.size(first.shape),
        chunks=_list(chunks),
    )  # fmt: skip


def _places(out: _Pickle, parts: Sequence[_HeldItem]) -> list[tuple[bytes, bytes]]:
    """For each part where it begins in the whole, and where its bytes lie."""
    places = []
    for number, (shard, item) in enumerate(parts):
        is_tensor = item.kind == "tensor"
        address = out.instance(
            _CLASSES, "MetadataIndex", fqn=out.text(item.key), index=_number(number) if is_tensor else pickle.NONE,
            offset=out.size(item.starts) if is_tensor else pickle.NONE,
        )  # fmt: skip
        name = out.text(image_file(shard))
        where = out.instance(
            _FILES, "_StorageInfo", relative_path=name, offset=_number(item.offset), length=_number(item.length)
        )
        places.append((address, where))
    return places


def _number(value: int) -> bytes:
    if value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(data)]) + data


def _dict(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join([key + value for key, value in entries]) + pickle.SETITEMS


def _list(values: Iterable[bytes]) -> bytes:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS


def _tuple(values: Iterable[bytes]) -> bytes:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


class _Pickle:
    """Pieces of a pickle of protocol 2. Frequent values are written once, in front, and then named by a number."""

    def __init__(self) -> None:
        self._front: list[bytes] = []
        self.text = cache(self._text)
        self.size = cache(self._size)
        self.properties = cache(self._properties)
        self._class = cache(self._find_class)

    def done(self, value: bytes) -> bytes:
        """The whole pickle of ``value``."""
        return b"".join([pickle.PROTO, b"\x02", *self._front, value, pickle.STOP])

    def path(self, pieces: Iterable[str | int]) -> bytes:
        return _tuple([self.text(piece) if isinstance(piece, str) else _number(piece) for piece in pieces])

    def instance(self, module: str, name: str, **attributes: bytes) -> bytes:
        """An object of one of torch's classes, made without its ``__init__``."""
        made = self._class(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if not attributes:
            return made
        return made + _dict([(self.text(key), value) for key, value in attributes.items()]) + pickle.BUILD

    def _once(self, value: bytes) -> bytes:
        number = struct.pack("<I", len(self._front))
        self._front.append(value + pickle.LONG_BINPUT + number + pickle.POP)
        return pickle.LONG_BINGET + number

    def _text(self, value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        return self._once(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)

    def _find_class(self, module: str, name: str) -> bytes:
        return self._once(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    def _call(self, module: str, name: str, argument: bytes) -> bytes:
        return self._class(module, name) + argument + pickle.TUPLE1 + pickle.REDUCE

    def _size(self, sizes: tuple[int, ...]) -> bytes:
        return self._once(self._call("torch", "Size", _tuple(map(_number, sizes))))

    def _properties(self, dtype: str) -> bytes:
        """A TensorProperties: dense, row by row, on the host."""
        state = [
            self._class("torch", dtype),
            self._call("torch.serialization", "_get_layout", self.text("torch.strided")),
            pickle.NEWFALSE,
            self._call(_CLASSES, "_MEM_FORMAT_ENCODING", _number(0)),
            pickle.NEWFALSE,
        ]
        made = self._class(_CLASSES, "TensorProperties") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        return self._once(made + _tuple(state) + pickle.BUILD)
