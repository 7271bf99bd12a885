"""The begin time of a requeued job, in seconds from now: a delay that was long enough before."""

from __future__ import annotations

from collections.abc import Iterable

FELL_BACK_S = (118.0, 200.0)
"""Seconds from a requeue to the next start that show a begin time which was over too soon: Slurm's own wait of 121
(``slurmctld/job_mgr.c``, batch_requeue_fini), from the moment at which the job's last node is done, and a scheduler's
interval. A queue that was just that long is taken for it, too; that costs seconds."""

LONGEST_S = 60
"""Where even that was too short, something else takes two minutes at each start."""


def delay_that_holds(asked_s: int, past: Iterable[tuple[int, float]]) -> int:
    """Seconds to ask for: ``asked_s``, doubled as long as that much was too short before.

    Args:
        past: of each earlier requeue, the delay it had asked for, and the seconds until the job began.
    """
    shortest, longest = FELL_BACK_S
    too_short = {delay_s for delay_s, took_s in past if shortest <= took_s - delay_s <= longest}
    delay_s = max(1, asked_s)
    # ends of another kind need longer delays: one that was too short for them may be enough here
    while delay_s < LONGEST_S and any(delay_s <= short < 2 * delay_s for short in too_short):
        delay_s = min(2 * delay_s, LONGEST_S)
    return asked_s if delay_s == LONGEST_S and LONGEST_S in too_short else max(asked_s, delay_s)
