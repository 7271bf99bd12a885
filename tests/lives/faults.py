"""What befalls a life: drawn from its seed, told in its story, and over at some time, so that the run can end well."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from lives.nodes import Agent
from lives.world import World
from slurmft.supervisor import guardian

Fault = Callable[[World], None]


def _agent(world: World, *, may_be: str = "") -> Agent | None:
    """An agent that lives; its node may be accused of that from now on."""
    living = [agent for agent in world.agents if agent.is_there]
    agent = world.chance.choice(living) if living else None
    if agent is not None and may_be:
        world.accusable.add((may_be, agent.host))
    return agent


def _request(kind: str) -> Fault:
    def ask(world: World) -> None:
        world.note(f"a user asks for {kind}")
        (world.run.path / kind).write_text('{"who": "user"}')

    return ask


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
    world.note(f"the run folder is silent for {away_s} s")
    world.silent_until_s = world.timeline.now_s + away_s


def slow_node(world: World) -> None:
    """Messages of a node take long for a while."""
    if (agent := _agent(world)) is not None:
        host, late_s = agent.host, world.chance.choice((0.3, 1.2, 2.5))
        world.note(f"messages of {host} take {late_s} s")
        world.network.slow[host] = late_s
        world.timeline.call_later(world.chance.choice((1.0, 20.0)), world.network.slow.pop, host, None)


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
    if (agent := _agent(world, may_be="node lost")) is not None:
        world.note(f"SIGKILL for {agent.process.name}")
        agent.die()


def power_off(world: World) -> None:
    """A node is gone without a word; its power comes back later."""
    if (agent := _agent(world, may_be="node lost")) is not None:
        host, away_s = agent.host, world.chance.choice((1.0, 30.0, 90.0, 1000.0))
        world.note(f"{host} loses power for {away_s} s")
        world.network.cut(host)
        world.off.add(host)
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

        world.timeline.call_later(away_s, back)


def cut_off(world: World) -> None:
    """All packets of a node are dropped for a while."""
    if (agent := _agent(world, may_be="node lost")) is not None and agent.host not in world.off:
        host, away_s = agent.host, world.chance.choice((0.3, 2.0, 8.0, 15.0, 40.0, 100.0))
        world.note(f"{host} is cut off for {away_s} s")
        world.network.cut(host)

        def back() -> None:
            if host not in world.off:
                world.note(f"{host} is connected again")
                world.network.heal(host)

        world.timeline.call_later(away_s, back)


def reset(world: World) -> None:
    """A connection is reset."""
    if (agent := _agent(world)) is not None:
        world.note(f"the connections of {agent.host} are reset")
        world.network.reset(agent.host)


def stop_agent(world: World) -> None:
    """An agent, but not its workers, is stopped for a while."""
    if (agent := _agent(world, may_be="node lost")) is not None and not agent.process.stopped:
        away_s = world.chance.choice((0.5, 5.0, 20.0, 70.0))
        world.note(f"{agent.process.name} is stopped for {away_s} s")
        agent.process.stop()

        def go_on() -> None:
            world.note(f"{agent.process.name} goes on")
            agent.process.go_on()

        world.timeline.call_later(away_s, go_on)


def kill_supervisor(world: World) -> None:
    """SIGKILL for the supervisor."""
    world.kill_supervisor()


def kill_supervisor_in_its_work(world: World) -> None:
    """SIGKILL for the supervisor, before one of its next effects on the run folder."""
    world.killed_at = world.effects + world.chance.randrange(1, 40)


def stop_supervisor(world: World) -> None:
    """The supervisor's node does nothing for a while: a suspended job, a virtual machine that is moved."""
    supervisor = world.supervisor
    if supervisor is not None and supervisor.alive and not supervisor.stopped:
        away_s = world.chance.choice((0.5, 5.0, 20.0, 70.0, 200.0))
        world.note(f"the supervisor is stopped for {away_s} s")
        supervisor.stop()

        def go_on() -> None:
            world.note("the supervisor goes on")
            supervisor.go_on()

        world.timeline.call_later(away_s, go_on)


def signal_supervisor(world: World) -> None:
    """A signal that asks for a stop, as of a preemption."""
    if world.supervisor is not None and world.supervisor.alive:
        world.note("SIGTERM for the supervisor")
        guardian._note(signal.SIGTERM, None)


def signal_agents(world: World) -> None:
    """The same to all tasks of the step, once or twice."""
    world.note("SIGTERM for all agents")
    for agent in world.agents:
        if agent.is_there and not world.network.is_cut(agent.host):
            agent.note_signal("SIGTERM")


FAULTS: tuple[Fault, ...] = (
    kill_rank, kill_rank, kill_rank_and_connection, hang_rank, kill_agent, power_off, cut_off, cut_off, reset,
    slow_node, stop_agent, stall_disk, stop_supervisor, kill_supervisor, kill_supervisor_in_its_work,
    signal_supervisor, signal_agents, _request("REQUEUE"), _request("SAVE"),
)  # fmt: skip
RARE: tuple[Fault, ...] = (ask_for_stop,)
RARELY = 0.02
"""Share of the rare ones: most lives are to be lived to their end."""


def drawn(chance: random.Random, *, most: int) -> list[tuple[float, Fault]]:
    """The faults of a life, and when each comes: often close to the one before."""
    at_s, faults = 0.0, []
    for _ in range(chance.randrange(most + 1)):
        at_s += chance.choice((0.01, 0.1, 0.5, 2.0, 10.0, 40.0)) * chance.random()
        faults.append((at_s, chance.choice(RARE if chance.random() < RARELY else FAULTS)))
    return faults
