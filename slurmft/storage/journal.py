"""The journal of a run: append-only, one JSON object per line; the decision first, the action second."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.storage.files import FORMAT

JOURNAL_FILE = "journal.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the journal."""

    at: datetime
    """When, in UTC, by the writer's clock."""

    event: str
    """What, in a few words; the key of ``slurmft explain``."""

    attempt: str
    """``job.restart.cycle`` of the writer, or empty for a command of a person."""

    details: dict[str, Any]

    def seconds(self) -> float:
        """Unix time of the event."""
        return self.at.timestamp()


class Journal:
    """Appends and reads.

    Guarantees: a line is written by one ``write`` to a file opened for appending, and is on disk when ``append``
    returns. A torn last line (a writer that died) is closed off by the next writer and skipped by readers. Does not
    guarantee an order between writers on different hosts: their clocks differ.
    """

    def __init__(self, run_folder: Path, *, attempt: str = "", clock: Callable[[], datetime] | None = None) -> None:
        self.path = run_folder / JOURNAL_FILE
        self.attempt = attempt
        self._clock = clock or (lambda: datetime.now(UTC))

    def append(self, event: str, **details: Any) -> Event:
        """Write one event durably.

        Raises:
            OSError: the filesystem refused; nothing was written, or a part that readers skip.
            ValueError: a detail has the name of something that every line has.
            TypeError: a detail is nothing that JSON can hold.
        """
        record = self.compose(event, details)
        self.write(self.line_of(record))
        return record

    def compose(self, event: str, details: dict[str, Any]) -> Event:
        """The event as of now, not yet written.

        Raises:
            ValueError: a detail has the name of something that every line has.
        """
        if reserved := {"format", "at", "attempt"} & details.keys():
            raise ValueError(f"a journal line's details cannot be called {', '.join(sorted(reserved))}")
        return Event(at=self._clock(), event=event, attempt=self.attempt, details=details)

    @staticmethod
    def line_of(record: Event) -> str:
        """The event as it is written.

        Raises:
            TypeError: a detail is nothing that JSON can hold.
        """
        return json.dumps(
            {
                "format": FORMAT,
                "at": record.at.isoformat(timespec="milliseconds"),
                "attempt": record.attempt,
                "event": record.event,
                **record.details,
            }
        )

    def write(self, line: str) -> None:
        """Write an event's line durably.

        Raises:
            OSError: the filesystem refused; nothing was written, or a part that readers skip.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            text = ("\n" * torn + line + "\n").encode()
            if os.write(descriptor, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> list[Event]:
        """Every readable event, oldest first; none when there is no journal yet.

        Raises:
            NewerFormat: a newer slurmft wrote into it.
            StorageError: the file cannot be read.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error}") from error
        return [event for line in lines if (event := _parse(line, self.path)) is not None]


def _parse(line: bytes, path: Path) -> Event | None:
    try:
        value = json.loads(line)
        version, at = value.pop("format"), datetime.fromisoformat(value.pop("at")).astimezone(UTC)
        at.astimezone()  # a year that no clock here can show
        event, attempt = str(value.pop("event")), str(value.pop("attempt", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None  # torn by a writer that died
    if not isinstance(version, int) or version > FORMAT:
        raise NewerFormat(f"{path} has lines of format {version!r}; this slurmft reads up to {FORMAT}",
                          hint="upgrade slurmft")  # fmt: skip
    return Event(at=at, event=event, attempt=attempt, details=value)
