"""The journal of a run: append-only, one JSON object per line; the decision first, the action second."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.system import files

# --- events ---
# The names of a journal's events. What each means and carries stands in ``docs/reference/events.md``, once.


class EventName(StrEnum):
    """What happened. The words are part of the journal's format: they stay; a newer slurmft may write further ones."""

    # submission and start
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    STARTED_HERE = "started here"
    SUBMISSION_FAILED = "submission failed"
    ATTEMPT_STARTED = "attempt started"
    ALREADY_FINISHED = "already finished"
    SUPERFLUOUS_START = "superfluous start"
    AGENTS_READY = "agents ready"
    WORKERS_STARTED = "workers started"
    FIRST_STEP = "first step"
    CAUGHT_UP = "caught up"
    MEASURED = "measured"
    BORROWING = "borrowing"
    JOINING = "joining"
    LENDER_CANCELLED = "lender cancelled"
    LENDER_GAVE_WAY = "lender gave way"
    STALE_REQUEST_DROPPED = "dropped a stale request"
    WAS_SUSPENDED = "was suspended"

    # nodes of an attempt
    AGENT_LOST = "agent lost"
    AGENT_LEFT = "agent left"
    AGENT_BACK = "agent back"
    AGENTS_GONE = "agents gone"
    NODE_KEPT = "node kept"
    NODE_GIVEN_BACK = "node given back"
    NODE_TAKEN_BACK = "node taken back"
    WILL_GROW = "will grow"
    SHRUNK = "shrunk"
    NOT_SHRUNK = "not shrunk"
    NOTICE = "notice"
    CONTAINER_LIMIT = "container limit"
    SPARE_REHEARSED = "spare rehearsed"
    RAY_NODE_JOINED = "ray node joined"
    RAY_NODE_ENDED = "ray node ended"

    # failures
    WORKER_FAILED = "worker failed"
    WORKER_HUNG = "worker hung"
    KILLING_WORKERS = "killing workers"
    LAST_LOOK = "last look"
    STATE_KEPT = "state kept just in time"
    EVIDENCE = "evidence"
    STRAGGLER_SUSPECTED = "straggler suspected"
    STRAGGLER_DETECTED = "straggler detected"
    STRAGGLER_JUDGED = "straggler judged"
    STRAGGLER_KEPT = "straggler kept"
    REPLICAS_DIFFER = "replicas differ"
    REPLICAS_UNLIKE = "replicas unlike"
    REPLICA_CONVICTED = "replica convicted"
    SUPERVISOR_LOST = "supervisor lost"
    FAULT_INJECTED = "fault injected"
    FAULT_NOT_INJECTED = "fault not injected"

    # saves
    SAVE_REQUESTED = "save requested"
    SAVE_FAILED = "save failed"
    SAVES_KEEP_FAILING = "saves keep failing"
    SAVES_WORK_AGAIN = "saves work again"
    STEP_COPIES_SPACED_OUT = "step copies spaced out"
    CHECKPOINT_TRIED = "checkpoint tried"
    CHECKPOINT_QUARANTINED = "checkpoint quarantined"
    CHECKPOINT_VERIFIED = "checkpoint verified"
    CHECKPOINTS_REMOVED = "checkpoints removed"
    BATCH_REDUCED = "batch reduced"
    BATCH_NOT_REDUCED = "batch not reduced"

    # kept folders
    FOLDER_RESTORED = "folder restored"
    FOLDER_KEPT = "folder kept"
    FOLDER_SET_ASIDE = "folder set aside"
    FOLDER_UPLOADED = "folder uploaded"
    SYNC_FAILED = "sync failed"
    SYNC_WORKS_AGAIN = "sync works again"

    # stops
    STOP_ASKED_FOR = "stop asked for"
    STOP_REQUESTED = "stop requested"
    STOP_AGREED = "stop agreed"
    STOP_SAVED = "stop saved"
    STOP_OVERDUE = "stop overdue"
    STOP_WITHOUT_A_SAVE = "stop without a save"
    WILL_NOT_CONTINUE = "will not continue"
    ENDED_FROM_OUTSIDE = "ended from outside"
    CANCELLED = "cancelled"

    # what follows
    VERDICT = "verdict"
    DECISION = "decision"
    SUPERSEDED = "superseded"
    REQUEUEING = "requeueing"
    REQUEUED = "requeued"
    REQUEUE_FAILED = "requeue failed"
    REQUEUE_SKIPPED = "requeue skipped"
    SWITCHING_REQUEUE_OFF = "switching requeue off"
    REQUEUE_STAYS_ON = "requeue stays on"
    REQUEUED_MEANWHILE = "requeued meanwhile"
    LEFT_TO_SLURM = "left to slurm"
    PLACED = "placed"
    BEGIN_NOW = "begin now"
    RESUBMITTING = "resubmitting"
    RESUBMITTED = "resubmitted"
    RESUBMIT_FAILED = "resubmit failed"
    STARTING_ANEW = "starting anew"
    NOT_CONTINUED = "not continued"
    CLAIM_OVERRULED = "claim overruled"
    RESCUING = "rescuing"
    RELEASED = "released"

    # placement
    AVOIDING = "avoiding"
    AVOIDING_GPUS = "avoiding_gpus"
    KEEPING_OFF = "keeping off"
    INCONCLUSIVE = "inconclusive"
    EXCLUSION_ESCAPED = "exclusion_escaped"
    EXCLUSIONS_REFUSED = "exclusions refused"
    EXCLUSIONS_DROPPED = "exclusions dropped"

    # roles
    ROLE_STARTED = "role started"
    ROLE_ENDED = "role ended"

    # inference
    REQUESTS_OPENED = "requests opened"
    NODE_ANSWERS = "node answers"
    REPLICA_READY = "replica ready"
    REPLICA_DIED = "replica died"
    REPLICA_DOWN = "replica down"
    REPLICAS_MISSING = "replicas missing"
    REPLICAS_WANTED = "replicas wanted"
    REPLICA_SMALLER = "replica smaller"
    GANG_FORMED = "gang formed"
    GANG_BROKEN = "gang broken"
    REQUEST_GIVEN_UP = "request given up"
    ANSWERS_HELD_UP = "answers held up"
    ANSWERS_UNREADABLE = "answers unreadable"
    OUTPUT_WRITTEN = "output written"
    ENDPOINT_OPENED = "endpoint opened"
    HANDOVER_BEGUN = "handover begun"
    SUCCESSOR_SUBMITTED = "successor submitted"
    SUCCESSOR_WAITS = "successor waits"
    SUCCESSOR_LOST = "successor lost"
    HANDOVER_FAILED = "handover failed"
    HANDOVER_CALLED_OFF = "handover called off"
    CANDIDATE_STARTED = "candidate started"
    CANDIDATE_LEFT = "candidate left"
    HANDED_OVER = "handed over"
    PREDECESSOR_CANCELLED = "predecessor cancelled"
    UPDATE_BEGUN = "update begun"
    UPDATE_DONE = "update done"
    UPDATE_WENT_BACK = "update went back"
    ROUTER_READY = "router ready"
    ROUTER_ENDED = "router ended"
    ROUTER_DOWN = "router down"


