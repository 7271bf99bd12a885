"""The requests of a batch, read once from the user's files, checked, and kept in the run folder; and the segments of
answers.

``requests.jsonl`` has one line for each request, in the order of the input; ``requests.offsets`` the byte at which each
begins (unsigned 64-bit, little endian, one more for the end); ``input.json`` is written last and makes them valid. So
whatever the input is compressed with or read from, a replica gets any request by its number, and an input that changes
later changes nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import struct
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash

from slurmft.config.inference import InferenceConfig
from slurmft.errors import ConfigError, StorageError, UsageError
from slurmft.policy.inference import is_open, normal
from slurmft.storage.patience import writing
from slurmft.storage.queue import read
from slurmft.system.files import UnsafeFile, fsync_folder, open_regular, opened, read_json, trusted_owners, write_json

# --- Answers in segments ---
# Replicas write answers into segments (``storage.queue``). The first line is the header (run's generation, node,
# replica); every other one an answer: ``{"index": 7, "response": {...}}`` or ``{"index": 7, "error": {...}}``. What
# counts of a segment is said by the ledger, never by its length: a torn end is cut, and what a fenced process adds
# later is not read.


def answers_in(path: Path, start: int, total: int) -> tuple[list[int], int]:
    """The numbers of the whole answers from byte ``start`` on, and the byte after the last of them.

    Numbers that are not below ``total`` end the reading: they cannot be of this batch.
    """
    indexes: list[int] = []
    end = start
    for record in read(path, start):
        index = record.value.get("index")
        if record.start == 0 and "segment" in record.value:
            end = record.end
            continue
        if type(index) is not int or not 0 <= index < total:
            break
        indexes.append(index)
        end = record.end
    return indexes, end


def runs_of(indexes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as runs (the first, and the one behind the last), sorted, each number once."""
    runs: list[tuple[int, int]] = []
    for index in sorted(set(indexes)):
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return tuple(runs)


def left_in(path: Path, start: int, total: int) -> tuple[list[int], int]:
    """As ``answers_in``, of answers that are durable then, to which their writer may not have come; none where there is
    no such segment.

    Raises:
        OSError, StorageError: it cannot be read, or made durable.
    """
    indexes, end = answers_in(path, start, total) if path.exists() else ([], start)
    if indexes:
        with opened(path) as descriptor:
            os.fsync(descriptor)
    return indexes, end


def segment_name(*, generation: int, node: int, replica: int, life: int, epoch: int) -> str:
    """The file of one replica's life under one epoch."""
    return f"g{generation:06d}-n{node}-r{replica}-{life}-{epoch}.jsonl"


# --- The requests of a batch: read once from the user's files, checked, and kept in the run folder ---

MAX_REQUEST_BYTES = 16 << 20
"""Of one line; a longer one is a broken line."""

MAX_ID_LENGTH = 512
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TOLD_LINES = 5
OF_A_LINE = ("custom_id", "method", "url")
"""In a table, where every row has all columns, one of these that is null is not there."""

_PAIR = struct.Struct("<QQ")

Progress = Callable[[int], None]
"""Called with the number of requests read so far, now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The requests in a run folder."""

    folder: Path
    total: int
    bad: tuple[tuple[int, int], ...]
    """Lines that are no requests, as runs: the first, and the one behind the last. Error records from the start."""

    digest: str
    """SHA-256 over the names and contents of the files that they were read from."""


def folder_of(run_folder: Path) -> Path:
    """Where a run keeps what belongs to inference."""
    return run_folder / "inference"


def load(folder: Path) -> Batch | None:
    """The batch that ``prepare`` has left; None when it has not, or not to the end.

    Raises:
        StorageError: the files are damaged, of a newer version, or another user's.
    """
    facts = read_json(folder / "input.json", owners=trusted_owners(folder)) if folder.is_dir() else None
    if facts is None:
        return None
    try:
        bad = tuple((int(first), int(last)) for first, last in facts["bad"])
        return Batch(folder=folder, total=int(facts["total"]), bad=bad, digest=str(facts["digest"]))
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{folder / 'input.json'} is damaged: {error!r}") from error


