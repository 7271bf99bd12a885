"""What a repeated result says: comparison, transitions, spikes, statistics."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.reruns import (
    LossWindow,
    Phase,
    RerunOutcome,
    Seen,
    after_rerun,
    difference,
    largest_difference,
    on_suspects,
    strikes,
    variability,
)
from slurmft.policy.verdict import Suspect

INF, NAN = math.inf, math.nan
numbers = st.floats(allow_nan=True, allow_infinity=True)


@of_each(
    first__again__expected=[
        (1.0, 1.0, 0.0),
        (0.0, -0.0, 0.0),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (INF, -INF, INF),
        (NAN, INF, INF),
        (NAN, 1.0, INF),
        (1.0, INF, INF),
        (1.0, -1.0, 2.0),
        (1.0, 3.0, 1.0),
        (-1.0, -3.0, 1.0),
        (0.0, 1.0, 2.0),
        (0.0, 5e-324, 2.0),
        (1.7e308, -1.7e308, 2.0),
        (1.7e308, 0.85e308, 2 / 3),
    ]
)
def test_how_far_apart_two_results_are(first, again, expected):
    assert difference(first, again) == pytest.approx(expected)
    assert difference(again, first) == pytest.approx(expected)


@given(numbers, numbers)
def test_only_equal_results_are_not_apart_at_all(first, again):
    apart = difference(first, again)
    assert apart >= 0.0  # never NaN, never an error
    assert (apart == 0.0) == (first == again or (math.isnan(first) and math.isnan(again)))
    assert apart <= 2.0 or not (math.isfinite(first) and math.isfinite(again))


def test_several_values_are_as_far_apart_as_the_worst_of_them():
    assert largest_difference([1.0, NAN, 2.0], [1.0, NAN, 2.0]) == 0.0
    assert largest_difference([1.0, 1.0], [1.0, 3.0]) == pytest.approx(1.0)
    assert largest_difference([1.0], [1.0, 1.0]) == INF
    assert largest_difference([], []) == 0.0


N, R, D, X, U = Seen.NOTHING, Seen.REPRODUCED, Seen.DIFFERENT, Seen.DIFFERENT_REJECTED, Seen.UNKNOWN


@of_each(
    phase__seen__others__outcome=[
        (Phase.IN_PLACE, [N, D], False, RerunOutcome.TRANSIENT),
        (Phase.IN_PLACE, [D, D], True, RerunOutcome.AGAIN),
        (Phase.IN_PLACE, [N, R], False, RerunOutcome.UNDECIDED),
        (Phase.IN_PLACE, [D, R], True, RerunOutcome.UNDECIDED),
        (Phase.IN_PLACE, [X], False, RerunOutcome.UNDECIDED),
        (Phase.IN_PLACE, [R, U], False, RerunOutcome.INCONCLUSIVE),
        (Phase.ELSEWHERE, [N, D], False, RerunOutcome.PERSISTENT),
        (Phase.ELSEWHERE, [D, N], True, RerunOutcome.AGAIN),
        (Phase.ELSEWHERE, [R, N], True, RerunOutcome.CORRECT),
        (Phase.ELSEWHERE, [R, D], False, RerunOutcome.CORRECT),
        (Phase.ELSEWHERE, [D, X], False, RerunOutcome.INCONCLUSIVE),
        (Phase.ELSEWHERE, [R, X], False, RerunOutcome.INCONCLUSIVE),
        (Phase.ELSEWHERE, [D, U], False, RerunOutcome.INCONCLUSIVE),
    ]
)
def test_what_follows_a_rerun(phase, seen, others, outcome):
    assert after_rerun(phase, seen, rejected_others=others) is outcome


@given(st.lists(st.sampled_from(Seen), min_size=1), st.booleans())
def test_hardware_is_called_faulty_only_when_nothing_contradicts(seen, others):
    if after_rerun(Phase.ELSEWHERE, seen, rejected_others=others) is RerunOutcome.PERSISTENT:
        assert set(seen) <= {Seen.NOTHING, Seen.DIFFERENT}


def on(node: str, gpu: str = "") -> Suspect:
    return Suspect(node=node, gpu=gpu)


@of_each(
    here__suspect__same=[
        (on("n1"), on("n1"), True),
        (on("n1"), on("n2"), False),
        (on("n1", "GPU-a"), on("n1", "GPU-a"), True),
        (on("n1", "GPU-b"), on("n1", "GPU-a"), False),  # another GPU of the node is other hardware
        (on("n2", "GPU-a"), on("n1", "GPU-a"), True),  # a GPU that was moved is still the same
        (on("n1"), on("n1", "GPU-a"), True),  # unknown: it may be that one
    ]
)
def test_what_counts_as_the_same_hardware(here, suspect, same):
    assert on_suspects([here], [suspect]) == ([here] if same else [])


# spikes


def window(losses: list[float], **options: float) -> LossWindow:
    made = LossWindow(**options)
    for loss in losses:
        made.add(loss)
    return made


def test_nothing_is_a_spike_before_there_are_enough_losses():
    assert window([1.0] * 19).bound == INF
    assert window([1.0] * 20).bound < 2.0


def test_a_spike_lies_above_the_median_by_robust_deviations():
    losses = [1.0 + 0.1 * (number % 3) for number in range(20)]
    deviation = statistics.median([abs(one - statistics.median(losses)) for one in losses])
    assert window(losses, factor=5).bound == pytest.approx(statistics.median(losses) + 5 * 1.4826 * deviation)


def test_a_few_wild_losses_do_not_move_the_bound():
    calm = [1.0 + 0.01 * (number % 7) for number in range(40)]
    wild = [1e30 if number in (3, 9) else one for number, one in enumerate(calm)]
    assert window(wild).bound == pytest.approx(window(calm).bound, rel=0.1)


@given(st.lists(numbers, max_size=150), st.integers(20, 60))
def test_the_window_goes_on_where_its_state_was_taken(losses, size):
    whole, first = LossWindow(size), LossWindow(size)
    for loss in losses[:70]:
        whole.add(loss)
        first.add(loss)
    second = LossWindow(size)
    second.load_state_dict(first.state_dict())
    for loss in losses[70:]:
        whole.add(loss)
        second.add(loss)
    assert second.state_dict() == whole.state_dict()
    assert not math.isnan(whole.bound)


# statistics and injection


def test_the_statistics_are_values_that_occurred():
    found = variability([0.0] * 90 + [0.5] * 9 + [2.0])
    assert (found.total, found.identical, found.max) == (100, 90, 2.0)
    assert (found.p50, found.p90, found.p99) == (0.0, 0.0, 0.5)
    assert found.avg == pytest.approx(0.065)
    assert str(variability([])).startswith("0/0 identical")


@given(st.lists(st.floats(0, 2) | st.just(INF), min_size=1))
def test_percentiles_are_in_order(differences):
    found = variability(differences)
    assert found.p50 <= found.p90 <= found.p99 <= found.max == max(differences)


def test_errors_strike_about_as_often_as_asked_and_always_the_same_ones():
    struck = [step for step in range(10_000) if strikes(1, 0, step, 0, 100)]
    assert 60 < len(struck) < 140
    assert struck == [step for step in range(10_000) if strikes(1, 0, step, 0, 100)]
    assert struck != [step for step in range(10_000) if strikes(2, 0, step, 0, 100)]
    assert not any(strikes(1, 0, step, 0, 0) for step in range(100))
