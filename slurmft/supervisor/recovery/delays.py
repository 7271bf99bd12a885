"""How long a retry waits: exponential backoff with jitter, so that many jobs with one trouble do not return as one.

The growth is tenacity's ``wait_exponential_jitter``.
"""

from __future__ import annotations

import time

from slurmft.config.config import RunConfig
from slurmft.supervisor.own_signals import any_kept

LONGEST_RESTART_S = 10.0
"""Nodes that wait cost more than nodes that another job has meanwhile."""

LOOK_S = 0.05


def retry_delay_s(config: RunConfig, failures: int) -> float:
    """Seconds before the retry that follows ``failures`` earlier ones without progress; 0 for the first."""
    first_s, longest_s = config.fault_tolerance.retry_delay_s, config.fault_tolerance.max_retry_delay_s
    if failures <= 0 or first_s <= 0:
        return 0.0
    from tenacity import RetryCallState, Retrying, wait_exponential_jitter  # only failures pay for the import

    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = failures
    return float(wait_exponential_jitter(initial=first_s, max=max(first_s, longest_s), jitter=first_s)(state))


def wait_before_restart(config: RunConfig, restarts: int) -> float:
    """Wait with the nodes in hand, unless a signal comes; returns the seconds."""
    began = time.monotonic()
    until = began + min(retry_delay_s(config, restarts), LONGEST_RESTART_S)
    while time.monotonic() < until and not any_kept():
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
    return time.monotonic() - began
