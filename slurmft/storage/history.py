"""What the runs and attempts before have measured, each in one bounded file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.policy.hangs import MAX_SAMPLES
from slurmft.system.files import duration, naming, number, opened, parse_json, read_json, write_bytes, write_json

# --- How long the steps and saves of a run took, kept for the next submission of the same workload ---
# A workload is known by its fingerprint; a run's numbers are believed for the same one only. One entry for each
# attempt, so that writing it again replaces it.

TIMINGS_FILE = "timings.json"
MAX_SAVES = 1000
MAX_COSTS = 50
"""Of one attempt."""

MAX_ATTEMPTS = 20
MAX_BYTES = 1 << 20
MAX_SIBLINGS = 50
LOOK_S = 0.2
"""How long to look at the folders beside a run: a submission must not wait for a slow filesystem."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Measurements of one attempt; None and empty where it ended before."""

    longest_step_s: float | None = None
    """Longest time between two safe points, after the first step."""

    first_step_s: float | None = None
    """The same within the first step of a process, which may compile."""

    start_s: float | None = None
    """From the start of the supervisor to the end of every rank's first step."""

    step_s: float | None = None
    """Mean time of a step, with evaluations and saves."""

    saves_s: tuple[float, ...] = ()
    """Each save's time on its slowest rank until it was durable, oldest first."""

    costs_s: tuple[float, ...] = ()
    """The cost of saves to the training on rank 0, oldest first: the stall, and slower steps during the write."""

    unfinished_save_s: float | None = None
    """Duration of a save until it was cut off: it needs longer than that."""


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Identifies a workload by all values that its speed depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read(run_folder: Path, workload: str) -> dict[str, Timings]:
    """Measurements of each attempt of this workload, oldest first; empty where the file cannot be believed."""
    path = run_folder / TIMINGS_FILE
    try:
        if (value := read_json(path, limit_bytes=MAX_BYTES)) is None:
            return {}
        if value.get("workload") != workload:
            return {}
        return {str(facts["attempt"]): _timings(facts) for facts in value["attempts"]}
    except (StorageError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        log.warning("the timings in %s are ignored: %s", path, getattr(error, "what", repr(error)))
        return {}


def write(run_folder: Path, workload: str, attempt: str, timings: Timings) -> None:
    """Replace the measurements of ``attempt``; other attempts of the workload stay.

    Raises:
        OSError: the file is as it was.
    """
    attempts = read(run_folder, workload)
    attempts.pop(attempt, None)
    attempts[attempt] = timings
    kept: list[dict[str, Any]] = []
    room = MAX_SAVES
    for name, measured in list(reversed(attempts.items()))[:MAX_ATTEMPTS]:
        saves_s = measured.saves_s[-room:] if room else ()
        room -= len(saves_s)
        kept.append({"attempt": name, **asdict(measured), "saves_s": saves_s})
    value = {"workload": workload, "attempts": kept[::-1]}
    write_json(run_folder / TIMINGS_FILE, value, durable=False)


def earlier(run_folder: Path, workload: str) -> list[Timings]:
    """Measurements of earlier attempts of the same workload: this run's own, or else those of the runs beside it."""
    return list(read(run_folder, workload).values()) or beside(run_folder, workload)


def beside(run_folder: Path, workload: str) -> list[Timings]:
    """Measurements of the same workload by the newest of the runs in the same folder."""
    deadline = time.monotonic() + LOOK_S
    found: list[Timings] = []
    for folder in _newest_beside(run_folder, deadline):
        if time.monotonic() > deadline:
            break
        found += read(folder, workload).values()
    return found


def _newest_beside(run_folder: Path, deadline: float) -> list[Path]:
    seen: list[tuple[float, str]] = []
    try:
        with os.scandir(run_folder.parent) as entries:
            for entry in entries:
                if time.monotonic() > deadline:
                    break
                if entry.name != run_folder.name and entry.is_dir() and entry.stat().st_uid == os.getuid():
                    seen.append((entry.stat().st_mtime, entry.path))
    except OSError:
        pass  # the runs that were seen until then are enough
    return [Path(path) for _, path in sorted(seen, reverse=True)[:MAX_SIBLINGS]]


def longest_step_s(measured: Sequence[Timings]) -> float | None:
    """The longest time without a safe point; that of a first step only where no other has been done."""
    later = [timings.longest_step_s for timings in measured if timings.longest_step_s is not None]
    first = [timings.first_step_s for timings in measured if timings.first_step_s is not None]
    return max(later or first, default=None)


def p99_save_s(measured: Sequence[Timings]) -> float | None:
    """The 99th percentile of the saves (nearest rank); of fewer than a hundred it is the longest."""
    saves_s = sorted(seconds for timings in measured for seconds in timings.saves_s)
    return saves_s[math.ceil(0.99 * len(saves_s)) - 1] if saves_s else None


def _timings(facts: Mapping[str, Any]) -> Timings:
    return Timings(
        **{name: None if facts.get(name) is None else duration(facts[name])
           for name in ("longest_step_s", "first_step_s", "start_s", "step_s", "unfinished_save_s")},
        saves_s=tuple(duration(value) for value in facts.get("saves_s", ()))[-MAX_SAVES:],
        costs_s=tuple(duration(value) for value in facts.get("costs_s", ()))[-MAX_COSTS:],
    )  # fmt: skip


# --- ft state ---
# ``ft_state.json``: how long each section took in earlier attempts, by workload; one bounded file in the run folder.
#
# An invalid file counts as missing: limits are learned anew then. A file of a newer slurmft is never written over.

FT_STATE_FILE = "ft_state.json"
FT_STATE_MAX_BYTES = 4 << 20
MAX_WORKLOADS = 8
MAX_SECTIONS = 128


Samples = Mapping[str, Sequence[float]]
"""Seconds by the section's name, oldest first."""


def read_ft_state(run_folder: Path, workload: str) -> dict[str, list[float]]:
    """Durations of this workload's sections; empty where none are known."""
    return _read_all(run_folder).get(workload, {})


def write_ft_state(run_folder: Path, workload: str, samples: Samples) -> None:
    """Replace this workload's entry; those that were written least recently are forgotten first.

    Raises:
        OSError: the file is as it was.
        NewerFormat: it is a newer slurmft's.
    """
    path = run_folder / FT_STATE_FILE
    try:
        read_json(path, limit_bytes=FT_STATE_MAX_BYTES)
    except NewerFormat:
        raise
    except StorageError as error:
        log.debug("%s is replaced: %s", path, error.what)
    kept: list[tuple[str, Samples]] = [(name, each) for name, each in _read_all(run_folder).items() if name != workload]
    kept = [*kept, (workload, samples)][-MAX_WORKLOADS:]
    workloads = [  # a list: their order is when they were last written
        [name, {section: [round(each, 3) for each in durations[-MAX_SAMPLES:]]
                for section, durations in list(sections.items())[:MAX_SECTIONS]}]
        for name, sections in kept
    ]  # fmt: skip
    write_json(path, {"workloads": workloads}, durable=False)


def _read_all(run_folder: Path) -> dict[str, dict[str, list[float]]]:
    path = run_folder / FT_STATE_FILE
    try:
        if (value := read_json(path, limit_bytes=FT_STATE_MAX_BYTES)) is None:
            return {}
        return {
            str(name): {
                str(section): [duration(value) for value in each][-MAX_SAMPLES:]
                for section, each in list(sections.items())[:MAX_SECTIONS]
            }
            for name, sections in value["workloads"][-MAX_WORKLOADS:]
        }
    except (StorageError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        log.warning("the learned timeouts in %s are ignored: %s", path, getattr(error, "what", repr(error)))
        return {}


# --- metrics file ---
# ``metrics.jsonl`` of a run: one line per step, steps only ever grow. What is done again replaces what was there.
#
# A restart cuts the file back to the step that it resumes from, before it writes a line. The steps of the lines ascend,
# so only the end is read for that: what is going to be done again, and no more.

METRICS_FILE = "metrics.jsonl"
MAX_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16


def append_lines(path: Path, lines: list[str]) -> None:
    """Add lines, by one write.

    Raises:
        OSError: they cannot be written; a part of them may have been, which the next ``cut_back`` removes.
    """
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode(), append=True, follow=False)


def curves(path: Path, points: int = 400) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each reported number, by its name, a loss first: of about ``points`` lines, spread evenly over
    the file.

    Empty where there is no file that can be read; what is not a step with finite numbers is left out.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    newest = -1
    with contextlib.suppress(OSError), opened(path, follow=False) as descriptor:
        size = os.fstat(descriptor).st_size
        lines = [_line_at(descriptor, place) for place in range(0, size, max(1, size // points))]
        tail = os.pread(descriptor, MAX_LINE_BYTES, max(0, size - MAX_LINE_BYTES))
        for line in [*lines, *tail.splitlines()[-2:]]:  # the newest may be torn
            if newest < (step := _step_of(line)) < math.inf:
                newest = int(step)
                for name, value in parse_json(line).items():
                    if name not in ("step", "at") and (known := number(value)) is not None:
                        found.setdefault(name, []).append((newest, known))
    return {name: found[name] for name in sorted(found, key=lambda each: ("loss" not in each.lower(), each))}


def _line_at(descriptor: int, place: int) -> bytes:
    """The first whole line at ``place`` or after it; nothing where that is too long."""
    block = os.pread(descriptor, 1 << 12, place)
    lines = block.split(b"\n", 2)[1 if place else 0 :]
    return lines[0] if len(lines) > 1 else b""


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of ``step`` and later, and a torn end. Nothing is changed where that is not needed.

    Raises:
        OSError: the file cannot be read or changed.
    """
    with contextlib.suppress(FileNotFoundError), opened(path, os.O_RDWR, follow=False) as descriptor, naming(path):
        size = os.fstat(descriptor).st_size
        if (end := _end_before(descriptor, size, step)) < size:
            os.ftruncate(descriptor, end)
            os.fsync(descriptor)


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


# --- How fast each node was in earlier attempts of a run, and convicted nodes: one bounded file in the run folder ---

HISTORY_FILE = "stragglers.json"
STRAGGLERS_MAX_BYTES = 32 << 20
MAX_NODES = 20_000
MAX_OUTCOMES = 1000
MAX_CONVICTIONS = 50
KEPT = 3
"""Best times kept of each worker's place; the largest of them counts, so that one lucky window says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The smallest times of one worker's place on a node."""

    role: str
    seconds: tuple[float, ...]
    """At most KEPT, ascending."""


@dataclass(kw_only=True, slots=True)
class NodeHistory:
    """The past of one node."""

    best: dict[int, Best] = field(default_factory=dict)
    """By the worker's place on the node (its local rank)."""

    outcomes: list[tuple[float, bool]] = field(default_factory=list)
    """Unix time of each window and whether it accused the node; oldest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conviction:
    """An earlier verdict."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    at: float


@dataclass(kw_only=True, slots=True)
class History:
    """All of it."""

    nodes: dict[str, NodeHistory] = field(default_factory=dict)
    """Least recently seen first."""

    convictions: list[Conviction] = field(default_factory=list)


def read_stragglers(run_folder: Path, workload: str) -> History:
    """The records of earlier attempts of this workload; empty where the file cannot be believed.

    Times of another workload say nothing about this one, but convictions still count.
    """
    path = run_folder / HISTORY_FILE
    try:
        if (value := read_json(path, limit_bytes=STRAGGLERS_MAX_BYTES)) is None:
            return History()
        history = History(convictions=[_conviction(each) for each in value["convictions"]][-MAX_CONVICTIONS:])
        if value["workload"] == workload:
            history.nodes = {str(name): _node(facts) for name, facts in value["nodes"]}
        return history
    except (StorageError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        log.warning("the straggler history in %s is ignored: %s", path, getattr(error, "what", repr(error)))
        return History()


def write_stragglers(run_folder: Path, workload: str, history: History) -> None:
    """Replace the file; nodes that were seen least recently are forgotten first.

    Raises:
        OSError: the file is as it was.
    """
    nodes = [  # a list: their order is when they were last seen
        [name, {
            "best": {str(place): [best.role, list(best.seconds[:KEPT])] for place, best in node.best.items()},
            "outcomes": [[round(at, 1), slow] for at, slow in node.outcomes[-MAX_OUTCOMES:]],
        }]
        for name, node in list(history.nodes.items())[-MAX_NODES:]
    ]  # fmt: skip
    convictions = [
        {"nodes": each.nodes, "ranks": each.ranks, "at": each.at} for each in history.convictions[-MAX_CONVICTIONS:]
    ]
    value = {"workload": workload, "nodes": nodes, "convictions": convictions}
    write_json(run_folder / HISTORY_FILE, value, durable=False)


def _node(facts: Mapping[str, Any]) -> NodeHistory:
    best = {
        int(place): Best(role=str(role), seconds=tuple(sorted(duration(each) for each in seconds))[:KEPT])
        for place, (role, seconds) in facts["best"].items()
    }
    outcomes = [(duration(at), bool(slow)) for at, slow in facts["outcomes"]]
    return NodeHistory(best=best, outcomes=outcomes[-MAX_OUTCOMES:])


def _conviction(facts: Mapping[str, Any]) -> Conviction:
    return Conviction(
        nodes=tuple(str(node) for node in facts["nodes"]), ranks=tuple(int(rank) for rank in facts["ranks"]),
        at=duration(facts["at"]),
    )  # fmt: skip