# --- past ---
# What a start needs of a journal, kept beside it with the place up to which it was read: the next start goes on there.
#
# The kept file is a copy of lines of the journal, never a source of its own: where it is damaged, or does not fit the
# journal that is there (another file, a shorter one, other bytes before the place), all of the journal is read.

PAST_SUFFIX = ".past"
WORTH_BYTES = 4 << 20
"""A journal that has grown by less than this is read again faster than a file is written."""

MAX_KEPT_BYTES = 32 << 20
LOOK_BYTES = 1 << 16
"""Of the beginning of the journal and of what lies before the place: by these the journal is recognised."""

_FORMAT = 1


class Past:
    """One reading of a journal, from where the one before has ended.

    Args:
        passed_over: names of the events that were not kept; another choice does not use what this one has kept.
    """

    def __init__(
        self, journal: Path, passed_over: Collection[bytes], *, limit_bytes: int, line_limit_bytes: int
    ) -> None:
        self._journal, self._limit, self._line_limit = journal, limit_bytes, line_limit_bytes
        self._path = journal.with_name(journal.name + PAST_SUFFIX)
        self._choice = hashlib.sha256(b"\n".join(sorted(passed_over))).hexdigest()
        self._begin = self._end = self._inode = 0
        self._last = b""
        self._fits = True

    def lines(self) -> Iterator[bytes]:
        """The kept lines, then those of the journal that came after them.

        Raises:
            UnsafeFile, OSError: as ``files.read_lines``.
        """
        self._inode = self._journal.stat().st_ino
        known = self._known()
        yield from known
        self._end = self._begin
        for line in files.read_lines(
            self._journal, limit_bytes=self._limit, line_limit_bytes=self._line_limit, start=self._begin
        ):
            self._fits &= len(line) < self._line_limit  # of a longer one only the beginning has come
            self._end += len(line) + 1
            self._last = line
            yield line

    def keep(self, wanted: Sequence[bytes]) -> None:
        """Keep these lines of all that were read, where that saves time; what cannot be written is not kept."""
        if not self._fits or self._end - self._begin < WORTH_BYTES or sum(map(len, wanted)) > MAX_KEPT_BYTES:
            return
        with contextlib.suppress(OSError), files.opened(self._journal) as journal:
            end = self._end
            if os.fstat(journal).st_ino != self._inode:  # replaced meanwhile
                return
            if os.pread(journal, 1, end - 1) != b"\n":  # the last line has no end yet
                end -= len(self._last) + 1
                wanted = wanted[:-1] if wanted and wanted[-1] == self._last else wanted
            body = b"".join(line + b"\n" for line in wanted)
            header = {**self._facts(journal, end), "body": hashlib.sha256(body).hexdigest()}
            # without waiting for the disk: after a power cut a damaged file is not used
            files.replace_atomically(self._path, json.dumps(header).encode() + b"\n" + body, durable=False)

    def _known(self) -> list[bytes]:
        try:
            content = files.read_bytes(self._path, limit_bytes=2 * MAX_KEPT_BYTES, owners={os.geteuid()})
            first, _, body = content.partition(b"\n")
            header = files.parse_json(first)
            end = header["end"]
            if type(end) is not int or end <= 0 or header["body"] != hashlib.sha256(body).hexdigest():
                return []
            with files.opened(self._journal) as journal:
                if os.fstat(journal).st_size < end or {**self._facts(journal, end), "body": header["body"]} != header:
                    return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        self._begin = end
        return body.split(b"\n")[:-1]

    def _facts(self, journal: int, end: int) -> dict[str, object]:
        before = max(0, end - LOOK_BYTES)
        looks = os.pread(journal, min(end, LOOK_BYTES), 0), os.pread(journal, end - before, before)
        return {
            "format": _FORMAT, "choice": self._choice, "inode": os.fstat(journal).st_ino, "end": end,
            "looks": [hashlib.sha256(look).hexdigest() for look in looks],
        }  # fmt: skip


