"""What is watched beside an attempt, and may stop it: nodes that come and go, a cloud's notice and failed hardware,
replicas that differ, slow nodes. And what else is done beside it: injected faults, the live view.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.ipc import messages
from slurmft.ipc.messages import DigestsReport, TimingsReport
from slurmft.policy import life
from slurmft.policy.hangs import WorkerLook, used
from slurmft.policy.judge import Corruption
from slurmft.policy.reruns import Comparison, Digest, compare, convicted, words, words_of_split
from slurmft.policy.values import NOT_YET, SIMULATED, Order, few, order_of
from slurmft.policy.verdict import BUDGETED, Cause, Evidence, Kind, Suspect, Verdict
from slurmft.scheduler.slurm import expand
from slurmft.storage import run_folder
from slurmft.storage.checkpoint_names import Doubt, note_doubt, note_verified
from slurmft.storage.history import fingerprint
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import LiveView, take_order
from slurmft.supervisor.agents import AgentLink, AgentPool
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.crew import Crew
from slurmft.supervisor.hangs import Hangs
from slurmft.supervisor.observations import Observations, budget_after, past_ends
from slurmft.supervisor.placement import EvidenceSender, next_placement, nodes_to_use
from slurmft.supervisor.stops import Stops
from slurmft.system.background import Background

if TYPE_CHECKING:
    from slurmft.policy.stragglers import StragglerVerdict
    from slurmft.supervisor.stragglers import StragglerWatch

log = logging.getLogger(__name__)

# --- Injected faults: takes orders, chooses the rank to hit, journals it, informs the agents ---

AGAIN_S = 0.25
SIMULATION = "fault_tolerance.simulate_fault"
"""Who asked for a simulated fault."""


class Injections:
    """Carries out the orders of one attempt; each one beside everything else."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool, background: Background) -> None:
        self._config, self._start, self._pool, self._background = config, start, pool, background
        self._chance = random.Random()  # noqa: S311 - which rank is hit is not a secret

    async def look(self) -> None:
        """Take the order that waits, if there is one. Call it regularly."""
        path = self._start.run.path
        try:
            value = await self._start.thread.ask(lambda: take_order(path))
            if value is not None:
                self._background.start(self._carry_out(order_of(value)))
        except (StorageError, ValueError, OverflowError) as error:
            why = error.what if isinstance(error, StorageError) else f"the order cannot be used: {error}"
            self._start.journal.append(EventName.FAULT_NOT_INJECTED, reason=why)
        except OSError as error:  # a filesystem that hiccups; the next look finds the file
            log.debug("no look for orders: %s", error)

    def simulate(self) -> None:
        """Begin what fault_tolerance.simulate_fault asks for, unless the run has had it."""
        if self._config.fault_tolerance.simulate_fault:
            self._background.start(self._simulate())

    async def _simulate(self) -> None:
        section = self._config.fault_tolerance
        history = await self._start.thread.ask(self._start.journal.read_past)
        if any(event.event == EventName.FAULT_INJECTED and event.details.get("who") == SIMULATION for event in history):
            return
        kind = section.simulated_fault_type
        if kind == "random":
            kind = self._chance.choice(("rank_killed", "rank_hung"))
        rank = section.simulated_fault_rank
        rank = self._any_rank() if rank is None else rank
        delay_s = section.simulated_fault_base_delay * (1 + self._chance.random() / 10)
        await asyncio.sleep(delay_s)
        log.warning("FT: Simulating fault: %s; rank to fail: %d", kind, rank)
        await self._carry_out(Order(fault=SIMULATED[kind], who=SIMULATION, rank=rank))

    async def _carry_out(self, order: Order) -> None:
        named = {"fault": order.fault.value, "who": order.who}
        try:
            await asyncio.sleep(order.after_s)
        except asyncio.CancelledError:
            self._start.journal.append(
                EventName.FAULT_NOT_INJECTED, **named, reason="the attempt has ended before its time"
            )
            raise
        links, ranks = self._targets(order)
        if not links:
            reason = f"there is no node {order.node!r}" if order.node else "no agent has reported yet"
            self._start.journal.append(EventName.FAULT_NOT_INJECTED, **named, reason=reason)
            return
        where = {"node": order.node} if ranks is None else {"ranks": list(ranks)}
        self._start.journal.append(EventName.FAULT_INJECTED, **named, **where)
        hit, refused = await self._tell(links, order, ranks)
        while not hit and refused and all(why.endswith(NOT_YET) for why in refused):
            await asyncio.sleep(AGAIN_S)
            hit, refused = await self._tell(links, order, ranks)
        if not hit:
            why = "; ".join(refused[:5]) or f"there is no rank {', '.join(map(str, ranks or ()))}"
            self._start.journal.append(EventName.FAULT_NOT_INJECTED, **named, **where, reason=why)

    def _targets(self, order: Order) -> tuple[list[AgentLink], Sequence[int] | None]:
        links = [link for _, link in sorted(self._pool.links.items()) if link.channel is not None]
        if order.node:
            return [link for link in links if order.node in (link.host, str(link.node))], None
        return links, (self._any_rank() if order.rank is None else order.rank,)

    def _any_rank(self) -> int:
        return self._chance.randrange((len(self._pool.members) or self._config.nodes) * self._config.nproc_per_node)

    async def _tell(
        self, links: Sequence[AgentLink], order: Order, ranks: Sequence[int] | None
    ) -> tuple[list[int], list[str]]:
        """Which ranks were hit, and why others were not. Each agent knows which are its own."""
        call = messages.Inject(order=order.as_json(), ranks=None if ranks is None else tuple(ranks))
        replies = await asyncio.gather(*(link.call(call) for link in links), return_exceptions=True)
        hit: list[int] = []
        refused: list[str] = []
        for reply in replies:
            if isinstance(reply, BaseException):
                refused.append(str(reply))
            else:
                hit += reply.injected
                refused += reply.refused
        return hit, refused


