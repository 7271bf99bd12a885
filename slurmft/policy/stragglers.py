"""Straggler detection: the scores of one window, its accused, the verdict after several, and whether a move pays.

Every time is a rank's own work, before it waits for others: collectives make all ranks equally slow. Scores are in (0,
1], 1 is best, NaN where unknown; NaN never accuses a rank. Ranks are compared within their cohort, the ranks of equal
role, so that a slow stage, which is slow on every node, accuses no node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from slurmft.policy.verdict import Evidence, Kind, Suspect

# --- stragglers ---

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]

MIN_COHORT = 2
HALVES_APART = 2.0
"""Where one half of a cohort, such as one of two nodes, takes more than so many times as long as the other, it is the
slow one; of halves that differ by less, it is unknown which one is wrong."""

SPREADS = 4.0
"""A straggler lies this many median deviations above its cohort, in logarithms: where all differ, none stands out.

In logarithms, because noise multiplies and has a long tail upwards: of hundreds of ranks there are always some that are
three plain deviations late.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """From when on a window accuses a rank; all of them must be passed."""

    relative: float = 0.7
    """Relative score below which a rank is slow; 0 switches the comparison with the cohort off."""

    individual: float = 0.7
    """Individual score below which a rank is slow; 0 switches the comparison with its own past off."""

    min_samples: int = 3
    """A median of fewer says nothing."""

    min_difference_s: float = 0.005
    """Seconds behind the reference: in steps of a millisecond, a quarter of one is noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Measurements of all ranks in one span of time."""

    medians_s: Floats
    """[ranks, sections] Median seconds of each section; NaN, infinite, zero or negative where there is none."""

    counts: Integers
    """[ranks, sections] How many samples each median was taken from."""

    cohorts: Integers
    """[ranks] Number of the role; negative for a rank that has not reported."""

    best_s: Floats
    """[ranks] The best robust median of the judged time that this rank on this node ever had; NaN before any."""

    judged: Sequence[int] = ()
    """Columns that decide about a rank (the own work before the first collective); all of them when empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A window's scores of each rank."""

    relative: Floats
    """[ranks] The cohort's reference by the rank's own time, at most 1."""

    individual: Floats
    """[ranks] The rank's best time by its present one, at most 1."""

    sections: Floats
    """[ranks, sections] The same as ``relative`` for each section alone."""

    work_s: Floats
    """[ranks] The judged time itself."""

    behind_s: Floats
    """[ranks] Seconds by which it exceeds its reference; negative for the faster half."""

    slow_relative: Flags
    """[ranks] Accused by comparison with the cohort."""

    slow_individual: Flags
    """[ranks] Accused by comparison with its own past, and with the faster half of its cohort."""

    @property
    def slow(self) -> Flags:
        """[ranks] Accused by either."""
        return self.slow_relative | self.slow_individual

    @property
    def covered(self) -> Flags:
        """[ranks] Could be compared with its cohort."""
        return np.isfinite(self.relative)


def score(window: Window, limits: Limits) -> Scores:
    """Compare every rank with its cohort and with its own past."""
    valid = np.isfinite(window.medians_s) & (window.medians_s > 0) & (window.counts >= limits.min_samples)
    times = np.where(valid, window.medians_s, np.nan)
    members = [np.flatnonzero(window.cohorts == cohort) for cohort in np.unique(window.cohorts[window.cohorts >= 0])]
    references = np.full_like(times, np.nan)
    for ranks in members:
        references[ranks] = _references(times[ranks])
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        sections = np.minimum(references / times, 1.0)
        judged = list(window.judged) or slice(None)
        relative, work_s, behind_s = _relative(times[:, judged], references[:, judged], window.counts[:, judged])
        individual = np.where(window.best_s > 0, np.minimum(window.best_s / work_s, 1.0), np.nan)
    slow_relative, slow_individual = np.zeros(len(times), np.bool_), np.zeros(len(times), np.bool_)
    for ranks in members:
        slow_relative[ranks] = _slow_by_cohort(relative[ranks], behind_s[ranks], work_s[ranks], limits)
        slow_individual[ranks] = _slow_by_past(individual[ranks], work_s[ranks], window.best_s[ranks], limits)
    return Scores(
        relative=relative, individual=individual, sections=sections, work_s=work_s, behind_s=behind_s,
        slow_relative=slow_relative, slow_individual=slow_individual,
    )  # fmt: skip


def _references(times: Floats) -> Floats:
    """[sections] The cohort's reference: a time that more than half of it keep up with; NaN where fewer were measured.

    The upper one of the two in the middle, so that a half that is a little slower is not outvoted by the other one; the
    lower one where the halves are HALVES_APART.
    """
    found = np.full(times.shape[1], np.nan)
    for column in range(times.shape[1]):
        values = times[:, column]
        values = values[~np.isnan(values)]
        if len(values) >= MIN_COHORT and 2 * len(values) > len(times):
            middle = len(values) // 2
            low, high = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1]
            found[column] = low if len(values) % 2 == 0 and high / HALVES_APART > low else high
    return found


