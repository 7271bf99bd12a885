"""The writer: one process beside each worker that makes its snapshots durable, and on rank 0 commits them. No torch.

In one piece, since its threads (copies, images, commits) hand the same saves to each other, and what fails in one
decides what the others may still do.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from slurmft.checkpoint.catalog import (
    METADATA_FILE,
    Catalog,
    Entry,
    FileRecord,
    Pruner,
    metadata_bytes,
    read_entry,
    remove_folder,
    write_marker,
)
from slurmft.checkpoint.image_file import (
    MAX_INDEX_BYTES,
    Claim,
    Damaged,
    Fingerprint,
    Mappings,
    NewFile,
    Pace,
    ShardIndex,
    digests,
    fingerprint,
    holding,
    image_file,
    index_file,
    is_temporary,
    parse_index,
    read_index,
    stamp_of,
    write_index,
)
from slurmft.checkpoint.replicas import Peer, find_peers, keep_local, key_file, local_folder, send_copy
from slurmft.checkpoint.write_requests import (
    Lane,
    LineSocket,
    Progress,
    ProgressPage,
    Report,
    ReportKind,
    Throttle,
    WriteRequest,
    do_politely,
    ignore_signals,
    line_of,
    reached,
    request_from,
)
from slurmft.errors import Fenced, StorageError
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import MANIFEST, Identity, check_fence, is_the_runs
from slurmft.storage.patience import PASSING
from slurmft.system.files import (
    IS_FOLDER,
    UnsafeFile,
    fsync_folder,
    read_bytes,
    read_text,
    replace_atomically,
    trusted_owners,
)
from slurmft.system.foreign_text import log_to_stderr

# --- abandoned saves ---
# A save that a rank will not finish: it leaves a note in the folder, so that other ranks do not wait or write on.

_SUFFIX = "_0.gone"
_MAX_NOTE_BYTES = 64 * 1024


def gone_file(shard: int) -> str:
    """The small file that says that a shard will not come."""
    return f"__{shard}{_SUFFIX}"


def is_gone_file(name: str) -> bool:
    """Whether a file says so."""
    return name.startswith("__") and name.endswith(_SUFFIX)


def give_up(folder: Path, shard: int, reason: str) -> None:
    """Free a shard's space in the folder of an uncommitted save, and leave a note there; rank 0 frees all of it.

    Never raises: remaining files are removed with the folder, after a later commit, or when rank 0 gives up the next
    save. Nothing is touched that may be committed: a shard whose receipt is there, and saves that a newer attempt has
    taken over.
    """
    try:
        check_fence()
    except StorageError:
        return
    with contextlib.suppress(OSError, StorageError), _own(folder) as held:
        if (held / MANIFEST).exists() or (shard and (held / index_file(shard)).exists()):
            return
        # only rank 0 looks around: a listing for each of ten thousand ranks would be a storm
        names = os.listdir(held) if shard == 0 else [image_file(shard), index_file(shard)]  # noqa: PTH208
        for name in names:
            if not is_gone_file(name):
                with contextlib.suppress(OSError):
                    (held / name).unlink()
        _leave_note(held / gone_file(shard), reason[:1000])
        if shard == 0:
            _remove_given_up(folder)


def _remove_given_up(newest: Path) -> None:
    """Saves that rank 0 gave up before the newest one: on a disk that is full for long none is committed, whose pruning
    would remove their folders."""
    identities = Catalog(newest.parent).identities()
    given_up = next((one for one in identities if one.folder_name == newest.name), None)
    for one in identities:
        folder = newest.parent / one.folder_name
        is_older = given_up is not None and one.generation == given_up.generation and one.commit < given_up.commit
        if is_older and (folder / gone_file(0)).exists() and not (folder / MANIFEST).exists():
            remove_folder(folder)


def _leave_note(path: Path, reason: str) -> None:
    """With all of its text from its first moment, since others wait for it; without any where there is no room."""
    try:
        replace_atomically(path, reason.encode(errors="replace").decode(), durable=False)
    except OSError:
        path.touch(mode=0o600)


def reason_of(folder: Path, note: str) -> str:
    """Why the shard of a note will not come; empty where the disk had no room even for that."""
    try:
        return read_text(folder / note, errors="replace", limit_bytes=_MAX_NOTE_BYTES)
    except OSError:
        return ""


# --- copier ---
# The thread of a writer that copies staged and hashed shards to peers and the local disk, beside the durable write.
#
# Nothing waits for it: of waiting snapshots the newest wins, one that is written over meanwhile is dropped, and errors
# are logged.


class CopyLane:
    """Copies offered shards. Without peers and local disk it starts no thread, and is idle for ever."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment, self._key = environment, key_file(environment) or Path()
        self._peers = find_peers(environment)
        told = WorkerSettings.from_environment(environment).checkpoint.local_directory
        self._local = Path(told) if told else None
        self._changed = threading.Condition()
        self._waiting: WriteRequest | None = None
        self._current: WriteRequest | None = None
        if self._peers or self._local is not None:
            threading.Thread(target=self._run, name="copies", daemon=True).start()

    def offer(self, request: WriteRequest) -> None:
        """Copy this one next, which has its digests, instead of one that waits."""
        if (self._peers and request.goes_to_peers) or self._local is not None:
            with self._changed:
                self._waiting = request
                self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return self._waiting is None and self._current is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                self._current, self._waiting = self._waiting, None
            try:
                if self._current is not None:
                    self._copy(self._current)
            except Exception:  # a bug here must not end all copies of this process
                log.exception("a snapshot was not copied")
            with self._changed:
                self._current = None

    def _copy(self, request: WriteRequest) -> None:
        directory, cap = request.folder.parent, None if request.urgent else request.max_bytes_per_s or None
        peers = self._peers if request.goes_to_peers and is_the_runs(directory, self._environment) else []
        for peer in peers:
            began_s = time.monotonic()
            if problem := send_copy(request.snapshot, request.image, peer, self._key, bytes_per_s=cap):
                log.warning("no copy with node %d: %s", peer.place, problem)
            else:
                log.info("copied to node %d in %.2f s", peer.place, time.monotonic() - began_s)
        if self._local is not None:
            try:
                problem = keep_local(request.snapshot, request.image, local_folder(self._local, directory))
            except (OSError, StorageError) as error:
                problem = str(error)
            if problem:
                log.warning("no copy in %s: %s", self._local, problem)


