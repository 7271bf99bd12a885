"""A straggler report in words, and the verdict that follows from several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.timing.stragglers import Flags, Floats, Scores

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
