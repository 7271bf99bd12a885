"""Agents that are gone: started again in steps of one node each, or given up for good.

What Slurm does (seen on 22.05, in a job and a step with --no-kill):

- A one-node step on a living node starts within 0.05 s. On a dead node that Slurm has not noticed it fails after 6 s.
- Once Slurm says that the node is down, it has left the allocation for good; every step on it is refused at once, also
  when the node is up again. It can only be lent by another job.
- A node that restarts before Slurm has noticed anything makes srun end the whole step, on all nodes, with "io error and
  missing step". Not where the job has given the node back before.

So a node that stays silent for as long as its agent would wait for us is given back; the agent of one that is cut off
for a shorter time comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from slurmft.config.config import RunConfig
from slurmft.errors import SlurmError
from slurmft.ipc.reports import Hello
from slurmft.storage.events import EventName
from slurmft.supervisor.attempt_folder import AttemptFolder
from slurmft.supervisor.cluster import Cluster
from slurmft.supervisor.fleet.agents import AgentLink, AgentPool
from slurmft.supervisor.fleet.roster import Roster
from slurmft.supervisor.start import Start

PAUSES_S = (0.0, 5.0, 10.0, 20.0)
"""Before each try."""

TRY_S = 15.0
MAX_AT_ONCE = 32
LOOK_S = 0.1

log = logging.getLogger(__name__)


class Reviver:
    """One task for each lost agent of the job's own nodes. Nodes that others lend are their lenders' business."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool, roster: Roster, folder: AttemptFolder) -> None:
        self._config, self._cluster, self._journal = config, start.cluster, start.journal
        self._pool, self._roster, self._folder = pool, roster, folder
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._expecting: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self.processes: list[asyncio.subprocess.Process] = []

    def lost(self, link: AgentLink, *, hung_up: bool) -> None:
        """Deal with a lost agent; ``hung_up``: its connection was closed, so its node lives."""
        if link.lender or link.leaving or link.node in self._tasks:
            return
        if hung_up:
            self._roster.returning.add(link.node)
        self._tasks[link.node] = task = asyncio.create_task(self._revive(link) if hung_up else self._give_up(link))
        task.add_done_callback(lambda _: self._tasks.pop(link.node, None))

    def expect(self, cluster: Cluster, within_s: float, *, count_out: bool = False) -> None:
        """Start agents where none has reported within this time; those that lived before have ended by then.

        Args:
            count_out: their nodes count as lost instead, and those of the cluster's lost ones at once.
        """
        if count_out:
            self._miss(cluster, cluster.lost, hung_up=False)
        self._expecting = asyncio.create_task(self._start_missing(cluster, within_s, count_out=count_out))

    async def _start_missing(self, cluster: Cluster, within_s: float, *, count_out: bool) -> None:
        await asyncio.sleep(within_s)
        self._miss(cluster, cluster.agent_hosts(self._config), hung_up=not count_out)
        if count_out:
            self._pool.complete.set()

    def _miss(self, cluster: Cluster, hosts: Collection[str], *, hung_up: bool) -> None:
        for node, host in enumerate(cluster.agent_hosts(self._config)):
            if node not in self._pool.links and host in hosts:
                hello = Hello(node=node, host=host, pid=0, birth=None, lender=None)
                self._pool.links[node] = link = AgentLink(None, hello)
                link.dropped = True
                self.lost(link, hung_up=hung_up)

    async def close(self) -> None:
        """Try no more."""
        tasks = [*self._tasks.values(), *([self._expecting] if self._expecting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _revive(self, link: AgentLink) -> None:
        try:
            for pause_s in PAUSES_S:
                await self._until_back(link, pause_s)
                if self._is_back(link):
                    return
                async with self._room:
                    await self._try(link)
                self._roster.returning.discard(link.node)  # after the first try it is not waited for any more
        finally:
            self._roster.returning.discard(link.node)

    async def _give_up(self, link: AgentLink) -> None:
        await self._until_back(link, self._config.fault_tolerance.supervisor_lease_s)
        if self._is_back(link) or not self._config.survives_nodes:
            return
        why = await asyncio.to_thread(self._cluster.give_back, link.host)
        self._journal.append(
            EventName.NODE_KEPT if why else EventName.NODE_GIVEN_BACK,
            node=link.host,
            **({"reason": why} if why else {}),
        )

    async def _try(self, link: AgentLink) -> None:
        try:
            process = await self._cluster.start_agent(
                self._config, self._folder.path, self._folder.attempt, host=link.host, index=link.node
            )
        except (SlurmError, OSError) as error:
            log.warning("the agent on %s cannot be started again: %s", link.host, error)
            return
        self.processes.append(process)
        await self._until_back(link, TRY_S, process)
        if not self._is_back(link) and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def _is_back(self, link: AgentLink) -> bool:
        return self._pool.links[link.node] is not link and self._pool.links[link.node].channel is not None

    async def _until_back(
        self, link: AgentLink, seconds: float, process: asyncio.subprocess.Process | None = None
    ) -> None:
        """Return when the agent has reported, the process that starts it has ended, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._is_back(link) and (process is None or process.returncode is None):
                    await asyncio.sleep(LOOK_S)
