"""The Slurm of a life, between the jobs of a run and around each of them: the commands of ``fake_slurm``, and nodes,
signals, limits and ends as slurmctld and slurmd have them (22.05 to 26.05, as the tests on the lab have seen them).
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_slurm
from fake_slurm import REQUEUE_DELAY_S, FakeSlurm

from lives.guarding import KILLED
from lives.timeline import PROCESS, Thread, inside
from slurmft.config.run import RunConfig
from slurmft.operations import rescue
from slurmft.scheduler import submission
from slurmft.scheduler.parsing import Asked, current_job
from slurmft.scheduler.slurm import compress, expand
from slurmft.storage.journal import EventName
from slurmft.supervisor.cluster import SlurmCluster

if TYPE_CHECKING:
    from lives.nodes import Agent
    from lives.world import World

COMMAND_S = 0.03
CRON_COMMAND_S = (0.02, 0.2)
RACE_S = 1.0
"""A job may lose its number between a look at it and the next command: nobody can ask Slurm for both at once."""

HELD_BY_USER = "JobHeldUser"
CRON_S = 60.0
TWO_CRONS = 0.2
"""How often another login node looks as well."""

GIVEN_UP_S = 900.0
"""A run without a job for so long, although cron looks every minute, has ended."""

SEES_BACK_S = 3.0
"""A slurmd that reaches its controller again ends within this time what is not to run any more."""


@dataclass
class Job(fake_slurm.Job):
    """A job of several nodes, with an end."""

    nodes: tuple[str, ...] = ()
    size: str = "1"
    limit_s: int = 600
    started: int = 0
    ends: int = 0
    preempted: int = 0
    shows_preemption: bool | None = None
    """Whether its supervisor has seen it when it looked if Slurm may undo its end; None: it has not looked."""

    may_requeue: bool = True
    completing: bool = False
    code: str = "0:0"

    @property
    def shown(self) -> str:
        """Its state as Slurm shows it."""
        return "COMPLETING" if self.completing else self.state


class Controller(FakeSlurm):
    """slurmctld, and the slurmds of its nodes."""

    def __init__(
        self, world: World, *, limit_s: int, kill_wait_s: int, unnoticed_s: float, requeues_early: bool
    ) -> None:
        self._world = world
        super().__init__(
            os.getuid(), nodes=[f"n{index}" for index in range(world.config.nodes + world.config.spare_nodes + 2)]
        )
        self.limit_s, self.kill_wait_s, self.unnoticed_s = limit_s, kill_wait_s, unnoticed_s
        self.requeues_early = requeues_early
        """As from 24.11 on: a job that ends within the grace of a preemption is requeued, with any exit code."""

        self.errs = False
        """Whether it was away, or forgot: two jobs are better than none then, as only one of them owns the run."""

        self.moods: list[tuple[str, str, int]] = []
        """Beginning of a command from which on it is in a mood; which one, and for how many commands."""

        self._seen: dict[str, tuple[Job, float]] = {}
        """By number, the job that was shown last, and when."""

        self.sick: set[str] = set()
        """Nodes whose Prolog fails the next time."""

        self.holds = ""
        """Why the next job that is requeued is held."""

        self.down: set[str] = set()
        self.jobs_of_run: list[Job] = []

    @property
    def now(self) -> int:
        """The controller's clock, which no jump of a node's changes."""
        return int(self._world.timeline.now_s) + 1_700_000_000

    @now.setter
    def now(self, _: int) -> None:
        pass

    # jobs

    def submit(self, script: str, *, foreign: bool = False, **facts: Any) -> Job:
        """Put a job into the queue."""
        config = self._world.config
        size = config.nodes_range or str(config.nodes + config.spare_nodes)
        job = Job(str(self.state.next_id), script, user=self.user, submitted=self.now, begin=self.now, size=size,
                  limit_s=self.limit_s, **facts)  # fmt: skip
        self.state.next_id += 1
        self.state.jobs[job.job_id] = job
        if foreign:
            self.foreign.add(id(job))
            job.begin += 10**9
        else:
            self._world.note(f"job {job.job_id} is submitted")
            self._check_alone(job, "is submitted")
            self.jobs_of_run.append(job)
        self._account(job)
        return job

    def mine(self) -> list[Job]:
        """The run's jobs that wait or have nodes."""
        return [job for job in self.state.jobs.values()
                if id(job) not in self.foreign and (not job.is_over or job.completing)]  # fmt: skip

    def _check_alone(self, job: Job, what: str) -> None:
        others = [each.job_id for each in self.mine()
                  if each not in (job, self._world.job) and not each.is_held and not each.completing]  # fmt: skip
        if others and not self.errs:
            self._world.violate("one continuation", f"job {job.job_id} {what} beside {others}")

    def _free(self, job: Job) -> list[str]:
        excluded = {*expand(job.excluded)} if job.excluded else set()
        taken = {node for other in self.state.jobs.values() if other.state == "RUNNING" or other.completing
                 for node in other.nodes}  # fmt: skip
        return [node for node in self.nodes if node not in excluded | taken | self.down | set(self.drained)]

    def can_spare(self, nodes: Collection[str]) -> bool:
        """Whether the run can have as many as it asks for without these."""
        config = self._world.config
        return len({*self.nodes} - {*nodes} - self.down - {*self.drained}) >= config.nodes + config.spare_nodes

    def can_start(self, job: Job) -> bool:  # type: ignore[override]
        """Whether it would start now."""
        least = int(job.size.partition("-")[0])
        before = self.state.jobs.get(job.after)
        if before is not None and id(before) in self.foreign:  # a job that was lost holds no other one up
            job.after = ""
        return super().can_start(job) and not job.completing and len(self._free(job)) >= least

    def try_to_start(self, job: Job) -> bool:
        """Give it nodes, and run its batch script on the first of them, unless that cannot be reached."""
        free, most = self._free(job), int(job.size.rpartition("-")[2])
        chosen = sorted(self._world.chance.sample(free, min(len(free), most)), key=self.nodes.index)
        if self._world.network.is_cut(chosen[0]):
            self.down.add(chosen[0])
            return False
        job.nodes, job.node, job.batch_host = tuple(chosen), compress(chosen), chosen[0]
        if sick := sorted(self.sick & {*chosen}):
            self.sick.clear()
            self._world.note(f"job {job.job_id} cannot start on {sick[0]}, and is held")
            self.refuse(job, sick[0])
            decided = [event.details for event in self._world.events() if event.event == EventName.DECISION]
            if decided and decided[-1]["action"] == "stop":  # nobody can tell any more since when it waits
                self._world.stop_asked_s = math.inf
            return False
        job.state, job.reason, job.code, job.preempted, job.shows_preemption = "RUNNING", "None", "0:0", 0, None
        job.started, job.ends = self.now, self.now + job.limit_s
        self._account(job)
        self._world.note(f"job {job.job_id} starts on {job.node} (restart {job.restarts})")
        lead_s = self._world.config.preemption.signal_lead_s
        self._later(job.limit_s - lead_s - self._world.chance.uniform(0, 5), job, self._warn)
        self._later(job.limit_s, job, self._time_is_up)
        return True

    def _later(self, seconds: float, job: Job, act: Any) -> None:
        restarts = job.restarts

        def due() -> None:
            if job.restarts == restarts and job.state == "RUNNING" and self.state.jobs.get(job.job_id) is job:
                act(job)

        with inside(None):
            self._world.timeline.call_later(max(0.0, seconds), due)

    def _warn(self, job: Job) -> None:
        if self.now < job.ends:
            self._world.note(f"--signal: the time limit of job {job.job_id} is near")
            self._term(job, batch=False)

    def _time_is_up(self, job: Job) -> None:
        if self.now >= job.ends:
            self._world.note(f"job {job.job_id} is at its time limit")
            job.reason = "TimeLimit"
            self._end_running(job, "TIMEOUT")

    def preempt(self, job: Job, grace_s: int) -> None:
        """Another job wants its nodes: TERM to its steps, and the end after the grace."""
        if job.preempted:
            return
        self._world.note(f"job {job.job_id} is preempted, with {grace_s} s of grace")
        job.preempted, job.ends = self.now, min(job.ends, self.now + grace_s)
        self._term(job, batch=False)
        self._later(
            grace_s, job, lambda job: self.requeue(job) if job.may_requeue else self._end_running(job, "PREEMPTED")
        )

    def cancel(self, job: Job, by: int) -> None:  # type: ignore[override]
        """scancel."""
        job.cancelled_by = by
        if job.state == "RUNNING":
            self._end_running(job, "CANCELLED")
        else:
            self.end(job, "CANCELLED")

    def _end_running(self, job: Job, state: str) -> None:
        self.end(job, state)
        self._complete(job)

    def requeue(self, job: Job, *, delay_s: int = REQUEUE_DELAY_S, reason: str = "BeginTime") -> None:  # type: ignore[override]
        """Put it back; what still runs of it is ended."""
        was_running, batch_host = job.state == "RUNNING", job.batch_host
        super().requeue(job, delay_s=delay_s, reason=reason)
        job.batch_host = batch_host if was_running else ""
        self._world.note(f"job {job.job_id} is requeued")
        if self.holds and reason == "BeginTime":
            job.reason, self.holds = self.holds, ""
            self._world.note(f"job {job.job_id} is held: {job.reason}")
            if job.reason == HELD_BY_USER:
                with inside(None):
                    self._world.timeline.call_later(self._world.chance.uniform(100, 400), self._release, job)
        if was_running:
            self._complete(job)

    def _release(self, job: Job) -> None:
        if job.reason == HELD_BY_USER:
            self._world.note(f"its user releases job {job.job_id}")
            job.reason = "None"

    def end(self, job: Job, state: str) -> None:  # type: ignore[override]
        """It has ended, or is about to."""
        job.ends = self.now
        super().end(job, state)
        self._world.note(f"job {job.job_id}: {state}")

    def _complete(self, job: Job) -> None:
        """TERM, KILL after KillWait, and COMPLETING until nothing is left on its nodes."""
        job.completing, began_s = True, self._world.timeline.now_s
        self._term(job, batch=True)

        def look() -> None:
            late = self._world.timeline.now_s - began_s > self.kill_wait_s
            if late:
                self._kill(job)
            if self._is_left(job):
                self._world.timeline.call_later(0.5, look)
                return
            job.completing = False
            if job.state == "PENDING":
                job.node, job.nodes, job.batch_host = "", (), ""
                if job.begin <= self.now:  # it has passed before the last process was gone
                    job.begin = self.now + REQUEUE_DELAY_S

        with inside(None):
            self._world.timeline.call_later(0.5, look)

    def _is_left(self, job: Job) -> bool:
        running = self._has_script(job) and not self._is_lost(job.batch_host)
        return running or any(agent.is_there and agent.host not in self.down for agent in self._agents(job))

    def _has_script(self, job: Job) -> bool:
        return self._world.job is job and self._world.guarding.lives_on

    def _is_lost(self, host: str) -> bool:
        return host in self._world.off or host in self.down

    def _agents(self, job: Job) -> Iterator[Agent]:
        return (agent for agent in self._world.agents if agent.job is job)

    def _term(self, job: Job, *, batch: bool) -> None:
        for agent in self._agents(job):
            if agent.is_there and not self._world.network.is_cut(agent.host):
                agent.note_signal("SIGTERM")
        if batch and self._world.job is job:
            self._world.signal_supervisor()

    def _kill(self, job: Job) -> None:
        for agent in [*self._agents(job)]:
            if agent.is_there and not self._world.network.is_cut(agent.host):
                agent.die()
        if self._world.job is job and not self._is_lost(job.batch_host):
            self._world.kill_supervisor(by_slurm=True)

    def lose_job(self, job: Job, *, after_s: float) -> None:
        """Forget a job that runs; its nodes end what the controller does not know when they register again."""
        del self.state.jobs[job.job_id]
        self.state.next_id = int(job.job_id)
        with inside(None):
            self._world.timeline.call_later(after_s, self._kill, job)

    def script_ended(self, job: Job, restarts: int, code: int) -> None:
        """The batch script of a start has ended."""
        if self.state.jobs.get(job.job_id) is not job or job.restarts != restarts or job.state != "RUNNING":
            return
        job.code = f"{code}:0"
        early = self.requeues_early and job.preempted and job.may_requeue
        last = {event.event: event.details for event in self._world.events()[-20:]} if early else {}
        is_told = EventName.REQUEUE_STAYS_ON in last or self.errs or not self._world.folder_is_well
        # who was killed, or has looked before the preemption, could not tell Slurm: what begins then trains nothing
        is_told = is_told or job.shows_preemption is False or code == KILLED
        if not is_told and last.get(EventName.DECISION, {}).get("action") == "stop":
            self._world.violate("stop means stop", f"Slurm may requeue job {job.job_id}")
        if early:
            self.requeue(job)
        else:
            self._end_running(job, "FAILED" if code else "COMPLETED")

    # nodes

    def lose(self, host: str) -> None:
        """A node does not answer; that is noticed if it goes on."""
        world = self._world

        def notice() -> None:
            if world.network.is_cut(host) and host not in self.down:
                world.note(f"Slurm notices that {host} is down")
                self.down.add(host)
                for job in [job for job in self.mine() if host in job.nodes and job.state == "RUNNING"]:
                    if world.config.survives_nodes and len(job.nodes) > 1:  # the batch host's script is not missed
                        job.nodes = tuple(node for node in job.nodes if node != host)
                        job.node = compress(job.nodes)
                    elif job.may_requeue:
                        self.requeue(job)
                    else:
                        self._end_running(job, "NODE_FAIL")

        with inside(None):
            world.timeline.call_later(self.unnoticed_s, notice)

    def see_back(self, host: str) -> None:
        """A node answers again: slurmd ends what is not to run there, and Slurm a job whose batch script is missing."""

        def look() -> None:
            if self._world.network.is_cut(host):
                return
            self.down.discard(host)
            for job in self.mine():
                if job.state == "RUNNING" and host == job.batch_host and not self._has_script(job):
                    self.requeue(job) if job.may_requeue else self._end_running(job, "NODE_FAIL")
            for agent in self._world.agents:
                job = agent.job
                if agent.host == host and agent.is_there and job is not None and not (
                    job.state == "RUNNING" and host in job.nodes and agent.restarts == job.restarts
                ):  # fmt: skip
                    agent.die()

        with inside(None):
            self._world.timeline.call_later(self._world.chance.uniform(0.5, SEES_BACK_S), look)

    # commands

    def subprocess_run(self, argv: Sequence[str], *, env: Mapping[str, str], **rest: Any) -> Any:
        """A command of the supervisor's, or of cron's; a supervisor may be killed before it, and after it."""
        world = self._world
        is_ours = world.supervisor is not None and PROCESS.get() is world.supervisor
        process, what = PROCESS.get(), " ".join(argv[:4])
        is_cron = process is not None and process.name == "cron"
        if is_ours:
            world.effect(what)
            world.check_told(argv)
        for at, mood, lasts in [each for each in self.moods if what.startswith(each[0])]:
            self.moods.remove((at, mood, lasts))
            self.mood, self.mood_lasts = mood, lasts
        changes = argv[0] in ("sbatch", "scancel") or argv[1:2] in (
            ["requeue"],
            ["update"],
            ["requeuehold"],
            ["release"],
        )
        if is_cron:
            world.effect(what)
            if changes:
                world.check_rescue(argv)
        answer = super().subprocess_run(argv, env=env, **rest)
        if changes:
            world.note(f"$ {' '.join(argv)}: {(answer.stderr or answer.stdout).strip()[:80] or 'done'}")
        late = self.mood == "late" and self.mood_lasts >= 0  # it could not be asked whose number it is
        seen = [at_s for _, at_s in self._seen.values() if world.timeline.now_s - at_s < RACE_S]
        world.violations += [each for each in self.violations if not ((late or seen) and each.startswith("afterany"))]
        self.violations.clear()
        if is_cron:
            if changes:
                world.effect(f"after {what}")
            world.pass_time(world.chance.uniform(*CRON_COMMAND_S))
        if is_ours:
            if world.killed_after and what.startswith(world.killed_after):
                world.killed_after, world.killed_at = "", world.effects + 1
            world.effect(f"after {what}")
            if not world.timeline.is_running():
                world.pass_time(COMMAND_S)
        return answer

    def _do(self, argv: list[str], env: Mapping[str, str]) -> tuple[str, str]:
        match argv:
            case ["scontrol", "show", "config"]:
                return (f"Configuration data as of {self.now}\nClusterName = here\nKillWait = {self.kill_wait_s} sec\n"
                        "PreemptType = preempt/partition_prio\n"), ""  # fmt: skip
            case ["scontrol", *rest] if "partition" in rest:
                return "PartitionName=low Default=YES PreemptMode=REQUEUE GraceTime=30\n", ""
            case ["sinfo", *rest] if "%H" not in rest[-1]:
                used = {node for job in self.mine() for node in job.nodes}
                states = dict.fromkeys(self.nodes, "idle") | dict.fromkeys(used, "allocated")
                states |= dict.fromkeys(self.drained, "drained") | dict.fromkeys(self.down, "down*")
                return "".join(f"{node}|low*|{state}\n" for node, state in states.items()), ""
        return super()._do(argv, env)

    def _line(self, job: Job, wanted: str) -> str:  # type: ignore[override]
        text = super()._line(
            job, wanted.replace("%T", job.shown).replace("%e", str(job.ends) if job.started else "N/A")
        )
        return text.removesuffix("\n") if "\x1e" in text else text

    def _shown(self, job: Job) -> str:  # type: ignore[override]
        self._seen[job.job_id] = job, self._world.timeline.now_s
        text = super()._shown(job).rstrip("\n")
        minutes = f"{job.limit_s // 3600:02}:{job.limit_s % 3600 // 60:02}:{job.limit_s % 60:02}"
        pairs = {"JobState": job.shown, "Requeue": str(int(job.may_requeue)), "TimeLimit": minutes,
                 "StartTime": str(job.started if job.state != "PENDING" else job.begin),
                 "EndTime": str(job.ends or "Unknown"), "PreemptTime": str(job.preempted or "None"),
                 "NumNodes": str(len(job.nodes) or job.size), "ExitCode": job.code}  # fmt: skip
        words = [f"{word.split('=')[0]}={pairs[word.split('=')[0]]}" if word.split("=")[0] in pairs else word
                 for word in text.split(" ")]  # fmt: skip
        return " ".join(words) + "\n"

    def _mine(self, job_id: str, act: str) -> Job | None:  # type: ignore[override]
        seen, at_s = self._seen.get(job_id, (None, 0.0))
        if seen is not None and id(seen) not in self.foreign and self._world.timeline.now_s - at_s < RACE_S:
            return self.state.jobs.get(job_id)  # type: ignore[return-value]
        return super()._mine(job_id, act)  # type: ignore[return-value]

    def _act(self, act: str, job_id: str) -> tuple[str, str]:
        job = self.state.jobs.get(job_id)
        if act in ("requeue", "requeuehold") and isinstance(job, Job) and not job.may_requeue:
            return "", "Job requeue is presently disabled for this job"
        if isinstance(job, Job) and job.state == "CANCELLED":
            self._excuse(job)
        if isinstance(job, Job) and act == "release" and job.reason == HELD_BY_USER:
            self._world.violate("what a user holds stays held", f"job {job_id} is released")
        if isinstance(job, Job) and act == "requeuehold":
            self._check_alone(job, "is requeued")
        return super()._act(act, job_id)

    def _excuse(self, job: Job) -> None:
        """A cancel between a look at a job and what continues it is undone: nobody can ask Slurm for both at once."""
        seen, at_s = self._seen.get(job.job_id, (None, 0.0))
        is_hidden = job.completing and job.reason == "BeginTime"  # it was requeued before: COMPLETING shows that alone
        if is_hidden or (seen is job and at_s <= self._world.stop_asked_s < at_s + RACE_S):
            self._world.note(f"job {job.job_id} was cancelled after the last look at it")
            self._world.stop_asked_s = 0.0

    def _update(self, job_id: str, changes: dict[str, str]) -> tuple[str, str]:
        job = self.state.jobs.get(job_id)
        if isinstance(job, Job):
            job.may_requeue = changes.get("Requeue", str(int(job.may_requeue))) == "1"
            job.size = changes.get("NumNodes", job.size)
            if "NodeList" in changes:
                if job.state != "RUNNING":
                    return "", "Job/step already completing or completed"
                job.nodes = tuple(expand(changes["NodeList"]))
                job.node = changes["NodeList"]
                for agent in self._agents(job):  # as slurmctld does (kill_step_on_node)
                    if agent.is_there and agent.host not in job.nodes and not self._world.network.is_cut(agent.host):
                        agent.die()
        return super()._update(job_id, changes)

    def _sbatch(self, rest: list[str]) -> tuple[str, str]:
        before = self.state.next_id
        after = next((self.state.jobs.get(word.rpartition(":")[2]) for word in rest if word.startswith("--dep")), None)
        if isinstance(after, Job) and after.state == "CANCELLED":
            self._excuse(after)
        text, error = super()._sbatch(rest)
        if not error and self.state.next_id > before:
            excluded = [word.partition("=")[2] for word in rest if word.startswith("--exclude=")]
            self.state.jobs[str(before)].excluded = ",".join(expand(",".join(excluded)))
        return text, error


