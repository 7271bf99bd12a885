"""Resizing: stops a running attempt, after a save, to go on with more nodes or without nodes that are taken back."""

from __future__ import annotations

import asyncio

from slurmft.config.config import RunConfig
from slurmft.policy.verdicts.verdict import Cause
from slurmft.storage.events import EventName
from slurmft.supervisor.fleet.agents import AgentLink
from slurmft.supervisor.fleet.crew import Crew
from slurmft.supervisor.fleet.roster import named
from slurmft.supervisor.start import Start
from slurmft.supervisor.stops import Stops
from slurmft.supervisor.watch.observations import Observations

LOOK_S = 0.5


class Resizing:
    """Watches the crew of one attempt. Nothing to watch where the run has one size."""

    def __init__(self, config: RunConfig, start: Start, crew: Crew, seen: Observations, stops: Stops) -> None:
        self._config, self._cluster, self._journal = config, start.cluster, start.journal
        self._crew, self._seen, self._stops = crew, seen, stops
        self._awaited: tuple[str, ...] = ()
        self._saved: int | None = None

    async def watch(self) -> None:
        """Grow when a checkpoint has been committed that is newer than the nodes."""
        if not self._config.size.is_elastic:
            return
        while True:
            await asyncio.sleep(LOOK_S)
            if self._stops.planned is None and self._seen.any_started and self._is_time_to_grow():
                self._stops.stop_for(Cause.RESIZED, f"goes on with {named(self._awaited)} as well")

    def leave(self, link: AgentLink) -> None:
        """The job that lends this node is ending: do without it, while there is time for a save."""
        if link.leaving:
            return
        link.leaving = True
        self._journal.append(EventName.NODE_TAKEN_BACK, node=link.host, lender=link.lender)
        if link in self._crew.pool.members and self._stops.planned is None:
            self._stops.stop_for(Cause.RESIZED, f"{link.host} is taken back: job {link.lender}, which lends it, ends")

    def _is_time_to_grow(self) -> bool:
        new = self._crew.roster.newcomers(self._cluster.nodes)
        if new != self._awaited:
            self._awaited, self._saved = new, self._seen.saved()
            if new:
                self._journal.append(EventName.WILL_GROW, nodes=list(new))
        if not new:
            return False
        return self._seen.saved() != self._saved or not self._config.checkpoint.is_periodic