# --- A stop, after a save, to go on with more nodes or without nodes that are taken back ---

LOOK_S = 0.5


class Resizing:
    """Watches the crew of one attempt. Nothing to watch where the run has one size."""

    def __init__(self, config: RunConfig, start: Start, crew: Crew, seen: Observations, stops: Stops) -> None:
        self._config, self._cluster, self._journal = config, start.cluster, start.journal
        self._crew, self._seen, self._stops = crew, seen, stops
        self._awaited: tuple[str, ...] = ()
        self._saved: int | None = None

    async def watch(self) -> None:
        """Grow when a checkpoint has been committed that is newer than the nodes."""
        if not self._config.size.is_elastic:
            return
        while True:
            await asyncio.sleep(LOOK_S)
            if self._stops.planned is None and self._seen.any_started and self._is_time_to_grow():
                self._stops.stop_for(Cause.RESIZED, f"goes on with {few(self._awaited, 5)} as well")

    def leave(self, link: AgentLink) -> None:
        """The job that lends this node is ending: do without it, while there is time for a save."""
        if link.leaving:
            return
        link.leaving = True
        self._journal.append(EventName.NODE_TAKEN_BACK, node=link.host, lender=link.lender)
        self._do_without(link)

    def _do_without(self, link: AgentLink) -> None:
        if link in self._crew.pool.members and self._stops.planned is None:
            self._stops.stop_for(Cause.RESIZED, f"{link.host} is taken back: job {link.lender}, which lends it, ends")

    def _is_time_to_grow(self) -> bool:
        new = self._crew.roster.newcomers(self._cluster.nodes)
        if new != self._awaited:
            self._awaited, self._saved = new, self._seen.saved()
            if new:
                self._journal.append(EventName.WILL_GROW, nodes=list(new))
        if not new:
            return False
        return self._seen.saved() != self._saved or not self._config.checkpoint.is_periodic


# --- A cloud's notice: a stop with its deadline, after which the run leaves that node; and failed hardware ---


