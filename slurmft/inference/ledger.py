"""The ledger: which answers count. One file for each generation of the run's supervisor, appended to by it alone.

An entry commits the bytes ``[start, end)`` of a segment and names the requests they answer; it is on the disk before
the answers count. The first entry of a ledger says how long the earlier ones were when it was begun: what a superseded
supervisor adds later is not read. A request that is answered twice has the answer that was committed first.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmft.errors import NewerFormat, StorageError
from slurmft.inference.requests import Batch
from slurmft.inference.segments import answers_in, line_of, read, runs_of
from slurmft.storage.patience import writing
from slurmft.system.files import fsync_folder
from slurmft.system.opening import naming, open_regular, opened

FORMAT = 1
SEGMENT_NAME = re.compile(r"g\d{6,}-n\d+-r\d+-\d+-(?P<epoch>\d+)\.jsonl")
"""Generation at the start of its replica, node, replica, life of the replica, and the epoch under which it counts."""

_LEDGER_NAME = re.compile(r"ledger-(\d{6,})\.jsonl")

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
    """The answers of a batch that count, as of now. Build it with ``open_ledger``."""

    def __init__(self, batch: Batch, generation: int, done: Flags, ends: dict[str, int]) -> None:
        self.batch, self.generation, self.done = batch, generation, done
        self._ends = ends
        self.count = int(done.sum())
        """Requests that are answered."""

        self.fresh: deque[Entry] | None = None
        """Gets what is committed from now on, before it counts; for the one that follows it."""

        self._path = _path(batch.folder, generation)
        self._descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, follow=False)
        self._length = 0

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
        with writing(self._path):
            self._append(
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
        for name in _names(folder, SEGMENT_NAME):
            if is_wanted(name):
                indexes, end = answers_in(folder / name, self.end_of(name), self.batch.total)
                if indexes:
                    with writing(folder / name), opened(folder / name) as descriptor:
                        os.fsync(descriptor)  # its writer may not have come to that
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
        os.close(self._descriptor)

    def begin(self, continues: Mapping[str, int]) -> None:
        """Write the first entry.

        Raises:
            OSError: it cannot be written.
        """
        header = {"ledger": FORMAT, "generation": self.generation, "digest": self.batch.digest}
        self._append([{**header, "total": self.batch.total, "continues": dict(continues)}])
        fsync_folder(self.batch.folder)

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        data = b"".join(map(line_of, records))
        view = memoryview(data)
        with naming(self._path):
            os.ftruncate(self._descriptor, self._length)  # what a failed try has left
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        self._length += len(data)


def open_ledger(batch: Batch, generation: int) -> Ledger:
    """Read what counts so far, begin this generation's ledger, and commit what earlier replicas left behind.

    Memory: one byte for each request, and the names of the segments.

    Raises:
        StorageError: a ledger is damaged in the middle, of another input, or cannot be written.
    """
    done: Flags = np.zeros(batch.total, dtype=np.bool_)
    ends: dict[str, int] = {}
    names = [_path(batch.folder, each).name for each in _generations(batch.folder) if each < generation]
    lengths = _lengths(batch.folder, generation)
    for value in _all_entries(batch.folder, generation, lengths):
        indexes = _spread(np.asarray(value["runs"], dtype=np.int64))
        if len(indexes) and (indexes.min() < 0 or indexes.max() >= batch.total):
            raise StorageError(f"a ledger in {batch.folder} names requests beyond the {batch.total} of the input")
        done[indexes] = True
        ends[value["segment"]] = max(value["end"], ends.get(value["segment"], 0))
    for first, last in batch.bad:
        done[first:last] = True
    lengths = {name: length for name, length in lengths.items() if name in names}
    with writing(_path(batch.folder, generation)):
        segments_of(batch.folder).mkdir(mode=0o700, exist_ok=True)
        _path(batch.folder, generation).unlink(missing_ok=True)  # begun by this very generation, in an earlier try
        ledger = Ledger(batch, generation, done, ends)
        ledger.begin(lengths)
    ledger.salvage()
    return ledger


def answered(folder: Path, total: int) -> int:
    """How many requests of a batch are answered, for a look from outside.

    Raises:
        StorageError: a ledger cannot be read.
    """
    done: Flags = np.zeros(total, dtype=np.bool_)
    for value in _all_entries(folder, None):
        indexes = _spread(np.asarray(value["runs"], dtype=np.int64))
        done[indexes[indexes < total]] = True
    return int(done.sum())


def _path(folder: Path, generation: int) -> Path:
    return folder / f"ledger-{generation:06d}.jsonl"


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if pattern.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot look into {folder}: {error.strerror or error}") from error


def _generations(folder: Path) -> list[int]:
    return sorted(int(name[len("ledger-") : -len(".jsonl")]) for name in _names(folder, _LEDGER_NAME))


def _lengths(folder: Path, before: int | None) -> dict[str, int]:
    """How much of each ledger counts: the newest one whole, earlier ones as far as the next one has said."""
    generations = [each for each in _generations(folder) if before is None or each < before]
    lengths: dict[str, int] = {}
    for generation in reversed(generations):
        path = _path(folder, generation)
        end = 0
        for record in read(path):
            end = record.end
            if record.start == 0:
                if record.value.get("ledger", FORMAT) != FORMAT:
                    raise NewerFormat(f"{path} was written by a newer slurmft")
                known = record.value.get("continues")
                if isinstance(known, dict):
                    for name, length in known.items():
                        lengths.setdefault(str(name), int(length))
        lengths.setdefault(path.name, end)
    return lengths


def _all_entries(
    folder: Path, before: int | None, lengths: Mapping[str, int] | None = None
) -> Iterator[dict[str, Any]]:
    lengths = _lengths(folder, before) if lengths is None else lengths
    for generation in _generations(folder):
        if before is not None and generation >= before:
            return
        path = _path(folder, generation)
        for record in read(path, 0, lengths.get(path.name, 0)):
            if record.start:
                if not _is_entry(record.value):
                    raise StorageError(f"{path} is damaged at byte {record.start}")
                yield record.value


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
