"""The agents of one start of a job. They and their warm zygotes outlive attempts, so that a restart is a fork."""

from __future__ import annotations

import asyncio
import contextlib
import time

from slurmft.config.config import RunConfig
from slurmft.errors import LaunchError
from slurmft.ipc.calls import Ping, Rehearse, Shutdown
from slurmft.ipc.reports import LimitReport, RehearsalReport
from slurmft.ipc.sync import SyncReport
from slurmft.policy.nodes.membership import TooFew, Wait, lost_after_s
from slurmft.policy.timing.fleet import longest_silence_s
from slurmft.storage.events import EventName
from slurmft.supervisor.attempt_folder import AttemptFolder
from slurmft.supervisor.cluster import Cluster
from slurmft.supervisor.fleet.agent_restarts import Reviver
from slurmft.supervisor.fleet.agents import BROKEN_S, AgentLink, AgentLost, AgentPool
from slurmft.supervisor.fleet.kept_folders import KeptFolders
from slurmft.supervisor.fleet.outliving import Orphan, Outlived
from slurmft.supervisor.fleet.roster import Roster
from slurmft.supervisor.fleet.shutdown import end_agents
from slurmft.supervisor.start import Start
from slurmft.system.processes import allow_descriptors

LOOK_S = 0.05
FOLLOW_S = 10.0
"""How long agents have to find a supervisor that has moved; they look for it every half second."""

SPARE_DESCRIPTORS = 200


