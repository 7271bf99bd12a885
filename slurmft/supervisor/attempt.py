"""One attempt, from the start of its agents to its verdict. ``supervisor.act`` does what follows from the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from slurmft.config.run import RunConfig
from slurmft.errors import LaunchError, StorageError
from slurmft.ipc import messages
from slurmft.ipc.pages import RESCUE_S
from slurmft.policy import life
from slurmft.policy.judge import Blame, Circumstances, WorkerEnd, held_against, judge
from slurmft.policy.verdict import Cause, Suspect, Verdict
from slurmft.scheduler.slurm import in_order
from slurmft.storage.history import fingerprint
from slurmft.storage.journal import EventName, Journal
from slurmft.supervisor.agents import CALL_TIMEOUT_S, AgentLink, AgentLost, AgentPool
from slurmft.supervisor.cluster import Cluster, Start
from slurmft.supervisor.crew import LOST_S, AttemptFolder, Crew
from slurmft.supervisor.hangs import HANG_DUMPS_S, Hangs, LastLook, ended_by_watchdog, look_at_all
from slurmft.supervisor.observations import (
    HURRIED_READ_S,
    READ_S,
    Observations,
    facts_for_workers,
    testimony_of,
)
from slurmft.supervisor.placement import EvidenceSender, suspect_gpus_of, without_other_gpus
from slurmft.supervisor.stops import POLL_S, SlurmNotices, Stops, kill_workers
from slurmft.supervisor.watches import LOOK_S, Digests, Injections, Live, Reclaimed, Resizing, SlowNodes
from slurmft.system.background import Background

# --- Before an attempt's workers are killed: every node keeps the newest complete step (``agent.agent``) ---

ROUND_TRIP_S = 2.0


async def rescue(pool: AgentPool, links: Sequence[AgentLink], journal: Journal) -> None:
    """Have every node keep what it has; the journal says of which step. Never raises."""
    replies = await pool.ask(links, messages.RescueState(), timeout_s=RESCUE_S + ROUND_TRIP_S)
    kept = {
        link.host: reply.step for link, reply in zip(links, replies, strict=True) if isinstance(reply, messages.Rescued)
    }
    if steps := {step for step in kept.values() if step >= 0}:
        missing = [link.host for link in links if kept.get(link.host, -1) < max(steps)]
        journal.append(EventName.STATE_KEPT, step=max(steps), nodes=len(links) - len(missing), missing=missing)


# --- attempt ---

LAUNCH_LOOK_S = 0.5
START_S = 40.0
"""How long an agent may take to start its workers; it may have to ask for its GPUs."""


class AttemptRunner:
    """Runs one attempt, with agents that may have seen others before it."""

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        self._config, self._start, self._sender, self._crew = config, start, sender, crew
        self._cluster: Cluster = start.cluster
        self._run, self._journal = start.run, start.journal
        self._pool = crew.pool
        self._seen = Observations(
            self._run, self._journal, self._cluster.attempt, config.world_size,
            workload=fingerprint(config.workload), history=start.history,
            max_failed_saves=config.checkpoint.max_failed_saves, done_before=start.reached,
        )  # fmt: skip
        self._slurm = SlurmNotices(self._cluster, start.journal)
        self._background = Background(self._on_error)
        begin, journal = self._background.start, start.journal
        self.stops = Stops(
            config, start, self._pool, self._seen, self._slurm, background=self._background,
            carried_out={
                life.NoteFailure: lambda note: self._note_failure(note.end),
                life.NoteAgentsGone: lambda note: journal.append(EventName.AGENTS_GONE, exit_codes=list(note.codes)),
                life.EndPeers: lambda peers: begin(self._end_peers(peers.grace_s)),
                life.EndHung: lambda hung: begin(self._end_hung(hung.reason)),
                life.LeaveNodes: lambda leave: begin(self._leave_nodes(leave.reason)),
                life.EndVictims: lambda victims: begin(self._end_victims(victims.reason)),
            },
        )  # fmt: skip
        self._folder = AttemptFolder(start)
        self._hangs = Hangs(config, start, self._pool)
        self._injections = Injections(config, start, self._pool, self._background)
        self._resizing = Resizing(config, start, crew, self._seen, self.stops)
        self._reclaimed = Reclaimed(config, start, crew, self.stops, sender)
        self._slow = SlowNodes(config, start, self._seen, self.stops, sender=sender)
        self._digests = Digests(config, start, self._seen, self.stops, sender)
        self._live = Live(config, start, self._seen, self._hangs, self._slow)
        self._look: asyncio.Future[LastLook] | None = None
        self._keeping: asyncio.Future[None] | None = None
        self._node_states: Mapping[str, str] = {}
        self._escaped: Verdict | None = None
        self._order: messages.StartWorkers | None = None

    async def run(self) -> Verdict:
        """Run the attempt to its end.

        Raises:
            SlurmftError: nothing could be started.
        """
        with self._crew.working_for(self, self._start):
            try:
                await self._launch()
                await self.stops.over.wait()
                await self.stops.cause_is_known()
                if self.stops.state.lost and not self.stops.state.problem:
                    self._node_states = await asyncio.to_thread(self._cluster.node_states)
            except AgentLost as error:
                await self._lose_the_gone(str(error))
            except (LaunchError, StorageError, OSError) as error:
                self.stops.feed(life.LaunchFailed(str(error)))
            finally:
                await self._wind_down()
        if self._escaped is not None:
            return self._escaped
        return await asyncio.to_thread(self._verdict)  # the run folder may keep it waiting

    async def _launch(self) -> None:
        takes_over = self._crew.has_outlived
        await self._crew.muster(self._cluster)
        self._background.start(self._slurm.read_terms())
        own = (self._watch_processes, self._watch_requests, self._handle_events)
        for watch in (*own, self._sender.watch, self._resizing.watch, self._live.watch):
            self._background.start(watch())
        for link in self._pool.links.values():
            if link.channel is None:  # the agent disconnected meanwhile
                self._background.start(self._on_disconnect(link))
        await self._wait_for_agents()
        if takes_over and self._config.checkpoint.just_in_time:  # its workers may wait for dead ones
            await rescue(self._pool, list(self._pool.links.values()), self._journal)
        if not self.stops.over.is_set():
            await self._start_workers()

    async def _wait_for_agents(self) -> None:
        """Return when all agents have reported, or the attempt is over.

        Raises:
            LaunchError: they did not in time, or one has ended instead.
        """
        if self._crew.is_complete:
            return
        timeout_s = self._config.fault_tolerance.launch_timeout_s
        deadline_s = time.monotonic() + timeout_s
        waits = [asyncio.create_task(self._pool.complete.wait()), asyncio.create_task(self.stops.over.wait())]
        try:
            while not any(wait.done() for wait in waits):
                if time.monotonic() > deadline_s:
                    size = self._cluster.size(self._config)
                    raise LaunchError(
                        f"{size - len(self._pool.links)} of {size} agents did not report within {timeout_s:.0f} s "
                        "(fault_tolerance.launch_timeout_s)",
                        hint=f"see srun.err in {self._crew.folder.path}",
                    )
                await asyncio.wait(waits, timeout=LAUNCH_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                # srun waits for all others, which wait for this one
                if (end := await self._crew.folder.ended_agent()) is not None and not self._crew.is_complete:
                    node, how = end
                    words = "" if how == life.TERMINATED else self._crew.folder.last_words()
                    self.stops.feed(life.AgentEndedEarly(node, how, words))
        finally:
            for wait in waits:
                wait.cancel()

    async def _start_workers(self) -> None:
        members = await self._crew.enlist(self._start, self.stops.over)
        if self.stops.over.is_set():
            return
        self._seen.world_size = len(members) * self._config.nproc_per_node
        [reserved] = await self._pool.call_each(members[:1], [messages.Port()], timeout_s=CALL_TIMEOUT_S)
        hosts = [link.host for link in members]
        self._journal.append(EventName.AGENTS_READY, hosts=hosts)
        suspects = await asyncio.to_thread(suspect_gpus_of, self._config, self._start.history)
        await self._hangs.recall()
        if self.stops.over.is_set():
            return
        self.stops.feed(life.Began())
        self._order = messages.StartWorkers(
            suspect_gpus=tuple(sorted(suspects)),
            **facts_for_workers(self._start.history, self._config, nodes=len(members)),
            attempt=str(self._cluster.attempt),
            cycle=self._cluster.attempt.cycle,
            first_rank=0,
            nodes=len(members),
            generation=self._start.generation,
            nodelist=in_order(hosts),
            master_addr=members[0].host,
            master_port=reserved.port,
            limits=self._hangs.limits(),
        )
        firsts = range(0, self._seen.world_size, self._config.nproc_per_node)
        orders = [replace(self._order, first_rank=first) for first in firsts]
        replies = await self._pool.call_each(members, orders, timeout_s=START_S)
        if stuck := [host for host, reply in zip(hosts, replies, strict=True) if reply.suspect_gpus]:
            self._escape(stuck, suspects)
            return
        self._journal.append(EventName.WORKERS_STARTED, world_size=self._seen.world_size)
        if self.stops.state.phase is life.Phase.FAILED:
            # an agent that was away has begun its own only after the others were killed
            await self._kill_workers("a rank has failed before all were started")
        self._injections.simulate()
        self.stops.feed(life.NodesBroken(self._reclaimed.broken))
        await self._crew.rehearse()

    def _escape(self, hosts: list[str], gpus: frozenset[str]) -> None:
        """Nodes that cannot prove to have as many other GPUs are treated as suspects, too."""
        self._journal.append(EventName.EXCLUSION_ESCAPED, nodes=hosts, gpus=sorted(gpus))
        self._escaped = without_other_gpus(hosts, gpus)
        self.stops.feed(life.Ended())

    # What is reported to us

    async def _handle_events(self) -> None:
        while True:
            link, report = await self._pool.events.get()
            match report:
                case messages.WorkerExited():
                    self._on_exit(link, report)
                case messages.ProgressReport():
                    self._seen.note_progress(report.ranks)
                case messages.TimingsReport():
                    self._slow.note(link.host, report)
                case messages.DigestsReport():
                    self._digests.note(link.host, report)
                case messages.HangReport():
                    self._background.start(self._on_hang(link, report))
                case messages.DurationsReport():
                    self._hangs.note(report)
                case messages.LimitReport() | messages.SyncReport() | messages.RehearsalReport():
                    self._crew.note(link, report)
                case messages.NoticeReport():
                    self._reclaimed.note(link, report)
                    self.stops.feed(life.NodesBroken(self._reclaimed.broken))
                case messages.SignalReport(name=name):
                    self._resizing.leave(link) if link.lender else self.stops.on_signal(name, link.host)
                case messages.Connected():
                    self._background.start(self._on_connect(link))
                case messages.Disconnected():
                    self._background.start(self._on_disconnect(link))

    def _on_exit(self, link: AgentLink, report: messages.WorkerExited) -> None:
        if report.rank not in self._seen.ends:
            end = self._seen.note_exit(link.host, report)
            self.stops.feed(life.WorkerEnded(end, self._seen.all_ended))

    def _note_failure(self, end: WorkerEnd) -> None:
        self._journal.append(EventName.WORKER_FAILED, rank=end.rank, node=end.node, code=end.code, error=end.error)

    async def _on_hang(self, link: AgentLink, report: messages.HangReport) -> None:
        if self.stops.state.phase is life.Phase.WORK and (hang := await self._hangs.investigate(link, report)):
            self.stops.feed(life.Hung(hang.reason))

    async def _end_hung(self, reason: str) -> None:
        self._hangs.narrow(await self._kill_workers(reason, overdue=self._hangs.overdue))

    async def _leave_nodes(self, reason: str) -> None:
        """The ranks there will fail or hang, and what they compute until then may be wrong."""
        await self._kill_workers(reason)
        await _end_of_workers(self._pool, self._seen.ends, per_node=self._config.nproc_per_node)
        self.stops.feed(life.Ended())  # a worker that is stuck in the driver does not end

    async def _end_peers(self, grace_s: float) -> None:
        await self._last_look()
        await self._rescue()
        await asyncio.sleep(grace_s)
        if not self.stops.over.is_set():
            await self._kill_workers("a rank has failed; the others cannot go on without it")

    async def _on_connect(self, link: AgentLink) -> None:
        """A lost agent may still run workers of its last order; one that takes part again kills those itself."""
        state = self.stops.state
        is_newest = not state.began or link.host in state.lost  # nothing newer has begun than what they have
        if self._config.checkpoint.just_in_time and is_newest:
            await rescue(self._pool, [link], self._journal)
        if link not in self._pool.members:
            with contextlib.suppress(AgentLost):
                await link.call(messages.Kill())
        if link.host in self._cluster.lost:
            self._cluster.lost.discard(link.host)
            self._journal.append(EventName.AGENT_BACK, node=link.host)

    async def _on_disconnect(self, link: AgentLink) -> None:
        """Give a connection that broke the time to come back; an agent that is gone takes its workers with it."""
        await self._crew.reconnected(link)
        if self.stops.over.is_set() or self._pool.links.get(link.node) is not link:
            return
        if not self._is_end_of_step():
            self._lose(link, f"the agent on {link.host} is gone", hung_up=True)

    def _is_end_of_step(self) -> bool:
        """Whether all agents have gone together: their step was ended, which says nothing about any node. Nor does the
        end of those whose lease was over while this process was stopped."""
        own = [each for each in self._pool.links.values() if not each.lender and not each.dropped]
        gone = [each for each in own if each.channel is None]
        are_all = len(own) > 1 and len(gone) == len(own)
        if not self.stops.state.began or not gone or not (are_all or self._crew.has_outslept):
            return False
        self.stops.feed(life.StepEnded())
        for link in gone:
            self._pool.drop(link)
            self._crew.reviver.lost(link, hung_up=True)
        return True

    def _lose(self, link: AgentLink, reason: str, *, hung_up: bool) -> None:
        """Go on without this agent: at once where it is a spare, else with the next attempt."""
        if link.dropped:
            return
        is_member = link in self._pool.members and self.stops.state.began
        self._drop(link, reason, hung_up=hung_up, spare=not is_member)
        self.stops.feed(life.AgentLost(link.host, is_member, reason, hung_up))

    def _drop(self, link: AgentLink, reason: str, *, hung_up: bool, spare: bool) -> None:
        self._pool.drop(link)
        self._crew.reviver.lost(link, hung_up=hung_up)
        if not link.lender:
            self._cluster.lost.add(link.host)
        name = EventName.AGENT_LEFT if link.leaving else EventName.AGENT_LOST
        self._journal.append(name, node=link.host, spare=spare, reason=reason)

    async def _end_victims(self, reason: str) -> None:
        await self._rescue()
        await kill_workers(self._pool, self._journal, reason)

    async def _lose_the_gone(self, reason: str) -> None:
        """An agent did not take part in the start: its node was lost, unless it is still connected, or is so again."""
        if self._is_end_of_step():
            self.stops.feed(life.Ended(reason))
            return
        await asyncio.gather(*(self._crew.reconnected(link) for link in self._pool.members))
        if self.stops.over.is_set():  # all have gone together since
            return
        gone = [link for link in self._pool.members if link.channel is None]
        for link in gone:
            self._lose(link, reason, hung_up=True)
        self.stops.feed(life.LostInStart(tuple(link.host for link in gone), reason))

    async def _watch_processes(self) -> None:
        while True:
            codes = await self._crew.all_ended()
            if not self.stops.over.is_set():
                await asyncio.sleep(POLL_S)  # reports that are on their way
            if self.stops.over.is_set():
                return
            await self._slurm.is_ending()
            if not self._crew.lives:  # agents may have been started again while Slurm took its time
                break
        is_expected = self._seen.any_started or self._slurm.outside is not None
        words = "" if is_expected else self._crew.folder.last_words()
        self.stops.feed(life.ProcessesEnded(codes, is_expected, words))

    def ping(self) -> messages.Ping:
        """What agents are told regularly."""
        return messages.Ping(limits=self._hangs.limits())

    def on_silence(self, link: AgentLink, silent_s: float, timeout_s: float) -> None:
        """Lose an agent that is silent for longer than it may be."""
        # state is kept even when it is over, and that waits for all that are not silent
        if self.stops.over.is_set() and (self._keeping is None or self._keeping.done()):
            return
        if silent_s > self._crew.roster.patience_s(link, timeout_s):
            self._lose(link, f"nothing was heard from {link.host} for {silent_s:.1f} s", hung_up=False)

    async def _watch_requests(self) -> None:
        while not self.stops.over.is_set():
            await asyncio.sleep(POLL_S)
            ready = self.stops.planned is None and self.stops.state.began
            told = self._seen.write_progress, self._slow.exchange, self._hangs.exchange
            if self._folder.is_due() and await self._folder.tell(*told) is not None:
                self.stops.feed(life.Ended())
            await self._injections.look()
            for kind, who in (await self._folder.requests(ready=ready)).items():
                self.stops.on_request(kind, who)

    async def _last_look(self, overdue: Mapping[int, str] | None = None) -> LastLook:
        """Look at all ranks once, as soon as one has failed: the others soon fail of it, and leave no evidence then."""
        if self._look is None:
            ends = list(self._seen.ends.values())
            self._look = asyncio.ensure_future(look_at_all(
                self._pool, self._folder.path, per_node=self._config.nproc_per_node, ends=ends, overdue=overdue,
                dumps_within_s=HANG_DUMPS_S if overdue or ended_by_watchdog(ends) else 0.0,
            ))  # fmt: skip
        return await asyncio.shield(self._look)

    async def _kill_workers(self, reason: str, overdue: Mapping[int, str] | None = None) -> Blame:
        look = await self._last_look(overdue)
        await self._rescue()
        await kill_workers(self._pool, self._journal, reason)
        return look.conclude(self._journal)

    async def _rescue(self) -> None:
        """Have the nodes keep their newest step, once; a kill of workers waits for it."""
        if self._config.checkpoint.just_in_time and self._digests.found is None:
            if self._keeping is None:
                self._keeping = asyncio.ensure_future(rescue(self._pool, self._pool.members, self._journal))
            await asyncio.shield(self._keeping)

    # The end

    async def _wind_down(self) -> None:
        self.stops.feed(life.Ended())
        self.stops.conclude()
        if self.stops.state.began and not self._seen.all_ended:
            if self.stops.state.lost:
                await self._rescue()
            await self._pool.tell_all(messages.Kill())
            await _end_of_workers(self._pool, self._seen.ends, per_node=self._config.nproc_per_node)
        await self._crew.kept.upload(self.stops.time_is_up_s)
        await self._background.cancel_all()
        if (look := self._look) is not None and look.done() and not (look.cancelled() or look.exception()):
            look.result().conclude(self._journal)
        await self._digests.close()
        self._seen.close()
        seen = self._seen
        self._folder.leave(seen.write_progress, seen.write_timings, self._slow.exchange, self._hangs.leave)

    def _verdict(self) -> Verdict:
        state, planned = self.stops.state, self.stops.planned
        # a save that still worked does not undo a cancellation
        binding = self._slurm.outside is not None and self._slurm.outside[0] in (Cause.CANCELLED, Cause.REQUEUED)
        orderly = planned is not None and self._seen.all_ended
        outside = self._slurm.outside if binding or not orderly else None
        ends, places = list(self._seen.ends.values()), self._pool.places(self._config.nproc_per_node)
        within_s = READ_S if planned is None and self._slurm.outside is None else HURRIED_READ_S
        return judge(
            ends,
            world_size=self._seen.world_size,
            seen=Circumstances(
                reached=self._seen.reached(),
                saved=self._digests.trusted(self._seen.saved()),
                corruption=self._digests.found,
                planned=planned,
                planned_reason=self.stops.reason,
                only_ignored_signals=state.signals == {self._config.preemption.signal} != {"SIGTERM"},
                planned_suspects=(*self._slow.suspects, *self._reclaimed.suspects, *self._digests.convicted),
                lost_nodes=state.lost,
                closed=state.closed,
                broken=self._reclaimed.broken,
                hang=self._hangs.found,
                node_states=self._node_states,
                launch_error=state.problem,
                outside=outside[0] if outside else None,
                outside_reason=outside[1] if outside else "",
                heard=testimony_of(self._start, ends, places, within_s=within_s),
                complete_codes=state.rules.complete_codes,
                only_lead=state.rules.only_lead,
            ),
        )

    def _on_error(self, error: BaseException) -> None:
        self.stops.feed(life.Ended(f"internal error: {error!r}"))


# --- ray ---
# One attempt of a run with ``launcher: ray``: nodes of its Ray cluster come and go, and the command's end is its end.
#
# Ray Train itself goes on with fewer workers, and takes in more (``ScalingConfig(num_workers=(1, 5))``). So a lost node
# ends the attempt only where it was the head, or where fewer than ``elastic.min_nodes`` are left.

LENT_S = 20.0
"""What Ray Train has to save before a lent node leaves: Slurm's default KillWait is 30 s."""

