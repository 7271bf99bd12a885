"""``metrics.jsonl`` of a run: one line per step, steps only ever grow. What is done again replaces what was there.

A restart cuts the file back to the step that it resumes from, before it writes a line. The steps of the lines ascend,
so only the end is read for that: what is going to be done again, and no more.
"""

from __future__ import annotations

import os
from pathlib import Path

from slurmft.system.files import parse_json
from slurmft.system.opening import naming, open_regular, write_bytes

METRICS_FILE = "metrics.jsonl"
MAX_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16


def append_lines(path: Path, lines: list[str]) -> None:
    """Add lines, by one write.

    Raises:
        OSError: they cannot be written; a part of them may have been, which the next ``cut_back`` removes.
    """
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode(), append=True, follow=False)


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of ``step`` and later, and a torn end. Nothing is changed where that is not needed.

    Raises:
        OSError: the file cannot be read or changed.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR, follow=False)
    except FileNotFoundError:
        return
    try:
        with naming(path):
            size = os.fstat(descriptor).st_size
            if (end := _end_before(descriptor, size, step)) < size:
                os.ftruncate(descriptor, end)
                os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end_before(descriptor: int, size: int, step: int) -> int:
    """The end of the newest whole line of an earlier step; 0 where there is none."""
    at, tail = size, b""
    while at > 0:
        begin = max(0, at - _BLOCK_BYTES)
        tail = os.pread(descriptor, at - begin, begin) + tail
        at = begin
        first = tail.find(b"\n") + 1 if at > 0 else 0  # what is before it begins in an earlier block
        place = len(tail)
        while (end := tail.rfind(b"\n", first, place)) >= first:
            start = tail.rfind(b"\n", first, end) + 1 or first
            if _step_of(tail[start:end]) < step:
                return at + end + 1
            place = max(start, first)
            if place == first:
                break
        tail = tail[:first][:MAX_LINE_BYTES]
    return 0


def _step_of(line: bytes) -> float:
    """The line's step; endless for one that cannot be read, which is removed."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if type(step) is int and step >= 0 else float("inf")
