"""The limits of the mean time between failures against a table of chi-square, and against simulated failures."""

from __future__ import annotations

import math
import random

import pytest

from slurmft.policy.interval import mtbf_of


@pytest.mark.parametrize(
    ("failures", "low", "high"),
    [(1, 0.025318, 5.571643), (2, 0.242209, 7.224688), (10, 4.795389, 18.390356), (100, 81.363991, 121.626794)],
)
def test_the_limits_are_half_of_quantiles_of_chi_square(failures: int, low: float, high: float) -> None:
    """As in tables of exact limits of a Poisson mean, such as Garwood's."""
    found = mtbf_of(failures, 3600.0)
    assert found is not None and found.high_s is not None
    assert 3600 / found.high_s == pytest.approx(low, rel=1e-5)
    assert 3600 / found.low_s == pytest.approx(high, rel=1e-5)
    assert found.mean_s == 3600 / failures


def test_without_a_failure_there_is_a_lower_limit_alone() -> None:
    found = mtbf_of(0, 3000.0)
    assert found is not None and (found.mean_s, found.high_s) == (None, None)
    assert 3000 / found.low_s == pytest.approx(2.995732), "minus the logarithm of 5 %: the rule of three"


@pytest.mark.parametrize(("failures", "exposed_s"), [(0, 0.0), (3, -1.0), (-1, 5.0), (1, math.inf), (1, math.nan)])
def test_nothing_follows_from_nothing(failures: int, exposed_s: float) -> None:
    assert mtbf_of(failures, exposed_s) is None


def test_many_failures_cost_no_time_and_make_it_sure() -> None:
    found = mtbf_of(1_000_000, 1e9)
    assert found is not None and found.high_s is not None
    assert found.low_s == pytest.approx(1000, rel=0.003) and found.high_s == pytest.approx(1000, rel=0.003)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    dice, held, tries = random.Random(5), 0, 1000
    for _ in range(tries):
        failures, at_s = 0, dice.expovariate(1 / 100.0)
        while at_s < 500:
            failures, at_s = failures + 1, at_s + dice.expovariate(1 / 100.0)
        found = mtbf_of(failures, 500.0)
        assert found is not None
        held += found.low_s <= 100 <= (found.high_s or float("inf"))
    assert held >= 0.93 * tries
