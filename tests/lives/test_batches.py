"""Simulated lives of batches: whatever befalls one, each of its requests is answered once."""

import pytest

from lives.batches import BATCH, BatchWorld, hang_all, life_of, sicken
from lives.faults import exclude_node, kill_agent, kill_rank, requeue_job, reset, take_place
from lives.life import Bounds, Scheduled, lived, story
from lives.planted import REQUEUE, SLURM, run_folder_is, suspended
from lives.world import World

SEEDS = 12


def life(faults: Scheduled, **settings: object) -> World:
    world = lived(faults, kind=BatchWorld, **{**BATCH, "until": 20, **settings})  # type: ignore[arg-type]
    assert not world.violations, story(world)
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_befalls_a_batch_each_request_is_answered_once(seed: int) -> None:
    drawn = life_of(seed)
    world = drawn.lived(drawn.faults, seed=seed)
    assert not world.violations, f"seed {seed}\n{story(world)}"


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_of_a_revoked_lease_that_waits_for_the_disk_costs_no_other_one(seed: int) -> None:
    """It was written last, and what the lease after it had answered by then was never reported."""
    life([(0.5, run_folder_is("full", 5.0)), (3.5, reset)], seed=seed, nodes=1)


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_that_is_to_show_that_it_lives_is_not_asked_a_request_again(seed: int) -> None:
    """The smallest request had the key of a real one: the text of its answer was that of the other one's beginning."""
    life([(3.0, hang_all)], seed=seed, nodes=1)


@pytest.mark.parametrize("seed", range(6))
def test_an_agent_that_is_back_at_once_is_worked_with(seed: int) -> None:
    """Where it had reported before it was looked whether it is begun again, all agents counted as ended."""
    world = life([(2.5, kill_agent)], seed=seed, nodes=1)
    assert world.starts == [1], story(world)


@pytest.mark.parametrize("seed", range(8))
def test_a_node_that_is_kept_off_answers_nothing(seed: int) -> None:
    """The journal said so, and its agent was taken in as all others."""
    faults = [(4.0, requeue_job), (7.0, exclude_node)]
    life(faults, seed=seed, nodes=2, spare_nodes=1, until=30, in_slurm=SLURM, slurm={"partition": "low"})


@pytest.mark.parametrize("seed", range(4))
def test_what_an_engine_has_written_counts_although_it_dies_while_the_disk_is_full(seed: int) -> None:
    """It was not in flight any more, and looked at once, when it could not be made durable."""
    faults = [(4.0, run_folder_is("full", 5.0)), (4.5, kill_rank)]
    life(faults, seed=seed, nodes=1, inference={"concurrency": 4, "commit_interval_s": 1.0})


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_fails_everything_gives_no_request_an_error(seed: int) -> None:
    """What another one had answered at the first of its tries was taken for a proof that the engine works."""
    life([(3.0, sicken)], seed=seed, nodes=1, inference={"concurrency": 4})


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_whose_last_answers_are_found_on_the_disk_ends(seed: int) -> None:
    """They were not reported, and whoever waited for the end was not told that they counted."""

    def kill_at_the_end(world: World) -> None:
        assert isinstance(world, BatchWorld)
        is_written = len(world.computed) == world.until
        kill_agent(world) if is_written else world.timeline.call_later(0.01, kill_at_the_end, world)

    life([(1.0, kill_at_the_end)], seed=seed, nodes=1, inference={"concurrency": 4, "commit_interval_s": 1.0})


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_in_which_a_connection_breaks_takes_no_longer(seed: int) -> None:
    """Told once more to finish, the agent took that for what it did already, and had begun anew."""
    faults = [(5.0, REQUEUE), (5.3, reset)]
    world = life(faults, seed=seed, nodes=1, until=40, answer_s=4.0, bounds=Bounds(within_s=120.0))
    assert len(world.starts) == 2, story(world)


@pytest.mark.parametrize("seed", range(4))
def test_engines_that_are_killed_at_the_end_of_an_attempt_make_no_request_a_poisoned_one(seed: int) -> None:
    """One that had killed an engine, and was tried alone on the next one just then, was given up for good."""

    def kill_a_busy_one(world: World) -> None:
        assert isinstance(world, BatchWorld)
        busy = [(agent, worker) for agent in world.agents for worker in agent.workers.values()
                if world.in_hand.get(id(worker))]  # fmt: skip
        world.accusable.add(("crash", busy[-1][0].host))
        busy[-1][0].end_worker(busy[-1][1].rank, -11)

    def lose_agent(world: World) -> None:
        world.accusable |= {(kind, world.agents[1].host) for kind in ("crash", "agent lost")}
        world.agents[1].die()

    faults = [(3.0, kill_a_busy_one), (3.0, take_place), (3.01, suspended(5.0)), (4.0, lose_agent)]
    settings = {"answer_s": 0.3, "in_slurm": SLURM, "slurm": {"partition": "low"}, "inference": {"concurrency": 1}}
    life(faults, seed=seed, nodes=3, until=60, **settings)


def test_a_seed_is_one_life() -> None:
    drawn = life_of(7)
    assert drawn.lived(drawn.faults, seed=7).story == drawn.lived(drawn.faults, seed=7).story