class Srun:
    """What starts agents: a step of several nodes, as an ``asyncio.subprocess.Process``."""

    name = "srun"

    def __init__(self, world: World, agents: Sequence[Agent]) -> None:
        self._world, self.agents, self._ended = world, agents, False
        self.pid = world.next_pid()

    @property
    def returncode(self) -> int | None:
        """None while a task runs, as far as Slurm knows; it waits for one whose node is gone until that is noticed."""
        down = self._world.slurm.down if self._world.slurm else set()
        unheard = [each for each in self.agents if each.host in self._world.off - down]
        if not self._ended and (unheard or any(each.code is None and each.host not in down for each in self.agents)):
            return None
        return max((each.code or 0 for each in self.agents), default=1)

    async def wait(self) -> int:
        """Return when it has ended."""
        while (code := self.returncode) is None:
            await asyncio.sleep(0.1)
        return code

    def terminate(self) -> None:
        """It kills its step, as far as nodes can be reached."""
        for agent in self.agents:
            if agent.is_there and not self._world.network.is_cut(agent.host):
                agent.die()
        self._ended = True

    def kill(self) -> None:
        """It is gone, and its step finds that out by itself."""
        self._ended = True

    def signal(self, number: int) -> None:
        """As the kernel does."""
        self.kill() if number == signal.SIGKILL else self.terminate()


