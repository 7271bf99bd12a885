"""A durable queue between programs: what is put under an id is taken once, in one order, whatever dies; and the
segments that it, and the ledger of a batch, consist of.

Each writer appends to segments of its own; the trainer's rank 0 decides in which order items count, and has the order
on the disk before anybody gets an item. The position in that order is the reader's state: given to a checkpoint manager
as ``loader=``, it is saved and loaded with the weights, and a trainer that goes on from a checkpoint gets the items
after it again, in the same order. So each item is used once, or not at all, by the weights that are left in the end.

Files, in a private folder: ``segments/*.jsonl`` (items), ``order-<number>.jsonl`` (one for each life of the reader;
its first line says how long the earlier ones were when it was begun, so that what a superseded reader adds later counts
for nobody), ``taken.json`` (how many items of each segment have been taken, for the writers), ``ended.json``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from slurmft.errors import DirectoryInUse, Fenced, NewerFormat, StorageError, UsageError
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.storage.checkpoint_names import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE
from slurmft.storage.patience import patiently, translated, write_state, writing
from slurmft.system import files

# --- Segments: append-only files of records, each written by one process in its life, and read by any ---
# A line is the CRC-32 of its JSON in hexadecimal, a blank, and the JSON. The first line is a header. A torn or damaged
# line ends the reading: what follows it counts for nobody.

FORMAT = 1
MAX_RECORD_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a segment."""

    start: int
    """Byte at which it begins; its length is ``end - start``."""

    end: int
    value: dict[str, Any]