def prepare(config: InferenceConfig, folder: Path, progress: Progress = lambda count: None) -> Batch:
    """Read the input into ``folder``, unless it was already; the input must not have changed then.

    Raises:
        UsageError: the input is not there, holds no request, has changed, or holds an id twice.
        ConfigError: a line is no request, and ``on_bad_input`` is ``refuse``; names the first ones.
        StorageError: it cannot be kept.
    """
    if (before := load(folder)) is not None:
        _refuse_changed(config, before)
        return before
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    open_paths = config.engine.open_paths if config.engine.is_http else None
    sources, own = _sources(config), folder.resolve()
    sources = [(name, path) for name, path in sources if path is None or own not in path.resolve().parents]
    if not sources:
        raise UsageError(f"inference.input: {config.input} is what is made of the input")
    with writing(folder / "requests.jsonl"), _Files(folder, 0) as files:
        reader, digest = _Reader(files, open_paths), hashlib.sha256()
        facts = [_take(*source, reader, digest, progress) for source in sources]
        files.finish()
    if reader.bad and config.on_bad_input == "refuse":
        raise ConfigError(
            f"{len(reader.bad)} of {files.total} lines are no requests: " + "; ".join(reader.problems),
            hint="correct them, or inference.on_bad_input: report puts them into errors.jsonl",
        )
    if not files.total:
        raise UsageError(f"inference.input: {config.input} holds no request")
    _refuse_duplicates(folder, reader.hashes[: files.total])
    return _kept(Batch(folder=folder, total=files.total, bad=runs_of(reader.bad), digest=digest.hexdigest()), facts)


def extend(folder: Path, records: Iterable[Mapping[str, Any]], *, digest: str) -> Batch:
    """Append requests to a batch that may grow; the first ones begin it. What an earlier try has left behind the end
    is written over; processes that read the batch see it as it was until they look for its new end.

    Args:
        digest: names the batch from its beginning on; without effect later.

    Raises:
        StorageError: nothing is appended.
    """
    before = load(folder)
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _Files(folder, 0 if before is None else before.total) as files:
            for record in records:
                files.add(record)
            files.finish()
    digest = digest if before is None else before.digest
    return _kept(Batch(folder=folder, total=files.total, bad=(), digest=digest), [])


def _kept(batch: Batch, files: Sequence[Mapping[str, Any]]) -> Batch:
    """The batch, whose requests are valid from now on."""
    path = batch.folder / "input.json"
    with writing(path):
        write_json(path, {"total": batch.total, "bad": batch.bad, "digest": batch.digest, "files": files})
    return batch


class _Files(contextlib.AbstractContextManager["_Files"]):
    """Both files of a batch, open behind its first ``total`` requests; what is there already is written over."""

    def __init__(self, folder: Path, total: int) -> None:
        self._folder, self.total, self._is_new = folder, total, not total
        flags = os.O_RDWR | os.O_CREAT
        self._lines, self._offsets = (
            io.BufferedRandom(io.FileIO(open_regular(folder / name, flags, follow=False), "r+"), 1 << 20)
            for name in ("requests.jsonl", "requests.offsets")
        )
        self._offsets.seek(8 * total)
        self._at = struct.unpack("<Q", self._offsets.read(8))[0] if total else 0
        self._lines.truncate(self._at)
        self._lines.seek(self._at)
        self._offsets.truncate(8 * total + 8 * bool(total))  # where the last one ends: others read it meanwhile
        self._offsets.seek(8 * total)

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._offsets.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """One more request."""
        self._offsets.write(struct.pack("<Q", self._at))
        self._at += self._lines.write(_line_of(record))
        self.total += 1

    def finish(self) -> None:
        """Return when all are on the disk."""
        self._offsets.write(struct.pack("<Q", self._at))
        for stream in (self._lines, self._offsets):
            stream.flush()
            os.fsync(stream.fileno())
        if self._is_new:
            fsync_folder(self._folder)


