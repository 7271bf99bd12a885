"""How long the steps and saves of a run took, kept for the next submission of the same workload.

A workload is known by its fingerprint; a run's numbers are believed for the same one only. One entry for each attempt,
so that writing it again replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.system.files import duration, read_json, write_json

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
