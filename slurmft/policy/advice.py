"""Recommended settings from measurements: the lead of Slurm's signal, and the checkpoint interval."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from slurmft.policy.grace import GraceNeed
from slurmft.policy.interval import DAY_S, PRIOR_NODE_DAYS, FailureHistory, Plan, duration, mtbf_s, plan, typical_cost_s

NEWEST_SAVES = 20
SHORTEST_STEP_S = 1e-6
"""A shorter time of a step was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of a workload."""

    need: GraceNeed
    saves_s: tuple[float, ...] = ()
    """Until each save was durable, oldest first."""

    costs_s: tuple[float, ...] = ()
    """The cost of saves to the training, oldest first."""

    history: FailureHistory = field(default_factory=FailureHistory)
    attempts: int = 0
    """Attempts that were measured; 0: none."""

    is_own: bool = True
    """They are of this run, and not of runs of the same workload beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How checkpoints are spaced now."""

    interval: str
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Recommended settings, and why; None where too little is known."""

    measured: Measured
    nodes: int
    mtbf_s: float
    lead_s: int | None
    """The least ``preemption.signal_lead_s``."""

    plan: Plan | None
    """The best interval."""

    steps: int | None
    """The same in steps: ``checkpoint.interval_steps``."""

    now: Plan | None
    """Costs of the present interval; None where there is none, or it is automatic."""

    is_cost_known: bool
    """Whether the cost of saves to the training was measured; else the time until they are durable stands for it."""


def advise(measured: Measured, *, nodes: int, setting: Setting) -> Advice:
    """The least lead that leaves a stop its save, and the interval that wastes least."""
    mean_s = mtbf_s(measured.history, nodes)
    durable_s = median(measured.saves_s[-NEWEST_SAVES:]) if measured.saves_s else 0.0
    cost_s = typical_cost_s(list(measured.costs_s))
    known_s = cost_s if cost_s is not None else durable_s
    step_s = measured.need.step_s or 0.0
    best = plan(known_s, mean_s, step_s=step_s, durable_s=durable_s) if known_s else None
    now_s = {"steps": setting.steps * step_s, "seconds": setting.seconds}.get(setting.interval, 0.0)
    return Advice(
        measured=measured,
        nodes=nodes,
        mtbf_s=mean_s,
        lead_s=measured.need.lead_s if measured.need.known else None,
        plan=best,
        steps=max(1, round(best.interval_s / step_s)) if best is not None and step_s > SHORTEST_STEP_S else None,
        now=Plan(interval_s=now_s, cost_s=best.cost_s, mtbf_s=mean_s, durable_s=durable_s) if best and now_s else None,
        is_cost_known=cost_s is not None,
    )


def in_words(advice: Advice, *, lead_s: int, setting: Setting) -> list[tuple[str, str]]:
    """The advice as names and sentences, in the order in which they are read."""
    return [
        ("measured", _measured(advice)),
        ("failures", _failures(advice)),
        ("signal lead", _lead(advice, lead_s)),
        ("interval", _interval(advice, setting)),
    ]


def _measured(advice: Advice) -> str:
    known = advice.measured
    if not known.attempts:
        return "nothing yet: a run of this workload must have saved once; then ask again"
    whose = "of this run" if known.is_own else "of runs of the same workload beside it"
    parts = [f"{known.attempts} attempt{'s' if known.attempts > 1 else ''} {whose}"]
    if known.need.step_s is not None:
        parts.append(f"a step takes {duration(known.need.step_s)}")
    if known.saves_s:
        parts.append(f"a save is durable after {duration(median(known.saves_s[-NEWEST_SAVES:]))}")
    if (cost_s := typical_cost_s(list(known.costs_s))) is not None:
        parts.append(f"it costs the training {duration(cost_s)}")
    return ", ".join(parts)


def _failures(advice: Advice) -> str:
    seen = advice.measured.history
    nodes = f"{advice.nodes} node{'s' if advice.nodes > 1 else ''}"
    expected = f"one in {duration(advice.mtbf_s)} is to be expected on {nodes}"
    prior = f"one in {PRIOR_NODE_DAYS:g} node-days is assumed before anything is seen"
    if not seen.node_s and not seen.failures:
        return f"none seen; {expected} ({prior})"
    return f"{seen.failures or 'none'} in {seen.node_s / DAY_S:.3g} node-days; {expected} ({prior})"


def _lead(advice: Advice, lead_s: int) -> str:
    need = advice.measured.need
    if advice.lead_s is None:
        return f"preemption.signal_lead_s is {lead_s}; whether that is enough is not known before a save was measured"
    at_least = "more than" if need.cut_off else "at least"
    enough = "which is enough" if lead_s >= advice.lead_s and not need.cut_off else "which is not enough"
    if need.cut_off and lead_s >= advice.lead_s:
        enough = "which may not be enough"
    return f"preemption.signal_lead_s: {at_least} {advice.lead_s} (it is {lead_s}, {enough}); {need}"


def _interval(advice: Advice, setting: Setting) -> str:
    if advice.plan is None:
        return "checkpoint.interval: auto measures what saves cost, and finds it by itself"
    best = f"checkpoint.interval_steps: {advice.steps}" if advice.steps is not None else (
        f"checkpoint.interval_seconds: {advice.plan.interval_s:.0f}")  # fmt: skip
    words = [f"{best}, {advice.plan}"]
    if not advice.is_cost_known:
        words.append("what saves cost the training was not measured: the time until they are durable stands for it")
    if advice.now is not None:
        now = f"{setting.steps} steps" if setting.interval == "steps" else duration(setting.seconds)
        words.append(f"now it is {now}, {advice.now}")
    elif setting.interval == "auto":
        words.append("it is auto now, which finds it by itself")
    elif setting.interval == "steps" and not setting.steps:
        words.append("now there are none but at stops and at the end")
    return "; ".join(words)