def records_of(folder: Path, first: int = 0) -> Iterator[dict[str, Any]]:
    """The requests of a batch from number ``first`` on, in their order; none where there is no batch yet.

    Raises:
        StorageError: they cannot be read.
    """
    batch = load(folder)
    try:
        with contextlib.ExitStack() as stack:
            if batch is not None and batch.total > first:
                owners = trusted_owners(folder)
                offsets, lines = (
                    stack.enter_context(io.BufferedReader(io.FileIO(open_regular(folder / name, owners=owners))))
                    for name in ("requests.offsets", "requests.jsonl")
                )
                offsets.seek(8 * first)
                lines.seek(struct.unpack("<Q", offsets.read(8))[0])
                for line in itertools.islice(lines, batch.total - first):
                    yield json.loads(line)
    except (OSError, ValueError, struct.error) as error:
        raise StorageError(f"the requests in {folder} cannot be read: {error}") from error


class Requests:
    """Reads requests by number, from any process of the run; close it after use."""

    def __init__(self, folder: Path) -> None:
        owners = trusted_owners(folder)
        self._offsets = open_regular(folder / "requests.offsets", owners=owners)
        self._lines = open_regular(folder / "requests.jsonl", owners=owners)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        os.close(self._offsets)
        os.close(self._lines)

    def get(self, index: int) -> dict[str, Any]:
        """Request number ``index``: ``id`` and ``body``, or ``id`` and ``bad``; ``url`` where it names one.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            first, last = _PAIR.unpack(os.pread(self._offsets, _PAIR.size, 8 * index))
            value: dict[str, Any] = json.loads(os.pread(self._lines, last - first, first))
        except (OSError, ValueError, struct.error) as error:
            raise StorageError(f"request {index} of {self._lines} cannot be read: {error}") from error
        return value


def _sources(config: InferenceConfig) -> list[tuple[str, Path | None]]:
    """Names and paths; without one it is standard input."""
    if config.from_stdin:
        return [("stdin", None)]
    path = config.input
    assert path is not None
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"inference.input: there is no {path}")
        return [(path.name, path)]
    found = sorted(each for each in path.rglob("*") if each.name.endswith(SUFFIXES) and not each.name.startswith("."))
    if not found:
        raise UsageError(f"inference.input: no file in {path} ends in {', '.join(SUFFIXES)}")
    return [(each.relative_to(path).as_posix(), each) for each in found]


class _Hashing(io.RawIOBase):
    """Passes bytes on and hashes them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.sha, self.size = stream, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.sha.update(data)
        self.size += len(data)
        return len(data)

    def drain(self) -> None:
        """Read what a decompressor has left, so that the digest is that of the file."""
        while self.read(1 << 20):
            pass

    def part_of(self, name: str) -> bytes:
        """What a file of this name adds to the digest of the input."""
        return f"{name}\0{self.size}\0".encode(errors="surrogateescape") + self.sha.digest()


def _take(name: str, path: Path | None, reader: _Reader, digest: Any, progress: Progress) -> dict[str, Any]:
    try:
        raw = sys.stdin.buffer if path is None else io.FileIO(open_regular(path), "rb")
    except (UnsafeFile, OSError) as error:
        raise UsageError(f"inference.input: cannot read {path}: {error.strerror or error}") from error
    with _Hashing(raw) as hashing:
        try:
            for number, value in _values(name, hashing):
                reader.add(value, f"{name}:{number}")
                if reader.files.total % 10_000 == 0:
                    progress(reader.files.total)
            hashing.drain()
        except (OSError, EOFError, ValueError) as error:
            raise UsageError(f"inference.input: {name} cannot be read: {error}",
                             hint="is it complete, and what its name says?") from error  # fmt: skip
        finally:
            if path is not None:
                raw.close()
        digest.update(hashing.part_of(name))
        return {"name": name, "bytes": hashing.size, "sha256": hashing.sha.hexdigest()}