# --- One save inside the writer process, its reports, and how the threads that work on it reach the worker ---

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between retries of errors that may pass by themselves; the last one repeats for ever."""


class Outbox:
    """Reports on their way to the worker; any thread may put one in, the listening one sends them."""

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lines: deque[bytes] = deque()

    def put(self, report: Report) -> None:
        """Have it sent."""
        self._lines.append(line_of(report))
        os.eventfd_write(self.wake, 1)

    def take(self) -> bytes:
        """All waiting reports."""
        taken = bytearray()
        while self._lines:
            taken += self._lines.popleft()
        return bytes(taken)


@dataclass(eq=False, slots=True)
class Task:
    """A request, and its state."""

    request: WriteRequest
    outbox: Outbox
    on_hashed: Callable[[WriteRequest], None] = lambda _: None
    """Called once the snapshot in memory has its digests, and is as good as it will be on disk."""

    throttle: Throttle = field(init=False)
    leave: ReportKind | None = None
    """Set by the listening thread: stop at the next piece, and report this."""

    written: ShardIndex | None = None
    """The receipt, where this process has written it."""

    phase: str = ""
    claim: Claim | None = None
    """Of the checkpoint's folder."""

    has_left_image_lane: bool = False
    """Its image is written, or never will be. Set before that is reported, since the next save may come at once."""

    since: float = field(default_factory=time.monotonic)
    woken: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        request = self.request
        self.throttle = Throttle(0.0 if request.urgent else request.max_bytes_per_s)

    def begin_claim(self) -> None:
        """On rank 0: until ``end_claim`` the folder does not count as a left-over. Best effort, and idempotent."""
        if self.claim is None and self.request.commit is not None:
            with contextlib.suppress(OSError):
                self.claim = Claim(self.request.folder)

    def end_claim(self) -> None:
        """The save has ended, with any result."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    def stop(self, kind: ReportKind) -> None:
        """Give it up as soon as possible."""
        self.leave = kind
        self.woken.set()

    def leave_if_stopped(self) -> None:
        """Raises Left where it is to be given up."""
        if self.leave:
            raise Left(self.leave)

    def tell(self, kind: ReportKind, *, final: bool = False, **details: Any) -> None:
        """Send a report on it."""
        seconds = time.monotonic() - self.since
        self.has_left_image_lane |= final or kind == "written"
        self.outbox.put(Report(kind=kind, identity=self.request.identity, seconds=seconds, final=final, **details))

    def tell_failure(self, error: BaseException, *, final: bool, fenced: bool = False) -> None:
        """Report an error, in its present phase."""
        number = error.errno or 0 if isinstance(error, OSError) else 0
        text = error.strerror or str(error) if isinstance(error, OSError) else str(getattr(error, "what", error))
        self.tell("failed", final=final, phase=self.phase, errno=number, text=text or repr(error), fenced=fenced)


class Left(Exception):
    """The save was given up; its kind is the one to report."""

    def __init__(self, kind: ReportKind, text: str = "", *, is_lost: bool = False) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text
        self.is_lost = is_lost
        """Its folder is gone, or rank 0 has given it up: we must not remove files there now."""


# --- The thread of rank 0's writer that commits: it waits for every rank's receipt, writes the marker, and prunes ---
# No torch, and no worker: a save is committed although every process that trained has died.

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
        if notes := sorted(name for name in names if is_gone_file(name)):
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
            for name in filter(is_temporary, pending.others):  # of killed writers: all files are in place
                with contextlib.suppress(OSError):
                    (entry.path / name).unlink()
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
            problems = pruner.prune(order, lambda: self._page.tick(Lane.COMMIT))
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
        with _own(task.request.folder) as held:
            (held / MANIFEST).unlink(missing_ok=True)
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


# --- durable image ---
# One staged snapshot becomes a durable image with its receipt: read, hashed and written once. No torch.


class Pacing:
    """Work between two pieces: show progress, keep the bandwidth cap, and leave a save that was given up."""

    def __init__(self, task: Task, page: ProgressPage) -> None:
        self._task, self._page = task, page
        self.size_bytes = 0
        self._half_told = False

    def look(self, _done_bytes: int = 0) -> None:
        """Without a cap.

        Raises:
            Left: it is to be left.
        """
        self._page.tick(Lane.IMAGE)
        self._task.leave_if_stopped()

    def __call__(self, done_bytes: int) -> None:
        self._page.show(Progress(done_bytes, self.size_bytes))
        if not self._half_told and 2 * done_bytes >= self.size_bytes:
            self._half_told = True
            reached("image half written")
        self.look()
        self._task.throttle.pass_on(done_bytes, self.look)


def write_durably(task: Task, pace: Pacing, images: Mappings) -> int:
    """Image, metadata and receipt, all durable; returns the size of the image.

    Raises:
        Left: it was given up.
        OSError: it is not durable, and may be tried again.
        StorageError: the snapshot is not there, or not the one that was announced.
    """
    task.phase = "looking for an earlier try"
    if (size_bytes := _written_before(task, pace.look, images)) is not None:
        return size_bytes
    try:
        return _write(task, pace, images)
    except FileNotFoundError:
        # another writer of the same snapshot, taken for dead, has finished it and cleaned up
        if (size_bytes := _written_before(task, pace.look, images)) is not None:
            return size_bytes
        raise


def _write(task: Task, pace: Pacing, images: Mappings) -> int:
    request = task.request
    task.phase = "reading the image"
    with holding(request.image) as source:
        version, index = _staged(task)
        pace.size_bytes = index.size_bytes
        with images.of(source, index.size_bytes) as view:
            reached("request read")
            task.phase = "making the folder"
            with _opened(request.folder) as folder:
                reached("folder made")
                task.begin_claim()
                if request.shard and (folder / gone_file(0)).exists():
                    raise Left("superseded", "rank 0 has given it up", is_lost=True)
                mode = folder.stat().st_mode & 0o666
                with _beside(lambda look: _hash(task, index, view, version, look), pace.look) as hashing:
                    _write_image(task, folder, view, mode, pace)
                    hashed, version = hashing.result()
                task.phase = "writing the receipt"
                if fingerprint(request.snapshot) != version and _was_changed(task, source, index, hashed):
                    raise StorageError(f"{request.image} was changed while it was written")
                write_index(folder / index_file(request.shard), hashed, durable=True, mode=mode)
                task.written = hashed
                reached("receipt written")
    return index.size_bytes


def _written_before(task: Task, look: Pace, images: Mappings) -> int | None:
    """The size of the image where a writer before this one has finished it: the same as in memory, if it is there."""
    request = task.request
    try:
        receipt = read_index(request.folder / index_file(request.shard))
    except StorageError:
        return None
    if receipt is None or receipt.identity != request.identity or not receipt.is_hashed:
        return None
    with contextlib.suppress(StorageError, FileNotFoundError), holding(request.image) as source:
        _, index = _staged(task)
        with images.of(source, index.size_bytes) as view:
            if digests(view, index, look) != [item.digest for item in receipt.items]:
                return None
    return receipt.size_bytes


def _staged(task: Task) -> tuple[Fingerprint | None, ShardIndex]:
    """The snapshot's index, when it is the one that was announced.

    Raises:
        StorageError: it is not.
    """
    request = task.request
    version = fingerprint(request.snapshot)
    index = read_index(request.snapshot)
    if index is None or (index.identity, index.shard) != (request.identity, request.shard):
        found = "nothing" if index is None else f"shard {index.shard} of {index.identity.folder_name}"
        raise StorageError(
            f"{request.snapshot} holds {found} instead of shard {request.shard} of {request.identity.folder_name}"
        )
    return version, index


def _was_changed(task: Task, source: int, *same: ShardIndex) -> bool:
    """Not by another writer of the same snapshot, nor by a worker that took its whole memory folder away at its end."""
    request = task.request
    return read_index(request.snapshot) not in same and _is_in_place(request.image, source)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """The checkpoint folder, made if need be, by a name that stays with it: its replacement is never written to.

    Raises:
        Left: it was removed meanwhile.
    """
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent.parent)
    with contextlib.suppress(FileExistsError):
        # On a network filesystem this node may still remember that the folder did not exist.
        os.mkdir(folder)  # noqa: PTH102 - pathlib's exist_ok looks at that same stale memory
    with _own(folder) as held:
        try:
            yield held
            if not _is_in_place(folder, held):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE) and not _is_in_place(folder, held):
                raise Left("superseded", "its folder was removed", is_lost=True) from error
            raise


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[Path]:
    """The checkpoint folder, whatever its name leads to meanwhile. Of a link, or another user's, the files may be any.

    Raises:
        OSError: it is one of these, or is not there.
    """
    descriptor = os.open(folder, IS_FOLDER)
    try:
        if (owner := os.fstat(descriptor).st_uid) not in trusted_owners(folder.parent):
            raise UnsafeFile(errno.EPERM, f"belongs to user id {owner}", str(folder))
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _is_in_place(path: Path, held: Path | int) -> bool:
    """Whether the name still leads to what is held, by a descriptor or by its path."""
    try:
        return os.path.samefile(path, held)  # noqa: PTH121 - of a descriptor, too
    except OSError:
        return False


_Hashed = tuple[ShardIndex, Fingerprint | None]


@contextlib.contextmanager
def _beside(work: Callable[[Pace], _Hashed], look: Pace) -> Iterator[Future[_Hashed]]:
    """Have ``work`` done in a thread meanwhile; it is over when this is left, early if there was an error."""
    future: Future[_Hashed] = Future()
    stopped = threading.Event()

    def look_and_stop(done_bytes: int) -> None:
        if stopped.is_set():
            raise Left("superseded")
        look(done_bytes)

    def target() -> None:
        try:
            future.set_result(work(look_and_stop))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)

    thread = threading.Thread(target=target, daemon=True, name="hash")
    thread.start()
    try:
        yield future
    finally:
        stopped.set()
        thread.join()


def _hash(task: Task, index: ShardIndex, view: memoryview, version: Fingerprint | None, look: Pace) -> _Hashed:
    """The index with digests, put in place of the one without at once: a restart from memory wants them."""
    if index.is_hashed:  # a writer before this one did it
        task.on_hashed(task.request)
        return index, version
    hashed = index.with_digests(digests(view, index, look))
    snapshot = task.request.snapshot
    if fingerprint(snapshot) == version:
        try:
            write_index(snapshot, hashed, durable=False)
            version = fingerprint(snapshot)
            task.on_hashed(task.request)
        except OSError as error:
            log.warning("%s gets no digests: %s", snapshot, error)
    task.tell("hashed", size_bytes=index.size_bytes)
    reached("hashed")
    return hashed, version


def _write_image(task: Task, folder: Path, view: memoryview, mode: int, pace: Pace) -> None:
    task.phase = "writing the image"
    with NewFile(folder, image_file(task.request.shard), mode=mode) as file:
        reached("image begun")
        file.write(view, pace)
        reached("image written")
        task.phase = "syncing the image"
        file.sync()
        reached("image synced")
        file.put_in_place()
    reached("image in place")


# --- image lane ---
# The thread of a writer that makes images durable, one at a time; of those that wait the newest wins. No torch.

POLITE_BYTES = 64 << 20
"""A smaller image is written without a noticeable slowdown of the training."""


def size_of(path: Path) -> int:
    """In bytes; 0 where there is no such file."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


