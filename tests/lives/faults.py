"""What befalls a life: drawn from its seed, told in its story, and over at some time, so that the run can end well."""

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace

from fake_slurm import HELD_FOR_GOOD

from lives import slurm
from lives.nodes import HANG_S, Agent
from lives.timeline import PROCESS, Thread, inside
from lives.world import PAUSE_S, World
from slurmft.errors import SlurmftError
from slurmft.policy.suspicion import ManualEntry
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import FRESH_S, Attempt, Owner
from slurmft.supervisor import run as run_module

Fault = Callable[[World], None]


def _agent(world: World, *, may_be: str = "") -> Agent | None:
    """An agent that lives; its node may be accused of that from now on."""
    living = [agent for agent in world.agents if agent.is_there]
    agent = world.chance.choice(living) if living else None
    if agent is not None and may_be:
        world.accusable.add((may_be, agent.host))
        if may_be == "node lost":  # one that is back, or goes on, closes connections: only its agent has ended then
            world.accusable.add(("crash", agent.host))
    return agent


def _request(kind: str) -> Fault:
    def ask(world: World) -> None:
        world.note(f"a user asks for {kind}")
        world.asked[kind] = world.timeline.now_s
        (world.run.path / kind).write_text('{"who": "user"}')

    ask.__name__ = f"ask_for_{kind}"
    return ask


def _may_fail(world: World) -> bool:
    """Whether the run folder has been well for a moment."""
    return world.timeline.now_s > max(world.silent_until_s, world.full_until_s) + PAUSE_S


def kill_rank(world: World) -> None:
    """A rank is killed, or ends with an error of its own."""
    if (agent := _agent(world, may_be="crash")) is not None and agent.workers:
        rank, code = world.chance.choice(sorted(agent.workers)), world.chance.choice((-9, -11, 1, 137))
        world.note(f"rank {rank} of generation {agent.generation} on {agent.host} ends with {code}")
        agent.end_worker(rank, code)


def hang_rank(world: World) -> None:
    """A rank hangs, and all others wait for it."""
    if (agent := _agent(world, may_be="hang")) is not None and agent.workers:
        rank = world.chance.choice(sorted(agent.workers))
        world.note(f"rank {rank} on {agent.host} hangs")
        agent.workers[rank].hung = True


def stall_disk(world: World) -> None:
    """The run folder does not answer for a while."""
    away_s = world.chance.choice((1.0, 4.0, 20.0, 100.0))
    if not _may_fail(world):
        return
    world.note(f"the run folder is silent for {away_s} s")
    world.silent_until_s = world.timeline.now_s + away_s


def slow_node(world: World) -> None:
    """Messages of a node take long for a while."""
    if (agent := _agent(world)) is not None:
        host, late_s = agent.host, world.chance.choice((0.3, 1.2, 2.5))
        world.note(f"messages of {host} take {late_s} s")
        far = [each.host for each in world.agents] if host == world.host else [host]
        # a handshake takes four, and its time is limited: a connection that breaks meanwhile is not back in time
        world.accusable |= {(kind, each) for kind in ("node lost", "crash") for each in far}
        world.network.delay(host, late_s, world.chance.choice((1.0, 20.0)))


def ask_for_stop(world: World) -> None:
    """A user stops the run for good."""
    if not world.stop_asked_s:
        world.stop_asked_s = world.timeline.now_s
        _request("KILL")(world)


def kill_rank_and_connection(world: World) -> None:
    """A rank is killed, and the report of it is lost with its connection."""
    if (agent := _agent(world, may_be="crash")) is not None and agent.workers:
        rank = world.chance.choice(sorted(agent.workers))
        world.note(f"rank {rank} on {agent.host} is killed, and the connection is reset")
        agent.end_worker(rank, -9)
        world.timeline.call_later(world.chance.uniform(0.008, 0.03), world.network.reset, agent.host)


