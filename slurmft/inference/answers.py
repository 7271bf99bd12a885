"""The output of a finished batch: ``answers`` and ``errors`` in the order of the input, as JSON lines or Parquet.

Both are in OpenAI's batch form: ``id``, ``custom_id``, ``response`` (``status_code`` and ``body``) and ``error``. A
request is in one of the two files: in the second one where its status is not 2xx, or there is no response. In Parquet
the four are columns of texts, the last two in JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from slurmft.errors import StorageError, UsageError
from slurmft.inference.ledger import Entry, Ledger, segments_of
from slurmft.inference.requests import Batch, Requests
from slurmft.inference.segments import parse, read
from slurmft.storage.patience import writing
from slurmft.system.files import fsync_folder, read_json, write_json
from slurmft.system.opening import open_regular, trusted_owners

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
    batch: Batch, ledger: Ledger, folder: Path, *, format: str = "jsonl", file: Path | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Output | list[int]:  # fmt: skip
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
    counts = write_rows(batch, index, (0, batch.total), place, names, format=format, progress=progress)
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
    batch: Batch, index: AnswerIndex, rows: tuple[int, int], folder: Path, names: tuple[str, str], *, format: str,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[int, int]:  # fmt: skip
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
            if number % 10_000 == 0:
                progress(number)
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
            self._stream.write(text.encode(errors="surrogatepass") + b"\n")
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
        import pyarrow

        if self._rows and self._table is not None:
            self._table.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._table.schema))
        self._rows, self._bytes = [], 0


def _table_in(stream: BinaryIO) -> Any:
    import pyarrow
    import pyarrow.parquet

    names = ("id", "custom_id", "response", "error")
    schema = pyarrow.schema([pyarrow.field(name, pyarrow.string()) for name in names])
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

    def add(self, entries: Iterable[Entry]) -> None:
        """Look at what the ledger has committed, in its order: of two answers to a request the first one counts."""
        total = self._batch.total
        for entry in entries:
            number = self._numbers.setdefault(entry.segment, len(self._numbers))
            try:
                for record in read(segments_of(self._batch.folder) / entry.segment, entry.start, entry.end):
                    index = record.value.get("index")
                    if type(index) is int and 0 <= index < total and not self._lengths[index]:
                        self._places[index] = number, record.start
                        self._lengths[index] = record.end - record.start - 1
            except StorageError:  # one that is gone: its requests turn out to be missing
                continue

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