def _values(name: str, hashing: _Hashing) -> Iterator[tuple[int, bytes | Mapping[str, Any]]]:
    """Lines, numbered from 1; of a table its rows."""
    if name.endswith(".parquet"):
        yield from _rows(hashing)
        return
    stream: Any = io.BufferedReader(hashing, 1 << 20)
    if name.endswith(".gz"):
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), 1 << 20)
    elif name.endswith(".zst"):
        stream = _unzstd(stream)
    number = 0
    while line := stream.readline(MAX_REQUEST_BYTES + 1):
        number += 1
        while len(line) > MAX_REQUEST_BYTES and not line.endswith(b"\n"):
            rest = stream.readline(MAX_REQUEST_BYTES)
            line = line[: MAX_REQUEST_BYTES + 1]
            if not rest or rest.endswith(b"\n"):
                break
        if line.strip():
            yield number, line


def _unzstd(stream: Any) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError("inference.input: .zst needs the package zstandard",
                         hint="pip install aiohttp zstandard") from error  # fmt: skip
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True), 1 << 20)


def arrow(what: str) -> Any:
    """The package pyarrow, with its Parquet.

    Raises:
        UsageError: it is missing, and ``what`` needs it.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{what} needs the package pyarrow", hint="pip install pyarrow") from error
    return pyarrow


def _rows(hashing: _Hashing) -> Iterator[tuple[int, Mapping[str, Any]]]:
    pyarrow = arrow("inference.input: .parquet")
    content = io.BufferedReader(hashing, 1 << 20).read()  # a table's index is at its end
    number, name = 0, "?"
    try:
        for batch in pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches(1024):
            columns = {}
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                columns[name] = column.to_pylist(maps_as_pydicts="strict")
            for row in zip(*columns.values(), strict=True):
                number += 1
                yield number, dict(zip(columns, row, strict=True))
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
    except (ValueError, OverflowError, KeyError) as error:  # such as a date beyond the year 9999
        raise ValueError(f"column {name!r}: {error}") from error


def _as_json(value: Any, where: str) -> Any:
    """A value of a table in the types of JSON: points in time as text (ISO 8601), decimals as numbers.

    Raises:
        ValueError: there is no such type for it, or it would be another number; names the column.
    """
    match value:
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal() if value.is_finite() and decimal.Decimal(repr(float(value))) == value:
            return int(value) if value == value.to_integral_value() else float(value)
        case uuid.UUID():
            return str(value)
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _as_json(each, f"{where}.{key}" if where else key) for key, each in value.items()}
        case list() | tuple():
            return [_as_json(each, where) for each in value]
        case None | str() | int():
            return value
        case float() if math.isfinite(value):
            return value
    told = f" {value}" if isinstance(value, float | decimal.Decimal) else ""
    raise ValueError(f"column {where}: a {type(value).__name__}{told} has no form in JSON; make it a text or a number")


class _Reader:
    """Takes lines and rows for requests, those that are none as well."""

    def __init__(self, files: _Files, open_paths: Sequence[str] | None) -> None:
        self.files, self._open_paths = files, open_paths
        self.bad: list[int] = []
        self.problems: list[str] = []
        self.hashes = np.empty(1024, dtype=np.uint64)

    def add(self, value: bytes | Mapping[str, Any], where: str) -> None:
        number = self.files.total
        try:
            record = request_of(value, where, self._open_paths)
        except ValueError as error:
            self.bad.append(number)
            if len(self.problems) < TOLD_LINES:
                self.problems.append(f"{where}: {error}")
            record = {"id": where, "bad": str(error)[:500]}
        if number == len(self.hashes):
            self.hashes = np.concatenate([self.hashes, np.empty_like(self.hashes)])
        self.hashes[number] = xxhash.xxh3_64_intdigest(record["id"].encode(errors="surrogatepass"))
        self.files.add(record)


def request_of(
    value: bytes | Mapping[str, Any], where: str, open_paths: Sequence[str] | None = None
) -> dict[str, Any]:  # fmt: skip
    """A line, or a row of a table, as a request; ``where`` is its id unless it has a ``custom_id``.

    Args:
        open_paths: of the engine; None: the requests are for a callable, which takes any body.

    Raises:
        ValueError: says why it is none.
    """
    value = object_in(value)
    custom_id = value.get("custom_id", where)
    if isinstance(custom_id, int) and not isinstance(custom_id, bool):
        custom_id = str(custom_id)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_LENGTH:
        raise ValueError(f"its custom_id is not a text of 1 to {MAX_ID_LENGTH} characters")
    body = value.get("body", {key: each for key, each in value.items() if key != "custom_id"})
    if not isinstance(body, Mapping):
        raise ValueError("its body is not an object")
    if open_paths is not None and body.get("stream") not in (None, False):
        raise ValueError("it asks for a stream; a batch has whole answers, so take stream out of it")
    if "body" not in value:
        if {"method", "url"} <= value.keys():
            raise ValueError("it has a method and a url, and no body")
        return {"id": custom_id, "body": body}
    url, method = value.get("url"), value.get("method", "POST")
    if method != "POST":
        raise ValueError(f"its method is {str(method)[:20]!r}; only POST is known")
    if url is None:
        return {"id": custom_id, "body": body}
    _refuse_closed(url, open_paths)
    return {"id": custom_id, "url": url, "body": body}


def object_in(value: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of a line, or of a table's row, in the types of JSON.

    Raises:
        ValueError: says why it is none.
    """
    if isinstance(value, bytes):
        if len(value) > MAX_REQUEST_BYTES:
            raise ValueError(f"longer than {MAX_REQUEST_BYTES >> 20} MiB")
        found = _json_of(value)
    else:
        found = {name: each for name, each in _as_json(value, "").items() if name not in OF_A_LINE or each is not None}
        if isinstance(text := found.get("body"), str):  # as the columns of answers are
            found["body"] = _json_of(text)
    if not isinstance(found, Mapping):
        raise ValueError("not an object")
    return found


