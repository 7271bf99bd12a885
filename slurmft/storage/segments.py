"""Segments: append-only files of records, each written by one process in its life, and read by any.

A line is the CRC-32 of its JSON in hexadecimal, a blank, and the JSON. The first line is a header. A torn or damaged
line ends the reading: what follows it counts for nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
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
        self._is_torn = False
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
            if self._is_torn:
                os.ftruncate(self._descriptor, self.end)  # what an earlier try has left
            self._is_torn = True
            while view:
                view = view[os.write(self._descriptor, view) :]
        self._is_torn = False
        self.end += len(data)
        return self.end

    def take_back(self, end: int) -> None:
        """What was appended behind this byte is not there, and is overwritten by the next record."""
        self.end, self._is_torn = end, True

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
        StorageError: the file cannot be read, is not this run's, or was written by a newer version.
    """
    try:
        descriptor = open_regular(path, owners=trusted_owners(path.parent))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
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
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    finally:
        os.close(descriptor)
