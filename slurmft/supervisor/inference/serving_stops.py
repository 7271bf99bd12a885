"""Stops of an endpoint: while a successor may take over in time it goes on serving, and then it leaves in order."""

from __future__ import annotations

import asyncio
import time

from slurmft.errors import StorageError
from slurmft.inference.serving.roster import Roster
from slurmft.policy.inference.handover import LEAST_DRAIN_S, waits_for
from slurmft.policy.verdicts.verdict import Cause
from slurmft.storage.events import EventName
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.supervisor.inference.candidacy import places_of_owner
from slurmft.supervisor.inference.handover import Giver
from slurmft.supervisor.inference.stops import LOOK_S, InferenceStops

JOINED_S = 1.0
"""Until the routers here have connected to the successor's replicas."""

LINGER_S = 5.0
"""How long the routers here take connections after clients were told of others, at least."""

_AWAITED = frozenset({Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.SIGNALLED, Cause.RECLAIMED, Cause.REQUEUED})


class ServingStops(InferenceStops):
    """As those of a batch, with a handover before them."""

    giver: Giver | None = None
    """None where there is no handover."""

    superseded = False
    """Another job has taken the run over."""

    async def leave_to(self, owner: Owner, run: RunFolder, roster: Roster) -> None:
        """Have ``owner``'s replicas answer what comes here, finish what is in flight, and end."""
        self.planned = self.planned or Cause.REQUEUED_BY_USER
        self.reason = f"job {owner.job} has taken the endpoint over"
        self._journal.append(EventName.HANDED_OVER, job=owner.job, generation=owner.generation)
        began_s = time.monotonic()
        try:
            roster.hand_over(await asyncio.to_thread(places_of_owner, run), owner.job)
        except StorageError:
            roster.hand_over((), owner.job)  # clients find the other routers, and ask again
        deadline_s = began_s + await self._left_s()
        await asyncio.sleep(JOINED_S)
        within_s = max(0.5, deadline_s - time.monotonic() - LEAST_DRAIN_S)
        self._tell_to_drain(within_s)
        while not self._is_late(deadline_s) and (self.joined - self.drained or time.monotonic() < began_s + LINGER_S):
            await asyncio.sleep(LOOK_S)
        roster.retire()
        while not self._is_late(deadline_s) and roster.cluster.routers:
            await asyncio.sleep(LOOK_S)
        self._over.set()

    async def _drain(self, left_s: float) -> None:
        began_s = time.monotonic()
        if self.giver is not None and self.planned in _AWAITED:
            self.giver.want(self.reason)
            while not self._over.is_set() and not self.superseded and self.planned in _AWAITED:
                now_s = time.monotonic()
                left = min(began_s + left_s, self._slurm.kill_at_s) - now_s
                if not waits_for(self.giver.successor, since_s=now_s - began_s, left_s=left, whole_s=left_s):
                    break
                await asyncio.sleep(LOOK_S)
        if not self.superseded:
            await super()._drain(max(1.0, left_s - (time.monotonic() - began_s)))

    async def _left_s(self) -> float:
        """How long this job may take to leave."""
        left_s = self._section.stop_timeout_s
        end = (await self._slurm.times()).end
        if end is not None:
            left_s = min(left_s, end - self._slurm.terms.clock.at(time.monotonic()) - LEAST_DRAIN_S)
        return max(LEAST_DRAIN_S, left_s)

    def _is_late(self, deadline_s: float) -> bool:
        return time.monotonic() > min(deadline_s, self._slurm.kill_at_s)
