"""The agents' side of a life: agents with workers that are no processes, and the training that these do.

What an agent says, hears and does is ``agent.agent`` itself. In the place of its workers' processes and pages, and of
those that watch them, are those of here.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lives.timeline import PROCESS
from slurmft.agent import agent as agent_module
from slurmft.ipc.messages import (
    HangReport,
    SectionsReply,
    Started,
    StartWorkers,
    WorkerFacts,
    WorkerSections,
)
from slurmft.ipc.pages import Slot, State, StopAction
from slurmft.policy.stop import END, NEVER, NOT_STARTED, Look, step_of, tick_of

if TYPE_CHECKING:
    from lives.world import World

HEARD_S = 5.0
"""How long after its node can be reached again an agent has got its orders."""

HANG_LOOK_S = 1.0
OLD_S = 10.0
"""By then an agent that is connected has no worker of an older generation any more, while nothing is wrong."""

ALONE_S = 10.0
"""Beyond its lease, an agent may take so long to end."""

HANG_S = 40.0
BEGIN_S = 90.0
"""A step that takes longer is reported as a hang, and a rank that has not begun by then."""


@dataclass(slots=True)
class Worker:
    """One rank's process, and its page."""

    rank: int
    until: int
    step: int = 0
    resumed: int = -1
    saved: int = -1
    tick: int = NOT_STARTED
    answered: int = -1
    proposed: int = NEVER
    holding: int = NOT_STARTED
    committed: int = -1
    action: int = 0
    state: State = State.SETUP
    exit_code: int | None = None
    killed: bool = False
    starved: bool = False
    timings: None = None
    hung: bool = False
    moved_s: float = 0.0
    told: bool = False
    """Its hang was reported."""
    first_at: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None

    @property
    def page(self) -> Worker:
        """What the agent writes into."""
        return self

    def __setitem__(self, slot: Slot, value: int) -> None:
        setattr(self, slot.name.lower(), value)

    def facts(self) -> WorkerFacts:
        """Its page, as it is reported."""
        is_past = self.step > max(self.resumed, 0)
        return WorkerFacts(
            rank=self.rank, state=int(self.state), attached=self.resumed >= 0, step=self.step, until=self.until,
            saved=self.saved, durable=self.saved, resumed=self.resumed, first_step_at=self.first_at if is_past else 0.0,
            answered=self.answered, metric=None, first_step_s=0.1, longest_step_s=0.2, saves=0, save_failures=0,
            save_errno=0, save_s=0.0, save_cost_s=0.0, saving_s=0.0, since_saved_s=0.0,
        )  # fmt: skip

    def look(self) -> Look:
        """As the agreement sees it."""
        return Look(self.resumed >= 0, self.tick, self.alive, self.holding if self.alive else NOT_STARTED)