# --- The journal of a run: append-only, one JSON object per line; the decision first, the action second ---

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


def newest_of(events: Sequence[Event], *names: EventName) -> Event | None:
    """The newest of the events of these names; None where there is none."""
    return next((event for event in reversed(events) if event.event in names), None)


def listed(value: Any) -> Sequence[Any]:
    """A list in an event's details; empty where damage, or a newer slurmft, has left something else."""
    return value if isinstance(value, list | tuple) else ()


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
                "format": files.FORMAT,
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
        files.append_line(self.path, line)

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
                for line in files.last_lines(self.path, limit_bytes=TAIL_BYTES):
                    known = _NAME.match(line)
                    if known is not None and known[3] not in wanted:
                        continue
                    if (event := _parse_event(line, self.path)) is not None and event.event in names:
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
                past = Past(self.path, _PASSED_OVER, limit_bytes=files.LOG_LIMIT_BYTES, line_limit_bytes=MAX_LINE_BYTES)
                events = list[Event]()
                for line in past.lines():
                    name = _NAME.match(line)
                    if not line or line.isspace() or (name is not None and name[3] in _PASSED_OVER):
                        continue
                    if (event := _parse_event(line, self.path)) is not None:
                        kept.append(line)
                        events.append(event)
                    if len(events) > MAX_LINES:
                        raise StorageError(f"{self.path} has more than {MAX_LINES} lines", hint=files.MOVE_AWAY)
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
                raise StorageError(f"{self.path} has more than {MAX_LINES} lines", hint=files.MOVE_AWAY)
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
            for line in files.read_lines(self.path, limit_bytes=files.LOG_LIMIT_BYTES, line_limit_bytes=MAX_LINE_BYTES):
                if wanted is not None and (event := _without_details(line, wanted)) is not None:
                    yield event
                elif line and not line.isspace():
                    yield _parse_event(line, self.path)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except files.UnsafeFile as error:
            raise StorageError(f"cannot read {self.path}: it {error.strerror}", hint=files.MOVE_AWAY) from error
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


