"""What several lives of a run come to: means with their confidence intervals, and the published formula beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from statistics import NormalDist, fmean, stdev

from slurmft.planning.scenario import DAY_S, Scenario
from slurmft.planning.simulation import CATEGORIES, Life, live

CONFIDENCE = 0.95
_EXACT_T = (12.706, 4.303, 3.182, 2.776)
"""Quantiles of Student's t at 97.5 % for 1 to 4 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over lives, and half the width of its 95 % confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.half_width:.3f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One alternative, over all its lives."""

    name: str
    scenario: Scenario
    lives: tuple[Life, ...]
    ettr: Estimate
    """Effective training time ratio: work by wall time, with the queue."""

    goodput: Estimate
    """The same without the queue."""

    days: Estimate
    failures: Estimate
    requeues: Estimate
    restarts: Estimate
    given_up: Estimate
    excluded: Estimate
    formula: float
    """E[ETTR] of the first-order model, without queue, lemons and restarts in the job; 0 where it says less."""

    @property
    def finished(self) -> int:
        """Lives that ended with all the work done."""
        return sum(life.finished for life in self.lives)

    def share(self, category: str) -> float:
        """Mean share of the wall time that went there."""
        return fmean(life.spent_s[category] / life.wall_s if life.wall_s else 0.0 for life in self.lives)


def simulate(name: str, scenario: Scenario, seeds: int, *, workers: int = 1) -> Outcome:
    """Live ``seeds`` lives, and sum them up. The same numbers give the same outcome, on any number of workers."""
    if workers > 1:
        with ProcessPoolExecutor(max_workers=min(workers, seeds)) as pool:
            lives = tuple(pool.map(live, repeat(scenario), range(seeds)))
    else:
        lives = tuple(live(scenario, seed) for seed in range(seeds))

    def of(value: Callable[[Life], float]) -> Estimate:
        return estimate([value(life) for life in lives])

    return Outcome(
        name=name,
        scenario=scenario,
        lives=lives,
        ettr=of(lambda life: life.ettr),
        goodput=of(lambda life: life.goodput),
        days=of(lambda life: life.wall_s / DAY_S),
        failures=of(lambda life: float(sum(life.failures.values()))),
        requeues=of(lambda life: life.requeues),
        restarts=of(lambda life: life.restarts),
        given_up=of(lambda life: life.given_up),
        excluded=of(lambda life: life.excluded),
        formula=expected_ettr(scenario),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, with Student's t: as many values as there are seeds are few."""
    spread = stdev(values) if len(values) > 1 else 0.0
    return Estimate(fmean(values), t_quantile(len(values) - 1) * spread / math.sqrt(len(values)) if spread else 0.0)


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %: M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions", 26.7.5."""
    if degrees <= len(_EXACT_T):
        return _EXACT_T[max(1, degrees) - 1]
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def expected_ettr(scenario: Scenario) -> float:
    """E[ETTR] = (1 - N r (u0 + dt/2)) / (1 + w/dt), at least 0.

    A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024, of a run of N
    nodes with r failures of a node in a second, u0 seconds until it trains again, dt between saves that cost w.
    """
    every_s = scenario.interval_s
    rate_s = math.fsum(scenario.rates_s.values()) * scenario.size.nodes
    if not every_s:
        every_s = math.sqrt(2 * scenario.save_cost_s / rate_s) if rate_s and scenario.save_cost_s else 3600.0
    return max(0.0, (1 - rate_s * (scenario.start_s + every_s / 2)) / (1 + scenario.save_cost_s / every_s))


def shares(outcome: Outcome) -> dict[str, float]:
    """Where the time went, by category; together 1."""
    return {category: outcome.share(category) for category in CATEGORIES}
