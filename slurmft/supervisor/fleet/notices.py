"""Handles a cloud's notice: a stop with its deadline, after which the run leaves that node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slurmft.ipc.reports import NoticeReport
from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.verdicts.verdict import Cause
from slurmft.scheduler.nodes import expand
from slurmft.storage.events import EventName
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.fleet.agents import AgentLink
from slurmft.supervisor.fleet.crew import Crew
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.start import Start
from slurmft.supervisor.stops import Stops

if TYPE_CHECKING:
    from slurmft.config.config import RunConfig


class Reclaimed:
    """Collects the notices that agents report."""

    def __init__(self, config: RunConfig, start: Start, crew: Crew, stops: Stops, accuser: Accuser) -> None:
        self._config, self._start, self._crew = config, start, crew
        self._stops, self._accuser = stops, accuser
        self.suspects: tuple[Suspect, ...] = ()
        """Nodes that are taken away."""

    def note(self, link: AgentLink, report: NoticeReport) -> None:
        """Take in one notice, and act on it; one that announces no certain end only adds suspicion of the node."""
        what, ends, left_s = report.what, report.ends, report.left_s
        facts = {"node": link.host, "source": report.source, "what": what, "ends": ends}
        self._start.journal.append(EventName.NOTICE, **facts, **({"left_s": round(left_s, 1)} if ends else {}))
        suspect = Suspect(node=link.host)
        kind = Kind.RECLAIMED if ends else Kind.AT_RISK
        self._accuser.add([Evidence(kind=kind, suspect=suspect, message=f"{link.host}: {what}", at=time.time())])
        if not ends:
            return
        self.suspects = (*self.suspects, suspect)
        link.leaving = True  # the next attempt, if there is one in this allocation, does without it
        if link in self._crew.pool.members or not self._crew.pool.members:
            cause = Cause.RESIZED if self._can_stay() else Cause.RECLAIMED
            self._stops.on_notice(cause, f"{link.host}: {what}", left_s=left_s)

    def _can_stay(self) -> bool:
        """Whether the run goes on in this allocation: it outlives the node, and the supervisor's is another one."""
        cluster = self._start.cluster
        gone = {link.host for link in self._crew.pool.links.values() if link.leaving}
        if not isinstance(cluster, SlurmCluster) or not self._config.survives_nodes:
            return False
        return expand(cluster.job.nodes)[0] not in gone and self._crew.roster.can_go_on(gone)
