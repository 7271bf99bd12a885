"""Directed lives of agents that outlive their supervisor: what the next one finds, and what that costs."""

from collections.abc import Callable
from typing import Any

import pytest

from lives import faults
from lives.batches import BatchWorld, leave_old_record, lose_secret, take_port, tear_record
from lives.faults import Fault, kill_supervisor
from lives.life import PATIENT, Bounds, Scheduled, lived, story
from lives.planted import SLURM, run_folder_is
from lives.world import World
from slurmft.storage.journal import EventName

LEASE_S = 30.0
SLOTS = 3
BATCH: dict[str, Any] = {"inference": {"concurrency": SLOTS, "hang_timeout_s": 20.0},
                         "fault_tolerance": {**PATIENT, "supervisor_lease_s": LEASE_S}}  # fmt: skip
IN_SLURM: dict[str, Any] = {"in_slurm": SLURM, "slurm": {"partition": "low"}}
HERE: dict[str, Any] = {}
WHERE = pytest.mark.parametrize("where", [HERE, IN_SLURM], ids=["here", "in Slurm"])


def answered(befalls: Scheduled, *, until: int = 40, nodes: int = 2, **settings: Any) -> BatchWorld:
    """The life of a batch, in which all must hold."""
    world = lived(befalls, until=until, nodes=nodes, kind=BatchWorld, **{**BATCH, **settings})
    assert not world.violations, story(world)
    assert isinstance(world, BatchWorld)
    return world


def told(world: World, event: EventName) -> list[str]:
    """Lines of the journal."""
    return [line for line in world.journal if f" {event} " in line]


def agent(number: int, act: Callable[[World, Any], None]) -> Fault:
    """Something befalls the agent of this node."""

    def fault(world: World) -> None:
        act(world, world.agents[number])

    return fault


def stopped(seconds: float) -> Callable[[World, Any], None]:
    """It does nothing for so long."""

    def act(world: World, one: Any) -> None:
        def go_on() -> None:
            world.network.healed_s[one.host] = world.timeline.now_s
            one.process.go_on()

        one.process.stop()
        world.timeline.call_later(seconds, go_on)

    return act


def cut_off(seconds: float) -> Callable[[World, Any], None]:
    """Nothing gets to its node, or from it, for so long."""

    def act(world: World, one: Any) -> None:
        world.accusable |= {("node lost", one.host), ("crash", one.host)}
        world.network.cut(one.host)
        world.timeline.call_later(seconds, world.network.heal, one.host)

    return act


@WHERE
@pytest.mark.parametrize("at_s", [1.0, 2.0, 3.3, 4.2, 5.0])
def test_a_killed_supervisor_costs_no_agent_and_no_engine(at_s: float, where: dict[str, Any]) -> None:
    world = answered([(at_s, kill_supervisor)], **where)
    assert (len(world.agents), world.engines) == (2, 2), story(world)
    # what engines had, and have answered until they were asked again
    assert sum(world.computed.values()) <= 40 + 2 * 2 * SLOTS, story(world)


@WHERE
def test_a_second_loss_costs_none_either_and_a_third_one_all(where: dict[str, Any]) -> None:
    world = answered([(3.0, kill_supervisor), (6.0, kill_supervisor)], until=100, **where)
    assert (len(world.agents), world.engines) == (2, 2), story(world)
    world = answered([(at_s, kill_supervisor) for at_s in (3.0, 6.0, 9.0)], until=100, **where)
    assert (len(world.agents), world.engines) == (4, 4), story(world)


@WHERE
@pytest.mark.parametrize("spoil", [tear_record, leave_old_record, take_port, lose_secret])
def test_agents_that_cannot_be_found_are_ended(spoil: Fault, where: dict[str, Any]) -> None:
    world = answered([(3.0, spoil), (3.1, kill_supervisor)], **where)
    assert len(world.agents) == 4, story(world)


def test_a_record_of_another_start_is_not_looked_at() -> None:
    """Of a job that was requeued, and whose folder is left: the agents' own is the newest start's."""
    befalls = [(3.0, faults._request("REQUEUE")), (25.0, kill_supervisor)]
    world = answered(befalls, until=200, **IN_SLURM)
    assert len(world.agents) == 4, story(world)