class Reclaimed:
    """Collects the notices that agents report."""

    def __init__(self, config: RunConfig, start: Start, crew: Crew, stops: Stops, sender: EvidenceSender) -> None:
        self._config, self._start, self._crew = config, start, crew
        self._stops, self._sender = stops, sender
        self.suspects: tuple[Suspect, ...] = ()
        """Nodes that are taken away, or broken."""

        self._faults: dict[str, str] = {}

    @property
    def broken(self) -> Mapping[str, str]:
        """Nodes of the attempt on which nothing can be computed any more, and why."""
        hosts = [link.host for link in self._crew.pool.members] if self._stops.state.began else []
        return {host: self._faults[host] for host in hosts if host in self._faults}

    def note(self, link: AgentLink, report: messages.NoticeReport) -> None:
        """Take in one notice, and act on it; one that announces no certain end only adds suspicion of the node."""
        self._sender.note(link.host, report)
        if not report.ends:
            return
        self.suspects = (*self.suspects, Suspect(node=link.host))
        link.leaving = True  # the next attempt, if there is one in this allocation, does without it
        if report.fault:
            self._faults.setdefault(link.host, report.what)
        elif link in self._crew.pool.members or not self._crew.pool.members:
            cause = Cause.RESIZED if self._can_stay() else Cause.RECLAIMED
            self._stops.feed(life.Noticed(cause, f"{link.host}: {report.what}", report.left_s))

    def _can_stay(self) -> bool:
        """Whether the run goes on in this allocation: it outlives the node, and the supervisor's is another one."""
        cluster = self._start.cluster
        gone = {link.host for link in self._crew.pool.links.values() if link.leaving}
        if not isinstance(cluster, SlurmCluster) or not self._config.survives_nodes:
            return False
        return expand(cluster.job.nodes)[0] not in gone and self._crew.roster.can_go_on(gone)


# --- What each rank does now, for people and monitoring: asked of agents every few seconds, written to live.json ---

PAUSE_S = 2.0
AGENTS_PER_S = 100
"""So many agents are asked in a second: with 2,000 of them a look comes every 20 s."""


class Live:
    """One attempt's looks. A look never waits for the run folder."""

    def __init__(self, config: RunConfig, start: Start, seen: Observations, hangs: Hangs, slow: SlowNodes) -> None:
        self._config, self._start, self._seen = config, start, seen
        self._hangs, self._slow = hangs, slow
        self._before: dict[int, tuple[int, float]] = {}
        self._step_s: dict[int, float] = {}
        self._left: dict[bool, int] = {}
        self._writing: asyncio.Future[None] | None = None

    async def watch(self) -> None:
        """Look, until cancelled."""
        while True:
            await asyncio.sleep(max(PAUSE_S, self._config.nodes / AGENTS_PER_S))
            if self._writing is not None and not self._writing.done():
                continue  # the run folder is silent: its thread has other work to do first
            view = self._view(await self._hangs.looks())
            self._writing = asyncio.wrap_future(
                self._start.thread.submit(lambda view=view: self._write(view))  # type: ignore[misc]
            )

    def _write(self, view: LiveView) -> None:
        with contextlib.suppress(OSError):
            run_folder.write(self._start.run.path, view)

    def _view(self, looks: Sequence[WorkerLook]) -> LiveView:
        facts, at = self._seen.ranks(), {look.rank: look for look in looks}
        world = range(self._seen.world_size)
        self._note_steps(facts)
        own = self._slow.work_s()
        newest = [_newest(at.get(rank)) for rank in world]
        limits = self._hangs.limits_now()
        signs = [look.quiet_s if look.heartbeat_s is None else look.heartbeat_s for look in looks]
        return LiveView(
            at=time.time(),
            attempt=str(self._start.cluster.attempt),
            steps=[facts[rank].step if rank in facts else None for rank in world],
            step_s=[_rounded(own.get(rank, self._step_s.get(rank))) for rank in world],
            nodes=[at[rank].node if rank in at else "" for rank in world],
            sections=[name for name, _ in newest],
            section_s=[_rounded(held_s) for _, held_s in newest],
            heartbeat_s=_rounded(max(signs, default=None)),
            hang_used=_rounded(max((used(look, limits) for look in looks), default=None)),
            restarts_left=self._restarts_left(),
            save_interval_steps=(self._config.checkpoint.interval == "steps" and self._config.checkpoint.interval_steps)
            or None,
            tiers=_tiers(facts.values()),
        )

    def _note_steps(self, facts: Mapping[int, messages.WorkerFacts]) -> None:
        now_s = time.monotonic()
        for rank, each in facts.items():
            step, at_s = self._before.get(rank, (each.step, now_s))
            if each.step > step:
                self._step_s[rank] = (now_s - at_s) / (each.step - step)
            if each.step != step or rank not in self._before:
                self._before[rank] = each.step, now_s

    def _restarts_left(self) -> int:
        first, saved = self._seen.reached()[0], self._seen.saved()
        progressed = saved is not None and saved > first
        if progressed not in self._left:
            self._left[progressed] = least_left(self._config, self._start, first, saved)
        return self._left[progressed]


