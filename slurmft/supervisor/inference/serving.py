"""One attempt of an endpoint: as of a batch, but it ends only when it is ended, and what it counts is served."""

from __future__ import annotations

import logging

from slurmft.config.config import RunConfig
from slurmft.errors import StorageError
from slurmft.inference.serving.certificates import prepare_authority
from slurmft.inference.serving.endpoint import prepare
from slurmft.inference.serving.roster import Roster
from slurmft.ipc.reports import InferenceReport, RouterPhase
from slurmft.storage.events import EventName
from slurmft.storage.progress import progress_of
from slurmft.supervisor.fleet.agents import AgentLink
from slurmft.supervisor.fleet.crew import Crew
from slurmft.supervisor.inference.attempt import InferenceAttempt
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.start import Start

log = logging.getLogger(__name__)


class ServingAttempt(InferenceAttempt):
    """Runs one attempt of an endpoint."""

    _roster: Roster

    def __init__(self, config: RunConfig, start: Start, accuser: Accuser, crew: Crew) -> None:
        super().__init__(config, start, accuser, crew)
        self._routers: set[int] = set()
        """Nodes whose routers are known to listen."""

    async def _open(self) -> None:
        config, section = self._config, self._section
        assert section.serving is not None
        token_file = section.serving.token_file
        await self._in_folder(lambda: prepare(self._run.path, token_file))
        if section.serving.tls_own:
            await self._in_folder(lambda: prepare_authority(self._run.path))
        before = await self._in_folder(lambda: progress_of(self._run))
        self._first = before.step or 0
        self._roster = Roster(
            section, nodes=config.nodes, run_folder=self._run.path, submit=self._start.thread.submit, served=self._first
        )
        self._coordinator = self.stops.coordinator = self._roster
        self._journal.append(EventName.ENDPOINT_OPENED, routers=section.serving.routers,
                             replicas=config.nodes * section.replicas_per_node)  # fmt: skip

    async def _take_in(self, link: AgentLink) -> None:
        await super()._take_in(link)
        self._roster.admit(link.node)

    def _tell(self, link: AgentLink, report: InferenceReport) -> None:
        super()._tell(link, report)
        if not isinstance(report, RouterPhase):
            return
        if report.phase == "ready":
            if link.node not in self._routers:
                self._routers.add(link.node)
                self._journal.append(EventName.ROUTER_READY, node=link.host, port=report.port)
            return
        self._routers.discard(link.node)
        event = EventName.ROUTER_DOWN if report.phase == "down" else EventName.ROUTER_ENDED
        self._journal.append(event, node=link.host, reason=report.why)

    def _write_progress(self) -> None:
        if self._coordinator is not None:
            self._run.write_progress(**self._progress(self._roster.requests.done))

    async def _wind_down(self) -> None:
        await super()._wind_down()
        if self._coordinator is not None:
            self._roster.close()
            cluster = self._roster.cluster
            try:
                await self._in_folder(lambda: cluster.write(self._run.path))
            except (OSError, StorageError) as error:
                log.warning("endpoints.json still names routers that are gone: %s", error)