def _upper_median(values: Floats) -> float:
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])


def _relative(times: Floats, references: Floats, counts: Integers) -> tuple[Floats, Floats, Floats]:
    """Each rank's score over several sections weighed by their time, its time, and how far it is behind."""
    told = np.isfinite(times) & np.isfinite(references)
    weights = np.where(told, counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), 0.0)
    spent = np.sum(np.where(told, times, 0.0) * weights, axis=1)
    needed = np.sum(np.where(told, np.minimum(references, times), 0.0) * weights, axis=1)
    any_told = told.any(axis=1)
    scores = np.divide(needed, spent, out=np.full(len(times), np.nan), where=any_told & (spent > 0))
    measured = np.isfinite(times)
    work_s = np.where(measured.any(axis=1), np.sum(np.where(measured, times, 0.0), axis=1), np.nan)
    behind_s = np.where(any_told, np.sum(np.where(told, times - references, 0.0), axis=1), np.nan)
    return scores, work_s, behind_s


def _slow_by_cohort(scores: Floats, behind_s: Floats, work_s: Floats, limits: Limits) -> Flags:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        late = np.log(work_s / (work_s - behind_s))
    told = late[np.isfinite(late)]
    if len(told) < MIN_COHORT:
        return np.zeros(len(scores), np.bool_)
    near = told[told <= math.log(HALVES_APART) + 1e-9]
    is_half = 2 * len(near) == len(told) == len(scores)
    stands_out = late > SPREADS * _upper_median(np.abs(near if is_half else told))
    slow = (scores < limits.relative) & (behind_s > limits.min_difference_s) & stands_out  # with NaN it is false
    # ranks that were measured in different sections may each stand out; a half of them is no exception
    return slow if 2 * int(slow.sum()) < len(slow) + is_half else np.zeros_like(slow)


def _slow_by_past(individual: Floats, work_s: Floats, best_s: Floats, limits: Limits) -> Flags:
    """Slower than it was, and than the faster half of its cohort is now.

    Longer sequences and busy machines do not pass the second condition: they slow the own work of all. Nor does noise,
    which spreads the faster half as well.
    """
    told = individual[np.isfinite(individual)]
    times = work_s[np.isfinite(work_s)]
    if len(told) < 2:
        return np.zeros(len(individual), np.bool_)
    middle = (len(times) - 1) // 2
    faster = np.partition(times, middle)[: middle + 1]
    others, faster_s = _upper_median(told), float(faster[middle])
    is_slower = (individual < limits.individual) & (individual < limits.individual * others)
    is_behind = (faster_s < limits.individual * work_s) & (work_s - faster_s > limits.min_difference_s)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        stands_out = np.log(work_s / faster_s) > SPREADS * _upper_median(np.log(faster_s / faster))
    return is_slower & is_behind & stands_out & (work_s - best_s > limits.min_difference_s)