def kill_agent(world: World) -> None:
    """An agent is killed, with its workers; its node lives."""
    if (agent := _agent(world, may_be="crash")) is not None:
        world.note(f"SIGKILL for {agent.process.name}")
        world.accusable.add(("agent lost", agent.host))
        agent.die()


def power_off(world: World) -> None:
    """A node is gone without a word; its power comes back later."""
    if (agent := _agent(world, may_be="node lost")) is not None:
        lose_power(world, agent.host, world.chance.choice((1.0, 30.0, 90.0, 1000.0)))


def lose_power(world: World, host: str, away_s: float) -> None:
    """The same of this node."""
    if host:
        world.note(f"{host} loses power for {away_s} s")
        world.network.cut(host)
        world.off.add(host)
        if host == world.host:
            world.kill_supervisor(quietly=True)
        if world.slurm is not None:
            world.slurm.lose(host)
        for each in world.agents:
            if each.host == host and each.is_there:
                each.lose_power()

        def back() -> None:
            world.note(f"{host} is back")
            world.off.discard(host)
            for each in world.agents:
                if each.host == host and not each.process.alive:
                    each.process.kill()  # from now on its connections are refused
            world.network.heal(host)
            if world.slurm is not None:
                world.slurm.see_back(host)

        world.timeline.call_later(away_s, back)


def cut_off(world: World) -> None:
    """All packets of a node are dropped for a while."""
    agent = _agent(world, may_be="node lost")
    if agent is not None and agent.host not in world.off and agent.host != world.host:
        host, away_s = agent.host, world.chance.choice((0.3, 2.0, 8.0, 15.0, 40.0, 100.0))
        world.note(f"{host} is cut off for {away_s} s")
        if away_s >= HANG_S:  # its ranks wait for the others, or for their data
            world.accusable.add(("hang", host))
        world.network.cut(host)
        if world.slurm is not None:
            world.slurm.lose(host)

        def back() -> None:
            if host not in world.off:
                world.note(f"{host} is connected again")
                world.network.heal(host)
                if world.slurm is not None:
                    world.slurm.see_back(host)

        world.timeline.call_later(away_s, back)


def reset(world: World) -> None:
    """A connection is reset."""
    if (agent := _agent(world)) is not None:
        world.note(f"the connections of {agent.host} are reset")
        world.network.reset(agent.host)


def stop_agent(world: World) -> None:
    """An agent, but not its workers, is stopped for a while."""
    if (agent := _agent(world, may_be="node lost")) is not None and not agent.process.stopped:
        stop(world, agent, world.chance.choice((0.5, 5.0, 20.0, 70.0)))


def stop(world: World, agent: Agent, away_s: float) -> None:
    """This one, for so long."""
    world.note(f"{agent.process.name} is stopped for {away_s} s")
    agent.process.stop()
    agent.heard_s, agent.slept_s = agent._own._last_heard, away_s

    def go_on() -> None:
        world.disturb()
        world.note(f"{agent.process.name} goes on")
        world.network.healed_s[agent.host] = world.timeline.now_s
        agent.process.go_on()

    world.timeline.call_later(away_s, go_on)


def kill_supervisor(world: World) -> None:
    """SIGKILL for the supervisor."""
    world.kill_supervisor()


def kill_supervisor_in_its_work(world: World) -> None:
    """SIGKILL for the supervisor, before one of its next effects on the run folder."""
    world.killed_at = world.effects + world.chance.randrange(1, 40)
    world.killed_whole = world.slurm is not None and world.chance.random() < 0.3


def stop_supervisor(world: World) -> None:
    """The supervisor's node does nothing for a while: a suspended job, a virtual machine that is moved."""
    supervisor = world.supervisor
    if supervisor is not None and supervisor.alive and not supervisor.stopped:
        away_s = world.chance.choice((0.5, 5.0, 20.0, 70.0, 200.0))
        world.note(f"the supervisor is stopped for {away_s} s")
        supervisor.stop()

        def go_on() -> None:
            world.disturb()
            world.resumed_s = world.timeline.now_s
            world.note("the supervisor goes on")
            supervisor.go_on()

        world.timeline.call_later(away_s, go_on)


