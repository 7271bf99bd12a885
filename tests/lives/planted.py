"""Faults of ours, each in one place: what is planted, the invariant that finds it, and the life that shows it.

A test of the tests: an invariant that nothing can break proves nothing. Each is found within ``TRIES`` lives.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_slurm import HELD_FOR_GOOD

from lives import batches, faults, guarding, slurm
from lives.life import PATIENT, Bounds, lived
from lives.timeline import PROCESS
from lives.world import World
from slurmft.agent.agent import Agent
from slurmft.errors import SlurmError
from slurmft.ipc.messages import RescueState
from slurmft.ipc.pages import Slot
from slurmft.operations import rescue
from slurmft.policy import decide, stop
from slurmft.policy.decide import Answer, Do
from slurmft.policy.verdict import Action, Cause
from slurmft.scheduler import own_jobs, parsing
from slurmft.storage import run_folder
from slurmft.storage.journal import EventName, Journal
from slurmft.storage.patience import PatientJournal
from slurmft.storage.run_folder import Attempt, EndingClaim, RunFolder
from slurmft.supervisor import act as act_module
from slurmft.supervisor import agents as agents_module
from slurmft.supervisor import attempt as attempt_module
from slurmft.supervisor import crew as crew_module
from slurmft.supervisor import placement
from slurmft.supervisor import run as run_module
from slurmft.supervisor.act import AttemptEnd
from slurmft.supervisor.agents import AgentLink, AgentPool, Outlived, ask_each
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.crew import AttemptFolder, Crew
from slurmft.supervisor.hangs import Hangs
from slurmft.supervisor.run import Attempts
from slurmft.supervisor.stops import Stops

TRIES = 30
Plant = Callable[[pytest.MonkeyPatch], None]
Scene = Callable[[int], World]

KEEPING = {"checkpoint": {"interval_steps": 10, "just_in_time": True}, "fault_tolerance": PATIENT}
ON_DISK = {"checkpoint": {"interval_steps": 10, "just_in_time": False}, "fault_tolerance": PATIENT}
SLURM = {"limit_s": 100_000, "kill_wait_s": 30, "unnoticed_s": 60.0, "requeues_early": False}


@dataclass(frozen=True)
class Planted:
    """One fault of ours."""

    plant: Plant
    invariant: str
    """Beginning of the violation that finds it."""

    scene: Scene
    """The life, by its seed."""


# lives


def _life(*befalls: tuple[float, faults.Fault], shift_s: float = 0.0, **settings: Any) -> Scene:
    """These faults at these times, for each seed a little later."""

    def scene(seed: int) -> World:
        moved = [(at_s + seed * shift_s, fault) for at_s, fault in befalls]
        longest_s = 4000.0 if "in_slurm" in settings else 250.0
        bounds = replace(settings.get("bounds", Bounds()), longest_s=longest_s)
        return lived(moved, seed=seed, **{**KEEPING, **settings, "bounds": bounds})

    return scene


def _in_slurm(*befalls: tuple[float, faults.Fault], slurm: dict[str, Any] | None = None, **settings: Any) -> Scene:
    section = {"slurm": {"partition": "low"}, **settings}
    section["preemption"] = {"signal_lead_s": 20, **settings.get("preemption", {})}
    return _life(*befalls, in_slurm={**SLURM, **(slurm or {})}, **section)


def run_folder_is(state: str, seconds: float) -> faults.Fault:
    """``silent`` or ``full`` for so long."""

    def fault(world: World) -> None:
        world.note(f"the run folder is {state} for {seconds} s")
        setattr(world, f"{state}_until_s", world.timeline.now_s + seconds)

    return fault


def suspended(seconds: float) -> faults.Fault:
    """The supervisor does nothing for so long."""

    def fault(world: World) -> None:
        supervisor = world.supervisor
        assert supervisor is not None
        supervisor.stop()

        def go_on() -> None:
            world.disturb()
            supervisor.go_on()

        world.timeline.call_later(seconds, go_on)

    return fault


def preempted(grace_s: int) -> faults.Fault:
    """The job is preempted, with so long a grace."""

    def fault(world: World) -> None:
        if world.slurm is not None and world.job is not None:
            world.slurm.preempt(world.job, grace_s)

    return fault


def _controller(mood: str, commands: int, *, at: str) -> faults.Fault:
    """From the first command that begins with ``at``, the controller is like that for so many commands."""

    def fault(world: World) -> None:
        assert world.slurm is not None
        world.slurm.moods.append((at, mood, commands))

    return fault


def _kill_after(command: str) -> faults.Fault:
    """The supervisor is killed right after the first command that begins like that."""

    def fault(world: World) -> None:
        world.killed_after = command

    return fault


def once(holds: Callable[[World], bool], fault: faults.Fault) -> faults.Fault:
    """The fault, as soon as this holds."""

    def look(world: World) -> None:
        fault(world) if holds(world) else world.timeline.call_later(0.001, look, world)

    return look


def kill_in_work(effects: int, *, whole: bool = True) -> faults.Fault:
    """The batch script is killed as a whole before one of the supervisor's next effects: nobody acts in its place."""

    def fault(world: World) -> None:
        world.killed_at, world.killed_whole = world.effects + effects, whole

    return fault


def _kill_scripts(most: int) -> faults.Fault:
    """The first batch scripts, each as soon as it trains."""

    def fault(world: World) -> None:
        is_there = world.supervisor is not None and bool(world.starts)
        if is_there:
            faults.kill_batch_script(world)
        if left := most - is_there:
            world.timeline.call_later(1.0, _kill_scripts(left), world)

    return fault


