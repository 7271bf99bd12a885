"""A rolling update of an endpoint: its replicas get the new engine one by one, or all go back to the old one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError
from slurmft.inference.serving.updates import OWN_CONFIG, State, Update, config_name, read_update, write_update
from slurmft.ipc.calls import RenewReplica
from slurmft.ipc.reports import InferenceReport, ReplicaDied, ReplicaPhase
from slurmft.storage.events import EventName
from slurmft.supervisor.fleet.agents import AgentLink, AgentLost
from slurmft.supervisor.start import Start
from slurmft.system.files import replace_atomically
from slurmft.system.opening import read_text

LOOK_S = 1.0
CALL_S = 20.0
MAX_DRAIN_S = 600.0
"""The longest a replica has for what it has in flight, before it is killed and its requests are done elsewhere."""

Place = tuple[int, int]
"""Number of a node, number of a replica there."""

log = logging.getLogger(__name__)


class _Failed(Exception):
    pass


@dataclass(slots=True)
class _Awaited:
    place: Place
    life: int
    """Its life before; only a later one counts."""

    ready: asyncio.Future[None]


class RollingUpdate:
    """Carries out updates that are asked for in the run folder.

    Args:
        agents: those that take part, by the numbers of their nodes.
        may_begin: whether nothing else changes the endpoint at the moment.
    """

    def __init__(
        self, config: InferenceConfig, start: Start, agents: Mapping[int, AgentLink], may_begin: Callable[[], bool]
    ) -> None:
        self._config, self._start, self._agents, self._may_begin = config, start, agents, may_begin
        self._run, self._journal = start.run, start.journal
        self._lives: dict[Place, int] = {}
        self._awaited: _Awaited | None = None
        self._renewed: set[Place] = set()
        self._problem = ""
        self.is_rolling = False

    def heard(self, node: int, report: InferenceReport) -> None:
        """A report that counts."""
        match report:
            case ReplicaPhase(phase="ready"):
                place, self._lives[node, report.replica] = (node, report.replica), report.life
                if self._awaited is not None and self._awaited.place == place and report.life > self._awaited.life:
                    self._resolve("")
            case ReplicaPhase(phase="down"):
                self._fail((node, report.replica), report.why)
            case ReplicaDied():
                self._fail((node, report.replica), report.how)

    def lost(self, node: int) -> None:
        """An agent is gone; another one there would begin with the old engine."""
        self._fail((node, 0), "its agent is gone")

    async def watch(self) -> None:
        """Do what is asked for, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                update = await self._in_folder(lambda: read_update(self._run))
                if update is None or not update.is_open or not self._agents or not self._may_begin():
                    continue
                self.is_rolling = True
                if update.state is State.ASKED:
                    await self._roll(update)
                else:  # a supervisor before this one has begun, and was lost
                    await self._go_back(update, "the supervisor was lost in the middle")
            except (StorageError, OSError) as error:
                log.warning("the update cannot go on yet: %s", error)
            finally:
                self.is_rolling = False

    async def _roll(self, update: Update) -> None:
        places = self._places()
        update = replace(update, state=State.ROLLING, total=len(places))
        await self._note(update)
        self._journal.append(EventName.UPDATE_BEGUN, number=update.number, replicas=len(places))
        self._renewed, self._problem = set(), ""
        try:
            for place in places:
                await self._renew(place, config_name(update.number))
                self._renewed.add(place)
                update = replace(update, renewed=len(self._renewed))
                await self._note(update)
                if self._problem:  # one that was ready has died meanwhile
                    raise _Failed(self._problem)
        except _Failed as error:
            await self._go_back(update, str(error))
            return
        update = replace(update, state=State.DONE)
        await self._in_folder(lambda: self._commit(update))
        self._renewed = set()
        self._journal.append(EventName.UPDATE_DONE, number=update.number)

    async def _go_back(self, update: Update, reason: str) -> None:
        """Give every replica the engine of the run's configuration again, the one that failed first."""
        log.error("update %d goes back: %s", update.number, reason)
        last, self._renewed = self._awaited, set()
        places = sorted(self._places(), key=lambda place: last is None or place != last.place)
        for place in places:
            try:
                await self._renew(place, OWN_CONFIG)
            except _Failed as error:  # its agent starts it again, as ever
                log.warning("%s", error)
        await self._note(replace(update, state=State.BACK, reason=reason[:1000], renewed=0))
        self._journal.append(EventName.UPDATE_WENT_BACK, number=update.number, reason=reason)

    async def _renew(self, place: Place, config: str) -> None:
        """Return when the replica is ready with this configuration.

        Raises:
            _Failed: it is not, within the time that an engine has to start.
        """
        node, number = place
        if (link := self._agents.get(node)) is None:
            raise _Failed(f"node {node}: its agent is gone")
        # what has this configuration already answers at once, with the life that it has
        before = self._lives.get(place, 0) if config != OWN_CONFIG else -1
        drain_s = min(self._config.request_timeout_s, MAX_DRAIN_S)
        self._awaited = _Awaited(place, before, asyncio.get_running_loop().create_future())
        try:
            await link.call(RenewReplica(replica=number, config=config, within_s=drain_s), timeout_s=CALL_S)
            async with asyncio.timeout(drain_s + self._config.startup_timeout_s):
                await self._awaited.ready
        except AgentLost as error:
            raise _Failed(str(error)) from error
        except TimeoutError as error:
            raise _Failed(f"{link.host}, replica {number}: not ready in time (inference.startup_timeout_s)") from error

    def _fail(self, place: Place, why: str) -> None:
        link = self._agents.get(place[0])
        words = f"{link.host if link is not None else f'node {place[0]}'}, replica {place[1]}: {why}"
        if self._awaited is not None and self._awaited.place[0] == place[0] and (
            self._awaited.place == place or why == "its agent is gone"
        ):  # fmt: skip
            self._resolve(words)
        elif place in self._renewed or (self.is_rolling and why == "its agent is gone"):
            self._problem = self._problem or words

    def _resolve(self, problem: str) -> None:
        if self._awaited is not None and not self._awaited.ready.done():
            if problem:
                self._awaited.ready.set_exception(_Failed(problem))
            else:
                self._awaited.ready.set_result(None)

    def _places(self) -> list[Place]:
        return [(node, number) for node in sorted(self._agents) for number in range(self._config.replicas_per_node)]

    def _commit(self, update: Update) -> None:
        """From now on every start uses the new engine."""
        with self._run.lock():
            self._refuse_superseded()
            text = read_text(self._run.path / config_name(update.number))
            replace_atomically(self._run.config, text)
            write_update(self._run, update)

    async def _note(self, update: Update) -> None:
        def work() -> None:
            with self._run.lock():
                self._refuse_superseded()
                write_update(self._run, update)

        await self._in_folder(work)

    def _refuse_superseded(self) -> None:
        owner = self._run.owner()
        if owner is not None and owner.generation != self._start.generation:
            raise StorageError("another process owns the run now")

    async def _in_folder(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._start.thread.submit(work))