def _parse_event(line: bytes, path: Path) -> Event | None:
    try:
        value = files.parse_json(line.decode())  # of bytes, the encoding would be guessed first
        version, at = value.pop("format"), datetime.fromisoformat(value.pop("at"))
        if at.tzinfo is not UTC:
            at = at.astimezone(UTC)
        if not _FIRST_YEAR < at.year < _LAST_YEAR:
            at.astimezone()  # a year that no clock here can show
        event, attempt = str(value.pop("event")), str(value.pop("attempt", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None  # torn by a writer that died
    if not isinstance(version, int) or version > files.FORMAT:
        raise NewerFormat(f"{path} has lines of format {version!r}; this slurmft reads up to {files.FORMAT}",
                          hint="upgrade slurmft")  # fmt: skip
    return Event(at=at, event=event, attempt=attempt, details=value)


# --- A journal that is followed: each look reads only what was added since the one before ---
# tail = JournalTail(run.path)
# for entry in tail.news(): ...

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 256
"""Beginning of a journal, by which another one in its place is recognised: its first event has a time."""


@dataclass(slots=True)
class JournalPosition:
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
        self, run_folder: Path, place: JournalPosition | None = None, *, names: Collection[str] | None = None
    ) -> None:  # fmt: skip
        self.path = run_folder / JOURNAL_FILE
        self._names = None if names is None else frozenset(name.encode() for name in names)
        self.place = place or JournalPosition()
        self.begun = 0

    def news(self) -> Iterator[Event]:
        """Each new event, oldest first. ``place`` is behind an event as soon as it is given.

        The last line counts once it has its end: its writer may be in the middle of it.

        Raises:
            UnsafeFile: it is no regular file, or longer than LOG_LIMIT_BYTES.
            OSError: the journal cannot be read.
        """
        try:
            with files.opened(self.path) as descriptor:
                size = files.check_length(self.path, descriptor, files.LOG_LIMIT_BYTES)
                self._find_place(descriptor, size)
                yield from self._read(descriptor, size)
        except FileNotFoundError:
            return

    def _find_place(self, descriptor: int, size: int) -> None:
        place = self.place
        head = os.pread(descriptor, _HEAD_BYTES, 0).decode("latin-1")
        if size < place.offset or not head.startswith(place.head):
            self.place = place = JournalPosition()
            self.begun += 1
        place.head = max(place.head, head, key=len)

    def _read(self, descriptor: int, size: int) -> Iterator[Event]:
        place, held, skipping = self.place, b"", False
        at = place.offset
        while at < size and (part := os.pread(descriptor, _CHUNK_BYTES, at)):
            at += len(part)
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                place.offset += len(line) + 1
                if not skipping and self._is_wanted(line) and (event := self._parsed(line)) is not None:
                    yield event
                skipping = False
            if len(held) > MAX_LINE_BYTES:  # damage without an end
                place.offset += len(held)
                held, skipping = b"", True

    def _parsed(self, line: bytes) -> Event | None:
        with contextlib.suppress(NewerFormat):
            return _parse_event(line, self.path)
        return None

    def _is_wanted(self, line: bytes) -> bool:
        """May be true of any line; false only of one that begins as the journal writes it."""
        return self._names is None or (begins := _NAME.match(line)) is None or begins[3] in self._names
