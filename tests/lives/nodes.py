"""The agents' side of a life: what an agent does as the supervisor sees it, its workers, and the training they do.

A counterpart of ``agent.agent`` without processes: the same messages by the same channel, the same lease, the same
reports that are repeated on each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmft.ipc.channel import UNANSWERED, BadMessage, Channel, connect
from slurmft.ipc.messages import (
    AskSections,
    Commit,
    Done,
    EvidenceReply,
    HangReport,
    Hello,
    Kill,
    Lasting,
    LookNow,
    Looks,
    PassOnTerm,
    Port,
    ProgressReport,
    Propose,
    Rescued,
    RescueState,
    ReservedPort,
    SectionsReply,
    Shutdown,
    SignalReport,
    Started,
    StartWorkers,
    TakeEvidence,
    Withdraw,
    WorkerExited,
    WorkerFacts,
    WorkerSections,
    as_reply,
    parse_call,
)
from slurmft.ipc.pages import State, StopAction
from slurmft.policy.stop import END, NEVER, NOT_STARTED, step_of, tick_of
from slurmft.policy.stop import report_interval_s as interval_s

if TYPE_CHECKING:
    from lives.world import World

PAUSE_S = 0.2
HEARD_S = 5.0
"""How long after its node can be reached again an agent has got its orders."""

HANG_S = 40.0
BEGIN_S = 90.0
"""A step that takes longer is reported as a hang, and a rank that has not begun by then."""


@dataclass(slots=True)
class Worker:
    """One rank's process, and its page."""

    rank: int
    node: str
    step: int = 0
    resumed: int = -1
    saved: int = -1
    tick: int = NOT_STARTED
    answered: int = -1
    proposed: int = NEVER
    committed: int = -1
    action: int = 0
    state: State = State.SETUP
    code: int | None = None
    killed: bool = False
    hung: bool = False
    moved_s: float = 0.0
    told: bool = False
    """Its hang was reported."""
    first_at: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    def facts(self, until: int) -> WorkerFacts:
        """Its page, as it is reported."""
        is_past = self.step > max(self.resumed, 0)
        return WorkerFacts(
            rank=self.rank, state=int(self.state), attached=self.resumed >= 0, step=self.step, until=until,
            saved=self.saved, durable=self.saved, resumed=self.resumed, first_step_at=self.first_at if is_past else 0.0,
            answered=self.answered, metric=None, first_step_s=0.1, longest_step_s=0.2, saves=0, save_failures=0,
            save_errno=0, save_s=0.0, save_cost_s=0.0, saving_s=0.0, since_saved_s=0.0,
        )  # fmt: skip

    def look(self) -> tuple[bool, int, bool, int]:
        """As the agreement sees it."""
        holding = self.proposed if self.alive and self.tick == self.proposed else NOT_STARTED
        return self.resumed >= 0, self.tick, self.alive, holding


