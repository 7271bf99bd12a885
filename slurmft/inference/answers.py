"""The output of a finished batch: ``answers.jsonl`` and ``errors.jsonl`` in the order of the input.

Both are in OpenAI's batch form: ``id``, ``custom_id``, ``response`` (``status_code`` and ``body``) and ``error``. A
request has its line in one of the two files: in the second one where its status is not 2xx, or there is no response.
"""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.errors import StorageError, UsageError
from slurmft.inference.ledger import Ledger, segments_of
from slurmft.inference.requests import Batch, Requests
from slurmft.inference.segments import parse, read
from slurmft.storage.patience import writing
from slurmft.system.files import fsync_folder, read_json, write_json
from slurmft.system.opening import open_regular, trusted_owners

ANSWERS, ERRORS, SOURCE = "answers.jsonl", "errors.jsonl", "source.json"
OPEN_SEGMENTS = 128


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
    there = [name for name in (ANSWERS, ERRORS) if (folder / name).exists()]
    if source is None and there:
        raise UsageError(f"inference.output: {folder / there[0]} is there already, and not from this input",
                         hint="choose another folder, or move it away")  # fmt: skip
    if source is not None and source.get("digest") != digest:
        raise UsageError(f"inference.output: {folder} holds the answers to another input",
                         hint="choose another folder, or move it away")  # fmt: skip


def write_output(
    batch: Batch, ledger: Ledger, folder: Path, progress: Callable[[int], None] = lambda count: None
) -> Output | list[int]:
    """Write both files, each whole or not at all; or the numbers of requests whose answers cannot be read.

    Memory: 16 bytes for each request.

    Raises:
        StorageError: the output cannot be written, or a segment not be read.
    """
    names, places, lengths = _index(batch, ledger)
    answered = lengths > 0
    for first, last in batch.bad:
        answered[first:last] = True
    if len(missing := np.flatnonzero(~answered)):
        return [int(index) for index in missing]
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / SOURCE, {"digest": batch.digest, "total": batch.total})
    counts = {ANSWERS: 0, ERRORS: 0}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with (
        writing(folder),
        Requests(batch.folder) as requests,
        _Segments(batch.folder, names) as segments,
        io.BufferedWriter(io.FileIO(open_regular(folder / f".{ANSWERS}.tmp", flags, follow=False), "w")) as answers,
        io.BufferedWriter(io.FileIO(open_regular(folder / f".{ERRORS}.tmp", flags, follow=False), "w")) as errors,
    ):
        streams = {ANSWERS: answers, ERRORS: errors}
        for index in range(batch.total):
            request = requests.get(index)
            if "bad" in request:
                record: Mapping[str, Any] = {"error": {"code": "bad_request", "message": request["bad"]}}
            else:
                record = segments.get(int(places[index, 0]), int(places[index, 1]), int(lengths[index]))
            name, line = line_of(index, request["id"], record)
            streams[name].write(line)
            counts[name] += 1
            if index % 10_000 == 0:
                progress(index)
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    with writing(folder):
        for name in (ERRORS, ANSWERS):
            (folder / f".{name}.tmp").rename(folder / name)
        fsync_folder(folder)
    return Output(counts[ANSWERS], counts[ERRORS])


def line_of(index: int, custom_id: str, record: Mapping[str, Any]) -> tuple[str, bytes]:
    """The file that a request's line belongs into, and the line."""
    response, error = record.get("response"), record.get("error")
    if isinstance(response, Mapping):
        response = {"status_code": response.get("status_code"), "request_id": f"req_{index}",
                    "body": response.get("body")}  # fmt: skip
    ok = error is None and isinstance(response, Mapping) and 200 <= int(response["status_code"] or 0) < 300
    line = {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
    return ANSWERS if ok else ERRORS, text.encode(errors="surrogatepass") + b"\n"


def _index(batch: Batch, ledger: Ledger) -> tuple[list[str], Any, Any]:
    """Where the answer of each request lies: number of its segment and byte, and its length; 0: nowhere."""
    places = np.zeros((batch.total, 2), dtype=np.uint64)
    lengths = np.zeros(batch.total, dtype=np.uint32)
    numbers: dict[str, int] = {}
    for entry in ledger.entries():
        number = numbers.setdefault(entry.segment, len(numbers))
        try:
            for record in read(segments_of(batch.folder) / entry.segment, entry.start, entry.end):
                index = record.value.get("index")
                if type(index) is int and 0 <= index < batch.total and not lengths[index]:
                    places[index] = number, record.start
                    lengths[index] = record.end - record.start - 1
        except StorageError:  # one that is gone: its requests turn out to be missing
            continue
    return list(numbers), places, lengths


class _Segments:
    """A few open segments at a time."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = segments_of(folder), names
        self._open: OrderedDict[int, int] = OrderedDict()

    def __enter__(self) -> _Segments:
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