def least_left(config: RunConfig, start: Start, first: int, saved: int | None) -> int:
    """Failures of one kind that the run survives yet without further progress: the least of all kinds."""
    left, past = [], past_ends(start.history)
    for cause in BUDGETED:
        verdict = Verdict(cause=cause, reason="", first_step=first, saved_step=saved)
        budget = budget_after(past, verdict, config, str(start.cluster.attempt))
        retries = max(0, budget.max_failures - budget.failures_so_far)
        restarts = max(0, budget.max_restarts - budget.restarts_so_far)
        left.append(retries + restarts)
    return min(left)


def _newest(look: WorkerLook | None) -> tuple[str, float | None]:
    if look is None:
        return "", None
    return look.sections[-1] if look.sections else ("", look.quiet_s)


def _tiers(facts: Iterable[messages.WorkerFacts]) -> dict[str, str]:
    ranks = list(facts)
    saved, durable = min((each.saved for each in ranks), default=-1), max((each.durable for each in ranks), default=-1)
    found = {"memory": saved, "checkpoint directory": durable}
    return {name: f"step {step}" for name, step in found.items() if step >= 0}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


# --- Digests of replicas, compared: a rank that differs ends the attempt before its state spreads ---

KEPT_STEPS = 256
"""Steps of which digests are kept: of those that not all ranks have reported, and of those on which all agreed."""

WRITE_S = 20.0