class Agent:
    """One node's agent, from its start to its end; a process of its own."""

    def __init__(self, world: World, node: int, host: str, *, port: int, secret: bytes) -> None:
        self.world, self.node, self.host, self.port, self._secret = world, node, host, port, secret
        self.supervisor = world.host
        """Where its supervisor is."""

        self.job = world.job
        self.restarts = 0 if world.job is None else world.job.restarts
        self.process = world.process(f"agent {node} on {host}")
        self.pid = world.next_pid()
        self.workers: dict[int, Worker] = {}
        self.memory: int = -1
        """The newest step that was kept here just in time."""

        self.generation = 0
        self.asked_to_keep = 0
        """The generation for which it was asked to keep the state."""

        self.code: int | None = None
        self.ended = asyncio.Event()
        self._channel: Channel | None = None
        self._lasting: list[Lasting] = []
        self._heard_s = world.timeline.now_s
        self._shutdown = False

    @property
    def is_there(self) -> bool:
        """Whether it runs."""
        return self.process.alive and self.code is None

    @property
    def is_waiting(self) -> bool:
        """Whether it has looked for its supervisor for longer than that takes."""
        return self._channel is None and self.world.timeline.now_s - self._heard_s > HEARD_S + PAUSE_S

    # its life

    async def live(self) -> None:
        """Serve until it is shut down, or the supervisor is silent for the lease."""
        await asyncio.sleep(self.world.chance.uniform(0.05, 0.8))
        tasks = [asyncio.create_task(each) for each in (self._serve(), self._watch_lease())]
        reports = asyncio.create_task(self._report_regularly())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self.world.note(f"{self.process.name} ends" + ("" if self._shutdown else ": no supervisor"))
        if not self._shutdown:
            self.world.check_lease(self)
        for task in (*tasks, reports):
            task.cancel()
        self._end_workers(-9, killed=True)
        if self._channel is not None:
            self._channel.close()
        self.end(0 if self._shutdown else 75)

    def end(self, code: int) -> None:
        """Its process has ended; what has started it sees that."""
        self.code = code
        self.ended.set()

    def die(self) -> None:
        """SIGKILL, or the end of its node; its workers end with it."""
        self._end_workers(-9, killed=False, report=False)
        self.process.kill()
        self.end(-9)

    def lose_power(self) -> None:
        """The node is gone without a word: no connection shows its end."""
        self._end_workers(-9, killed=False, report=False)
        self.process.alive = False
        self.end(-9)

    async def _watch_lease(self) -> None:
        lease_s = self.world.config.fault_tolerance.supervisor_lease_s
        while self.world.timeline.now_s - self._heard_s < lease_s:
            await asyncio.sleep(1.0)

    async def _serve(self) -> None:
        while not self._shutdown:
            with contextlib.suppress(OSError, BadMessage):
                await self._serve_one_connection()
            if not self._shutdown:
                await asyncio.sleep(PAUSE_S)

    async def _serve_one_connection(self) -> None:
        self.world.dialing = self.host
        channel = await connect(self.supervisor, self.port, self._secret)
        channel.send(Hello(node=self.node, host=self.host, pid=self.pid, birth=str(self.pid)))
        self._channel = channel
        for report in self._lasting:
            channel.send(report)
        try:
            while not self._shutdown:
                line = await channel.receive_line()
                if line is None:
                    return
                self._heard_s = self.world.timeline.now_s
                number, call = parse_call(line)
                answer = await self._answer(call)
                if number != UNANSWERED:
                    channel.send(as_reply(number, answer))
        finally:
            if not self._shutdown:
                self._channel = None
                channel.close()

    async def _report_regularly(self) -> None:
        while True:
            await asyncio.sleep(interval_s(self.world.config.nodes))
            self._report_hangs()
            if self._channel is not None:
                ranks = tuple(worker.facts(self.world.until) for worker in self.workers.values())
                self._channel.send(ProgressReport(ranks=ranks, ready=True, generation=self.generation))

    # what it is asked for

    async def _answer(self, call: Any) -> Any:  # noqa: C901 - one case for each call
        match call:
            case StartWorkers():
                return await self._start(call)
            case Port():
                return ReservedPort(port=12345)
            case AskSections():
                living = [worker for worker in self.workers.values() if worker.alive]
                return SectionsReply(workers=tuple(map(self._sections_of, living)), more=False)
            case LookNow():
                return self._looks()
            case Propose(tick=tick, action=action):
                for worker in self.workers.values():
                    worker.action, worker.committed, worker.proposed = action, -1, tick
                await asyncio.sleep(0.001)
                return self._looks()
            case Commit(tick=tick):
                for worker in self.workers.values():
                    worker.committed = tick
            case Withdraw():
                for worker in self.workers.values():
                    worker.proposed = NEVER
            case PassOnTerm():
                pass  # all of these workers use a session, and stop by the agreement
            case TakeEvidence():
                return EvidenceReply(ranks=())
            case RescueState():
                return Rescued(step=self._keep())
            case Kill():
                self.world.on_kill(self)
                self._end_workers(-9, killed=True)
            case Shutdown():
                self.world.on_kill(self)
                self._shutdown = True
        return Done()

    def _sections_of(self, worker: Worker) -> WorkerSections:
        held_s = self.world.timeline.now_s - worker.moved_s
        return WorkerSections(
            rank=worker.rank, attached=worker.resumed >= 0, age_s=held_s, quiet_s=held_s, sections=(("step", held_s),),
            elsewhere=(), step=max(worker.step, 0), own_work=worker.step - worker.hung, stopped=False, holding=False,
            warming_up=False,
        )  # fmt: skip

    def _report_hangs(self) -> None:
        """A worker whose step takes longer than its limit; a rank that waits for others holds one, too."""
        for worker in self.workers.values():
            held_s = self.world.timeline.now_s - worker.moved_s
            if worker.alive and held_s > (HANG_S if worker.resumed >= 0 else BEGIN_S) and not worker.told:
                worker.told = True
                self._tell(HangReport(generation=self.generation, rank=worker.rank, section="step", held_s=held_s,
                                      limit_s=HANG_S, why=f"step open for {held_s:.0f} s"))  # fmt: skip

    def _looks(self) -> Looks:
        return Looks(looks=tuple(worker.look() for worker in self.workers.values()))

    def _keep(self) -> int:
        self.asked_to_keep = self.generation
        living = [worker.step for worker in self.workers.values() if worker.alive and worker.resumed >= 0]
        self.memory = max([self.memory, *living])
        return self.memory

    async def _start(self, call: StartWorkers) -> Started:
        if call.generation == self.generation and self.workers:  # the answer to the first order was lost
            return Started()
        self._end_workers(-9, killed=True)
        await asyncio.sleep(self.world.chance.uniform(0.01, 0.2))
        self.generation = call.generation
        per_node = self.world.config.nproc_per_node
        ranks = range(call.first_rank, call.first_rank + per_node)
        self.workers = {rank: Worker(rank, self.host, moved_s=self.world.timeline.now_s) for rank in ranks}
        self.world.training_of(call).join(self)
        return Started()

    # ends

    def end_worker(self, rank: int, code: int, *, killed: bool = False, report: bool = True) -> None:
        """End one rank; its agent sees it a moment later."""
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.code, worker.killed = code, killed
        if code:
            worker.state = worker.state if code < 0 else State.FAILED
        worker.ended.set()
        if report and self.process.alive:
            generation = self.generation
            self.world.timeline.call_later(0.01, lambda: self._report_end(worker, generation))

    def _report_end(self, worker: Worker, generation: int) -> None:
        if not self.process.alive or worker.code is None:
            return
        facts = worker.facts(self.world.until)
        report = WorkerExited(
            code=worker.code, killed=worker.killed, generation=generation,
            **{name: getattr(facts, name) for name in facts.__struct_fields__},
        )  # fmt: skip
        self._tell(report)

    def note_signal(self, name: str) -> None:
        """A signal from Slurm."""
        self._tell(SignalReport(name=name, count=1, at=self.world.wall_s()))

    def tell_again(self) -> None:
        """Say once more, by the present connection, all that was said."""
        if self._channel is not None:
            for report in self._lasting:
                self._channel.send(report)
            ranks = tuple(worker.facts(self.world.until) for worker in self.workers.values())
            self._channel.send(ProgressReport(ranks=ranks, ready=True, generation=self.generation))

    def _tell(self, report: Lasting) -> None:
        self._lasting.append(report)
        if self._channel is not None:
            self._channel.send(report)

    def _end_workers(self, code: int, *, killed: bool, report: bool = True) -> None:
        for rank in self.workers:
            self.end_worker(rank, code, killed=killed, report=report)


