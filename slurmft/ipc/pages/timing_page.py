"""The timing page: durations that one worker leaves in shared memory for its node's agent.

Layout, version 1: 64-bit integers in the machine's byte order. A header, then one block for each section: its name, how
many durations were ever stored, and a ring of the newest ones in ns. The worker writes all but the header's first three
fields. A duration is one aligned store, made before the count that announces it; no reader sees half of one, and what
a reader sees of a slot that is being overtaken is a newer duration.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

from slurmft.ipc.pages import page_memory

TIMING_PAGE_VARIABLE = "SLURMFT_TIMING_PAGE"
MAGIC_V1 = 0x534C_5552_4D46_5481

RING = 256
"""Durations kept of each section; a power of two."""

MAX_SECTIONS = 34
MAX_NAME = 48
WORK, STEP = "own work", "step"
"""Sections that the session measures: up to the first collective of a step, and the whole of it."""

CPU, CUDA = 1, 2

_MAGIC, _RANK, _GENERATION, _SECTIONS, _DEVICE = range(5)
_ROLE_AT, _HEADER = 8, 16
_NAME_SLOTS = 8
_COUNT_AT = RING
_BLOCK = RING + 8 + _NAME_SLOTS
SIZE_BYTES = (_HEADER + MAX_SECTIONS * _BLOCK) * 8


def plain_name(name: str) -> str:
    """``name`` as it fits into a page: printable ASCII without quotes, cut; others become question marks."""
    text = "".join(character if " " <= character <= "~" and character != '"' else "?" for character in name)
    return text[:MAX_NAME].strip() or "?"


class TimingPage:
    """One worker's page. Both sides hold one; see the layout for who may write what."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._slots = memoryview(memory).cast("q")
        self._blocks: list[memoryview[int]] = []

    @classmethod
    def create(cls, path: Path, *, rank: int, generation: int) -> TimingPage:
        """Make the page of a worker that is about to start; readable by this user alone.

        Raises:
            OSError: there is no room for it.
        """
        page = cls(page_memory.create(path, SIZE_BYTES))
        page._slots[_RANK], page._slots[_GENERATION] = rank, generation
        page._slots[_MAGIC] = MAGIC_V1
        return page

    @classmethod
    def attach(cls, path: Path) -> TimingPage:
        """The page this worker was given.

        Raises:
            ValueError: the file is not a page of this version.
            OSError: there is no such file.
        """
        page = cls(page_memory.attach(path, SIZE_BYTES))
        if page._slots[_MAGIC] != MAGIC_V1:
            raise ValueError(f"{path} is not a timing page of version 1")
        return page

    @classmethod
    def private(cls) -> TimingPage:
        """A page without another reader: for a worker without an agent."""
        return cls(mmap.mmap(-1, SIZE_BYTES))

    def describe(self, *, role: str, device: int) -> None:
        """The worker's role, which selects the ranks it is compared with, and where its time is measured."""
        self._put_text(_ROLE_AT, plain_name(role) if role else "")
        self._slots[_DEVICE] = device

    @property
    def role(self) -> str:
        """As the worker has described itself; empty before."""
        text = self._text(_ROLE_AT)
        return plain_name(text) if text else ""

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
        known = self._sections().get(plain_name(name))
        if known is None and number >= MAX_SECTIONS:
            return None
        start = _HEADER + number * _BLOCK if known is None else known[1]
        self._put_text(start + RING + 8, plain_name(name))
        block = self._slots[start : start + RING + 1]
        self._blocks.append(block)
        if known is None:
            self._slots[_SECTIONS] = number + 1
        return block

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

    def close(self) -> None:
        """Unmap; the file stays."""
        for block in self._blocks:
            block.release()
        self._slots.release()
        self._memory.close()

    def _sections(self) -> dict[str, tuple[int, int]]:
        # the worker may have written anything: its page must not crash our process
        number = max(0, min(int(self._slots[_SECTIONS]), MAX_SECTIONS))
        starts = [_HEADER + index * _BLOCK for index in range(number)]
        return {
            plain_name(self._text(start + RING + 8)): (max(0, int(self._slots[start + _COUNT_AT])), start)
            for start in starts
        }

    def _put_text(self, slot: int, text: str) -> None:
        self._memory[slot * 8 : (slot + _NAME_SLOTS) * 8] = text.encode("ascii").ljust(_NAME_SLOTS * 8, b"\0")

    def _text(self, slot: int) -> str:
        raw = bytes(self._memory[slot * 8 : (slot + _NAME_SLOTS) * 8])
        return raw.partition(b"\0")[0].decode("ascii", errors="replace")
