"""The section ``checkpoint`` as a worker gets it, and the defaults where there is no agent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Spacing = Literal["steps", "seconds", "auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Names, meaning and defaults are those of ``config.sections``; a test compares them."""

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
    peer_interval: int = 0
    local_directory: str | None = None
    just_in_time: bool = True
    stall_timeout_s: float = 30.0
    mtbf_s: float | None = None
    """Seconds between two failures; None where no supervisor has said."""

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> CheckpointSettings:
        """The settings of the section as JSON; keys that are missing have their defaults, unknown ones are ignored.

        Raises:
            ValueError: a value cannot be; names its key.
        """
        values = {field.name: given[field.name] for field in fields(cls) if given.get(field.name) is not None}
        for name, value in values.items():
            if not _CHECKS[name](value):
                raise ValueError(f"{name} is {str(value)[:60]!r}, which cannot be")
        return cls(**values)

    def changed(self, given: Mapping[str, Any]) -> CheckpointSettings:
        """These, with what is not None in ``given``."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def _count(lowest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and lowest <= value < 1 << 62


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return type(value) is bool


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "interval": _one_of("steps", "seconds", "auto"),
    "interval_steps": _count(0),
    "interval_seconds": _is_seconds,
    "keep_last_n": _count(1),
    "keep_every": _count(0),
    "save_best": _is_flag,
    "best_metric": _is_text,
    "best_mode": _one_of("min", "max"),
    "async_save": _is_flag,
    "when_busy": _one_of("skip", "wait"),
    "max_failed_saves": _count(1),
    "bandwidth": _count(1),
    "peer_copies": _count(0),
    "peer_interval": _count(0),
    "local_directory": _is_text,
    "just_in_time": _is_flag,
    "stall_timeout_s": _is_seconds,
    "mtbf_s": _is_seconds,
}
