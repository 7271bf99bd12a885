"""The ledger: which answers count, and the output that is written from it; and checkpoints of requests that are not
answered yet. One file for each generation of the run's supervisor, appended to by it alone.

An entry commits the bytes ``[start, end)`` of a segment and names the requests they answer; it is on the disk before
the answers count. The first entry of a ledger says how long the earlier ones were when it was begun: what a superseded
supervisor adds later is not read. A request that is answered twice has the answer that was committed first.

In one piece, since all of it reads and writes segments, and only the ledger says which parts of them count.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import math
import os
import re
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from slurmft.config.inference import EngineConfig
from slurmft.errors import StorageError, UsageError
from slurmft.inference.requests import Batch, Requests, arrow, left_in, load, runs_of, segment_name
from slurmft.policy.serving import Prefix
from slurmft.storage.patience import writing
from slurmft.storage.queue import Record, SegmentWriter, Series, names_in, parse, read
from slurmft.system.files import fsync_folder, open_regular, read_json, trusted_owners, write_json

FORMAT = 1
SEGMENT_NAME = re.compile(r"g\d{6,}-n\d+-r\d+-\d+-(?P<epoch>\d+)\.jsonl")
"""Generation at the start of its replica, node, replica, life of the replica, and the epoch under which it counts."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Entry:
    """Part of a segment that counts."""

    segment: str
    start: int
    end: int


def segments_of(folder: Path) -> Path:
    """Where replicas write."""
    return folder / "segments"


