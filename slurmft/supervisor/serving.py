"""One attempt of an endpoint: as of a batch, but it ends only when it is ended, and what it counts is served.

It may begin as a candidate, beside the attempt of another job that owns the run, and it may lose the run to one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurmft.config.inference import InferenceConfig
from slurmft.config.run import RunConfig
from slurmft.errors import SlurmError, StorageError
from slurmft.inference import endpoint
from slurmft.inference.coordinator import Roster
from slurmft.ipc.messages import InferenceReport, RenewReplica, ReplicaDied, ReplicaPhase, RouterPhase
from slurmft.policy import life
from slurmft.policy.serving import LEAST_DRAIN_S, Bounds, Scale, waits_for
from slurmft.policy.verdict import Cause
from slurmft.scheduler.slurm import expand
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import Attempt, Owner, RunFolder, progress_of
from slurmft.supervisor.agents import AgentLink, AgentLost
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.crew import PROGRESS_S, Crew
from slurmft.supervisor.handover import (
    Candidacy,
    Giver,
    Lenders,
    end_lenders,
    is_heir,
    places_of_owner,
    see_off,
    taken_from,
)
from slurmft.supervisor.inference import LOOK_S, InferenceAttempt, InferenceStops
from slurmft.supervisor.placement import EvidenceSender
from slurmft.system.files import read_text, replace_atomically

# --- A rolling update of an endpoint: its replicas get the new engine one by one, or all go back to the old one ---

UPDATE_LOOK_S = 1.0
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
        self._run, self._journal, self._in_folder = start.run, start.journal, start.thread.ask
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

    def lost(self, node: int, host: str) -> None:
        """The agent on ``host`` is gone, and with it the replicas of this node; another one would begin with the old
        engine.
        """
        if node in self._agents:  # a gang's node in reserve has no replica
            self._fail((node, 0), f"the agent on {host} is gone", all_of_node=True)

    async def watch(self) -> None:
        """Do what is asked for, until cancelled."""
        while True:
            await asyncio.sleep(UPDATE_LOOK_S)
            try:
                update = await self._in_folder(lambda: endpoint.read_update(self._run))
                if update is None or not update.is_open or not self._agents or not self._may_begin():
                    continue
                self.is_rolling = True
                if update.state is endpoint.State.ASKED:
                    await self._roll(update)
                else:  # a supervisor before this one has begun, and was lost
                    await self._go_back(update, "the supervisor was lost in the middle")
            except (StorageError, OSError) as error:
                log.warning("the update cannot go on yet: %s", error)
            finally:
                self.is_rolling = False

    async def _roll(self, update: endpoint.Update) -> None:
        places = self._places()
        update = replace(update, state=endpoint.State.ROLLING, total=len(places))
        await self._note(update)
        self._journal.append(EventName.UPDATE_BEGUN, number=update.number, replicas=len(places))
        self._renewed, self._problem = set(), ""
        try:
            while left := [place for place in self._places() if place not in self._renewed]:  # also on a new node
                await self._renew(left[0], endpoint.config_name(update.number))
                self._renewed.add(left[0])
                update = replace(update, renewed=len(self._renewed), total=len(self._places()))
                await self._note(update)
                if self._problem:  # one that was ready has died meanwhile
                    raise _Failed(self._problem)
        except _Failed as error:
            await self._go_back(update, str(error))
            return
        update = replace(update, state=endpoint.State.DONE)
        await self._in_folder(lambda: self._commit(update))
        self._renewed = set()
        self._journal.append(EventName.UPDATE_DONE, number=update.number)

    async def _go_back(self, update: endpoint.Update, reason: str) -> None:
        """Give every replica the engine of the run's configuration again, the one that failed first."""
        log.error("update %d goes back: %s", update.number, reason)
        last, self._renewed = self._awaited, set()
        places = sorted(self._places(), key=lambda place: last is None or place != last.place)
        for place in places:
            try:
                await self._renew(place, endpoint.OWN_CONFIG)
            except _Failed as error:  # its agent starts it again, as ever
                log.warning("%s", error)
        await self._note(replace(update, state=endpoint.State.BACK, reason=reason[:1000], renewed=0))
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
        before = self._lives.get(place, 0) if config != endpoint.OWN_CONFIG else -1
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

    def _fail(self, place: Place, why: str, *, all_of_node: bool = False) -> None:
        link = self._agents.get(place[0])
        words = f"{link.host if link is not None else f'node {place[0]}'}, replica {place[1]}: {why}"
        if self._awaited is not None and self._awaited.place[0] == place[0] and (
            self._awaited.place == place or all_of_node
        ):  # fmt: skip
            self._resolve(words)
        elif place in self._renewed or (self.is_rolling and all_of_node):
            self._problem = self._problem or words

    def _resolve(self, problem: str) -> None:
        if self._awaited is not None and not self._awaited.ready.done():
            if problem:
                self._awaited.ready.set_exception(_Failed(problem))
            else:
                self._awaited.ready.set_result(None)

    def _places(self) -> list[Place]:
        return [(node, number) for node in sorted(self._agents) for number in range(self._config.replicas_per_node)]

    def _commit(self, update: endpoint.Update) -> None:
        """From now on every start uses the new engine."""
        with self._run.lock():
            self._refuse_superseded()
            text = read_text(self._run.path / endpoint.config_name(update.number))
            replace_atomically(self._run.config, text)
            endpoint.write_update(self._run, update)

    async def _note(self, update: endpoint.Update) -> None:
        def work() -> None:
            with self._run.lock():
                self._refuse_superseded()
                endpoint.write_update(self._run, update)

        await self._in_folder(work)

    def _refuse_superseded(self) -> None:
        owner = self._run.owner()
        if owner is not None and owner.generation != self._start.generation:
            raise StorageError("another process owns the run now")


