"""Which node made a wrong result: by a rejected result that was computed again, and by the digests of replicas.

A result is rejected, computed again in place, and, when it comes out the same, once more on other hardware. Pure:
values in, an outcome out.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from slurmft.policy.values import few
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


class RerunOutcome(StrEnum):
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


def after_rerun(phase: Phase, seen: Sequence[Seen], *, rejected_others: bool) -> RerunOutcome:
    """The verdict of all ranks' reports; ``rejected_others``: some rank has rejected another result than before.

    Only a verdict that no report contradicts is believed: a result that no rank could compare is inconclusive, and so
    is one that came out otherwise on other hardware and was rejected there as well.
    """
    if Seen.UNKNOWN in seen:
        return RerunOutcome.INCONCLUSIVE
    if phase is Phase.IN_PLACE:
        if Seen.REPRODUCED in seen or Seen.DIFFERENT_REJECTED in seen:
            return RerunOutcome.UNDECIDED
        return RerunOutcome.AGAIN if rejected_others else RerunOutcome.TRANSIENT
    if Seen.DIFFERENT_REJECTED in seen:
        return RerunOutcome.INCONCLUSIVE
    if Seen.REPRODUCED in seen:
        return RerunOutcome.CORRECT
    return RerunOutcome.AGAIN if rejected_others else RerunOutcome.PERSISTENT


def on_suspects(here: Iterable[Suspect], suspects: Sequence[Suspect]) -> list[Suspect]:
    """Those of ``here`` that may be suspected themselves: by the GPU's UUID where both are known, else by the node."""
    return [
        one
        for one in here
        if any(one.gpu == each.gpu if one.gpu and each.gpu else one.node == each.node for each in suspects)
    ]


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


# --- What digests of replicas say: all agree, some differ from the majority, or it cannot be told which are right ---
# Pure. In data-parallel training the replicas of a state are bitwise equal, so one that differs was computed or kept
# wrongly. Ranks that hold the same part of the state have the same group.


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """One rank's digest of its part of the state after some step."""

    group: int
    """Equal for ranks that hold the same part."""

    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The digests of all ranks after the same step, compared."""

    compared: int = 0
    """Ranks that have a replica to be compared with."""

    wrong: tuple[int, ...] = ()
    """Ranks that differ from the majority of their replicas."""

    split: tuple[int, ...] = ()
    """Ranks of groups that differ without a majority: some of them are wrong."""

    unlike: tuple[int, ...] = ()
    """Ranks of groups of three and more in which no two are equal: these are no replicas."""

    @property
    def agrees(self) -> bool:
        """Whether replicas were compared, and all of them are equal."""
        return bool(self.compared) and not (self.wrong or self.split or self.unlike)

    @property
    def differs(self) -> bool:
        """Whether a state must not be trained on."""
        return bool(self.wrong or self.split)


def compare(digests: Mapping[int, Digest]) -> Comparison:
    """Compare the digests of ranks after one step; the order of the ranks does not matter."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for rank in sorted(digests):
        groups[digests[rank].group].append(rank)
    compared, wrong, split, unlike = 0, list[int](), list[int](), list[int]()
    for ranks in groups.values():
        if len(ranks) < 2:
            continue
        compared += len(ranks)
        counts = Counter(digests[rank].value for rank in ranks)
        value, number = counts.most_common(1)[0]
        if number == len(ranks):
            continue
        if 2 * number > len(ranks):
            wrong += [rank for rank in ranks if digests[rank].value != value]
        elif number == 1 and len(ranks) > 2:
            unlike += ranks
        else:
            split += ranks
    return Comparison(
        compared=compared, wrong=tuple(sorted(wrong)), split=tuple(sorted(split)), unlike=tuple(sorted(unlike))
    )


def convicted(doubted: Mapping[str, Digest], agreed: Collection[Digest]) -> tuple[str, ...]:
    """Nodes whose digest in doubt was wrong, now that the same step was computed again and all replicas agree on it.

    Empty where the repetition agrees with none of ``doubted`` or with all: it was not the same computation, or it
    proves nothing.
    """
    right = {(one.group, one.value) for one in agreed}
    known = {one.group for one in agreed}
    cleared = {node for node, one in doubted.items() if (one.group, one.value) in right}
    wrong = [node for node, one in doubted.items() if one.group in known and node not in cleared]
    return tuple(sorted(wrong)) if cleared else ()


def left_out(
    differing: Collection[str], *, buffers: Collection[str], trained: bool, so_far: Collection[str] = ()
) -> frozenset[str]:
    """Names of tensors that differ between replicas by design, as far as the first digests of an attempt tell.

    Before the first step all replicas come from one checkpoint, or from the same seed: what differs then, and its
    optimizer state, is each rank's own. After it only buffers may (running statistics of each rank's own batches);
    parameters and moments are summed or computed from sums.
    """
    by_design = {name for name in differing if not trained or name in buffers}
    return frozenset(so_far) | by_design


def is_left_out(name: str, names: Collection[str]) -> bool:
    """Whether a tensor, or the parameter that an optimizer's tensor belongs to, is in ``names``."""
    return name in names or name.partition("#")[0] in names


def words(wrong: Mapping[int, str], compared: int, step: int) -> str:
    """A sentence about ranks (with their nodes) that differ from the other replicas."""
    named = few([f"rank {rank} on {node}" for rank, node in sorted(wrong.items())], 5)
    verb = "differs" if len(wrong) == 1 else "differ"
    what = f"after step {step}, the weights or optimizer state of {named} {verb} from the other replicas"
    return f"{what} ({compared} ranks compared): silent data corruption"


def words_of_split(split: Mapping[int, str], step: int) -> str:
    """A sentence about replicas, of ranks with their nodes, that differ without a majority."""
    nodes = sorted({*split.values()})
    where = ", ".join(nodes[:5])
    what = f"after step {step}, the replicas of {len(split)} ranks on {where} differ, and none has a majority"
    then = "" if len(nodes) == 1 else "; the steps are computed again to tell which was right"
    return f"{what}: silent data corruption{then}"
