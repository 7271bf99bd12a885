"""The section ``rerun:`` of the configuration, as a worker gets it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from slurmft.errors import ConfigError
from slurmft.policy.nodes.reruns import Injection, Mode

SETTINGS_VARIABLE = "SLURMFT_RERUN"
"""The whole section, as JSON."""


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
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> RerunSettings:
        """The settings from the agent; the defaults where there is no agent. Unknown keys are ignored.

        Raises:
            ConfigError: the variable was changed by hand and cannot be read.
        """
        text = (os.environ if environment is None else environment).get(SETTINGS_VARIABLE, "")
        if not text:
            return cls()
        try:
            given = json.loads(text)
            known = {field.name for field in dataclasses.fields(cls)}
            values = {key: value for key, value in given.items() if key in known}
            for name, kind in (("mode", Mode), ("error_injection_type", Injection)):
                if name in values:
                    values[name] = kind(values[name])
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{SETTINGS_VARIABLE} is not the section rerun: as JSON ({error})", hint="leave it to slurmft submit"
            ) from error