class Digests:
    """The digests of one attempt."""

    def __init__(
        self, config: RunConfig, start: Start, seen: Observations, stops: Stops, sender: EvidenceSender
    ) -> None:
        self._config, self._start, self._seen, self._stops = config, start, seen, stops
        self._sender = sender
        self._steps: dict[int, dict[int, Digest]] = {}
        self._nodes: dict[int, str] = {}
        self._agreed: dict[int, tuple[Digest, ...]] = {}
        self._verified: int | None = None
        self._is_off = False
        self._doubted: Mapping[int, Mapping[str, Digest]] | None = None
        self.found: Corruption | None = None
        self.convicted: tuple[Suspect, ...] = ()
        """Nodes that were wrong when replicas differed before, as the repetition has shown."""

    def note(self, host: str, report: DigestsReport) -> None:
        """Take in one agent's report, and compare the steps that it completes."""
        if self.found is not None or self._is_off:
            return
        for each in report.ranks:
            self._nodes[each.rank] = host
            for step, value in each.digests:
                if step in self._agreed:
                    continue  # it comes again
                self._steps.setdefault(step, {})[each.rank] = Digest(group=each.group, value=value)
        for step in sorted(step for step, digests in self._steps.items() if len(digests) >= self._seen.world_size):
            self._judge(step, self._steps.pop(step))
            if self.found is not None or self._is_off:
                return
        for step in sorted(self._steps)[:-KEPT_STEPS]:
            del self._steps[step]
        self._verify()

    def trusted(self, saved: int | None) -> int | None:
        """The newest saved step that the next attempt may use; of a spoilt attempt, one on which replicas agreed."""
        if self.found is None or saved is None or saved <= self.found.trusted_step:
            return saved
        return self._verified

    async def close(self) -> None:
        """The workers have ended: note which of their checkpoints are not to be used, before anything follows."""
        if self.found is None:
            self._verify()
            return
        doubt = Doubt(
            generation=self._start.generation, after_step=self.found.trusted_step, reason=self.found.reason[:1000]
        )
        folder = self._config.checkpoint_dir
        try:
            await asyncio.wait_for(self._start.thread.ask(lambda: note_doubt(folder, doubt)), WRITE_S)
        except (OSError, StorageError) as error:  # OSError covers TimeoutError
            log.error("checkpoints after step %d are not marked: %s", self.found.trusted_step, error)

    def _judge(self, step: int, digests: Mapping[int, Digest]) -> None:
        result = compare(digests)
        if result.unlike:
            self._is_off = True
            reason = "no two ranks are equal: they are no replicas, and are not compared any more"
            self._start.journal.append(EventName.REPLICAS_UNLIKE, step=step, reason=reason)
            log.warning("digests: after step %d, %s", step, reason)
        elif result.differs:
            self._accuse(step, digests, result)
        elif result.agrees:
            self._agreed[step] = tuple(dict.fromkeys(digests.values()))
            for old in sorted(self._agreed)[:-KEPT_STEPS]:
                del self._agreed[old]
            self._settle(step)

    def _accuse(self, step: int, digests: Mapping[int, Digest], result: Comparison) -> None:
        ranks = result.wrong or result.split
        nodes = {rank: self._nodes[rank] for rank in ranks}
        is_known = bool(result.wrong) or len({*nodes.values()}) == 1
        reason = words(nodes, result.compared, step) if result.wrong else words_of_split(nodes, step)
        suspects = tuple(Suspect(node=node, rank=rank) for rank, node in sorted(nodes.items())) if is_known else ()
        trusted = max([*self._agreed, self._seen.reached()[0]])
        values = {} if is_known else {node: [digests[rank].group, digests[rank].value] for rank, node in nodes.items()}
        self.found = Corruption(reason=reason, step=step, trusted_step=trusted, suspects=suspects)
        self._start.journal.append(
            EventName.REPLICAS_DIFFER, step=step, ranks=list(ranks), nodes=sorted({*nodes.values()}),
            known=is_known, trusted_step=trusted, reason=reason, **({"digests": values} if values else {}),
        )  # fmt: skip
        log.error("SILENT DATA CORRUPTION: %s; on from step %d or before", reason, trusted)
        # at once: whatever the ranks would still save, or keep just in time, may be spoilt
        self._stops.feed(life.Ended())

    def _verify(self) -> None:
        """Note that the newest saved state is one on which all replicas agreed."""
        saved = self._seen.saved()
        if saved is None or saved == self._verified or saved not in self._agreed:
            return
        self._verified = saved
        folder, generation = self._config.checkpoint_dir, self._start.generation
        self._start.journal.append(EventName.CHECKPOINT_VERIFIED, step=saved)
        self._start.thread.submit(lambda: _noted(folder, saved, generation))

    def _settle(self, step: int) -> None:
        """Where replicas differed without a majority before, this step's repetition tells which was wrong."""
        if self._doubted is None:
            self._doubted = doubted_in(self._start.history)
        nodes = convicted(self._doubted.get(step, {}), self._agreed[step])
        if not nodes:
            return
        reason = f"the repetition of step {step} shows that {', '.join(nodes)} had computed it wrongly"
        self._start.journal.append(EventName.REPLICA_CONVICTED, step=step, nodes=list(nodes), reason=reason)
        kind, now = Kind.REPLICA_DIFFERS, time.time()
        self._sender.add(
            [Evidence(kind=kind, suspect=Suspect(node=node), message=reason, at=now, step=step) for node in nodes]
        )
        if self._stops.planned is None and {*nodes} & {*self._nodes.values()}:
            self.convicted = tuple(Suspect(node=node) for node in nodes)
            self._stops.stop_for(Cause.REPLICAS_DIFFER, reason)


def doubted_in(history: Sequence[Event]) -> dict[int, dict[str, Digest]]:
    """Steps after which replicas differed without a majority, and the digest of each node then; damage is left out."""
    found: dict[int, dict[str, Digest]] = {}
    settled: set[Any] = set()
    for event in history:
        facts = event.details
        if event.event == EventName.REPLICA_CONVICTED:
            settled.add(facts.get("step"))
        elif event.event == EventName.REPLICAS_DIFFER and isinstance(given := facts.get("digests"), dict):
            step = facts.get("step")
            if type(step) is int:
                found[step] = {
                    str(node): Digest(group=int(pair[0]), value=int(pair[1]))
                    for node, pair in given.items()
                    if isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair)
                }
    return {step: digests for step, digests in found.items() if step not in settled}


