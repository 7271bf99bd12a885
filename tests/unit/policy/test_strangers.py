"""Which of the connections that have not proved themselves goes, when there are too many."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.values import Strangers


def test_the_oldest_of_its_own_address_goes_first():
    strangers: Strangers[str] = Strangers(10, 2)
    assert strangers.admit("a1", "10.0.0.1") == []
    assert strangers.admit("b1", "10.0.0.2") == []
    assert strangers.admit("a2", "10.0.0.1") == []
    assert strangers.admit("a3", "10.0.0.1") == ["a1"]
    assert len(strangers) == 3


def test_the_one_with_the_most_pays_for_a_new_address():
    strangers: Strangers[str] = Strangers(4, 3)
    for name in ("b1", "a1", "a2", "a3"):
        strangers.admit(name, f"10.0.0.{name[0]}")
    assert strangers.admit("c1", "10.0.0.c") == ["a1"]
    assert strangers.admit("d1", "10.0.0.d") == ["a2"]
    assert strangers.admit("e1", "10.0.0.e") == ["b1"]


def test_one_that_has_proved_itself_is_never_closed():
    strangers: Strangers[int] = Strangers(3, 3)
    strangers.admit(0, "10.0.0.1")
    strangers.forget(0)
    closed = [each for number in range(1, 100) for each in strangers.admit(number, "10.0.0.1")]
    assert 0 not in closed
    assert len(strangers) == 3


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one, other, are_same):
    strangers: Strangers[int] = Strangers(10, 1)
    strangers.admit(1, one)
    assert strangers.admit(2, other) == ([1] if are_same else [])


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans())), st.integers(1, 6), st.integers(1, 4))
def test_the_quotas_hold_and_no_address_is_pushed_out_by_one_that_has_more(arrivals, at_most, per_address):
    strangers: Strangers[int] = Strangers(at_most, per_address)
    waiting: dict[int, str] = {}
    for number, (address, proves_itself) in enumerate(arrivals):
        waiting[number] = address
        for closed in strangers.admit(number, address):
            counts = Counter(waiting.values())
            its_address = waiting.pop(closed)
            assert closed != number
            assert its_address == address or counts[its_address] == max(counts.values())
        assert len(strangers) == len(waiting) <= at_most
        assert max(Counter(waiting.values()).values()) <= per_address
        if proves_itself:
            strangers.forget(number)
            del waiting[number]