@WHERE
@pytest.mark.parametrize("at_s", [-0.05, 0.01, 0.3, 2.0])
def test_an_agent_that_ends_around_the_loss_is_begun_again(at_s: float, where: dict[str, Any]) -> None:
    """Nobody has seen its end: where it does not report within the lease, another one is started."""

    def die(world: World, one: Any) -> None:
        world.accusable.add(("agent lost", one.host))
        one.die()

    befalls = [(3.0, kill_supervisor), (3.0 + at_s, agent(1, die))]
    world = answered(befalls, until=300, bounds=Bounds(within_s=85.0), **where)
    assert len(world.agents) == 3, story(world)


@pytest.mark.parametrize("at_s", [-0.05, 0.01, 0.3, 2.0])
def test_an_engine_that_ends_around_the_loss_is_begun_again(at_s: float) -> None:
    world = answered([(3.0, kill_supervisor), (3.0 + at_s, agent(1, lambda _, one: one.end_worker(1, -9)))], until=100)
    assert (len(world.agents), world.engines) == (2, 3), story(world)


@WHERE
@pytest.mark.parametrize("seconds", [2.0, 20.0])
def test_an_agent_that_is_stopped_at_the_loss_keeps_its_engine(seconds: float, where: dict[str, Any]) -> None:
    world = answered([(2.9, agent(1, stopped(seconds))), (3.0, kill_supervisor)], until=300, **where)
    assert (len(world.agents), world.engines) == (2, 2), story(world)


@pytest.mark.parametrize("seconds", [2.0, 15.0])
def test_an_agent_that_is_cut_off_at_the_loss_keeps_its_engine(seconds: float) -> None:
    world = answered([(2.9, agent(1, cut_off(seconds))), (3.0, kill_supervisor)], until=300, **IN_SLURM)
    assert (len(world.agents), world.engines) == (2, 2), story(world)


@WHERE
@pytest.mark.parametrize("at_s", [5.0, 5.5, 6.0])
def test_agents_for_which_nothing_is_left_to_do_end_with_the_run(at_s: float, where: dict[str, Any]) -> None:
    """All was answered when the next supervisor came: it had taken the agents over, and left them to their lease."""
    answered([(at_s, kill_supervisor)], until=20, **where)


def test_an_agent_that_connects_when_the_others_have_ended_ends_too() -> None:
    """It was told nothing, and had its engine until its lease was over."""
    world = answered([(2.9, agent(1, stopped(15.0))), (3.0, kill_supervisor)], until=20)
    assert world.agents[1].code == 0, story(world)


@WHERE
@pytest.mark.parametrize("effect", [*range(14, 20), *range(22, 28)])
def test_a_supervisor_that_is_killed_before_its_attempt_is_in_the_journal_has_had_it(
    effect: int, where: dict[str, Any]
) -> None:
    """The next one had an attempt of the same number, in whose place a decision had been made already."""

    def kill_soon(world: World) -> None:
        world.killed_at = world.effects + effect

    answered([(3.0, kill_supervisor), (3.01, kill_soon)], until=100, **where)


@WHERE
def test_agents_whose_lease_is_over_before_the_run_folder_is_well_are_begun_again(where: dict[str, Any]) -> None:
    """The next supervisor listened to nobody, and put the job back into the queue: no agent could be started."""
    world = answered([(2.0, run_folder_is("full", 90.0)), (3.0, kill_supervisor)], **where)
    assert not told(world, EventName.REQUEUEING) + told(world, EventName.RESUBMITTING), story(world)
    assert len(world.agents) == 4, story(world)


def test_a_job_that_slurm_has_put_back_gets_its_begin_time_from_what_follows_its_supervisor() -> None:
    """It was to go on in the job, which began two minutes later."""
    befalls = [(3.0, faults.requeue_job), (3.2, kill_supervisor)]
    answered(befalls, bounds=Bounds(within_s=60.0), **IN_SLURM)


def test_a_guardian_that_gives_up_leaves_no_agent_behind() -> None:
    """Without Slurm they lived on, with their engines, beside those of the next start."""
    befalls = [(at_s, kill_supervisor) for at_s in (3.0, 6.0, 9.0, 12.0)]
    assert any("giving up" in line for line in answered(befalls, until=100).story)


def test_a_life_with_requests_is_one_life() -> None:
    befalls = [(2.9, agent(1, stopped(4.0))), (3.0, kill_supervisor)]
    assert answered(befalls).story == answered(befalls).story
