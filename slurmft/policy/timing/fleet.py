"""How often agents report: a large fleet must not cost its supervisor more than a small one."""

from __future__ import annotations

REPORT_S = 0.5
REPORTS_PER_S = 100
"""A report of 8 ranks costs about 0.3 ms; above that rate agents report less often."""

LONGEST_PING_S = 5.0


def report_interval_s(agents: int) -> float:
    """Seconds between two reports of one agent."""
    return max(REPORT_S, agents / REPORTS_PER_S)


def longest_silence_s(agents: int) -> float:
    """Seconds without a report that are still no sign of a lost agent: two reports may be late."""
    return 3 * report_interval_s(agents)


def ping_interval_s(agents: int, *, lease_s: float) -> float:
    """Seconds between two pings of the supervisor to each agent; four of them fit into a lease."""
    return min(max(LONGEST_PING_S, agents / REPORTS_PER_S), lease_s / 4)