def signal_supervisor(world: World) -> None:
    """A signal that asks for a stop, as of a preemption."""
    world.note("SIGTERM for the supervisor")
    world.signal_supervisor()


def signal_agents(world: World) -> None:
    """The same to all tasks of the step, once or twice."""
    world.note("SIGTERM for all agents")
    for agent in world.agents:
        if agent.is_there and not world.network.is_cut(agent.host):
            agent.note_signal("SIGTERM")


def tear_connection(world: World) -> None:
    """A connection is gone for its agent alone; what it said just before comes late, and all of it again."""
    if (agent := _agent(world)) is not None:
        host, late_s = agent.host, world.chance.choice((0.1, 0.25, 1.0))
        world.note(f"the connection of {host} is torn, and what was said comes {late_s} s late")
        world.network.delay(host, late_s, 0.04)
        if agent.workers and world.chance.random() < 0.5:
            world.accusable.add(("crash", host))
            rank = world.chance.choice(sorted(agent.workers))
            world.note(f"rank {rank} on {host} is killed before it")
            agent.end_worker(rank, -9)
        world.timeline.call_later(0.02, agent.tell_again)
        world.timeline.call_later(0.03, world.network.tear, host)


def say_twice(world: World) -> None:
    """Reports come twice, and an old one of progress with them."""
    if (agent := _agent(world)) is not None:
        world.note(f"{agent.process.name} says all once more")
        agent.tell_again()


def fill_disk(world: World) -> None:
    """The disk of the run folder is full for a while."""
    full_s = world.chance.choice((1.0, 4.0, 20.0, 100.0))
    if not _may_fail(world):
        return
    world.note(f"the run folder is full for {full_s} s")
    world.full_until_s = world.timeline.now_s + full_s


def fill_disk_in_its_work(world: World) -> None:
    """The disk is full from one of the supervisor's next effects on."""
    world.full_at, world.full_s = world.effects + world.chance.randrange(1, 60), world.chance.choice((0.5, 4.0, 20.0))


def read_stale(world: World) -> None:
    """What others write into the run folder is seen late: a network filesystem that keeps what it has read."""
    stale_s = world.chance.choice((1.0, 3.0, 30.0))
    world.note(f"the supervisor reads what is {stale_s} s old")
    world.stale_until_s = world.timeline.now_s + stale_s


def jump_clock(world: World) -> None:
    """The clocks of all nodes jump."""
    by_s = world.chance.choice((-3600.0, -5.0, 5.0, 3600.0, 86_400.0))
    world.note(f"clocks jump by {by_s} s")
    world.ahead_s, world.has_jumped = world.ahead_s + by_s, True


# what only Slurm does


def preempt(world: World) -> None:
    """The job is preempted."""
    if world.slurm is not None and world.job is not None and world.job.state == "RUNNING":
        world.slurm.preempt(world.job, world.chance.choice((5, 30, 30, 120)))


def requeue_job(world: World) -> None:
    """An administrator requeues the job."""
    if world.slurm is not None and world.job is not None and world.job.state == "RUNNING":
        world.note("an administrator requeues the job")
        world.slurm.requeue(world.job)


def lose_controller(world: World) -> None:
    """The controller does not answer the next commands, or does what it is asked for and does not say so."""
    if world.slurm is not None:
        world.slurm.errs = True
        world.slurm.mood = world.chance.choice(("silent", "silent", "late"))
        world.slurm.mood_lasts = world.chance.choice((1, 2, 3, 5, 12, 40))
        world.note(f"the controller is {world.slurm.mood} for {world.slurm.mood_lasts} commands")


