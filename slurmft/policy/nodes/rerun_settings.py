"""The section ``rerun:`` of the configuration, as a worker gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmft.policy.nodes.reruns import Injection, Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunSettings:
    """Checks and their consequences; names and defaults are those of the section ``rerun:``."""

    mode: Mode = Mode.VALIDATE_RESULTS
    check_for_nan_in_loss: bool = True
    """Infinities count as well."""

    check_for_spiky_loss: bool = False
    spiky_loss_factor: float = 10.0
    """Robust standard deviations above the median of the recent losses."""

    spiky_loss_window: int = 100
    """How many losses are recent."""

    max_attempts: int = 3
    """Placements asked for until the verdict is inconclusive."""

    wait_for_others: bool = True
    """Used by the supervisor alone."""

    exit_on_persistent: bool = False
    """Exit with 17 after the verdict persistent, instead of going on with the good value."""

    report_interval_steps: int = 100
    """Steps between two reports of the mode ``report_stats``."""

    error_injection_rate: int = 0
    """About one in so many validations is made wrong; 0: none."""

    error_injection_type: Injection = Injection.TRANSIENT_ERROR
    error_injection_step: int | None = None
    """Only in this step, there always; None: by chance, as the rate says."""

    error_injection_rank: int | None = None
    """Only on this rank."""

    error_injection_node: str | None = None
    """Only on this node: the bad one of a persistent error."""

    error_injection_seed: int = 0

    @property
    def injects(self) -> bool:
        """Whether any error may be injected."""
        return self.error_injection_rate > 0 or self.error_injection_step is not None

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RerunSettings:
        """The settings of the section as JSON; keys that are missing have their defaults, unknown ones are ignored.

        Raises:
            ValueError: a value is of another type.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in given.items() if key in known}
        for name, kind in (("mode", Mode), ("error_injection_type", Injection)):
            if name in values:
                values[name] = kind(values[name])
        return cls(**values)
