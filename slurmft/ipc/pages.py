"""Pages in shared memory that one worker writes and its node's agent reads."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import mmap
import os
import re
import signal
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import ClassVar, Self

from slurmft.policy.stop import NEVER, NOT_STARTED
from slurmft.system.files import open_regular, read_part

# --- The shared memory below a page: a file of fixed size in a folder of the node's memory, mapped by both sides ---


class _Mapped:
    """A page as signed 64-bit integers in the machine's byte order; the first one says its layout and version."""

    SIZE_BYTES: ClassVar[int]
    MAGIC: ClassVar[int]
    WHAT: ClassVar[str]

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._slots = memoryview(memory).cast("q")
        self._views: list[memoryview[int]] = []

    @classmethod
    def create(cls, path: Path, *, rank: int, generation: int) -> Self:
        """Make the page of a worker that is about to start; readable by this user alone.

        Raises:
            OSError: there is no room for it.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(
                descriptor, 0, cls.SIZE_BYTES
            )  # a store into a page without memory would kill the worker
            page = cls(mmap.mmap(descriptor, cls.SIZE_BYTES))
        finally:
            os.close(descriptor)
        page._slots[1], page._slots[2] = rank, generation
        page._begin()
        page._slots[0] = cls.MAGIC
        return page

    @classmethod
    def attach(cls, path: Path) -> Self:
        """The page this worker was given.

        Raises:
            ValueError: the file is not a page of this version.
            OSError: there is no such file.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            page = cls(mmap.mmap(descriptor, cls.SIZE_BYTES))
        finally:
            os.close(descriptor)
        if page._slots[0] != cls.MAGIC:
            raise ValueError(f"{path} is not a {cls.WHAT}")
        return page

    @classmethod
    def private(cls) -> Self:
        """A page without a reader: for a worker without an agent."""
        page = cls(mmap.mmap(-1, cls.SIZE_BYTES))
        page._begin()
        return page

    def _begin(self) -> None:
        """Fill in what is not 0 on a new page."""

    def view(self, first: int, number: int) -> memoryview[int]:
        """Part of the page; valid until it is closed."""
        part = self._slots[first : first + number]
        self._views.append(part)
        return part

    def close(self) -> None:
        """Unmap; the file stays."""
        for part in self._views:
            part.release()
        self._slots.release()
        self._memory.close()


# --- The heartbeat page: one worker's state in shared memory, written and read without a system call ---
# Layout, version 2: 1024 signed 64-bit integers in the machine's byte order. Every field has one writer (W the worker,
# A the agent) and is one aligned 8-byte store, so no reader sees half a value; fields are not consistent with each
# other. The first 64 are the fields below. The worker's open sections follow, and the names of its sections: how these
# are written, and read consistently, is described at ``SectionStack``.
#
#     0   .. 63    fields, see Slot
#     64  .. 79    open sections of the training thread, outermost first; 0 above the innermost
#     80  .. 87    open sections of other threads, in any order; 0 where there is none
#     96  .. 863   names of sections 1 to 128: 47 bytes of UTF-8 each, filled up with zeros
#     864 .. 991   the newest digests of its state, see digest_ring

PAGE_VARIABLE = "SLURMFT_PAGE"
STACKS_SUFFIX, FAULT_SUFFIX, RESCUE_SUFFIX = ".stacks", ".fault", ".rescue"
"""Files beside a worker's page: its stacks (``ipc.pages``), its newest fault, and the pipe by which it is asked to
keep its state (``agent.agent``)."""

RESCUE_S = 15.0
"""How long workers may take to keep their state when asked: a copy of it in memory, half of the shortest lease."""

MAGIC_V2 = 0x534C_5552_4D46_5402
SLOTS = 1024
HEARTBEAT_SIZE_BYTES = SLOTS * 8
NOTHING, IN_UPDATE = -1, -2