def _noted(folder: Any, step: int, generation: int) -> None:
    try:
        note_verified(folder, step, generation)
    except (OSError, StorageError) as error:
        log.warning("step %d is not noted as verified: %s", step, error)


# --- Actions when nodes are found to be slow: a report; and, where it pays, a stop that moves the run ---


class SlowNodes:
    """Collects the times that agents report of their ranks. Costs nothing before the first report."""

    def __init__(
        self, config: RunConfig, start: Start, seen: Observations, stops: Stops, *, sender: EvidenceSender
    ) -> None:
        self._config, self._start, self._seen, self._stops = config, start, seen, stops
        self._sender = sender
        self._watch: StragglerWatch | None = None
        self._is_blind = False
        self.suspects: tuple[Suspect, ...] = ()
        """Nodes that the run is being moved away from."""

    def note(self, host: str, report: TimingsReport) -> None:
        """Take in one agent's report, and act on the verdict that it completes."""
        if self._watch is None:
            try:
                from slurmft.supervisor.stragglers import StragglerWatch  # brings numpy, 0.1 s at every start
            except ImportError as error:  # an installation that only submits has none
                if not self._is_blind:
                    log.warning("stragglers are not looked for: %s; pip install numpy beside slurmft", error)
                self._is_blind = True
                return
            nodes = self._seen.world_size // self._config.nproc_per_node  # as many as this attempt has
            self._watch = StragglerWatch(
                self._config.model_copy(update={"nodes": nodes}),
                self._start.run.path,
                self._start.journal,
                workload=fingerprint(self._config.workload),
            )
        self._watch.note(host, report)
        if (slow := self._watch.verdict()) is not None:
            self._judge(self._watch, slow)

    def work_s(self) -> Mapping[int, float]:
        """Seconds of each rank's own work in a step, as the newest window had them; empty before the first."""
        return {} if self._watch is None else self._watch.work_s

    def exchange(self) -> None:
        """Read and write the nodes' past. In the run folder's thread.

        Raises:
            OSError: the run folder cannot be written.
        """
        if self._watch is not None:
            self._watch.exchange()

    def _judge(self, watch: StragglerWatch, slow: StragglerVerdict) -> None:
        step = self._seen.reached()[1]
        worth = watch.pays(slow, steps_left=max(0, self._seen.until() - step))
        move = slow.stop and worth.worth
        self._start.journal.append(
            EventName.STRAGGLER_JUDGED, nodes=list(slow.nodes), move=move, gain_s=round(worth.gain_s, 1),
            cost_s=round(worth.cost_s, 1), reason=worth.reason,
        )  # fmt: skip
        self._stops.background.start(self._act(slow, step, worth.reason if move else ""))

    async def _act(self, slow: StragglerVerdict, step: int, reason: str) -> None:
        """Hand the evidence in; with a ``reason``, save and move, unless a stop is under way or there are no others."""
        moves = bool(reason) and self._stops.planned is None and await self._others_exist(slow.nodes)
        if not moves:  # else the verdict says it
            self._sender.add(slow.evidence(time.time(), step))
        elif self._stops.planned is None:
            log.warning("Detected stragglers. Terminating training... on %s, to go on elsewhere", ", ".join(slow.nodes))
            self.suspects = tuple(Suspect(node=node) for node in slow.nodes)
            self._stops.stop_for(Cause.STRAGGLER, f"{slow.text}; {reason}")

    async def _others_exist(self, nodes: tuple[str, ...]) -> bool:
        cluster = self._start.cluster
        why = "there are no other nodes"
        if isinstance(cluster, SlurmCluster):
            if nodes_to_use(cluster.present(), frozenset(nodes), self._config.size.minimum) is not None:
                return True
            wanted: dict[str, Any] = {
                "partition": cluster.job.partition, "job": cluster.own, "history": self._start.history,
                "suspects": nodes,
            }  # fmt: skip
            placement = None
            with contextlib.suppress(StorageError):
                placement = await asyncio.to_thread(next_placement, self._config, **wanted)
            why = placement.impossible if placement is not None else "the exclusion list cannot be read"
        if why:
            self._start.journal.append(EventName.STRAGGLER_KEPT, nodes=list(nodes), reason=why)
        return not why