class Training:
    """The collective part of one generation's training: ranks go step by step together, or not at all."""

    def __init__(self, world: World, order: StartWorkers) -> None:
        self.world, self.generation, self.nodes = world, order.generation, order.nodes
        self.agents: list[Agent] = []
        self.step = self.began_at = -1
        self.is_over = False

    def join(self, agent: Agent) -> None:
        """One node's workers have started."""
        self.agents.append(agent)
        if len(self.agents) == self.nodes:
            with self.world.outside():
                self.world.timeline.create_task(self._train())

    def workers(self) -> list[Worker]:
        """All ranks of this generation that are known."""
        return [worker for agent in self.agents if agent.generation == self.generation for worker in
                agent.workers.values()]  # fmt: skip

    def _can_step(self) -> bool:
        return (
            all(agent.generation == self.generation and agent.process.alive and not agent.process.stopped
                and not self.world.network.is_cut(agent.host) for agent in self.agents)
            and all(worker.alive and not worker.hung for worker in self.workers())
        )  # fmt: skip

    async def _train(self) -> None:
        world, chance = self.world, random.Random(self.generation)
        await asyncio.sleep(world.chance.uniform(0.2, 1.5))
        if not await self._until_all_can():
            return
        # ranks that were cut off go on when they can; what they save is refused, and their agents end them at once
        if self.generation < world.newest and world.timeline.now_s - world.disturbed_s > HEARD_S:
            world.violate("one continuation", f"generation {self.generation} begins to train after {world.newest}")
        if world.most_starts:
            self.agents[0].end_worker(min(self.agents[0].workers), 1)
            return
        self.step = self.began_at = world.resumed(self)
        for worker in self.workers():
            worker.resumed = worker.step = self.step
            worker.moved_s = world.timeline.now_s
            worker.state, worker.tick = State.TRAINING, tick_of(self.step)
        while await self._until_all_can():
            acted = self._act()
            if acted is None:  # they hold at a proposal
                await asyncio.sleep(0.01)
                continue
            if acted or self.step >= world.until:
                break
            await asyncio.sleep(world.step_s * chance.uniform(0.8, 1.2))
            if not self._can_step():
                continue
            self.step += 1
            for worker in self.workers():
                worker.step, worker.tick = self.step, tick_of(self.step)
                worker.first_at = worker.first_at or world.wall_s()
                worker.moved_s = world.timeline.now_s
            if self.step % world.save_every == 0:
                self._save()
        if self.step >= world.until and self._can_step():
            self._save()
            self._finish(State.FINISHED)

    def _act(self) -> bool | None:
        """Whether the ranks have stopped at an agreed step; None while they wait for the commit."""
        workers = self.workers()
        if any(worker.tick == worker.proposed for worker in workers):
            if not all(worker.tick == worker.proposed == worker.committed for worker in workers):
                return None
            self._save()
            for worker in workers:
                worker.answered = worker.tick
            if workers[0].action == StopAction.SAVE_AND_STOP:
                self._finish(State.STOPPED)
                return True
            for worker in workers:
                worker.proposed = NEVER
        return False

    def _save(self) -> None:
        self.world.on_save(self)
        for worker in self.workers():
            worker.saved = self.step

    def _finish(self, state: State) -> None:
        self.is_over = True
        for agent in self.agents:
            for rank, worker in agent.workers.items():
                if worker.alive:
                    worker.state = state
                    worker.tick = END if state is State.FINISHED else worker.tick
                    agent.end_worker(rank, 0)

    async def _until_all_can(self) -> bool:
        """Wait while some rank hangs or is cut off; False when this training cannot go on any more.

        Ranks that wait for one that has ended fail of it after a while, or hang for good.
        """
        fails_s = self.world.timeline.now_s + self.world.chance.choice(self.world.peers_fail_s)
        while not self._can_step():
            if any(agent.generation != self.generation for agent in self.agents):
                return False
            workers = self.workers()
            if not any(worker.alive for worker in workers):
                return False
            if any(not worker.alive for worker in workers) and self.world.timeline.now_s > fails_s:
                for agent in self.agents:
                    for rank, worker in agent.workers.items():
                        if worker.alive and not worker.hung:
                            agent.end_worker(rank, 1)
                return False
            await asyncio.sleep(0.05)
        return True


assert step_of(tick_of(7)) == 7