class SlurmMachine(SlurmCluster):
    """The supervisor's job; its steps are of this life."""

    def __init__(self, world: World, environment: Mapping[str, str]) -> None:
        job = current_job(environment)
        assert job is not None
        super().__init__(job)
        self._world = world

    def control_hosts(self) -> list[str]:
        """The batch host."""
        return [self._world.host]

    async def start_agents(self, config: RunConfig, log_folder: Path) -> list[Any]:
        """One step, one task a node."""
        hosts = self.agent_hosts(config)
        agents = [self._world.begin_agent(index, host, log_folder) for index, host in enumerate(hosts)]
        return [self._world.guarding.began(Srun(self._world, agents))]

    async def start_agent(self, config: RunConfig, log_folder: Path, attempt: Any, *, host: str, index: int) -> Any:
        """A step of one node; refused where Slurm has taken the node away."""
        job = self._world.job
        if job is None or host not in job.nodes:
            return Srun(self._world, [])
        agent = self._world.begin_agent(index, host, log_folder)
        return self._world.guarding.began(Srun(self._world, [agent]))


@contextmanager
def submitted(world: World) -> Iterator[Controller]:
    """The run's first job is in the queue."""
    assert world.slurm is not None
    run = world.run
    run.create()
    run.config.write_text(world.config.as_yaml())
    run.script.write_text("#!/bin/sh\n")
    job = world.slurm.submit(str(run.script))
    run.add_job(job.job_id, submission.look_at_submitted(job.job_id, "", Asked("", "")))
    run.journal().append(EventName.SUBMITTED, job=job.job_id)
    yield world.slurm