class Workers:
    """In the place of ``agent.workers.Workers``."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.by_rank: dict[int, Worker] = {}
        self.memory = self.folder = Path(f"/nowhere/{agent.pid}")
        self.private = SimpleNamespace(tell_alive=lambda: None)
        self.ready = asyncio.Event()
        self.ready.set()

    def start_zygote(self, *_: Any) -> None:
        """There is none."""

    def start(self, ranks: range, *_: Any, **__: Any) -> None:
        """Begin the training of these ranks."""
        world = self._agent.world
        if any(worker.alive for worker in self.by_rank.values()):
            world.violate(
                "nothing of an older generation", f"workers of {self._agent.process.name} begin beside others"
            )
        self.by_rank = {rank: Worker(rank, world.until, moved_s=world.timeline.now_s) for rank in ranks}
        world.training_of(self._agent.order).join(self._agent)

    def signal(self, _: int) -> None:
        """All of them use a session, and stop by the agreement."""

    def kill(self) -> None:
        """They must have been asked for their state."""
        self._agent.world.on_kill(self._agent)
        self.end(-9, killed=True)

    async def end_earlier(self) -> None:
        """Return when none lives."""
        self.end(-9, killed=True)
        await asyncio.sleep(self._agent.world.chance.uniform(0.01, 0.2))

    def earlier_pids(self) -> set[int]:
        """None."""
        return set()

    def kill_lingering(self, _: float) -> None:
        """None does."""

    def close(self, **_: bool) -> None:
        """The agent ends; what it had kept ends with it."""
        self.end(-9, killed=True)

    def ended(self, _: Worker) -> None:
        """One of them has."""

    def end(self, code: int, *, killed: bool, report: bool = True) -> None:
        """All of them."""
        for rank in self.by_rank:
            self._agent.end_worker(rank, code, killed=killed, report=report)


class Hangs:
    """In the place of ``agent.hangs.HangWatch``: a step that takes longer than its limit."""

    def __init__(self, _: Any, report: Any) -> None:
        self._report, self._workers = report, list[Worker]()
        self.agent: Agent

    def begin(self, workers: list[Worker], **_: Any) -> None:
        """Watch these from now on."""
        self._workers = workers

    def learn(self, _: Any) -> None:
        """Nothing: there is one limit."""

    def durations(self) -> None:
        """Nothing."""

    def facts(self, _: int) -> SectionsReply:
        """Where each of them is."""
        return SectionsReply(workers=tuple(_sections_of(each) for each in self._workers if each.alive), more=False)

    async def run(self) -> None:
        """Report each hang once; a rank that waits for others holds a section, too."""
        alone_s = connected_s = 0.0
        while True:
            await asyncio.sleep(HANG_LOOK_S)
            alone_s = alone_s + HANG_LOOK_S if self.agent.world.is_alone(self.agent) else 0.0
            connected_s = connected_s + HANG_LOOK_S if self.agent.is_connected else 0.0
            self.agent.check(alone_s, connected_s)
            for worker in self._workers:
                held_s = asyncio.get_running_loop().time() - worker.moved_s
                if worker.alive and held_s > (HANG_S if worker.resumed >= 0 else BEGIN_S) and not worker.told:
                    worker.told = True
                    self._report(HangReport(rank=worker.rank, section="step", held_s=held_s, limit_s=HANG_S,
                                            why=f"step open for {held_s:.0f} s"))  # fmt: skip


def _sections_of(worker: Worker) -> WorkerSections:
    held_s = asyncio.get_running_loop().time() - worker.moved_s
    return WorkerSections(
        rank=worker.rank, attached=worker.resumed >= 0, age_s=held_s, quiet_s=held_s, sections=(("step", held_s),),
        elsewhere=(), step=max(worker.step, 0), own_work=worker.step - worker.hung, stopped=False, holding=False,
        warming_up=False,
    )  # fmt: skip


class Own(agent_module.Agent):
    """slurmft's own agent, in a life."""

    def __init__(self, agent: Agent, folder: Path, secret: bytes) -> None:
        self.agent = agent
        environment = {"SLURMFT_NODE_INDEX": str(agent.node), "SLURMD_NODENAME": agent.host}
        super().__init__(agent.world.config, folder.name, environment)
        self._birth, self._hangs.agent = str(agent.pid), agent  # type: ignore[attr-defined]
        self._secret = secret

    @property
    def _supervisor(self) -> tuple[list[str], int, bytes]:  # type: ignore[override]
        return [self.agent.supervisor], self.agent.port, self._secret

    async def _start(self, call: StartWorkers) -> Started:
        self.agent.order = call
        return await super()._start(call)


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _no_evidence(*_: Any) -> list[Any]:
    return []


def simulate_agents(world: World, patch: pytest.MonkeyPatch) -> None:
    """In the place of what an agent starts, holds and watches is what a life has of it."""

    async def keep(_: Any) -> int:
        return next(agent for agent in world.agents if agent.process is PROCESS.get()).keep()

    nothing = SimpleNamespace(begin=lambda *_, **__: None, close=lambda: None, new=lambda _: (), run=_for_ever)
    forensics = SimpleNamespace(keep_last_words=lambda *_: None, finish=lambda _: None, take_evidence=_no_evidence)
    for name, value in {
        "Workers": lambda on_exit, _: on_exit.__self__.agent.own_workers, "HangWatch": Hangs,
        "Keeping": lambda *_: nothing, "new_digests": lambda _: (), "NoticeWatch": lambda *_: nothing,
        "Forensics": lambda _: forensics, "look_after_regularly": lambda *_: _for_ever(), "rescue_on_node": keep,
        "reserve_port": lambda: (nothing, 12345), "wait_until_free": lambda *_: "",
    }.items():  # fmt: skip
        patch.setattr(agent_module, name, value)


