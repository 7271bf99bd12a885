"""A journal that is followed: each look reads only what was added since the one before.

tail = JournalTail(run.path)
for entry in tail.news(): ...
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.storage.journal import JOURNAL_FILE, MAX_LINE_BYTES
from slurmft.system.files import FORMAT, parse_json
from slurmft.system.opening import LOG_LIMIT_BYTES, check_length, opened

_BEGIN = re.compile(rb'\{"format": \d+, "at": "[^"\\]*", "attempt": "[^"\\]*", "event": "([^"\\]*)"')
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 256
"""Beginning of a journal, by which another one in its place is recognised: its first event has a time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event."""

    name: str
    at: float
    """Unix time, by its writer's clock."""

    attempt: str
    details: dict[str, Any]


@dataclass(slots=True)
class Place:
    """How far a journal was read, and which one it was."""

    offset: int = 0
    head: str = ""


class JournalTail:
    """Reads what is new in a run's journal; damaged lines and those of a newer format are left out.

    A journal that was cut or replaced is read from its beginning; ``begun`` counts how often that was the case.

    Args:
        place: where an earlier reader had come to.
        names: the events that are wanted; None: all. Others are hardly looked at, which halves the time.
    """

    def __init__(
        self, run_folder: Path, place: Place | None = None, *, names: Collection[str] | None = None
    ) -> None:  # fmt: skip
        self.path = run_folder / JOURNAL_FILE
        self._names = None if names is None else frozenset(name.encode() for name in names)
        self.place = place or Place()
        self.begun = 0

    def news(self) -> Iterator[Entry]:
        """Each new event, oldest first. ``place`` is behind an event as soon as it is given.

        The last line counts once it has its end: its writer may be in the middle of it.

        Raises:
            UnsafeFile: it is no regular file, or longer than LOG_LIMIT_BYTES.
            OSError: the journal cannot be read.
        """
        try:
            with opened(self.path) as descriptor:
                size = check_length(self.path, descriptor, LOG_LIMIT_BYTES)
                self._find_place(descriptor, size)
                yield from self._read(descriptor, size)
        except FileNotFoundError:
            return

    def _find_place(self, descriptor: int, size: int) -> None:
        place = self.place
        head = os.pread(descriptor, _HEAD_BYTES, 0).decode("latin-1")
        if size < place.offset or not head.startswith(place.head):
            self.place = place = Place()
            self.begun += 1
        place.head = max(place.head, head, key=len)

    def _read(self, descriptor: int, size: int) -> Iterator[Entry]:
        place, held, skipping = self.place, b"", False
        at = place.offset
        while at < size and (part := os.pread(descriptor, _CHUNK_BYTES, at)):
            at += len(part)
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                place.offset += len(line) + 1
                if not skipping and self._is_wanted(line) and (entry := _parse(line)) is not None:
                    yield entry
                skipping = False
            if len(held) > MAX_LINE_BYTES:  # damage without an end
                place.offset += len(held)
                held, skipping = b"", True

    def _is_wanted(self, line: bytes) -> bool:
        """May be true of any line; false only of one that begins as the journal writes it."""
        return self._names is None or (begins := _BEGIN.match(line)) is None or begins[1] in self._names


def _parse(line: bytes) -> Entry | None:
    try:
        value = parse_json(line)
        version, at = value.pop("format"), datetime.fromisoformat(value.pop("at")).timestamp()
        name, attempt = str(value.pop("event")), str(value.pop("attempt", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    if not isinstance(version, int) or version > FORMAT:
        return None
    return Entry(name=name, at=at, attempt=attempt, details=value)