def environment_of(job: Job) -> dict[str, str]:
    """What the batch script of a job finds."""
    return {
        "SLURM_JOB_ID": job.job_id, "SLURM_RESTART_COUNT": str(job.restarts), "SLURM_CLUSTER_NAME": "here",
        "SLURMD_NODENAME": job.batch_host, "SLURM_JOB_NODELIST": job.node, "SLURM_JOB_NUM_NODES": str(len(job.nodes)),
        "SLURM_JOB_PARTITION": "low", "SLURM_JOB_NAME": job.name,
    }  # fmt: skip


def next_job(world: World) -> Job | None:
    """Wait until Slurm starts a job of the run; None where none will start any more. Cron looks every minute."""
    slurm = world.slurm
    assert slurm is not None
    since_s = cron_s = world.timeline.now_s
    while True:
        busy = slurm.mine()
        for job in busy:
            if slurm.can_start(job) and slurm.try_to_start(job):
                return job
        if not all(job.is_held for job in busy):
            since_s = world.timeline.now_s
        waited_s = world.timeline.now_s - since_s
        if (world.run.done() is not None and not busy) or waited_s > GIVEN_UP_S:
            return None
        with inside(None):
            world.timeline.run_until_complete(asyncio.sleep(1.0 if busy else 5.0))
        if world.timeline.now_s - cron_s > CRON_S and not world.is_full and world.silent_until_s < world.timeline.now_s:
            cron_s = world.timeline.now_s
            look(world)
            if world.chance.random() < TWO_CRONS:
                world.timeline.call_later(world.chance.uniform(0.0, 0.5), look, world, "login2")


def look(world: World, host: str = "login") -> None:
    """Cron looks, on a login node; it may be killed before an effect of its own."""
    with inside(world.begin_cron(host)):  # while it waits for Slurm, all others go on
        Thread(world.timeline, _rescue, (world,), world.timeline.create_future()).go_on()


def _rescue(world: World) -> None:
    from slurmft.errors import SlurmftError

    try:
        for line in rescue.rescue([world.run], "cron"):
            world.note(f"cron: {line}")
    except (SlurmftError, OSError) as error:
        world.note(f"cron: {error}")
    except Exception as error:  # noqa: BLE001 - nobody waits for this thread
        world.violate("no internal error", f"cron: {error!r}")
    world.crons.pop(PROCESS.get(), None)