class Crew:
    """Agents on all nodes of the allocation, spares included, from the first attempt of the job's start to the last.

    Args:
        start: the first attempt's; its folder is where agents find the supervisor, and where srun leaves its errors.
        outlived: agents that have outlived the supervisor before this one; they are not started but listened to.
    """

    def __init__(self, config: RunConfig, start: Start, outlived: Outlived | None = None) -> None:
        self._config, self._outlived = config, outlived
        self.secret = start.secret
        size = start.cluster.size(config)
        silence_s = max(config.fault_tolerance.agent_timeout_s, longest_silence_s(size))
        self.pool = AgentPool(start.secret, size, patience_s=2 * lost_after_s(silence_s, replaceable=False))
        self.roster = Roster(self.pool, config.size)
        self.folder = AttemptFolder(start, of=outlived.attempt if outlived else None)
        self.reviver = Reviver(config, start, self.pool, self.roster, self.folder)
        self.processes: list[asyncio.subprocess.Process | Orphan] = []
        self.kept = KeptFolders(config, start, self.pool)
        self._journal = start.journal
        self._mustered, self._settled_s = False, 0.0

    @property
    def reconnect_s(self) -> float:
        """The time to reconnect; those that have outlived a supervisor have its lease, since a restart costs more."""
        return max(BROKEN_S, self._settled_s - time.monotonic())

    async def reconnected(self, link: AgentLink) -> None:
        """Return when another connection has taken the place of this broken one, or its agent is given up."""
        await self.pool.are_back([link], self.reconnect_s)

    @property
    def is_complete(self) -> bool:
        """Every agent has reported once."""
        return self.pool.complete.is_set()

    async def muster(self, cluster: Cluster) -> None:
        """Have the agents started, unless they are; they report to the pool when they are ready.

        Raises:
            StorageError: the run folder does not take the address that they look for.
            SlurmUnavailable: there is no srun.
        """
        if self._mustered:
            self._muster_again()
            return
        self._mustered = True
        allow_descriptors(cluster.size(self._config) + SPARE_DESCRIPTORS)
        if self._outlived is not None:
            port = await self.pool.listen(None, self._outlived.listener)
            self.processes = [*self._outlived.processes]
            if self._outlived.moved:
                await self.folder.tell_agents({"hosts": cluster.control_hosts(), "port": port})
                self.reviver.expect(cluster, FOLLOW_S, count_out=True)
            else:
                lease_s = self._config.fault_tolerance.supervisor_lease_s
                self._settled_s = time.monotonic() + lease_s
                self.reviver.expect(cluster, lease_s)
            return
        port = await self.pool.listen(cluster.listen_host)
        await self.folder.tell_agents({"hosts": cluster.control_hosts(), "port": port})
        self.processes = [*await cluster.start_agents(self._config, self.folder.path)]

    @property
    def has_outlived(self) -> bool:
        """The agents are those of the supervisor before this one, and have not been heard yet."""
        return self._outlived is not None and not self._mustered

    def _muster_again(self) -> None:
        """Where every srun has ended, each agent has, too, or will: one by one they are started again."""
        for link in self.pool.links.values():
            link.last_heard = time.monotonic()  # the pool has not listened since the last attempt
        if any(process.returncode is None for process in (*self.processes, *self.reviver.processes)):
            return
        for link in self.pool.links.values():
            self.pool.drop(link)
            self.reviver.lost(link, hung_up=True)

    async def all_ended(self) -> list[int]:
        """The exit codes of the processes that started the agents, when all have ended, later ones too."""
        while True:
            processes = [*self.processes, *self.reviver.processes]
            codes = await asyncio.gather(*(process.wait() for process in processes))
            if len(processes) == len(self.processes) + len(self.reviver.processes) and not self.roster.returning:
                return codes
            await asyncio.sleep(LOOK_S)

    async def enlist(self, start: Start, over: asyncio.Event) -> list[AgentLink]:
        """The agents of an attempt, in the order of their ranks; waits for agents that are being restarted.

        Their kept folders hold what the workers are to find.

        Args:
            start: the attempt's.
            over: once it is set no agent is needed, and the crew does not change any more.

        Raises:
            LaunchError: too few of them are there, or a kept folder cannot be restored.
        """
        self._journal = start.journal
        allowed = start.cluster.nodes
        since_s = time.monotonic()
        # agents that died together with the one that ended the last attempt are detected before they are counted on
        await self.pool.tell_all(Ping(), timeout_s=self._config.fault_tolerance.agent_timeout_s)
        while isinstance(found := self.roster.next(allowed, waited_s=time.monotonic() - since_s), Wait):
            if over.is_set():
                return self.pool.members
            await asyncio.sleep(LOOK_S)
        if isinstance(found, TooFew):
            raise LaunchError(found.reason)
        self.pool.members = self.roster.take(found)
        for link in self.pool.links.values():
            if link.leaving and link not in self.pool.members:
                with contextlib.suppress(AgentLost):  # the node may be released as soon as nothing of the run is on it
                    await link.call(Shutdown())
        await self.kept.restore(start, self.pool.members, over)
        return self.pool.members

    async def rehearse(self) -> None:
        """Have the spares run the trainer for two steps, where that was asked for; each reports when it has."""
        if self._config.spares == "rehearse":
            spares = [one for one in self.pool.links.values() if one not in self.pool.members and not one.leaving]
            await asyncio.gather(*(link.call(Rehearse()) for link in spares), return_exceptions=True)

    def note(self, link: AgentLink, report: LimitReport | SyncReport | RehearsalReport) -> None:
        """Write into the journal what an agent has reported of its node."""
        if isinstance(report, SyncReport):
            self.kept.note(link, report)
        elif isinstance(report, RehearsalReport):
            self._journal.append(
                EventName.SPARE_REHEARSED, node=link.host, took_s=round(report.took_s, 3), reason=report.problem
            )
        else:
            self._journal.append(EventName.CONTAINER_LIMIT, node=link.host, reason=report.what)

    async def abandon(self) -> None:
        """Leave the agents, and what started them, as they are; their workers have been killed."""
        self._mustered = False
        await self.reviver.close()
        await self.pool.close()

    async def dismiss(self, *, node_lost: bool) -> None:
        """End the agents, and the processes that started them; nothing of the job is left on any node then.

        Nothing where none was mustered, or all have been dismissed.
        """
        if not self._mustered:
            return
        self._mustered = False
        await self.reviver.close()
        await end_agents(self.pool, [*self.processes, *self.reviver.processes], node_lost=node_lost)
        await self.pool.close()
        self.folder.remove_secret()
