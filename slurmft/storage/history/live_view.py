"""``live.json``: what each rank of a running attempt does, written every few seconds for people and monitoring.

It is not part of the run's state. Lists have one value for each rank; it is believed value by value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.system.files import number, read_json, write_json

LIVE_FILE = "live.json"
MAX_RANKS = 100_000
MAX_NAME = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveView:
    """One look at all ranks."""

    at: float = 0.0
    """Unix time of the look; 0 where there was none."""

    attempt: str = ""
    steps: Sequence[float | None] = ()
    """Newest step of each rank."""

    step_s: Sequence[float | None] = ()
    """Seconds of a step: a rank's own work in the newest window of straggler detection where that is known, else the
    time between its newest steps."""

    nodes: Sequence[str] = ()
    sections: Sequence[str] = ()
    """The innermost open section of each rank; empty where none is open, or the rank was not heard."""

    section_s: Sequence[float | None] = ()
    heartbeat_s: float | None = None
    """Age of the oldest sign of life of a rank, in seconds."""

    hang_used: float | None = None
    """The largest part of a limit that some rank's section has used up: 1 is a hang."""

    restarts_left: int | None = None
    """Failures of the same kind that the run survives without progress; the least of all kinds."""

    save_interval_steps: int | None = None
    """Steps between two saves; None where they are not counted in steps."""

    tiers: Mapping[str, str] = field(default_factory=dict)
    """Where the newest save lies: tier -> in words."""


def read(run_folder: Path) -> LiveView:
    """The newest look; an empty one where there is none, or it cannot be believed."""
    try:
        facts = read_json(run_folder / LIVE_FILE) or {}
    except StorageError:
        return LiveView()
    tiers = facts.get("tiers")
    return LiveView(
        at=number(facts.get("at")) or 0.0,
        attempt=str(facts.get("attempt") or "")[:MAX_NAME],
        steps=_numbers(facts.get("steps")), step_s=_numbers(facts.get("step_s")),
        section_s=_numbers(facts.get("section_s")),
        nodes=_texts(facts.get("nodes")), sections=_texts(facts.get("sections")),
        heartbeat_s=number(facts.get("heartbeat_s")), hang_used=number(facts.get("hang_used")),
        restarts_left=_count(facts.get("restarts_left")), save_interval_steps=_count(facts.get("save_interval_steps")),
        tiers={str(name)[:MAX_NAME]: str(text)[:MAX_NAME] for name, text in list(tiers.items())[:8]}
        if isinstance(tiers, dict) else {},
    )  # fmt: skip


def write(run_folder: Path, view: LiveView) -> None:
    """Replace it; need not survive a power cut.

    Raises:
        OSError: the run folder cannot be written.
    """
    facts = {name: getattr(view, name) for name in LiveView.__slots__}
    write_json(run_folder / LIVE_FILE, {name: value for name, value in facts.items() if value is not None},
               durable=False)  # fmt: skip


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 10**15 else None


def _numbers(value: Any) -> tuple[float | None, ...]:
    return tuple(number(each) for each in value[:MAX_RANKS]) if isinstance(value, list) else ()


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(each)[:MAX_NAME] for each in value[:MAX_RANKS]) if isinstance(value, list) else ()


class ProgressMarks:
    """When an attempt came to its newest step, and to its newest save: for monitoring."""

    def __init__(self, attempt: Any) -> None:
        self.attempt = attempt
        self._newest: dict[str, int] = {}
        self._facts: dict[str, float] = {}

    def facts(self, progress: Mapping[str, Any]) -> Mapping[str, float]:
        """``progressed_at`` and ``saved_at``, as Unix times."""
        for name, mark in (("step", "progressed_at"), ("saved", "saved_at")):
            value = progress.get(name)
            if isinstance(value, int) and value > self._newest.get(name, -1):
                self._newest[name], self._facts[mark] = value, time.time()
        return self._facts