# --- serving stops ---
# Stops of an endpoint: while a successor may take over in time it goes on serving, and then it leaves in order.

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

    def on_request(self, kind: str, who: str) -> bool:
        match life.asked_by(kind, who):
            case life.Asked(Cause.REQUEUED_BY_USER, reason) if self.giver is not None and self.giver.want(reason):
                return True
        return super().on_request(kind, who)

    async def leave_to(self, owner: Owner, run: RunFolder, roster: Roster) -> None:
        """Have ``owner``'s replicas answer what comes here, finish what is in flight, and end."""
        self.feed(life.TakenOver(f"job {owner.job} has taken the endpoint over"))
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
        self.feed(life.Ended())

    async def _drain(self, left_s: float) -> None:
        began_s = time.monotonic()
        if self.giver is not None and self.planned in _AWAITED:
            self.giver.want(self.reason)
            while not self.over.is_set() and not self.superseded and self.planned in _AWAITED:
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


# --- One attempt of an endpoint: as of a batch, but it ends only when it is ended, and what it counts is served ---

HOLD_S = 5.0
"""How long agents that have outlived a supervisor may take to report their replicas to the next one."""

SCALE_S = 0.25
"""How often it is looked how many replicas the load needs."""

SEE_OFF_S = 5.0
"""How often a new owner looks whether the job before it has ended."""


def _ports_in(history: Iterable[Event]) -> dict[tuple[str, int], int]:
    """The port of the newest router of each host and node; entries that are damaged are left out."""
    found: dict[tuple[str, int], int] = {}
    for event in history:
        node, number, port = (event.details.get(name) for name in ("node", "number", "port"))
        if event.event == EventName.ROUTER_READY and type(number) is int and type(port) is int and 0 < port < 1 << 16:
            found[str(node), number] = port
    return found


