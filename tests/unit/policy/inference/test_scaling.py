"""Replicas follow the load: at once upwards, and after a time of rest downwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.serving import Bounds, Scale

BOUNDS = Bounds(least=0, most=4, concurrency=10, idle_s=60.0)
LOADS = st.lists(st.tuples(st.none() | st.integers(0, 100), st.floats(0.1, 100.0)), max_size=60)


@pytest.mark.parametrize(("requests", "needed"), [(0, 0), (1, 1), (10, 1), (11, 2), (1000, 4)])
def test_each_request_has_a_place(requests: int, needed: int) -> None:
    assert Scale(0).saw(requests, BOUNDS, 0.0).wanted == needed


def test_it_shrinks_to_what_was_needed_in_the_time_of_rest() -> None:
    scale = Scale(4)
    for now_s, requests in ((0.0, 0), (30.0, 11), (59.0, 0)):
        scale = scale.saw(requests, BOUNDS, now_s)
        assert scale.wanted == 4
    assert scale.saw(0, BOUNDS, 60.0).wanted == 2


def test_what_is_not_known_stops_nothing() -> None:
    scale = Scale(4).saw(0, BOUNDS, 0.0).saw(None, BOUNDS, 59.0)
    assert scale.saw(0, BOUNDS, 61.0).wanted == 4


@given(LOADS, st.integers(0, 4))
def test_it_stays_in_its_bounds_has_a_place_for_each_request_and_rests_before_it_shrinks(
    loads: list[tuple[int | None, float]], least: int
) -> None:
    bounds = Bounds(least=least, most=4, concurrency=10, idle_s=60.0)
    scale, now_s, past = Scale(least), 0.0, list[tuple[float, int]]()
    for requests, pause_s in loads:
        before, now_s = scale, now_s + pause_s
        scale = scale.saw(requests, bounds, now_s)
        assert bounds.least <= scale.wanted <= bounds.most
        if requests is None:
            assert scale.wanted == before.wanted
            continue
        past.append((now_s, bounds.needed(requests)))
        assert scale.wanted >= past[-1][1]
        if scale.wanted < before.wanted:
            assert scale.wanted >= max(needed for at_s, needed in past if at_s >= now_s - bounds.idle_s)