class Slot(IntEnum):
    """Index of each field."""

    MAGIC = 0  # A  layout and version
    RANK = 1  # A
    GENERATION = 2  # A  the attempt that owns the page
    PID = 3  # W  0 until the worker has attached
    STATE = 4  # W  a State
    TICK = 5  # W  the safe point reached (policy.stop)
    STEP = 6  # W  steps completed, counted over the whole run
    UNTIL = 7  # W  steps the run will have
    SAVED = 8  # W  step of the newest committed checkpoint of this attempt
    RESUMED = 9  # W  step this attempt started from
    FIRST_STEP_AT = 10  # W  Unix time in ns at which the first new step was done
    PROGRESS_AT = 11  # W  Unix time in ns of the newest step
    METRIC = 12  # W  bits of a float64: the number shown beside the step
    PROPOSED = 13  # A  tick at which to stop, or NEVER
    COMMITTED = 14  # A  the proposal that every rank has confirmed
    ACTION = 15  # A  a StopAction, valid once committed
    ANSWERED = 16  # W  the newest committed tick that was acted on
    HOLDING = 17  # W  the proposed tick at which the worker waits for the commit
    FIRST_STEP_NS = 18  # W  longest time without a safe point within the process's first step (it compiles)
    LONGEST_STEP_NS = 19  # W  the same for all steps after it
    SAVES = 20  # W  saves that were done
    SAVE_NS = 21  # W  how long the newest of them took
    SAVE_BEGAN_NS = 22  # W  monotonic time at which the save under way began, or was cut off; 0 when there is none
    SAVE_FAILURES = 23  # W  saves that failed and will be tried again
    SAVE_ERRNO = 24  # W  the operating system's reason for the newest of them
    SAVED_AT_NS = 25  # W  monotonic time at which the newest save was done
    PHASE = 26  # W  the session's own section, as a word of section_stack; 0 when there is none
    CLOSED_AT_NS = 27  # W  monotonic time at which a section was closed last; 0 before
    BEAT_AT_NS = 28  # W  monotonic time of the newest session.heartbeat(); 0 before
    SECTION_NAMES = 29  # W  names of sections that are on the page
    SECTIONS_LOST = 30  # W  sections that were opened where no room was left for them
    OWN_WORK_DONE = 31  # W  steps whose first collective this rank has reached; 0 where that is unknown
    OWN_STEPS = 32  # W  sections "step" that the worker itself has closed
    ATTACHED_AT_NS = 33  # W  monotonic time at which the worker attached
    RESCUABLE = 34  # W  steps complete in its memory, and in no checkpoint; NOTHING, or IN_UPDATE until the step's end
    RESCUING = 35  # W  monotonic time at which it began to keep them; 0 before, and when that is over
    RESCUED = 36  # W  steps that are kept just in time on this node; NOTHING before
    RESCUE_PART = 37  # W  number of the part of the state that it has; 0 where every rank has all of it
    SAVE_COST_NS = 40  # W  cost of the newest save to the training: its stall, and the slowdown of steps beside it
    DURABLE = 41  # W  step of the newest checkpoint that a manager has committed for all ranks, in this attempt
    STALL_NS = 42  # W  how long saves have stopped the training thread, in all
    LOOP_AT = 43  # W  Unix time in ns at which the loop of steps began
    ATTACHED_AT = 44  # W  Unix time in ns at which the worker attached
    LOAD_NS = 45  # W  how long it read checkpoints, in all
    DIGEST_GROUP = 46  # W  which part of the state it holds, as a number (DigestRing)
    DIGESTS = 47  # W  digests of its state that it has ever left behind
    COPIED = 48  # W  steps complete in memory on all ranks and with their peers (checkpoint.peer_interval)
    COPY_INTERVAL = 49  # W  steps between two such copies where that was doubled; 0 where it is as configured
    COPY_SHARE_PPM = 50  # W  of the steps' time that copies took before it was doubled last, in millionths
    FAULT = 63  # A  number of the newest fault that was injected into this worker; a file beside the page has its kind


_WITHOUT_VALUE = (
    Slot.SAVED, Slot.RESUMED, Slot.COMMITTED, Slot.ANSWERED, Slot.HOLDING, Slot.RESCUABLE, Slot.RESCUED, Slot.DURABLE,
    Slot.COPIED,
)  # fmt: skip
"""What holds NOTHING on a new page."""