class ServingAttempt(InferenceAttempt):
    """Runs one attempt of an endpoint."""

    _life = ServingStops
    stops: ServingStops
    _roster: Roster

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        super().__init__(config, start, sender, crew)
        self._routers: set[int] = set()
        """Nodes whose routers are known to listen."""

        self._ports = {} if start.candidate else _ports_in(start.history)  # the owner may still listen there
        """Where the last router of each node listened: clients that began earlier ask there."""

        self._candidacy = Candidacy(self._run, self._cluster) if start.candidate else None
        self._update: RollingUpdate | None = None
        self._since_s = time.monotonic()
        self._startup_s: float | None = None
        self._lost_replicas = self._scaled = ""
        """What status says of lost replicas, and of how many the load needs."""

        self._predecessor_serves = False
        """Routers of the job before may still have requests for the replicas here."""

        self._lenders = Lenders(config, start, self._slurm) if isinstance(self._cluster, SlurmCluster) else None
        self._load = (0, 0)
        """Replicas that the load has needed lately, and those that are wanted."""

        self.is_called_off = False
        """This candidate is not wanted any more."""

    @property
    def start(self) -> Start:
        """As of now: a candidate becomes the owner."""
        return self._start

    async def _open(self) -> None:
        config, section = self._config, self._section
        assert section.serving is not None
        token_file = section.serving.token_file
        job = f"{self._cluster.attempt.job}.{self._cluster.attempt.restart}"
        goes_on = self._crew.has_outlived or self._start.candidate
        await self._in_folder(lambda: endpoint.prepare(self._run.path, token_file, job=job, goes_on=goes_on))
        if section.serving.tls_own:
            await self._in_folder(lambda: endpoint.prepare_authority(self._run.path))
        self._first = (await self._in_folder(lambda: progress_of(self._run))).step or 0
        self._roster = Roster(
            section, nodes=config.nodes, run_folder=self._run.path, submit=self._start.thread.submit, served=self._first
        )
        self._roster.publish = self._publish
        if self._crew.has_outlived:
            self._roster.hold(HOLD_S)
        if (bounds := self._bounds()) is not None:
            self._follow_the_load(bounds, goes_on=goes_on)
        self._coordinator = self.stops.coordinator = self._roster
        self._journal.append(EventName.ENDPOINT_OPENED, routers=section.serving.routers,
                             replicas=section.replicas_on(config.nodes))  # fmt: skip
        if self._candidacy is None:
            # the supervisor before may have died while routers of the job before still had requests for these replicas
            if self._crew.has_outlived and (before := taken_from(self._start.history, self._cluster.attempt)):
                self._take_over_from(before)
            self._offer()

    def _offer(self) -> None:
        """Hand the endpoint over when that is due, and give it another engine when that is asked for."""
        assert self._section.serving is not None
        agents = self._joined if self._gangs is None else self._gangs.heads
        self._update = update = RollingUpdate(self._section, self._start, agents, self._is_calm)
        self._background.start(update.watch())
        bounds = self._bounds()
        self._background.start(self._keep_nodes(bounds))
        if bounds is not None:
            self._background.start(self._scale(bounds))
        is_wanted = self._section.serving.handover and self._config.preemption.continue_by not in ("nothing", "job")
        if is_wanted and isinstance(self._cluster, SlurmCluster):
            giver = Giver(self._config, self._start, self._cluster, self._slurm, lambda: self._startup_s)
            giver.suspects = self._suspects
            giver.is_held = lambda: update.is_rolling
            self.stops.giver = giver
            self._background.start(giver.watch())

    def _is_calm(self) -> bool:
        giver = self.stops.giver
        return self.stops.planned is None and not self.stops.over.is_set() and not (giver and giver.is_under_way)

    def _lose(self, link: AgentLink, reason: str, *, hung_up: bool) -> None:
        if self._update is not None and link.node in self._joined:
            self._update.lost(link.node if self._gangs is None else self._gangs.head_of(link.node), link.host)
        self._routers.discard(link.node)
        super()._lose(link, reason, hung_up=hung_up)

    async def _take_in(self, link: AgentLink) -> None:
        if link.lender:
            self._roster.lenders[link.node] = link.lender
        await super()._take_in(link)
        self._roster.admit(link.node)

    def _tell(self, link: AgentLink, report: InferenceReport) -> None:
        super()._tell(link, report)
        if self._update is not None:
            self._update.heard(link.node, report)
        if self._startup_s is None and self._roster.readiness().suffices(1.0):
            self._startup_s = time.monotonic() - self._since_s
        if not isinstance(report, RouterPhase):
            return
        if report.phase == "ready":
            if link.node not in self._routers:
                self._routers.add(link.node)
                self._ports[link.host, link.node] = report.port
                self._journal.append(EventName.ROUTER_READY, node=link.host, port=report.port, number=link.node)
            return
        self._routers.discard(link.node)
        event = EventName.ROUTER_DOWN if report.phase == "down" else EventName.ROUTER_ENDED
        self._journal.append(event, node=link.host, reason=report.why)
        if self._roster.routers_down and self.stops.planned is None and not self.stops.over.is_set():
            self.stops.feed(life.Ended(f"no router is left: {link.host}: {report.why}"))

    def _router_port(self, link: AgentLink) -> int | None:
        return self._ports.get((link.host, link.node))

    # Who owns the run

    async def _heed_requests(self) -> None:
        if self._candidacy is not None:
            await self._heed_stop()
        else:
            await super()._heed_requests()

    async def _heed_stop(self) -> None:
        """A candidate leaves requests to the owner, but for a stop, which means both."""
        try:
            who = await self._in_folder(lambda: self._run.see_request("KILL"))
        except (OSError, StorageError):
            return
        if who is not None:
            self.is_called_off = True
            self.stops.on_request("KILL", who)

    async def _tell_progress(self) -> None:
        if self._candidacy is None:
            await super()._tell_progress()
            return
        with contextlib.suppress(OSError, StorageError):
            await self._stand(self._candidacy)

    async def _superseded(self, owner: Owner) -> None:
        if self.stops.superseded:
            return
        if not await self._in_folder(lambda: is_heir(self._run, self._cluster.attempt.job, owner)):
            self.stops.feed(life.Ended())
            return
        self.stops.superseded = True
        self._background.start(self.stops.leave_to(owner, self._run, self._roster))

    async def _stand(self, candidacy: Candidacy) -> None:
        """As a candidate: leave where that is over, and take the run over once all is ready, or no other job has it."""
        if why := await self._in_folder(candidacy.why_over):
            self.is_called_off = True
            self.stops.feed(life.Ended(why))
            return
        if self.stops.planned is not None or self.stops.over.is_set():
            return
        readiness, least = (
            self._roster.readiness(),
            self._section.serving.degraded_below if self._section.serving else 0,
        )
        is_alone = not readiness.suffices(least) and await asyncio.to_thread(candidacy.is_alone)
        if not readiness.suffices(least) and not is_alone:
            return
        places = self._roster.places
        mine: Owner | None = await self._in_folder(lambda: candidacy.claim(places))
        if mine is None:
            return
        if candidacy.before is not None:
            self._take_over_from(candidacy.before)
        self._candidacy, self._folder.generation = None, mine.generation
        self._start = replace(self._start, generation=mine.generation, candidate=False)
        self._roster.publish_again()
        self._journal.append(EventName.ATTEMPT_STARTED, generation=mine.generation, cluster=self._cluster.name,
                             host=mine.host, nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
                             folder=str(Path.cwd()), taken_over=True)  # fmt: skip
        more = ((await self._in_folder(lambda: progress_of(self._run))).step or 0) - self._first
        self._first += more
        self._roster.requests.done += more
        self._offer()

    def _take_over_from(self, before: Owner | Attempt) -> None:
        self._predecessor_serves = True
        self._background.start(self._see_off(before))

    async def _see_off(self, before: Owner | Attempt) -> None:
        """See to it that the job before ends: one that has lost its batch host keeps the nodes that are left."""
        state: str | None = None
        while state is None:
            await asyncio.sleep(SEE_OFF_S)
            try:
                state = await asyncio.to_thread(see_off, self._run, before)
            except (SlurmError, StorageError, OSError) as error:
                log.debug("whether job %s is gone: %s", before.job, error)
        self._predecessor_serves = False
        if state:
            self._journal.append(EventName.PREDECESSOR_CANCELLED, job=before.job, state=state)

    def _publish(self, cluster: endpoint.HighAvailabilityCluster) -> None:
        """Only the owner names its routers to clients; in the thread of the run folder."""
        if self._start.candidate:
            return
        with self._run.lock():
            owner = self._run.owner()
            if owner is not None and owner.generation == self._start.generation:
                cluster.write(self._run.path)

    def _write_progress(self) -> None:
        if self._coordinator is not None and not self._start.candidate and not self.stops.superseded:
            replicas = {"replicas": said} if (said := self._lost_replicas or self._scaled) else {}
            self._run.write_progress(**self._progress(self._roster.requests.done), **replicas)

    # As many replicas as the load needs

    def _bounds(self) -> Bounds | None:
        section, scaled = self._section, self._section.serving and self._section.serving.replicas
        if not scaled or scaled.min is None:
            return None
        most = scaled.max or section.replicas_on(self._config.size.maximum)
        return Bounds(least=scaled.min, most=most, concurrency=section.concurrency, idle_s=scaled.idle_s)

    def _follow_the_load(self, bounds: Bounds, *, goes_on: bool) -> None:
        """What serves already is not stopped before its load is known; all are on for an update and a handover."""
        self._roster.wanted = bounds.most if goes_on else bounds.least
        self._load = 0, bounds.most
        self._roster.wants_all = lambda: (
            self._candidacy is not None or self._predecessor_serves or bool(self._update and self._update.is_rolling)
        )

    async def _scale(self, bounds: Bounds) -> None:
        """Start and stop replicas with the load."""
        state, done = Scale(self._roster.wanted or 0), self._roster.requests.done
        while True:
            await asyncio.sleep(SCALE_S)
            if self.stops.planned is not None or self.stops.superseded:
                continue
            requests = None if self._predecessor_serves else self._roster.load  # it may have more
            before, done = done, self._roster.requests.done
            if requests is not None and done != before:  # those that come and go between two looks
                requests = max(1, requests)
            state = state.saw(requests, bounds, time.monotonic())
            if state.wanted != self._roster.wanted:
                self._journal.append(EventName.REPLICAS_WANTED, wanted=state.wanted, before=self._roster.wanted,
                                     reason=state.reason)  # fmt: skip
            self._load = 0 if requests is None else state.lately, state.wanted
            waits = "" if self._lenders is None else self._lenders.state
            self._scaled = f"{state.wanted} of {bounds.most} replicas wanted{waits}"
            self._roster.want(state.wanted)

    # Nodes that are lost, and those that the load needs

    async def _keep_nodes(self, bounds: Bounds | None) -> None:
        """Say what is missing, and have other jobs lend nodes for those that stay lost, and for the load."""
        hopes_until_s, told = math.inf, 0
        while True:
            await asyncio.sleep(PROGRESS_S)
            links = list(self._joined.values())
            own = sum(not link.leaving for link in links) if self._lenders is None else self._lenders.own(links)
            if own >= self._config.nodes or not self._cluster.lost:
                hopes_until_s = math.inf
            elif math.isinf(hopes_until_s):  # the agent may come back, or be started again
                hopes_until_s = time.monotonic() + self._config.fault_tolerance.supervisor_lease_s
            if self._lenders is not None and self._may_change_nodes():
                await self._balance(self._lenders, bounds, own, hopes=time.monotonic() < hopes_until_s)
            missing = self._config.nodes - len(self._joined)
            if missing <= 0 or not self._cluster.lost or self.stops.planned is not None:
                told, self._lost_replicas = 0, ""
                continue
            found, lost = self._roster.readiness(), ", ".join(sorted(self._cluster.lost))
            waits = "" if self._lenders is None else self._lenders.state
            self._lost_replicas = f"{found.ready} of {found.expected} replicas are ready (lost: {lost}{waits})"
            if told != missing:
                told = missing
                self._journal.append(EventName.REPLICAS_MISSING, ready=found.ready, expected=found.expected,
                                     nodes=sorted(self._cluster.lost))  # fmt: skip

    def _may_change_nodes(self) -> bool:
        is_held = self._predecessor_serves or bool(self._update and self._update.is_rolling)
        return not is_held and self.stops.planned is None and not self.stops.superseded

    async def _balance(self, lenders: Lenders, bounds: Bounds | None, own: int, *, hopes: bool) -> None:
        assert isinstance(self._cluster, SlurmCluster)
        needed = wanted = nodes = self._config.nodes
        if bounds is not None:
            needed, wanted = (math.ceil(count / self._section.replicas_per_node) for count in self._load)
        for link in await lenders.balance_agents(
            list(self._joined.values()), {*expand(self._cluster.job.nodes), *self._cluster.lost}, self._roster.is_used,
            needed=needed, wanted=wanted, own=own, hoped=max(own, nodes) if hopes else own,
        ):  # fmt: skip
            self._let_go(link)

    # The end

    async def _wind_down(self) -> None:
        if (giver := self.stops.giver) is not None and not self.stops.superseded:
            outside = self._slurm.outside[0] if self._slurm.outside is not None else None
            if Cause.STOPPED_BY_USER is self.stops.planned or outside is Cause.CANCELLED:
                await giver.call_off(self.stops.reason)
            else:
                await giver.finish()
        await super()._wind_down()
        if self._lenders is not None:
            await asyncio.to_thread(end_lenders, self._start)
        if self._coordinator is not None:
            self._roster.close()
            cluster = self._roster.cluster
            try:
                await self._in_folder(lambda: self._publish(cluster))
            except (OSError, StorageError) as error:
                log.warning("endpoints.json still names routers that are gone: %s", error)
