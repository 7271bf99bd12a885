"""torch's own watchdog over NCCL: what acts first on a collective that hangs, and the settings that ensure it.

torch runs two threads in every rank that has a NCCL group. The watchdog ends the process when a collective has taken
longer than its group's timeout, or when NCCL reports an error. The monitor ends it when the watchdog itself gives no
sign of life. Names and defaults are those of torch 2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping

HANDLING_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
OLD_HANDLING_VARIABLE = "NCCL_ASYNC_ERROR_HANDLING"
"""torch still accepts it, with a warning."""

HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"

NO_HANDLING, TEAR_DOWN, CLEAN_UP_ONLY, SKIP_CLEAN_UP = "0", "1", "2", "3"
"""Values of HANDLING_VARIABLE: do nothing; abort and end; abort and go on; end without an abort (torch's default)."""

MIN_HEARTBEAT_S = 480
"""torch's default."""

DUMP_S = 60
"""For the watchdog's own dump of the flight recorder, before the monitor may think that it hangs."""

BEFORE_THE_KILL_S = 20.0
"""The last look at all ranks, their dumps, and the copy of their last step, at the longest."""


def heartbeat_s(timeout_s: float, limit_s: float) -> int:
    """HEARTBEAT_VARIABLE with which the monitor is the last to act: after the agent, and after a dump."""
    return max(MIN_HEARTBEAT_S, round(timeout_s + DUMP_S), round(limit_s + BEFORE_THE_KILL_S))


def variables(environment: Mapping[str, str], *, timeout_s: float, limit_s: float) -> dict[str, str]:
    """The variables for workers with this environment; the user's own values stay."""
    wanted = {HANDLING_VARIABLE: SKIP_CLEAN_UP, HEARTBEAT_VARIABLE: str(heartbeat_s(timeout_s, limit_s))}
    if OLD_HANDLING_VARIABLE in environment:
        del wanted[HANDLING_VARIABLE]
    return {name: value for name, value in wanted.items() if name not in environment}


def why_not_to_trust(environment: Mapping[str, str]) -> str:
    """Why weights of a rank whose collective has failed may be wrong; empty where they may not.

    An abort lets the device go on behind the collective, with a gradient that was never reduced: for a moment before
    the process ends (1), or for good (2).
    """
    handling = environment.get(HANDLING_VARIABLE) or environment.get(OLD_HANDLING_VARIABLE, SKIP_CLEAN_UP)
    if handling in (TEAR_DOWN, CLEAN_UP_ONLY):
        return f"{HANDLING_VARIABLE}={handling} lets the device go on with gradients that were never reduced"
    return ""