def _forget(world: World) -> None:
    """MinJobAge."""
    assert world.slurm is not None
    world.note("the controller forgets jobs that are over")
    world.slurm.forget()


def _lose_job(world: World) -> None:
    """The controller does not know the job any more, whose supervisor lives."""
    assert world.slurm is not None and world.job is not None
    world.note("the controller has lost the job")
    world.slurm.errs = True
    world.slurm.lose_job(world.job, after_s=1000.0)
    world.slurm.state.next_id += 1


def _look(host: str = "login") -> faults.Fault:
    """Cron looks, there."""
    return lambda world: slurm.look(world, host)


def _lose_node(at: int) -> faults.Fault:
    """Slurm notices after a minute that this one of the job's nodes is gone; the job keeps the others."""

    def fault(world: World) -> None:
        assert world.job is not None
        host = world.job.nodes[at]
        world.accusable |= {("node lost", host), ("crash", host)}
        faults.lose_power(world, host, 1000.0)

    return fault


def _drain(seconds: float) -> faults.Fault:
    """No job begins for so long."""

    def fault(world: World) -> None:
        assert world.slurm is not None
        world.slurm.drained = dict.fromkeys(world.slurm.nodes, (0, "maintenance"))
        world.timeline.call_later(seconds, world.slurm.drained.clear)

    return fault


def _hold(why: str) -> faults.Fault:
    """The next job that is requeued is held for that."""

    def fault(world: World) -> None:
        assert world.slurm is not None
        world.slurm.holds = why

    return fault


def _cron_dies(effects: int) -> faults.Fault:
    """Before one of the next things that it changes."""

    def fault(world: World) -> None:
        world.cron_killed_at = effects

    return fault


def _waits(world: World) -> bool:
    """Whether a job of the run waits, and none has nodes."""
    jobs = world.slurm.mine() if world.slurm is not None and world.job is None else []
    return bool(jobs) and all(job.state == "PENDING" for job in jobs)


def _cancel_and_forget(world: World) -> None:
    """Its user cancels the job, and nobody looks until it is forgotten."""
    faults.cancel_job(world)
    world.timeline.call_later(5.0, _forget, world)


def _lose_all(world: World) -> None:
    """The controller has lost the jobs that wait."""
    assert world.slurm is not None
    world.slurm.state.jobs.clear()


def _forget_restart(world: World) -> None:
    """The controller was restored from a state in which the job that waits had not begun."""
    assert world.slurm is not None
    world.slurm.mine()[0].restarts -= 1


def _may_not_requeue(world: World) -> None:
    """An administrator switches the requeue of the job off."""
    assert world.job is not None
    world.job.may_requeue = False


def fail_everywhere(world: World) -> None:
    """The Prolog fails on the node, whichever it is, on which the job starts next."""
    assert world.slurm is not None
    world.slurm.sick.update(world.slurm.nodes)
    world.accusable.update(("launch failed", node) for node in world.slurm.nodes)


def _each(lives: Callable[[int], Scene]) -> Scene:
    """Another life for each seed."""
    return lambda seed: lives(seed)(seed)


REQUEUE = faults._request("REQUEUE")
LOST_REPORT = _life((9.0, faults.kill_rank_and_connection), shift_s=0.01, nodes=1, nproc_per_node=2)
RANKS = _life((5.0, faults.kill_rank), (9.0, faults.kill_rank), nodes=1)
RANK = _life((5.0, faults.kill_rank), nodes=2, nproc_per_node=1)
STOP = _life((5.0, faults.ask_for_stop), nodes=1, bounds=Bounds(stops=True))
HANG = _life((5.0, faults.hang_rank), nodes=1, nproc_per_node=2)
ASKED = _life((5.0, REQUEUE), shift_s=0.05, nodes=1, nproc_per_node=1, bounds=Bounds(costless=True))
RESET = _life((5.0, faults.reset), shift_s=0.05, nodes=2, nproc_per_node=1)
POWER = _life(
    (5.0, faults.power_off), nodes=2, nproc_per_node=1, elastic={"min_nodes": 1}, bounds=Bounds(within_s=100.0)
)
SUSPENDED = _life((5.0, suspended(20.0)), nodes=2, nproc_per_node=1,
                  fault_tolerance={**PATIENT, "agent_timeout_s": 5.0})  # fmt: skip
BETWEEN = _life((5.0, faults.kill_rank), (5.02, run_folder_is("silent", 70.0)), nodes=1,
                fault_tolerance={**PATIENT, "supervisor_lease_s": 30.0})  # fmt: skip
STARTED_BETWEEN = _life((5.0, faults.kill_agent), (6.02, run_folder_is("silent", 70.0)), nodes=2, nproc_per_node=1,
                        elastic={"min_nodes": 1})  # fmt: skip
FULL = _life((4.9, run_folder_is("full", 8.0)), (5.0, faults.kill_rank), nodes=1, bounds=Bounds(decided=True))
LONG_FULL = _life((4.9, run_folder_is("full", 20.0)), (5.0, faults.kill_rank), nodes=1)
DOOMED = _life(nodes=1, bounds=Bounds(most_starts=6), fault_tolerance={
    **PATIENT, "num_in_job_restarts": 2, "num_job_retries_on_failure": 1, "retry_delay_s": 0})  # fmt: skip
DOOMED_IN_SLURM = _in_slurm(nodes=1, bounds=Bounds(most_starts=6), fault_tolerance={
    **PATIENT, "num_in_job_restarts": 2, "num_job_retries_on_failure": 1, "retry_delay_s": 0})  # fmt: skip
PLANNED = _life((4.0, REQUEUE), (9.0, REQUEUE), (14.0, REQUEUE), nodes=1, fault_tolerance={
    **PATIENT, "num_in_job_restarts": 0, "num_job_retries_on_failure": 0})  # fmt: skip
