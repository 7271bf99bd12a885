"""One attempt of a run with ``launcher: ray``: nodes of its Ray cluster come and go, and the command's end is its end.

Ray Train itself goes on with fewer workers, and takes in more (``ScalingConfig(num_workers=(1, 5))``). So a lost node
ends the attempt only where it was the head, or where fewer than ``elastic.min_nodes`` are left.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from msgspec.structs import replace

from slurmft.config.config import RunConfig
from slurmft.ipc.calls import PassOnTerm, Shutdown, StartWorkers
from slurmft.ipc.channel import UNANSWERED
from slurmft.ipc.reports import WorkerExited
from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.storage.events import EventName
from slurmft.supervisor.attempt import START_S, AttemptRunner
from slurmft.supervisor.fleet.agents import AgentLink, AgentLost
from slurmft.supervisor.fleet.crew import Crew
from slurmft.supervisor.fleet.elastic import LOOK_S, Resizing
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.start import Start

LENT_S = 20.0
"""What Ray Train has to save before a lent node leaves: Slurm's default KillWait is 30 s."""

MAX_STARTS = 3
"""Of Ray on one node in one attempt."""


class RayAttempt(AttemptRunner):
    """Runs one attempt; what differs from other trainers is who may be lost, and who may come later."""

    def __init__(self, config: RunConfig, start: Start, accuser: Accuser, crew: Crew) -> None:
        # ranks are nodes of Ray here, and the first of them ends as the command does
        super().__init__(config.model_copy(update={"ignore_nonlead_status": True}), start, accuser, crew)
        self._resizing = Growing(self, config, start, crew, self._seen, self.stops)

    @property
    def is_open(self) -> bool:
        """Whether nodes may be added now."""
        return self._order is not None and self.stops.planned is None and not self._over.is_set()

    @property
    def first_nodes(self) -> int:
        """With how many nodes it began."""
        return 0 if self._order is None else self._order.nodes

    def _on_exit(self, link: AgentLink, report: WorkerExited) -> None:
        if report.rank == 0:
            super()._on_exit(link, report)
            self._over.set()  # the others serve it, and are ended now
            return
        self._seen.note_exit(link.host, report)
        if self.is_open and link in self._pool.members:
            self._pool.members = [each for each in self._pool.members if each is not link]
            self._journal.append(EventName.RAY_NODE_ENDED, node=link.host, code=report.code)

    async def _lose(self, link: AgentLink, reason: str, *, hung_up: bool) -> None:
        """Leave it to Ray to go on without this node, where that can be."""
        left = [each for each in self._pool.members if each is not link]
        is_needed = len(left) < self._config.size.minimum or link is self._pool.members[0]
        if link.dropped or not self.is_open or link not in self._pool.members or is_needed:
            await super()._lose(link, reason, hung_up=hung_up)
            return
        self._pool.members = left
        self._pool.drop(link)
        self._crew.reviver.lost(link, hung_up=hung_up)
        if not link.lender:
            self._cluster.lost.add(link.host)
        name = EventName.AGENT_LEFT if link.leaving else EventName.AGENT_LOST
        self._journal.append(name, node=link.host, spare=False, reason=reason)
        if not link.leaving:
            self._accuser.add([Evidence(kind=Kind.NODE_LOST, suspect=Suspect(node=link.host), message=reason[:1000],
                                        at=time.time())])  # fmt: skip

    async def add(self, link: AgentLink, rank: int) -> None:
        """Make a node part of the cluster that runs."""
        if not isinstance(self._order, StartWorkers):
            return
        self._pool.members = [*self._pool.members, link]
        try:
            await link.call(replace(self._order, first_rank=rank), timeout_s=START_S)
        except AgentLost as error:
            await self._lose(link, str(error), hung_up=False)
            return
        self._journal.append(EventName.RAY_NODE_JOINED, node=link.host, nodes=len(self._pool.members))


class Growing(Resizing):
    """Adds nodes while the attempt goes on: lent ones, those that are back, and spares in the place of lost ones."""

    def __init__(self, attempt: RayAttempt, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._attempt = attempt
        self._starts: Counter[str] = Counter()
        self._next_rank = 0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._attempt.is_open:
                continue
            pool, size = self._crew.pool, self._config.size
            self._next_rank = max(self._next_rank, self._attempt.first_nodes)
            for link in [*pool.links.values()]:
                own = sum(not each.lender for each in pool.members)
                room = len(pool.members) < size.maximum and (bool(link.lender) or own < size.nodes)
                if room and self._may_be_added(link) and self._attempt.is_open:
                    self._starts[f"{link.lender} {link.node}"] += 1
                    rank, self._next_rank = self._next_rank, self._next_rank + 1
                    await self._attempt.add(link, rank)

    def leave(self, link: AgentLink) -> None:
        if link.leaving or link.channel is None:
            return
        link.leaving = True
        self._journal.append(EventName.NODE_TAKEN_BACK, node=link.host, lender=link.lender)
        link.channel.send(PassOnTerm().as_call(UNANSWERED))
        self._stops.background.start(self._part_with(link))

    async def _part_with(self, link: AgentLink) -> None:
        await asyncio.sleep(LENT_S)
        if link.channel is not None:
            link.channel.send(Shutdown().as_call(UNANSWERED))

    def _may_be_added(self, link: AgentLink) -> bool:
        allowed = self._cluster.nodes
        is_barred = bool(allowed) and link.host not in allowed and not link.lender
        is_there = link.channel is not None and not link.dropped and not link.leaving
        tried = self._starts[f"{link.lender} {link.node}"] >= MAX_STARTS
        return is_there and not is_barred and not tried and link not in self._crew.pool.members
