"""Slurm's state of the supervisor's own job: whether and why Slurm ends it, and how long is left."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from slurmft.policy.timing.grace import JobTimes, SlurmClock, Terms, seconds_in_kill_wait
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

    async def look_again(self) -> None:
        """Ask once more: Slurm signals a job a moment before its state shows the end."""
        await asyncio.sleep(LOOK_AGAIN_S)
        await self.is_ending()
