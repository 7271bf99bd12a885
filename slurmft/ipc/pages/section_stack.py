"""The open sections of a worker, on its heartbeat page: what it is doing, and since when.

    stack = SectionStack(page)                  # the worker
    with stack.section("load data"): ...
    open_sections(page)                         # the agent, at any time; also of a worker that is stopped or dead

An open section is one 64-bit word: its start by the monotonic clock in ns, with the lowest 8 bits replaced by the
number of its name (so starts are exact to 256 ns). To open a section is one aligned store of that word, to close it
one store of 0: there is no instruction at which a stopped or killed worker leaves a half-written entry, and none at
which it holds a lock, as it might hold a sequence lock for ever. A word contains the time of its own store, so no value
ever comes back and each is its own sequence number: when two reads in a row give the same words, all of them were on
the page at one moment.

The thread that made the stack nests its sections. Those of other threads are kept apart, in no order. A section that
finds no room is counted, and not seen.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import get_ident
from time import monotonic_ns
from types import TracebackType

from slurmft.ipc.pages.heartbeat import Page, Slot

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


def plain_name(name: str) -> str:
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
        plain = plain_name(str(name))
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
    return plain_name(raw.partition(b"\0")[0].decode(errors="replace"))


def _forget_in_children(stack: SectionStack) -> None:
    reference = weakref.ref(stack)

    def forget() -> None:
        if (mine := reference()) is not None:
            mine.detach()

    os.register_at_fork(after_in_child=forget)
