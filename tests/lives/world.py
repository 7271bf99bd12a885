"""One life of a run: the real supervisor on a simulated machine, with faults, and what must hold whatever happens.

The supervisor is the product's own, from ``supervise`` to the end of the run, and so are the agents, but for the
processes of their workers. Time and network are ``timeline``, workers and their training ``nodes``; the run folder is
real, in memory. A seed makes the same life each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import random
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lives.guarding import Guarding, Listener, simulate_guardian
from lives.nodes import OLD_S, Agent, Training, Workers, simulate_agents
from lives.slurm import Controller, Job, SlurmMachine, environment_of, next_job, submitted
from lives.timeline import PROCESS, Network, Process, Stuck, Thread, Timeline, inside
from slurmft.config.run import RunConfig
from slurmft.errors import SlurmftError, StorageUnavailable
from slurmft.ipc.messages import StartWorkers
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.slurm import expand
from slurmft.storage import journal as journal_module
from slurmft.storage import run_folder as run_folder_module
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.journal import Event, EventName
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import act as act_module
from slurmft.supervisor import guardian
from slurmft.supervisor import run as run_module
from slurmft.supervisor.agents import AgentPool
from slurmft.supervisor.cluster import LOCAL_JOB_VARIABLE, LOCAL_RESTART_VARIABLE, LocalCluster
from slurmft.system import processes

LOGIN = processes.Process("login", 1, "1")
START_S = 1_700_000_000.0
LONGEST_S = 2 * 3600.0
FOLDER_S = 10.0
PAUSE_S = 5.0
"""The run folder is well for so long between two faults: it is waited for, but no longer than for two minutes."""

PARTLY = 0.3
"""How often a full disk still has room for a part of what is written."""

SAYS_WHY = frozenset({EventName.EXCLUSION_ESCAPED, EventName.EXCLUSIONS_DROPPED, EventName.EXCLUSIONS_REFUSED})
"""Events that say why a run is on a node that is to be kept off."""

BEGINS = frozenset(
    {EventName.ATTEMPT_STARTED, EventName.EXCLUSION_ESCAPED, EventName.KEEPING_OFF, EventName.REQUESTS_OPENED}
)
"""Before the last of these an attempt asks Slurm which nodes are to be kept off, and looks for no request."""

SAYS_RESCUE = frozenset({EventName.RESCUING, EventName.RELEASED, EventName.REQUEUEING})
"""Events that say what cron is about to do."""

STOPPED_LOOK_S = 0.5
LEASE_LOOK_S = 1.0

LOOKED_S = 0.5
"""An attempt looks for a request within this time of its beginning, and has begun no step by then."""

HEALED_S = 2.0
"""A node that can be reached again is told what it has missed within this time."""

FENCED_S = 15.0
"""A supervisor whose place was taken has seen so by then."""

PINGED_S = 20.0
"""An agent that can be reached hears of its supervisor within this time; no lease is as short."""

CRON_LOOKED_S = 2.0
"""Cron has looked for a request for a stop before what it changes in Slurm, but not longer before."""

STOP_KNOWN_S = 5.0
"""A supervisor that lives, and whose run folder answers, has seen a request for a stop by then."""


ANSWERED_S = 15.0
"""A request, or a signal, that comes while nothing is wrong is answered by then."""

SKEW_S = 300.0
"""Munge, and so Slurm, works with no node whose clock is further off; times of both cannot be compared then."""

TOLD_STEPS = 40
"""A progress report is no older, while nothing is wrong."""

STOPPED_S = 70.0
"""The longest time for which a fault stops an agent, whose lease does not run meanwhile."""

ENDED_S, FOUND_S = 45.0, 150.0
"""A rank that has ended has ended its attempt by then; one that hangs, or whose node is silent, by then."""


class Killed(BaseException):
    """The supervisor, or its guardian, has got a SIGKILL: nothing of it runs any more."""


class StartedAnew(BaseException):
    """The supervisor has replaced itself by the next start of the run."""


class Started:
    """An agent that is started without Slurm, as a ``asyncio.subprocess.Process``."""

    name = "python"

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.agents, self.pid = (agent,), agent.pid

    @property
    def returncode(self) -> int | None:
        """None while the agent lives."""
        return self._agent.code

    async def wait(self) -> int:
        """Return when it has ended."""
        await self._agent.ended.wait()
        assert self._agent.code is not None
        return self._agent.code

    def terminate(self) -> None:
        """End it; one whose node is cut off does not hear of it."""
        if self._agent.code is None and not self._agent.world.network.is_cut(self._agent.host):
            self._agent.world.check_taken_in(self._agent)
            self._agent.die()

    kill = terminate

    def signal(self, number: int) -> None:
        """As the kernel does: an agent that gets a SIGTERM tells its supervisor of it."""
        if self._agent.world.network.is_cut(self._agent.host):
            return
        self._agent.die() if number == signal.SIGKILL else self._agent.note_signal(signal.Signals(number).name)


class Machine(LocalCluster):
    """The cluster that the supervisor runs on: nodes of this life."""

    def __init__(self, world: World, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self._world = world

    def agent_hosts(self, config: RunConfig) -> list[str]:
        """n0, n1, ..."""
        return [f"n{index}" for index in range(self.size(config))]

    async def start_agent(self, config: RunConfig, log_folder: Path, attempt: Any, *, host: str, index: int) -> Any:
        """A simulated agent; none on a node that is off."""
        return self._world.guarding.began(Started(self._world.begin_agent(index, f"n{index}", log_folder)))

    def start_anew(self, argv: Any) -> None:
        """End this process here; the life starts the next one."""
        raise StartedAnew


class World:
    """Everything of one life.

    Args:
        folder: where the run folder is made.
        chance: decides all that is left to chance.
        config: keys of the run's configuration beside those that every life has.
    """

    workers = Workers
    """Those of an agent."""

    def __init__(
        self, folder: Path, chance: random.Random, *, in_slurm: dict[str, Any] | None = None, **config: Any
    ) -> None:
        self.chance, self.story = chance, [""]
        self.timeline = Timeline(until_s=LONGEST_S)
        self.network = Network(self.timeline, chance)
        self.network.on_change = self.disturb
        self.run = RunFolder(folder / "run")
        self.config = RunConfig.model_validate({
            "run_folder": str(self.run.path), "command": ["true"], "nodes": 2, "nproc_per_node": 2,
            "exclusions": {"path": str(folder / "exclusions.json")}, **config,
        })  # fmt: skip
        self.until, self.step_s, self.save_every = 400, 0.2, 50
        self.agents: list[Agent] = []
        self.off: set[str] = set()
        """Nodes without power."""

        self.ended: set[str] = set()
        """Nodes whose agent has ended by its lease."""

        self.accusable: set[tuple[str, str]] = set()
        """Kinds of evidence, and nodes that a fault has given reason for."""

        self.saved, self.saved_by = 0, 0
        """The newest step on the disk, and the generation that has saved it."""

        self.asked: dict[str, float] = {}
        """Kinds of requests and signals that are not answered yet, and when they came."""

        self.violations: list[str] = []
        self.journal: list[str] = []
        self.supervisor: Process | None = None
        self._trainings: dict[int, Training] = {}
        self._generations: set[int] = set()
        self.engines = 0
        """That were started."""

        self._processes: list[Process] = []
        self._pids = 1000
        self.peers_fail_s: tuple[float, ...] = (0.05, 0.5, 3.0, 1e9)
        """How long ranks may wait for one that is gone before they fail of it."""

        self.disturbed_s = 0.0
        """When a fault has kept an agent and its supervisor apart the last time."""

        self.resumed_s = 0.0
        """When a fault that had stopped the supervisor was over the last time."""

        self.excluded: set[str] = set()
        self.excluded_next: set[str] = set()
        """Nodes that a user has put on the exclusion list, before the newest job was decided about, and since."""

        self.excluded_s = 0.0
        """When that was the last time."""

        self.most_starts = 0
        """Each training fails before its first step, and there may be so many; 0: it trains."""

        self.stop_asked_s = 0.0
        """When a user has asked for the end of the run; 0 before, infinite where it may go on all the same."""

        self.silent_until_s = 0.0
        """The run folder answers nothing before."""

        self.full_until_s = self.stale_until_s = 0.0
        """Before, nothing can be written into the run folder; nothing new of others can be seen in it."""

        self.well_since_s = 0.0
        """Nothing is wrong with the run folder after it."""

        self.ahead_s = 0.0
        """By how much the nodes' clocks are ahead of the controller's."""

        self.has_jumped = False
        """Whether they have ever jumped: times of before and after it cannot be compared."""

        self.slurm = None if in_slurm is None else Controller(self, **in_slurm)
        self.job: Job | None = None
        """Whose supervisor runs."""

        self.guarding = Guarding(self)
        self._me = LOGIN
        self._ignores_signals = False

        self.unwritten: deque[tuple[Event, str]] = deque()
        """Of the journal: what the present supervisor still has to write."""

        self.begun: list[int] = []
        """Generations that the present supervisor has started, and those in whose place it acts."""

        self.to_decide: set[int] = set()
        """Those whose supervisor has come to its end, with the run folder well."""

        self.never_written: set[int] = set()
        """Generations that the journal was never told of: their supervisor ended before the run folder was well."""

        self.is_record_spoiled = False
        """What says where agents look for their supervisor was damaged, or the run has another owner since."""

        self.written: dict[str, float] = {}
        """When files of the run folder were written."""

        self.effects = 0
        self.full_at, self.full_s = -1, 0.0
        """The disk of the run folder is full from this effect on, for so many seconds."""

        self.befalls: dict[int, Callable[[World], None]] = {}
        """What comes as soon as the supervisor has had so many effects."""

        self.killed_after = ""
        """The supervisor is killed after the first command that begins like this."""

        self.killed_at = -1
        """The supervisor is killed before this effect on the run folder, ..."""

        self.killed_whole = False
        """... and the batch script with it, so that no guardian acts in its place."""

        self.fenced: Process | None = None
        """The supervisor whose place another start has taken, and ..."""

        self.fenced_s = 0.0
        """... when that was."""

        self.fence = 0
        """The generation of that start: what older ones save is refused."""

        self.rescues = 0
        """Of cron, in a row and without progress, at the end of the life."""

        self.crons: dict[Process, processes.Process] = {}
        """What cron has started, and what it is for itself."""

        self.cron_killed_at = -1
        """The next one is killed before this effect of its own."""

    # what agents and workers ask of it

    def process(self, name: str, host: str = "") -> Process:
        """A new process."""
        self._processes.append(Process(name, host))
        return self._processes[-1]

    def next_pid(self) -> int:
        """A process id that no other has."""
        self._pids += 1
        return self._pids

    @property
    def host(self) -> str:
        """Where the supervisor is: a node of its job; without Slurm, on none that can be lost."""
        return "supervisor" if self.job is None else self.job.batch_host

    @property
    def is_suspended(self) -> bool:
        """Whether the supervisor is stopped."""
        return self.supervisor is not None and self.supervisor.stopped

    @property
    def is_full(self) -> bool:
        """Whether the disk of the run folder is."""
        return self.timeline.now_s < self.full_until_s

    def wall_s(self) -> float:
        """Unix time."""
        return START_S + self.timeline.now_s + self.ahead_s

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is begun in here belongs to no process."""
        with inside(None):
            yield

    def note(self, what: str) -> None:
        """Add a line to the story of this life."""
        self.story.append(f"{self.timeline.now_s - 1000.0:9.2f}  {what}")

    def violate(self, invariant: str, what: str) -> None:
        """Something that must hold does not."""
        self.note(f"VIOLATION {invariant}: {what}")
        self.violations.append(f"{invariant}: {what}")

    def begin_agent(self, node: int, host: str, folder: Path) -> Agent:
        """Start an agent, which finds its supervisor by this folder; it ends at once on a node that is off."""
        port = json.loads((folder / "control.json").read_text())["port"]
        agent = Agent(self, node, host, port=port, folder=folder, secret=(folder / "secret").read_bytes())
        self.agents.append(agent)
        self.note(f"{agent.process.name} starts" + (", in vain" if host in self.off else ""))
        if host in self.off:  # as of Slurm: a step on a node that is gone, and not noticed yet, fails after 6 s
            self.timeline.call_later(6.0, agent.end, 1)
            agent.process.alive = False
            return agent
        with inside(agent.process):
            self.timeline.create_task(agent.live())
        return agent

    def training_of(self, order: StartWorkers) -> Training:
        """The training of an order's generation."""
        if order.generation not in self._trainings:
            self.begin_generation(order.generation, order.nodelist)
            self._trainings[order.generation] = Training(self, order)
            if 0 < self.most_starts < len(self._trainings):
                self.timeline.until_s = self.timeline.now_s  # enough is seen
        return self._trainings[order.generation]

    def begin_generation(self, generation: int, nodelist: str) -> None:
        """The first workers of a generation are about to start, or engines get to work for it."""
        if generation in self._generations:
            return
        self.note(f"generation {generation} starts on {nodelist}")
        self._check_start(generation, nodelist)
        begun = [event for event in self.events()[-20:] if event.event in BEGINS]
        looked = not begun or self.wall_s() - begun[-1].seconds() > LOOKED_S
        looked = looked and (self.slurm is None or abs(self.ahead_s) < SKEW_S)  # whose times tell who wanted it
        if self.stop_asked_s and looked and self.timeline.now_s > self.stop_seen_s:
            self.violate("stop means stop", f"generation {generation} starts after a stop was asked for")
        self._generations.add(generation)
        self.begun.append(generation)

    @property
    def stop_seen_s(self) -> float:
        """By when a supervisor that lives has seen that a user has asked for the end of the run."""
        well_s = max(self.stale_until_s, self.resumed_s, self.full_until_s, self.silent_until_s)
        return max(self.stop_asked_s, well_s) + STOP_KNOWN_S

    @property
    def starts(self) -> list[int]:
        """The generations whose workers were started."""
        return sorted(self._generations)

    @property
    def trainings(self) -> list[Training]:
        """All that have begun, in their order."""
        return [each for _, each in sorted(self._trainings.items()) if each.step >= 0]

    @property
    def newest(self) -> int:
        """The generation that was started last."""
        return max(self._generations, default=0)

    def resumed(self, training: Training) -> int:
        """The step that a training begins with: the newest that is on the disk, or was kept in memory of its nodes."""
        memories = [agent.memory for agent in training.agents]
        step = max(self.saved, *memories)
        self.note(f"generation {training.generation} resumes at {step} (disk {self.saved}, memory {max(memories)})")
        return step

    def on_save(self, training: Training) -> None:
        """A training has committed its step."""
        if training.generation < max(self.newest, self.fence):
            return  # the fence in the checkpoint directory refuses it
        self.saved, self.saved_by = max(self.saved, training.step), training.generation

    def on_kill(self, agent: Agent) -> None:
        """An agent was told to kill its workers: they must have been asked for their state."""
        living = [worker for worker in agent.workers.values() if worker.alive and worker.step > worker.resumed >= 0]
        since_s = self.timeline.now_s - self.network.healed_s.get(agent.host, -HEALED_S)
        asked = agent.asked_to_keep == agent.generation or since_s < HEALED_S
        # a stop that is overdue, or one before it could save, kills what cannot answer; a newer start has its state
        if (
            living
            and agent.generation == max(self.newest, self.fence)
            and self.config.checkpoint.just_in_time
            and not asked
            and not self.is_stopping()
        ):
            self.violate("state is kept", f"{agent.host} kills workers at step {living[0].step}, and was never asked")

    def is_stopping(self) -> bool:
        """Whether a stop is under way in the newest attempt."""
        last = [*self.events()[-60:], *(event for event, _ in self.unwritten)]
        started = max((n for n, e in enumerate(last) if e.event == EventName.ATTEMPT_STARTED), default=0)
        return any(event.event == EventName.STOP_REQUESTED for event in last[started:])

    def events(self) -> list[Event]:
        """The journal."""
        return self.run.journal().read_past()

    # what holds at each moment

    @property
    def agents_are_safe(self) -> bool:
        """Whether nothing but the end of their supervisor has befallen agents that outlive one: they are needed."""
        is_calm = self.folder_is_well and self.network.is_whole and not self.off and not self.stop_asked_s
        is_calm = is_calm and self.run.done() is None and not self.ahead_s and not self.is_record_spoiled
        is_calm = is_calm and (self.job is None or self.job.state == "RUNNING")
        return is_calm and not self.asked and (self.slurm is None or not self.slurm.errs)

    @property
    def folder_is_well(self) -> bool:
        """Whether the run folder has taken everything, for long enough that what was kept back is in it, too."""
        until_s = max(self.silent_until_s, self.full_until_s, self.stale_until_s, self.well_since_s)
        return self.timeline.now_s > until_s + FOLDER_S

    def disturb(self) -> None:
        """From now on an agent may miss its supervisor for a while."""
        self.disturbed_s = self.timeline.now_s

    def has_been_well(self, since_s: float) -> bool:
        """Whether nothing has kept the supervisor, Slurm or the run folder from their work since then."""
        last_s = max(self.disturbed_s, self.resumed_s, self.silent_until_s, self.full_until_s, self.stale_until_s)
        is_there = self.supervisor is not None and self.supervisor.alive and not self.is_suspended
        return is_there and last_s <= since_s and (self.slurm is None or not self.slurm.errs)

    def check_going(self, training: Training) -> None:
        """A training goes on: it is told how far it is, and no request waits for its answer."""
        now_s = self.timeline.now_s
        if training.generation != self.newest:  # it ends by its lease
            return
        if not self.network.is_whole or any(agent.process.stopped for agent in self.agents if agent.is_there):
            return
        for kind, at_s in self.asked.items():
            since_s = max(at_s, self.disturbed_s)
            if training.began_s < at_s and now_s - since_s > ANSWERED_S and self.has_been_well(since_s):
                self.violate(
                    "requests are answered", f"{kind} waits for {now_s - at_s:.0f} s, and the training goes on"
                )
        told = (self.run.progress() or {}).get("step", 0)
        since_s = max(training.began_s, self.disturbed_s)
        if told < training.step - TOLD_STEPS and now_s - since_s > ANSWERED_S and self.has_been_well(since_s):
            self.violate("progress is told", f"step {told} is, and the training is at {training.step}")

    def check_stalled(self, training: Training, since_s: float) -> None:
        """A training cannot go on, and has not ended yet."""
        since_s = max(since_s, self.disturbed_s)
        if self.timeline.now_s - since_s < ENDED_S:
            return
        can_be_heard = self.network.is_whole and not any(agent.process.stopped for agent in training.agents)
        has_failed = any(not worker.alive and not worker.killed for worker in training.workers())
        bound_s = ENDED_S if can_be_heard and has_failed else FOUND_S
        is_newest = training.generation == self.newest
        if is_newest and self.timeline.now_s - since_s > bound_s and self.has_been_well(since_s):
            self.violate("in time", f"generation {training.generation} cannot go on, for {bound_s} s")

    def check_workers(self, agent: Agent) -> None:
        """An agent that has been connected for a while has no worker of an older generation."""
        is_old = agent.generation < self.newest and any(worker.alive for worker in agent.workers.values())
        if is_old and self.network.is_whole and self.has_been_well(self.timeline.now_s - OLD_S):
            self.violate("nothing of an older generation", f"{agent.process.name} has one of {agent.generation}")

    def is_alone(self, agent: Agent) -> bool:
        """Whether no supervisor can reach it."""
        supervisor = self.network.listeners[agent.port][0]
        return not supervisor.alive or (agent.host != agent.supervisor and self.network.is_cut(agent.host))

    def check_lease(self, agent: Agent) -> None:
        """An agent ends, as it has heard of no supervisor for its lease."""
        heard_s, lease_s = agent._own._last_heard, self.config.fault_tolerance.supervisor_lease_s
        silent_s = self.timeline.now_s - heard_s - (agent.slept_s if heard_s == agent.heard_s else 0.0)
        if silent_s < lease_s - LEASE_LOOK_S:
            self.violate("agents stay", f"{agent.process.name} ends after {silent_s:.1f} s, and not after its lease")
        if self._can_reach_supervisor(agent):
            self.violate("agents stay", f"{agent.process.name} ends, although its supervisor lives and can be reached")

    def check_taken_in(self, agent: Agent) -> None:
        """An agent is ended by what has started it: its supervisor has not heard of it, or cannot tell it to end."""
        if agent.is_waiting and self._can_reach_supervisor(agent):
            self.violate("agents are taken in", f"{agent.process.name} is ended, and nobody has taken its connection")

    def _can_reach_supervisor(self, agent: Agent) -> bool:
        """For long enough to have heard of it."""
        is_there = self.supervisor is not None and self.supervisor.alive and agent.job is self.job
        process, serve = self.network.listeners[agent.port]
        is_there = is_there and process is self.supervisor  # not of one before it
        is_there = is_there and serve not in self.network.unserved  # it waits for the run folder, or for Slurm
        is_there = is_there and not self.is_suspended and not agent.process.stopped
        if [event.event for event in self.events()[-1:]] == [EventName.DECISION]:
            return False  # which has been carried out: it waits for the run folder
        is_reached = not self.network.is_cut(agent.host) and agent.host not in self.network.slow
        return is_there and is_reached and self.timeline.now_s - self.disturbed_s > PINGED_S

    def check_gone(self, invariant: str, healed_s: float = HEALED_S) -> None:
        """Nothing of a start runs any more when its supervisor ends, or puts the job back into the queue."""
        for agent in self.agents:
            since_s = self.timeline.now_s - self.network.healed_s.get(agent.host, -healed_s)
            is_reached = not self.network.is_cut(agent.host) and since_s >= healed_s and not agent.process.stopped
            # those of a killed supervisor are its guardian's, which tries once; Slurm ends the rest with the job
            is_ours = agent.job is self.job and self.network.listeners[agent.port][0] is self.supervisor
            is_ours = is_ours or (agent in self.guarding.spared and self.config.inference is not None)
            if agent.is_there and is_ours and is_reached and agent.host not in self.network.slow:
                self.violate(invariant, f"{agent.process.name} lives")

    def check_left_behind(self, agents: Iterable[Agent]) -> None:
        """A guardian has given up: what it could reach of its supervisors' agents has ended."""
        for agent in agents:
            if agent.is_there and not self.network.is_cut(agent.host):
                self.violate("agents end with the run", f"{agent.process.name} lives, and its guardian has given up")

    def _check_start(self, generation: int, nodelist: str) -> None:
        if self.run.done() is not None:
            self.violate("the end is the end", f"generation {generation} starts after the run was complete")
        can_know = self.slurm is not None and not self.slurm.errs and abs(self.ahead_s) < SKEW_S
        if self.slurm is not None and self.job is not None and can_know and not self.full_until_s:
            others = [job.job_id for job in self.slurm.mine() if job.job_id != self.job.job_id
                      and not (job.completing or job.is_held)]  # fmt: skip
            if others:
                self.violate("one continuation", f"generation {generation} starts, and jobs {others} wait")
        barred = self.excluded & set(expand(nodelist))
        knows = self.slurm is None or (self.slurm.mood_lasts <= 0 and self.slurm.can_spare(barred))
        if barred and knows and not any(event.event in SAYS_WHY for event in self.events()):
            self.violate("excluded nodes", f"generation {generation} starts on {sorted(barred)}")
        if not self.folder_is_well:
            return
        if self.job is not None and self.job.job_id not in self.run.jobs():
            self.violate("a job is known", f"generation {generation} starts in {self.job.job_id}")
        self.check_fence(f"generation {generation} starts")
        # an agent that was stopped may carry out an order of long ago when it goes on, and hears then that it is lost
        started = [event.details for event in self.events() if event.event == EventName.ATTEMPT_STARTED]
        if not any(facts.get("generation") == generation for facts in started):
            self.violate("entry before action", f"generation {generation} starts, and the journal does not know")

    def check_told(self, argv: Sequence[str]) -> None:
        """What goes on in Slurm was decided, and is in the journal."""
        if (
            not ((argv[0] == "sbatch" and "--test-only" not in argv) or argv[1:2] == ["requeue"])
            or not self.folder_is_well
        ):
            return
        last = self.events()[-40:]
        self.check_fence(" ".join(argv[:3]))
        wanted = EventName.RESUBMITTING if argv[0] == "sbatch" else EventName.REQUEUEING
        begun = max((at for at, event in enumerate(last) if event.event == EventName.ATTEMPT_STARTED
                     and event.details.get("generation") != self.fence), default=0)  # fmt: skip
        begun_s = max((event.seconds() for event in last[begun:] if event.event in BEGINS), default=0.0)
        ended = [event for event in last[begun:] if event.event in (EventName.VERDICT, EventName.DECISION)]
        if not any(event.event == EventName.DECISION for event in ended):
            self.violate("entry before action", f"{' '.join(argv[:3])}, and no decision is in the journal")
        elif self._stop_is_passed_over(begun_s - START_S, ended[0].seconds() - START_S):
            self.violate("stop means stop", f"{' '.join(argv[:3])}, whose attempt has ended after a stop was asked for")
        if argv[0] != "sbatch":
            self.check_gone("agents end before the requeue")
            self._check_kept_off(last[begun:])
        if not any(event.event == wanted for event in last[begun:]):
            self.violate("entry before action", f"{' '.join(argv[:3])}, and the journal does not know of it")

    def _check_kept_off(self, last: Sequence[Event]) -> None:
        """What the newest job is told to keep off has been on the list when it was decided."""
        decided = [event.seconds() - START_S for event in last if event.event == EventName.DECISION]
        told = [event.details for event in last if event.event == EventName.REQUEUEING]
        barred, slurm = self.excluded | self.excluded_next, self.slurm
        if slurm is None or self.job is None or not (barred and decided and told) or slurm.errs or self.has_jumped:
            return
        kept_off = {*expand(str(told[-1].get("excluded") or "")), *expand(self.job.excluded or "")}
        if decided[-1] > self.excluded_s + LOOKED_S and slurm.can_spare(barred) and (missing := barred - kept_off):
            self.violate("excluded nodes", f"the requeue does not keep off {sorted(missing)}")

    def check_done(self) -> None:
        """The run is marked as complete: that was decided before."""
        finished = [event.details["action"] for event in self.events()[-40:] if event.event == EventName.DECISION]
        if self.folder_is_well and finished[-1:] != ["finish"]:
            self.violate("entry before action", "the run is marked as complete, and no decision is in the journal")

    def _stop_is_passed_over(self, begun_s: float, ended_s: float) -> bool:
        """Whether an attempt that had time to see a user's request for a stop has ended otherwise."""
        is_asked = (self.run.path / "KILL").exists() and not self.ahead_s
        return is_asked and ended_s > max(self.stop_seen_s, begun_s + LOOKED_S)

    def check_fence(self, what: str) -> None:
        """A supervisor whose place was taken has seen that, and does nothing more for the run."""
        is_fenced = self.fenced is not None and self.fenced is self.supervisor
        if is_fenced and self.timeline.now_s > max(self.fenced_s, self.resumed_s) + FENCED_S:
            self.violate("one owner", f"{what}, by a supervisor whose place was taken")

    def check_rescue(self, argv: Sequence[str]) -> None:
        """What cron changes in Slurm is told before, and is of a run that has lost its supervisor."""
        assert self.slurm is not None
        last = self.events()[-40:]
        begun = max((at for at, event in enumerate(last) if event.event == EventName.ATTEMPT_STARTED), default=0)
        if argv[0] in ("sbatch", "scontrol") and not any(event.event in SAYS_RESCUE for event in last[begun:]):
            self.violate("entry before action", f"cron: {' '.join(argv[:3])}, and the journal does not know of it")
        if (argv[0] == "sbatch" and "--test-only" not in argv) or argv[1] == "requeuehold":
            if (self.run.path / "KILL").exists() and self.timeline.now_s > self.stop_asked_s + CRON_LOOKED_S:
                self.violate("stop means stop", f"cron: {' '.join(argv[:3])}")
            waiting = [each for each in self.slurm.mine() if each.state == "PENDING" and not each.is_held]
            if any(not each.completing for each in waiting) and not self.slurm.errs:
                self.violate("a run that lives is left alone", f"cron: {' '.join(argv[:3])}, and a job of it waits")
        job, supervisor = self.job, self.supervisor
        if job is None or supervisor is None or not supervisor.alive or supervisor.stopped:
            return
        if argv[0] == "scancel" and argv[1] != job.job_id:  # one in whose place this one is
            return
        is_well = not self.is_full and self.folder_is_well and job.batch_host not in self.off
        if job.state == "RUNNING" and is_well and job.batch_host in job.nodes:
            self.violate("a run that lives is left alone", f"cron: {' '.join(argv[:3])}")

    def effect(self, what: str) -> None:
        """One more effect of the supervisor's, or of cron's, before which it may be killed."""
        if self.is_gone():
            raise Killed
        if (cron := PROCESS.get()) is not None and cron in self.crons:
            self.cron_killed_at -= 1
            if self.cron_killed_at == 0:
                self.note(f"before {what}: cron is killed")
                cron.alive = False
                del self.crons[cron]
                raise Killed
            return
        self.effects += 1
        if self.befalls and (fault := self.befalls.pop(self.effects, None)) is not None:
            with inside(None):
                self.timeline.call_soon(fault, self)
        is_enough = self.timeline.now_s < max(self.silent_until_s, self.full_until_s) + PAUSE_S
        if self.effects == self.full_at and not is_enough:
            self.note(f"before {what}: the run folder is full for {self.full_s} s")
            self.full_until_s = self.timeline.now_s + self.full_s
        if self.effects == self.killed_at:
            self.note(f"before {what}:")
            self.kill_supervisor(by_slurm=self.killed_whole)
            raise Killed

    # the life of the supervisor

    def live_in_slurm(self) -> int:
        """Have Slurm run the jobs of the run until none follows; returns 0 where the run is complete then.

        Raises:
            Stuck: it never ends.
        """
        code = 0
        with submitted(self):
            while (job := next_job(self)) is not None:
                code = self._run_batch_script(job)
        return 0 if self.run.done() is not None else code or -1

    def _run_batch_script(self, job: Job) -> int:
        restarts, self.job = job.restarts, job
        self.excluded, self.excluded_next = self.excluded | self.excluded_next, set()
        os.environ["SLURMD_NODENAME"] = job.batch_host
        code = self._guarded(environment_of(job), job.batch_host)
        assert self.slurm is not None
        if job.batch_host not in self.off:
            self.slurm.script_ended(job, restarts, code)
        self.supervisor = self.job = None
        return code

    def _guarded(self, environment: dict[str, str], host: str) -> int:
        """A guardian, and one supervisor after the other, until one ends by itself; returns the exit code."""
        number: int | None = None
        self.guarding.begin(host)
        while True:
            self.supervisor = self.process("supervisor")
            if number is None:
                self.begun = []
            self._me = self.guarding.begin_child()
            self.disturb()
            given = {**environment, **self.guarding.variables()}
            try:
                with inside(self.supervisor):
                    if number is None:
                        code = run_module.supervise(self.config, given)
                    else:
                        code = run_module.recover(self.config, given, number)
                self._end_of_supervisor(f"ends with {code}")
            except SlurmftError as error:
                code = error.exit_code
                self._end_of_supervisor(f"refuses: {error}")
            except StartedAnew:
                number = None
                environment[LOCAL_RESTART_VARIABLE] = str(int(environment[LOCAL_RESTART_VARIABLE]) + 1)
                self._end_of_supervisor("starts anew")
                continue
            except Killed:
                self._end_of_supervisor("is gone", quietly=host in self.off)
                if (code := self.guarding.recover(self._me.pid)) is None:
                    number = signal.SIGKILL
                    continue
            self.guarding.end()
            return code

    def me(self) -> processes.Process:
        """The process around: the supervisor's, or what cron or a person does on a login node."""
        process = PROCESS.get()
        if process is None:
            return LOGIN
        return self.crons.get(process, self._me)

    def living(self) -> list[processes.Process]:
        """What lives of the supervisor and of cron."""
        is_there = self.supervisor is not None and self.supervisor.alive
        return [*self.crons.values(), *([self._me] if is_there else [])]

    def begin_cron(self, host: str) -> Process:
        """A process that cron starts there."""
        process, pid = self.process("cron", host), self.next_pid()
        self.crons[process] = processes.Process(host, pid, f"born {pid}")
        return process

    def live(self) -> int:
        """Run supervisors until the run has ended for good; returns the last exit code.

        Raises:
            Stuck: it never ends.
        """
        for number in range(1, 50):
            code = self._guarded({LOCAL_JOB_VARIABLE: f"local-{number}", LOCAL_RESTART_VARIABLE: "0"}, "here")
            if not self.guarding.has_given_up:
                return code
            self.note("a person starts the run again")
        raise Stuck("50 guardians")

    def outlive(self) -> None:
        """No supervisor follows: what is left of the agents ends within their lease."""
        most_s = self.config.fault_tolerance.supervisor_lease_s + STOPPED_S + 5.0
        self.supervisor = None
        self.timeline.until_s = self.timeline.now_s + most_s + 1.0
        with inside(None):
            self.timeline.run_until_complete(asyncio.sleep(most_s))
        for agent in self.agents:
            if agent.is_there and not agent.process.stopped:
                self.violate("agents end", f"{agent.process.name} lives {most_s} s after the end of the run")

    def _end_of_supervisor(self, how: str, *, quietly: bool = False) -> None:
        self.note(f"the supervisor {how}")
        assert self.supervisor is not None
        if how != "is gone":
            self.check_gone("agents end with the run", healed_s=PINGED_S)
        if self.folder_is_well and how.startswith(("ends with", "starts anew")):
            self.to_decide.update(self.begun)
        if quietly:  # its node is gone, and the end is not reported
            self.supervisor.alive = False
        else:
            self.supervisor.kill()
        self._ignores_signals = False
        begun = [event.details for event, _ in self.unwritten if event.event == EventName.ATTEMPT_STARTED]
        self.never_written |= {facts["generation"] for facts in begun}
        self.unwritten = deque()
        guardian._kept.clear()
        guardian._listeners.clear()

    def signal_supervisor(self) -> None:
        """SIGTERM, which the guardian hands on; between two supervisors it is kept for the next one."""
        if self.supervisor is not None and self.supervisor.alive and not self._ignores_signals:
            self.asked["SIGTERM"] = self.timeline.now_s
            guardian._note(signal.SIGTERM, None)
        elif self.guarding.is_alone:
            self.asked["SIGTERM"] = self.timeline.now_s
            self.guarding.kept.append(signal.SIGTERM)

    @contextmanager
    def ignoring_signals(self) -> Iterator[None]:
        """As ``slurm.ignoring_signals``."""
        before, self._ignores_signals = self._ignores_signals, True
        try:
            yield
        finally:
            self._ignores_signals = before

    def kill_supervisor(self, *, by_slurm: bool = False, quietly: bool = False) -> None:
        """SIGKILL, at this moment of its work; quietly: its node is gone."""
        if by_slurm or quietly:
            self.guarding.kill()
        if self.supervisor is not None and self.supervisor.alive:
            self.note("SIGKILL for the supervisor")
            if self.supervisor.stopped and self.job is not None and self.job.state == "CANCELLED":
                self.stop_asked_s = math.inf  # its signal is lost with it; Slurm ends the job after KillWait
            if quietly:
                self.supervisor.alive = False
            else:
                self.supervisor.kill()
            if self.timeline.is_running():
                self.timeline.stop()

    def end(self) -> None:
        """The life is over; nothing of it runs any more."""
        self.supervisor = None
        for process in self._processes:
            process.alive = False
        self.timeline.end()

    def is_gone(self) -> bool:
        """Whether the process around is the supervisor, or cron's, and was killed."""
        process = PROCESS.get()
        return process is not None and not process.alive and (process is self.supervisor or process.name == "cron")

    def pass_time(self, seconds: float) -> None:
        """The supervisor sleeps; the rest of the world does not."""
        if self.is_gone():
            raise Killed
        supervisor = self.supervisor
        if Thread.present is not None and self.timeline.is_running():
            Thread.present.sleep(seconds)
            if self.is_gone():
                raise Killed
            return
        if self.guarding.pass_time(seconds):
            return
        if self.timeline.is_running() or supervisor is None or PROCESS.get() is not supervisor:
            self.timeline.now_s += seconds
            return
        until_s = self.timeline.now_s + seconds
        while (now_s := self.timeline.now_s) < until_s or supervisor.stopped:
            with inside(None), contextlib.suppress(RuntimeError):  # it is killed meanwhile
                self.timeline.run_until_complete(asyncio.sleep(max(until_s - now_s, STOPPED_LOOK_S)))
            if self.is_gone():
                raise Killed