class Ledger:
    """The answers of a batch that count, as of now. Build it with ``open_ledger``.

    Raises:
        OSError: its first line cannot be written.
    """

    def __init__(
        self, batch: Batch, generation: int, done: Flags, ends: dict[str, int], continues: Mapping[str, int]
    ) -> None:
        self.batch, self.generation, self.done = batch, generation, done
        self._ends = ends
        self.count = int(done.sum())
        """Requests that are answered."""

        self.fresh: deque[Entry] | None = None
        """Gets what is committed from now on, before it counts; for the one that follows it."""

        header = {"ledger": FORMAT, "generation": generation, "digest": batch.digest, "total": batch.total}
        self._file = SegmentWriter(_ledgers(batch.folder).path(generation), {**header, "continues": dict(continues)})
        self._file.sync()
        fsync_folder(batch.folder)

    def end_of(self, segment: str) -> int:
        """The byte of a segment up to which it counts."""
        return self._ends.get(segment, 0)

    def commit(self, parts: Sequence[tuple[str, int, Sequence[Sequence[int]]]]) -> int:
        """Make answers count: for each part its segment, the byte behind it and its runs. Returns how many are new.

        Blocks until they are on the disk. Parts that are behind what counts already are left out.

        Raises:
            StorageError: none of them counts.
        """
        entries = []
        for segment, end, runs in parts:
            start = self.end_of(segment)
            if end > start:
                entries.append((Entry(segment, start, end), _flat(runs)))
        if not entries:
            return 0
        with writing(self._file.path):
            self._file.commit(
                {"segment": entry.segment, "start": entry.start, "end": entry.end, "runs": flat.tolist()}
                for entry, flat in entries
            )
        new = 0
        for entry, flat in entries:
            self._ends[entry.segment] = max(entry.end, self.end_of(entry.segment))
            if self.fresh is not None:
                self.fresh.append(entry)
            indexes = _spread(flat)
            new += int((~self.done[indexes]).sum())
            self.done[indexes] = True
        self.count += new
        return new

    def salvage(self, is_wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Commit whole answers that replicas wrote and did not live to report; returns how many are new.

        Args:
            is_wanted: by the name of a segment.

        Raises:
            StorageError: the folder or the ledger fails.
        """
        folder, parts = segments_of(self.batch.folder), []
        for name in names_in(folder, SEGMENT_NAME):
            if is_wanted(name):
                with writing(folder / name):
                    indexes, end = left_in(folder / name, self.end_of(name), self.batch.total)
                if indexes:
                    parts.append((name, end, runs_of(indexes)))
        return self.commit(parts)

    def forget(self, indexes: Iterable[int]) -> None:
        """Requests whose answers turned out to be unreadable are open again."""
        for index in indexes:
            self.count -= int(self.done[index])
            self.done[index] = False

    def entries(self) -> Iterator[Entry]:
        """Everything that counts, in the order in which it was committed.

        Raises:
            StorageError: a ledger cannot be read.
        """
        for value in _all_entries(self.batch.folder, self.generation + 1):
            yield Entry(value["segment"], value["start"], value["end"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def done_since(self, told: Flags | None) -> tuple[list[int], Flags]:
        """Requests that are answered and are not in ``told``, which an earlier call has returned; and all of them."""
        now = self.done.copy()
        new = now.copy()
        if told is not None:
            new[: len(told)] &= ~told
        return np.flatnonzero(new).tolist(), now

    def grow(self, batch: Batch) -> None:
        """The batch has become longer."""
        self.batch = batch
        self.done = np.concatenate((self.done, np.zeros(batch.total - len(self.done), dtype=np.bool_)))


def open_ledger(batch: Batch, generation: int) -> Ledger:
    """Read what counts so far, begin this generation's ledger, and commit what earlier replicas left behind.

    Memory: one byte for each request, and the names of the segments.

    Raises:
        StorageError: a ledger is damaged in the middle, of another input, or cannot be written.
    """
    done: Flags = np.zeros(batch.total, dtype=np.bool_)
    ends: dict[str, int] = {}
    ledgers = _ledgers(batch.folder)
    names = [ledgers.path(each).name for each in ledgers.numbers() if each < generation]
    lengths = ledgers.lengths(generation)
    for value in _all_entries(batch.folder, generation, lengths):
        indexes = _spread(np.asarray(value["runs"], dtype=np.int64))
        if len(indexes) and (indexes.min() < 0 or indexes.max() >= batch.total):
            raise StorageError(f"a ledger in {batch.folder} names requests beyond the {batch.total} of the input")
        done[indexes] = True
        ends[value["segment"]] = max(value["end"], ends.get(value["segment"], 0))
    for first, last in batch.bad:
        done[first:last] = True
    lengths = {name: length for name, length in lengths.items() if name in names}
    with writing(ledgers.path(generation)):
        segments_of(batch.folder).mkdir(mode=0o700, exist_ok=True)
        ledgers.path(generation).unlink(missing_ok=True)  # begun by this very generation, in an earlier try
        ledger = Ledger(batch, generation, done, ends, lengths)
    ledger.salvage()
    return ledger


def answered(folder: Path, total: int) -> int:
    """How many requests of a batch are answered, for a look from outside.

    Raises:
        StorageError: a ledger cannot be read.
    """
    done: Flags = np.zeros(total, dtype=np.bool_)
    for value in _all_entries(folder):
        indexes = _spread(np.asarray(value["runs"], dtype=np.int64))
        done[indexes[indexes < total]] = True
    return int(done.sum())


class AnswersSoFar:
    """What counts for each request of a batch that may grow, for looks from outside, of which each reads on where the
    last one ended. Memory: 20 bytes for each request. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ledgers = folder, _ledgers(folder)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._index: AnswerIndex | None = None
        self._generations: list[int] = []
        self._read: dict[str, int] = {}
        """Ledgers, and up to where each was read."""

        self._again: list[Entry] = []
        """Those of which something could not be read."""

        self._torn_bytes = 0
        """Length of the newest ledger where its end could not be read."""

        self._is_whole = False

    def look(self) -> Batch | None:
        """Learn of what counts by now; returns the batch as of now, None where there is none.

        Raises:
            StorageError: a ledger cannot be read.
        """
        if (generations := self._ledgers.numbers()) and (batch := self._read_on(generations)) is not None:
            return batch
        return load(self._folder)

    def _read_on(self, generations: Sequence[int]) -> Batch | None:
        newest = self._ledgers.path(generations[-1])
        try:
            size = newest.stat().st_size
        except OSError as error:
            raise StorageError(f"cannot read {newest}: {error.strerror or error}") from error
        lengths = {} if generations == self._generations else self._ledgers.lengths()
        # a supervisor that was superseded has written on until there was another one, or a commit has failed, and is
        # written over by the next one
        is_changed = any(lengths.get(name, end) < end for name, end in self._read.items())
        if is_changed or self._torn_bytes not in (0, size) or not self._is_whole:
            self._begin_anew()
            lengths = self._ledgers.lengths()
        entries, self._again, self._is_whole = self._again, [], False
        lengths[newest.name] = sys.maxsize
        for path in [path for each in generations if (path := self._ledgers.path(each)).name in lengths]:
            for record in read(path, self._read.get(path.name, 0), lengths[path.name]):
                self._read[path.name] = record.end
                if record.start:
                    entries.append(_entry_in(record, path))
        self._torn_bytes = size * (self._read.get(newest.name, 0) < size)
        if (batch := load(self._folder)) is not None:  # after the ledger, which names no request that is not in it
            self._index = self._index or AnswerIndex(batch)
            self._index.grow(batch)
            self._again = self._index.add(entries)
        self._generations, self._is_whole = [*generations], batch is not None
        return batch

    def answers(self, numbers: Iterable[int]) -> Iterator[Mapping[str, Any] | None]:
        """Of each of these requests; None for one that was not answered at the last look.

        Raises:
            StorageError: a segment cannot be read.
        """
        index = self._index
        if index is None:
            yield from (None for _ in numbers)
            return
        with _Segments(self._folder, index.segments) as segments:
            for number in numbers:
                segment, start, length = index.place_of(number)
                yield segments.get(segment, start, length) if length else None


def _ledgers(folder: Path) -> Series:
    """One for each generation."""
    return Series(folder, "ledger")


def _all_entries(
    folder: Path, before: float = math.inf, lengths: Mapping[str, int] | None = None
) -> Iterator[dict[str, Any]]:
    ledgers = _ledgers(folder)
    lengths = ledgers.lengths(before) if lengths is None else lengths
    for path in [ledgers.path(generation) for generation in ledgers.numbers() if generation < before]:
        for record in read(path, 0, lengths.get(path.name, 0)):
            if record.start:
                _entry_in(record, path)
                yield record.value


def _entry_in(record: Record, path: Path) -> Entry:
    if not _is_entry(record.value):
        raise StorageError(f"{path} is damaged at byte {record.start}")
    return Entry(record.value["segment"], record.value["start"], record.value["end"])


def _is_entry(value: Mapping[str, Any]) -> bool:
    return (
        isinstance(value.get("segment"), str)
        and SEGMENT_NAME.fullmatch(value["segment"]) is not None
        and type(value.get("start")) is int
        and type(value.get("end")) is int
        and isinstance(value.get("runs"), list)
        and len(value["runs"]) % 2 == 0
    )


def _flat(runs: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.asarray(runs, dtype=np.int64).reshape(-1)


def _spread(flat: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers in runs that are given as first, behind the last, first, behind the last, ..."""
    firsts, lengths = flat[0::2], flat[1::2] - flat[0::2]
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    spread: NDArray[np.int64] = np.repeat(firsts - before, lengths) + np.arange(int(lengths.sum()))
    return spread


# --- answers ---
# The output of a finished batch: ``answers`` and ``errors`` in the order of the input, as JSON lines or Parquet.
#
# Both are in OpenAI's batch form: ``id``, ``custom_id``, ``response`` (``status_code`` and ``body``) and ``error``. A
# request is in one of the two files: in the second one where its status is not 2xx, or there is no response. In Parquet
# the four are columns of texts, the last two in JSON.

ANSWERS, ERRORS, SOURCE, PARTS = "answers", "errors", "source.json", "parts"
FORMATS = ("jsonl", "parquet")
OPEN_SEGMENTS = 128
GROUP_ROWS, GROUP_BYTES = 8192, 16 << 20
"""Rows of a table that are written together, and held in memory."""


@dataclass(frozen=True, slots=True)
class Output:
    """A finished batch."""

    answers: int
    errors: int


def refuse_foreign_output(folder: Path, digest: str | None) -> None:
    """Return when ``folder`` may take the output of the input with this digest; None: of an input not read yet.

    Raises:
        UsageError: it holds answers to other requests, or files that slurmft did not write.
        StorageError: it cannot be looked at.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"inference.output: {folder} is not a folder")
    source = read_json(folder / SOURCE, owners=trusted_owners(folder))
    names = [f"{name}.{format}" for name in (ANSWERS, ERRORS) for format in FORMATS]
    there = [name for name in (*names, PARTS) if (folder / name).exists()]
    if source is None and there:
        raise UsageError(f"inference.output: {folder / there[0]} is there already, and not from this input",
                         hint="choose another folder, or move it away")  # fmt: skip
    if source is not None and source.get("digest") != digest:
        raise UsageError(f"inference.output: {folder} holds the answers to another input",
                         hint="choose another folder, or move it away")  # fmt: skip


def refuse_unwritable(format: str) -> None:
    """Return when an output of this format can be written here.

    Raises:
        UsageError: it needs a package that is not there.
    """
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError("inference.output_format: parquet needs the package pyarrow", hint="pip install pyarrow")


def write_output(
    batch: Batch, ledger: Ledger, folder: Path, *, format: str = "jsonl", file: Path | None = None
) -> Output | list[int]:
    """Write both files, each whole or not at all; or the numbers of requests whose answers cannot be read.

    Args:
        file: one for all rows, in place of both; its suffix says the format.

    Memory: 20 bytes for each request; for Parquet some 16 MiB more, however many there are.

    Raises:
        UsageError: the package for the format is missing.
        StorageError: the output cannot be written, or a segment not be read.
    """
    refuse_unwritable(format)
    index = AnswerIndex(batch)
    index.add(ledger.entries())
    if missing := index.missing(0, batch.total):
        return missing
    begin_output(batch, folder)
    place, names = (folder, (ANSWERS, ERRORS)) if file is None else (file.parent, (file.stem, file.stem))
    format = format if file is None else file.suffix[1:]
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    counts = write_rows(batch, index, (0, batch.total), place, names, format=format)
    return Output(*counts)


def begin_output(batch: Batch, folder: Path) -> None:
    """Say whose answers are in a folder, before there are any.

    Raises:
        StorageError: it cannot be written.
    """
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / SOURCE, {"digest": batch.digest, "total": batch.total})


def write_rows(
    batch: Batch, index: AnswerIndex, rows: tuple[int, int], folder: Path, names: tuple[str, str], *, format: str
) -> tuple[int, int]:
    """Write the answers to the requests ``[first, last)``, and the errors, whole or not at all; returns how many each.

    Args:
        names: of the two files, without suffix; the same one for both: one file.

    Raises:
        StorageError: they cannot be written, or a segment not be read.
    """
    with (
        writing(folder),
        Requests(batch.folder) as requests,
        _Segments(batch.folder, index.segments) as segments,
        _File(folder, names[0], format) as answers,
        contextlib.nullcontext(answers) if names[0] == names[1] else _File(folder, names[1], format) as errors,
    ):
        files, good = dict.fromkeys((errors, answers)), 0
        for number in range(*rows):
            request = requests.get(number)
            if "bad" in request:
                record: Mapping[str, Any] = {"error": {"code": "bad_request", "message": request["bad"]}}
            else:
                record = segments.get(*index.place_of(number))
            is_answer, row = row_of(number, request["id"], record)
            (answers if is_answer else errors).add(row)
            good += is_answer
        for file in files:
            file.finish()
        for file in files:
            file.keep()
        fsync_folder(folder)
    return good, rows[1] - rows[0] - good


def row_of(index: int, custom_id: str, record: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether a request's row belongs to the answers, and the row."""
    response, error = record.get("response"), record.get("error")
    if isinstance(response, Mapping):
        response = {"status_code": response.get("status_code"), "request_id": f"req_{index}",
                    "body": response.get("body")}  # fmt: skip
    ok = error is None and isinstance(response, Mapping) and 200 <= int(response["status_code"] or 0) < 300
    return ok, {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}


class _File:
    """One of the two files, under a temporary name until it is kept."""

    def __init__(self, folder: Path, name: str, format: str) -> None:
        self._path, self._temporary = folder / f"{name}.{format}", folder / f".{name}.{format}.tmp"
        self._is_table = format == "parquet"
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def __enter__(self) -> Self:
        descriptor = open_regular(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, follow=False)
        self._stream = io.BufferedWriter(io.FileIO(descriptor, "w"))
        self._table = _table_in(self._stream) if self._is_table else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._table is not None and self._table.is_open:
            with contextlib.suppress(OSError, ValueError):  # the disk is full; the file is not kept
                self._table.close()
        self._stream.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """The next row, which ``row_of`` has made."""
        if self._table is None:
            text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
            # half a surrogate pair as JSON has it: other programs refuse a whole file that is no UTF-8
            self._stream.write(text.encode(errors="backslashreplace") + b"\n")
            return
        texts = {name: None if row[name] is None else json.dumps(row[name]) for name in ("response", "error")}
        custom_id = row["custom_id"].encode(errors="replace").decode()  # half a surrogate pair is no text
        self._rows.append({"id": row["id"], "custom_id": custom_id, **texts})
        self._bytes += sum(len(each) for each in texts.values() if each is not None)
        if len(self._rows) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._write_rows()

    def finish(self) -> None:
        """Return when all rows are on the disk."""
        if self._table is not None:
            self._write_rows()
            self._table.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def keep(self) -> None:
        """Give the file its name."""
        self._temporary.rename(self._path)

    def _write_rows(self) -> None:
        if self._rows and self._table is not None:
            rows = arrow("inference.output_format: parquet").Table.from_pylist(self._rows, schema=self._table.schema)
            self._table.write_table(rows)
        self._rows, self._bytes = [], 0


def _table_in(stream: BinaryIO) -> Any:
    pyarrow = arrow("inference.output_format: parquet")
    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("id", "custom_id", "response", "error")])
    return pyarrow.parquet.ParquetWriter(stream, schema)


