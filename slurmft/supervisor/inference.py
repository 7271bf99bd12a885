"""One attempt of an inference run, and its stops: of a batch, and of a sweep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace as with_values

from slurmft.config.run import RunConfig
from slurmft.errors import LaunchError, RunBusy, SlurmftError, StorageError, StorageUnavailable
from slurmft.inference.coordinator import STORAGE_PAUSE_S, Coordinator, Roster
from slurmft.inference.endpoint import prepare_key
from slurmft.inference.ledger import (
    AnswersSoFar,
    Ledger,
    Output,
    OutputParts,
    fingerprint,
    forget_all,
    left_behind,
    open_ledger,
    write_output,
)
from slurmft.inference.requests import Batch, folder_of, load, prepare
from slurmft.inference.trials import Added, Known, add, add_values, rows
from slurmft.ipc import messages
from slurmft.policy import life
from slurmft.policy.decide import BegunAgain
from slurmft.policy.inference import DEATHS, EXIT_NODE, WINDOW_S, Circumstances, NodeDeaths, gangs_of, judge
from slurmft.policy.verdict import EXIT_USAGE, Cause, Evidence, Kind, Suspect, Verdict
from slurmft.scheduler.slurm import expand
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import Attempt, Owner
from slurmft.supervisor.agents import AgentLink, AgentLost, AgentPool, CallFailed
from slurmft.supervisor.cluster import Cluster, SlurmCluster, Start
from slurmft.supervisor.crew import AttemptFolder, Crew
from slurmft.supervisor.handover import Lenders, end_lenders
from slurmft.supervisor.placement import EvidenceSender
from slurmft.supervisor.stops import POLL_S, Life, SlurmNotices
from slurmft.system.background import Background, end_child
from slurmft.system.processes import die_with_parent

# --- Stops of an inference attempt: nothing new is leased, what is in flight is finished in time or given back ---

COMMIT_MARGIN_S = 3.0
"""Kept free at the end of a stop, for the last commits."""

LOOK_S = 0.02


class InferenceStops(Life):
    """The life of an attempt whose agents finish what is in flight."""

    def __init__(
        self, config: RunConfig, start: Start, pool: AgentPool, slurm: SlurmNotices, background: Background
    ) -> None:
        super().__init__(config, start, slurm, background, {
            life.BeginStop: lambda begin: background.start(self._drain(begin.left_s)),
        })  # fmt: skip
        self._pool = pool
        self.coordinator: Coordinator | Roster | None = None
        """None before there is anything to stop."""

        self.joined: set[int] = set()
        """Nodes that take part."""

        self.drained: set[int] = set()
        """Those of them that have finished, and reported everything."""

        self._drain_until_s: float | None = None

    def _ask_cause(self, ask: life.AskCause) -> None:
        if isinstance(self.coordinator, Coordinator):  # an endpoint goes on while a successor may come
            self.coordinator.stop()  # at once; Slurm's answers only say why, and how long there is
        super()._ask_cause(ask)

    async def _drain(self, left_s: float) -> None:
        cause = self.planned
        self._journal.append(EventName.STOP_REQUESTED, cause=cause.value if cause else "", reason=self.reason,
                             signal_at=time.time(), seconds_left=round(left_s, 3))  # fmt: skip
        if self.coordinator is not None and self.joined:
            self.coordinator.stop()
            within_s = max(0.5, left_s - COMMIT_MARGIN_S)
            deadline_s = time.monotonic() + within_s
            self._tell_to_drain(within_s)
            # Slurm's own end may become known only now, and is sooner
            while (
                not self.over.is_set()
                and self.joined - self.drained
                and (time.monotonic() < min(deadline_s, self._slurm.kill_at_s))
            ):
                await asyncio.sleep(LOOK_S)
            await self.coordinator.commit_now(COMMIT_MARGIN_S)
            self._journal.append(EventName.STOP_SAVED, step=self.coordinator.requests.done)
        self.feed(life.Ended())

    def took_in(self, link: AgentLink) -> None:
        """An agent takes part; one that comes while the others end is told so, as its end is waited for, too."""
        if self._drain_until_s is not None:
            link.tell(messages.Drain(within_s=max(0.5, self._drain_until_s - time.monotonic())))

    def _tell_to_drain(self, within_s: float) -> None:
        self._drain_until_s = time.monotonic() + within_s
        for link in [self._pool.links.get(node) for node in self.joined]:
            if link is not None:
                link.tell(messages.Drain(within_s=within_s))


# --- Engines over several nodes ---


class Gangs:
    """Which nodes have one engine together (``inference.engine.nodes``): formed of the agents that are there, broken up
    when one is lost, and each node is told its part.

    Args:
        joined: the agents that take part, by the numbers of their nodes.
        outlived: agents and engines are those of the supervisor before this one, as the journal has them.
    """

    def __init__(self, config: RunConfig, start: Start, joined: Mapping[int, AgentLink], *, outlived: bool) -> None:
        assert config.inference is not None
        self._size, self._journal, self._joined = config.inference.engine.nodes, start.journal, joined
        self._apart = config.trials is not None  # jobs of a sweep come and go, each with all of a trial's nodes
        self._most = (config.size.maximum if self._apart else config.nodes) // self._size
        self._times = config.fault_tolerance
        self._gangs = gangs_in(start.history, start.cluster.attempt) if outlived else []
        self._awaited = {node for gang in self._gangs for node in gang}
        """Nodes of them whose agents have not reported yet."""

        self._epochs: dict[int, int] = {}
        self._places: dict[int, messages.ReplicaPlace] = {}
        """Where heads wait for members, or have."""

        self.heads: dict[int, AgentLink] = {}
        self._limit_s = self._times.launch_timeout_s
        self._began_s = self._whole_s = time.monotonic()

    def took_in(self, link: AgentLink, epoch: int) -> None:
        """An agent takes part, or does so on another connection."""
        self._epochs[link.node] = epoch
        self._awaited.discard(link.node)
        self._settle()
        self._tell(link.node)

    def lost(self, link: AgentLink) -> None:
        """An agent is gone."""
        self._epochs.pop(link.node, None)
        self._settle(lost=link.host)

    def gathers(self, link: AgentLink, report: messages.ReplicaPhase) -> None:
        """A head waits for its members."""
        if report.port is not None and report.hosts is not None:
            name = f"{link.host}#{report.life}.{report.port}"
            self._places[link.node] = messages.ReplicaPlace(name=name, hosts=report.hosts, port=report.port)
            for node in next((gang[1:] for gang in self._gangs if gang[0] == link.node), ()):
                self._tell(node)

    def host_of(self, head: AgentLink, rank: int) -> str:
        """The node of a member; the head's where the gang is broken up already."""
        gang = next((gang for gang in self._gangs if gang[0] == head.node), (head.node,) * (rank + 1))
        return self._joined.get(gang[rank], head).host

    def head_of(self, node: int) -> int:
        """The head of a node's gang; the node itself where it is in none."""
        return next((gang[0] for gang in self._gangs if node in gang), node)

    def too_few(self, now_s: float) -> str:
        """Why no engine can work any more with what is left of the job; empty while one can, or nodes may come back."""
        if self._awaited and now_s - self._began_s > self._times.supervisor_lease_s:
            self._awaited.clear()
            self._settle(lost="an agent that did not report again")
        if any(all(node in self._joined for node in gang) for gang in self._gangs):
            self._whole_s, self._limit_s = now_s, self._times.supervisor_lease_s
        if now_s - self._whole_s < self._limit_s:
            return ""
        return f"{len(self._joined)} agents are there, and an engine needs {self._size} nodes (inference.engine.nodes)"

    def _settle(self, lost: str = "") -> None:
        before = self._gangs
        nodes = {*(node for node in self._epochs if node in self._joined), *self._awaited}
        jobs = {node: link.lender for node, link in self._joined.items()} if self._apart else {}
        self._gangs = gangs_of(before, nodes, size=self._size, most=self._most, jobs=jobs)
        for gang in before:
            if gang not in self._gangs:
                self._note(EventName.GANG_BROKEN, gang, lost=lost)
                self._places.pop(gang[0], None)
                for node in gang:
                    self._send(node, None)
        for gang in self._gangs:
            if gang not in before:
                self._note(EventName.GANG_FORMED, gang)
                for node in gang:
                    self._tell(node)
        self.heads.clear()
        self.heads.update({gang[0]: self._joined[gang[0]] for gang in self._gangs if gang[0] in self._joined})

    def _note(self, event: EventName, gang: Sequence[int], **facts: str) -> None:
        hosts = [self._joined[node].host for node in gang if node in self._joined]
        self._journal.append(event, nodes=hosts, numbers=list(gang), **facts)

    def _tell(self, node: int) -> None:
        gang = next((gang for gang in self._gangs if node in gang), None)
        if gang is None or node == gang[0]:
            self._send(node, None if gang is None else 0)
        elif (place := self._places.get(gang[0])) is not None:  # else the head is still to say where
            self._send(node, gang.index(node), place)

    def _send(self, node: int, rank: int | None, head: messages.ReplicaPlace | None = None) -> None:
        if (link := self._joined.get(node)) is not None and node in self._epochs:
            link.tell(messages.JoinGang(epoch=self._epochs[node], rank=rank, head=head))