class State(IntEnum):
    """Where a worker is."""

    ABSENT = 0
    SETUP = 1
    TRAINING = 2
    SAVING = 3
    EVALUATING = 4
    STOPPED = 5
    FINISHED = 6
    FAILED = 7
    CLOSED = 8
    """Left in an orderly way before the end of its loop, or without one."""


class StopAction(IntEnum):
    """The action of workers at the agreed tick."""

    NONE = 0
    SAVE_AND_STOP = 1
    SAVE = 2


class Page(_Mapped):
    """One worker's page. Both sides hold one; see the layout for who may write what."""

    SIZE_BYTES, MAGIC, WHAT = HEARTBEAT_SIZE_BYTES, MAGIC_V2, "heartbeat page of version 2"

    @classmethod
    def attach(cls, path: Path) -> Self:
        """As of any page; the agent sees it."""
        page = super().attach(path)
        page[Slot.ATTACHED_AT_NS] = time.monotonic_ns()
        page.touch(Slot.ATTACHED_AT)
        page[Slot.PID] = os.getpid()
        return page

    def _begin(self) -> None:
        self[Slot.TICK], self[Slot.PROPOSED] = NOT_STARTED, NEVER
        for slot in _WITHOUT_VALUE:
            self[slot] = NOTHING
        self.set_metric(float("nan"))

    def __getitem__(self, slot: Slot) -> int:
        return self._slots[slot]

    def __setitem__(self, slot: Slot, value: int) -> None:
        self._slots[slot] = value

    def set_metric(self, value: float) -> None:
        """Store a float64 by its bits."""
        self._slots[Slot.METRIC] = struct.unpack("=q", struct.pack("=d", value))[0]

    def metric(self) -> float:
        """The number shown beside the step; NaN before the first report."""
        return float(struct.unpack("=d", struct.pack("=q", self._slots[Slot.METRIC]))[0])

    def copy(self, first: int, last: int) -> bytes:
        """The fields from ``first`` up to ``last`` (exclusive), in the machine's byte order."""
        return self._memory[first * 8 : last * 8]

    def touch(self, slot: Slot) -> None:
        """Store the time now, in ns."""
        self._slots[slot] = time.time_ns()


# --- digest ring ---
# The newest digests of one worker, in its heartbeat page: pairs of a step and 64 bits, behind the section names.

FIRST_SLOT, ENTRIES = 864, 64
"""Where the pairs begin, and how many there are; the slots end at 991."""


class DigestRing:
    """Both sides hold one; only the worker writes."""

    def __init__(self, page: Page) -> None:
        self._page, self._slots = page, page.view(FIRST_SLOT, 2 * ENTRIES)

    def add(self, group: int, step: int, value: int) -> None:
        """Leave the digest after ``step`` steps; the group is the same for all that follow until it changes."""
        page = self._page
        at = 2 * (page[Slot.DIGESTS] % ENTRIES)
        self._slots[at] = NOTHING  # a reader sees either pair, or none
        page[Slot.DIGEST_GROUP] = group
        self._slots[at + 1] = value
        self._slots[at] = step
        page[Slot.DIGESTS] += 1

    @property
    def count(self) -> int:
        """How many there ever were."""
        return self._page[Slot.DIGESTS]

    @property
    def group(self) -> int:
        """That of the newest one."""
        return self._page[Slot.DIGEST_GROUP]

    def since(self, taken: int) -> Iterator[tuple[int, int]]:
        """Step and value of those after the first ``taken``, oldest first, as far as they are still there."""
        for number in range(max(taken, self.count - ENTRIES + 1, 0), self.count):
            at = 2 * (number % ENTRIES)
            step, value = self._slots[at], self._slots[at + 1]
            if step >= 0:
                yield step, value


# --- The open sections of a worker, on its heartbeat page: what it is doing, and since when ---
#     stack = SectionStack(page)                  # the worker
#     with stack.section("load data"): ...
#     open_sections(page)                         # the agent, at any time; also of a worker that is stopped or dead
#
# An open section is one 64-bit word: its start by the monotonic clock in ns, with the lowest 8 bits replaced by the
# number of its name (so starts are exact to 256 ns). To open a section is one aligned store of that word, to close it
# one store of 0: there is no instruction at which a stopped or killed worker leaves a half-written entry, and none at
# which it holds a lock, as it might hold a sequence lock for ever. A word contains the time of its own store, so no
# value ever comes back and each is its own sequence number: when two reads in a row give the same words, all of them
# were on the page at one moment.
#
# The thread that made the stack nests its sections. Those of other threads are kept apart, in no order. A section that
# finds no room is counted, and not seen.

