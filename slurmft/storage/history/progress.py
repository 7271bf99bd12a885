"""The progress report of a run, as its supervisor wrote it: believed value by value, as others may have damaged it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmft.errors import StorageError
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import number


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The supervisor's progress report; None for values that cannot be believed."""

    at: float | None = None
    step: int | None = None
    until: int | None = None
    saved: int | None = None
    metric: float | None = None
    state: str | None = None
    attempt: str | None = None
    resumed: int | None = None
    failed_saves: int | None = None
    save_problem: str | None = None
    progressed_at: float | None = None
    saved_at: float | None = None
    world_size: int | None = None
    step_at: float | None = None
    stall_s: float | None = None
    saves_done: int | None = None
    copied: int | None = None
    missing: str | None = None
    problem: str = ""
    """The damage of the report, which does not harm the run: the report is not part of its state."""

    @property
    def saved_step(self) -> int | None:
        """Newest step in a checkpoint of this attempt; None while there is none."""
        return self.saved if self.saved is not None and self.saved >= 0 else None


_KINDS: Mapping[str, tuple[type, ...]] = {
    "at": (int, float), "step": (int,), "until": (int,), "saved": (int,), "metric": (int, float), "state": (str,),
    "attempt": (str,), "resumed": (int,), "failed_saves": (int,), "save_problem": (str,),
    "progressed_at": (int, float), "saved_at": (int, float), "world_size": (int,),
    "step_at": (int, float), "stall_s": (int, float), "saves_done": (int,),
    "copied": (int,), "missing": (str,),
}  # fmt: skip


def progress_of(run: RunFolder) -> Progress:
    """The newest progress report; never raises for what the file holds."""
    try:
        facts = run.progress() or {}
    except StorageError as error:
        return Progress(problem=error.what)
    given = {name: facts[name] for name in _KINDS if facts.get(name) is not None}
    fit = {name: value for name, value in given.items() if type(value) in _KINDS[name] and _is_fit(value)}
    wrong = ", ".join(f"{name}={str(given[name])[:20]!r}" for name in given.keys() - fit.keys())
    return Progress(**fit, problem=f"progress.json has {wrong}" if wrong else "")


def _is_fit(value: Any) -> bool:
    return isinstance(value, str) or number(value, limit=1e300 if isinstance(value, float) else 1e15) is not None
