"""How long a batch with millions of finished requests takes to reopen, and how much memory.

Run as a program it reopens one: ``ledger_size.py FOLDER TOTAL`` prints seconds and the most MiB that were resident.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from running import say, verdict

from slurmft.inference.ledger import Ledger, open_ledger, segments_of
from slurmft.inference.requests import Batch, runs_of
from slurmft.storage.queue import SegmentWriter, line_of

ASKED_S, ASKED_MIB = 10.0, 1000.0
COMMIT = 256
SEGMENTS = 64
LEFT_BEHIND = 20_000
"""Answers in segments that no ledger names: their replicas died before they could report them."""


def batch_of(folder: Path, total: int) -> Batch:
    return Batch(folder=folder, total=total, bad=(), digest="0" * 64)


def write(folder: Path, total: int, *, in_order: bool) -> int:
    """A ledger of ``total`` answers in commits of 256, through the real classes; its size in bytes.

    Reopening reads no byte of a segment that is committed, so those are holes of the right length.
    """
    segments_of(folder).mkdir()
    ledger = Ledger(batch_of(folder, total), 1, np.zeros(total, dtype=np.bool_), {}, {})
    ledger.begin({})
    numbers = list(range(total))
    if not in_order:
        random.Random(1).shuffle(numbers)
    committed = total - LEFT_BEHIND
    length = len(line_of({"index": total, "response": {"status_code": 200, "body": {"text": "yes"}}}))
    names = [f"g000001-n{number}-r0-1-1.jsonl" for number in range(SEGMENTS)]
    ends = dict.fromkeys(names, 0)
    for first in range(0, committed, COMMIT * SEGMENTS):
        parts: list[tuple[str, int, Sequence[Sequence[int]]]] = []
        for name, at in zip(names, range(first, committed, COMMIT), strict=False):
            some = numbers[at : min(at + COMMIT, committed)]
            ends[name] += length * len(some)
            parts.append((name, ends[name], runs_of(some)))
        ledger.commit(parts)
    ledger.close()
    for name, end in ends.items():
        with (segments_of(folder) / name).open("wb") as stream:
            stream.truncate(end)
    rest = SegmentWriter(segments_of(folder) / "g000001-n999-r0-1-1.jsonl", {"generation": 1})
    rest.append(
        {"index": index, "response": {"status_code": 200, "body": {"text": "yes"}}} for index in numbers[committed:]
    )
    rest.close()
    return sum(path.stat().st_size for path in folder.glob("ledger-*"))


def reopen(folder: Path, total: int) -> tuple[float, float]:
    """Seconds, and the most MiB resident, of a fresh process."""
    argv = [sys.executable, __file__, str(folder), str(total)]
    seconds, mib = json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=300).stdout)
    return seconds, mib


def tables(rounds: int, total: int) -> list[str]:
    lines = [
        f"## {total:,} finished requests", "",
        f"`open_ledger` of a batch of which all but {LEFT_BEHIND:,} are in the ledger, in commits of {COMMIT} answers, "
        f"and those in an unreported segment. Asked: {ASKED_S:g} s, {ASKED_MIB:.0f} MiB. The file is in the "
        "page cache.", "",
        "| finished | ledger | seconds | memory | |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for in_order in (True, False):
        how = "in the order of the input" if in_order else "in random order"
        with tempfile.TemporaryDirectory(prefix="inference-") as name:
            folder = Path(name)
            began = time.monotonic()
            size = write(folder, total, in_order=in_order)
            say(f"{how}: {size >> 20} MiB written in {time.monotonic() - began:.0f} s")
            took = []
            for _ in range(rounds):
                took.append(reopen(folder, total))
                say(f"{how}: {took[-1][0]:.1f} s, {took[-1][1]:.0f} MiB")
        seconds, mib = (statistics.median(each) for each in zip(*took, strict=True))
        least, most = min(each[0] for each in took), max(each[0] for each in took)
        hit = verdict(seconds <= ASKED_S and mib <= ASKED_MIB)
        lines.append(
            f"| {how} | {size / 2**20:.0f} MiB | {seconds:.1f} ({least:.1f} - {most:.1f}) | {mib:.0f} MiB | {hit} |"
        )
    return [*lines, ""]


def main() -> None:
    folder, total = Path(sys.argv[1]), int(sys.argv[2])
    began = time.monotonic()
    ledger = open_ledger(batch_of(folder, total), 2)
    seconds = time.monotonic() - began
    assert ledger.count == total
    (folder / "ledger-000002.jsonl").unlink()  # the next process finds what this one has found
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
