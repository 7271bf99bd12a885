"""The part of the section ``fault_tolerance`` about hangs: how long sections may take before a rank counts as hung."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from slurmft.config.types import MAX_SECONDS, Count, Section, Text
from slurmft.policy import plain_values as plain
from slurmft.policy.timing.hangs import CHECKPOINTING, EVALUATION, SETUP, STEP, Limits

MAX_NAME_BYTES = 47
MAX_NAMES = 100
DEFAULTS: Mapping[str, float] = {SETUP: 1800.0, STEP: 3600.0, CHECKPOINTING: 3600.0, EVALUATION: 1800.0}
"""Long enough for healthy runs: a limit that was not configured must never cause a false alarm."""

OUT_OF_SECTION_S = 3600.0
START_UP_S = 1800.0


def _defaults() -> dict[str, float | None]:
    return {**DEFAULTS}


def _off_is_zero(value: Any) -> Any:
    return 0.0 if value is None or (isinstance(value, str) and value.strip().lower() in ("null", "off")) else value


def _section_name(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
        if not value or not value.isprintable():
            raise ValueError(f"{value[:60]!r} is not the name of a section")
        if len(value.encode(errors="replace")) > MAX_NAME_BYTES:
            raise ValueError(f"{value[:60]!r} is longer than {MAX_NAME_BYTES} bytes")
    return value


def _as_mapping(value: Any) -> Any:
    """``setup:600,step:180`` as on a command line, or a mapping; names that are missing keep their defaults.

    Raises:
        ValueError: a part of the text is not of that form, or a name is there twice.
    """
    if isinstance(value, str):
        found: dict[str, Any] = {}
        for part in filter(str.strip, value.split(",")):
            name, colon, seconds = part.rpartition(":")
            if not colon or not name.strip():
                raise ValueError(f"{part.strip()[:60]!r} is not of the form name:seconds, such as step:180")
            if name.strip() in found:
                raise ValueError(f"{name.strip()[:60]!r} is there twice")
            found[name.strip()] = seconds.strip()
        value = found
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_NAMES:
        raise ValueError(f"{len(value)} sections are too many; at most {MAX_NAMES}")
    return {**DEFAULTS, **value}


Limit = Annotated[
    float | None, Field(ge=0), BeforeValidator(plain.no_bool), BeforeValidator(_off_is_zero),
    AfterValidator(plain.at_most(MAX_SECONDS)),
]  # fmt: skip
"""Seconds; 0, null or off: no limit. Always a number afterwards."""


class HangSettings(Section):
    """When a rank counts as hung."""

    rank_section_timeouts: Annotated[
        dict[Annotated[Text, AfterValidator(_section_name)], Limit], BeforeValidator(_as_mapping)
    ] = Field(default_factory=_defaults)
    """Seconds a section may be open: setup (start of the session to the first step), step, checkpointing, evaluation
    (one batch), and your own. A mapping, or ``setup:600,step:180``. Each open section has its own limit. null: none."""

    rank_out_of_section_timeout: Limit = OUT_OF_SECTION_S
    """Seconds a rank may spend outside of any section; null: no limit. The default, and that of the setup, hold only
    for scripts that are known to count steps (session.steps, or own sections named step)."""

    initial_rank_heartbeat_timeout: Limit = START_UP_S
    """Seconds from the start of a process to its first call of slurmft; null: no limit. The default holds only for
    scripts that are known to call it."""

    rank_heartbeat_timeout: Limit = 0.0
    """Seconds without a sign of life (``session.heartbeat()``, a section begun or ended) after the first heartbeat of a
    rank; null: no limit."""

    workload_check_interval: Annotated[float, Field(gt=0, le=3600), BeforeValidator(plain.no_bool)] = 5.0
    """Seconds between two looks at the workers, at most: a limit that comes near is looked at in time."""

    calc_ft_timeouts: bool = False
    """Learn the limits of all sections from how long they take. A value that is configured, and not the default, is the
    least then."""

    safety_factor: Annotated[float, Field(ge=1, le=1000), BeforeValidator(plain.no_bool)] = 5.0
    """A learned limit is so many times what a section takes, when it takes long."""

    num_warmup_iterations: Count = Field(default=5, ge=0)
    """First steps of a process, which may compile: they, and what is nested in them, may take as long as the setup."""

    def limits(self) -> Limits:
        """What these settings mean to the policy."""
        return Limits(
            sections={name: seconds or 0.0 for name, seconds in self.rank_section_timeouts.items()},
            out_of_section_s=self.rank_out_of_section_timeout or 0.0,
            start_up_s=self.initial_rank_heartbeat_timeout or 0.0,
            heartbeat_s=self.rank_heartbeat_timeout or 0.0,
        )

    @property
    def start_up_is_given(self) -> bool:
        """Whether the limit of the start-up is the user's, and not the default."""
        return self.initial_rank_heartbeat_timeout != START_UP_S

    @property
    def setup_is_given(self) -> bool:
        """Whether the limit of the setup is the user's, and not the default."""
        return self.rank_section_timeouts.get(SETUP) != DEFAULTS[SETUP]

    @property
    def out_of_section_is_given(self) -> bool:
        """Whether the limit of the time out of any section is the user's, and not the default."""
        return self.rank_out_of_section_timeout != OUT_OF_SECTION_S

    def given_sections(self) -> frozenset[str]:
        """Sections whose limit is the user's, and not the default."""
        return frozenset(name for name, seconds in self.rank_section_timeouts.items() if DEFAULTS.get(name) != seconds)