def gangs_in(history: Sequence[Event], attempt: Attempt) -> list[tuple[int, ...]]:
    """The gangs of this start of the job, as the journal has them."""
    gangs: list[tuple[int, ...]] = []
    for event in history:
        mine = event.attempt.startswith(f"{attempt.job}.{attempt.restart}.")
        if mine and event.event in (EventName.GANG_FORMED, EventName.GANG_BROKEN):
            numbers = tuple(event.details.get("numbers", ()))
            gangs = [
                gang for gang in gangs if not set(gang) & set(numbers)
            ]  # an attempt may end with gangs as they are
            gangs += [numbers] * (event.event == EventName.GANG_FORMED)
    return gangs


# --- attempt ---
# One attempt of an inference run: agents with replicas come and go, and it ends when every request is answered.
#
# Where training needs all ranks, here each node, agent and replica lives alone: a lost one costs its share of the
# speed. The decisions about an end are those of training; a step is a request, and what is saved is what is committed.

PARTS_S = 2.0
BEGIN_S = 40.0
LENT_S = 20.0
"""What a lent node has for what is in flight: Slurm's default KillWait is 30 s."""

log = logging.getLogger(__name__)


class InferenceAttempt:
    """Runs one attempt, with agents that may have seen others before it."""

    _life: type[InferenceStops] = InferenceStops

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        if config.inference is None:
            raise TypeError("this configuration has no section inference")
        self._config, self._section, self._start, self._sender, self._crew = (
            config, config.inference, start, sender, crew,
        )  # fmt: skip
        self._cluster: Cluster = start.cluster
        self._run, self._journal, self._pool = start.run, start.journal, crew.pool
        self._in_folder = start.thread.ask
        self._slurm = SlurmNotices(self._cluster, start.journal)
        self._background = Background(self._on_error)
        self.stops = self._life(config, start, self._pool, self._slurm, self._background)
        self._folder = AttemptFolder(start)
        self._ledger: Ledger | None = None
        self._coordinator: Coordinator | Roster | None = None
        self._joined: dict[int, AgentLink] = {}
        self._gangs: Gangs | None = None
        if self._section.engine.nodes > 1:
            self._gangs = Gangs(config, start, self._joined, outlived=crew.has_outlived)
        self._begun_again = BegunAgain()
        self._lost: dict[str, bool] = {}
        """Nodes whose agents are gone, and whether they closed the connections themselves."""

        self._deaths = NodeDeaths()
        self._suspects: list[str] = []
        """Nodes on which engines have died again and again: the next job is to do without them."""

        self._last_death = ""
        self._is_hopeless = False
        """The last engine that did not start cannot be started, wherever it is tried."""

        self._asking_failed = ""
        """Why ``trials.next`` cannot be asked for more."""

        self._is_short = False
        """Too few nodes are left for an engine."""

        self._output: Output | None = None
        self._parts: OutputParts | None = None
        self._writes_output = asyncio.Lock()
        self._first = 0
        self._is_complete = True
        """No more requests are to come; else nodes are looked after, and requests of the user heard, without any."""

        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> Verdict:
        """Run the attempt to its end.

        Raises:
            SlurmftError: nothing could be started.
        """
        with self._crew.working_for(self, self._start):
            try:
                await self._open()
                await self._work()
                await self.stops.cause_is_known()
            except (SlurmftError, OSError) as error:
                self.stops.feed(life.LaunchFailed(str(error)))
            finally:
                await self._wind_down()
        return self._verdict()

    async def _open(self) -> None:
        folder = folder_of(self._run.path)
        batch = await self._in_folder(self._read_batch)
        if self._gangs is not None:
            await self._in_folder(lambda: prepare_key(self._run.path))
        self._ledger = await self._in_folder(lambda: open_ledger(batch, self._start.generation))
        self._coordinator = self.stops.coordinator = Coordinator(
            self._section, batch, self._ledger, self._start.thread.submit, self._journal.append
        )
        if self._section.engine.continue_from_prefix != "never":
            engine, expire_after_s = fingerprint(self._section.engine), self._section.partial_expires_after_s
            before = await self._in_folder(lambda: left_behind(folder, engine, expire_after_s=expire_after_s))
            self._coordinator.partials = before
        self._output_folder = self._section.output_folder(self._run.path)
        self._parts = OutputParts(batch, self._ledger, self._output_folder, size=self._section.part_requests,
                                  format=self._section.output_format)  # fmt: skip
        self._first = self._ledger.count
        self._journal.append(EventName.REQUESTS_OPENED, total=batch.total, answered=self._ledger.count)

    def _read_batch(self) -> Batch:
        folder = folder_of(self._run.path)
        # slurmft infer has read them; a batch script written by hand has not
        return load(folder) or prepare(self._section, folder)

    async def _work(self) -> None:
        assert self._coordinator is not None
        is_mustered = False  # once: whether agents that are lost come back is looked after from then on
        while not self.stops.over.is_set():
            if self._coordinator.requests.finished and (is_mustered or self._is_complete):
                await self._finish()
                continue
            if not is_mustered:
                is_mustered = True
                await self._crew.muster(self._cluster)
                work = (
                    self._slurm.read_terms, self._watch_requests, self._handle_events, self._take_in_agents,
                    self._watch_processes, self._coordinator.commit_regularly, self._coordinator.watch_tail,
                    self._sender.watch, self._write_parts,
                )  # fmt: skip
                for each in work:
                    self._background.start(each())
                await self._first_agent()
                continue
            finished = asyncio.ensure_future(self._coordinator.committed.wait())
            over = asyncio.ensure_future(self.stops.over.wait())
            await asyncio.wait([finished, over], return_when=asyncio.FIRST_COMPLETED)
            self._coordinator.committed.clear()
            finished.cancel()
            over.cancel()

    async def _first_agent(self) -> None:
        timeout_s = self._config.fault_tolerance.launch_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while not self._joined and not self.stops.over.is_set():
            if time.monotonic() > deadline_s:
                raise LaunchError(f"no agent reported within {timeout_s:.0f} s (fault_tolerance.launch_timeout_s)",
                                  hint=f"see srun.err in {self._crew.folder.path}")  # fmt: skip
            await asyncio.sleep(POLL_S)

    async def _finish(self) -> None:
        """Write the output; what turns out to be unreadable is asked for again."""
        assert isinstance(self._coordinator, Coordinator) and self._ledger is not None
        ledger, folder, batch = self._ledger, self._output_folder, self._coordinator.batch
        # minutes for millions of answers: signs of life must not wait for it
        form, file = self._section.output_format, self._section.output_file
        try:
            async with self._writes_output:
                found = await asyncio.to_thread(write_output, batch, ledger, folder, format=form, file=file)
        except StorageUnavailable as error:  # nothing is lost: it is tried until there is room, or the job ends
            self._coordinator.held_up(error)
            await asyncio.sleep(STORAGE_PAUSE_S)
            return
        if isinstance(found, Output):
            self._output = found
            if self._parts is not None:
                await asyncio.to_thread(self._parts.remove)
            await self._in_folder(lambda: forget_all(folder_of(self._run.path)))
            self._journal.append(EventName.OUTPUT_WRITTEN, folder=str(file or folder), answers=found.answers,
                                 errors=found.errors)  # fmt: skip
            self.stops.feed(life.Ended())
            return
        log.error("%d answers cannot be read back and are asked for again, the first: request %d", len(found), found[0])
        self._journal.append(EventName.ANSWERS_UNREADABLE, count=len(found), first=found[0])
        ledger.forget(found)
        self._coordinator.requests.reopen(found)

    async def _write_parts(self) -> None:
        """Give those who look at the output meanwhile what is complete."""
        while self._parts is not None and not self.stops.over.is_set():
            await asyncio.sleep(PARTS_S)
            async with self._writes_output:
                if self._output is not None:
                    return
                try:
                    await asyncio.to_thread(self._parts.write)
                except StorageError as error:
                    log.warning("parts of the output cannot be written, trying again: %s", error)

    # Agents

    async def _take_in_agents(self) -> None:
        """Take agents in as they report."""
        while not self.stops.over.is_set():
            for node, link in list(self._pool.links.items()):
                is_new = link.channel is not None and not link.dropped and self._joined.get(node) is not link
                if is_new and not link.is_barred(self._cluster.nodes):
                    self._joined[node] = link  # also on a new connection: the one before may have lost reports
                    # an agent may be slow to answer, or be cut off: the others are taken in, and their leases go on
                    self._background.start(self._take_in(link))
            await asyncio.sleep(POLL_S)
            why = "" if self._gangs is None else self._gangs.too_few(time.monotonic())
            if why and self.stops.planned is None:
                self._is_short = True
                self.stops.feed(life.Ended(why))

    def ping(self) -> messages.Ping:
        """What agents are told regularly."""
        return messages.Ping()

    def on_silence(self, link: AgentLink, silent_s: float, _timeout_s: float) -> None:
        """Lose an agent that is silent for longer than it may be."""
        if not self.stops.over.is_set() and silent_s > self._crew.reconnect_s:
            self._lose(link, f"nothing was heard from {link.host} for {silent_s:.1f} s", hung_up=False)

    async def _take_in(self, link: AgentLink) -> None:
        assert self._coordinator is not None

        def send(call: messages.Call[Any]) -> None:
            if (current := self._pool.links.get(link.node)) is not None:
                current.tell(call)

        self.stops.joined.add(link.node)
        epoch = self._coordinator.join(link.node, link.host, send)
        try:
            begin = messages.BeginReplicas(
                attempt=str(self._cluster.attempt), epoch=epoch, generation=self._start.generation, node=link.node,
                router_port=self._router_port(link),
            )  # fmt: skip
            await link.call(begin, timeout_s=BEGIN_S)
        except CallFailed as error:  # this node takes no part
            log.error("%s", error)
            self._coordinator.lose(link.node)
            if not self._coordinator.agents:
                self.stops.feed(life.Ended(str(error)))
            return
        except AgentLost as error:
            if link.channel is not None:  # else it may come back by another connection, which is waited for
                self._lose(link, str(error), hung_up=False)
            return
        if link.dropped:
            return
        self._cluster.lost.discard(link.host)
        self._journal.append(EventName.NODE_ANSWERS, node=link.host)
        self.stops.took_in(link)
        if self._gangs is not None:
            self._gangs.took_in(link, epoch)

    def _router_port(self, _link: AgentLink) -> int | None:
        return None

    def _lose(self, link: AgentLink, reason: str, *, hung_up: bool) -> None:
        """Go on without this agent: its requests go to others."""
        if link.dropped or self._coordinator is None:
            return
        self._pool.drop(link)
        self._joined.pop(link.node, None)
        self.stops.joined.discard(link.node)
        count = self._coordinator.lose(link.node)
        if self._gangs is not None:
            self._gangs.lost(link)
        if self.stops.planned is None:
            self._crew.reviver.lost(link, hung_up=hung_up)
        if not link.lender:
            self._cluster.lost.add(link.host)
        if not link.leaving:
            self._lost[link.host] = hung_up
        self._journal.append(EventName.AGENT_LEFT if link.leaving else EventName.AGENT_LOST, node=link.host,
                             reason=reason, requests=count)  # fmt: skip

    def _let_go(self, link: AgentLink) -> None:
        """The job that lends this node ends: its requests are finished in the time it has, or go to others."""
        link.leaving = True
        if self._coordinator is not None:
            self._coordinator.let_go(link.node)
        link.tell(messages.Drain(within_s=LENT_S))

    async def _part_with(self, link: AgentLink) -> None:
        with contextlib.suppress(AgentLost):
            await link.call(messages.Shutdown())
        if self._coordinator is not None:  # what it has reported is not to be asked again
            await self._coordinator.commit_now(LENT_S)
        self._lose(link, f"the job {link.lender}, which lent {link.host}, ends", hung_up=False)

    async def _on_disconnect(self, link: AgentLink) -> None:
        """Give a connection that broke the time to come back."""
        await self._crew.reconnected(link)
        current = self._pool.links.get(link.node)
        if current is not link and current is not None and current.is_same(link):
            return  # it is taken in by its new connection
        if not self.stops.over.is_set():  # another process may be connected by now: it is taken in as a new agent
            self._lose(link, f"the agent on {link.host} is gone", hung_up=True)

    async def _watch_processes(self) -> None:
        codes = await self._crew.all_ended()
        while await self._are_begun_again():
            codes = await self._crew.all_ended()
        if not self.stops.over.is_set():
            self._journal.append(EventName.AGENTS_GONE, exit_codes=codes)
            is_meant = self.stops.planned is not None or self._slurm.outside is not None
            words = "" if is_meant else f"all agents ended, with {codes}{self._crew.folder.last_words()}"
            self.stops.feed(life.Ended(words))

    async def _are_begun_again(self) -> bool:
        """All own agents have ended: whether one that took part is being started again in its place."""
        await asyncio.sleep(POLL_S)
        await self._slurm.is_ending()
        own = {node: link for node, link in self._joined.items() if not link.lender}
        if self.stops.planned is not None or self._slurm.outside is not None or not own or self._coordinator is None:
            return False
        self._begun_again = self._begun_again.at(self._coordinator.requests.done)
        if self._begun_again.is_spent:
            return False
        until_s = time.monotonic() + self._config.fault_tolerance.supervisor_lease_s
        while time.monotonic() < until_s and any(self._joined.get(node) is link for node, link in own.items()):
            if self.stops.over.is_set():
                return False
            await asyncio.sleep(POLL_S)  # their connections have time to come back, then they are lost
        self._begun_again = self._begun_again.once_more()
        return bool(self._crew.roster.returning) or self._crew.lives  # it may be back within one look already

    # Reports

    async def _handle_events(self) -> None:
        assert self._coordinator is not None
        while True:
            link, report = await self._pool.events.get()
            match report:
                case messages.SignalReport() if link.lender:
                    self._let_go(link)
                case messages.SignalReport():
                    self.stops.on_signal(report.name, link.host)
                case messages.NoticeReport(fault=True):  # a device that has failed is left by the replica on it
                    self._sender.note(link.host, report)
                case messages.Disconnected():
                    self._background.start(self._on_disconnect(link))
                case messages.Drained() if link.leaving:
                    self._background.start(self._part_with(link))
                case messages.Drained():
                    self.stops.drained.add(link.node)
                case messages.InferenceReport():
                    # once all is answered, engines end because we end them
                    if self._coordinator.on_report(link.node, report) and not self._coordinator.requests.finished:
                        self._tell(link, report)
            if self._coordinator.all_down and self.stops.planned is None and not self.stops.over.is_set():
                self.stops.feed(life.Ended(f"no replica is left: {self._last_death}"))

    def _tell(self, link: AgentLink, report: messages.InferenceReport) -> None:
        match report:
            case messages.ReplicaPhase(phase="ready") if report.why:
                self._journal.append(EventName.ANSWERS_HELD_UP, node=link.host, replica=report.replica,
                                     reason=report.why)  # fmt: skip
            case messages.ReplicaPhase(phase="ready"):
                self._journal.append(EventName.REPLICA_READY, node=link.host, replica=report.replica, start=report.life)
            case messages.ReplicaPhase(phase="starting") if self._gangs is not None:
                self._gangs.gathers(link, report)
            case messages.ReplicaPhase(phase="down"):
                if report.why:
                    self._last_death = f"{link.host}, replica {report.replica}: {report.why}"
                self._journal.append(EventName.REPLICA_DOWN, node=link.host, replica=report.replica,
                                     start=report.life, reason=report.why)  # fmt: skip
            case messages.ReplicaDied():
                self._last_death = f"{link.host}, replica {report.replica}: {report.how}"
                self._is_hopeless = report.code == EXIT_USAGE and not report.was_ready
                self._journal.append(EventName.REPLICA_DIED, node=link.host, replica=report.replica, reason=report.how,
                                     in_flight=report.had, answered=report.answered,
                                     failures=report.failures)  # fmt: skip
                self._suspect(link, report)
            case messages.ReplicaSmaller():
                self._journal.append(EventName.REPLICA_SMALLER, node=link.host, replica=report.replica,
                                     concurrency=report.slots, reason=report.why)  # fmt: skip

    def _suspect(self, link: AgentLink, report: messages.ReplicaDied) -> None:
        """Engines that die again and again on one node, while others work, are evidence against it."""
        now_s, nodes = time.monotonic(), {each.host for each in self._joined.values()}
        host = link.host if self._gangs is None else self._gangs.host_of(link, report.member)
        self._deaths = self._deaths.died(host, now_s, in_flight=report.had)
        if (node := self._deaths.suspect(nodes, now_s)) is None:
            return
        self._deaths = self._deaths.forgiven(node)
        self._suspects.append(node)
        what = f"{DEATHS} engines died within {WINDOW_S / 60:.0f} min, and those of other nodes did not: {report.how}"
        suspect = Suspect(node=node)
        self._sender.add([Evidence(kind=Kind.CRASH, suspect=suspect, message=what[:1000], at=time.time())])

    async def _watch_requests(self) -> None:
        while not self.stops.over.is_set():
            await asyncio.sleep(POLL_S)
            if self._folder.is_due():
                await self._tell_progress()
            await self._heed_requests()

    async def _heed_requests(self) -> None:
        assert self._coordinator is not None
        for kind, who in (await self._folder.requests(ready=True)).items():
            if not self.stops.on_request(kind, who):  # every answer is saved within a second
                await self._coordinator.commit_now()
                self._journal.append(EventName.SAVE_REQUESTED, who=who, step=self._coordinator.requests.done)

    async def _tell_progress(self) -> None:
        if (owner := await self._folder.tell(self._write_progress)) is not None:
            await self._superseded(owner)

    async def _superseded(self, _owner: Owner) -> None:
        self.stops.feed(life.Ended())

    def _write_progress(self) -> None:
        if isinstance(self._coordinator, Coordinator):
            self._run.write_progress(
                **self._progress(self._coordinator.requests.done), until=self._coordinator.batch.total
            )

    def _progress(self, done: int) -> dict[str, Any]:
        return {"at": time.time(), "attempt": str(self._cluster.attempt), "resumed": self._first, "step": done,
                "saved": done, "state": "running"}  # fmt: skip

    # The end

    async def _wind_down(self) -> None:
        self.stops.feed(life.Ended())
        if self._coordinator is not None:
            await self._pool.tell_all(messages.Kill())
            await self._coordinator.commit_now(COMMIT_MARGIN_S)
            self._folder.leave(self._write_progress)
        await self._background.cancel_all()

    def _verdict(self) -> Verdict:
        coordinator, output = self._coordinator, self._output
        return judge(self._told(output) if output is not None else "", Circumstances(
            first=self._first, done=coordinator.requests.done if coordinator is not None else 0,
            planned=self.stops.planned, planned_reason=self.stops.reason, outside=self._slurm.outside, lost=self._lost,
            works=bool(self._joined) and not self._is_short,
            all_down=coordinator is not None and coordinator.all_down, is_hopeless=self._is_hopeless,
            asking_failed=self._asking_failed, problem=self.stops.state.problem,
        ))  # fmt: skip

    def _told(self, output: Output) -> str:
        return f"{output.answers} requests are answered, {output.errors} ended with an error"

    def _on_error(self, error: BaseException) -> None:
        log.error("internal error", exc_info=error)
        self.stops.feed(life.Ended(f"internal error: {error!r}"))