MAX_STARTS = 3
"""Of Ray on one node in one attempt."""


class RayAttempt(AttemptRunner):
    """Runs one attempt; what differs from other trainers is who may be lost, and who may come later."""

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        # ranks are nodes of Ray here, and the first of them ends as the command does
        super().__init__(config.model_copy(update={"ignore_nonlead_status": True}), start, sender, crew)
        self._resizing = Growing(self, config, start, crew, self._seen, self.stops)

    @property
    def is_open(self) -> bool:
        """Whether nodes may be added now."""
        return self._order is not None and self.stops.planned is None and not self.stops.over.is_set()

    @property
    def first_nodes(self) -> int:
        """With how many nodes it began."""
        return 0 if self._order is None else self._order.nodes

    def _on_exit(self, link: AgentLink, report: messages.WorkerExited) -> None:
        if report.rank == 0:
            super()._on_exit(link, report)
            self.stops.feed(life.Ended())  # the others serve it, and are ended now
            return
        self._seen.note_exit(link.host, report)
        if self.is_open and link in self._pool.members:
            self._pool.members = [each for each in self._pool.members if each is not link]
            self._journal.append(EventName.RAY_NODE_ENDED, node=link.host, code=report.code)

    def _lose(self, link: AgentLink, reason: str, *, hung_up: bool) -> None:
        """Leave it to Ray to go on without this node, where that can be."""
        left = [each for each in self._pool.members if each is not link]
        is_needed = len(left) < self._config.size.minimum or link is self._pool.members[0]
        if link.dropped or not self.is_open or link not in self._pool.members or is_needed:
            super()._lose(link, reason, hung_up=hung_up)
            return
        self._pool.members = left
        self._drop(link, reason, hung_up=hung_up, spare=False)
        if not link.leaving:
            verdict = Verdict(cause=Cause.NODE_LOST, reason=reason, suspects=(Suspect(node=link.host),),
                              living=(link.host,) if hung_up else None)  # fmt: skip
            self._sender.add(held_against(verdict, (), at=time.time()))

    async def add(self, link: AgentLink, rank: int) -> None:
        """Make a node part of the cluster that runs."""
        if not isinstance(self._order, messages.StartWorkers):
            return
        self._pool.members = [*self._pool.members, link]
        try:
            await link.call(replace(self._order, first_rank=rank), timeout_s=START_S)
        except AgentLost as error:
            self._lose(link, str(error), hung_up=False)
            return
        self._journal.append(EventName.RAY_NODE_JOINED, node=link.host, nodes=len(self._pool.members))


