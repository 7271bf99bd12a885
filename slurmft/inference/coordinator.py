"""In the supervisor: the coordinator leases requests to agents and commits their answers; the roster knows the
replicas and routers of all nodes, and tells every router of them.

The coordinator knows agents by a number and an epoch. An agent that is lost gets another epoch when it comes back;
what it still says under the old one does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError, StorageUnavailable
from slurmft.inference.endpoint import HighAvailabilityCluster, RouterAddress
from slurmft.inference.ledger import SEGMENT_NAME, Ledger, segments_of
from slurmft.inference.requests import Batch, Requests, segment_name
from slurmft.ipc import messages
from slurmft.policy.inference import Death, all_down, evidence_of, is_poison, is_suspect
from slurmft.policy.serving import Readiness
from slurmft.storage.journal import EventName
from slurmft.storage.queue import SegmentWriter

# --- leases ---
# Who answers what: ranges of requests are leased to agents, and come back when an agent is lost or gives them back.

Run = tuple[int, int]
"""Numbers of requests: the first, and the one behind the last."""

OPEN, LEASED, DONE = 0, 1, 2
NO_AGENT = -1


@dataclass(slots=True)
class _Lease:
    at_s: float
    runs: list[Run]
    doubled: bool = False


class Leases:
    """Every request is open, leased, or done; a lost agent's leases are open again at once.

    Args:
        done: one flag for each request; those that are answered already.
        tail_after_s: age from which a lease is given to a second agent when nothing else is open.
    """

    def __init__(self, done: NDArray[np.bool_], *, tail_after_s: float) -> None:
        self._state = np.where(done, DONE, OPEN).astype(np.uint8)
        self._holder = np.full(len(done), NO_AGENT, dtype=np.int32)
        """The agent whose loss opens a request that is leased; a second one at the end of the batch is none."""

        self._tail_after_s = tail_after_s
        self._held: dict[int, deque[_Lease]] = defaultdict(deque)
        self._suspects: deque[int] = deque()
        self._deaths: dict[int, list[Death]] = {}
        self.total = len(done)
        self.done = int(done.sum())
        self._open = _runs(np.flatnonzero(self._state == OPEN))  # sorted, which is a heap

    @property
    def finished(self) -> bool:
        """Every request is done."""
        return self.done == self.total

    def lease(self, agent: int, count: int, now_s: float) -> list[Run]:
        """Up to ``count`` requests for an agent, those first that come first in the input; at the end others' old ones.

        Suspects are not among them: each is leased alone.
        """
        self._forget_ended(agent)
        runs: list[Run] = []
        while count > 0 and self._open:
            first, last = heapq.heappop(self._open)
            if last - first > count:
                heapq.heappush(self._open, (first + count, last))
                last = first + count
            for low, high in self._part(first, last, OPEN):
                self._state[low:high], self._holder[low:high] = LEASED, agent
                count -= high - low
                runs.append((low, high))
        if not runs and count > 0:
            runs = self._tail(agent, count, now_s)
        if runs:
            self._held[agent].append(_Lease(now_s, runs))
        return runs

    def grow(self, total: int) -> None:
        """There are more requests now, all of them open."""
        new = total - self.total
        self._state = np.concatenate((self._state, np.full(new, OPEN, dtype=np.uint8)))
        self._holder = np.concatenate((self._holder, np.full(new, NO_AGENT, dtype=np.int32)))
        heapq.heappush(self._open, (self.total, total))
        self.total = total

    def lease_alone(self, agent: int, now_s: float, *, not_on: str = "") -> int | None:
        """A request that may have killed an engine, to be tried with nothing beside it; None when there is none.

        Args:
            not_on: a node; what has failed there last is for others.
        """
        for _ in range(len(self._suspects)):
            index = self._suspects.popleft()
            if not_on and self._state[index] == OPEN and self._deaths[index][-1].replica.startswith(f"{not_on}/"):
                self._suspects.append(index)
            elif self._state[index] == OPEN:
                self._state[index], self._holder[index] = LEASED, agent
                self._held[agent].append(_Lease(now_s, [(index, index + 1)], doubled=True))
                return index
        return None

    def answered(self, runs: Iterable[Sequence[int]]) -> None:
        """These are committed, by whichever agent."""
        for first, last in runs:
            part = self._state[first:last]
            self.done += int((part != DONE).sum())
            part[:] = DONE

    def answered_as_in(self, done: NDArray[np.bool_]) -> None:
        """Requests whose flag is set are answered."""
        self._state[np.flatnonzero(done[: self.total])] = DONE  # the ledger learns of new requests first
        self.done = int((self._state == DONE).sum())

    def reopen(self, indexes: Iterable[int]) -> None:
        """Answers that cannot be read are no answers."""
        for index in indexes:
            self.done -= int(self._state[index] == DONE)
            self._state[index] = OPEN
            heapq.heappush(self._open, (index, index + 1))

    def give_back(self, agent: int, runs: Iterable[Sequence[int]]) -> int:
        """Open again, where it is this agent that has them: it will not answer them. Returns how many."""
        count = 0
        for first, last in runs:
            for low, high in self._part_of(agent, first, last):
                self._state[low:high] = OPEN
                count += high - low
                suspects = [each for each, deaths in self._deaths.items() if low <= each < high and is_suspect(deaths)]
                self._suspects.extend(suspects)
                for run in _without((low, high), suspects):
                    heapq.heappush(self._open, run)
        return count

    def died(self, indexes: Sequence[int], replica: str, how: str) -> list[tuple[int, str]]:
        """A replica has died with these in flight. Returns those that are given up, and why.

        One that was there alone, or at an earlier death too, is a suspect now; the others are open again. A request
        that is given up stays leased, to the coordinator: it is answered with an error.
        """
        given_up = []
        for index in indexes:
            if self._state[index] == DONE:
                continue
            deaths = self._deaths.setdefault(index, [])
            deaths.append(Death(replica, alone=len(indexes) == 1, how=how))
            if is_poison(deaths):
                self._state[index], self._holder[index] = LEASED, NO_AGENT
                given_up.append((index, evidence_of(deaths)))
                continue
            self._state[index] = OPEN
            if is_suspect(deaths):
                self._suspects.append(index)
            else:
                heapq.heappush(self._open, (index, index + 1))
        return given_up

    def held(self, agent: int) -> list[Run]:
        """What an agent has, and has not answered."""
        return [
            part
            for lease in self._held.get(agent, ())
            for first, last in lease.runs
            for part in self._part(first, last, LEASED)
        ]

    def lose(self, agent: int) -> int:
        """An agent is lost: all that it holds and has not answered is open again. Returns how many those are."""
        return sum(self.give_back(agent, lease.runs) for lease in self._held.pop(agent, ()))

    def _part(self, first: int, last: int, state: int) -> list[Run]:
        return [(first + low, first + high) for low, high in _runs(np.flatnonzero(self._state[first:last] == state))]

    def _part_of(self, agent: int, first: int, last: int) -> list[Run]:
        is_held = (self._state[first:last] == LEASED) & (self._holder[first:last] == agent)
        return [(first + low, first + high) for low, high in _runs(np.flatnonzero(is_held))]

    def _forget_ended(self, agent: int) -> None:
        leases = self._held[agent]
        while leases and not any(self._part_of(agent, first, last) for first, last in leases[0].runs):
            leases.popleft()

    def _tail(self, agent: int, count: int, now_s: float) -> list[Run]:
        runs: list[Run] = []
        for other, leases in self._held.items():
            if other == agent:
                continue
            for lease in leases:
                if count <= 0 or now_s - lease.at_s < self._tail_after_s:
                    break
                if lease.doubled:
                    continue
                left = [part for first, last in lease.runs for part in self._part_of(other, first, last)]
                lease.doubled = True
                runs += left
                count -= sum(last - first for first, last in left)
        return runs


def _without(run: Run, indexes: Sequence[int]) -> list[Run]:
    """The parts of a run that are left without these numbers."""
    parts, first = [], run[0]
    for index in sorted(indexes):
        if first < index:
            parts.append((first, index))
        first = index + 1
    return [*parts, (first, run[1])] if first < run[1] else parts


def _runs(indexes: NDArray[np.intp]) -> list[Run]:
    if not len(indexes):
        return []
    breaks = np.flatnonzero(np.diff(indexes) > 1)
    firsts = np.concatenate(([indexes[0]], indexes[breaks + 1]))
    lasts = np.concatenate((indexes[breaks], [indexes[-1]])) + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


# --- The coordinator: in the supervisor, it leases requests to agents and commits their answers ---

COORDINATOR = 999_999
"""The node number in the names of the coordinator's own segments: answers that no engine gave."""