PREEMPTED = _in_slurm((5.0, preempted(60)), until=400, nodes=2, nproc_per_node=1, bounds=Bounds(costless=True))
RANK_IN_SLURM = _in_slurm((5.0, faults.kill_rank), nodes=2, nproc_per_node=1,
                          fault_tolerance={**PATIENT, "num_in_job_restarts": 0})  # fmt: skip
LATE_SBATCH = _in_slurm((4.9, _controller("late", 1, at="sbatch")), (5.0, REQUEUE), nodes=1,
                        preemption={"continue_by": "resubmit"})  # fmt: skip
KILLED_AFTER_SBATCH = _in_slurm((4.9, _kill_after("sbatch")), (5.0, REQUEUE), nodes=1,
                                preemption={"continue_by": "resubmit"})  # fmt: skip
STOPPED_IN_GRACE = _in_slurm((5.0, faults.ask_for_stop), (5.0, preempted(60)), nodes=1,
                             slurm={"requeues_early": True})  # fmt: skip
EXCLUDED = _in_slurm((5.0, faults.exclude_node), nodes=2, nproc_per_node=1)
ORPHANED = _life((5.0, faults.cut_off), nodes=2, nproc_per_node=1, elastic={"min_nodes": 1},
                 fault_tolerance={**PATIENT, "supervisor_lease_s": 30.0})  # fmt: skip
SAVED = _life((5.0, faults._request("SAVE")), nodes=1, nproc_per_node=1)
SIGNALLED = _life((5.0, faults.signal_supervisor), nodes=1, nproc_per_node=1)
SLOWLY = _life((4.5, lambda world: world.network.delay("n1", 1.2, 6.0)), (5.0, REQUEUE), shift_s=0.05, nodes=2,
               nproc_per_node=1)  # fmt: skip
WAITING = _in_slurm((5.0, faults.requeue_job), (9.0, faults.exclude_node), shift_s=0.1, nodes=2, nproc_per_node=1)
FORGOTTEN = _in_slurm((5.0, faults.give_number_again), (5.1, REQUEUE), nodes=1)
SCRIPT = _in_slurm((5.0, faults.kill_batch_script), nodes=1)
SCRIPT_FORGOTTEN = _in_slurm((5.0, faults.kill_batch_script), (50.0, _forget), nodes=1)
SCRIPT_IN_WORK = _each(lambda seed: _in_slurm((5.0, REQUEUE), (5.0, kill_in_work(3 * seed + 1)), nodes=1))
SCRIPTS = _in_slurm((1.0, _kill_scripts(6)), nodes=1)
TWO_CRONS = _each(lambda seed: _in_slurm(
    (5.0, faults.kill_batch_script), (50.0, _forget), (51.0, _look()),
    (51.0 + 0.05 * seed, _look("login2" if seed % 2 else "login")), nodes=1))  # fmt: skip