def exclude_node(world: World) -> None:
    """A user puts a node on the exclusion list, and has the run go on elsewhere; any node, while the job waits."""
    if world.slurm is None or world.excluded | world.excluded_next or not world.slurm.mine():
        return
    is_running = world.job is not None and world.job.state == "RUNNING"
    host = world.chance.choice(world.job.nodes if world.job is not None and is_running else world.slurm.nodes)
    exclude(world, host)
    if is_running:
        _request("REQUEUE")(world)


def exclude(world: World, host: str) -> None:
    """This node, whatever the run does."""
    world.note(f"a user excludes {host}")
    entry = ManualEntry(node=host, reason="a user's", who="user", at=world.wall_s(), until=None)
    ExclusionList(world.config.exclusions.path).exclude(entry)
    world.excluded_next.add(host)
    world.excluded_s = world.timeline.now_s


def forget(world: World) -> None:
    """MinJobAge: the controller forgets jobs that have ended; another run gets the next number."""
    if world.slurm is not None:
        world.note("the controller forgets jobs that are over")
        world.slurm.errs = True
        world.slurm.forget()
        world.slurm.submit("/another/run/job.sh", foreign=True)


def give_number_again(world: World) -> None:
    """The controller was restored from an older state: the job is not in it, and another run gets its number."""
    slurm, job = world.slurm, world.job
    newest = slurm is not None and str(slurm.state.next_id - 1)
    if slurm and job and job.job_id == newest and slurm.state.jobs.get(newest) is job and job.state == "RUNNING":
        world.note(f"the controller has lost job {job.job_id}, and gives its number again")
        slurm.errs = True
        slurm.lose_job(job, after_s=world.chance.choice((3.0, 60.0)))
        slurm.submit("/another/run/job.sh", foreign=True)


def look_in_between(world: World) -> None:
    """Cron looks while everything goes on."""
    if world.slurm is not None and not world.is_full and world.silent_until_s < world.timeline.now_s:
        slurm.look(world)
        if world.chance.random() < 0.5:
            slurm.look(world, "login2")


def kill_batch_script(world: World) -> None:
    """The batch script is killed as a whole, supervisor and guardian: nobody says how it ended."""
    if world.slurm is not None and world.job is not None:
        world.note("SIGKILL for the batch script")
        world.kill_supervisor(by_slurm=True)


def kill_cron_in_its_work(world: World) -> None:
    """Cron is killed, before one of the next things that it changes."""
    world.cron_killed_at = world.chance.randrange(1, 14)


def hold_job(world: World) -> None:
    """The next job that is requeued is held: requeued too often (MaxBatchRequeue), or by its user for a while."""
    if world.slurm is not None:
        world.slurm.holds = world.chance.choice((HELD_FOR_GOOD, slurm.HELD_BY_USER))


def fail_prolog(world: World) -> None:
    """The Prolog fails on a node when the job begins there the next time, and Slurm holds the job."""
    if world.slurm is not None:
        host = world.chance.choice(world.slurm.nodes)
        world.accusable.add(("launch failed", host))
        world.slurm.sick.add(host)


def _owner(world: World) -> tuple[Owner, slurm.Job] | None:
    """Who has the run, and its job, while it trains; None at its begin, and at its end."""
    supervisor, job = world.supervisor, world.job
    is_there = supervisor is not None and supervisor.alive and not supervisor.stopped and world.folder_is_well
    if world.slurm is None or job is None or not is_there or (owner := world.run.owner()) is None:
        return None
    is_it = (owner.job, owner.restart, owner.generation) == (job.job_id, job.restarts, world.newest)
    newest = [event for event in world.events() if event.event in (EventName.ATTEMPT_STARTED, EventName.DECISION)][-1:]
    is_stopped = [event.details.get("action") for event in newest] == ["stop"]  # a start that follows trains nothing
    return (owner, job) if is_it and not is_stopped else None


