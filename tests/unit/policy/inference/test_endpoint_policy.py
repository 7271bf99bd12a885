"""The policy of a handover, case by case."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.inference import WINDOW_S, NodeDeaths
from slurmft.policy.serving import (
    MAX_TRIES,
    Bounds,
    Readiness,
    Scale,
    Step,
    Successor,
    changed_keys,
    due_s,
    lead_s,
    next_step,
    refused_keys,
    waits_for,
)

CALM = {
    "now_s": 1000, "due_s": 2000, "successor": Successor.NONE, "alive_since_s": None, "start_limit_s": 300, "tries": 0,
    "again_s": 0,
}  # fmt: skip


@of_each(
    changes__step=[
        ({}, Step.WAIT),
        ({"due_s": None}, Step.WAIT),
        ({"now_s": 2000}, Step.SUBMIT),
        ({"now_s": 2000, "again_s": 2030}, Step.WAIT),
        ({"now_s": 2000, "tries": MAX_TRIES}, Step.GIVE_UP),
        ({"now_s": 2000, "successor": Successor.WAITING}, Step.WAIT),
        ({"now_s": 2000, "successor": Successor.UNKNOWN}, Step.WAIT),
        ({"now_s": 2000, "successor": Successor.ALIVE, "alive_since_s": 1800}, Step.WAIT),
        ({"now_s": 2000, "successor": Successor.ALIVE, "alive_since_s": None}, Step.WAIT),
        ({"now_s": 2101, "successor": Successor.ALIVE, "alive_since_s": 1800}, Step.REPLACE),
        ({"now_s": 2000, "successor": Successor.GONE, "tries": 1}, Step.SUBMIT),
        ({"now_s": 2000, "successor": Successor.GONE, "tries": MAX_TRIES}, Step.GIVE_UP),
    ]
)
def test_the_next_step(changes: dict[str, object], step: Step) -> None:
    assert next_step(**CALM | changes) is step  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configured", "startup", "lead"), [(100.0, None, 100.0), (100.0, 600.0, 100.0), (None, None, None),
                                        (None, 200.0, 120 + 30 + 300 + 60)]
)  # fmt: skip
def test_the_lead(configured: float | None, startup: float | None, lead: float | None) -> None:
    assert lead_s(configured, startup_s=startup, stop_s=120) == lead


@pytest.mark.parametrize(
    ("lead", "ends", "due"),
    [(None, 1000, None), (100, None, None), (100, 1000, 900), (600, 1000, 500), (5000, 1000, 500)],
)
def test_it_is_not_due_in_the_first_half_of_a_job(lead: float | None, ends: float | None, due: float | None) -> None:
    assert due_s(lead, owned_since_s=0, ends_s=ends) == due


@of_each(
    successor__since__left__waits=[
        (Successor.ALIVE, 60, 40, True),
        (Successor.ALIVE, 71, 29, False),
        (Successor.WAITING, 5, 95, True),
        (Successor.WAITING, 11, 89, False),
        (Successor.NONE, 5, 95, True),
        (Successor.GONE, 5, 95, False),
    ]
)
def test_a_stop_goes_on_serving_for_a_successor_that_may_come(
    successor: Successor, since: float, left: float, waits: bool
) -> None:
    assert waits_for(successor, since_s=since, left_s=left, whole_s=100) is waits


@of_each(
    ready__down__routers__suffices=[
        (4, 0, 2, True),
        (3, 0, 2, False),
        (3, 1, 2, True),
        (4, 0, 1, False),
        (1, 3, 2, False),
        (0, 4, 2, False),
    ]
)
def test_a_candidate_takes_over_when_all_that_can_be_is_ready(
    ready: int, down: int, routers: int, suffices: bool
) -> None:
    found = Readiness(ready=ready, down=down, expected=4, routers=routers, routers_wanted=2)
    assert found.suffices(0.5) is suffices


# --- Which node is suspected when engines die ---


NODES = ("a", "b", "c")
SHORT = WINDOW_S / 10


@pytest.mark.parametrize(
    ("deaths", "nodes", "suspected"),
    [
        ([], NODES, None),
        ([("a", 0), ("a", 1)], NODES, None),
        ([("a", 0), ("a", 1), ("a", 2)], NODES, "a"),
        ([("a", 0), ("a", SHORT), ("a", WINDOW_S)], NODES, "a"),
        ([("a", 0), ("a", SHORT), ("a", WINDOW_S + 1)], NODES, None),
        ([("a", 0), ("a", WINDOW_S), ("a", 2 * WINDOW_S), ("a", 3 * WINDOW_S)], NODES, None),
        ([("a", 0), ("b", 1), ("a", 2), ("a", 3)], NODES, "a"),
        ([("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4)], NODES, None),
        ([("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4), ("a", 5), ("a", 6), ("a", 7)], NODES, "a"),
        ([("a", 0), ("b", 0), ("c", 0)] * 5, NODES, None),
        ([("a", 0), ("a", 1), ("a", 2)], ("a",), None),
        ([("a", 0), ("a", 1), ("a", 2)], ("b", "c"), None),
        ([("b", -2 * WINDOW_S), ("a", 0), ("a", 1), ("a", 2)], NODES, "a"),
    ],
    ids=["none", "two", "three", "three within the window", "three, one too old", "one now and then", "one elsewhere",
         "two elsewhere", "three times those elsewhere", "all alike", "no other node", "a node that is gone",
         "elsewhere long ago"],
)  # fmt: skip
def test_table(deaths: list[tuple[str, float]], nodes: tuple[str, ...], suspected: str | None) -> None:
    known, now_s = NodeDeaths(), 0.0
    for node, at_s in deaths:
        known, now_s = known.died(node, at_s, in_flight=4), at_s
    assert known.suspect(nodes, now_s) == suspected


def test_a_request_that_was_alone_explains_a_death_and_none_in_flight_does_not() -> None:
    known = NodeDeaths()
    for at_s in range(10):
        known = known.died("a", at_s, in_flight=1)
    assert known.suspect(NODES, 10) is None
    for at_s in range(10, 13):
        known = known.died("a", at_s, in_flight=0)
    assert known.suspect(NODES, 13) == "a"


def test_what_was_held_against_a_node_is_not_counted_again_and_old_deaths_are_not_kept() -> None:
    known = NodeDeaths()
    for at_s in range(3):
        known = known.died("a", at_s, in_flight=2)
    known = known.forgiven("a").died("a", 4, in_flight=2)
    assert known.suspect(NODES, 4) is None
    for number in range(1000):
        known = known.died("b", WINDOW_S * (2 + number), in_flight=2)
    assert len(known.deaths) <= 2


# --- Replicas follow the load: at once upwards, and after a time of rest downwards ---


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


# --- What a rolling update may change ---


@pytest.mark.parametrize(
    ("before", "after", "changed", "refused"),
    [
        ({"nodes": 2}, {"nodes": 2}, [], []),
        ({"nodes": 2}, {"nodes": 3}, ["nodes"], ["nodes"]),
        (
            {"inference": {"engine": {"command": ["a"]}, "concurrency": 1}},
            {"inference": {"engine": {"command": ["b"]}, "concurrency": 2}},
            ["inference.concurrency", "inference.engine.command"],
            ["inference.concurrency"],
        ),
        (
            {"inference": {"engine": {"token_file": None}}},
            {"inference": {"engine": {"token_file": "/t", "more": 1}}},
            ["inference.engine.more", "inference.engine.token_file"],
            ["inference.engine.token_file"],
        ),
        ({"inference": {"engine": {}}}, {"inference": None}, ["inference"], ["inference"]),
    ],
)
def test_only_the_engine_may_change(
    before: dict[str, Any], after: dict[str, Any], changed: list[str], refused: list[str]
) -> None:
    assert changed_keys(before, after) == changed
    assert refused_keys(changed) == refused
