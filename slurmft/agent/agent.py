"""The agent: one process per node. Owns the node's workers, answers the supervisor, and never runs a Slurm command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from slurmft.agent.container.inside import Outside, limits_here
from slurmft.agent.digests import DigestReports
from slurmft.agent.environment import LENDER_VARIABLE, common_environment, worker_environment
from slurmft.agent.faults import strike
from slurmft.agent.forensics import Forensics
from slurmft.agent.gpus import VISIBLE_VARIABLE, visible_without, wait_until_free
from slurmft.agent.hangs import HangWatch
from slurmft.agent.just_in_time import rescue_on_node
from slurmft.agent.keeper import Keeping, look_after_regularly
from slurmft.agent.launchers.ray import leave_token
from slurmft.agent.launchers.torchrun import worker_command
from slurmft.agent.notices import NoticeWatch
from slurmft.agent.rehearsal import SpareRehearsal
from slurmft.agent.stragglers import TimingReports
from slurmft.agent.workers import Worker, Workers, reserve_port
from slurmft.config.config import RunConfig
from slurmft.errors import LaunchError, SlurmftError, StorageError
from slurmft.ipc.calls import (
    AskSections,
    Call,
    Commit,
    Inject,
    Kill,
    LookNow,
    PassOnTerm,
    Ping,
    Port,
    Propose,
    Rehearse,
    RescueState,
    Shutdown,
    StartWorkers,
    SyncFolders,
    TakeEvidence,
    Withdraw,
    parse_call,
)
from slurmft.ipc.channel import UNANSWERED, BadMessage, Channel, connect
from slurmft.ipc.pages.heartbeat import NOTHING, Slot
from slurmft.ipc.replies import Done, EvidenceReply, Failed, Looks, Rescued, ReservedPort, Started, Synced, as_reply
from slurmft.ipc.reports import (
    HangReport,
    Hello,
    Lasting,
    LimitReport,
    ProgressReport,
    Sent,
    SignalReport,
    WorkerExited,
)
from slurmft.ipc.shapes import Fields
from slurmft.ipc.whereabouts import Whereabouts
from slurmft.ipc.zygote_start import Zygote
from slurmft.policy.timing.fleet import report_interval_s
from slurmft.policy.timing.stop import NEVER
from slurmft.policy.verdicts.verdict import EXIT_TEMPORARY
from slurmft.storage.run_folder import RunFolder
from slurmft.sync.node import NodeSync
from slurmft.system.processes import birth_of
from slurmft.system.sleeping import overslept_s

if TYPE_CHECKING:
    from slurmft.agent.replicas import Replicas

RECONNECT_PAUSE_S = 0.2
LEASE_CHECK_S = 1.0
KEEPER_LOOK_S = 5.0
STOPPED_GRACE_S = 20.0
"""Time for a worker's finalizers after it has stopped at the agreed step."""

MAX_LASTING = 1024
"""Ends, signals, hangs and notices that each connection begins with."""

LAST_FILES_S = 1.0
"""How long the end waits for files of evidence that are still being written."""

LAST_KEEP_S = 2.0
"""How long workers may keep their newest step when the lease is over."""

STORE_BUFFER_S = 0.001
"""Wait between writing a proposal and reading the ticks, so that a tick stored before it is surely visible."""

log = logging.getLogger(__name__)


