"""How far apart checkpoints should be, by what saving costs and how often runs fail; and the settings that
measurements recommend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from slurmft.policy.stop import GraceNeed

# --- How far apart checkpoints should be: the cost of saving against the work that failures undo ---
# With a save that costs C seconds and failures M seconds apart on average, an interval t wastes about C / t for saving
# and t / (2 M) for work that is done again. First order: J. W. Young, "A first order approximation to the optimum
# checkpoint interval", Communications of the ACM 17 (9), 1974. Higher order, with failures during saves and restarts:
# J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
# Systems 22 (3), 2006.
#
# C is the cost to the training loop: the time a save stops it, and the slowdown of its steps while the save is written.
# The time of the write itself delays nothing; but a save that is not durable is lost with a node, so it counts too.

DAY_S = 86_400.0
PRIOR_NODE_DAYS = 50.0
"""Node-days per failure of a run that has not been seen to fail: an assumption, on the careful side. Published for
comparison: 419 interruptions in 54 days on 16,384 GPUs, which are 264 node-days each with 8 GPUs to a node ("The Llama
3 Herd of Models", 2024)."""

MOST_S = 1e12
"""Longer than any real time; sums of such numbers stay finite."""

SHORTEST_S, LONGEST_S = 1.0, 3600.0
"""No failure should cost more than an hour, independent of the formula; a save without a cost was measured badly."""

FIRST_S = 60.0
"""Until two saves have been measured: the first one also sets up what they use, and says little about their cost."""

SAVES_MEASURED = 5
LEAST_COST_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureHistory:
    """A run's failures: unplanned ends of attempts, and the node-time of training."""

    failures: int = 0
    node_s: float = 0.0


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Young's interval: the square root of 2 C M."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval, the time of training between two saves; the mean time between failures where a save costs more
    than twice that, and no interval is a good one."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def mtbf_s(history: FailureHistory, nodes: int) -> float:
    """Seconds between two failures of a run on ``nodes``, as expected after ``history``.

    A gamma prior of one failure in PRIOR_NODE_DAYS on the rate of one node: without observations it alone counts, and
    every observed failure and node-day moves it.
    """
    node_s = min(max(0.0, history.node_s), MOST_S) if math.isfinite(history.node_s) else 0.0
    rate = (1 + max(0, history.failures)) / (PRIOR_NODE_DAYS * DAY_S + node_s)
    return 1.0 / (rate * max(1, nodes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """An interval, and its expected costs."""

    interval_s: float
    cost_s: float
    mtbf_s: float
    durable_s: float = 0.0
    """From the beginning of a save until it survives the loss of its node."""

    limited_by: str = ""
    """The bound that keeps the interval from Daly's; empty where none does."""

    @property
    def overhead_fraction(self) -> float:
        """Share of the time spent on saving."""
        return self.cost_s / (self.interval_s + self.cost_s)

    @property
    def lost_s(self) -> float:
        """Seconds of work that a failure undoes on average."""
        return self.interval_s / 2.0 + self.durable_s

    @property
    def lost_fraction(self) -> float:
        """Share of the time that is done again."""
        return min(1.0, self.lost_s / self.mtbf_s)

    def __str__(self) -> str:
        limit = f" ({self.limited_by})" if self.limited_by else ""
        return (
            f"every {duration(self.interval_s)}{limit}: saving takes {_percent(self.overhead_fraction)} of the time, "
            f"a failure undoes {duration(self.lost_s)} on average, {_percent(self.lost_fraction)} of the time with one "
            f"in {duration(self.mtbf_s)}"
        )


def plan(cost_s: float, mtbf_s: float, *, step_s: float = 0.0, durable_s: float = 0.0, longest_s: float = 0.0) -> Plan:
    """The interval for what was measured: Daly's, not shorter than a step, a second or a write, and not longer than
    ``longest_s`` (0: an hour). Any numbers give an interval that can be kept; the bound above is the stronger one."""
    cost_s = max(LEAST_COST_S, _finite(cost_s))
    mtbf_s = max(1.0, _finite(mtbf_s) or PRIOR_NODE_DAYS * DAY_S)
    durable_s, step_s = _finite(durable_s), _finite(step_s)
    wanted_s, reason = daly_s(cost_s, mtbf_s), ""
    for floor_s, name in ((step_s, "no shorter than a step"), (durable_s, "no shorter than a write takes"),
                          (SHORTEST_S, "no shorter than a second")):  # fmt: skip
        if wanted_s < floor_s:
            wanted_s, reason = floor_s, name
    longest_s = _finite(longest_s) or LONGEST_S
    if wanted_s > longest_s:
        wanted_s, reason = longest_s, f"no longer than {duration(longest_s)}"
    return Plan(interval_s=wanted_s, cost_s=cost_s, mtbf_s=mtbf_s, durable_s=durable_s, limited_by=reason)


def typical_cost_s(costs_s: list[float]) -> float | None:
    """The typical cost of a save, from all costs so far, oldest first; None where none was measured.

    The middle of the newest ones. The first one of a process does not count once there is another.
    """
    from statistics import median  # not at every start: with fractions and decimals, 5 ms

    return median((costs_s[1:] or costs_s)[-SAVES_MEASURED:]) if costs_s else None


def _finite(value: float) -> float:
    return min(value, MOST_S) if math.isfinite(value) and value > 0 else 0.0


def duration(seconds: float) -> str:
    """Seconds in readable units: ``0.25 s``, ``90 s``, ``25 min``, ``3.5 h``, ``12 days``."""
    for unit_s, name, least_s in ((DAY_S, "days", 2 * DAY_S), (3600.0, "h", 7200.0), (60.0, "min", 120.0)):
        if seconds >= least_s:
            return f"{seconds / unit_s:.3g} {name}" if seconds < 1000 * unit_s else f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.3g} s"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction >= 1e-4 else "less than 0.01 %"


# --- The mean time between failures, and how sure of it one can be after so few of them ---
# For failures that come independently at a constant rate, their number in a time T has Poisson's distribution. The
# limits are the exact ones, half of a quantile of chi-square: F. Garwood, "Fiducial limits for the Poisson
# distribution", Biometrika 28 (1936). They are found by bisection of the distribution itself, so that no table of
# chi-square is needed.

_PRECISION = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtbf:
    """Seconds between two failures, with a confidence interval; None: no failure was seen, there is no upper limit."""

    mean_s: float | None
    low_s: float
    high_s: float | None
    confidence: float


def mtbf_of(failures: int, exposed_s: float, *, confidence: float = 0.95) -> Mtbf | None:
    """From ``failures`` seen in ``exposed_s`` seconds; None where no time was observed.

    Without any failure only the lower limit exists, with the whole doubt on its side.
    """
    if not 0 < exposed_s < math.inf or failures < 0:
        return None
    doubt = (1.0 - confidence) / (2 if failures else 1)
    low_s = exposed_s / _upper_mean(failures, doubt)
    if not failures:
        return Mtbf(mean_s=None, low_s=low_s, high_s=None, confidence=confidence)
    high_s = exposed_s / _lower_mean(failures, doubt)
    return Mtbf(mean_s=exposed_s / failures, low_s=low_s, high_s=high_s, confidence=confidence)


def _upper_mean(number: int, doubt: float) -> float:
    """The mean with which so few events, or fewer, have the probability ``doubt``."""
    return _bisected(lambda mean: mean <= number or _at_most(number, mean) > doubt, number)


def _lower_mean(number: int, doubt: float) -> float:
    """The mean with which so many events, or more, have the probability ``doubt``."""
    return _bisected(lambda mean: mean < number and _at_least(number, mean) < doubt, number)


def _bisected(is_below: Callable[[float], bool], number: int) -> float:
    low, high = 0.0, 20.0 + 4.0 * number
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _at_most(number: int, mean: float) -> float:
    """Probability of ``number`` events or fewer, with more of them expected: terms fall from the first one on."""
    term, total, k = 1.0, 0.0, number
    while k >= 0 and term > _PRECISION * total:
        total += term
        term, k = term * k / mean, k - 1
    return total * _probability(number, mean)


def _at_least(number: int, mean: float) -> float:
    """Probability of ``number`` events or more, with fewer of them expected."""
    term, total, k = 1.0, 0.0, number
    while term > _PRECISION * total:
        total += term
        k += 1
        term *= mean / k
    return total * _probability(number, mean)


def _probability(number: int, mean: float) -> float:
    return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) if mean > 0 else float(number == 0)


# --- Recommended settings from measurements: the lead of Slurm's signal, and the checkpoint interval ---

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