DEPTH, FIRST_LEVEL = 16, 64
ELSEWHERE, FIRST_ELSEWHERE = 8, 80
MAX_NAMES, FIRST_NAME = 128, 96
NAME_SLOTS = 6
MAX_NAME_BYTES = NAME_SLOTS * 8 - 1
OTHERS = "(other sections)"
"""Stands for all names after the first MAX_NAMES - 1."""

READS = 100
"""Reads of a page that changes all the time, before the last result is used: each word is valid by itself."""

_NUMBER = 0xFF
_TIME = ~_NUMBER
_PHASE, _CLOSED_AT = int(Slot.PHASE), int(Slot.CLOSED_AT_NS)  # to look up a member of an enum takes 50 ns

log = logging.getLogger(__name__)


class Phase(IntEnum):
    """The sections that a session opens by itself, and the numbers of their names."""

    NONE = 0
    SETUP = 1
    STEP = 2
    CHECKPOINTING = 3
    EVALUATION = 4


PHASES = tuple(phase.name.lower() for phase in Phase if phase)


@dataclass(frozen=True, slots=True)
class OpenSection:
    """An open section, as read from the page."""

    name: str
    began_ns: int
    """By the monotonic clock."""


def plain_stack_name(name: str) -> str:
    """``name`` as it fits into a page: printable, at most 47 bytes of UTF-8; others become question marks."""
    text = "".join(character if character.isprintable() else "?" for character in name).strip() or "?"
    return text.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore")