class Agent:
    """One node's agent, from its first connection to its shutdown."""

    def __init__(
        self, config: RunConfig, attempt: str, environment: Mapping[str, str], begun: Zygote | None = None
    ) -> None:
        self._config, self._run, self._attempt = config, RunFolder(config.run_folder), attempt
        self._environment, self._begun = environment, begun
        self._index = int(environment.get("SLURMFT_NODE_INDEX", environment.get("SLURM_NODEID", "0")))
        self._host = environment.get("SLURMD_NODENAME") or socket.gethostname()
        self._lender = environment.get(LENDER_VARIABLE, "")
        self._birth = birth_of(os.getpid())
        self._taken_back = False
        name = f"{self._run.attempts / attempt}\n{self._lender}\n{self._index}"
        self._workers = Workers(self._report_exit, name)
        self._keeping = Keeping(self._workers.memory, config.checkpoint.peer_copies)
        self._channel: Channel | None = None
        self._port_holder: socket.socket | None = None
        self._term_count = 0
        self._passed_on: set[signal.Signals] = set()
        self._unreported: list[Sent] = []
        self._lasting: deque[Lasting] = deque(maxlen=MAX_LASTING)
        self._shutdown = False
        self._last_heard = time.monotonic()
        self._timings: TimingReports | None = None
        self._digests = DigestReports()
        self._hangs = HangWatch(config, self._report_hang)
        self._generation = 0
        self._where = Whereabouts(self._run.attempts / attempt, may_move=config.fault_tolerance.standby_supervisor)
        self._forensics = Forensics(self._host)
        self._replicas: Replicas | None = None
        if config.inference is not None:
            from slurmft.agent.replicas import Replicas  # with numpy, which agents of a training do without

            self._replicas = Replicas(config, environment, self._workers, node=self._index, host=self._host,
                                      report=self._report)  # fmt: skip
        self._sync = NodeSync(config, common_environment(config, environment), self._report)
        self._rehearsal = SpareRehearsal(config, environment, self._workers.folder, self._report)
        self._outside = Outside(self._note_signal)

    async def run(self) -> int:
        """Serve until shut down, or until the supervisor is gone for longer than the lease."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._note_own_signal, signal.Signals(number).name)
        is_signal = self._config.preemption.signal == "SIGINT"  # else it is a Ctrl-C, which the supervisor answers to
        heard = (self._note_own_signal, "SIGINT") if is_signal else (lambda: None,)
        loop.add_signal_handler(signal.SIGINT, *heard)
        if self._config.container.runtime != "none":
            self._settle_in_container()
        preload = self._config.fault_tolerance.preloaded(self._config.launcher, self._config.inference)
        self._workers.start_zygote(common_environment(self._config, self._environment), preload, self._begun)
        reports = asyncio.create_task(self._report_regularly())
        serving = asyncio.create_task(self._serve())
        lease = asyncio.create_task(self._watch_lease())
        hangs = asyncio.create_task(self._hangs.run())
        alone = asyncio.create_task(self._outside.gone.wait())
        notices = asyncio.create_task(NoticeWatch(self._config, self._environment, self._report).run())
        keeping = asyncio.create_task(look_after_regularly(self._keeping, KEEPER_LOOK_S))
        for beside in (reports, hangs, keeping):
            beside.add_done_callback(_tell_error)  # an agent that falls silent is given up: at least its log says why
        try:
            await asyncio.wait([serving, lease, alone], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return EXIT_TEMPORARY if self._taken_back else serving.result()
            return LaunchError.exit_code
        finally:
            is_lease_over = lease.done()
            for task in (reports, serving, lease, hangs, keeping, notices, alone):
                task.cancel()
            if self._replicas is not None:
                await self._replicas.close()
            await asyncio.gather(notices, return_exceptions=True)  # a plug-in is ended with it
            self._keeping.close()
            await self._rehearsal.stop()
            self._workers.close(leave_memory=is_lease_over)  # a supervisor that wakes up goes on with it
            await self._sync.close()
            self._forensics.finish(LAST_FILES_S)
            if self._channel is not None:
                self._channel.close()  # only now: it shows the supervisor that nothing of this node is left

    def _settle_in_container(self) -> None:
        """Listen to the process outside, and report what is missing in here."""
        self._outside.listen()
        limits = list(limits_here(self._config, self._environment))
        if not self._config.container.is_started_by_srun and not self._outside.is_heard:
            limits.append("it does not pass standard input on: a stop reaches this node by the supervisor alone")
        for limit in limits:
            log.warning("in the container on %s: %s", self._host, limit)
            self._report(LimitReport(what=limit[:255]))

    async def _watch_lease(self) -> None:
        """Return when the supervisor was silent for the lease: the run may go on elsewhere, and two must never train.

        Only the time counts in which this process could listen: a suspended job wakes up where it was.
        """
        lease_s = self._config.fault_tolerance.supervisor_lease_s
        while time.monotonic() - self._last_heard < lease_s:
            asleep_s = await overslept_s(LEASE_CHECK_S)
            self._last_heard += asleep_s  # in two steps: += reads before it awaits, and would lose a later time
        if self._config.checkpoint.just_in_time:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rescue_on_node(list(self._workers.by_rank.values())), LAST_KEEP_S)
        log.error("no message from the supervisor for %.0f s; stopping this node's workers", lease_s)

    async def _serve(self) -> int:
        while not self._shutdown:
            try:
                await self._where.unless_moved(
                    self._serve_one_connection(), lambda: time.monotonic() - self._last_heard
                )
            except (OSError, BadMessage, StorageError) as error:  # OSError covers TimeoutError
                log.debug("no supervisor: %s", error)
            if not self._shutdown:
                await asyncio.sleep(RECONNECT_PAUSE_S)
        return 0

    async def _serve_one_connection(self) -> None:
        channel = await self._connect_any(*self._where.read())
        # in containers with process ids of their own, every agent may have the same one
        hello = Hello(
            node=self._index, host=self._host, pid=os.getpid(), birth=self._birth[:100] or None,
            lender=self._lender or None,
        )  # fmt: skip
        channel.send(hello)
        self._channel = channel
        for report in (*self._unreported, *self._lasting):
            channel.send(report)
        self._unreported = []
        try:
            while not self._shutdown:
                line = await channel.receive_line()
                if line is None:
                    return
                self._last_heard = time.monotonic()
                number, call = parse_call(line)
                answer = await self._answer(call)
                if number != UNANSWERED:
                    channel.send(as_reply(number, answer))
            await channel.drain()
        finally:
            if not self._shutdown:
                self._channel = None
                channel.close()

    async def _connect_any(self, hosts: list[str], port: int, secret: bytes) -> Channel:
        errors: list[Exception] = []
        for host in hosts:
            try:
                return await connect(host, port, secret)
            except (OSError, BadMessage) as error:
                errors.append(error)
        raise errors[-1] if errors else OSError("the supervisor has left no address")

    async def _answer(self, call: Call[Any] | None) -> Fields:
        """The reply to a call; what goes wrong with it is no error of the connection."""
        try:
            is_for_replicas = self._replicas is not None and await self._replicas.handle(call)
            return Done() if is_for_replicas else await self._handle(call)
        except (OSError, SlurmftError, RuntimeError, ValueError) as error:
            log.error("%s: %s", getattr(call, "kind", "an unknown call"), error, exc_info=error)
            place = f"{self._workers.folder}: " if isinstance(error, OSError) and not error.filename else ""
            return Failed(error=f"{place}{error}"[:500])

    async def _handle(self, call: Call[Any] | None) -> Fields:
        match call:
            case StartWorkers():
                return await self._start(call)
            case Port():
                if self._port_holder is not None:
                    self._port_holder.close()
                self._port_holder, port = reserve_port()
                return ReservedPort(port=port)
            case AskSections(first=first):
                return self._hangs.facts(first)
            case Ping():
                self._hangs.learn(call.limits or {})
            case LookNow():
                return self._looks()
            case Propose() | Commit() | Withdraw():
                return await self._agree(call)
            case PassOnTerm() | Kill() | Rehearse():
                self._obey(call)
            case TakeEvidence() | RescueState() | SyncFolders():
                return await self._save_what_there_is(call)
            case Inject(order=order, ranks=ranks):
                return strike(list(self._workers.by_rank.values()), order, ranks)
            case Shutdown():
                self._shutdown = True
        return Done()

    def _obey(self, call: PassOnTerm | Kill | Rehearse) -> None:
        match call:
            case PassOnTerm(at_last=at_last):
                self._pass_on_term(at_last=bool(at_last))
            case Kill():
                self._workers.kill()
            case Rehearse():
                self._rehearsal.begin()

    async def _start(self, call: StartWorkers) -> Started:
        """Start the workers, on none of the suspect GPUs; or report which of them cannot be spared."""
        config, environment = self._config, self._environment
        if call.generation == self._generation and self._workers.by_rank:  # the connection has lost our answer
            return Started()
        await self._rehearsal.stop()
        if suspects := call.suspect_gpus:
            visible = await asyncio.to_thread(visible_without, environment, suspects, config.nproc_per_node)
            if visible is None:
                return Started(suspect_gpus=suspects)
            environment = {**environment, VISIBLE_VARIABLE: visible}
        await self._workers.end_earlier()  # an attempt that went on without this node while it was cut off
        if held := await asyncio.to_thread(wait_until_free, self._workers.earlier_pids(), environment):
            log.error("GPU memory is still held by processes that have ended: %s; the node may need a reset", held)
        self._attempt, self._generation = call.attempt, call.generation
        self._term_count, self._passed_on = 0, set()
        ranks = range(call.first_rank, call.first_rank + config.nproc_per_node)
        folder = self._run.attempts / self._attempt
        self._begin_keeping(call, folder)
        if config.launcher == "ray":
            leave_token(self._workers.folder, self._where.read()[2], self._attempt)
        self._workers.start(
            ranks,
            [worker_environment(config, environment, call, rank, self._attempt) for rank in ranks],
            command=worker_command(config),
            folder=config.trainer_directory,
            logs=folder,
            verdicts=[self._run.verdicts / f"{self._attempt}.rank-{rank}.json" for rank in ranks],
            generation=call.generation,
            timed=config.straggler_detection.enabled,
        )
        self._timings = TimingReports(config.straggler_detection.report_time_interval, time.monotonic())
        self._digests = DigestReports()
        self._hangs.begin(list(self._workers.by_rank.values()), learned=call.limits or {})
        return Started()

    def _begin_keeping(self, call: StartWorkers, folder: Path) -> None:
        address = self._channel.own_address if self._channel is not None else ""
        self._keeping.begin(
            folder,
            generation=call.generation,
            place=call.first_rank // self._config.nproc_per_node,
            nodes=call.nodes,
            hosts=[host for host in (self._host, address) if host],
            secret=self._where.read()[2],
        )

    async def _save_what_there_is(
        self, call: TakeEvidence | RescueState | SyncFolders
    ) -> EvidenceReply | Rescued | Synced:
        """Save the workers' evidence, their newest state, or the folders that are kept."""
        if isinstance(call, SyncFolders):
            return await self._sync.handle(call)
        workers = list(self._workers.by_rank.values())
        if isinstance(call, RescueState):
            return Rescued(step=await rescue_on_node(workers))
        folder = self._run.attempts / self._attempt
        found = await self._forensics.take_evidence(workers, folder, call.within_s, call.dumps_within_s)
        return EvidenceReply(ranks=tuple(found))

    async def _agree(self, call: Propose | Commit | Withdraw) -> Looks | Done:
        """One step of the agreement on a stop (``policy.timing.stop``)."""
        match call:
            case Propose(tick=tick, action=action):
                self._propose(tick, action)
                await asyncio.sleep(STORE_BUFFER_S)
                return self._looks()
            case Commit(tick=tick):
                self._write(Slot.COMMITTED, tick)
            case Withdraw():
                self._write(Slot.PROPOSED, NEVER)
        return Done()

    def _propose(self, tick: int, action: int) -> None:
        # in this order: a worker acts when the commit equals the proposal, which must never be that of an older stop
        self._write(Slot.ACTION, action)
        self._write(Slot.COMMITTED, NOTHING)
        self._write(Slot.PROPOSED, tick)

    def _write(self, slot: Slot, value: int) -> None:
        for worker in self._workers.by_rank.values():
            worker.page[slot] = value

    def _looks(self) -> Looks:
        return Looks(looks=tuple(worker.look() for worker in self._workers.by_rank.values()))

    def _note_own_signal(self, name: str) -> None:
        if not self._outside.is_heard:  # the process outside has got the same one
            self._note_signal(name)

    def _note_signal(self, name: str) -> None:
        self._term_count += 1
        if self._replicas is not None:  # its engines finish what they have, or give it back
            self._replicas.note_signal()
            self._taken_back = bool(self._lender)
        elif self._lender:  # its job ends, not the run: the workers stop with all others, at an agreed step
            self._taken_back = True
        else:
            self._pass_on_term()
        self._report(SignalReport(name=name, count=self._term_count, at=time.time()))

    def _pass_on_term(self, *, at_last: bool = False) -> None:
        """Give every worker ``preemption.signal`` once, so that handlers of the user's own run on every site alike.

        SIGTERM in its place goes to those that know no other signal, and to all when the time is nearly up.

        With proctrack/cgroup Slurm signals only this process, with others the whole tree.
        """
        knows_term_only = self._config.launcher == "ray" or self._config.inference is not None
        number = signal.Signals["SIGTERM" if at_last or knows_term_only else self._config.preemption.signal]
        if number not in self._passed_on:
            self._passed_on.add(number)
            self._workers.signal(number)

    def _report_exit(self, worker: Worker) -> None:
        if self._replicas is not None:
            self._replicas.on_exit(worker)
            return
        self._forensics.keep_last_words(worker, self._run.attempts / self._attempt)
        own, facts, code = self._generation, worker.facts(), worker.exit_code or 0
        killed, starved = worker.killed, worker.starved
        self._report_digests([worker])  # first: the end of the last rank ends the attempt
        self._report(WorkerExited(code=code, killed=killed, starved=starved, generation=own, **asdict(facts)))

    def _report_digests(self, workers: Sequence[Worker]) -> None:
        for report in self._digests.new(workers):
            self._report(replace(report, generation=self._generation))

    def _report_hang(self, report: HangReport) -> None:
        self._report(replace(report, generation=self._generation))

    def _report(self, report: Sent) -> None:
        if isinstance(report, Lasting):
            self._lasting.append(report)
        elif self._channel is None:
            self._unreported.append(report)
        if self._channel is not None:
            self._channel.send(report)

    async def _report_regularly(self) -> None:
        interval_s = report_interval_s(self._config.nodes + self._config.spare_nodes)
        while True:
            await asyncio.sleep(interval_s)
            self._workers.kill_lingering(STOPPED_GRACE_S)
            self._workers.private.tell_alive()
            if self._channel is not None:
                ranks = tuple(worker.facts() for worker in self._workers.by_rank.values())
                own, ready = self._generation, self._workers.ready.is_set()
                self._channel.send(ProgressReport(ranks=ranks, ready=ready, generation=own))
                if self._timings is not None and self._config.straggler_detection.enabled:
                    for report in self._timings.due(list(self._workers.by_rank.values()), time.monotonic()):
                        self._channel.send(replace(report, generation=own))
                self._report_digests(list(self._workers.by_rank.values()))
                if (durations := self._hangs.durations()) is not None:
                    self._channel.send(replace(durations, generation=own))


def _tell_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("internal error: %r", error, exc_info=error)


async def serve(config: RunConfig, attempt: str, environment: Mapping[str, str], begun: Zygote | None = None) -> int:
    """Run this node's agent, whose zygote may have been ``begun`` already; returns its exit code."""
    agent = Agent(config, attempt, environment, begun)
    with contextlib.suppress(asyncio.CancelledError):
        return await agent.run()
    return LaunchError.exit_code


__all__ = ["Agent", "serve"]
