"""Which node is suspected when engines die."""

from __future__ import annotations

import pytest

from slurmft.policy.inference import WINDOW_S, NodeDeaths

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
