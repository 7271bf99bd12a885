"""The thread of rank 0's writer that commits: it waits for every rank's receipt, writes the marker, and prunes.

No torch, and no worker: a save is committed although every process that trained has died.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from slurmft.checkpoint.catalog import Catalog, Entry, FileRecord, read_entry, write_marker
from slurmft.checkpoint.folders import Pruner, remove_folder
from slurmft.checkpoint.format.damage import Damaged
from slurmft.checkpoint.format.dcp_metadata import METADATA_FILE, metadata_bytes
from slurmft.checkpoint.format.image_writing import NewFile
from slurmft.checkpoint.format.shard_index import (
    MAX_INDEX_BYTES,
    ShardIndex,
    image_file,
    index_file,
    parse_index,
    stamp_of,
)
from slurmft.checkpoint.writer.abandoned_saves import give_up, is_note, reason_of, remove_temporary
from slurmft.checkpoint.writer.fault_points import reached
from slurmft.checkpoint.writer.progress_page import Lane, ProgressPage
from slurmft.checkpoint.writer.writer_task import PAUSES_S, Left, Task
from slurmft.errors import Fenced, StorageError
from slurmft.storage.checkpoint_names import MANIFEST, Identity
from slurmft.storage.fence import check_fence
from slurmft.storage.patience import PASSING
from slurmft.system.files import fsync_folder
from slurmft.system.opening import read_bytes

RECEIPTS_TIMEOUT_S = 1800.0
STILL_S, STILL_ELSEWHERE_S = 10.0, 60.0
"""A save whose worker has ended is left when no rank writes any more for so long; a network filesystem may show other
nodes' files only after a minute."""

METADATA_BYTES, LATER_METADATA_BYTES = 4 << 20, 64 << 20
"""Of all indexes together. To parse them takes a second for a few MiB, and ``.metadata`` is for torch alone: slurmft
never reads it. Beyond the first number it is written after the commit, and is not named by the marker; beyond the
second not at all, as it would hold up later commits for minutes."""

_READERS, _BATCH = 8, 256
"""Receipts that are read at the same time, where each costs a network filesystem a round trip. Of a filesystem that
answers at once, one thread reads them twice as fast as eight that take turns in the interpreter."""