def accused(slow: Flags, node_of_rank: Integers) -> tuple[list[int], bool]:
    """Nodes with a slow rank, and whether there are too many of them to be broken ones.

    More than a quarter of the nodes, and more than one, share what slows them: a stage of the model whose ranks were
    given no role of their own, a filesystem, a switch. No node is accused then.
    """
    known = node_of_rank >= 0
    nodes = np.unique(node_of_rank[slow & known])
    shared = len(nodes) > max(1, len(np.unique(node_of_rank[known])) // 4)
    return ([] if shared else nodes.tolist()), shared


def convicted(outcomes: Sequence[bool], *, needed: int, considered: int) -> bool:
    """Whether ``needed`` of the newest ``considered`` windows accused; ``outcomes`` are oldest first."""
    return sum(outcomes[-considered:]) >= needed


def step_slowdown(*, step_s: float, excess_s: float) -> float:
    """How many times longer a step takes with the stragglers than it would without; at least 1."""
    if not (math.isfinite(step_s) and math.isfinite(excess_s)) or not 0 < excess_s < step_s:
        return 1.0
    return step_s / (step_s - excess_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pays:
    """Whether moving a run away from a straggler is worth its cost."""

    worth: bool
    gain_s: float
    """Node-seconds that the rest of the run takes less elsewhere."""

    cost_s: float
    """Node-seconds that the move takes."""

    reason: str
    """One sentence with both numbers."""


def pays(*, slowdown: float, remaining_s: float, nodes: int, requeue_cost_s: float) -> Pays:
    """Compare the gain of running the rest of a run elsewhere with the cost of the move.

    ``remaining_s`` is the time left at the present speed and ``requeue_cost_s`` how long the run does not train.
    """
    cost_s = requeue_cost_s * nodes
    if not (math.isfinite(slowdown) and math.isfinite(remaining_s)) or remaining_s <= 0:
        return Pays(worth=False, gain_s=0.0, cost_s=cost_s, reason="how long the run still takes is not known")
    gain_s = (1 - 1 / max(slowdown, 1.0)) * remaining_s * nodes
    worth = gain_s > cost_s
    reason = (
        f"{'moving' if worth else 'not moving'}: {nodes} nodes gain {gain_s:.0f} node-seconds "
        f"(steps {slowdown:.2f} times as long, {remaining_s:.0f} s left) and the move costs {cost_s:.0f}"
    )
    return Pays(worth=worth, gain_s=gain_s, cost_s=cost_s, reason=reason)


# --- A straggler report in words, and the verdict that follows from several of them ---

MAX_NAMED = 20
"""Ranks that a line names; the others are counted."""

Ranks = npt.NDArray[np.intp]

_COMPLAINTS = {"relative": "have worse relative performance", "individual": "performance dropped"}
"""In the words of nvidia-resiliency-ext, whose users search logs for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerVerdict:
    """Nodes that were slow in enough windows."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    """The ranks on them that the newest window accuses."""

    score: float
    """The worst of their scores."""

    work_ratio: float
    """How many times longer the worst one's own work takes than its cohort's."""

    slowdown: float
    """How many times longer a whole step takes because of them; what ``pays`` asks for."""

    step_s: float
    """Seconds of a step now; NaN where no session measures steps."""

    text: str
    """One sentence for people."""

    stop: bool = False
    """The run is to be stopped and moved where that pays (``stop_if_detected``)."""

    follows_rank: bool = False
    """The same ranks were slow on other nodes before: it is their work, and no move helps."""

    def evidence(self, at: float, step: int | None = None) -> list[Evidence]:
        """Evidence against each node; none when it is the rank's own work."""
        if self.follows_rank:
            return []
        return [
            Evidence(kind=Kind.STRAGGLER, suspect=Suspect(node=node), message=self.text, at=at, step=step)
            for node in self.nodes
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportShape:
    """Options of a report."""

    relative: bool = True
    individual: bool = True
    worst: int = 5
    """Ranks that are named at either end; with 0 only warnings are left."""

    device: str = "GPU"


def report(scores: Scores, nodes: Sequence[str], sections: Sequence[str], shape: ReportShape) -> str:
    """The report's lines: worst and best ranks by each comparison, sections that stand out, warnings, missing ranks."""
    lines: list[str] = []
    for wanted, name, values, slow in (
        (shape.relative, "relative", scores.relative, scores.slow_relative),
        (shape.individual, "individual", scores.individual, scores.slow_individual),
    ):
        if wanted and np.isfinite(values).any():
            if shape.worst:
                lines += [f"{shape.device} {name} performance:", *_extremes(values, nodes, shape.worst)]
            if slow.any():
                lines.append(
                    f"STRAGGLER DETECTION WARNING: Some {shape.device}s {_COMPLAINTS[name]}. "
                    f"Affected ranks: {_named(_by_score(values, slow))}"
                )
    if not shape.worst:
        return "\n".join(lines)
    lines += _worst_sections(scores, nodes, sections)
    if (missing := np.flatnonzero(~scores.covered)).size:
        covered = len(scores.covered) - len(missing)
        lines.append(
            f" Partial coverage: {covered}/{len(scores.covered)} ranks could be compared; "
            f"not compared: {_named(missing.tolist())}"
        )
    return "\n".join(lines)


def _extremes(values: Floats, nodes: Sequence[str], number: int) -> list[str]:
    """The worst ranks, worst first, then the best of the others, best first."""
    told = np.flatnonzero(np.isfinite(values))
    worst = _lowest(values, told, number)
    lines = [f" Worst performing {len(worst)}/{len(told)} ranks:", *_scored(worst, values, nodes)]
    best = _lowest(-values, np.setdiff1d(told, worst), number)
    if best:
        lines += [f" Best performing {len(best)}/{len(told)} ranks:", *_scored(best, values, nodes)]
    return lines


def _lowest(values: Floats, told: Ranks, number: int) -> list[int]:
    number = min(number, len(told))
    if not number:
        return []
    near = told[values[told] <= np.partition(values[told], number - 1)[number - 1]]  # all that are as low
    return [int(rank) for rank in near[np.lexsort((near, values[near]))][:number]]


def _scored(ranks: Sequence[int], values: Floats, nodes: Sequence[str]) -> list[str]:
    return [f"  Rank={rank} Node={nodes[rank]} Score={values[rank]:.2f}" for rank in ranks]


def _worst_sections(scores: Scores, nodes: Sequence[str], sections: Sequence[str]) -> list[str]:
    """One line for each section, in the order they were first seen: its slowest rank."""
    lines = []
    filled = np.where(np.isfinite(scores.sections), scores.sections, np.inf)
    for column, name in enumerate(sections):
        rank = int(np.argmin(filled[:, column])) if len(filled) else -1
        if rank >= 0 and np.isfinite(filled[rank, column]):
            lines.append(f'  Section="{name}" Rank={rank} Node={nodes[rank]} Score={filled[rank, column]:.2f}')
    return ["Section relative performance:", *lines] if lines else []


def _by_score(values: Floats, slow: Flags) -> list[int]:
    ranks = np.flatnonzero(slow)
    return [int(rank) for rank in ranks[np.lexsort((ranks, values[ranks]))]]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"[{shown}]{more}"
