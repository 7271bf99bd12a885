"""How much later than now a requeued job is to begin: what was enough before."""

from __future__ import annotations

from collections.abc import Iterable

FELL_BACK_S = (118.0, 200.0)
"""Seconds from a requeue to the next start that tell of a begin time which was over too soon: Slurm's own wait of 121
(``slurmctld/job_mgr.c``, batch_requeue_fini), from the moment at which the job's last node is done, and a scheduler's
interval. A queue that was just that long is taken for it, too; that costs seconds."""

LONGEST_S = 60


def delay_that_holds(asked_s: int, past: Iterable[tuple[int, float]]) -> int:
    """Seconds to ask for: ``asked_s``, or twice what was too short.

    Args:
        past: of each earlier requeue, the delay it had asked for, and the seconds until the job began.
    """
    shortest, longest = FELL_BACK_S
    too_short = [delay_s for delay_s, took_s in past if shortest <= took_s - delay_s <= longest]
    return max([asked_s, *(min(2 * delay_s, LONGEST_S) for delay_s in too_short)])