class ImageLane:
    """Writes offered images; the listening thread calls everything but ``run``, and never waits for a disk.

    Args:
        hand_over: called with each task whose image and receipt are durable.
    """

    def __init__(self, page: ProgressPage, hand_over: Callable[[Task], None]) -> None:
        self._page = page
        self._hand_over = hand_over
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._current: Task | None = None
        self._dropped: list[Task] = []
        self._images = Mappings()

    def offer(self, task: Task) -> None:
        """Write this one next, instead of those that wait while another one is being written."""
        with self._changed:
            current = self._current
            if current is not None and not current.has_left_image_lane:
                for older in [*self._waiting]:
                    self._drop(older, "superseded")
            self._waiting.append(task)
            if current is not None:
                progress = self._page.progress()
                if task.request.urgent and 2 * progress.done_bytes < progress.size_bytes:
                    current.stop("superseded")
                if task.request.urgent:
                    current.throttle.lift()
                current.woken.set()  # an image that waits for free space is dropped
            self._changed.notify()

    def abandon(self, identity: Identity) -> bool:
        """Whether this lane had it."""
        with self._changed:
            for task in self._waiting:
                if task.request.identity == identity:
                    self._drop(task, "abandoned")
                    return True
            if self._current is not None and self._current.request.identity == identity:
                self._current.stop("abandoned")
                return True
        return False

    def hurry(self) -> None:
        """Lift the bandwidth cap of present and waiting images."""
        with self._changed:
            for task in (self._current, *self._waiting):
                if task is not None:
                    task.throttle.lift()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return not (self._waiting or self._current or self._dropped)

    def _drop(self, task: Task, kind: ReportKind) -> None:
        self._waiting.remove(task)
        task.tell(kind, final=True)
        self._dropped.append(task)  # the folder is looked at by the thread that may wait for a disk
        self._changed.notify()

    def run(self) -> None:
        """Work for ever; the thread's own function."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._dropped)
                self._current = self._waiting.popleft() if self._waiting else None
                dropped = list(self._dropped)
            self._page.show(Progress(0, 0))
            self._page.begin(Lane.IMAGE)
            for task in dropped:
                give_up(task.request.folder, task.request.shard, "superseded")
            if self._current is not None:
                if self._finish_politely(self._current):
                    self._hand_over(self._current)
                else:
                    self._current.end_claim()
            with self._changed:
                self._current = None
                del self._dropped[: len(dropped)]
            self._page.end(Lane.IMAGE)

    def _finish_politely(self, task: Task) -> bool:
        """``_finish``; a large image that no caller waits for, in a low-priority thread."""
        if task.request.urgent or size_of(task.request.image) < POLITE_BYTES:
            return self._finish(task)
        done: list[bool] = []
        do_politely(lambda: done.append(self._finish(task)))
        return done == [True]

    def _finish(self, task: Task) -> bool:
        """Whether the image is durable; other ends are reported. Retries errors that may pass by themselves."""
        told: set[int] = set()
        tries = 0
        while True:
            try:
                task.leave_if_stopped()
                size_bytes = write_durably(task, Pacing(task, self._page), self._images)
            except Left as left:
                reason = "superseded"
                task.tell(left.kind, final=True, phase=task.phase, text=left.text)
                if left.is_lost:
                    return False
            except OSError as error:
                passes = error.errno in PASSING
                if passes and not self._waiting:
                    if error.errno not in told:
                        task.tell_failure(error, final=False)
                    told.add(error.errno or 0)
                    self._rest(task, PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                    tries += 1
                    continue
                if passes:
                    reason = "superseded"
                    task.tell("superseded", final=True, phase=task.phase, errno=error.errno or 0, text=str(error))
                else:
                    reason = str(error)
                    task.tell_failure(error, final=True)
            except StorageError as error:
                reason = error.what
                task.tell_failure(error, final=True)
            except Exception as error:
                log.exception("%s failed while %s", task.request.identity.folder_name, task.phase)
                reason = repr(error)
                task.tell_failure(error, final=True)
            else:
                task.tell("written", final=task.request.commit is None, size_bytes=size_bytes)
                return True
            give_up(task.request.folder, task.request.shard, reason)
            return False

    def _rest(self, task: Task, pause_s: float) -> None:
        """Until the pause is over, or there is something newer to do."""
        for _ in range(int(pause_s * 4)):
            if task.leave or self._waiting or task.woken.wait(0.25):
                break
            self._page.tick(Lane.IMAGE)
        task.woken.clear()


# --- step copy lane ---
# The thread of a writer that copies steps to other nodes' memory between two saves. Nothing of them goes to disk.
#
# It works beside the durable write, which may take a hundred times as long. No torch.


class StepCopyLane:
    """Hashes each offered step and sends it to this node's peers; the worker offers the next one when it has ended.

    The listening thread calls everything here, and never waits. Without an offer it starts no thread.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment, self._key = environment, key_file(environment) or Path()
        self._peers: list[Peer] | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._current: Task | None = None
        self._images = Mappings()

    def offer(self, task: Task) -> None:
        """Copy this one after those that were offered before."""
        with self._changed:
            if self._peers is None:
                self._peers = find_peers(self._environment)
                threading.Thread(target=self._run, name="step copies", daemon=True).start()
            self._waiting.append(task)
            self._changed.notify()

    def abandon(self, identity: Identity) -> bool:
        """Whether this lane had it."""
        with self._changed:
            for task in (*self._waiting, self._current):
                if task is not None and task.request.identity == identity:
                    task.stop("abandoned")
                    return True
        return False

    def end_within(self, seconds: float) -> None:
        """Its worker is gone: what has not arrived then is left, as the next attempt has chosen its state by then."""

        def leave() -> None:
            with self._changed:
                for task in (*self._waiting, self._current):
                    if task is not None:
                        task.stop("abandoned")

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        timer.start()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return not self._waiting and self._current is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                self._current = task = self._waiting.popleft()
            if size_of(task.request.image) < POLITE_BYTES:
                self._finish(task)
            else:
                do_politely(functools.partial(self._finish, task))
            with self._changed:
                self._current = None

    def _finish(self, task: Task) -> None:
        try:
            problem = self._copy(task)
            task.tell("copied", final=True, phase=task.phase, text=problem)
        except Left as left:
            task.tell(left.kind, final=True, phase=task.phase)
        except Exception as error:  # a bug here must not end all copies of this process
            log.exception("step %d was not copied", task.request.identity.step)
            task.tell_failure(error, final=True)

    def _copy(self, task: Task) -> str:
        """Why a peer does not have it; empty where all do."""
        request = task.request
        task.phase = "reading the image"
        with holding(request.image) as source:
            _, index = _staged(task)
            if not index.is_hashed:
                with self._images.of(source, index.size_bytes) as view:
                    hashed = index.with_digests(digests(view, index, lambda _: task.leave_if_stopped()))
                write_index(request.snapshot, hashed, durable=False)
            reached("step hashed")
            task.phase = "sending it"
            return self._send(task)

    def _send(self, task: Task) -> str:
        request, problems = task.request, list[str]()
        for peer in self._peers or ():
            problem = send_copy(
                request.snapshot, request.image, peer, self._key, bytes_per_s=request.max_bytes_per_s or None,
                stop=task.woken, keep=request.keeps,
            )  # fmt: skip
            task.leave_if_stopped()
            if problem:
                problems.append(f"node {peer.place}: {problem}")
                log.warning("no copy of step %d with node %d: %s", request.identity.step, peer.place, problem)
        reached("step sent")
        return "; ".join(problems)


