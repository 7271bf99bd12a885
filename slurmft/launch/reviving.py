"""Agents that are gone, started again in steps of one node each.

What Slurm does (seen on 22.05, in a job and a step with --no-kill): a one-node step on a living node starts within
0.05 s. On a dead node that Slurm has not noticed it fails after 6 s. Once Slurm says that the node is down, it has left
the allocation for good, and every step on it is refused at once, also when the node is up again: it can only be lent by
another job. A node that is back before SlurmdTimeout stays in the allocation and takes steps as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from slurmft.config import RunConfig
from slurmft.errors import SlurmError
from slurmft.launch.agents import AgentLink, AgentPool
from slurmft.launch.attempt_folder import AttemptFolder
from slurmft.launch.cluster import Cluster
from slurmft.launch.roster import Roster

PAUSES_S = (5.0, 10.0, 20.0, 40.0)
"""Between two tries on a node that may be dead."""

TRY_S = 15.0
MAX_TRIES = 6
"""Of one node, in one start of the job."""

LOOK_S = 0.1

log = logging.getLogger(__name__)


class Reviver:
    """One task for each lost agent of the job's own nodes. Nodes that others lend are their lenders' business."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, pool: AgentPool, roster: Roster, folder: AttemptFolder
    ) -> None:
        self._config, self._cluster, self._pool, self._roster = config, cluster, pool, roster
        self._folder = folder
        self._attempt = cluster.attempt  # in its folder agents find the supervisor, whatever attempt it is then
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._tries: dict[int, int] = {}
        self.processes: list[asyncio.subprocess.Process] = []

    def lost(self, link: AgentLink, *, hung_up: bool) -> None:
        """Begin to start this agent again; ``hung_up``: its connection was closed, so its node lives."""
        if link.lender or link.node in self._tasks:
            return
        if hung_up:
            self._roster.returning.add(link.node)
        self._tasks[link.node] = task = asyncio.create_task(self._revive(link, hung_up=hung_up))
        task.add_done_callback(lambda _: self._tasks.pop(link.node, None))

    async def close(self) -> None:
        """Try no more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _revive(self, link: AgentLink, *, hung_up: bool) -> None:
        try:
            for pause_s in (0.0, *PAUSES_S) if hung_up else PAUSES_S:
                await self._until_back(link, pause_s)
                if self._is_back(link) or self._tries.get(link.node, 0) >= MAX_TRIES:
                    return
                self._tries[link.node] = self._tries.get(link.node, 0) + 1
                await self._try(link)
                self._roster.returning.discard(link.node)  # after the first try nobody waits for it any more
        finally:
            self._roster.returning.discard(link.node)

    async def _try(self, link: AgentLink) -> None:
        try:
            process = await self._cluster.start_agent(
                self._config, self._folder.path, self._attempt, host=link.host, index=link.node
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