def take_place(world: World) -> None:
    """Slurm has lost sight of the batch host, and started the job elsewhere. That start has taken the run over, and is
    gone without a word; the one before it lives on, until its node registers again."""
    found, supervisor, controller = _owner(world), world.supervisor, world.slurm
    if found is None or controller is None or found[1].state != "RUNNING" or found[1].preempted:
        return
    owner, job = found
    job.restarts += 1
    world.fenced, world.fenced_s, world.fence = supervisor, world.timeline.now_s, owner.generation + 1
    world.is_record_spoiled = True
    world.note(f"job {job.job_id} was started elsewhere, as generation {world.fence}, and is gone")
    attempt = Attempt(job=job.job_id, restart=job.restarts)
    with world.run.lock():
        world.run.take_over(
            replace(owner, generation=world.fence, restart=job.restarts, cycle=0, host="n9", birth="gone")
        )
    world.run.journal(attempt).append(EventName.ATTEMPT_STARTED, generation=world.fence, cluster="slurm", host="n9")
    controller.end(job, "NODE_FAIL")

    def register() -> None:
        if world.supervisor is supervisor:
            world.kill_supervisor(by_slurm=True)
        for agent in world.agents:
            if agent.job is job and agent.is_there and agent.restarts < attempt.restart:
                agent.die()

    world.timeline.call_later(world.chance.uniform(30.0, 90.0), register)


def start_beside(world: World) -> None:
    """One more supervisor begins while this one lives: in another job of the run, out of an older start of this job, on
    another of its nodes, or a second time in its batch script."""
    found, controller = _owner(world), world.slurm
    if found is None or controller is None or world.timeline.now_s < world.resumed_s + FRESH_S:
        return
    job = found[1]
    host = world.chance.choice((job.batch_host, job.batch_host, *job.nodes[1:], "n9"))
    restarts = max(0, job.restarts - world.chance.choice((0, 0, 1)))
    if host == "n9":
        job = controller.submit(job.script, foreign=True)
        job.state, job.node, job.batch_host, restarts = "RUNNING", host, host, 0
    world.note(f"one more supervisor begins in job {job.job_id} on {host}, restart {restarts}")
    facts = {**slurm.environment_of(job), "SLURM_RESTART_COUNT": str(restarts), "SLURMD_NODENAME": host,
             "SLURM_JOB_NUM_NODES": "1"}  # fmt: skip
    with inside(world.begin_cron(host)):
        Thread(world.timeline, _take_over, (world, facts), world.timeline.create_future()).go_on()


def _take_over(world: World, environment: dict[str, str]) -> None:
    supervisor, owner, own = world.supervisor, world.run.owner(), os.environ["SLURMD_NODENAME"]
    os.environ["SLURMD_NODENAME"] = environment["SLURMD_NODENAME"]
    try:
        claim = run_module._Claim(environment, secret=None, held=None)
        generation, _ = run_module._take_over(world.run, slurm.SlurmMachine(world, environment), claim)
    except SlurmftError as error:
        world.note(f"it refuses: {error.what}")
    else:
        lives = world.supervisor is supervisor and supervisor is not None and supervisor.alive
        if lives and not (supervisor.stopped or _is_left(world, owner, generation - 1, environment)):
            world.violate("one owner", f"job {environment['SLURM_JOB_ID']} takes the run over from one that lives")
        if not lives:  # what was killed is left to this one, which is gone as well
            world.begun.clear()
        if world.job is not None and world.job.state == "CANCELLED" and world.job.job_id != environment["SLURM_JOB_ID"]:
            world.stop_asked_s = math.inf  # another job of the run has begun, which its user has not cancelled
        world.is_record_spoiled = True
    finally:
        os.environ["SLURMD_NODENAME"] = own
        if world.slurm is not None and environment["SLURMD_NODENAME"] == "n9":
            del world.slurm.state.jobs[environment["SLURM_JOB_ID"]]
    world.crons.pop(PROCESS.get(), None)  # type: ignore[arg-type]