class Section:
    """A named span, to be entered again and again: ``with section:``."""

    __slots__ = ("_levels", "_number", "_opened", "_owner", "_slots", "_stack")

    def __init__(self, stack: SectionStack, number: int) -> None:
        self._stack, self._number = stack, number
        self.bind()

    def bind(self) -> None:
        """Take over the stack's place to write to."""
        stack = self._stack
        self._levels, self._slots, self._opened, self._owner = stack.levels, stack.slots, stack.opened, stack.owner

    def __enter__(self) -> None:
        if get_ident() != self._owner:
            self._stack.open_elsewhere(self._number)
            return
        opened = self._opened
        try:
            self._levels[len(opened)] = monotonic_ns() & _TIME | self._number
        except IndexError:
            self._stack.count_lost()
        opened.append(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if get_ident() != self._owner:
            self._stack.close_elsewhere(self._number)
            return
        opened = self._opened
        if not opened or opened[-1] != self._number:
            self._stack.close_out_of_order(self._number)
            return
        opened.pop()
        try:
            self._levels[len(opened)] = 0
        except IndexError:  # it was never there
            return
        self._slots[_CLOSED_AT] = monotonic_ns()


class _OwnStep(Section):
    """A step of a loop that is not ``session.steps``: they are counted."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._slots[Slot.OWN_STEPS] += 1


class SectionStack:
    """The worker's side. Made by the thread that trains."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.owner = get_ident()
        self.slots = page.view(0, FIRST_LEVEL)
        self.levels = page.view(FIRST_LEVEL, DEPTH)
        self._elsewhere = page.view(FIRST_ELSEWHERE, ELSEWHERE)
        self.opened: list[int] = []
        """Numbers of the open sections of the owner's thread, outermost first."""

        self._threads: list[tuple[int, int] | None] = [None] * ELSEWHERE
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._sections: dict[str, Section] = {}
        self._told: set[str] = set()
        self._names_at = page.view(FIRST_NAME, MAX_NAMES * NAME_SLOTS)
        for name in PHASES:
            self._intern(name)
        _forget_in_children(self)

    def phase(self, phase: Phase) -> None:
        """Set the session's own section, in place of the last one; beside the sections of the user."""
        slots = self.slots
        now = monotonic_ns()
        slots[_PHASE] = now & _TIME | phase if phase else 0
        if not phase:
            slots[_CLOSED_AT] = now

    @property
    def current_phase(self) -> Phase:
        """The session's own section."""
        return Phase(self.slots[Slot.PHASE] & _NUMBER)

    def section(self, name: str) -> Section:
        """The section of that name: ``with stack.section("data"):``. Keep it where every 100 ns count.

        With a user's section of the same name as one of the session's, the session's own setup is over.
        """
        try:
            return self._sections[name]
        except KeyError:
            return self._new_section(name)

    def start(self, name: str) -> None:
        """Open a section; ``end`` closes it."""
        self.section(name).__enter__()

    def end(self, name: str) -> None:
        """Close the innermost open section of that name, wherever it is among the others; none is no error."""
        self.section(name).__exit__(None, None, None)

    def end_all(self) -> None:
        """Close every section of this thread, and the session's own setup."""
        self._setup_is_over()
        if get_ident() != self.owner:
            self._close_all_elsewhere(get_ident())
            return
        for level in range(min(len(self.opened), DEPTH) - 1, -1, -1):
            self.levels[level] = 0
        self.opened.clear()
        self.slots[Slot.CLOSED_AT_NS] = monotonic_ns()

    def beat(self) -> None:
        """Report that the worker lives, outside of any section."""
        self._setup_is_over()
        self.slots[Slot.BEAT_AT_NS] = monotonic_ns()

    def sign(self) -> None:
        """The worker has done something that shows that it lives; no heartbeat."""
        self._setup_is_over()
        self.slots[Slot.CLOSED_AT_NS] = monotonic_ns()

    def count_lost(self) -> None:
        """There was no room for a section."""
        self.slots[Slot.SECTIONS_LOST] += 1

    def open_elsewhere(self, number: int) -> None:
        """Open a section of another thread than the one that trains."""
        with self._lock:
            for place, user in enumerate(self._threads):
                if user is None:
                    self._threads[place] = get_ident(), number
                    self._elsewhere[place] = monotonic_ns() & _TIME | number
                    return
            self.count_lost()

    def close_elsewhere(self, number: int) -> None:
        """Close it."""
        me = get_ident(), number
        with self._lock:
            mine = [place for place, user in enumerate(self._threads) if user == me]
            if mine:
                self._free(max(mine, key=lambda place: self._elsewhere[place]))

    def close_out_of_order(self, number: int) -> None:
        """Close a section that is not the innermost one."""
        opened = self.opened
        if number not in opened:
            self._tell_once(f"section {self._name_of(number)!r} was ended, but not open")
            return
        level = len(opened) - 1 - opened[::-1].index(number)
        del opened[level]
        # from the outside in: a reader meanwhile sees an inner section twice, and none that is closed
        for each in range(level, min(len(opened), DEPTH)):
            self.levels[each] = self.levels[each + 1] if each + 1 < DEPTH else 0
        if len(opened) < DEPTH:
            self.levels[len(opened)] = 0
        self.slots[Slot.CLOSED_AT_NS] = monotonic_ns()

    def detach(self) -> None:
        """Write to nowhere from now on: sections of a forked child are not the worker's."""
        self.slots = memoryview(bytearray(FIRST_LEVEL * 8)).cast("q")
        self.levels = memoryview(bytearray(DEPTH * 8)).cast("q")
        self._elsewhere = memoryview(bytearray(ELSEWHERE * 8)).cast("q")
        self._names_at = memoryview(bytearray(MAX_NAMES * NAME_SLOTS * 8)).cast("q")
        self._lock = threading.Lock()
        self.owner = get_ident()
        for section in self._sections.values():
            section.bind()

    def _close_all_elsewhere(self, thread: int) -> None:
        with self._lock:
            for place, user in enumerate(self._threads):
                if user is not None and user[0] == thread:
                    self._free(place)

    def _free(self, place: int) -> None:
        self._threads[place] = None
        self._elsewhere[place] = 0  # no sign that the thread that trains is well

    def _setup_is_over(self) -> None:
        if self.current_phase is Phase.SETUP:
            self.phase(Phase.NONE)

    def _new_section(self, name: str) -> Section:
        plain = plain_stack_name(str(name))
        if plain in PHASES:
            self._setup_is_over()
        with self._lock:
            kind = _OwnStep if plain == Phase.STEP.name.lower() else Section
            number = self._intern(plain)
            known = plain if number < MAX_NAMES else OTHERS  # made up anew each time, they must not fill the memory
            section = self._sections.get(known) or kind(self, number)
            self._sections[known] = section
            if len(self._sections) < 100 * MAX_NAMES:
                self._sections[name] = section
        return section

    def _intern(self, name: str) -> int:
        if (number := self._names.get(name)) is not None:
            return number
        number = len(self._names) + 1
        if number >= MAX_NAMES:
            if number > MAX_NAMES:
                return MAX_NAMES
            name = OTHERS
            self._tell_once(f"there are more than {number - 1} names of sections; the others share one")
        start = (number - 1) * NAME_SLOTS
        self._names_at[start : start + NAME_SLOTS] = memoryview(name.encode().ljust(NAME_SLOTS * 8, b"\0")).cast("q")
        self._names[name] = number
        self.slots[Slot.SECTION_NAMES] = number
        return number

    def _name_of(self, number: int) -> str:
        return next((name for name, each in self._names.items() if each == number), OTHERS)

    def _tell_once(self, what: str) -> None:
        if what not in self._told and len(self._told) < MAX_NAMES:
            self._told.add(what)
            log.warning("%s", what)


def open_sections(page: Page) -> tuple[list[OpenSection], list[OpenSection]]:
    """The open sections of a worker: the session's own and then those of its thread, outermost first; other threads'.

    Both lists were true at one moment, unless the page changes faster than it can be read; each entry always is.
    """
    first, last = Slot.PHASE, FIRST_ELSEWHERE + ELSEWHERE
    before = page.copy(first, last)
    for _ in range(READS):
        if (copied := page.copy(first, last)) == before:
            break
        before = copied
    words = memoryview(before).cast("q").tolist()
    levels = words[FIRST_LEVEL - first : FIRST_LEVEL - first + DEPTH]
    nested = levels[: levels.index(0)] if 0 in levels else levels
    return _named(page, [words[0], *nested]), _named(page, words[FIRST_ELSEWHERE - first :])


def _named(page: Page, words: Sequence[int]) -> list[OpenSection]:
    return [OpenSection(_name(page, word & _NUMBER), word & _TIME) for word in words if word > 0]


def _name(page: Page, number: int) -> str:
    if not 1 <= number <= MAX_NAMES:
        return "?"
    first = FIRST_NAME + (number - 1) * NAME_SLOTS
    raw = page.copy(first, first + NAME_SLOTS)
    return plain_stack_name(raw.partition(b"\0")[0].decode(errors="replace"))


def _forget_in_children(stack: SectionStack) -> None:
    reference = weakref.ref(stack)

    def forget() -> None:
        if (mine := reference()) is not None:
            mine.detach()

    os.register_at_fork(after_in_child=forget)


# --- section durations ---
# How long sections take, seen from outside: a section that was open at one look and is gone at the next has ended.


class SectionDurations:
    """The longest of each section of a node's workers. Sections shorter than the time between two looks are missed."""

    def __init__(self) -> None:
        self._open: dict[int, dict[OpenSection, float]] = {}
        self._longest_s: dict[str, float] = {}

    def note(self, rank: int, sections: Sequence[OpenSection], now_s: float) -> None:
        """Take in what a worker has open now; a section that has ended took as long as it was last seen to take.

        A section that never ends is a hang and gives no duration.
        """
        before, now = self._open.get(rank, {}), {each: now_s - each.began_ns * 1e-9 for each in sections}
        self._open[rank] = now
        for section, held_s in before.items():
            if section not in now and (section.name in self._longest_s or len(self._longest_s) < MAX_NAMES):
                longest_s = self._longest_s.get(section.name, 0.0)
                self._longest_s[section.name] = max(longest_s, held_s)

    def take(self) -> dict[str, float]:
        """The longest of each since the last call, in seconds."""
        taken, self._longest_s = self._longest_s, {}
        return taken


# --- The timing page: durations that one worker leaves in shared memory for its node's agent ---
# Layout, version 1: 64-bit integers in the machine's byte order. A header, then one block for each section: its name,
# how many durations were ever stored, and a ring of the newest ones in ns. The worker writes all but the header's first
# three fields. A duration is one aligned store, made before the count that announces it; no reader sees half of one,
# and what a reader sees of a slot that is being overtaken is a newer duration.

TIMING_PAGE_VARIABLE = "SLURMFT_TIMING_PAGE"
MAGIC_V1 = 0x534C_5552_4D46_5481

RING = 256
"""Durations kept of each section; a power of two."""

MAX_SECTIONS = 34
MAX_NAME = 48
WORK, STEP = "own work", "step"
"""Sections that the session measures: up to the first collective of a step, and the whole of it."""

CPU, CUDA = 1, 2

_SECTIONS, _DEVICE = 3, 4
_ROLE_AT, _HEADER = 8, 16
_NAME_SLOTS = 8
_COUNT_AT = RING
_BLOCK = RING + 8 + _NAME_SLOTS
TIMING_PAGE_SIZE_BYTES = (_HEADER + MAX_SECTIONS * _BLOCK) * 8


def plain_timing_name(name: str) -> str:
    """``name`` as it fits into a page: printable ASCII without quotes, cut; others become question marks."""
    text = "".join(character if " " <= character <= "~" and character != '"' else "?" for character in name)
    return text[:MAX_NAME].strip() or "?"


class TimingPage(_Mapped):
    """One worker's page. Both sides hold one; see the layout for who may write what."""

    SIZE_BYTES, MAGIC, WHAT = TIMING_PAGE_SIZE_BYTES, MAGIC_V1, "timing page of version 1"

    def describe(self, *, role: str, device: int) -> None:
        """The worker's role, which selects the ranks it is compared with, and where its time is measured."""
        self._put_text(_ROLE_AT, plain_timing_name(role) if role else "")
        self._slots[_DEVICE] = device

    @property
    def role(self) -> str:
        """As the worker has described itself; empty before."""
        text = self._text(_ROLE_AT)
        return plain_timing_name(text) if text else ""

    @property
    def device(self) -> int:
        """CPU or CUDA; 0 before the worker has described itself."""
        device = int(self._slots[_DEVICE])
        return device if device in (CPU, CUDA) else 0

    def add_section(self, name: str) -> memoryview[int] | None:
        """The worker's own view of a section: RING durations and, behind them, their count. None when all are used.

        One that is there already is continued. One thread at a time may add sections.
        """
        number = int(self._slots[_SECTIONS])
        known = self._sections().get(plain_timing_name(name))
        if known is None and number >= MAX_SECTIONS:
            return None
        start = _HEADER + number * _BLOCK if known is None else known[1]
        self._put_text(start + RING + 8, plain_timing_name(name))
        if known is None:
            self._slots[_SECTIONS] = number + 1
        return self.view(start, RING + 1)

    def counts(self) -> dict[str, int]:
        """How many durations each section has ever had."""
        return {name: count for name, (count, _) in self._sections().items()}

    def newest(self, taken: Mapping[str, int], at_least: int) -> dict[str, list[int]]:
        """Durations in ns of every section that has new ones since ``taken``: those, and older ones up to ``at_least``.

        A duration that is not positive is left out: its clock was broken.
        """
        found: dict[str, list[int]] = {}
        for name, (count, start) in self._sections().items():
            new = count - taken.get(name, 0)
            if new <= 0:
                continue
            number = min(count, RING, max(new, at_least))
            values = self._slots[start : start + RING].tolist()
            durations = [values[index % RING] for index in range(count - number, count)]
            found[name] = [duration for duration in durations if duration > 0]
        return found

    def _sections(self) -> dict[str, tuple[int, int]]:
        # the worker may have written anything: its page must not crash our process
        number = max(0, min(int(self._slots[_SECTIONS]), MAX_SECTIONS))
        starts = [_HEADER + index * _BLOCK for index in range(number)]
        return {
            plain_timing_name(self._text(start + RING + 8)): (max(0, int(self._slots[start + _COUNT_AT])), start)
            for start in starts
        }

    def _put_text(self, slot: int, text: str) -> None:
        self._memory[slot * 8 : (slot + _NAME_SLOTS) * 8] = text.encode("ascii").ljust(_NAME_SLOTS * 8, b"\0")

    def _text(self, slot: int) -> str:
        raw = bytes(self._memory[slot * 8 : (slot + _NAME_SLOTS) * 8])
        return raw.partition(b"\0")[0].decode("ascii", errors="replace")


# --- Python stacks of a worker, written by itself on request, at any point of its code ---
# The worker opens a file in its node's private memory and has the interpreter's C handler write all threads into it
# when STACKS_SIGNAL comes, and when it crashes: no lock of Python is needed, and a network filesystem that hangs cannot
# delay it.

STACKS_SIGNAL = signal.SIGRTMIN + 13
"""Number 47 with glibc. Its two neighbours on both sides are free as well: pthreads and POSIX timers take the first
real-time signals (32 and 33, hidden behind SIGRTMIN), profilers and virtual machines the last ones."""

STOP_SIGNAL_VARIABLE = "SLURMFT_STOP_SIGNAL"
"""``preemption.signal`` where that is not SIGTERM: it would end a trainer, and its agent answers to it."""

MAX_FRAMES = 5
MAX_FRAME = 240
MAX_FILE_BYTES = 1024 * 1024

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_THREAD = re.compile(r"(?P<current>Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):")
_OUTERMOST = (" in _run_module_as_main", "  ...", "...")
"""How the last line ends: the zygote was started with -m, or faulthandler has cut off frames or threads."""


def ignore_stop_signal(environment: Mapping[str, str]) -> None:
    """In a worker, before its program begins: some sites send the signal to every process of a step.

    What the worker starts ignores it, too. A handler of the program's own is called as ever.
    """
    if environment.get(STOP_SIGNAL_VARIABLE) in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[environment[STOP_SIGNAL_VARIABLE]], signal.SIG_IGN)


