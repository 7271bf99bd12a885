"""The roster: in the supervisor, it knows the replicas and routers of all nodes, and tells every router of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError
from slurmft.inference.coordinator import Send, Submit
from slurmft.inference.endpoint import HighAvailabilityCluster, RouterAddress
from slurmft.ipc.messages import InferenceReport, Members, ReplicaDied, ReplicaPhase, ReplicaPlace, RouterPhase
from slurmft.policy.inference import all_down
from slurmft.policy.serving import Readiness

WRITE_AGAIN_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Agent:
    node: int
    host: str
    epoch: int
    send: Send
    phases: dict[int, str] = field(default_factory=dict)
    places: dict[int, ReplicaPlace] = field(default_factory=dict)
    router_is_down: bool = False
    """It was started too often, and another node has one instead."""

    answered: int = 0
    """Requests of its router's present life."""

    load: int | None = None
    """Requests that it has; None while that is not known."""


@dataclass(slots=True)
class Served:
    """Requests that the endpoint has answered, as the steps of the run."""

    done: int = 0

    @property
    def finished(self) -> bool:
        """An endpoint never is."""
        return False


class Roster:
    """The agents of an endpoint, their replicas, and their routers.

    Args:
        nodes: of the run; with ``replicas_per_node`` the replicas that there should be.
        submit: does blocking work of the run folder in order, in a thread.
        served: requests answered in earlier attempts.
    """

    def __init__(self, config: InferenceConfig, *, nodes: int, run_folder: Path, submit: Submit, served: int) -> None:
        assert config.serving is not None
        self._config, self._serving, self._submit = config, config.serving, submit
        self._expected = config.replicas_on(nodes)
        self.wanted: int | None = None
        """Replicas that are to be on, where they follow the load; None: all."""

        self.wants_all: Callable[[], bool] = lambda: False
        """All are to be on for now, also where fewer are wanted."""

        self._on: set[tuple[int, int]] = set()
        """Node and number of those that are to be on, and ..."""

        self._settled: set[tuple[int, int]] = set()
        """... of those that were ready since then: one that only starts yet is not missing."""

        self.requests = Served(served)
        self.cluster = HighAvailabilityCluster()
        self.agents: dict[int, _Agent] = {}
        self._epochs = itertools.count(1)
        self._changed = asyncio.Event()
        self._changed.set()  # what an earlier attempt has left in endpoints.json is gone
        self.publish: Callable[[HighAvailabilityCluster], None] = lambda cluster: cluster.write(run_folder)
        """Writes endpoints.json, where these are the routers that clients are to use."""

        self._heirs: tuple[ReplicaPlace, ...] | None = None
        """Replicas of the job that has taken the endpoint over; None before that."""

        self._retired = self._closing = False
        self._holding: asyncio.TimerHandle | None = None
        self.committed = asyncio.Event()
        """Never set: an endpoint does not end by itself."""

    def hold(self, seconds: float) -> None:
        """Replicas and routers have outlived the roster before this one, and go on as they are.

        Routers and clients are told nothing until all replicas have reported again, or for so long: what a router has
        on one that it is not told of is done again elsewhere.
        """
        self._changed.clear()
        self._holding = asyncio.get_running_loop().call_later(seconds, self._release)

    def want(self, count: int) -> None:
        """Have so many replicas on."""
        self.wanted = count
        if self._chosen() != self._on:
            self._tell_all()

    @property
    def load(self) -> int | None:
        """Requests that all routers have; None where one has not said."""
        named = {each.number for each in self.cluster.routers}
        loads = [agent.load for agent in self.agents.values() if agent.node in named]
        known = [each for each in loads if each is not None]
        return sum(known) if known and len(known) == len(loads) else None

    def _chosen(self) -> set[tuple[int, int]]:
        """Which are to be on: those that are already, the ready ones first, then those that are off, then those that
        still have something to finish; none that has given up."""
        able = [
            (place not in self._on, (agent.phases.get(number) != "ready") == (place in self._on), number, agent.node)
            for agent in self.agents.values() for number in range(self._config.replicas_per_node)
            if agent.phases.get(number) not in ("down", "member") for place in [(agent.node, number)]
        ]  # fmt: skip
        most = len(able) if self.wants_all() else self.wanted
        return {(node, number) for *_, number, node in sorted(able)[:most]}

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
            self._changed.set()
            self._tell_all()

    def join(self, node: int, host: str, send: Send) -> int:
        """An agent takes part; returns the epoch under which it does. ``admit`` follows once it knows that."""
        if node in self.agents:  # only its connection is another one: its replicas go on
            on = {place for place in self._on if place[0] == node}
            self.lose(node)
            self._on |= on
        epoch = next(self._epochs)
        self.agents[node] = _Agent(node, host, epoch, send)
        return epoch

    def admit(self, node: int) -> None:
        """The agent knows its epoch, and can be told of the others."""
        if node in self.agents:
            self._tell_all()

    def lose(self, node: int) -> int:
        """An agent is gone with its replicas and its router; returns 0: routers know best what they have in flight."""
        if (agent := self.agents.pop(node, None)) is not None:
            self._without_router(agent)
            self._tell_all()
        return 0

    def on_report(self, node: int, report: InferenceReport) -> bool:
        """Handle a report; whether it belongs to an agent that counts."""
        agent = self.agents.get(node)
        if agent is None or report.epoch != agent.epoch:
            return False
        match report:
            case ReplicaPhase():
                self._on_phase(agent, report)
            case ReplicaDied():
                agent.phases[report.replica] = "waiting"
                self._drop_place(agent, report.replica)
            case RouterPhase():
                self._on_router(agent, report)
        return True

    def let_go(self, node: int) -> None:
        """Nothing: the replicas of this agent tell the routers themselves that they drain."""

    def stop(self) -> None:
        """The endpoint goes away: routers refuse what comes from now on."""
        self._closing = True
        self._tell_all()

    @property
    def all_down(self) -> bool:
        """Every replica of every agent has given up."""
        phases = [phase for agent in self.agents.values() for phase in agent.phases.values()]
        return all_down(phases, least=self._config.replicas_per_node * len(self.agents))

    async def commit_regularly(self) -> None:
        """Write ``endpoints.json`` when routers come and go."""
        while True:
            await self._changed.wait()
            await self.commit_now()

    async def commit_now(self, within_s: float | None = None) -> None:
        """Write it, if it has changed, or give up after this time; a disk that is full is tried again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._write()

    async def _write(self) -> None:
        if not self._changed.is_set():
            return
        self._changed.clear()
        cluster, publish = self.cluster, self.publish
        try:
            await asyncio.wrap_future(self._submit(lambda: publish(cluster)))
        except (OSError, StorageError) as error:
            log.warning("endpoints.json cannot be written, trying again: %s", error)
            self._changed.set()
            await asyncio.sleep(WRITE_AGAIN_S)

    async def watch_tail(self) -> None:
        """Nothing: requests wait in the routers."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """No router lives any more."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        self.cluster = HighAvailabilityCluster()
        self._changed.set()

    def publish_again(self) -> None:
        """Write endpoints.json: from now on clients are to use these routers."""
        self._changed.set()

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        """All replicas that are ready."""
        return tuple(place for agent in self.agents.values() for place in agent.places.values())

    def readiness(self) -> Readiness:
        """How far the replicas and routers are."""
        phases = [phase for agent in self.agents.values() for phase in agent.phases.values()]
        wanted = min(self._serving.routers, max(1, len(self.agents)))
        expected = self._expected if self.wanted is None or self.wants_all() else len(self._on)
        return Readiness(ready=len(self.places), down=phases.count("down"), expected=expected,
                         routers=len(self.cluster.routers), routers_wanted=wanted)  # fmt: skip

    def hand_over(self, heirs: Sequence[ReplicaPlace], job: str) -> None:
        """From now on the routers here have the replicas of ``job`` as well, which go on when these drain."""
        # names may be the same: a node of both jobs
        self._heirs = tuple(replace(each, name=f"{each.name}@{job}") for each in heirs)
        self._tell_all()

    def retire(self) -> None:
        """The routers take no more connections, finish what they have, and end."""
        self._retired = True
        self._tell_all()

    def _on_phase(self, agent: _Agent, report: ReplicaPhase) -> None:
        agent.phases[report.replica] = report.phase
        if report.phase == "ready" and report.port is not None and report.hosts is not None:
            # the port tells lives apart whose agents both count from 1, and is the same for the next supervisor
            name = f"{agent.host}.{agent.node}/{report.replica}#{report.life}.{report.port}"
            agent.places[report.replica] = ReplicaPlace(name=name, hosts=report.hosts, port=report.port)
            if self._holding is not None:
                self._on.add((agent.node, report.replica))
            self._settled |= {(agent.node, report.replica)} & self._on
            self._tell_all()
        else:
            self._drop_place(agent, report.replica)
            if report.phase in ("down", "off") and self.wanted is not None:  # another is on instead, or it is again
                self._tell_all()

    def _drop_place(self, agent: _Agent, replica: int) -> None:
        if agent.places.pop(replica, None) is not None:
            self._tell_all()

    def _on_router(self, agent: _Agent, report: RouterPhase) -> None:
        new = report.answered - agent.answered
        self.requests.done += new if new >= 0 else report.answered
        agent.answered, agent.load = report.answered, report.load
        if report.phase == "ready":
            tls = self._serving.is_https
            address = RouterAddress(agent.node, agent.host, report.hosts, report.port, tls)
            if address not in self.cluster.routers:
                self.cluster = self.cluster.with_router(address)
                self._changed.set()
            return
        agent.answered = 0
        self._without_router(agent)
        if report.phase == "down":
            agent.router_is_down = True
            self._tell_all()

    def _without_router(self, agent: _Agent) -> None:
        if any(each.number == agent.node for each in self.cluster.routers):
            self.cluster = self.cluster.without_node(agent.node)
            self._changed.set()

    def _tell_all(self) -> None:
        if self._holding is not None:
            if len(self.places) >= self._expected:
                self._release()
            return
        places = (*self.places, *(self._heirs or ()))
        able = [] if self._retired else [agent.node for agent in self.agents.values() if not agent.router_is_down]
        with_router = sorted(able)[: self._serving.routers]
        self._on = self._chosen()
        self._settled &= self._on
        expected = self._expected if self._heirs is None else len(self._heirs)
        if self.wanted is not None and self._heirs is None:
            expected = len(self._settled)
        for agent in self.agents.values():
            agent.send(Members(epoch=agent.epoch, router=agent.node in with_router, expected=expected,
                               closing=self._closing or self._heirs == (), replicas=places,
                               on=self._on_at(agent.node), wanted=len(self._on)))  # fmt: skip

    def _on_at(self, node: int) -> tuple[int, ...] | None:
        return None if self.wanted is None else tuple(sorted(number for at, number in self._on if at == node))
