"""Segments: append-only files of records, each written by one process in its life, and read by any.

A line is the CRC-32 of its JSON in hexadecimal, a blank, and the JSON. The first line is a header. A torn or damaged
line ends the reading: what follows it counts for nobody.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat
from slurmft.storage.patience import translated
from slurmft.system.files import naming, open_regular, trusted_owners

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
        self._descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, follow=False)
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
        view = memoryview(data)
        with naming(self.path):
            os.ftruncate(self._descriptor, self.end)  # what an earlier try has left
            while view:
                view = view[os.write(self._descriptor, view) :]
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
        with naming(self.path):
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
        descriptor = open_regular(path, owners=trusted_owners(path.parent))
    except OSError as error:
        raise translated(f"cannot read {path}", error) from error
    try:
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
    finally:
        os.close(descriptor)


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