EPOCHS = 1_000_000
"""Of each generation: agents and engines may outlive the supervisor that has given them the last one."""

STORAGE_PAUSE_S = 1.0
TAIL_LOOK_S = 0.25
MAX_EARLIER = 2
"""Files of earlier replicas in which text of a request is looked for, beside that of the last one."""

MAX_NAMES = 256
"""Such files for one lease."""

MAX_RUNS = 2000
"""Runs in one message; the rest follows in further ones."""

Send = Callable[[messages.Call[Any]], None]
Submit = Callable[[Callable[[], Any]], "Future[Any]"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Agent:
    node: int
    host: str
    epoch: int
    send: Send
    wanted: int = 0
    is_leaving: bool = False
    replicas: dict[int, str] = field(default_factory=dict)
    """The phase of each replica that has said something."""

    lives: dict[int, int] = field(default_factory=dict)
    """How often each of them was started."""

    def owns(self, segment: str) -> bool:
        """Whether a segment is written under the agent's present epoch, which it alone has, in all generations.

        Not by the number of its node: one that another job lends has that of its own job.
        """
        match = SEGMENT_NAME.fullmatch(segment)
        return match is not None and int(match["epoch"]) == self.epoch


class Coordinator:
    """All requests of a batch, and the agents that answer them.

    Args:
        submit: does blocking work of the run folder in order, in a thread.
        note: writes an event of inference into the journal.
    """

    def __init__(
        self, config: InferenceConfig, batch: Batch, ledger: Ledger, submit: Submit, note: Callable[..., object]
    ) -> None:
        self._config, self.batch, self.ledger = config, batch, ledger
        self._submit, self._note = submit, note
        self.requests = Leases(ledger.done, tail_after_s=config.doubles_after_s)
        self.agents: dict[int, _Agent] = {}
        self._epochs = itertools.count(ledger.generation * EPOCHS + 1)
        self._parts: list[tuple[str, int, Sequence[tuple[int, int]]]] = []
        self._have_parts, self._committing = asyncio.Event(), asyncio.Lock()
        self.committed = asyncio.Event()
        """Set after each commit; cleared by the one that waits for it."""

        self.partials: dict[int, tuple[str, ...]] = {}
        """Files with text that open requests have already; a hint, of which nothing depends."""

        self._own: SegmentWriter | None = None
        self._writing: set[asyncio.Task[None]] = set()
        self._stopping = self._is_held = False
        self.answered_here = 0
        """Requests answered in this attempt."""

    # Agents come and go

    def join(self, node: int, host: str, send: Send) -> int:
        """An agent takes part; returns the epoch under which it does."""
        if node in self.agents:
            self.lose(node)
        epoch = next(self._epochs)
        self.agents[node] = _Agent(node, host, epoch, send)
        return epoch

    def lose(self, node: int) -> int:
        """An agent is gone: its requests are open again, and what it wrote so far is looked at. Returns how many."""
        if (agent := self.agents.pop(node, None)) is None:
            return 0
        for run in self.requests.held(node):
            self._keep_partials(agent, agent.lives, range(*run))
        count = self.requests.lose(node)
        self._submit(lambda: self._salvage(agent))
        self._serve_others()
        return count

    def _salvage(self, agent: _Agent) -> None:
        try:
            found = self.ledger.salvage(agent.owns)
        except StorageError as error:
            log.warning("what the agent on %s has left behind cannot be read: %s", agent.host, error)
            return
        if found:
            log.info("%d answers of the lost agent on %s were on the disk already", found, agent.host)

    def grow(self, batch: Batch) -> None:
        """More requests have been added, which the ledger knows of already."""
        self.batch = batch
        self.requests.grow(batch.total)
        self._serve_others()

    def adopt_salvaged(self) -> None:
        """Bring the leases in line with the ledger, which may have more answers than agents reported."""
        if self.ledger.count > self.requests.done:
            self.requests.answered_as_in(self.ledger.done)
            self.committed.set()  # it may have been the last

    # Reports

    def on_report(self, node: int, report: messages.InferenceReport) -> bool:
        """Handle a report; whether it belongs to a lease that counts."""
        agent = self.agents.get(node)
        if agent is None or report.epoch != agent.epoch:
            return False
        match report:
            case messages.RequestsWanted():
                agent.wanted += report.count
                self._serve(agent)
            case messages.RequestsAnswered():
                self._take(agent, report)
            case messages.RequestsReturned():
                for run in self._known(report.runs):
                    self._keep_partials(agent, agent.lives, range(*run))
                self.requests.give_back(node, self._known(report.runs))
                self._serve_others()
            case messages.ReplicaPhase():
                agent.replicas[report.replica], agent.lives[report.replica] = report.phase, report.life
            case messages.ReplicaDied():
                agent.replicas[report.replica] = "waiting"
                self._on_death(agent, report)
        return True

    def stop(self) -> None:
        """Lease nothing more."""
        self._stopping = True

    def let_go(self, node: int) -> None:
        """Lease nothing more to this agent."""
        if node in self.agents:
            self.agents[node].is_leaving = True

    @property
    def all_down(self) -> bool:
        """Every replica of every agent has given up."""
        phases = [phase for agent in self.agents.values() for phase in agent.replicas.values()]
        return all_down(phases, least=self._config.replicas_per_node * len(self.agents))

    def _known(self, runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(first, last) for first, last in runs if last <= self.batch.total]

    def _take(self, agent: _Agent, report: messages.RequestsAnswered) -> None:
        segment = report.segment
        if not agent.owns(segment) or len(self._known(report.runs)) < len(report.runs):
            log.error("the agent on %s reports answers in %s, which is not its own; they do not count", agent.host,
                      segment[:80])  # fmt: skip
            return
        self._parts.append((segment, report.end, report.runs))
        self._have_parts.set()

    def _on_death(self, agent: _Agent, report: messages.ReplicaDied) -> None:
        in_flight = [index for index in report.in_flight if index < self.batch.total]
        self._keep_partials(agent, [report.replica], in_flight)
        given_up = self.requests.died(in_flight, report.name, report.how)
        for index, why in given_up:
            self._answer_as_poison(index, why)
        self._serve_at_once(len(in_flight) - len(given_up))

    def _answer_as_poison(self, index: int, why: str) -> None:
        def write() -> tuple[str, int]:
            if self._own is None:
                generation = self.ledger.generation
                name = segment_name(generation=generation, node=COORDINATOR, replica=0, life=1, epoch=0)
                self._own = SegmentWriter(segments_of(self.batch.folder) / name, {"generation": generation})
            end = self._own.append([{"index": index, "error": {"code": "poison_request", "message": why}}])
            self._own.sync()
            return self._own.path.name, end

        async def work() -> None:
            while True:
                try:
                    name, end = await asyncio.wrap_future(self._submit(write))
                    break
                except (OSError, StorageError) as error:
                    log.warning("the error of request %d cannot be written, trying again: %s", index, error)
                    await asyncio.sleep(STORAGE_PAUSE_S)
            self._parts.append((name, end, [(index, index + 1)]))
            self._have_parts.set()

        with Requests(self.batch.folder) as requests:
            custom_id = requests.get(index)["id"]
        self._note(EventName.REQUEST_GIVEN_UP, request=index, custom_id=custom_id[:200], reason=why)
        task = asyncio.ensure_future(work())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    # Leases

    def _serve_others(self) -> None:
        for agent in self.agents.values():
            self._serve(agent)

    def _serve_at_once(self, count: int) -> None:
        """Lease what a dead replica has left to agents that work, in equal parts, asked for or not."""
        able = [each for each in self.agents.values() if "ready" in each.replicas.values() and not each.is_leaving]
        share = -(-count // len(able)) if able else 0
        for agent in able:
            missing = min(share, count) - agent.wanted
            agent.wanted += max(0, missing)
            count -= share
            self._serve(agent)
            if count <= 0:
                return
        self._serve_others()

    def _serve(self, agent: _Agent) -> None:
        if self._stopping or agent.is_leaving or agent.wanted <= 0:
            return
        now_s = time.monotonic()
        alone: list[int] = []
        is_bound = self._config.engine.process is not None and any(
            agent.host != each.host and not each.is_leaving and "ready" in each.replicas.values()
            for each in self.agents.values()
        )
        not_on = agent.host if is_bound else ""
        while (
            agent.wanted > len(alone)
            and (index := self.requests.lease_alone(agent.node, now_s, not_on=not_on)) is not None
        ):
            alone.append(index)
        runs = self.requests.lease(agent.node, agent.wanted - len(alone), now_s)
        if not runs and not alone:
            return
        agent.wanted = max(0, agent.wanted - len(alone) - sum(last - first for first, last in runs))
        for at in range(0, len(runs) or 1, MAX_RUNS):
            some = runs[at : at + MAX_RUNS]
            partials = self._partials_of(some)
            agent.send(messages.Lease(epoch=agent.epoch, runs=tuple(some), alone=tuple(alone), partials=partials))
            alone = []

    def _keep_partials(self, agent: _Agent, replicas: Iterable[int], indexes: Iterable[int]) -> None:
        """These replicas of an agent may have generated text for these requests: the next ones know where to look."""
        if self._config.engine.continue_from_prefix == "never":
            return
        here = {"generation": self.ledger.generation, "node": agent.node, "epoch": agent.epoch}
        names = tuple(
            segment_name(**here, replica=each, life=agent.lives[each])
            for each in replicas if each in agent.lives
        )  # fmt: skip
        for index in indexes:
            earlier = tuple(name for name in self.partials.get(index, ())[-MAX_EARLIER:] if name not in names)
            self.partials[index] = (*earlier, *names)

    def _partials_of(self, runs: Iterable[tuple[int, int]]) -> tuple[str, ...] | None:
        if not self.partials:
            return None
        indexes = (index for run in runs for index in range(*run))
        names = dict.fromkeys(name for index in indexes for name in self.partials.get(index, ()))
        return tuple(names)[:MAX_NAMES] or None

    # Commits

    async def commit_regularly(self) -> None:
        """Commit what agents report, as it comes; a disk that is full holds this up and loses nothing."""
        while True:
            await self._have_parts.wait()
            await self.commit_now()

    async def commit_now(self, within_s: float | None = None) -> None:
        """Commit everything that was reported, or give up after this time: the next start finds it on the disk."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._committing:
                await self._commit()

    async def _commit(self) -> None:
        self._have_parts.clear()
        parts, self._parts = self._parts, []
        if not parts:
            return
        try:
            new = await self._commit_parts(parts)
        except asyncio.CancelledError:  # the time is up; another commit does what this one has not
            self._parts[:0] = parts
            self._have_parts.set()
            raise
        self._is_held = False
        self.answered_here += new
        self.requests.answered(run for _, _, runs in parts for run in runs)
        for index in (index for _, _, runs in parts * bool(self.partials) for run in runs for index in range(*run)):
            self.partials.pop(index, None)
        self.committed.set()

    def held_up(self, error: StorageUnavailable) -> None:
        """Say once that the disk takes nothing."""
        log.warning("answers cannot be written, trying again: %s", error)
        if not self._is_held:
            self._note(EventName.ANSWERS_HELD_UP, reason=str(error))
        self._is_held = True

    async def _commit_parts(self, parts: Sequence[tuple[str, int, Sequence[tuple[int, int]]]]) -> int:
        while True:
            try:
                found: int = await asyncio.wrap_future(self._submit(lambda: self.ledger.commit(parts)))
            except StorageUnavailable as error:
                self.held_up(error)
                await asyncio.sleep(STORAGE_PAUSE_S)
            else:
                return found

    async def watch_tail(self) -> None:
        """Look again and again whether something has become free for agents that wait."""
        while True:
            await asyncio.sleep(TAIL_LOOK_S)
            self.adopt_salvaged()
            self._serve_others()


# The roster: in the supervisor, it knows the replicas and routers of all nodes, and tells every router of them.

WRITE_AGAIN_S = 1.0


@dataclass(slots=True)
class _AgentOfRoster:
    node: int
    host: str
    epoch: int
    send: Send
    phases: dict[int, str] = field(default_factory=dict)
    places: dict[int, messages.ReplicaPlace] = field(default_factory=dict)
    router_is_down: bool = False
    """It was started too often, and another node has one instead."""

    answered: int = 0
    """Requests of its router's present life."""

    load: int | None = None
    """Requests that it has; None while that is not known."""

    is_leaving: bool = False
    """The job that lends its node ends."""


@dataclass(slots=True)
class Answered:
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

        self.requests = Answered(served)
        self.cluster = HighAvailabilityCluster()
        self.agents: dict[int, _AgentOfRoster] = {}
        self.lenders: dict[int, str] = {}
        """Jobs that lend nodes, by the numbers of these."""

        self._nodes, self._epochs = nodes, itertools.count(1)
        self._changed = asyncio.Event()
        self._changed.set()  # what an earlier attempt has left in endpoints.json is gone
        self.publish: Callable[[HighAvailabilityCluster], None] = lambda cluster: cluster.write(run_folder)
        """Writes endpoints.json, where these are the routers that clients are to use."""

        self._heirs: tuple[messages.ReplicaPlace, ...] | None = None
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
        """Which are to be on: of the run's own nodes before those that are lent; those that are already, the ready ones
        first, then those that are off, then those that still have something to finish; none that has given up. One on a
        lent node stays until those of the own nodes are ready.
        """
        able = [
            (node in self.lenders, (node, number) not in self._on,
             self._is_ready((node, number)) != ((node, number) in self._on), number, node)
            for node, agent in self.agents.items() for number in range(self._config.replicas_per_node)
            if not agent.is_leaving and agent.phases.get(number) not in ("down", "member")
        ]  # fmt: skip
        most = len(able) if self.wants_all() or self.wanted is None else self.wanted
        places = [(node, number) for *_, number, node in sorted(able)]
        lacking = sum(not self._is_ready(place) for place in places[:most])
        stay = [place for place in places[most:] if place in self._on and self._is_ready(place)]
        return {*places[:most], *stay[:lacking]}

    def _is_ready(self, place: tuple[int, int]) -> bool:
        return self.agents[place[0]].phases.get(place[1]) == "ready"

    def is_used(self, node: int) -> bool:
        """Whether a replica or a router is on this node, or still finishes what it has."""
        agent = self.agents.get(node)
        is_named = any(at == node for at, _ in self._on) or any(each.number == node for each in self.cluster.routers)
        return agent is not None and (is_named or not {*agent.phases.values()} <= {"off", "down"})

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
        self.agents[node] = _AgentOfRoster(node, host, epoch, send)
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

    def on_report(self, node: int, report: messages.InferenceReport) -> bool:
        """Handle a report; whether it belongs to an agent that counts."""
        agent = self.agents.get(node)
        if agent is None or report.epoch != agent.epoch:
            return False
        match report:
            case messages.ReplicaPhase():
                self._on_phase(agent, report)
            case messages.ReplicaDied():
                agent.phases[report.replica] = "waiting"
                self._drop_place(agent, report.replica)
            case messages.RouterPhase():
                self._on_router(agent, report)
        return True

    def let_go(self, node: int) -> None:
        """Others begin in place of the replicas of this agent, which tell the routers themselves that they drain."""
        if node in self.agents:
            self.agents[node].is_leaving = True
            self._tell_all()

    def stop(self) -> None:
        """The endpoint goes away: routers refuse what comes from now on."""
        self._closing = True
        self._tell_all()

    @property
    def all_down(self) -> bool:
        """Every replica of every agent has given up."""
        phases = [phase for agent in self.agents.values() for phase in agent.phases.values()]
        return all_down(phases, least=self._config.replicas_per_node * len(self.agents))

    @property
    def routers_down(self) -> bool:
        """The router of every agent has given up."""
        return bool(self.agents) and all(each.router_is_down for each in self.agents.values())

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
    def places(self) -> tuple[messages.ReplicaPlace, ...]:
        """All replicas that are ready."""
        return tuple(place for agent in self.agents.values() for place in agent.places.values())

    def readiness(self) -> Readiness:
        """How far the replicas and routers are."""
        phases = [phase for agent in self.agents.values() for phase in agent.phases.values()]
        wanted = min(self._serving.routers, max(1, len(self.agents.keys() - self.lenders.keys())))
        expected = self._expected if self.wanted is None or self.wants_all() else len(self._on)
        return Readiness(ready=len(self.places), down=phases.count("down"), expected=expected,
                         routers=len(self.cluster.routers), routers_wanted=wanted)  # fmt: skip

    def hand_over(self, heirs: Sequence[messages.ReplicaPlace], job: str) -> None:
        """From now on the routers here have the replicas of ``job`` as well, which go on when these drain."""
        # names may be the same: a node of both jobs
        self._heirs = tuple(replace(each, name=f"{each.name}@{job}") for each in heirs)
        self._tell_all()

    def retire(self) -> None:
        """The routers take no more connections, finish what they have, and end."""
        self._retired = True
        self._tell_all()

    def _on_phase(self, agent: _AgentOfRoster, report: messages.ReplicaPhase) -> None:
        agent.phases[report.replica] = report.phase
        if report.phase == "ready" and report.port is not None and report.hosts is not None:
            # the port tells lives apart whose agents both count from 1, and is the same for the next supervisor
            # ... as are the job that lends a node, and the number of another one
            where = self.lenders.get(agent.node, agent.node)
            name = f"{agent.host}.{where}/{report.replica}#{report.life}.{report.port}"
            agent.places[report.replica] = messages.ReplicaPlace(name=name, hosts=report.hosts, port=report.port)
            if self._holding is not None:
                self._on.add((agent.node, report.replica))
            self._settled |= {(agent.node, report.replica)} & self._on
            self._tell_all()
        else:
            self._drop_place(agent, report.replica)
            if report.phase in ("down", "off") and self.wanted is not None:  # another is on instead, or it is again
                self._tell_all()

    def _drop_place(self, agent: _AgentOfRoster, replica: int) -> None:
        if agent.places.pop(replica, None) is not None:
            self._tell_all()

    def _on_router(self, agent: _AgentOfRoster, report: messages.RouterPhase) -> None:
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

    def _without_router(self, agent: _AgentOfRoster) -> None:
        if any(each.number == agent.node for each in self.cluster.routers):
            self.cluster = self.cluster.without_node(agent.node)
            self._changed.set()

    def _tell_all(self) -> None:
        if self._holding is not None:
            if self.wanted is None and len(self.places) >= self._expected:
                self._release()
            return
        places = (*self.places, *(self._heirs or ()))
        with_router = [] if self._retired else self._nodes_for_routers()
        self._on = self._chosen()
        self._settled &= self._on
        expected = self._expected if self._heirs is None else len(self._heirs)
        if self.wanted is not None and self._heirs is None:
            expected = len(self._settled)
        for agent in self.agents.values():
            agent.send(messages.Members(epoch=agent.epoch, router=agent.node in with_router, expected=expected,
                                        closing=self._closing or self._heirs == (), replicas=places,
                                        on=self._on_at(agent.node), wanted=len(self._on)))  # fmt: skip

    def _nodes_for_routers(self) -> list[int]:
        """A node that is lent for the load has no router: clients would go on using it when it is given back."""
        able = [each.node for each in self.agents.values() if not each.router_is_down and not each.is_leaving]
        own, lent = ([node for node in sorted(able) if (node in self.lenders) == is_lent] for is_lent in (False, True))
        return [*own, *lent[: max(0, self._nodes - len(own))]][: self._serving.routers]

    def _on_at(self, node: int) -> tuple[int, ...] | None:
        return None if self.wanted is None else tuple(sorted(number for at, number in self._on if at == node))