class Loop:
    """In the place of ``LoopThread``: all supervisors of a life share its timeline."""

    def __init__(self, world: World) -> None:
        self._world = world

    def run(self, work: Any) -> Any:
        """Its result."""
        world = self._world
        if world.is_gone():
            work.close()
            raise Killed
        task = world.timeline.create_task(work)
        while not task.done():
            try:
                world.timeline.run_until_complete(task)
            except RuntimeError:
                if world.is_gone():
                    raise Killed from None
                raise
        return task.result()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """As of any loop."""
        self._world.timeline.call_soon(callback, *args)

    def close(self) -> None:
        """Nothing."""


class _Wall(datetime):
    world: World

    @classmethod
    def now(cls, tz: tzinfo | None = UTC) -> _Wall:  # type: ignore[override]
        return cls.fromtimestamp(cls.world.wall_s(), tz)


class _Complaints(logging.Handler):
    """An error that only the log shows is one all the same."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._world.note(f"log: {text[:200]}")
        is_killed = "Killed()" in text or (record.exc_info and isinstance(record.exc_info[1], Killed))
        if not is_killed and ("internal error" in text or record.exc_info):
            import traceback

            trace = "".join(traceback.format_exception(*record.exc_info)[-3:]) if record.exc_info else ""
            self._world.violate("no internal error", f"{text[:300]} {trace[-600:]}")


@contextmanager
def simulated(world: World, patch: pytest.MonkeyPatch) -> Iterator[World]:
    """Put the life's time, network and machine in the place of real ones."""
    timeline = world.timeline
    asyncio.set_event_loop(timeline)
    timeline.may_sleep = lambda: world.silent_until_s > timeline.now_s
    patch.setattr(subprocess, "Popen", _no_process)
    patch.setattr(time, "monotonic", lambda: timeline.now_s)
    patch.setattr(time, "time", world.wall_s)
    patch.setattr(time, "sleep", world.pass_time)
    patch.setattr(run_module, "LoopThread", lambda _: Loop(world))

    async def open_connection(host: str, port: int, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        return await world.network.dial(host, port, process.host)

    patch.setattr(asyncio, "open_connection", open_connection)
    patch.setattr(journal_module, "datetime", type("Wall", (_Wall,), {"world": world}))
    if world.slurm is None:
        patch.setattr(run_module, "detect", lambda config, environment: Machine(world, environment))
    else:
        _simulate_slurm(world, world.slurm, patch)
    _simulate_disk(world, patch)
    simulate_agents(world, patch)
    for function, name in ((ExclusionList.__init__, "clock"),):
        patch.setattr(function, "__kwdefaults__", {**function.__kwdefaults__, name: world.wall_s})
    patch.setattr(run_module, "BackgroundLog", lambda: SimpleNamespace(close=lambda: None))
    patch.setattr(FolderThread, "__init__", lambda self: setattr(self, "unwritten", world.unwritten))
    patch.setattr(FolderThread, "submit", lambda self, work: _submit(world, work))
    patch.setattr(FolderThread, "call", lambda self, work, timeout_s: _call(world, work, timeout_s))
    wrap = asyncio.wrap_future
    patch.setattr(asyncio, "wrap_future", lambda work: work.awaited(timeline) if type(work) is Done else wrap(work))

    async def listen(self: AgentPool, host: str | None, listener: Any = None) -> int:
        process = PROCESS.get()
        assert process is not None
        if listener is None:
            listener = Listener(world.network, process, max(world.network.listeners, default=1000) + 1)
        return listener.serve(self._serve)

    patch.setattr(AgentPool, "listen", listen)
    simulate_guardian(world, patch)
    patch.setattr(processes, "me", world.me)
    patch.setattr(processes, "lives", world.guarding.lives)
    patch.setattr(os, "uname", lambda: SimpleNamespace(nodename=world.me().host))
    complaints = _Complaints(world)
    root = logging.getLogger("slurmft")
    root.addHandler(complaints)
    random.seed(world.chance.random())
    try:
        yield world
    finally:
        root.removeHandler(complaints)
        world.end()
        asyncio.set_event_loop(None)


def _simulate_slurm(world: World, controller: Controller, patch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "SQUEUE", "SBATCH"))]:
        patch.delenv(name)
    patch.setenv("SLURMD_NODENAME", "")
    patch.setattr(run_module, "detect", lambda config, environment: SlurmMachine(world, environment))
    patch.setattr(slurm, "subprocess", SimpleNamespace(
        run=controller.subprocess_run, DEVNULL=-3, TimeoutExpired=TimeoutError))  # fmt: skip
    waits = {"clock": lambda: world.timeline.now_s, "sleep": world.pass_time}
    patch.setattr(slurm.run_patiently, "__kwdefaults__", {**slurm.run_patiently.__kwdefaults__, **waits})
    patch.setattr(own_jobs, "_local_cluster", lambda _: "here")
    patch.setattr(own_jobs, "keep_ahead", lambda *_: None)
    requeueing = own_jobs.requeueing

    def noted_requeueing(*which: Any, **rest: Any) -> Any:
        found = requeueing(*which, **rest)
        if world.job is not None:
            world.job.shows_preemption = found.preempted
        return found

    patch.setattr(own_jobs, "requeueing", noted_requeueing)
    for module in (slurm, act_module, run_module):
        patch.setattr(module, "ignoring_signals", world.ignoring_signals)
    patch.setattr(RunFolder, "refuse_replaceable", lambda _: None)
    world.timeline.may_sleep = lambda: controller.mood_lasts > 0 or world.silent_until_s > world.timeline.now_s
    patch.setattr(run_folder_module, "_now", lambda _: world.timeline.now_s)
    patch.setattr(
        run_folder_module, "_modified", lambda path: world.written.get(str(path), 0.0) if path.exists() else None
    )