# --- One attempt of a sweep: a batch that may grow while it is worked on, on the nodes of as many jobs as it needs ---

GROWN_S = 1.0
"""How often it is looked for trials that were added, and how many nodes they need."""

COUNT_S = 5.0
ASK_S = 0.25
MAX_VAIN = 1000
"""Answers of ``trials.next`` in a row that name trials, and none that is new."""

KEEP_S = 30.0
"""So long nodes are kept that have no trial while ``trials.next`` may name more: a search goes from batch to batch."""

MAX_LINE_BYTES = 64 << 20
END_S = 5.0


class SweepAttempt(InferenceAttempt):
    """Runs trials in this job, and in others while there are enough of them."""

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        super().__init__(config, start, sender, crew)
        self._pilots: Lenders | None = None
        if isinstance(self._cluster, SlurmCluster) and config.size.maximum > config.nodes:
            # of trials that have a job each, two jobs may share a node
            self._shares = self._section.replicas_per_node == 1
            self._pilots = Lenders(config, start, self._slurm, is_patient=True, spread=not self._shares,
                                   nodes=self._section.engine.nodes)  # fmt: skip
        self._asking: asyncio.subprocess.Process | None = None
        self._is_complete = config.trials is None or config.trials.next is None
        self._failed = set[str]()
        self._outcome = ""

    def _read_batch(self) -> Batch:
        folder = folder_of(self._run.path)
        if (batch := load(folder)) is not None:
            return batch
        assert self._config.trials is not None  # a batch script written by hand: nothing has been added yet
        add(self._run.path, self._config.trials)
        batch = load(folder)
        assert batch is not None
        return batch

    async def _open(self) -> None:
        await super()._open()
        self._background.start(self._look_for_more())
        self._background.start(self._count_failed())
        if self._config.trials is not None and self._config.trials.next is not None:
            self._background.start(self._ask(self._config.trials.next))
        if self._pilots is not None:
            self._background.start(self._keep_pilots(self._pilots))

    async def _look_for_more(self) -> None:
        while True:
            await asyncio.sleep(GROWN_S)
            await self._grow()

    async def _grow(self) -> bool:
        """Take in what was added meanwhile; whether there was anything."""
        coordinator = self._coordinator
        assert isinstance(coordinator, Coordinator)
        try:
            batch = await self._in_folder(lambda: load(folder_of(self._run.path)))
        except StorageError as error:
            log.warning("trials that were added cannot be read, trying again: %s", error)
            return False
        if batch is None or batch.total <= coordinator.batch.total:
            return False
        # in the thread of the ledger's commits, none of which may see half of it
        await self._in_folder(lambda: coordinator.ledger.grow(batch))
        coordinator.grow(batch)
        self._journal.append(EventName.REQUESTS_OPENED, total=batch.total, answered=coordinator.requests.done)
        return True

    async def _count_failed(self) -> None:
        """For status."""
        coordinator, told, pause_s = self._coordinator, None, COUNT_S
        rows_of = _reader(self._run.path)
        assert isinstance(coordinator, Coordinator)
        while True:
            await asyncio.sleep(pause_s)
            began_s, (ended, now) = time.monotonic(), coordinator.ledger.done_since(told)
            try:
                found = await asyncio.to_thread(rows_of, ended) if ended else []
            except SlurmftError as error:
                log.warning("failed trials cannot be counted, trying again: %s", error)
                continue
            told, pause_s = now, max(COUNT_S, 20 * (time.monotonic() - began_s))
            for row in found:
                (self._failed.add if row["state"] == "failed" else self._failed.discard)(row["trial"])

    def _progress(self, done: int) -> dict[str, Any]:
        failed = {"replicas": f"{len(self._failed)} trials failed"} if self._failed else {}
        return super()._progress(done) | failed

    async def _finish(self) -> None:
        if await self._grow():
            return
        if self._is_complete:
            await super()._finish()
            states = await asyncio.to_thread(lambda: Counter(row["state"] for row in rows(self._run.path)))
            self._outcome = f"{states['done']} trials have a result, {states['failed']} failed"
        else:
            await asyncio.sleep(ASK_S)

    async def _ask(self, function: str) -> None:
        try:
            await self._ask_for_trials(function)
        except (SlurmftError, ValueError, OSError) as error:
            self._asking_failed = f"trials.next: {function}: {error}"
            self.stops.feed(life.Ended())

    async def _ask_for_trials(self, function: str) -> None:
        """Ask the user's function for trials, as long as there is room for them, until it has no more."""
        coordinator, told, known, rows_of = self._coordinator, None, Known(self._run.path), _reader(self._run.path)
        assert isinstance(coordinator, Coordinator)
        asking = self._asking = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "slurmft.inference.trial_call", "--next", function, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, cwd=self._config.trainer_directory, limit=MAX_LINE_BYTES,
            env={**os.environ, **self._config.environment}, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert asking.stdin is not None and asking.stdout is not None
        room, vain = self._section.replicas_on(self._config.size.maximum), 0
        while vain < MAX_VAIN:
            while coordinator.requests.total - coordinator.requests.done >= room:
                await asyncio.sleep(ASK_S)
            ended, told = coordinator.ledger.done_since(told)
            found = await asyncio.to_thread(rows_of, ended) if ended else []
            asking.stdin.write(json.dumps(found).encode() + b"\n")
            if not (line := await asking.stdout.readline()):
                raise LaunchError(f"its process ended with {await asking.wait()}; see the log of this job")
            answer = json.loads(line)
            if "error" in answer:
                raise LaunchError(answer["error"])
            if answer["trials"] is None:
                self._is_complete = True
                return
            if answer["trials"] == []:
                await asyncio.sleep(ASK_S)
                continue
            added = await self._put(answer["trials"], known)
            await self._grow()
            vain = 0 if added.new else vain + 1
            await asyncio.sleep(0 if added.new else ASK_S)
        raise LaunchError("it names only trials that it has named before")

    async def _put(self, given: Any, known: Known) -> Added:
        values = [(json.dumps(one).encode(), "next") for one in (given if isinstance(given, list) else [given])]

        def put() -> Added:
            with self._run.lock():
                return add_values(self._run.path, values, known)

        while True:
            try:
                added: Added = await self._in_folder(put)
                return added
            except (StorageUnavailable, RunBusy) as error:  # the function has named them, and would not do so again
                log.warning("trials cannot be added, trying again: %s", error)
                await asyncio.sleep(COUNT_S)

    async def _keep_pilots(self, pilots: Lenders) -> None:
        """Have other jobs lend nodes, as many as there are trials for, and end those that have none."""
        assert isinstance(self._cluster, SlurmCluster) and isinstance(self._coordinator, Coordinator)
        size = self._section.engine.nodes  # nodes that are counted below are as many together
        requests, mine, most = self._coordinator.requests, self._config.nodes // size, self._config.size.maximum // size
        kept = mine, 0.0
        while True:
            await asyncio.sleep(GROWN_S)
            if self.stops.planned is not None or self.stops.over.is_set():
                return
            links = list(self._joined.values())
            own = pilots.own(links) // size
            nodes = -(-(requests.total - requests.done) // self._section.replicas_per_node)
            needed = max(mine, min(most, nodes))
            now_s = time.monotonic()
            if needed >= kept[0] or now_s - kept[1] > KEEP_S or self._is_complete:
                kept = needed, now_s
            taken = () if self._shares else expand(self._cluster.job.nodes)
            for link in await pilots.balance_agents(
                links, {*taken, *self._cluster.lost}, self._held,
                needed=needed, wanted=kept[0], own=own, hoped=max(own, mine),
            ):  # fmt: skip
                self._let_go(link)

    async def _part_with(self, link: AgentLink) -> None:
        """Of a job that lends several nodes, each stays until their trial has ended, as long as there is time."""
        until_s = time.monotonic() + LENT_S
        while self._head_of(link.node) != link.node and self._held(link.node) and time.monotonic() < until_s:
            await asyncio.sleep(ASK_S)
        await super()._part_with(link)

    def _held(self, node: int) -> bool:
        assert isinstance(self._coordinator, Coordinator)
        return bool(self._coordinator.requests.held(self._head_of(node)))

    def _head_of(self, node: int) -> int:
        return node if self._gangs is None else self._gangs.head_of(node)

    def _suspect(self, link: AgentLink, report: messages.ReplicaDied) -> None:
        if report.code == EXIT_NODE:  # not the trial's fault, alone as it was
            report = with_values(report, in_flight=(), load=None)
        super()._suspect(link, report)

    async def _wind_down(self) -> None:
        await super()._wind_down()
        is_over = self._output is not None or self.stops.planned is Cause.STOPPED_BY_USER
        if self._pilots is not None and is_over:  # else they wait for the run's next job
            await asyncio.to_thread(end_lenders, self._start)
        if self._asking is not None:
            await end_child(self._asking, END_S)

    def _told(self, output: Output) -> str:
        return self._outcome or super()._told(output)


def _reader(run_folder: Path) -> Callable[[Collection[int]], list[dict[str, Any]]]:
    """Reads what has come of some trials, and then of others; used by one task."""
    so_far = AnswersSoFar(folder_of(run_folder))
    return lambda numbers: list(rows(run_folder, numbers, so_far))
