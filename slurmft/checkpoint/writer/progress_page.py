"""A page of memory that a writer and its worker share: it changes with the writer's progress, and costs no message."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

_WORDS = 8
_BYTES = _WORDS * 8


class Lane(IntEnum):
    """The threads of a writer, each with two words of the page: is it at work, and its own counter."""

    LISTENING = 0
    IMAGE = 2
    COMMIT = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the image that is being written."""

    done_bytes: int
    size_bytes: int


class ProgressPage:
    """Counters in shared memory; each word has one thread that writes it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")

    @classmethod
    def new(cls) -> ProgressPage:
        """A page that a child can inherit by its descriptor."""
        descriptor = os.memfd_create("slurmft-writer")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def begin(self, lane: Lane) -> None:
        """The lane has something to do; from now on it has to move."""
        self._words[lane + 1] += 1
        self._words[lane] = 1

    def end(self, lane: Lane) -> None:
        """It has nothing to do."""
        self._words[lane] = 0
        self._words[lane + 1] += 1

    def tick(self, lane: Lane) -> None:
        """The lane has made progress."""
        self._words[lane + 1] += 1

    def show(self, progress: Progress) -> None:
        """Of the image lane."""
        self._words[6], self._words[7] = progress.done_bytes, progress.size_bytes

    def progress(self) -> Progress:
        """The newest progress."""
        return Progress(self._words[6], self._words[7])

    def counts(self) -> dict[Lane, tuple[bool, int]]:
        """Of each lane: whether it is at work, and its counter."""
        return {lane: (bool(self._words[lane]), self._words[lane + 1]) for lane in Lane}