def _simulate_disk(world: World, patch: pytest.MonkeyPatch) -> None:  # noqa: C901 - one small function for each call
    """A full disk, a kill between two writes, and reads that are old."""
    write, replace, unlink, utime, root = os.write, os.replace, os.unlink, os.utime, str(world.run.path)

    def path_of(descriptor: int) -> str:
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return ""
        return path if path.startswith(root) else ""

    def is_ours() -> bool:
        return PROCESS.get() is not None and (PROCESS.get() is world.supervisor or PROCESS.get().name == "cron")

    def full_write(descriptor: int, content: Any) -> int:
        if path := path_of(descriptor):
            if is_ours():
                world.effect(f"a line of {path.removeprefix(root)}")
            if world.is_full:
                if len(content) > 40 and world.chance.random() < PARTLY:
                    return write(descriptor, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            world.written[path] = world.timeline.now_s
        return write(descriptor, content)

    def full_fsync(descriptor: int) -> None:
        if world.is_full and path_of(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def noted_replace(source: Any, target: Any, **rest: Any) -> None:
        if str(target).startswith(root):
            if str(target) == f"{root}/done.json":
                world.check_done()
            if is_ours():
                world.effect(f"a new {str(target).removeprefix(root)}")
            world.written[str(target)] = world.timeline.now_s
        replace(source, target, **rest)

    def noted_unlink(path: Any, **rest: Any) -> None:
        name = str(path).removeprefix(root)
        if name != str(path) and not name.rpartition("/")[2].startswith(".") and is_ours():
            world.effect(f"the end of {name}")
        unlink(path, **rest)

    def noted_utime(path: Any, *times: Any, **rest: Any) -> None:
        if type(path) is int and (name := path_of(path)):
            if world.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            world.written[name] = world.timeline.now_s
            return
        utime(path, *times, **rest)

    patch.setattr(os, "unlink", noted_unlink)
    patch.setattr(os, "utime", noted_utime)
    patch.setattr(os, "write", full_write)
    patch.setattr(os, "fsync", full_fsync)
    patch.setattr(os, "replace", noted_replace)
    seen = RunFolder.see_request

    def see_request(run: RunFolder, kind: str) -> str | None:
        is_stale = world.timeline.now_s < world.stale_until_s and PROCESS.get() is world.supervisor
        return None if is_stale and world.supervisor is not None else seen(run, kind)

    patch.setattr(RunFolder, "see_request", see_request)


def _no_process(argv: Any, *_: Any, **__: Any) -> None:
    raise FileNotFoundError(f"no process in a life: {argv}")


class Done:
    """In the place of a ``Future`` that is done at once, which has locks."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value, self._error = None, None
        try:
            self._value = work()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            self._error = error

    def done(self) -> bool:
        """It is."""
        return True

    def result(self, _: float | None = None) -> Any:
        """What the work has returned; raises what it has raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def awaited(self, timeline: Timeline) -> asyncio.Future[Any]:
        """As ``asyncio.wrap_future``: it comes a turn of the loop later."""
        future = timeline.create_future()
        timeline.call_soon(self._tell, future)
        return future

    def _tell(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.set_result(self._value) if self._error is None else future.set_exception(self._error)


def _submit(world: World, work: Callable[[], Any]) -> Future[Any] | Done:
    if world.is_gone():
        raise Killed
    world.effect("work on the run folder")
    silent_s = world.silent_until_s - world.timeline.now_s
    if silent_s <= 0:
        return Done(work)
    future: Future[Any] = Future()
    with inside(PROCESS.get()):
        world.timeline.call_later(silent_s + 1e-6 * (world.effects % 1000), _do, future, work)
    return future


def _call(world: World, work: Callable[[], Any], timeout_s: float) -> Any:
    future = _submit(world, work)
    if not future.done():
        silent_s = world.silent_until_s - world.timeline.now_s
        if silent_s >= timeout_s:
            world.pass_time(timeout_s)
            raise StorageUnavailable(f"the run folder did not answer within {timeout_s:.0f} s")
        world.pass_time(silent_s + 0.01)
        if not future.done():  # its process was not to run meanwhile
            _do(future, work)
    return future.result(0)


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.done():
        return
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
        future.set_exception(error)
