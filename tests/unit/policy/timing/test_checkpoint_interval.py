"""How far apart checkpoints should be."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmft.policy.checkpoints import (
    DAY_S,
    LONGEST_S,
    FailureHistory,
    daly_s,
    duration,
    mtbf_of,
    mtbf_s,
    plan,
    typical_cost_s,
    young_s,
)
from slurmft.policy.stop import longest_silence_s, ping_interval_s, report_interval_s

COSTS = st.floats(1e-3, 1e3)
MTBFS = st.floats(60, 1e8)
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("cost_s", "mean_s", "young", "daly"),
    [
        (1.0, 86_400.0, 415.69, 415.03),
        (60.0, 86_400.0, 3219.94, 3180.12),
        (600.0, 3600.0, 2078.46, 1697.71),  # 2078.461 x (1 + 0.288675 / 3 + 0.083333 / 9) - 600
        (7200.0, 3600.0, 7200.0, 3600.0),  # a save that takes twice the time between failures: Daly's last case
    ],
    ids=["cheap", "a minute", "dear", "hopeless"],
)
def test_the_formulas_give_what_the_papers_say(cost_s, mean_s, young, daly):
    assert young_s(cost_s, mean_s) == pytest.approx(young, rel=1e-5)
    assert daly_s(cost_s, mean_s) == pytest.approx(daly, rel=1e-4)


def wasted(interval_s: float, cost_s: float, mean_s: float) -> float:
    """Seconds for one second of work with exponential failures, restarts that cost nothing (Daly's model)."""
    return mean_s * math.expm1((interval_s + cost_s) / mean_s) / interval_s


@given(cost_s=st.floats(0.01, 100), mean_s=st.floats(1e3, 1e7), other=st.floats(0.1, 10))
def test_no_other_interval_is_much_better_in_the_exact_model(cost_s, mean_s, other):
    best = daly_s(cost_s, mean_s)
    assert wasted(best, cost_s, mean_s) <= wasted(best * other, cost_s, mean_s) * 1.001


@given(cost_s=COSTS, mean_s=MTBFS, factor=st.floats(1, 100))
def test_dearer_saves_and_rarer_failures_never_shorten_the_interval(cost_s, mean_s, factor):
    here = plan(cost_s, mean_s).interval_s
    assert plan(cost_s, mean_s * factor).interval_s >= here * (1 - 1e-9)
    if cost_s * factor < mean_s / 8:  # beyond it, half of the time is saving
        assert plan(cost_s * factor, mean_s).interval_s >= here * (1 - 1e-9)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_whatever_was_measured_the_interval_can_be_kept(cost_s, mean_s, step_s, durable_s, longest_s):
    found = plan(cost_s, mean_s, step_s=step_s, durable_s=durable_s, longest_s=longest_s)
    limit = longest_s if math.isfinite(longest_s) and longest_s > 0 else LONGEST_S
    assert 0 < found.interval_s <= limit
    assert 0 <= found.overhead_fraction <= 1
    assert 0 <= found.lost_fraction <= 1
    assert str(found).startswith("every ")
    assert "nan" not in str(found)
    assert "inf" not in str(found)


def test_what_limits_the_interval_is_said():
    assert plan(0.1, 50 * DAY_S, step_s=1).limited_by == ""
    assert plan(10, 50 * DAY_S).limited_by == "no longer than 60 min"
    assert plan(0.1, 1000, durable_s=60).limited_by == "no shorter than a write takes"
    assert plan(0.1, 1000, step_s=30).interval_s == 30
    assert plan(0.001, 1).interval_s == 1


def test_it_says_in_words_what_is_to_be_expected():
    assert str(plan(0.1, DAY_S, durable_s=3.0)) == (
        "every 2.19 min: saving takes 0.076 % of the time, a failure undoes 68.7 s on average, "
        "0.08 % of the time with one in 24 h"
    )


def test_an_unseen_run_fails_as_the_prior_says_and_what_is_seen_moves_it():
    assert mtbf_s(FailureHistory(), 1) == 50 * DAY_S
    assert mtbf_s(FailureHistory(), 100) == DAY_S / 2
    assert mtbf_s(FailureHistory(failures=1, node_s=50 * DAY_S), 1) == 50 * DAY_S
    assert mtbf_s(FailureHistory(failures=0, node_s=950 * DAY_S), 1) == 1000 * DAY_S
    assert mtbf_s(FailureHistory(failures=99, node_s=50 * DAY_S), 1) == DAY_S
    assert mtbf_s(FailureHistory(failures=10**4, node_s=10**4 * DAY_S), 10**4) == pytest.approx(DAY_S / 1e4, rel=0.01)


@given(st.integers(0, 10**6), ANYTHING, st.integers(-5, 10**5))
@example(0, 1.7976931348623157e308, 0)
def test_the_time_between_failures_is_a_time_whatever_the_journal_says(failures, node_s, nodes):
    seen = FailureHistory(failures=failures, node_s=node_s)
    assert 0 < mtbf_s(seen, nodes) < math.inf
    assert mtbf_s(FailureHistory(failures=failures + 1, node_s=node_s), nodes) < mtbf_s(seen, nodes)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [([], None), ([9.0], 9.0), ([9.0, 1.0], 1.0), ([9.0, 1.0, 3.0], 2.0), ([9.0, 8.0, 1, 1, 1, 50, 1], 1)],
    ids=["none", "one", "the first does not count", "middle", "newest five"],
)
def test_what_a_save_costs_is_the_middle_of_the_newest(costs, expected):
    assert typical_cost_s(costs) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (90, "90 s"), (1500, "25 min"), (12600, "3.5 h"), (10 * DAY_S, "10 days"),
     (5000 * DAY_S, "5000 days"), (0.0, "0 s")],
    ids=["quarter", "seconds", "minutes", "hours", "days", "years", "none"],
)  # fmt: skip
def test_durations_are_said_as_people_do(seconds, text):
    assert duration(seconds) == text


# --- The limits of the mean time between failures against a table of chi-square, and against simulated failures ---


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


# --- How often agents and their supervisor speak ---


@pytest.mark.parametrize(
    ("agents", "report_s", "ping_s"), [(1, 0.5, 5), (50, 0.5, 5), (1000, 10, 10), (10_000, 100, 15)]
)
def test_the_rate_is_bounded_and_the_lease_outlasts_pings(agents, report_s, ping_s):
    assert report_interval_s(agents) == report_s
    assert longest_silence_s(agents) == 3 * report_s
    assert ping_interval_s(agents, lease_s=60.0) == ping_s


def test_a_short_lease_is_kept_whatever_the_size():
    assert ping_interval_s(10_000, lease_s=4.0) == 1.0
