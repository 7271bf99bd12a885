"""The heartbeat page: one worker's state in shared memory, written and read without a system call.

Layout, version 2: 1024 signed 64-bit integers in the machine's byte order. Every field has one writer (W the worker,
A the agent) and is one aligned 8-byte store, so no reader sees half a value; fields are not consistent with each other.
The first 64 are the fields below. The worker's open sections follow, and the names of its sections: how these are
written, and read consistently, is described in ``section_stack``.

    0   .. 63    fields, see Slot
    64  .. 79    open sections of the training thread, outermost first; 0 above the innermost
    80  .. 87    open sections of other threads, in any order; 0 where there is none
    96  .. 863   names of sections 1 to 128: 47 bytes of UTF-8 each, filled up with zeros
    864 .. 991   the newest digests of its state, see digest_ring
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path

from slurmft.ipc.pages import page_memory
from slurmft.policy.timing.stop import NEVER, NOT_STARTED

PAGE_VARIABLE = "SLURMFT_PAGE"
STACKS_SUFFIX, FAULT_SUFFIX, RESCUE_SUFFIX = ".stacks", ".fault", ".rescue"
"""Files beside a worker's page: its stacks (``ipc.stacks``), its newest fault, and the pipe by which it is asked to
keep its state (``agent.just_in_time``)."""

RESCUE_S = 15.0
"""How long workers may take to keep their state when asked: a copy of it in memory, half of the shortest lease."""

MAGIC_V2 = 0x534C_5552_4D46_5402
SLOTS = 1024
SIZE_BYTES = SLOTS * 8
NOTHING, IN_UPDATE = -1, -2


class Slot(IntEnum):
    """Index of each field."""

    MAGIC = 0  # A  layout and version
    RANK = 1  # A
    GENERATION = 2  # A  the attempt that owns the page
    PID = 3  # W  0 until the worker has attached
    STATE = 4  # W  a State
    TICK = 5  # W  the safe point reached (policy.timing.stop)
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
    DIGEST_GROUP = 46  # W  which part of the state it holds, as a number (ipc.pages.digest_ring)
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


class Page:
    """One worker's page. Both sides hold one; see the layout for who may write what."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._slots = memoryview(memory).cast("q")
        self._views: list[memoryview[int]] = []

    @classmethod
    def create(cls, path: Path, *, rank: int, generation: int) -> Page:
        """Make the page of a worker that is about to start; readable by this user alone."""
        page = cls(page_memory.create(path, SIZE_BYTES))
        page[Slot.RANK], page[Slot.GENERATION] = rank, generation
        page[Slot.TICK] = NOT_STARTED
        for slot in _WITHOUT_VALUE:
            page[slot] = NOTHING
        page[Slot.PROPOSED] = NEVER
        page.set_metric(float("nan"))
        page[Slot.MAGIC] = MAGIC_V2
        return page

    @classmethod
    def attach(cls, path: Path) -> Page:
        """The page this worker was given.

        Raises:
            ValueError: the file is not a page of this version.
            OSError: there is no such file.
        """
        page = cls(page_memory.attach(path, SIZE_BYTES))
        if page[Slot.MAGIC] != MAGIC_V2:
            raise ValueError(f"{path} is not a heartbeat page of version 2")
        page[Slot.ATTACHED_AT_NS] = time.monotonic_ns()
        page.touch(Slot.ATTACHED_AT)
        page[Slot.PID] = os.getpid()
        return page

    @classmethod
    def private(cls) -> Page:
        """A page without a reader: for a worker without an agent."""
        page = cls(mmap.mmap(-1, SIZE_BYTES))
        for slot in _WITHOUT_VALUE:
            page[slot] = NOTHING
        page[Slot.PROPOSED] = NEVER
        return page

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

    def view(self, first: int, number: int) -> memoryview[int]:
        """Part of the page; valid until it is closed."""
        part = self._slots[first : first + number]
        self._views.append(part)
        return part

    def touch(self, slot: Slot) -> None:
        """Store the time now, in ns."""
        self._slots[slot] = time.time_ns()

    def close(self) -> None:
        """Unmap; the file stays."""
        for part in self._views:
            part.release()
        self._slots.release()
        self._memory.close()
