"""The verdict of a rejected result that was computed again: on the hardware, on the software, or none.

A result is rejected, computed again in place, and, when it comes out the same, once more on other hardware. Pure:
values in, an outcome out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from slurmft.policy.verdict import Suspect

# --- The verdict of a rejected result that was computed again: on the hardware, on the software, or none ---

MAX_ROUNDS_IN_PLACE = 3
"""Times that one iteration is run again in place because yet another rank has rejected something."""


class Mode(StrEnum):
    """``rerun.mode``."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_STATS = "report_stats"


class Injection(StrEnum):
    """``rerun.error_injection_type``: what kind of error to play, for tests."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


class Phase(StrEnum):
    """The phase of the current iteration."""

    INITIAL = "initial run"
    IN_PLACE = "rerun in place"
    ELSEWHERE = "rerun elsewhere"


class Outcome(StrEnum):
    """The outcome of a rerun. The first five are the verdicts of evidence and verdict files."""

    TRANSIENT = "transient"
    UNDECIDED = "undecided"
    PERSISTENT = "persistent"
    CORRECT = "correct"
    INCONCLUSIVE = "inconclusive"
    AGAIN = "again"
    """The rejected result is explained, and another rank has rejected one meanwhile: run again in place."""


class Seen(IntEnum):
    """How a result that a rank had rejected came out in the rerun."""

    NOTHING = 0
    """This rank had rejected none."""

    REPRODUCED = 1
    DIFFERENT = 2
    """Otherwise, and accepted."""

    DIFFERENT_REJECTED = 3
    """Otherwise, and rejected once more."""

    UNKNOWN = 4
    """The rerun did not compute it, or not from the same data."""


def difference(first: float, again: float) -> float:
    """How far apart two results are: 0 when equal or both NaN, else ``|a-b|`` over their mean magnitude, up to 2.

    Infinite when exactly one is NaN, or either is infinite and they are not equal.
    """
    if first == again or (math.isnan(first) and math.isnan(again)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(again)):
        return math.inf
    if (first < 0) != (again < 0) and first and again:
        return 2.0
    small, large = sorted((abs(first), abs(again)))
    ratio = small / large  # in this order nothing overflows or underflows
    return 2.0 * (1.0 - ratio) / (1.0 + ratio) or math.ulp(1.0)


def largest_difference(first: Sequence[float], again: Sequence[float]) -> float:
    """The largest ``difference`` of two results of several values; infinite when their numbers differ."""
    if len(first) != len(again):
        return math.inf
    return max((difference(a, b) for a, b in zip(first, again, strict=True)), default=0.0)


def after_rerun(phase: Phase, seen: Sequence[Seen], *, rejected_others: bool) -> Outcome:
    """The verdict of all ranks' reports; ``rejected_others``: some rank has rejected another result than before.

    Only a verdict that no report contradicts is believed: a result that no rank could compare is inconclusive, and so
    is one that came out otherwise on other hardware and was rejected there as well.
    """
    if Seen.UNKNOWN in seen:
        return Outcome.INCONCLUSIVE
    if phase is Phase.IN_PLACE:
        if Seen.REPRODUCED in seen or Seen.DIFFERENT_REJECTED in seen:
            return Outcome.UNDECIDED
        return Outcome.AGAIN if rejected_others else Outcome.TRANSIENT
    if Seen.DIFFERENT_REJECTED in seen:
        return Outcome.INCONCLUSIVE
    if Seen.REPRODUCED in seen:
        return Outcome.CORRECT
    return Outcome.AGAIN if rejected_others else Outcome.PERSISTENT


def same_hardware(here: Suspect, suspect: Suspect) -> bool:
    """Whether ``here`` may be what is suspected: by the GPU's UUID where both are known, else by the node's name."""
    if here.gpu and suspect.gpu:
        return here.gpu == suspect.gpu
    return here.node == suspect.node


def on_suspects(here: Iterable[Suspect], suspects: Sequence[Suspect]) -> list[Suspect]:
    """Those of ``here`` that are suspected themselves."""
    return [one for one in here if any(same_hardware(one, suspect) for suspect in suspects)]


class LossWindow:
    """The recent losses, and what counts as a spike among them.

    A spike lies more than ``factor`` robust standard deviations (1.4826 times the median absolute deviation, and at
    least 1 % of the median) above the median of the newest ``size`` losses. Nothing is one before ``MIN_LOSSES`` of
    them. The bound moves every ``EVERY`` losses, so that it costs nothing in between.
    """

    MIN_LOSSES = 20
    EVERY = 32

    def __init__(self, size: int = 100, factor: float = 10.0) -> None:
        self._size, self._factor = size, factor
        self._losses: list[float] = []
        self._since = 0
        self.bound = math.inf
        """A loss above it is a spike."""

    def add(self, loss: float) -> None:
        """Take in a loss that was accepted; one that is not finite is left out."""
        if not math.isfinite(loss):
            return
        self._losses.append(loss)
        self._since += 1
        if self._since >= self.EVERY or (math.isinf(self.bound) and len(self._losses) >= self.MIN_LOSSES):
            self._move()

    def _move(self) -> None:
        self._since = 0
        del self._losses[: -self._size]
        if len(self._losses) >= min(self.MIN_LOSSES, self._size):
            middle = median(self._losses)
            deviation = 1.4826 * median([abs(loss - middle) for loss in self._losses])
            self.bound = middle + self._factor * max(deviation, 0.01 * abs(middle), 1e-12)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"losses": list(self._losses), "since": self._since, "bound": self.bound}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on as after ``state_dict``."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._since, self.bound = int(state["since"]), float(state["bound"])


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two; ``values`` is not empty."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Variability:
    """How results differ when they are computed twice; relative differences as of ``difference``."""

    total: int = 0
    identical: int = 0
    avg: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {getattr(self, name):.3g}" for name in ("avg", "p50", "p90", "p99", "max"))
        return f"{self.identical}/{self.total} identical; relative difference: {figures}"


def variability(differences: Sequence[float]) -> Variability:
    """Summed up; percentiles are values that occurred."""
    ordered, total = sorted(differences), len(differences)
    if not total:
        return Variability()
    at = {name: ordered[math.ceil(part * total) - 1] for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    identical = sum(1 for one in ordered if one == 0.0)
    return Variability(total=total, identical=identical, avg=sum(ordered) / total, max=ordered[-1], **at)


def strikes(seed: int, rank: int, iteration: int, invocation: int, rate: int) -> bool:
    """Whether an error is injected here: about once in ``rate`` validations, the same ones every time."""
    if rate < 1:
        return False
    name = f"{seed} {rank} {iteration} {invocation}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % rate == 0


# --- The section ``rerun:`` of the configuration, as a worker gets it ---


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