_PROBED, _WAITS_PER_RECEIPT = 32, 0.25
"""So many are read by one thread first; it counts how often it had to wait."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pending:
    """A save that this rank has written and the others may not have."""

    task: Task
    missing: dict[str, int]
    """Names of receipts that have not been seen yet, and their shards."""

    records: dict[str, FileRecord] = field(default_factory=dict)
    indexes: dict[int, ShardIndex] = field(default_factory=dict)
    """Of the shards that have been seen; empty where ``.metadata`` is not written before the commit."""

    index_bytes: int = 0
    """Of all shards, each taken to be as long as the own one; 0 while that is not known."""

    others: list[str] = field(default_factory=list)
    """Other files in the folder."""

    tries: int = 0
    told: set[int] = field(default_factory=set)
    not_before: float = 0.0


class CommitLane:
    """Commits saves as soon as every rank has written; the listening thread never waits for it."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        self._pruners: dict[Path, Pruner] = {}
        self._is_pruning = self._is_alone = False
        self._traces = set[tuple[object, ...]]()
        self._moved_at = 0.0

    def add(self, task: Task) -> None:
        """Commit this one when it is complete."""
        if task.request.commit is None:
            return
        missing = {index_file(shard): shard for shard in range(task.request.shards)}
        with self._changed:
            self._pending.append(_Pending(task, missing))
            self._changed.notify()

    def abandon(self, identity: Identity) -> None:
        """Leave it at the next look."""
        with self._changed:
            for pending in self._pending:
                if pending.task.request.identity == identity:
                    pending.task.stop("abandoned")
            self._changed.notify()

    def left_alone(self) -> None:
        """The worker has ended, and other ranks may have before they had written anything."""
        with self._changed:
            self._is_alone, self._moved_at = True, time.monotonic()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return not self._pending and not self._is_pruning

    def run(self) -> None:
        """Work for ever; the thread's own function."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                # stable: a stop waits for what is urgent, whose commit supersedes the older ones
                pending = sorted(self._pending, key=lambda one: not one.task.request.urgent)
            self._page.begin(Lane.COMMIT)
            seen = sum(len(one.missing) for one in pending)
            for one in pending:
                if one in self._pending:
                    self._look_after(one)
            moved = seen != sum(len(one.missing) for one in pending)
            pause_s = _FIRST_PAUSE_S if moved else min(pause_s * 1.5, _LONGEST_PAUSE_S)
            with self._changed:
                idle = not self._pending
                if not idle:
                    self._changed.wait(pause_s)
            if idle:
                pause_s = _FIRST_PAUSE_S
                self._page.end(Lane.COMMIT)

    def _look_after(self, pending: _Pending) -> None:
        """One look at one save: it is left, waits on, or is committed."""
        task = pending.task
        try:
            task.leave_if_stopped()
            if time.monotonic() >= pending.not_before and self._is_complete(pending):
                self._commit(pending)
        except Left as left:
            task.tell(left.kind, final=True, phase=task.phase, text=left.text)
            self._end(pending, None if left.is_lost else "superseded")
        except Fenced as error:
            task.tell_failure(error, final=True, fenced=True)
            self._end(pending, None)  # the folder belongs to a newer attempt, which removes it if need be
        except (OSError, StorageError) as error:
            number = error.errno if isinstance(error, OSError) else errno.EIO
            final = number not in PASSING
            if final or number not in pending.told:
                task.tell_failure(error, final=final)
            pending.told.add(number or 0)
            pending.not_before = time.monotonic() + PAUSES_S[min(pending.tries, len(PAUSES_S) - 1)]
            pending.tries += 1
            if final:
                self._end(pending, str(error))
        except Exception as error:
            log.exception("%s failed while %s", task.request.identity.folder_name, task.phase)
            task.tell_failure(error, final=True)
            self._end(pending, repr(error))

    def _is_complete(self, pending: _Pending) -> bool:
        """Read the receipts that have come; whether they are all there.

        Raises:
            OSError: one cannot be read, a rank has given up, or they have not come in a very long time.
        """
        task = pending.task
        task.phase = "waiting for the other ranks"
        folder = task.request.folder
        task.begin_claim()  # for a save that an earlier writer has written
        # a listing, not a look for each: a network filesystem remembers for a while that a file was not there
        try:
            names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            names = []
        self._page.tick(Lane.COMMIT)
        if notes := sorted(name for name in names if is_note(name)):
            if (reason := reason_of(folder, notes[0])) == "superseded":
                raise Left("superseded", f"another rank had something newer to write ({notes[0]})")
            raise OSError(errno.ECANCELED, f"another rank has failed ({notes[0]}): {reason or 'no space left'}")
        come = [(name, shard) for name in names if (shard := pending.missing.get(name)) is not None]
        if not pending.index_bytes and (own := index_file(task.request.shard)) in names:
            pending.index_bytes = (folder / own).stat().st_size * task.request.shards
        receipts = _receipts(task, come, with_items=0 < pending.index_bytes <= METADATA_BYTES)
        for (name, shard), (index, records) in zip(come, receipts, strict=True):
            if index is not None:
                pending.indexes[shard] = index
            pending.records |= records
            del pending.missing[name]
            self._page.tick(Lane.COMMIT)
        if index_file(task.request.shard) in pending.missing:
            raise Left("superseded", "its folder was removed", is_lost=True)
        if pending.missing and self._is_alone:
            self._check_that_others_write(task)
        if pending.missing and time.monotonic() - task.since > RECEIPTS_TIMEOUT_S:
            shards = sorted(pending.missing.values())
            listed = ", ".join(map(str, shards[:8])) + (f" and {len(shards) - 8} more" if len(shards) > 8 else "")
            raise OSError(errno.ETIME, f"nothing came from rank(s) {listed} in {RECEIPTS_TIMEOUT_S:.0f} s")
        pending.others = names
        return not pending.missing

    def _check_that_others_write(self, task: Task) -> None:
        """Return while the missing receipts may still come.

        Raises:
            Fenced: a newer attempt has begun.
            OSError: nothing moves any more.
        """
        check_fence()
        request, now = task.request, time.monotonic()
        if (traces := _traces(request.folder.parent, request.identity.generation)) != self._traces:
            self._traces, self._moved_at = traces, now
        is_local = request.shards <= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if now - self._moved_at > (STILL_S if is_local else STILL_ELSEWHERE_S):
            raise OSError(errno.ETIME, "the training has ended, and other ranks have not written their parts")

    def _commit(self, pending: _Pending) -> None:
        task = pending.task
        task.phase = "committing"
        reached("receipts complete")
        entry = _committed_before(task)
        if entry is None:
            if pending.index_bytes <= METADATA_BYTES:
                pending.records[METADATA_FILE] = _write_metadata(task, pending.indexes)
            entry = _entry(task, pending.records)
            remove_temporary(entry.path, pending.others)
            fsync_folder(entry.path.parent)  # every rank has synced the folder itself with its receipt
            check_fence()
            reached("before marker")
            write_marker(entry)
            reached("marker written")
        pending.indexes.clear()  # every rank's: this thread may hold on to it until the next save
        log.info("committed %s: %.1f MiB", entry.path, entry.size_bytes / 2**20)
        task.end_claim()
        task.tell("committed", final=True, size_bytes=entry.size_bytes)
        with self._changed:
            older = self._pending[: self._pending.index(pending)]
            del self._pending[: len(older) + 1]
            self._is_pruning = True
        for one in older:
            one.task.end_claim()
            one.task.tell("superseded", final=True, phase=one.task.phase)
        try:
            self._prune(task)
            if METADATA_BYTES < pending.index_bytes <= LATER_METADATA_BYTES:
                self._write_metadata_later(task)
        finally:
            with self._changed:
                self._is_pruning = False

    def _prune(self, task: Task) -> None:
        """After the commit, and never a reason to say that it failed. Folders of older, unfinished saves go, too."""
        order, directory = task.request.commit, task.request.folder.parent
        if order is None:
            return
        task.phase = "pruning"
        pruner = self._pruners.setdefault(directory, Pruner(directory))
        try:
            reached("before pruning")
            problems = pruner.prune(order.keep, lambda: self._page.tick(Lane.COMMIT))
            reached("pruned")
        except (OSError, StorageError) as error:
            problems = [str(error)]
        task.tell("pruned", phase=task.phase, text="; ".join(problems[:8]))

    def _write_metadata_later(self, task: Task) -> None:
        """For torch, which may read the checkpoint one day; slurmft does not need it, so an error is only logged."""
        come = [(index_file(shard), shard) for shard in range(task.request.shards)]
        indexes = dict[int, ShardIndex]()
        try:
            for (_, shard), (index, _) in zip(come, _receipts(task, come, with_items=True), strict=True):
                self._page.tick(Lane.COMMIT)
                if index is not None:
                    indexes[shard] = index
                if task.leave or len(self._pending) > 0:
                    log.info("%s is left without %s: a newer save waits", task.request.folder, METADATA_FILE)
                    return
            _write_metadata(task, indexes)
        except OSError as error:
            log.warning("%s is left without %s: %s", task.request.folder, METADATA_FILE, error)

    def _end(self, pending: _Pending, reason: str | None) -> None:
        """It will not be committed; with a reason, its folder is cleared, too."""
        request = pending.task.request
        pending.task.end_claim()
        pending.indexes.clear()
        if reason is not None:
            give_up(request.folder, request.shard, reason)
            if self._is_alone:  # no later commit removes what is left of it
                remove_folder(request.folder)
        with self._changed:  # last: a writer that is idle may end
            self._pending.remove(pending)


def _traces(directory: Path, generation: int) -> set[tuple[object, ...]]:
    """The files of all uncommitted saves: who writes, here or at an older save first, changes them."""
    found = set[tuple[object, ...]]()
    for identity in Catalog(directory).identities():
        folder = directory / identity.folder_name
        if identity.generation == generation and not (folder / MANIFEST).exists():
            for path in folder.glob("*"):
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    found.add((str(path), status.st_size, status.st_mtime_ns))
    return found


_Receipt = tuple[ShardIndex | None, Mapping[str, FileRecord]]


def _receipts(task: Task, come: Sequence[tuple[str, int]], *, with_items: bool) -> Iterator[_Receipt]:
    """As ``_receipt``, for all names and shards that have come, in order."""
    shards = [shard for _, shard in come]
    before = _waits()
    yield from (_receipt(task, shard, with_items=with_items) for shard in shards[:_PROBED])
    if _waits() - before <= _WAITS_PER_RECEIPT * _PROBED:
        yield from (_receipt(task, shard, with_items=with_items) for shard in shards[_PROBED:])
        return
    with ThreadPoolExecutor(_READERS, thread_name_prefix="slurmft-receipts") as pool:
        for start in range(_PROBED, len(shards), _BATCH):  # so that an error ends it soon
            batch = shards[start : start + _BATCH]
            yield from pool.map(lambda shard: _receipt(task, shard, with_items=with_items), batch)


def _waits() -> int:
    """How often this thread has given up its core to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _receipt(task: Task, shard: int, *, with_items: bool) -> _Receipt:
    """The index of a shard, if its items are needed, and the records of its image and of itself.

    Raises:
        OSError: the receipt cannot be read, or is not one of this save.
    """
    request, name = task.request, index_file(shard)
    content = read_bytes(f"{request.folder}/{name}", limit_bytes=MAX_INDEX_BYTES)
    try:
        own = task.written if shard == request.shard else None
        index = own or (parse_index(content, name) if with_items else None)
        stamp = index or stamp_of(content, name)
    except Damaged as error:
        raise OSError(errno.EBADMSG, f"{name} is not the index of a shard: {error}") from error
    if (stamp.identity, stamp.shard, stamp.shards) != (request.identity, shard, request.shards):
        raise OSError(errno.EBADMSG, f"{name} is not of this save")
    record = FileRecord(len(content), xxhash.xxh3_128_hexdigest(content))
    records = {image_file(shard): FileRecord(stamp.size_bytes), name: record}
    return (index if with_items else None), records


