"""When a standby may claim a run, and when its supervisor must take itself for cut off."""

from __future__ import annotations

import pytest

from slurmft.policy.stop import LEASE_S, Silence, choose, is_valid, may_claim


@pytest.mark.parametrize(("unheard_s", "age_s", "may"), [
    (LEASE_S, LEASE_S, True),
    (LEASE_S - 0.1, 100.0, False),
    (100.0, LEASE_S - 0.1, False),
    (100.0, None, False),
])  # fmt: skip
def test_both_ways_must_be_silent_and_unknown_is_not(unheard_s: float, age_s: float | None, may: bool):
    assert may_claim(Silence(unheard_s=unheard_s, lease_age_s=age_s)) is may


def test_either_way_keeps_the_lease():
    assert is_valid(now_s=100.0, file_at_s=0.0, heard_at_s=99.0)
    assert is_valid(now_s=100.0, file_at_s=99.0, heard_at_s=0.0)
    assert not is_valid(now_s=100.0, file_at_s=100.0 - LEASE_S, heard_at_s=0.0)


def test_the_first_other_node_is_chosen():
    assert choose(["n1", "n2", "n3"], "n1", ()) == "n2"
    assert choose(["n1", "n2", "n3"], "n1", {"n2"}) == "n3"
    assert choose(["n1", "n2"], "n2", {"n1"}) is None
