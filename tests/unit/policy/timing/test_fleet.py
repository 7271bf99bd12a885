"""How often agents and their supervisor speak."""

from __future__ import annotations

import pytest

from slurmft.policy.stop import longest_silence_s, ping_interval_s, report_interval_s


@pytest.mark.parametrize(
    ("agents", "report_s", "ping_s"), [(1, 0.5, 5), (50, 0.5, 5), (1000, 10, 10), (10_000, 100, 15)]
)
def test_the_rate_is_bounded_and_the_lease_outlasts_pings(agents, report_s, ping_s):
    assert report_interval_s(agents) == report_s
    assert longest_silence_s(agents) == 3 * report_s
    assert ping_interval_s(agents, lease_s=60.0) == ping_s


def test_a_short_lease_is_kept_whatever_the_size():
    assert ping_interval_s(10_000, lease_s=4.0) == 1.0
