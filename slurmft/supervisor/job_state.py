"""Slurm's state of the supervisor's own job: whether and why Slurm ends it, and how long is left."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from slurmft.config.preemption import PreemptionConfig
from slurmft.policy.timing.grace import (
    JobTimes,
    SlurmClock,
    Terms,
    cause_of_signal,
    seconds_for_stop,
    seconds_in_kill_wait,
)
from slurmft.policy.verdicts.verdict import Cause
from slurmft.storage.events import EventName
from slurmft.storage.journal import Journal
from slurmft.supervisor.cluster import Cluster

LOOK_AGAIN_S = 1.0


class SlurmsWord:
    """Asks Slurm in threads, so that one that does not answer blocks nothing; answers are remembered."""

    def __init__(self, cluster: Cluster, journal: Journal) -> None:
        self._cluster, self._journal = cluster, journal
        self.terms = Terms(SlurmClock(time.time(), time.monotonic()))
        self.outside: tuple[Cause, str] | None = None
        """Why Slurm ends the job; None while it does not, or that is unknown."""

        self.kill_at_s = math.inf
        """Monotonic time by which the workers must be gone, once Slurm ends the job."""

        self.on_ending: Callable[[], None] = lambda: None
        """Called once, when it has become known that Slurm ends the job."""

    async def read_terms(self) -> None:
        """Learn Slurm's clock and how long it lets a job live that it ends."""
        self.terms = await asyncio.to_thread(self._cluster.terms)

    async def times(self) -> JobTimes:
        """When the job began and will end; unknown when Slurm does not answer."""
        return await asyncio.to_thread(self._cluster.times)

    async def is_ending(self) -> bool:
        """Whether Slurm ends the job from outside."""
        if self.outside is None:
            why = await asyncio.to_thread(self._cluster.why_ending)
            if why is not None and self.outside is None:  # two may have asked
                self.outside = why
                self._journal.append(EventName.ENDED_FROM_OUTSIDE, reason=why[1])
                self.kill_at_s = time.monotonic() + seconds_in_kill_wait(self.terms.kill_wait_s)
                self.on_ending()
        return self.outside is not None

    async def cause_and_time(self, section: PreemptionConfig, at_s: float) -> tuple[Cause, float]:
        """Why a signal that came at ``at_s`` (monotonic) asks for a stop, and the seconds it has from then on."""
        times, ending = await asyncio.gather(self.times(), self.is_ending())
        lead_s = float(section.signal_lead_s)
        if self._cluster.name == "local":
            return Cause.PREEMPTED, section.stop_timeout_s
        if ending and self.outside is not None:
            return self.outside[0], max(1.0, self.kill_at_s - at_s)
        now = self.terms.clock.at(at_s)
        cause = cause_of_signal(times, now=now, lead_s=lead_s)
        left_s = seconds_for_stop(times, cause=cause, now=now, lead_s=lead_s, timeout_s=section.stop_timeout_s)
        return cause, left_s

    async def look_again(self) -> None:
        """Ask once more: Slurm signals a job a moment before its state shows the end."""
        await asyncio.sleep(LOOK_AGAIN_S)
        await self.is_ending()