CRON_DIES = _each(lambda seed: _in_slurm(
    (5.0, faults.kill_batch_script), (50.0 if seed % 2 else 1e4, _forget), (50.0, _cron_dies(seed // 2 + 1)),
    nodes=1))  # fmt: skip
SCRIPT_AT_BEGIN = _each(lambda seed: _in_slurm((0.0, kill_in_work(seed + 1)), nodes=1))
SCRIPT_AT_END = _each(lambda seed: _in_slurm(
    (1.0, once(lambda world: world.saved == world.until, kill_in_work(seed + 1))), until=20, nodes=1))  # fmt: skip
STOPPED_AND_LOST = _in_slurm((5.0, faults.kill_batch_script), (9.0, faults.ask_for_stop), nodes=1)
LOST_JOB = _in_slurm((4.0, faults.kill_rank), (5.0, _lose_job), (50.0, _look()), until=400, nodes=1)
LOOKED_AT = _in_slurm((5.0, _look()), nodes=1)
ASKED_BETWEEN = _life((5.0, faults.kill_rank), (5.1, faults._request("SAVE")), shift_s=0.03, nodes=1)
BATCH_HOST = _in_slurm((5.0, _lose_node(0)), nodes=2, nproc_per_node=1, elastic={"min_nodes": 1},
                       bounds=Bounds(within_s=600.0))  # fmt: skip
LATE_FOR_CRON = _in_slurm((5.0, faults.kill_batch_script), (50.0, _forget), (50.0, _drain(150.0)),
                          (50.0, _controller("late", 1, at="sbatch")), nodes=1)  # fmt: skip
HELD = _in_slurm((4.0, _hold(HELD_FOR_GOOD)), (5.0, faults.requeue_job), nodes=1)
HELD_BY_USER = _in_slurm((4.0, _hold(slurm.HELD_BY_USER)), (5.0, faults.requeue_job), nodes=1)
PROLOG = _in_slurm((4.0, faults.fail_prolog), (5.0, faults.requeue_job), nodes=3)
BESIDE = _in_slurm((5.0, faults.start_beside), (7.0, faults.start_beside), nodes=2, nproc_per_node=1)
BESIDE_SILENT = _in_slurm((5.0, _controller("silent", 40, at="scontrol")), (5.1, faults.start_beside), until=400,
                          nodes=2, nproc_per_node=1)  # fmt: skip
TAKEN = _in_slurm((12.0, faults.take_place), nodes=2, nproc_per_node=1)
TAKEN_AND_FAILED = _in_slurm((12.0, faults.take_place), (12.01, faults.kill_rank), nodes=2, nproc_per_node=1)
UNTOLD = _in_slurm((4.0, _controller("silent", 12, at="scontrol update")), (5.0, faults.ask_for_stop),
                   (5.0, preempted(60)), nodes=1, slurm={"requeues_early": True})  # fmt: skip
KILLED = _in_slurm((5.0, faults.kill_supervisor), nodes=1)
NODE_LOST = _in_slurm((5.0, _lose_node(-1)), nodes=2, nproc_per_node=1, bounds=Bounds(placed=True))
KILLED_BEFORE_A_STOP = _in_slurm(
    (4.9, suspended(20.0)), (5.0, faults.ask_for_stop), (12.0, faults.kill_supervisor), nodes=1
)
KILLED_AT_BEGIN = _each(lambda seed: _in_slurm(
    (0.0, faults.ask_for_stop), (0.0, kill_in_work(seed + 1, whole=False)), (0.01, preempted(5)),
    (0.02, _controller("silent", 12, at="scontrol update")), nodes=1, slurm={"requeues_early": True}))  # fmt: skip
CANCELLED_SILENTLY = _in_slurm((4.9, _controller("silent", 3, at="scontrol requeue")), (5.0, REQUEUE),
                               (6.5, faults.cancel_job), shift_s=0.1, nodes=1)  # fmt: skip
CANCELLED_BEFORE_SBATCH = _in_slurm(
    (4.9, _controller("silent", 3, at="sbatch --parsable")), (5.0, REQUEUE), (6.5, faults.cancel_job), shift_s=0.1,
    nodes=1, preemption={"continue_by": "resubmit"})  # fmt: skip
CANCELLED_LATER = _in_slurm((5.0, REQUEUE), (5.0, _drain(150.0)), (5.5, once(_waits, faults.cancel_job)), nodes=1,
                            preemption={"continue_by": "resubmit"})  # fmt: skip
CANCELLED_AND_FORGOTTEN = _in_slurm((5.0, REQUEUE), (5.5, once(_waits, _cancel_and_forget)), nodes=1)
FORBIDDEN = _each(lambda seed: _in_slurm(
    (2.0, faults.requeue_job), (14.0, faults.give_number_again), (15.0, faults.ask_for_stop),
    (15.0, once(lambda world: world.events()[-1].event == EventName.DECISION,
                _controller("silent", seed + 1, at="scontrol -a -o show"))), nodes=1))  # fmt: skip
NOT_TO_REQUEUE = _in_slurm((4.0, _may_not_requeue), (5.0, REQUEUE), until=60, nodes=1, bounds=Bounds(within_s=60.0),
                           preemption={"continue_by": "requeue"})  # fmt: skip
NUMBERED_AGAIN = _in_slurm((5.0, faults.give_number_again), nodes=1)
STARTED_AGAIN = _in_slurm((5.0, REQUEUE), (5.5, once(_waits, _forget_restart)), (30.0, REQUEUE), until=100, nodes=1,
                          bounds=Bounds(within_s=85.0))  # fmt: skip
LOST_IN_QUEUE = _in_slurm((5.0, REQUEUE), (5.5, once(_waits, _lose_all)), nodes=1)
CLAIMED = _each(lambda seed: _in_slurm((5.0, REQUEUE), (5.0, kill_in_work(2 * seed + 1)), nodes=1,
                                       bounds=Bounds(within_s=170.0)))  # fmt: skip
BESIDE_LATER = _in_slurm((2.0, faults.requeue_job), (16.0, faults.start_beside), (18.0, faults.start_beside), nodes=2,
                         nproc_per_node=1)  # fmt: skip
HELD_TWICE = _each(lambda seed: _in_slurm(
    (4.0, _hold(HELD_FOR_GOOD)), (5.0, faults.requeue_job), (50.0, _cron_dies(seed + 1)), (120.0, _look()),
    until=800, nodes=1))  # fmt: skip
REFUSED_BESIDE = _in_slurm((0.01, faults.signal_supervisor), (1.0, fail_everywhere), (1.14, faults.requeue_job),
                           until=300, nodes=2, nproc_per_node=1, preemption={"continue_by": "resubmit"})  # fmt: skip


# lives of a batch, whose agents outlive their supervisor


def _batch(*befalls: tuple[float, faults.Fault], **settings: Any) -> Scene:
    """A batch of two nodes in which these faults come."""

    def scene(seed: int) -> World:
        return lived(befalls, seed=seed, kind=batches.BatchWorld, **{
            **batches.BATCH, "until": 40, "nodes": 2, **settings})  # fmt: skip

    return scene


def _kill_in_begin(seed: int) -> World:
    """Killed twice, the second time at another effect of the next supervisor's begin for each seed."""

    def kill_soon(world: World) -> None:
        world.killed_at = world.effects + 14 + seed % 8

    return _batch((3.0, faults.kill_supervisor), (3.01, kill_soon))(seed)


def _die(world: World) -> None:
    """An agent is killed, and nobody sees it."""
    world.accusable.add(("agent lost", world.agents[1].host))
    world.agents[1].die()


def _sleeping(world: World) -> None:
    """An agent is stopped until the others have ended."""
    process = world.agents[1].process
    process.stop()
    world.timeline.call_later(15.0, process.go_on)


OUTLIVED = _batch((3.0, faults.kill_supervisor), bounds=Bounds(most_agents=2))
OUTLIVED_TWICE = _batch((3.0, faults.kill_supervisor), (6.0, faults.kill_supervisor), bounds=Bounds(most_agents=2))
OUTLIVED_A_STOP = _batch((3.0, faults.ask_for_stop), (3.001, faults.kill_supervisor))
OUTLIVED_BY_ONE = _batch(
    (3.0, faults.kill_supervisor), (3.01, _die), until=300, bounds=Bounds(within_s=85.0),
    fault_tolerance={**PATIENT, "supervisor_lease_s": 30.0},
)  # fmt: skip
OUTLIVED_ASLEEP = _batch((2.9, _sleeping), (3.0, faults.kill_supervisor), until=20, bounds=Bounds(within_s=20.0))


# what is planted


async def _nothing(*_: Any, **__: Any) -> None:
    pass


async def _ask_once(_pool: AgentPool, links: Any, _journal: Any) -> None:
    await ask_each(links, RescueState(), timeout_s=17.0)


async def _ask_the_first(pool: AgentPool, links: Any, journal: Any) -> None:
    await REAL_RESCUE(pool, links[:1], journal)


REAL_RESCUE = attempt_module.rescue


async def _slept(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return 0.0


async def _no_requests(*_: Any, **__: Any) -> dict[str, str]:
    return {}


def _put(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Plant:
    """Have ``around`` called in the place of a method, with the method first."""
    real = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: around(real, *args, **kwargs))


def _within(owner: Any, name: str, *put: Any) -> Plant:
    """While this function works, another one is replaced."""

    def around(real: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*put)
            return real(*args, **kwargs)

    return _wrap(owner, name, around)


def _unsaid(*names: EventName) -> Plant:
    """These events never reach the journal."""

    def append(real: Any, self: Any, event: EventName, **details: Any) -> Any:
        return self.compose(event, details) if event in names else real(self, event, **details)

    return _wrap(PatientJournal, "append", append)


def _lost_when_full(self: PatientJournal) -> None:
    while self._pending:
        with contextlib.suppress(OSError):
            self.write(self._pending[0][1])
        self._pending.popleft()


def _ping_in_attempts(real: Any, self: AgentPool, ping: Any) -> None:
    if self.generation is not None:
        real(self, ping)


async def _admit_in_attempts(self: AgentPool, *connection: Any) -> Any:
    while self.generation is None:
        await asyncio.sleep(0.01)
    return await REAL_ADMIT(self, *connection)


REAL_ADMIT = AgentPool._admit


def _finish(real: Any, state: Any, decision: Any) -> Any:
    return real(state, replace(decision, action=Action.FINISH, exit_code=0))


def _written_only(real: Any, state: Any, found: Any) -> Any:
    return replace(state, do=Do.OVER, exit_code=0) if state.do is Do.WRITE else real(state, found)


def _counted(real: Any, *args: Any) -> Any:
    budget = real(*args)
    return replace(budget, failures_so_far=budget.failures_so_far + 1)


def _unspent(real: Any, *args: Any) -> Any:
    return replace(real(*args), failures_so_far=0, restarts_so_far=0)


def _failed_instead(real: Any, self: AttemptEnd, verdict: Any) -> Any:
    planned = verdict.cause in act_module.PLANNED
    return real(self, replace(verdict, cause=Cause.WORKER_ERROR, exit_code=1) if planned else verdict)


async def _ten_leases(self: Agent) -> None:
    while time.monotonic() - self._last_heard < 10 * self._config.fault_tolerance.supervisor_lease_s:
        await asyncio.sleep(1.0)


def _without_memory(real: Any, self: Agent, report: Any) -> None:
    real(self, report)
    self._lasting.clear()


def _no_commit(real: Any, self: Agent, slot: Slot, value: int) -> None:
    if slot is not Slot.COMMITTED:
        real(self, slot, value)


async def _again(real: Any, self: Agent, call: Any) -> Any:
    self._generation = 0
    await real(self, call)
    self._generation = 0
    return await real(self, call)


def _anywhere(real: Any, job: Any, *, avoid: Any, **rest: Any) -> Any:
    return real(job, avoid=None, **rest)


def _nothing_lost(real: Any, ends: Any, *, seen: Any, **rest: Any) -> Any:
    return real(ends, seen=replace(seen, lost_nodes=()), **rest)


async def _lose_the_old_one(self: AttemptRunner, link: AgentLink) -> None:
    await self._crew.reconnected(link)
    if not self.stops.over.is_set() and not self._is_end_of_step():
        self._lose(link, f"the agent on {link.host} is gone", hung_up=True)


def _unowned(self: RunFolder, owner: Any) -> None:
    if owner.generation == 1:
        REAL_TAKE_OVER(self, owner)


REAL_TAKE_OVER = RunFolder.take_over


def _owner_of_before(self: RunFolder) -> Any:
    """Of a supervisor whose place was taken: itself."""
    found = REAL_OWNER(self)
    return replace(found, generation=found.generation - 1) if found is not None and found.host == "n9" else found


REAL_OWNER = RunFolder.owner


def _unseen_by_cron(real: Any, self: RunFolder, kind: str) -> Any:
    process = PROCESS.get()
    return None if process is not None and process.name == "cron" else real(self, kind)


def _with_a_line(real: Any, events: Any, job: str) -> bool:
    return real(events, job) and any(event.attempt.startswith(f"{job}.") for event in events)


def _without_rescuing(patch: pytest.MonkeyPatch) -> None:
    real = Journal.append

    def append(self: Journal, event: EventName, **details: Any) -> Any:
        return None if event == EventName.RESCUING else real(self, event, **details)

    patch.setattr(Journal, "append", append)


def _of_its_own_attempt(run: RunFolder) -> Attempt | None:
    owner = run.owner()
    return None if owner is None else Attempt(job=owner.job, restart=owner.restart, cycle=owner.cycle)


def _of_owner_alone(real: Any, run: RunFolder, records: Any, jobs: Any, who: str) -> Any:
    owner = run.owner()
    return real(run, records, [job for job in jobs if owner is not None and job.job_id == owner.job], who)


def _released_instead(real: Any, run: RunFolder, records: Any, jobs: Any, who: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescue, "_cancel_replaced", lambda job: rescue.release(run, job, records[job], who))
        return real(run, records, jobs, who)


def _first_job(self: RunFolder, *, newest: int | None = None) -> Any:
    return REAL_JOBS(self) if newest is None else REAL_JOBS(self)[:newest]


REAL_JOBS = RunFolder.own_jobs


def _forbid_unseen(job: Any, *, patience_s: float) -> None:
    own_jobs.slurm.run_patiently(["scontrol", "update", f"JobId={job}", "Requeue=0"], patience_s=patience_s)


def _stays_off(real: Any, *args: Any) -> None:
    try:
        real(*args)
    except own_jobs.RequeueDisabled as error:
        raise SlurmError(error.what) from error


def _with_an_entry(real: Any, history: Any, *rest: Any) -> Any:
    begun = {event.attempt for event in history if event.event == EventName.ATTEMPT_STARTED}
    return real([event for event in history if event.attempt in begun], *rest)


class _Never:
    def __get__(self, *_: Any) -> bool:
        return False

    def __set__(self, *_: Any) -> None:
        pass


PLANTED: dict[str, Planted] = {
    # ends, and what is kept before them
    "nodes are asked for their state once": Planted(
        _put(attempt_module, "rescue", _ask_once), "state is kept", LOST_REPORT),
    "nodes are not asked for their state": Planted(_put(attempt_module, "rescue", _nothing), "state is kept", RANK),
    "only the first node is asked for its state": Planted(
        _put(attempt_module, "rescue", _ask_the_first), "state is kept", RANK),
    "ends of workers are not taken in": Planted(
        _put(AttemptRunner, "_on_exit", lambda *_: None), "every life ends", RANK),
    "every report counts as told before": Planted(
        _put(AgentLink, "has_told", lambda *_: True), "every life ends", RANK),
    "hangs are not looked into": Planted(_put(Hangs, "investigate", _nothing), "every life ends", HANG),
    "workers that are to end are not killed": Planted(
        _put(AttemptRunner, "_end_peers", _nothing), "every life ends", RANK),
    # silence, leases, connections
    "a connection that broke is a lost node at once": Planted(
        _put(Crew, "reconnected", _nothing), "no evidence", RESET),
    "no pings are sent between two attempts": Planted(
        _wrap(AgentPool, "ping", _ping_in_attempts), "agents stay", BETWEEN),
    "no agent is taken in between two attempts": Planted(
        _put(AgentPool, "_admit", _admit_in_attempts), "agents are taken in", STARTED_BETWEEN),
    "the verdict hears of no lost node": Planted(
        _wrap(attempt_module, "judge", _nothing_lost), "every end is known", POWER),
    "a broken connection is looked at by its old name": Planted(
        _put(AttemptRunner, "_on_disconnect", _lose_the_old_one), "no node is lost without a cause", RESET),
    "silence is not noticed": Planted(_put(AgentPool, "silent_for", lambda *_: []), "in time", POWER),
    "a supervisor that was stopped blames its nodes": Planted(
        _put(crew_module, "overslept_s", _slept), "no evidence", SUSPENDED),
    # decisions, and the journal before them
    "no decision is carried out": Planted(_wrap(act_module, "step", _written_only), "the run ends", RANK),
    "an attempt is taken for finished when it was stopped": Planted(
        _wrap(decide, "carried_out", _finish), "the run ends complete", ASKED),
    "an attempt begins before the journal knows": Planted(
        _unsaid(EventName.ATTEMPT_STARTED), "entry before action", RANK),
    "a requeue comes before its decision": Planted(_unsaid(EventName.DECISION), "entry before action", RANK_IN_SLURM),
    "a requeue comes before its entry": Planted(_unsaid(EventName.REQUEUEING), "entry before action", RANK_IN_SLURM),
    "a submission comes before its entry": Planted(
        _unsaid(EventName.RESUBMITTING), "entry before action", LATE_SBATCH),
    "events that meet a full disk are lost": Planted(
        _put(PatientJournal, "_write_pending", _lost_when_full), "the journal is whole", FULL),
    "a full disk is not waited for": Planted(_put(run_module, "STORAGE_PATIENCE_S", 0.0), "the run goes on", LONG_FULL),
    "the right to act is never given": Planted(
        _put(EndingClaim, "take", lambda *_, **__: False), "the run goes on", ASKED),
    "no new owner is recorded": Planted(_put(RunFolder, "take_over", _unowned), "every life ends", RANKS),
    # budgets
    "a budget is not spent": Planted(_wrap(act_module, "budget_of", _unspent), "budgets add up", DOOMED),
    "a budget is not spent over jobs": Planted(
        _wrap(act_module, "budget_of", _unspent), "budgets add up", DOOMED_IN_SLURM),
    "a restart is tried without its nodes": Planted(
        _put(Attempts, "_has_nodes", lambda _: True), "an attempt has its nodes", NODE_LOST),
    "a planned stop counts as a failure": Planted(
        _wrap(AttemptEnd, "act_on", _failed_instead), "the run goes on", PLANNED),
    # stops
    "a request for a stop is not seen": Planted(
        _put(RunFolder, "see_request", lambda *_: None), "stop means stop", STOP),
    "a request that was seen is forgotten": Planted(
        _put(AttemptFolder, "requests", _no_requests), "stop means stop", STOP),
    "a stop does not save": Planted(_put(Stops, "_agreed_stop", _nothing), "a planned stop costs no step", PREEMPTED),
    "Slurm may undo a stop": Planted(
        lambda patch: (patch.setattr(act_module, "keep_ended", lambda *_: None),
                       patch.setattr(run_module, "superfluous", lambda *_: None))[0],
        "stop means stop", STOPPED_IN_GRACE),
    # one continuation
    "a submission without an answer is made again": Planted(
        _put(own_jobs, "earlier_try", lambda *_: None), "one continuation", LATE_SBATCH),
    "a killed supervisor's submission is made again": Planted(
        lambda patch: (patch.setattr(act_module, "began_to_resubmit", lambda *_: False),
                       patch.setattr(AttemptEnd, "_later_job", lambda _: Answer.NO))[0],
        "one continuation", KILLED_AFTER_SBATCH),
    "a job that was cancelled is requeued": Planted(
        _put(own_jobs, "_ending_now", lambda *_: parsing.JobEnding.NOT_ENDING), "stop means stop", CANCELLED_SILENTLY),
    "a job that was cancelled has a successor": Planted(
        _put(own_jobs, "_is_gone", lambda *_: False), "stop means stop", CANCELLED_BEFORE_SBATCH),
    "the requeue of a job stays switched off": Planted(
        _wrap(own_jobs, "_requeue_only", _stays_off), "in time", NOT_TO_REQUEUE),
    "another run's job is not to be requeued": Planted(
        _put(own_jobs, "forbid_requeue", _forbid_unseen), "update of job", FORBIDDEN),
    "a run that is complete is started again": Planted(
        _put(RunFolder, "done", lambda _: None), "the run ends complete", RANK),
    "agents outlive the requeue": Planted(
        _put(Attempts, "dismiss", lambda _: None), "agents end before the requeue", RANK_IN_SLURM),
    # what is asked for, and told
    "a request for a requeue is dropped": Planted(
        _wrap(Stops, "on_request", lambda real, self, kind, who: None), "requests are answered", ASKED),
    "a request for a save is dropped": Planted(_put(Stops, "_save_now", _nothing), "requests are answered", SAVED),
    "the supervisor's own signals are dropped": Planted(
        _put(Stops, "on_own_signal", lambda *_: None), "requests are answered", SIGNALLED),
    "a stop that a rank has passed is committed": Planted(
        _put(stop, "passed", lambda *_: False), "requests are answered", SLOWLY),
    "a start does not read the newest line": Planted(
        _wrap(Journal, "read_past", lambda real, self: real(self)[:-1]), "the journal is what was written", RANKS),
    # claims, owners, and who comes back
    "a claim is refused to nobody": Planted(
        _put(run_folder, "_is_taken", lambda _: False), "one continuation", TWO_CRONS),
    "a claim is never settled": Planted(_put(EndingClaim, "settle", lambda *_: None), "one continuation", TWO_CRONS),
    "a claim of another host is void": Planted(_put(run_folder, "CLAIM_LEASE_S", 0.0), "one continuation", TWO_CRONS),
    "a claim that led to nothing is kept": Planted(
        _put(EndingClaim, "give_back", lambda _: None), "the run goes on", SCRIPT_IN_WORK),
    "a claim that was settled, and led to nothing, is kept": Planted(
        _put(EndingClaim, "outcome", lambda _: None), "the run goes on", LOST_IN_QUEUE),
    "a claim of a supervisor that ended with its job is kept": Planted(
        _wrap(EndingClaim, "take", lambda real, self, actor, **_: real(self, actor)), "in time", CLAIMED),
    "a claim of an earlier start with the same number is kept": Planted(
        lambda patch: (_within(run_module, "_take_over_from", EndingClaim, "outcome", lambda _: None)(patch),
                       patch.setitem(decide.AFTER, (Do.ASK_CLAIMED, Answer.NO), Do.NOTE_CLAIMED))[0],
        "in time", STARTED_AGAIN),
    "a start that Slurm has replaced takes the run over": Planted(
        _put(own_jobs, "is_newest_start", lambda *_: True), "one owner", BESIDE_LATER),
    "a stop is not seen in the place of a killed supervisor": Planted(
        _within(run_module, "_verdict_in_its_place", RunFolder, "see_request", lambda *_: None),
        "stop means stop", KILLED_BEFORE_A_STOP),
    "what was decided about a start that left no entry is forgotten": Planted(
        _wrap(run_module, "superfluous", _with_an_entry), "stop means stop", KILLED_AT_BEGIN),
    "a supervisor that lives is replaced": Planted(
        _put(run_module, "_refuse_to_replace", lambda *_: None), "one owner", BESIDE),
    "a job of the run that trains is not seen": Planted(
        _put(run_module, "owner_lives", lambda *_: False), "one owner", BESIDE),
    "a supervisor whose place was taken decides": Planted(
        _put(RunFolder, "owner", _owner_of_before), "one owner", TAKEN_AND_FAILED),
    "no sign of life is believed": Planted(
        _put(run_folder, "is_fresh", lambda *_: False), "a run that lives is left alone", LOST_JOB),
    "nobody decides in the place of a lost supervisor": Planted(
        _put(run_module, "_is_lost", lambda *_: False), "every end is decided", KILLED),
    "a start does not look whether Slurm alone wanted it": Planted(
        _put(run_module, "superfluous", lambda *_: None), "stop means stop", UNTOLD),
    "Slurm is not told that nothing follows": Planted(
        _put(act_module, "keep_ended", lambda *_: None), "stop means stop", STOPPED_IN_GRACE),
    # what cron does
    "cron brings back what a user has stopped": Planted(
        _wrap(RunFolder, "see_request", _unseen_by_cron), "stop means stop", STOPPED_AND_LOST),
    "a job that runs counts as gone": Planted(
        _put(parsing.JobRecord, "alive", property(lambda _: False)), "a run that lives is left alone", LOOKED_AT),
    "cron brings a run back for ever": Planted(
        _put(rescue, "rescues_without_progress", lambda _: 0), "budgets add up", SCRIPTS),
    "cron acts before its entry": Planted(_without_rescuing, "entry before action", SCRIPT_FORGOTTEN),
    "cron does not look for the job of a try before": Planted(
        _put(own_jobs, "earlier_try", lambda *_: None), "one continuation", LATE_FOR_CRON),
    "cron does not see a job without its batch script": Planted(
        _put(rescue, "is_orphan", lambda _: False), "in time", BATCH_HOST),
    "cron does not look at a job that was to continue the run": Planted(
        _wrap(rescue, "_submit_again", _of_owner_alone), "stop means stop", CANCELLED_LATER),
    "cron does not ask who has cancelled a job that is forgotten": Planted(
        _put(own_jobs, "cancelled_by", lambda _: None), "stop means stop", CANCELLED_AND_FORGOTTEN),
    "cron takes another run's job for the run's own": Planted(
        _put(own_jobs, "_is_ours", lambda *_: True), "the run goes on", NUMBERED_AGAIN),
    "cron replaces a job that it has replaced": Planted(
        lambda patch: (_within(rescue, "_submit_in_place_of", RunFolder, "own_jobs", _first_job)(patch),
                       patch.setattr(rescue, "is_unfinished", lambda *_: True))[0],
        "a run that lives", HELD_TWICE),
    "cron releases a job that has a successor": Planted(
        _wrap(rescue, "_rescue", _released_instead), "one continuation", REFUSED_BESIDE),
    "cron finishes no requeue": Planted(_put(rescue, "complete", lambda *_: None), "the run goes on", CRON_DIES),
    "cron leaves a job that Slurm holds for good": Planted(
        _put(parsing, "is_held_for_good", lambda _: False), "the run goes on", HELD),
    "cron leaves a job that a node has refused": Planted(
        _put(parsing, "is_held_by_launch", lambda _: False), "the run goes on", PROLOG),
    "cron releases what a user holds": Planted(
        _put(parsing, "is_held_by_launch", lambda reason: "Held" in reason), "what a user holds", HELD_BY_USER),
    "cron takes a run that begins for none": Planted(
        _wrap(rescue, "is_unfinished", _with_a_line), "the run goes on", SCRIPT_AT_BEGIN),
    "cron leaves a complete run unmarked": Planted(
        _put(rescue, "_unmarked_end", lambda _: None), "the run goes on", SCRIPT_AT_END),
    # agents
    "an agent has ten leases": Planted(_put(Agent, "_watch_lease", _ten_leases), "agents end", ORPHANED),
    "an agent says on a new connection nothing of what it said before": Planted(
        _wrap(Agent, "_report", _without_memory), "every life ends", LOST_REPORT),
    "an agent kills nothing": Planted(_put(Agent, "_obey", lambda *_: None), "in time", RANK),
    "an agent commits no stop": Planted(_wrap(Agent, "_write", _no_commit), "requests are answered", ASKED),
    "an agent does not tell of signals": Planted(
        _put(Agent, "_note_signal", lambda *_: None), "requests are answered", PREEMPTED),
    "an agent does not tell of progress": Planted(
        _put(Agent, "_report_regularly", _nothing), "progress is told", RANK),
    "an agent starts what it has started": Planted(_wrap(Agent, "_start", _again), "once", RANK),
    # placement
    "an exclusion is forgotten": Planted(
        lambda patch: (patch.setattr(act_module, "next_placement", lambda *_, **__: None),
                       patch.setattr(run_module, "settle", lambda *_: None))[0],
        "excluded nodes", EXCLUDED),
    "a requeue keeps off nothing": Planted(_wrap(own_jobs, "requeue", _anywhere), "excluded nodes", EXCLUDED),
    "a start does not look where it is": Planted(
        _put(run_module, "settle", lambda *_: None), "excluded nodes", WAITING),
    "another run's job is requeued": Planted(
        _put(own_jobs, "refuse_another", lambda *_: None), "update of job", FORGOTTEN),
    # agents that outlive their supervisor
    "a guardian spares nothing": Planted(
        _put(guarding, "outliving", lambda _: lambda _pid: False), "agents outlive", OUTLIVED),
    "agents that have outlived a supervisor are not looked for": Planted(
        _put(run_module, "find_outlived", lambda *_: None), "agents end", OUTLIVED),
    "agents are looked for where the newest attempt is": Planted(
        _put(agents_module, "crew_of", _of_its_own_attempt), "agents outlive", OUTLIVED_TWICE),
    "agents that are not needed any more are not ended": Planted(
        _put(Outlived, "end", lambda _: None), "agents end with the run", OUTLIVED_A_STOP),
    "an agent that connects after the end is not told of it": Planted(
        lambda patch: patch.setattr(AgentPool, "is_over", _Never(), raising=False), "in time", OUTLIVED_ASLEEP),
    "nobody takes the place of an agent that does not report": Planted(
        _put(crew_module.Reviver, "expect", lambda *_: None), "in time", OUTLIVED_BY_ONE),
    "an attempt that left no entry has no number": Planted(
        _put(placement, "_STARTS", frozenset({EventName.ATTEMPT_STARTED})), "one decision", _kill_in_begin),
}  # fmt: skip


def lives_to_find(planted: Planted, patch: pytest.MonkeyPatch, tries: int = TRIES) -> int | None:
    """How many lives it took; None where it was not found."""
    planted.plant(patch)
    for seed in range(tries):
        if any(each.startswith(planted.invariant) for each in planted.scene(seed).violations):
            return seed + 1
    return None