class Growing(Resizing):
    """Adds nodes while the attempt goes on: lent ones, those that are back, and spares in the place of lost ones."""

    def __init__(self, attempt: RayAttempt, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._attempt = attempt
        self._starts: Counter[str] = Counter()
        self._next_rank = 0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._attempt.is_open:
                continue
            pool, size = self._crew.pool, self._config.size
            self._next_rank = max(self._next_rank, self._attempt.first_nodes)
            for link in [*pool.links.values()]:
                own = sum(not each.lender for each in pool.members)
                room = len(pool.members) < size.maximum and (bool(link.lender) or own < size.nodes)
                if room and self._may_be_added(link) and self._attempt.is_open:
                    self._starts[f"{link.lender} {link.node}"] += 1
                    rank, self._next_rank = self._next_rank, self._next_rank + 1
                    await self._attempt.add(link, rank)

    def leave(self, link: AgentLink) -> None:
        if link.channel is not None:  # else it cannot be told; should it come back, this is asked again
            super().leave(link)

    def _do_without(self, link: AgentLink) -> None:
        link.tell(messages.PassOnTerm())
        self._stops.background.start(self._part_with(link))

    async def _part_with(self, link: AgentLink) -> None:
        await asyncio.sleep(LENT_S)
        link.tell(messages.Shutdown())

    def _may_be_added(self, link: AgentLink) -> bool:
        is_barred = link.is_barred(self._cluster.nodes)
        is_there = link.channel is not None and not link.dropped and not link.leaving
        tried = self._starts[f"{link.lender} {link.node}"] >= MAX_STARTS
        return is_there and not is_barred and not tried and link not in self._crew.pool.members


async def _end_of_workers(pool: AgentPool, ends: Collection[int], *, per_node: int) -> None:
    """Return when every worker of a reachable agent has ended, or LOST_S have passed; ``ends`` grows meanwhile."""
    deadline_s = time.monotonic() + LOST_S

    def told(place: int, link: AgentLink) -> bool:
        return link.channel is None or all(rank in ends for rank in range(place * per_node, (place + 1) * per_node))

    while time.monotonic() < deadline_s:
        if all(told(place, link) for place, link in enumerate(pool.members)):
            return
        await asyncio.sleep(0.01)