class AnswerIndex:
    """Where the answer to each request lies. Memory: 20 bytes for each."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._places = np.zeros((batch.total, 2), dtype=np.uint64)
        self._lengths = np.zeros(batch.total, dtype=np.uint32)
        self._numbers: dict[str, int] = {}
        self._is_bad = np.zeros(batch.total, dtype=np.bool_)
        for first, last in batch.bad:
            self._is_bad[first:last] = True

    @property
    def segments(self) -> list[str]:
        """Names, by the numbers that ``place_of`` gives."""
        return list(self._numbers)

    def grow(self, batch: Batch) -> None:
        """The batch may have become longer."""
        new, self._batch = batch.total - self._batch.total, batch
        if not new:
            return
        self._places = np.concatenate((self._places, np.zeros((new, 2), dtype=np.uint64)))
        self._lengths = np.concatenate((self._lengths, np.zeros(new, dtype=np.uint32)))
        self._is_bad = np.concatenate((self._is_bad, np.zeros(new, dtype=np.bool_)))

    def add(self, entries: Iterable[Entry]) -> list[Entry]:
        """Look at what the ledger has committed, in its order: of two answers to a request the first one counts.

        Returns those of which not everything can be read at the moment: their requests may turn out to be missing.
        """
        total, unread = self._batch.total, []
        for entry in entries:
            number, end = self._numbers.setdefault(entry.segment, len(self._numbers)), entry.start
            with contextlib.suppress(StorageError):
                for record in read(segments_of(self._batch.folder) / entry.segment, entry.start, entry.end):
                    index, end = record.value.get("index"), record.end
                    if type(index) is int and 0 <= index < total and not self._lengths[index]:
                        self._places[index] = number, record.start
                        self._lengths[index] = record.end - record.start - 1
            if end < entry.end:
                unread.append(entry)
        return unread

    def missing(self, first: int, last: int) -> list[int]:
        """Requests of this range that no readable answer is known of."""
        missing = (self._lengths[first:last] == 0) & ~self._is_bad[first:last]
        return [first + int(each) for each in np.flatnonzero(missing)]

    def place_of(self, index: int) -> tuple[int, int, int]:
        """The number of a segment, the byte at which the answer begins, and its length."""
        return int(self._places[index, 0]), int(self._places[index, 1]), int(self._lengths[index])


class _Segments:
    """A few open segments at a time."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = segments_of(folder), names
        self._open: OrderedDict[int, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def get(self, number: int, start: int, length: int) -> dict[str, Any]:
        if number not in self._open:
            if len(self._open) >= OPEN_SEGMENTS:
                os.close(self._open.popitem(last=False)[1])
            path = self._folder / self._names[number]
            self._open[number] = open_regular(path, owners=trusted_owners(self._folder))
        self._open.move_to_end(number)
        record = parse(os.pread(self._open[number], length, start))
        if record is None:
            raise StorageError(f"{self._folder / self._names[number]} has changed at byte {start} since it was read")
        return record


# --- parts ---
# Parts of the output while the batch runs: a pair of files for each range of the input that is answered as a whole.

_NAME = re.compile(rf"\.?({ANSWERS}|{ERRORS})-\d{{12}}-\d{{12}}\.({'|'.join(FORMATS)})(\.tmp)?")


class OutputParts:
    """Writes parts as they become complete, and deletes them when the whole output is there. Blocking.

    Memory: 20 bytes for each request.

    Args:
        folder: of the output.
        size: requests in a part; a batch that has no more has none.
    """

    def __init__(self, batch: Batch, ledger: Ledger, folder: Path, *, size: int, format: str) -> None:
        self._batch, self._ledger, self._folder, self._size, self._format = batch, ledger, folder, size, format
        self._index: AnswerIndex | None = None
        self._fresh: deque[Entry] = deque()
        firsts = range(0, batch.total, size) if 0 < size < batch.total else range(0)
        self._open = [(first, min(first + size, batch.total)) for first in firsts]

    def write(self) -> int:
        """Write what has become complete since the last call; returns how many parts.

        Raises:
            StorageError: they cannot be written, or a segment not be read; the next call tries again.
        """
        complete = [each for each in self._open if self._ledger.done[slice(*each)].all()]
        if not complete:
            return 0
        self._look()
        assert self._index is not None
        begin_output(self._batch, self._folder)
        with writing(self._folder):
            (self._folder / PARTS).mkdir(mode=0o700, exist_ok=True)
        count = 0
        for first, last in complete:
            names = f"{ANSWERS}-{first:012d}-{last - 1:012d}", f"{ERRORS}-{first:012d}-{last - 1:012d}"
            is_there = (self._folder / PARTS / f"{names[0]}.{self._format}").exists()
            if not is_there and not self._index.missing(first, last):
                write_rows(self._batch, self._index, (first, last), self._folder / PARTS, names, format=self._format)
                count += 1
            self._open.remove((first, last))
        return count

    def remove(self) -> None:
        """Delete all parts of this batch, of earlier starts too; what cannot be deleted stays."""
        with contextlib.suppress(OSError):
            for path in (self._folder / PARTS).iterdir():
                if _NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            (self._folder / PARTS).rmdir()

    def _look(self) -> None:
        """Learn where the answers are that the ledger has by now."""
        if self._index is None:
            self._ledger.fresh = self._fresh
            self._index = AnswerIndex(self._batch)
            self._index.add(self._ledger.entries())
        while self._fresh:
            self._index.add([self._fresh.popleft()])


# --- Checkpoints of requests: what engines have generated so far, so that another one goes on from there ---
# In memory they belong to the one that talks to the engine. In the run folder a replica keeps them in a file of its own
# in ``partials``, a segment as answers have them: a line for each request that has grown, with what is new. Nothing
# counts on them: one that is lost, damaged, too old or of another engine costs the time to compute it again.

MAX_FILE_BYTES = 64 << 20
"""A file that has grown to this is written anew with what is in flight."""

MAX_READ_BYTES = 256 << 20
"""Of what earlier starts left behind, the newest files first."""

CLOCKS_S = 60.0
"""By so much clocks of nodes may differ."""

SAVE_INTERVAL_S = 1.0
"""Between two writes of a replica's file."""

NOTE_S = 0.2
"""Between two notes of what one request has so far."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    prefix: Prefix
    at_s: float
    saved: int = 0
    """Characters that ``changes`` has handed out."""

    @property
    def size_bytes(self) -> int:
        return sys.getsizeof(self.prefix.text)


class Partials:
    """The text that requests in flight have so far, by their ids.

    An entry that was not noted anew for ``expire_after_s`` is gone; where there are too many, or they are too large,
    the one that was noted longest ago goes first. Used by one thread.

    Args:
        max_bytes: of memory, for all texts together.
        now: seconds since 1970.
    """

    def __init__(
        self, *, expire_after_s: float = 3600.0, max_entries: int = 65536, max_bytes: int = 256 << 20,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._expire_after_s, self._max_entries, self._max_bytes = expire_after_s, max_entries, max_bytes
        self._now = now
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, request_id: str, text: str, *, tokens: int = 0, prompt_tokens: int | None = None) -> None:
        """The beginning of this request's answer is ``text``, all of it, in so many tokens."""
        self._put(request_id, Prefix(text, tokens, prompt_tokens), self._now())

    def take(self, request_id: str) -> Prefix | None:
        """The beginning of this request's answer, for the one that goes on from there; None when none is known."""
        entry = self._drop(request_id)
        return None if entry is None or self._is_expired(entry.at_s) else entry.prefix

    def forget(self, request_id: str) -> None:
        """It has its answer."""
        self._drop(request_id)

    def changes(self) -> list[dict[str, Any]]:
        """What has grown since the last call, as records for a file; each is the text from some character on."""
        records = []
        for request_id, entry in self._entries.items():
            prefix = entry.prefix
            if len(prefix.text) > entry.saved:
                records.append({
                    "request": request_id, "from": entry.saved, "text": prefix.text[entry.saved :],
                    "tokens": prefix.tokens, "prompt_tokens": prefix.prompt_tokens, "at": entry.at_s,
                })  # fmt: skip
                entry.saved = len(prefix.text)
        return records

    def begin_anew(self) -> None:
        """The next ``changes`` are for an empty file."""
        for entry in self._entries.values():
            entry.saved = 0

    def adopt(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take over what another one's ``changes`` were; of two texts of a request the longer one is kept.

        Raises:
            TypeError: one is no such record.
        """
        found: dict[str, tuple[list[str], int, Mapping[str, Any]]] = {}
        for record in records:
            _check(record)
            name, text = record["request"], record["text"]
            if record["from"] == 0:
                found[name] = [text], len(text), record
            elif name in found and found[name][1] == record["from"]:
                found[name][0].append(text)
                found[name] = found[name][0], record["from"] + len(text), record
            else:  # its beginning is missing
                found.pop(name, None)
        for name, (parts, length, last) in found.items():
            known = self._entries.get(name)
            if not self._is_expired(last["at"]) and (known is None or len(known.prefix.text) < length):
                prefix = Prefix("".join(parts), last["tokens"], last["prompt_tokens"])
                self._put(name, prefix, min(last["at"], self._now()))

    def _put(self, request_id: str, prefix: Prefix, at_s: float) -> None:
        before = self._drop(request_id)
        if not prefix.text:
            return
        entry = _Entry(prefix, at_s)
        if before is not None and prefix.text.startswith(before.prefix.text):
            entry.saved = before.saved
        self._entries[request_id] = entry
        self._bytes += entry.size_bytes
        while self._entries and (
            len(self._entries) > self._max_entries
            or self._bytes > self._max_bytes
            or self._is_expired(next(iter(self._entries.values())).at_s)
        ):
            self._drop(next(iter(self._entries)))

    def _drop(self, request_id: str) -> _Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._bytes -= entry.size_bytes
        return entry

    def _is_expired(self, at_s: float) -> bool:
        return self._now() - at_s > self._expire_after_s


class CheckpointFile:
    """The file in which one replica keeps the checkpoints of its requests, one for each epoch of its agent.

    Args:
        owner: ``generation``, ``node``, ``replica`` and ``life``.
        engine: its fingerprint.
    """

    def __init__(self, folder: Path, owner: Mapping[str, int], engine: str, checkpointer: Partials) -> None:
        self._folder, self._owner, self._engine, self._checkpointer = partials_of(folder), owner, engine, checkpointer
        self.epoch = 0
        """Of the newest lease; what is written from now on is for it."""

        self._segment: SegmentWriter | None = None
        self._segment_epoch = -1
        self._is_writing = asyncio.Lock()

    async def save_regularly(self) -> None:
        """Save again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self.save()

    async def save(self) -> None:
        """Return when all that was noted is on the disk; an error is logged, since nothing depends on it."""
        async with self._is_writing:
            epoch = self.epoch
            is_full = self._segment is not None and self._segment.end > MAX_FILE_BYTES
            anew = is_full or epoch != self._segment_epoch
            if anew:
                self._checkpointer.begin_anew()
            if not (records := self._checkpointer.changes()):
                return
            try:
                await asyncio.to_thread(self._write, records, epoch, anew=anew)
            except (OSError, StorageError) as error:
                log.warning("checkpoints of requests cannot be written: %s", error)
                self._checkpointer.begin_anew()

    def _write(self, records: Iterable[Mapping[str, Any]], epoch: int, *, anew: bool) -> None:
        """Append to the file; ``anew``: to a new one, in the place of any that is there."""
        if anew or self._segment is None:
            before, self._segment, self._segment_epoch = self._segment, None, -1
            if before is not None:
                before.close()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._folder / segment_name(**self._owner, epoch=epoch)
            path.unlink(missing_ok=True)
            header = {**self._owner, "epoch": epoch, "engine": self._engine, "partials": FORMAT}
            self._segment, self._segment_epoch = SegmentWriter(path, header), epoch
            fsync_folder(self._folder)
        self._segment.append(records)
        self._segment.sync()


def partials_of(folder: Path) -> Path:
    """Where replicas keep checkpoints of requests."""
    return folder / "partials"


def fingerprint(engine: EngineConfig) -> str:
    """Text of an engine is continued by the same one alone: a digest of what decides what it generates."""
    facts = {name: getattr(engine, name) for name in ("command", "callable", "url", "request_path")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def records_in(folder: Path, name: str, engine: str) -> Iterator[dict[str, Any]]:
    """The records of a file, up to the first that is torn; none when it is gone, or of another engine or generation."""
    path = partials_of(folder) / name
    if not SEGMENT_NAME.fullmatch(name) or not path.exists():
        return
    try:
        for record in read(path):
            if record.start == 0:
                facts = [record.value.get(key) for key in ("partials", "engine", "generation")]
                if facts != [FORMAT, engine, int(name[1:].partition("-")[0])]:
                    return
            elif _is_record(record.value):
                yield record.value
            else:
                return
    except StorageError as error:
        log.warning("checkpoints of requests are not used: %s", error)


def left_behind(folder: Path, engine: str, *, expire_after_s: float) -> dict[int, tuple[str, ...]]:
    """Which files hold text of which requests (their numbers); expired files are deleted.

    Raises:
        StorageError: the folder cannot be looked into.
    """
    files = []
    try:
        with os.scandir(partials_of(folder)) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                if time.time() - facts.st_mtime > expire_after_s + CLOCKS_S:
                    Path(entry.path).unlink(missing_ok=True)
                elif SEGMENT_NAME.fullmatch(entry.name):
                    files.append((facts.st_mtime, facts.st_size, entry.name))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"cannot look into {partials_of(folder)}: {error.strerror or error}") from error
    found: dict[int, tuple[str, ...]] = {}
    room = MAX_READ_BYTES
    for _, size, name in sorted(files, reverse=True):
        room -= size
        if room < 0:
            break
        for number in {each["request"] for each in records_in(folder, name, engine)}:
            if number.isdecimal():
                found[int(number)] = (*found.get(int(number), ()), name)
    return found


def forget_all(folder: Path) -> None:
    """Delete the checkpoints of a batch that is finished; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        for path in partials_of(folder).iterdir():
            path.unlink(missing_ok=True)
        partials_of(folder).rmdir()


def _is_record(value: Mapping[str, Any]) -> bool:
    try:
        _check(value)
    except (KeyError, TypeError):
        return False
    return True


def _check(record: Mapping[str, Any]) -> None:
    counts = [record["from"], record["tokens"], 0 if record["prompt_tokens"] is None else record["prompt_tokens"]]
    is_text = isinstance(record["request"], str) and isinstance(record["text"], str)
    is_time = isinstance(record["at"], int | float) and math.isfinite(record["at"])
    if not is_text or not is_time or not all(type(each) is int and each >= 0 for each in counts):
        raise TypeError("not a record of a request's checkpoint")