def arm(path: Path) -> None:
    """From now on this process writes its stacks to ``path``, also at a segmentation fault, bus error or abort.

    A trainer may use ``faulthandler`` itself: only a registration of the same signal would
    replace this one. Where the file cannot be made there are no stacks.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
        if not faulthandler.is_enabled():  # else PYTHONFAULTHANDLER asks for it in the log
            faulthandler.enable(file=descriptor, all_threads=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One Python call."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file[-MAX_FRAME:]}:{self.line} {self.function[:MAX_FRAME]}"


def is_complete(dump: str) -> bool:
    """Whether a dump is complete, as far as its last line shows."""
    return dump.endswith("\n") and dump[:-1].rpartition("\n")[2].endswith(_OUTERMOST)


def main_thread(dump: str) -> tuple[Frame, ...]:
    """The main thread's calls in the newest of the dumps, innermost first; none where there is no dump.

    The interpreter lists its newest thread first, so the main thread is the last one. When there were too many threads
    to list, it is the one that took the signal, which is the main thread wherever that did not block it.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    cut = False
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            threads.append((match["current"] == "Current t", []))
        elif (match := _FRAME.match(line)) and threads:
            threads[-1][1].append(Frame(file=match["file"], line=match["line"], function=match["function"]))
        cut = line == "..."
    if not threads:
        return ()
    current = [frames for is_current, frames in threads if is_current]
    return tuple(current[-1] if cut and current else threads[-1][1])


def crashed_thread(text: str) -> tuple[Frame, ...]:
    """The calls of the thread that a process has died in, innermost first; none where it did not crash."""
    _, crash, dump = text.rpartition("Fatal Python error")
    if not crash:
        return ()
    _, current, rest = dump.partition("Current thread")
    return main_thread(current + rest.partition("\n\n")[0])


def innermost(frames: Sequence[Frame]) -> list[str]:
    """The calls that a summary has room for."""
    return [str(frame) for frame in frames[:MAX_FRAMES]]


def read(path: Path, since: int = 0) -> bytes:
    """The bytes written behind byte ``since``; empty when there is no such file."""
    try:
        return read_part(path, since, MAX_FILE_BYTES)
    except OSError:
        return b""


def size(path: Path) -> int:
    """Bytes written so far; 0 when there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