# --- entry ---
# Run as ``python -m slurmft.checkpoint.writer SOCKET_FD PAGE_FD LIFETIME_S``: requests and reports are JSON
# objects, one on each line (checkpoint.write_requests); the page shows its progress. When its worker closes the
# socket, or dies, it finishes its present work and ends, after ``LIFETIME_S`` seconds at the latest.

_LOOK_S = 0.1
_STEP_COPY_S = 30.0
"""How long the copy of a step may go on without its worker."""

_SIGN_S = 0.5
"""How often it shows that it lives while it copies a step: to a slow peer that takes long, which is no stall."""


class Writer:
    """Listens to its worker while other threads do all work that may wait for a disk or a peer."""

    def __init__(self, worker: socket.socket, page: ProgressPage) -> None:
        self._worker, self._page = LineSocket(worker), page
        self._is_closing = False
        self._is_alone = False
        self._outbox = Outbox()
        self._copies = CopyLane()
        self._steps = StepCopyLane()
        self._lock = threading.Lock()
        self._commits: CommitLane | None = None
        self._images = ImageLane(page, self._commit)
        threading.Thread(target=self._images.run, daemon=True).start()

    def serve(self, lifetime_s: float) -> int:
        """Return an exit code when the worker has closed and nothing is left to do, or the lifetime is over."""
        ends_at: float | None = None
        while True:
            self._listen()
            if not self._is_closing:
                continue
            if ends_at is None:
                ends_at = time.monotonic() + lifetime_s
                self._steps.end_within(_STEP_COPY_S)
                if self._commits is not None:
                    self._commits.left_alone()
            lanes = (self._images, self._commits, self._copies, self._steps)
            if all(lane is None or lane.is_idle() for lane in lanes):
                self._send()
                return 0
            if time.monotonic() > ends_at:
                log.error("not everything could be written in %.0f s; it stays unfinished", lifetime_s)
                return 1

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._outbox.wake, select.POLLIN)
        if not self._is_alone:
            poll.register(self._worker, select.POLLIN | (select.POLLOUT if self._worker.wants_to_send else 0))
        pause_s = _LOOK_S if self._is_closing else None if self._steps.is_idle() else _SIGN_S
        for descriptor, _ in poll.poll(None if pause_s is None else pause_s * 1000):
            if descriptor == self._outbox.wake:
                os.eventfd_read(descriptor)
            elif (lines := self._worker.receive()) is None:
                self._is_alone = self._is_closing = True
            else:
                for line in lines:
                    self._obey(line)
        self._page.tick(Lane.LISTENING)
        self._send()

    def _obey(self, line: bytes) -> None:
        value = json.loads(line)
        if value["kind"] == "write":
            task = Task(request_from(value), self._outbox, on_hashed=self._copies.offer)
            if task.request.is_step_copy:
                self._steps.offer(task)
            else:
                (self._commit if task.request.is_written else self._images.offer)(task)
        elif value["kind"] == "abandon":
            identity = Identity(*value["identity"])
            is_found = self._steps.abandon(identity) or self._images.abandon(identity)
            if not is_found and self._commits is not None:
                self._commits.abandon(identity)
        elif value["kind"] == "hurry":
            self._images.hurry()
        elif value["kind"] == "close":
            self._is_closing = True

    def _commit(self, task: Task) -> None:
        """Commit a save of rank 0's. The others never need the code for it, whose import is half of their start."""
        if task.request.commit is None:
            return
        with self._lock:  # both the listening thread and that of the images come here
            if self._commits is None:
                self._commits = CommitLane(self._page)
                threading.Thread(target=self._commits.run, daemon=True).start()
                if self._is_closing:
                    self._commits.left_alone()
        self._commits.add(task)

    def _send(self) -> None:
        lines = self._outbox.take()
        if not self._is_alone and not self._worker.send(lines):
            self._is_alone = self._is_closing = True


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve one worker, then end."""
    ignore_signals()
    log_to_stderr("%(asctime)s %(levelname)s writer: %(message)s")
    worker, page = socket.socket(fileno=int(arguments[0])), ProgressPage(int(arguments[1]))
    for descriptor in (worker.fileno(), page.descriptor):
        os.set_inheritable(descriptor, False)
    code = Writer(worker, page).serve(float(arguments[2]))
    os._exit(code)  # a thread that a filesystem holds must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