def _json_of(text: bytes | str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})"[:200]) from None


def _refuse_closed(url: Any, open_paths: Sequence[str] | None) -> None:
    if not isinstance(url, str) or not url.startswith("/") or url.startswith("//") or not url.isprintable():
        raise ValueError("its url is not a path such as /v1/chat/completions")
    path = normal(url.partition("?")[0])
    if path is None:
        raise ValueError("its url can be read in two ways")
    if open_paths is not None and not is_open("POST", path, open_paths):
        raise ValueError(f"its url is not open to requests of this engine: {url[:80]} (inference.engine.allow_paths)")


def refuse_constant(name: str) -> Any:
    """For ``json.loads``, which takes NaN and infinities."""
    raise ValueError(f"{name} is no JSON; write null, or a text")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _refuse_duplicates(folder: Path, hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not len(same):
        return
    with Requests(folder) as requests:
        for place in same[:1000].tolist():
            first, second = int(order[place]), int(order[place + 1])
            if requests.get(first)["id"] == requests.get(second)["id"]:
                raise UsageError(
                    f"inference.input holds the id {requests.get(first)['id'][:80]!r} twice: requests {first + 1} and "
                    f"{second + 1} of {len(hashes)}; answers are found by their ids",
                    hint="give each request a custom_id of its own",
                )


def _line_of(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"


def _refuse_changed(config: InferenceConfig, before: Batch) -> None:
    """An input that is gone is no harm: the run has its own copy."""
    if config.from_stdin or config.input is None or not config.input.exists():
        return
    digest = hashlib.sha256()
    for name, path in _sources(config):
        assert path is not None
        try:
            with io.FileIO(open_regular(path), "rb") as raw, _Hashing(raw) as hashing:
                hashing.drain()
        except OSError as error:
            raise UsageError(f"inference.input: cannot read {path}: {error.strerror or error}") from error
        digest.update(hashing.part_of(name))
    if digest.hexdigest() != before.digest:
        raise UsageError(
            f"inference.input: {config.input} is not what this run was started with",
            hint="choose another run_folder for other requests, or put the old input back",
        )