class SegmentWriter:
    """Appends records to a new file; ``sync`` makes them survive a power cut.

    Raises:
        OSError: the file is there already, or cannot be written; then it is not left behind without its header.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._descriptor = files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, follow=False)
        self.end = 0
        try:
            self.append([{"segment": FORMAT, **header}])
        except OSError:
            self.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def append(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Write the records in one go; returns the file's end.

        Raises:
            OSError: they are not all there; the end is as before, and the rest is not read.
        """
        data = b"".join(line_of(record) for record in records)
        with files.naming(self.path):
            os.ftruncate(self._descriptor, self.end)  # what an earlier try has left
            files.write_all(self._descriptor, data)
        self.end += len(data)
        return self.end

    def commit(self, records: Iterable[Mapping[str, Any]]) -> int:
        """As ``append``, and on the disk. Where that fails none of them counts, so that another try doubles nothing.

        Raises:
            OSError: they are not on the disk.
        """
        before = self.end
        self.append(records)
        try:
            self.sync()
        except OSError:
            self.end = before
            raise
        return self.end

    def sync(self) -> None:
        """Return when everything appended is on the disk.

        Raises:
            OSError: it is not.
        """
        with files.naming(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line, with its end."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    body = text.encode(errors="surrogatepass")
    return b"%08x %s\n" % (zlib.crc32(body), body)


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line without its end; None when it is torn or damaged."""
    crc, blank, body = line.partition(b" ")
    try:
        if not blank or len(crc) != 8 or int(crc, 16) != zlib.crc32(body):
            return None
        value = json.loads(body.decode(errors="surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read(path: Path, start: int = 0, end: int | None = None) -> Iterator[Record]:
    """The records from byte ``start`` on; ends at ``end``, or before the first one that is torn or damaged.

    Raises:
        StorageUnavailable: the filesystem is away, which may pass.
        StorageError: the file cannot be read, is not this run's, or was written by a newer version.
    """
    try:
        with files.opened(path, owners=files.trusted_owners(path.parent)) as descriptor:
            at, rest = start, b""
            while True:
                room = _CHUNK_BYTES if end is None else min(_CHUNK_BYTES, end - at - len(rest))
                part = os.pread(descriptor, room, at + len(rest)) if room > 0 else b""
                if not part or len(rest) > MAX_RECORD_BYTES:
                    return
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if (value := parse(line)) is None:
                        return
                    if at == 0 and value.get("segment", FORMAT) != FORMAT:
                        raise NewerFormat(f"{path} was written by a newer slurmft (segment {value['segment']})")
                    yield Record(at, at + len(line) + 1, value)
                    at += len(line) + 1
    except OSError as error:
        raise translated(f"cannot read {path}", error) from error


def names_in(folder: Path, pattern: re.Pattern[str], *, must_exist: bool = False) -> list[str]:
    """Sorted; none where the folder is not there, unless it must.

    Raises:
        StorageError: it cannot be looked into.
    """
    try:
        return sorted(entry.name for entry in os.scandir(folder) if pattern.fullmatch(entry.name))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not must_exist:
            return []
        raise translated(f"cannot look into {folder}", error) from error


# --- Series: segments of one kind, each begun by another owner ---


class Series:
    """Segments ``<kind>-<number>.jsonl`` of a folder. The first line of each says how long the ones before it were when
    it was begun (``continues``), so that what a superseded owner adds later counts for nobody.
    """

    def __init__(self, folder: Path, kind: str, *, must_exist: bool = False) -> None:
        self._folder, self._kind, self._must_exist = folder, kind, must_exist
        self._name = re.compile(rf"{kind}-(\d{{6,}})\.jsonl")

    def path(self, number: int) -> Path:
        """Of one segment."""
        return self._folder / f"{self._kind}-{number:06d}.jsonl"

    def numbers(self) -> list[int]:
        """Those that are there, sorted.

        Raises:
            StorageError: the folder cannot be looked into.
        """
        names = names_in(self._folder, self._name, must_exist=self._must_exist)
        return sorted(int(match[1]) for name in names if (match := self._name.fullmatch(name)))

    def header(self, number: int) -> Mapping[str, Any]:
        """Its first line; empty where that is not written yet, or torn.

        Raises:
            StorageError: it cannot be read, or a newer version wrote it.
        """
        path = self.path(number)
        first = next((record.value for record in read(path)), {})
        if first.get(self._kind, FORMAT) != FORMAT:
            raise NewerFormat(f"{path} was written by a newer slurmft")
        return first

    def lengths(self, before: float = math.inf) -> dict[str, int]:
        """How much counts of each one with a smaller number, by its name: the newest whole, earlier ones as far as the
        next one has said.

        Raises:
            StorageError: one cannot be read.
        """
        lengths: dict[str, int] = {}
        for number in reversed([each for each in self.numbers() if each < before]):
            known, path = self.header(number).get("continues"), self.path(number)
            for name, length in (known if isinstance(known, dict) else {}).items():
                lengths.setdefault(str(name), int(length))
            if path.name not in lengths:
                lengths[path.name] = max((record.end for record in read(path)), default=0)
        return lengths


# --- The queue: two sides, and the order between them ---

MAX_VALUE_BYTES = MAX_RECORD_BYTES // 2
MAX_DEPTH = 100
"""Python's JSON ends at its limit of recursion, which a reader that is called more deeply meets sooner."""

SEGMENT_BYTES = 64 << 20
"""A writer begins another segment then; whole segments are what is deleted."""

FORGOTTEN_S = 86_400.0
"""A segment that its writer has not closed is deleted so long after its last item, when all of them are old."""

PATIENCE_S = 600.0
"""So long a full or silent filesystem is waited for."""

POLL_S = 0.02, 0.5
ORDER, STOPPING = "order", "stopping"
QUEUES_VARIABLE = "SLURMFT_QUEUES"
"""The folder of queues that all roles of a job share."""

_SEGMENT = re.compile(r"[\w.-]{1,64}-[0-9a-f]{12}-\d{6}\.jsonl", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """What was put."""

    id: str
    value: Any
    """As JSON gives it back: tuples have become lists."""

    version: int
    """Of the weights that made it, as its writer said."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an item is."""

    segment: str
    start: int
    end: int
    id: str


class NothingComes(SystemExit):
    """Ends a trainer that waits for items while its job stops and nobody is left to put them; exit code 75.

    Not an ``Exception``, so that trainers do not swallow it.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_TEMPORARY)


def stop_taking(queues: Path, *, over: bool = False) -> None:
    """Have readers of these queues wait for nothing more; ``over``: as ever again."""
    with contextlib.suppress(OSError):
        if over:
            (queues / STOPPING).unlink(missing_ok=True)
        elif queues.is_dir():
            files.replace_atomically(queues / STOPPING, b"", durable=False)


def folder_of(name: str | Path) -> Path:
    """The folder of a queue: below that of the run for a name, else the path itself.

    Raises:
        UsageError: it is a name, and this is no process of a run; or no name for a folder.
    """
    if isinstance(name, Path) or os.sep in name:
        return Path(name).absolute()
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a queue", hint="up to 64 letters, digits, '.', '_' and '-'")
    if not (run := os.environ.get(RUN_FOLDER_VARIABLE)):
        raise UsageError(f"the queue {name!r} belongs to a run, and this process to none",
                         hint="give a path, which other runs may use as well")  # fmt: skip
    return Path(os.environ.get(QUEUES_VARIABLE) or f"{run}/queues").absolute() / name


class Queue:
    """One end of a queue: ``put`` and ``end`` where items are made, ``take`` in the trainer.

    A reader is stateful: give it to ``CheckpointManager.save`` and ``load_latest`` as ``loader=``. All ranks
    of a trainer call ``take`` with the same arguments, as often as each other, and get the same items. One process uses
    it from one thread.

    Args:
        name: in the run's folder; or a path, for programs that are not in one run.
        max_waiting: a ``put`` waits while so many items of this writer are not taken.
        keep_items: so many items before the position are kept; a checkpoint that is older than that cannot be loaded.
        patience_s: how long a filesystem that is full or away is waited for.

    Raises:
        UsageError: the name is none, or a limit is not positive.
        StorageError: the folder cannot be made, or is not private to this user.
    """

    def __init__(
        self, name: str | Path, *, max_waiting: int = 10_000, keep_items: int = 100_000, patience_s: float = PATIENCE_S
    ) -> None:
        if max_waiting < 1 or keep_items < 1:
            raise UsageError("max_waiting and keep_items of a queue must be at least 1")
        self.folder, self._patience_s = folder_of(name), patience_s
        self._segments = self.folder / "segments"
        with writing(self.folder):
            for path in (self.folder, self._segments):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                files.check_private(path)
        self._writer = _Writer(self._segments, self.folder / "taken.json", max_waiting)
        self._order: _Followed | None = None
        self._ended_with: set[bytes] | None = None
        """Digests of all items, once one was put after the end."""

        self._found: set[bytes] | None = None
        """Digests of those that were there when one was looked for first."""

        self._keep_items = keep_items
        self.position = 0
        """Items that this reader has got, from the beginning of the queue on."""

    # --- the side that makes items ---

    def put(self, id: str, value: Any, *, version: int = 0, timeout_s: float | None = None) -> None:
        """Return when the item is on the disk. Of items with one id that is taken which is found first.

        Args:
            id: what makes it this item: one that is put again after a restart has the same.
            value: anything that JSON can say, up to 32 MiB.
            version: of the weights that made it.
            timeout_s: how long to wait for room; None: for ever.

        Raises:
            UsageError: it cannot be written as JSON, or is too large; or the queue has ended without it.
            TimeoutError: no room in that time.
            StorageUnavailable: the filesystem was full or away for longer than ``patience_s``.
        """
        if not isinstance(id, str) or not id or len(id) > 512 or type(version) is not int:
            raise UsageError("an item of a queue has a text of 1 to 512 characters as its id, and a whole version")
        record = {"id": id, "value": value, "version": version}
        try:
            size = len(line_of(record))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the item {id!r} cannot be written as JSON: {error}") from error
        if _is_deeper(value, MAX_DEPTH):
            raise UsageError(f"the item {id!r} has lists in lists, {MAX_DEPTH} deep; a reader may not get through them")
        if size > MAX_VALUE_BYTES:
            raise UsageError(f"the item {id!r} has {size} bytes; at most {MAX_VALUE_BYTES} fit",
                             hint="put the path of a file")  # fmt: skip
        if patiently(lambda: _exists(self.folder / "ended.json"), patience_s=self._patience_s):
            if patiently(lambda: self._was_put(id), patience_s=self._patience_s):
                return
            raise UsageError(f"the queue {self.folder} has ended; {id!r} would never be taken")
        deadline = _deadline(timeout_s)
        for _ in _polls(deadline):
            if patiently(self._writer.has_room, patience_s=self._patience_s):
                patiently(lambda: self._writer.append(record), patience_s=self._patience_s)
                return
        raise TimeoutError(f"no room in the queue {self.folder} within {timeout_s} s: nobody takes what is there")

    def _was_put(self, id: str) -> bool:
        if self._ended_with is None:
            self._ended_with = self._put_so_far()
        return _digest(id) in self._ended_with

    def __contains__(self, id: str) -> bool:
        """Whether the item was put before this was asked for the first time: a program that begins again need not make
        it again. All that is in the queue is read then.

        Raises:
            StorageUnavailable: the filesystem was away for longer than ``patience_s``.
        """
        if self._found is None:
            self._found = patiently(self._put_so_far, patience_s=self._patience_s)
        return _digest(id) in self._found

    def _put_so_far(self) -> set[bytes]:
        orders = Series(self.folder, ORDER, must_exist=True)
        items = (record.value.get("id") for name in names_in(self._segments, _SEGMENT, must_exist=True)
                 for record in read(self._segments / name))  # fmt: skip
        entries = [record.value for number in orders.numbers() for record in read(orders.path(number))]
        taken = (each for entry in entries for each in (*(item[3] for item in entry.get("items", ())),
                                                        *entry.get("dropped", ())))  # fmt: skip
        return {_digest(each) for each in (*items, *taken) if isinstance(each, str)}

    def end(self) -> None:
        """Say that nothing more will be put by anybody: ``take`` returns what is left, then empty lists."""
        patiently(lambda: write_state(self.folder / "ended.json", {"ended": True}), patience_s=self._patience_s)

    def close(self) -> None:
        """Give back files; a writer that has closed lets its segments be deleted sooner."""
        patiently(self._writer.close, patience_s=self._patience_s)
        if self._order is not None:
            self._order.close()
            self._order = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the trainer's side ---

    def take(
        self, count: int | None = None, *, ids: Sequence[str] = (), oldest_version: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Item]:  # fmt: skip
        """The next ``count`` items, or those with these ids, when they are there: the same on each rank.

        Which items come next, where no ids are given, is the order in which they are found, decided once: after a
        restart it is as before. With ids it depends on nothing, and two runs that put the same items train alike.

        Args:
            oldest_version: items of an older one are dropped, and never taken. Not with ids.
            timeout_s: how long to wait; None: for ever. One rank may get the items in time and another not: on
                several ranks let TimeoutError end the program, which then gets the same items again.

        Returns:
            As many as asked; fewer only after ``end``.

        Raises:
            UsageError: after a restart the program asks for other ids than it did at this position.
            TimeoutError: they were not there in that time; nothing is taken.
            DirectoryInUse: the queue is read by another run.
            Fenced: another reader of this run has taken over.
            StorageError: the queue is damaged, or the position lies before what is kept.
            NothingComes: the job stops, and the roles that put items have ended.
        """
        if (count is None) == (not ids) or (ids and oldest_version is not None):
            raise UsageError("take() of a queue wants a count, or ids, and oldest_version= with a count only")
        wanted = len(ids) or int(count or 0)
        if wanted < 1 or len(set(ids)) != len(ids):
            raise UsageError("take() of a queue wants at least one item, and each id once")
        if self._order is None:
            self._order = self._opened()
        order = self._order
        for _ in _polls(_deadline(timeout_s)):
            if order.length < self.position + wanted:
                patiently(
                    lambda: order.extend(self.position + wanted - order.length, ids, oldest_version),
                    patience_s=self._patience_s,
                )
            if order.length >= self.position + wanted or order.has_ended:
                return self._given(order, wanted, ids)
            if (self.folder.parent / STOPPING).exists():
                log.info("the job stops, and nobody is left to put what the queue %s does not have", self.folder)
                raise NothingComes
        raise TimeoutError(f"fewer than {wanted} items in the queue {self.folder} within {timeout_s} s")

    def _given(self, order: _Followed, wanted: int, ids: Sequence[str]) -> list[Item]:
        places = order.places(self.position, wanted)
        found = [place.id for place in places]
        if ids and found != list(ids[: len(found)]):
            raise UsageError(
                f"item {self.position} of the queue {self.folder} was {found[0]!r}, and {ids[0]!r} is asked for",
                hint="take() must be called with the same ids after a restart",
            )
        items = [self._item(place) for place in places]
        self.position += len(items)
        order.note_taken(self.position, self._keep_items)
        return items

    def _item(self, place: _Place) -> Item:
        path = self._segments / place.segment
        try:
            with files.opened(path, owners=files.trusted_owners(self._segments)) as descriptor:
                value = parse(os.pread(descriptor, place.end - place.start, place.start).removesuffix(b"\n"))
        except FileNotFoundError as error:
            raise StorageError(
                f"the item {place.id!r} of the queue {self.folder} is deleted",
                hint="the checkpoint is older than keep_items",
            ) from error
        except OSError as error:
            raise translated(f"cannot read {path}", error) from error
        if value is None or value.get("id") != place.id:
            raise StorageError(f"{path} is damaged at byte {place.start}")
        return Item(id=place.id, value=value["value"], version=value["version"])

    def _opened(self) -> _Followed:
        kind = _Order if os.environ.get("RANK", "0") == "0" else _Followed
        return patiently(lambda: kind(self.folder, self._segments), patience_s=self._patience_s)

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.position = int(state_dict["position"])

    @staticmethod
    def shared_position(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """All of the state: it is the same on each rank, whatever their number."""
        return state_dict


class _Writer:
    """Appends items to segments of its own, which no other process writes to."""

    def __init__(self, folder: Path, taken: Path, max_waiting: int) -> None:
        self._folder, self._taken, self._max_waiting = folder, taken, max_waiting
        self._begin()

    def _begin(self) -> None:
        host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:48]
        self._prefix, self._pid, self._number = f"{host}-{secrets.token_hex(6)}", os.getpid(), 0
        self._segment: SegmentWriter | None = None
        self._waiting: dict[str, int] = {}
        """Items that were put into each segment; those that are taken are taken off when there is no room."""

        self._known: dict[str, int] = {}

    def has_room(self) -> bool:
        """Whether fewer items than ``max_waiting`` wait to be taken."""
        if self._pid != os.getpid():  # a child of the one that began the segment
            self._begin()
        if sum(self._waiting.values()) < self._max_waiting:
            return True
        facts = (files.read_json(self._taken, owners=files.trusted_owners(self._taken.parent)) or {}).get("segments")
        for name in list(self._waiting):
            taken = facts.get(name, 0) if isinstance(facts, dict) else 0
            if not _exists(self._folder / name):  # deleted, since all of it is taken
                del self._waiting[name]
            elif type(taken) is int and taken > self._known.get(name, 0):
                self._waiting[name] -= taken - self._known.get(name, 0)
                self._known[name] = taken
        return sum(self._waiting.values()) < self._max_waiting

    def append(self, record: Mapping[str, Any]) -> None:
        """Return when it is on the disk.

        Raises:
            StorageError: it is not there.
        """
        while True:
            if self._segment is not None and self._segment.end >= SEGMENT_BYTES:
                self.close()
            with writing(self._folder):
                if self._segment is None:
                    self._number += 1
                    path = self._folder / f"{self._prefix}-{self._number:06d}.jsonl"
                    self._segment = SegmentWriter(path, {})
                    files.fsync_folder(self._folder)
                self._segment.commit([record])
            if _exists(self._segment.path):
                name = self._segment.path.name
                self._waiting[name] = self._waiting.get(name, 0) + 1
                return
            self._segment.close()  # this writer was silent for a day, and its segment is deleted
            self._segment = None

    def close(self) -> None:
        """Nothing more comes in this segment."""
        if self._segment is not None and self._pid == os.getpid():
            with writing(self._folder):
                self._segment.append([{"closed": True}])
            self._segment.close()
        self._segment = None


class _Followed:
    """The order of the items, as rank 0 decides it, and another rank reads it."""

    def __init__(self, folder: Path, segments: Path) -> None:
        self._folder, self._segments, self._orders = folder, segments, Series(folder, ORDER, must_exist=True)
        self._run = os.environ.get(RUN_FOLDER_VARIABLE, "")
        self._generation = os.environ.get(GENERATION_VARIABLE, "")
        self._number, self._end = 0, 0
        """Of the order's file that is read, and the byte behind what was read of it."""

        self._forget()

    def _forget(self) -> None:
        self._places: list[_Place] = []
        self._base = 0
        """Items before the first of ``places``."""

        self.has_ended = False

    @property
    def length(self) -> int:
        """Items that have been taken, by anybody, from the beginning on."""
        return self._base + len(self._places)

    def places(self, position: int, count: int) -> list[_Place]:
        """Where the items from a position on are.

        Raises:
            StorageError: they have been deleted, or were never taken.
        """
        if not self._base <= position <= self.length:
            raise StorageError(
                f"item {position} is not in the queue {self._folder}, which has {self._base} to {self.length}",
                hint="the checkpoint is older than keep_items, or of another queue",
            )
        return self._places[position - self._base :][:count]

    def extend(self, _missing: int, _ids: Sequence[str], _oldest_version: int | None) -> None:
        """Read what rank 0 has decided since the last call."""
        numbers = [each for each in self._orders.numbers() if each >= self._number]
        for number in reversed(numbers):
            if number == self._number or self._orders.header(number).get("generation") == self._generation:
                if number != self._number:
                    self._forget()
                    self._read_before(self._orders.lengths(number + 1), number)
                    self._number, self._end = number, 0
                self._end = self._read(self._orders.path(number), self._end, None)
                return

    def _read_before(self, lengths: Mapping[str, int], number: int) -> None:
        for name, length in sorted(lengths.items()):
            if name != self._orders.path(number).name:
                self._read(self._folder / name, 0, length)

    def _read(self, path: Path, start: int, end: int | None) -> int:
        for record in read(path, start, end):
            start = record.end
            self._add(record.value)
        if end is not None and start != end:
            raise StorageError(f"{path} is damaged at byte {start}")
        return start

    def _add(self, entry: Mapping[str, Any]) -> None:
        for segment, first, last, name in entry.get("items", ()):
            self._places.append(_Place(segment, first, last, name))
        self.has_ended |= "end" in entry

    def note_taken(self, position: int, keep: int) -> None:
        """All ranks have, or will have, the items before the position."""
        if (old := position - keep - self._base) > 0:
            del self._places[:old]
            self._base += old

    def close(self) -> None:
        """Give back the file."""


@dataclass(slots=True)
class _Segment:
    """What is known of one."""

    end: int = 0
    """The byte behind what was read."""

    taken: int = 0
    count: int = 0
    last: int = -1
    """The place in the order of its last item."""

    is_closed: bool = False


class _Order(_Followed):
    """The order of the items, at rank 0, which decides it."""

    def __init__(self, folder: Path, segments: Path) -> None:
        self._seen: set[bytes] = set()
        self._known: dict[str, _Segment] = {}
        self._found: dict[str, tuple[_Place, int]] = {}
        """Items that nobody has taken, in the order in which they were found, with their versions."""

        super().__init__(folder, segments)
        self._file = self._begun()
        self._tell()

    def _begun(self) -> SegmentWriter:
        numbers = self._orders.numbers()
        self._number = (numbers[-1] if numbers else 0) + 1
        # a reader that was killed, or met a full disk, before its first line was written has decided nothing
        newest = next(filter(None, map(self._header, reversed(numbers))), None)
        if newest is not None and newest.get("run") != self._run:
            raise DirectoryInUse(
                f"the queue {self._folder} is read by {newest.get('run') or 'a program outside of any run'}",
                hint="choose another name; if that one is over, delete the queue's folder",
            )
        lengths = self._orders.lengths()
        self._read_before(lengths, self._number)
        header = {ORDER: FORMAT, "run": self._run, "generation": self._generation, "continues": lengths}
        with writing(self._folder):
            file = SegmentWriter(self._orders.path(self._number), header)
            file.sync()
            files.fsync_folder(self._folder)
        return file

    def _header(self, number: int) -> Mapping[str, Any]:
        """The first line of an order; empty where it is not there.

        Raises:
            StorageError: it is there, and damaged.
        """
        path = self._orders.path(number)
        if not (header := self._orders.header(number)):
            with _looking(path), files.opened(path, owners=files.trusted_owners(self._folder)) as descriptor:
                if b"\n" in os.pread(descriptor, MAX_RECORD_BYTES, 0):
                    raise StorageError(f"{path} is damaged at byte 0")
        return header

    def _add(self, entry: Mapping[str, Any]) -> None:
        super()._add(entry)
        for number, (segment, _, _, name) in enumerate(entry.get("items", ()), start=self.length):
            self._seen.add(_digest(name))
            known = self._known.setdefault(segment, _Segment())
            known.last = number
        self._seen.update(map(_digest, entry.get("dropped", ())))

    def extend(self, missing: int, ids: Sequence[str], oldest_version: int | None) -> None:
        """Decide on so many more items, if they are there: with these ids at the end of the order, or any.

        Raises:
            Fenced: another reader has begun after this one.
            StorageError: nothing is decided.
        """
        if self.has_ended:
            return  # other ranks have read that nothing more comes, and wait for nothing
        ends = _exists(self._folder / "ended.json")
        self._look()
        if oldest_version is not None:
            old = [name for name, (_, version) in self._found.items() if version < oldest_version]
            if old:
                self._decide({"dropped": old})
        names = [name for name in ids[-missing:] if name in self._found] if ids else list(self._found)[:missing]
        if ids and names != list(ids[-missing:][: len(names)]):
            names = []
        if names and (len(names) == missing or ends):
            places = [self._found[name][0] for name in names]
            self._decide({"items": [[each.segment, each.start, each.end, each.id] for each in places]})
        if ends and len(names) < missing and not self.has_ended:
            self._decide({"end": True})

    def _decide(self, entry: Mapping[str, Any]) -> None:
        if self._orders.numbers()[-1:] != [self._number]:
            raise Fenced(f"another reader of the queue {self._folder} has taken over")
        with writing(self._file.path):
            self._file.commit([entry])
        self._add(entry)
        for name in (*entry.get("dropped", ()), *(each[3] for each in entry.get("items", ()))):
            self._known[self._found.pop(name)[0].segment].taken += 1
        self._tell()

    def _look(self) -> None:
        """Find what was put since the last look."""
        doubled = 0
        for name in names_in(self._segments, _SEGMENT, must_exist=True):
            if (known := self._known.setdefault(name, _Segment())).is_closed:
                continue
            for record in read(self._segments / name, known.end):
                known.end = record.end
                known.is_closed |= "closed" in record.value
                if isinstance(item := record.value.get("id"), str):
                    known.count += 1
                    if item in self._found or _digest(item) in self._seen:
                        known.taken += 1
                        doubled += 1
                    else:
                        place = _Place(name, record.start, record.end, item)
                        self._found[item] = place, record.value.get("version", 0)
        if doubled:  # its writer need not wait for these
            self._tell()

    def _tell(self) -> None:
        """Tell the writers what is taken. They wait longer where that fails."""
        taken = {name: known.taken for name, known in self._known.items() if known.taken}
        try:
            files.write_json(self._folder / "taken.json", {"segments": taken}, durable=False)
        except OSError as error:
            log.warning("cannot write %s: %s", self._folder / "taken.json", error.strerror or error)

    def note_taken(self, position: int, keep: int) -> None:
        """Forget what no checkpoint that can be loaded needs, and delete segments of which nothing else is left."""
        super().note_taken(position, keep)
        for name, known in list(self._known.items()):
            if known.last < self._base and known.count and known.taken == known.count and self._is_over(name, known):
                (self._segments / name).unlink(missing_ok=True)
                del self._known[name]

    def _is_over(self, name: str, known: _Segment) -> bool:
        try:
            facts = (self._segments / name).stat()
        except FileNotFoundError:
            return True
        return facts.st_size == known.end and (known.is_closed or time.time() - facts.st_mtime > FORGOTTEN_S)

    def close(self) -> None:
        """Give back the file."""
        self._file.close()


@contextlib.contextmanager
def _looking(path: Path) -> Iterator[None]:
    """Around a look at ``path``: what may pass by itself is told from what will not."""
    try:
        yield
    except OSError as error:
        raise translated(f"cannot look at {path}", error) from error


def _exists(path: Path) -> bool:
    with _looking(path):
        try:
            path.stat()
        except FileNotFoundError:
            return False
    return True


def _is_deeper(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return depth == 0 or any(isinstance(each, dict | list | tuple) and _is_deeper(each, depth - 1) for each in value)


def _digest(name: str) -> bytes:
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _polls(deadline: float) -> Iterator[None]:
    """One at once, and more until the deadline, with longer and longer pauses."""
    pause_s = POLL_S[0]
    yield
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        yield
        pause_s = min(2 * pause_s, POLL_S[1])