def _is_left(world: World, owner: Owner | None, generation: int, environment: dict[str, str]) -> bool:
    """Whether the owner of this generation was to be replaced: Slurm has put its job back, and another job of the run
    asks; or it was killed, and what acts in its place has not taken the run over yet."""
    if owner is None or owner.generation != generation:
        return generation == world.fence  # which is gone
    if environment["SLURM_JOB_ID"] != owner.job:
        return world.job is not None and world.job.state != "RUNNING"
    is_here = owner.host == environment["SLURMD_NODENAME"]
    return is_here and owner.pid not in [each.pid for each in world.living()]


def cancel_job(world: World) -> None:
    """Its user cancels the job."""
    jobs = [] if world.slurm is None or world.stop_asked_s else world.slurm.mine()
    if (
        world.slurm is not None and jobs and {job.job_id for job in jobs} <= set(world.run.jobs())
    ):  # else it cannot know
        world.note("scancel")
        world.stop_asked_s = world.timeline.now_s
        for job in jobs:
            world.slurm.cancel(job, world.slurm.user)


FAULTS: tuple[Fault, ...] = (
    kill_rank, kill_rank, kill_rank_and_connection, hang_rank, kill_agent, power_off, cut_off, cut_off, reset,
    slow_node, stop_agent, stall_disk, stop_supervisor, kill_supervisor, kill_supervisor_in_its_work,
    signal_supervisor, signal_agents, _request("REQUEUE"), _request("SAVE"),
    tear_connection, say_twice, fill_disk, fill_disk_in_its_work, read_stale, jump_clock,
)  # fmt: skip
OF_SLURM: tuple[Fault, ...] = (
    preempt, preempt, requeue_job, lose_controller, lose_controller, forget, give_number_again,
    look_in_between, exclude_node, kill_supervisor_in_its_work, kill_batch_script, kill_cron_in_its_work, hold_job,
    fail_prolog, take_place, start_beside,
)  # fmt: skip
RARE: tuple[Fault, ...] = (ask_for_stop, cancel_job)
RARELY = 0.02
"""Share of the rare ones: most lives are to be lived to their end."""


def drawn(chance: random.Random, *, most: int, in_slurm: bool = False) -> list[tuple[float, Fault]]:
    """The faults of a life, and when each comes: often close to the one before, or together with it."""
    at_s, faults = 0.0, []
    usual = FAULTS + OF_SLURM * 2 if in_slurm else FAULTS
    for _ in range(chance.randrange(most + 1)):
        at_s += chance.choice((0.0, 0.01, 0.1, 0.5, 2.0, 10.0, 40.0)) * chance.random()
        faults.append((at_s, chance.choice(RARE if chance.random() < RARELY else usual)))
    return faults


def in_its_work(fault: Fault, effects: int) -> Fault:
    """The fault, as soon as the supervisor has had so many more effects."""

    def wait(world: World) -> None:
        world.befalls[world.effects + effects] = fault

    wait.__name__ = f"{fault.__name__}_after_{effects}_effects"
    return wait


STEPS_IN: tuple[Fault, ...] = (ask_for_stop, cancel_job, requeue_job)


def stepped_in(chance: random.Random, befalls: list[tuple[float, Fault]], *, in_slurm: bool) -> tuple[float, Fault]:
    """A user ends the run, or an administrator puts its job back: at any moment, often soon after something else."""
    fault = chance.choice(STEPS_IN if in_slurm else STEPS_IN[:1])
    at_s = chance.choice([0.0, *(at_s for at_s, _ in befalls)])
    if chance.random() < 0.5:
        return at_s, in_its_work(fault, chance.randrange(1, 80))
    return at_s + chance.choice((0.1, 1.0, 10.0, 60.0)) * chance.random(), fault
