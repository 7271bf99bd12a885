"""How numbers become results: pure, and the same for all probes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status, worst


def fine(name: str, detail: str, *, value: float | None = None, unit: str = "") -> ProbeResult:
    """All is well."""
    return ProbeResult(name=name, status=Status.OK, detail=detail, value=value, unit=unit)


def unknown(name: str, detail: str, *, remedy: str = "") -> ProbeResult:
    """It could not look."""
    return ProbeResult(name=name, status=Status.UNKNOWN, detail=detail, remedy=remedy)


def bad(
    name: str, status: Status, detail: str, *, remedy: str, problem: Problem = Problem.NODE,
    evidence: Sequence[str] = (), value: float | None = None, unit: str = "",
) -> ProbeResult:  # fmt: skip
    """Something is wrong; OK and UNKNOWN come out of here too, without a remedy."""
    remedy = remedy if status in (Status.WARNING, Status.CRITICAL) else ""
    return ProbeResult(name=name, status=status, detail=detail, remedy=remedy, problem=problem,
                       evidence=tuple(evidence), value=value, unit=unit)  # fmt: skip


def above(value: float | None, warning: float | None, critical: float | None) -> Status:
    """Whether a number is too great: from a limit on. No number, or NaN, is UNKNOWN; no limit is never reached."""
    if value is None or math.isnan(value):
        return Status.UNKNOWN
    if critical is not None and value >= critical:
        return Status.CRITICAL
    return Status.WARNING if warning is not None and value >= warning else Status.OK


def below(value: float | None, warning: float, critical: float) -> Status:
    """Whether a number is too small: below a limit. No number, or NaN, is UNKNOWN."""
    if value is None or math.isnan(value):
        return Status.UNKNOWN
    if value < critical:
        return Status.CRITICAL
    return Status.WARNING if value < warning else Status.OK


def gravest(results: Sequence[ProbeResult]) -> ProbeResult:
    """The worst of several of one name, with what the other bad ones said; the first where all are alike."""
    status = worst(result.status for result in results)
    chosen = next(result for result in results if result.status is status)
    if status is Status.OK:
        details = [result.detail for result in results if result.detail]
    else:
        details = [result.detail for result in results if result.status is status]
    evidence = tuple(line for result in results for line in result.evidence)
    return ProbeResult(
        name=chosen.name, status=status, detail="; ".join(dict.fromkeys(details)), value=chosen.value,
        unit=chosen.unit, evidence=evidence, remedy=chosen.remedy, problem=chosen.problem,
    )  # fmt: skip
