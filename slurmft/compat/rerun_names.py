"""Values of Megatron-LM's re-run state machine (``megatron.core.rerun_state_machine``), without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurmft.errors import UsageError
from slurmft.policy.reruns import Injection, Mode
from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED

EXIT_CODE_RESUME_TO_DISAMBIGUATE = EXIT_RERUN_ELSEWHERE
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = EXIT_VALIDATION_FAILED

RerunDiagnostic = Injection
"""What a wrong result is attributed to: CORRECT_RESULT, TRANSIENT_ERROR, PERSISTENT_ERROR."""


class RerunMode(StrEnum):
    """Modes by Megatron-LM's names; their values are those of ``rerun.mode``."""

    DISABLED = Mode.DISABLED.value
    VALIDATE_RESULTS = Mode.VALIDATE_RESULTS.value
    REPORT_DETERMINISM_STATS = Mode.REPORT_STATS.value
    REPORT_STATS = Mode.REPORT_STATS.value

    @classmethod
    def _missing_(cls, value: object) -> RerunMode | None:
        return cls.REPORT_STATS if value == "report_determinism_stats" else None


def mode_of(value: Any) -> Mode:
    """The mode by any of its names.

    Raises:
        UsageError: there is no such mode here.
    """
    try:
        return Mode(RerunMode(value))
    except ValueError as error:
        if value == "skip":
            raise UsageError("the mode 'skip' does not exist here: a step that is wrong each time is never left out",
                             hint="validate_results ends the run with a verdict") from error  # fmt: skip
        known = ", ".join([*(mode.value for mode in RerunMode), "report_determinism_stats"])
        raise UsageError(f"{value!r:.60} is no mode of reruns", hint=f"one of {known}") from error


def injection_of(value: object) -> Injection:
    """The kind of error by its name.

    Raises:
        UsageError: there is no such kind.
    """
    try:
        return Injection(value)  # type: ignore[arg-type]
    except ValueError as error:
        known = ", ".join(kind.value for kind in Injection)
        raise UsageError(f"error_injection_type is {value!r:.60}", hint=f"one of {known}") from error


@dataclass(slots=True)
class RerunErrorInjector:
    """Errors that are injected on purpose, for tests: about one in ``error_injection_rate`` validations, 0 for none."""

    error_injection_rate: int = 0
    error_injection_type: Injection = Injection.TRANSIENT_ERROR

    def __post_init__(self) -> None:
        rate = self.error_injection_rate
        if isinstance(rate, bool) or not isinstance(rate, int) or rate < 0:
            raise UsageError(f"error_injection_rate is {rate!r:.60}; it is 0 or a positive integer")
        self.error_injection_type = injection_of(self.error_injection_type)

    @property
    def should_inject_errors(self) -> bool:
        """Whether any are."""
        return self.error_injection_rate > 0
