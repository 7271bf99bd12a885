"""The section ``checkpoint`` as a worker gets it: one variable for each key, and the defaults where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from slurmft.errors import ConfigError

PREFIX = "SLURMFT_CHECKPOINT_"
MTBF_VARIABLE = "SLURMFT_CHECKPOINT_MTBF_S"
"""Seconds between two failures of the run, as the supervisor expects them; for ``interval: auto``."""

Spacing = Literal["steps", "seconds", "auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Names, meaning and defaults are those of ``config.checkpoint``; a test compares them."""

    interval: Spacing = "steps"
    interval_steps: int = 100
    interval_seconds: float = 0.0
    keep_last_n: int = 3
    keep_every: int = 0
    save_best: bool = True
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"
    async_save: bool = True
    when_busy: Literal["skip", "wait"] = "skip"
    max_failed_saves: int = 3
    bandwidth: int | None = None
    """Bytes per second."""

    peer_copies: int = 0
    local_directory: str | None = None
    just_in_time: bool = True
    stall_timeout_s: float = 30.0
    mtbf_s: float | None = None
    """Seconds between two failures; None where no supervisor has said."""

    @classmethod
    def from_variables(cls, environment: Mapping[str, str]) -> CheckpointSettings:
        """The settings from the agent; a variable that is missing or empty stands for the default.

        Raises:
            ConfigError: a variable was changed by hand and cannot be read; names it.
        """
        given = {field.name: environment.get(PREFIX + field.name.upper(), "") for field in fields(cls)}
        return cls(**{name: _read(name, text) for name, text in given.items() if text})

    def changed(self, given: Mapping[str, Any]) -> CheckpointSettings:
        """These, with what is not None in ``given``."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def _read(name: str, text: str) -> Any:
    try:
        return _READERS[name](text)
    except ValueError as error:
        raise ConfigError(
            f"{PREFIX}{name.upper()} is {text[:60]!r}, which cannot be", hint="leave it to slurmft submit, or unset it"
        ) from error


def _count(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text[:20])
        if not lowest <= value < 1 << 62:
            raise ValueError(text)
        return value

    return read


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return read


def _flag(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


_READERS: Mapping[str, Callable[[str], Any]] = {
    "interval": _one_of("steps", "seconds", "auto"),
    "interval_steps": _count(0),
    "interval_seconds": _seconds,
    "keep_last_n": _count(1),
    "keep_every": _count(0),
    "save_best": _flag,
    "best_metric": str,
    "best_mode": _one_of("min", "max"),
    "async_save": _flag,
    "when_busy": _one_of("skip", "wait"),
    "max_failed_saves": _count(1),
    "bandwidth": _count(1),
    "peer_copies": _count(0),
    "local_directory": str,
    "just_in_time": _flag,
    "stall_timeout_s": _seconds,
    "mtbf_s": _seconds,
}
