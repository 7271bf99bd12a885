"""The journal of a run: append-only, one JSON object per line; the decision first, the action second."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.storage.events import EventName
from slurmft.storage.history.past import Past
from slurmft.system.files import FORMAT, MOVE_AWAY, parse_json
from slurmft.system.opening import LOG_LIMIT_BYTES, UnsafeFile, append_line, last_lines, read_lines

JOURNAL_FILE = "journal.jsonl"
MAX_LINES = 500_000
"""Lines that a journal may have: an event every five seconds for a month. More would take too long to read."""

TAIL_BYTES = 32 << 20
"""From its end that ``newest`` looks at: what any process may write into it costs a second and no more."""

MAX_LINE_BYTES = 4 << 20
"""Of one event; a traceback is cut long before that. Longer lines are damage."""

PASSED_OVER = frozenset(
    {
        EventName.SAVE_FAILED, EventName.STRAGGLER_SUSPECTED, EventName.NODE_ANSWERS, EventName.REPLICA_READY,
        EventName.REPLICA_DIED, EventName.REPLICA_DOWN, EventName.REPLICA_SMALLER, EventName.REQUEST_GIVEN_UP,
        EventName.ROUTER_READY, EventName.ROUTER_ENDED, EventName.ROUTER_DOWN,
    }
)  # fmt: skip
"""Events that one attempt may write by the thousand, and on which no start decides anything."""

_PASSED_OVER = frozenset(name.encode() for name in PASSED_OVER)
_NAME = re.compile(rb'\{"format": 1, "at": "([^"\\]*)", "attempt": "([^"\\]*)", "event": "([^"\\]*)"')
"""The beginning of a line as ``Journal.line_of`` writes it; one that looks otherwise is parsed."""

_FIRST_YEAR, _LAST_YEAR = 1970, 2200
"""Years between which every clock can show a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the journal."""

    at: datetime
    """Time in UTC, by the writer's clock."""

    event: str
    """The event in a few words; the key of ``slurmft explain``."""

    attempt: str
    """``job.restart.cycle`` of the writer, or empty for a user's command."""

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

    def append(self, event: EventName, **details: Any) -> Event:
        """Write one event durably.

        Raises:
            OSError: the filesystem refused; nothing was written, or a part that readers skip.
            ValueError: a detail has the name of a field that every line has.
            TypeError: a detail cannot be stored as JSON.
        """
        record = self.compose(event, details)
        self.write(self.line_of(record))
        return record

    def compose(self, event: EventName, details: dict[str, Any]) -> Event:
        """The event as of now, not yet written.

        Raises:
            ValueError: a detail has the name of a field that every line has.
        """
        if reserved := {"format", "at", "attempt"} & details.keys():
            raise ValueError(f"a journal line's details cannot be called {', '.join(sorted(reserved))}")
        return Event(at=self._clock(), event=event, attempt=self.attempt, details=details)

    @staticmethod
    def line_of(record: Event) -> str:
        """The event as it is written.

        Raises:
            TypeError: a detail cannot be stored as JSON.
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
        append_line(self.path, line)

    def read(self) -> list[Event]:
        """Every readable event, oldest first; none when there is no journal yet.

        Raises:
            NewerFormat: a newer slurmft wrote into it.
            StorageError: the file cannot be read.
        """
        try:
            return self.read_all()[0]
        except FileNotFoundError:
            return []

    def newest(self, *names: EventName) -> Event | None:
        """The newest of the events of these names; None where none is in the last TAIL_BYTES.

        Raises:
            NewerFormat, StorageError: as ``read``.
        """
        wanted = {name.encode() for name in names}
        try:
            with self._errors_named():
                for line in last_lines(self.path, limit_bytes=TAIL_BYTES):
                    known = _NAME.match(line)
                    if known is not None and known[3] not in wanted:
                        continue
                    if (event := _parse(line, self.path)) is not None and event.event in names:
                        return event
        except FileNotFoundError:
            pass
        return None

    def read_past(self) -> list[Event]:
        """As ``read``, for a start of the run: without PASSED_OVER, whose lines are neither parsed nor counted.

        Raises:
            NewerFormat, StorageError: as ``read``.
        """
        kept = list[bytes]()
        try:
            with self._errors_named():
                past = Past(self.path, _PASSED_OVER, limit_bytes=LOG_LIMIT_BYTES, line_limit_bytes=MAX_LINE_BYTES)
                events = list[Event]()
                for line in past.lines():
                    name = _NAME.match(line)
                    if not line or line.isspace() or (name is not None and name[3] in _PASSED_OVER):
                        continue
                    if (event := _parse(line, self.path)) is not None:
                        kept.append(line)
                        events.append(event)
                    if len(events) > MAX_LINES:
                        raise StorageError(f"{self.path} has more than {MAX_LINES} lines", hint=MOVE_AWAY)
                past.keep(kept)
                return events
        except FileNotFoundError:
            return []

    def read_all(self) -> tuple[list[Event], int]:
        """Every readable event, oldest first, and how many lines are not events.

        Raises:
            FileNotFoundError: there is no journal yet.
            NewerFormat: a newer slurmft wrote into it.
            StorageError: the file cannot be read.
        """
        events, unreadable = list[Event](), 0
        for number, event in enumerate(self.each()):
            if number >= MAX_LINES:
                raise StorageError(f"{self.path} has more than {MAX_LINES} lines", hint=MOVE_AWAY)
            if event is not None:
                events.append(event)
            else:
                unreadable += 1
        return events, unreadable

    def each(self, wanted: frozenset[bytes] | None = None) -> Iterator[Event | None]:
        """One event after the other, oldest first, and None for a line that is none; holds one at a time.

        Args:
            wanted: names of the events whose details are wanted, None for all; others come without, in a third of the
                time.

        Raises:
            FileNotFoundError: there is no journal yet.
            NewerFormat: a newer slurmft wrote into it.
            StorageError: the file cannot be read, or is longer than LOG_LIMIT_BYTES.
        """
        with self._errors_named():
            for line in read_lines(self.path, limit_bytes=LOG_LIMIT_BYTES, line_limit_bytes=MAX_LINE_BYTES):
                if wanted is not None and (event := _without_details(line, wanted)) is not None:
                    yield event
                elif line and not line.isspace():
                    yield _parse(line, self.path)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except UnsafeFile as error:
            raise StorageError(f"cannot read {self.path}: it {error.strerror}", hint=MOVE_AWAY) from error
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error}") from error


def _without_details(line: bytes, wanted: frozenset[bytes]) -> Event | None:
    """The event of a line that was written by this slurmft and ends, where its details are not wanted."""
    found = _NAME.match(line)
    if found is None or found[3] in wanted or line[-1:] != b"}":
        return None
    try:
        at = datetime.fromisoformat(found[1].decode())
        if at.tzinfo is not UTC or not _FIRST_YEAR < at.year < _LAST_YEAR:
            return None
        return Event(at=at, event=found[3].decode(), attempt=found[2].decode(), details={})
    except ValueError:
        return None


def _parse(line: bytes, path: Path) -> Event | None:
    try:
        value = parse_json(line.decode())  # of bytes, the encoding would be guessed first
        version, at = value.pop("format"), datetime.fromisoformat(value.pop("at"))
        if at.tzinfo is not UTC:
            at = at.astimezone(UTC)
        if not _FIRST_YEAR < at.year < _LAST_YEAR:
            at.astimezone()  # a year that no clock here can show
        event, attempt = str(value.pop("event")), str(value.pop("attempt", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None  # torn by a writer that died
    if not isinstance(version, int) or version > FORMAT:
        raise NewerFormat(f"{path} has lines of format {version!r}; this slurmft reads up to {FORMAT}",
                          hint="upgrade slurmft")  # fmt: skip
    return Event(at=at, event=event, attempt=attempt, details=value)