class Agent:
    """One node's agent, from its start to its end; a process of its own."""

    def __init__(self, world: World, node: int, host: str, *, port: int, folder: Path, secret: bytes) -> None:
        self.world, self.node, self.host, self.port, self.folder = world, node, host, port, folder
        self.supervisor = world.host
        """Where its supervisor is."""

        self.job = world.job
        self.restarts = 0 if world.job is None else world.job.restarts
        self.process = world.process(f"agent {node} on {host}", host)
        self.pid = world.next_pid()
        self.memory: int = -1
        """The newest step that was kept here just in time."""

        self.asked_to_keep = 0
        """The generation for which it was asked to keep the state."""

        self.order: StartWorkers
        """The newest one."""

        self.heard_s = self.slept_s = 0.0
        """When it had heard of its supervisor, before it was stopped for so long."""

        self.code: int | None = None
        self.ended = asyncio.Event()
        self.own_workers = world.workers(self)
        self._own = Own(self, folder, secret)

    @property
    def workers(self) -> dict[int, Worker]:
        """By their ranks."""
        return self.own_workers.by_rank

    @property
    def generation(self) -> int:
        """That it has begun last; 0 before."""
        replicas = self._own._replicas
        return self._own._generation if replicas is None else replicas._pool.generation

    @property
    def is_there(self) -> bool:
        """Whether it runs."""
        return self.process.alive and self.code is None

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection to its supervisor."""
        return self._own._channel is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it has looked for its supervisor for longer than that takes."""
        silent_s = self.world.timeline.now_s - self._own._last_heard
        return not self.is_connected and silent_s > HEARD_S + agent_module.RECONNECT_PAUSE_S

    # its life

    async def live(self) -> None:
        """Serve until it is shut down, or the supervisor is silent for the lease."""
        await asyncio.sleep(self.world.chance.uniform(0.05, 0.8))
        code = await self._own.run()
        self.world.note(f"{self.process.name} ends" + (": no supervisor" if code else ""))
        if code:
            self.world.check_lease(self)
            self.world.ended.add(self.host)
        self.end(code)
        self.process.alive = False

    def end(self, code: int) -> None:
        """Its process has ended; what has started it sees that."""
        self.code = code
        self.ended.set()

    def die(self) -> None:
        """SIGKILL, or the end of its node; its workers end with it."""
        self.own_workers.end(-9, killed=False, report=False)
        self.process.kill()
        self.end(-9)

    def lose_power(self) -> None:
        """The node is gone without a word: no connection shows its end."""
        self.own_workers.end(-9, killed=False, report=False)
        self.process.alive = False
        self.end(-9)

    def keep(self) -> int:
        """The newest step of its workers, which it has from now on."""
        self.asked_to_keep = self.generation
        living = [worker.step for worker in self.workers.values() if worker.alive and worker.resumed >= 0]
        self.memory = max([self.memory, *living])
        return self.memory

    def check(self, alone_s: float, connected_s: float) -> None:
        """What must hold of it; no supervisor could be heard for so long, or it was connected to one."""
        if connected_s > OLD_S:
            self.world.check_workers(self)
        lease_s = self.world.config.fault_tolerance.supervisor_lease_s
        if alone_s > lease_s + ALONE_S and self.is_there:
            self.world.violate("agents end", f"{self.process.name} lives {alone_s:.0f} s after its supervisor")

    def note_signal(self, name: str) -> None:
        """A signal from Slurm."""
        self.world.asked["SIGTERM"] = self.world.timeline.now_s
        self._own._note_own_signal(name)

    def tell_again(self) -> None:
        """Say once more, by the present connection, all that was said."""
        if (channel := self._own._channel) is not None:
            for report in self._own._lasting:
                channel.send(report)

    def end_worker(self, rank: int, code: int, *, killed: bool = False, report: bool = True) -> None:
        """End one rank; its agent sees it a moment later."""
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.exit_code, worker.killed = code, killed
        self.own_workers.ended(worker)
        if code:
            worker.state = worker.state if code < 0 else State.FAILED
        if report and self.process.alive:
            self.world.timeline.call_later(0.01, self._see_end, worker)

    def _see_end(self, worker: Worker) -> None:
        if self.process.alive:
            self._own._report_exit(worker)  # type: ignore[arg-type]


class Training:
    """The collective part of one generation's training: ranks go step by step together, or not at all."""

    def __init__(self, world: World, order: StartWorkers) -> None:
        self.world, self.generation, self.nodes = world, order.generation, order.nodes
        self.agents: list[Agent] = []
        self.step = self.began_at = -1
        self.began_s = math.inf
        self.is_over = False

    def join(self, agent: Agent) -> None:
        """One node's workers have started."""
        if agent in self.agents:
            self.world.violate("once", f"{agent.process.name} starts generation {self.generation} again")
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
        self.began_s = world.timeline.now_s
        for worker in self.workers():
            worker.resumed = worker.step = self.step
            worker.moved_s = world.timeline.now_s
            worker.state, worker.tick = State.TRAINING, tick_of(self.step)
        while await self._until_all_can():
            acted = self._act()
            if acted is None:  # they hold at a proposal
                world.check_going(self)
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
                world.check_going(self)
        if self.step >= world.until and self._can_step():
            self._save()
            self._finish(State.FINISHED)

    def _act(self) -> bool | None:
        """Whether the ranks have stopped at an agreed step; None while they wait for the commit."""
        workers = self.workers()
        for worker in workers:
            worker.holding = worker.proposed if worker.tick == worker.proposed else NOT_STARTED
        if any(worker.tick == worker.proposed for worker in workers):
            if not all(worker.tick == worker.proposed == worker.committed for worker in workers):
                return None
            self._save()
            for worker in workers:
                worker.answered = worker.tick
            if workers[0].action == StopAction.SAVE_AND_STOP:
                self._finish(State.STOPPED)
                return True
            self.world.asked.pop("SAVE", None)
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
        began_s = self.world.timeline.now_s
        fails_s = began_s + self.world.chance.choice(self.world.peers_fail_s)
        while not self._can_step():
            self.world.check_stalled(self, began_s)
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