def _write_metadata(task: Task, indexes: Mapping[int, ShardIndex]) -> FileRecord:
    """Write torch's own index, made of all receipts; its folder is synced with the marker.

    Raises:
        OSError: it was not written.
    """
    folder = task.request.folder
    content = metadata_bytes([indexes[shard] for shard in sorted(indexes)])
    with NewFile(folder, METADATA_FILE, mode=folder.stat().st_mode & 0o666) as file:
        file.write(memoryview(content), lambda _done: None)
        file.sync()
        file.put_in_place()
    reached("metadata written")
    return FileRecord(len(content), xxhash.xxh3_128_hexdigest(content))


def _committed_before(task: Task) -> Entry | None:
    """The checkpoint where a writer before this one has committed it, and was killed before it could report it."""
    try:
        return read_entry(task.request.folder)
    except StorageError:
        (task.request.folder / MANIFEST).unlink(missing_ok=True)
        return None


def _entry(task: Task, records: Mapping[str, FileRecord]) -> Entry:
    request, order = task.request, task.request.commit
    files = {METADATA_FILE: records[METADATA_FILE]} if METADATA_FILE in records else {}
    files |= {name: records[name] for shard in range(request.shards) for name in (image_file(shard), index_file(shard))}
    if order is None:
        raise ValueError("no commit was requested")
    return Entry(
        step=request.identity.step,
        path=request.folder,
        metrics={str(name): float(value) for name, value in order.metrics.items()},
        committed_at=datetime.now(UTC),
        generation=request.identity.generation,
        commit=request.identity.commit,
        attempt=order.attempt,
        world_size=request.shards,
        files=files,
    )
