"""Simulated lives of runs: whatever befalls one, what must hold does; and a fault that is planted in us is found.

``make lives SEEDS=0-99999`` lives more of them, with more faults each.
"""

from collections.abc import Callable
from typing import Any

import pytest
from fake_slurm import HELD_FOR_GOOD

from lives.faults import (
    ask_for_stop,
    cancel_job,
    exclude,
    exclude_node,
    fail_prolog,
    fill_disk_in_its_work,
    give_number_again,
    jump_clock,
    kill_agent,
    kill_rank,
    kill_rank_and_connection,
    kill_supervisor,
    kill_supervisor_in_its_work,
    lose_controller,
    power_off,
    requeue_job,
    reset,
    say_twice,
    signal_agents,
    signal_supervisor,
    stop,
)
from lives.life import PATIENT, Bounds, Drawn, Scheduled, live, lived, shortest, story
from lives.planted import (
    KEEPING,
    PLANTED,
    SLURM,
    _controller,
    _drain,
    _hold,
    _look,
    fail_everywhere,
    kill_in_work,
    once,
    preempted,
    run_folder_is,
    suspended,
)
from lives.planted import REQUEUE as ask_for_requeue
from lives.world import World
from slurmft.storage.journal import EventName

BLOCKS, EACH = 10, 20


@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_befalls_a_run_it_ends_well(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        world = live(seed)
        assert not world.violations, f"seed {seed}\n{story(world)}"


def test_a_seed_is_one_life() -> None:
    assert live(221).story == live(221).story


def resumed(faults: Scheduled, **settings: Any) -> list[tuple[int, int]]:
    """Of each restart: the last step before it, and the one that it went on from."""
    world = lived(faults, peers_fail=False, **{**KEEPING, **settings})
    assert not world.violations, story(world)
    return [(before.step, after.began_at) for before, after in zip(world.trainings, world.trainings[1:], strict=False)]


@pytest.mark.parametrize("seed", range(25))
def test_a_connection_that_breaks_at_the_worst_moment_costs_no_step(seed: int) -> None:
    """The survivors were killed without having been asked for their state: their connection was away for 0.2 s."""
    [(before, after)] = resumed([(9.0, kill_rank_and_connection)], seed=seed, nodes=1, nproc_per_node=2)
    assert after == before


@pytest.mark.parametrize("fault", [power_off, kill_agent])
def test_a_lost_node_costs_no_step(fault: Callable[..., None]) -> None:
    (before, after), *_ = resumed([(9.0, fault)], nodes=2, nproc_per_node=1, elastic={"min_nodes": 1})
    assert after == before


def test_what_a_stop_has_saved_is_in_the_journal() -> None:
    """In every order in which the stop and the end of the attempt may notice that all ranks have ended."""
    for at_s in (5.0, 5.01, 5.1):
        world = lived([(at_s, ask_for_requeue)], nodes=2, nproc_per_node=1, **KEEPING)
        for event in (EventName.STOP_REQUESTED, EventName.STOP_SAVED):
            assert [line.split()[1] for line in world.journal if f" {event} " in line] == ["local-1.0.0"], story(world)


def test_a_node_that_comes_back_while_another_is_waited_for_keeps_its_state() -> None:
    """It was told to kill its workers as soon as it was there, and they had what nobody else had."""

    def cut(host: str, seconds: float) -> Callable[[World], None]:
        def fault(world: World) -> None:
            world.accusable.add(("node lost", host))
            world.network.cut(host)
            world.timeline.call_later(seconds, world.network.heal, host)

        return fault

    faults = [(8.5, cut("n0", 15.0)), (9.0, cut("n1", 90.0))]
    settings = {**KEEPING, "fault_tolerance": {**PATIENT, "agent_timeout_s": 10.0}}
    [(before, after)] = resumed(faults, nodes=2, spare_nodes=1, nproc_per_node=1, **settings)
    assert after == before


@pytest.mark.parametrize("effect", range(26, 37))
def test_a_disk_that_fills_up_within_the_begin_of_an_attempt_is_waited_for(effect: int) -> None:
    """Full at its sign of life, which was an error of Python's: the batch script ended, and nothing went on."""

    def fill(world: World) -> None:
        world.full_at, world.full_s = world.effects + effect, 3.0

    faults = [(5.0, kill_rank), (5.01, fill)]
    world = lived(faults, until=40, nodes=1, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def test_a_guardian_does_nothing_to_the_job_that_has_got_its_number() -> None:
    """It took the identity of the job that had the number then, and set the begin time of another run's."""
    faults = [(1.4, give_number_again), (2.3, kill_supervisor)]
    world = lived(faults, until=40, nodes=1, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(4))
def test_a_start_knows_its_job_by_what_was_submitted(seed: int) -> None:
    """It took the identity of the job that had the number by then into the run folder, and cron waited for that one."""
    faults = [(0.04, give_number_again), (0.04, kill_supervisor)]
    world = lived(faults, until=40, seed=seed, nodes=2, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_cron_keeps_off_is_not_one_that_the_job_excludes_for_good(seed: int) -> None:
    """Its release of a held job did not say which they were. They were the user's from then on, and the job waited for
    ever, as too few nodes were left without them."""

    def exclude_one(world: World) -> None:
        assert world.slurm is not None
        exclude(world, next(node for node in world.slurm.nodes if node not in world.slurm.drained))

    faults = [(3.0, fail_everywhere), (4.0, requeue_job), (20.0, exclude_one), (20.0, fail_everywhere)]
    settings = {"nodes": 1, "spare_nodes": 2, "slurm": {"partition": "low"}}
    world = lived(faults, until=40, seed=seed, in_slurm=SLURM, **KEEPING, **settings)
    assert not world.violations, story(world)


def test_a_held_job_beside_its_successor_is_not_released() -> None:
    """It was requeued from outside when it had a successor, and a Prolog failed at the start that would have been
    superfluous: cron released it, and it went on with the run while the successor waited."""
    faults = [(5.0, fail_everywhere), (5.0, signal_supervisor), (6.5, requeue_job)]
    settings = {"slurm": {"partition": "low"}, "preemption": {"continue_by": "resubmit"}}
    world = lived(faults, until=60, in_slurm=SLURM, **KEEPING, **settings)
    assert not world.violations, story(world)
    assert all(any(each in line for line in world.story) for each in ("job 1 cannot start", "job 2 starts")), story(
        world
    )


def test_cron_goes_on_with_a_successor_that_the_run_does_not_know() -> None:
    """The batch script was killed when sbatch had answered, and its successor could not start: cron requeued the job
    before it as well."""

    def kill_after_sbatch(world: World) -> None:
        world.killed_after, world.killed_whole = "sbatch --parsable", True

    faults = [(5.0, kill_after_sbatch), (5.0, fail_everywhere), (5.0, signal_supervisor)]
    settings = {"slurm": {"partition": "low"}, "preemption": {"continue_by": "resubmit"}}
    world = lived(faults, until=60, in_slurm=SLURM, **KEEPING, **settings)
    assert not world.violations, story(world)
    assert "job 2 cannot start" in (told := story(world)) and "job 2 starts" in told, told


@pytest.mark.parametrize("full_s", [20.0, 100.0])
def test_a_stop_that_no_journal_could_take_is_one(full_s: float) -> None:
    """Cron saw an attempt without a decision, and put the job back."""
    faults = [(3.0, ask_for_stop), (3.0, run_folder_is("full", full_s))]
    world = lived(faults, until=60, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)
    assert world.starts == [1]


def test_a_job_that_is_cancelled_while_it_starts_trains_nothing() -> None:
    """Its steps began after Slurm's signal to all of them, and ran until KillWait was over."""
    world = lived([(0.2, cancel_job)], until=60, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)
    assert world.starts == []


def test_a_supervisor_whose_job_was_lost_forbids_nothing_to_another_run() -> None:
    """Asked whether Slurm would requeue it, it heard of another run's job, and switched the requeue of that one off."""
    faults = [(2.0, requeue_job), (14.0, give_number_again), (15.0, ask_for_requeue)]
    world = lived(faults, until=60, nodes=1, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def test_agents_hear_of_an_attempt_that_is_over_and_waits_for_the_run_folder() -> None:
    """Stopped while its start waited for a silent folder, it sent no more pings, and its agents ended."""
    settings = {**KEEPING, "fault_tolerance": {**PATIENT, "supervisor_lease_s": 30.0}}
    world = lived([(0.5, run_folder_is("silent", 100.0)), (21.0, signal_agents)], until=20, nodes=3, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("at_s", [1.2, 1.3, 1.4, 1.5])
def test_a_stop_outlives_a_supervisor_that_could_not_tell_slurm_yet(at_s: float) -> None:
    """The request was taken before the requeue was switched off: the start that Slurm made next trained on."""
    faults = [(0.02, preempted(30)), (0.05, ask_for_stop), (at_s, suspended(70.0))]
    world = lived(faults, until=60, in_slurm=SLURM, nodes=1, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_stopped_while_it_waits_is_not_moved_to_other_nodes_first(seed: int) -> None:
    """On a node that it was to keep off it was requeued, and stopped when it had waited once more."""
    faults = [(5.0, requeue_job), (6.0, ask_for_stop), (9.0, exclude_node)]
    world = lived(faults, until=60, seed=seed, nodes=2, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def test_cron_does_not_bring_back_a_stopped_run_whose_job_is_held_for_good() -> None:
    """Slurm had requeued it by itself, and could not be told that the run was not to go on."""
    faults = [(4.0, _controller("silent", 12, at="scontrol update")), (4.0, _hold(HELD_FOR_GOOD)), (5.0, ask_for_stop),
              (5.0, preempted(60))]  # fmt: skip
    slurm = {**SLURM, "requeues_early": True}
    world = lived(faults, until=60, nodes=1, in_slurm=slurm, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def test_a_successor_whose_sbatch_got_no_answer_does_not_train_after_a_stop() -> None:
    """Slurm has requeued the job before it as well, and that start has taken the user's request."""
    faults = [(0.0, kill_supervisor_in_its_work), (0.06, preempted(30)), (2.44, fill_disk_in_its_work),
              (2.52, lose_controller), (11.77, ask_for_stop)]  # fmt: skip
    resubmitting = {"preemption": {"continue_by": "resubmit", "signal_lead_s": 20}, "slurm": {"partition": "low"}}
    world = lived(faults, until=60, seed=8699, nodes=3, in_slurm=SLURM, **{**KEEPING, **resubmitting})
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_of_which_slurm_cannot_be_told_outlives_starts_that_cannot_ask_either(seed: int) -> None:
    """The newest time at which the job was queued, as far as it was known, was that of an earlier start."""

    def leave(world: World) -> None:
        assert world.slurm is not None
        world.slurm.errs, world.slurm.mood, world.slurm.mood_lasts = True, "late", 40

    is_stopped = once(lambda world: world.events()[-1].details.get("action") == "stop", preempted(5))
    faults = [(5.0, requeue_job), (9.0, ask_for_stop), (9.0, leave), (9.0, is_stopped)]
    slurm = {**SLURM, "requeues_early": True}
    world = lived(faults, until=60, seed=seed, nodes=1, in_slurm=slurm, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("effect", range(1, 26))
def test_a_start_whose_disk_fills_up_while_it_takes_the_run_over_is_not_its_own_successor(effect: int) -> None:
    """It tried again, and found the run taken over by itself, in a job that Slurm had lost."""

    def fill(world: World) -> None:
        world.full_at, world.full_s = world.effects + effect, 0.5

    faults = [(0.08, give_number_again), (0.12, fill)]
    world = lived(faults, until=20, in_slurm=SLURM, nodes=2, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_is_held_is_released_by_one_cron(seed: int) -> None:
    """Two that looked at once both released it: the node had refused it twice, and its releases were spent in half."""
    faults = [(4.0, fail_prolog), (5.0, requeue_job), (20.0, _look("login")), (20.0, _look("login2"))]
    world = lived(faults, until=60, seed=seed, nodes=3, in_slurm=SLURM, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("effect", range(24, 36))
def test_a_restart_whose_disk_fills_up_while_it_takes_the_run_over_does_not_refuse_itself(effect: int) -> None:
    """It tried again, found itself as the newer owner, and the run ended."""

    def fill(world: World) -> None:
        world.full_at, world.full_s = world.effects + effect, 0.3

    world = lived([(5.0, kill_rank), (5.01, fill)], until=40, nodes=1, **KEEPING)
    assert not world.violations, story(world)


def test_a_run_that_is_complete_is_so_before_its_agents_have_ended() -> None:
    """One that ended slowly had the mark of it wait, until Slurm ended the job."""

    def end_job(world: World) -> None:
        assert world.slurm is not None and world.job is not None
        world.network.slow[world.job.nodes[-1]] = 2.5
        world.slurm.errs = True
        world.slurm.lose_job(world.job, after_s=1.5)

    faults = [(1.0, once(lambda world: world.saved == world.until, end_job))]
    world = lived(faults, until=20, in_slurm=SLURM, nodes=1, spare_nodes=1, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def away(world: World) -> None:
    """n1 cannot be reached any more."""
    world.accusable |= {("node lost", "n1"), ("hang", "n1")}
    world.network.cut("n1")


def test_an_agent_that_was_stopped_ends_within_its_lease() -> None:
    """What it had not read yet was heard as of now, and the time for which it was stopped was added to that."""

    def stop(world: World) -> None:
        world.agents[1].process.stop()
        world.timeline.call_later(70.0, world.agents[1].process.go_on)

    settings = {**KEEPING, "fault_tolerance": {**PATIENT, "supervisor_lease_s": 30.0}}
    faults = [(4.0, stop), (9.0, away), (9.0, ask_for_stop)]
    world = lived(faults, until=60, nodes=2, nproc_per_node=1, **settings, elastic={"min_nodes": 1})
    assert not world.violations, story(world)


@pytest.mark.parametrize("at_s", [5.0, 5.1, 5.2, 5.3, 5.4, 5.5])
def test_a_supervisor_that_was_stopped_notices_a_lost_node_in_time(at_s: float) -> None:
    """As the agent: a report that had waited for it was heard after it had gone on, and for so long again."""
    faults = [(at_s, suspended(40.0)), (44.9, away)]
    settings = {**KEEPING, "elastic": {"min_nodes": 1}, "bounds": Bounds(within_s=115.0)}
    world = lived(faults, until=400, nodes=2, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


def test_agents_whose_lease_was_over_while_their_supervisor_was_stopped_are_not_lost_nodes() -> None:
    """One that was on the same node, and was stopped as well, was left: all others were taken for lost."""

    def stop(world: World) -> None:
        world.agents[0].process.stop()
        world.timeline.call_later(70.0, world.agents[0].process.go_on)

    settings = {**KEEPING, "fault_tolerance": {**PATIENT, "supervisor_lease_s": 30.0}}
    world = lived([(8.0, suspended(70.0)), (8.0, stop)], until=60, nodes=3, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(3))
def test_a_connection_that_breaks_before_its_supervisor_is_stopped_is_no_lost_node(seed: int) -> None:
    """The second that it had to come back was over when the supervisor went on."""
    faults = [(5.0, reset), (5.1, suspended(5.0))]
    world = lived(faults, until=60, seed=seed, nodes=1, nproc_per_node=1, **KEEPING)
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(3))
def test_a_connection_that_breaks_while_another_agent_is_lost_at_the_start_is_no_lost_node(seed: int) -> None:
    """It had a moment to come back in any other case."""

    def kill(world: World) -> None:
        world.accusable |= {("crash", "n0"), ("agent lost", "n0")}
        world.agents[0].die()
        world.timeline.call_later(0.95, world.network.reset, "n1")

    faults = [(0.1, once(lambda world: world.events()[-1].event == EventName.AGENTS_READY, kill))]
    settings = {**KEEPING, "elastic": {"min_nodes": 1}, "spare_nodes": 1}
    world = lived(faults, until=60, seed=seed, nodes=2, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(3))
def test_agents_that_end_together_while_their_workers_start_are_no_lost_nodes(seed: int) -> None:
    """The end of the first was still to be looked into when the last connection broke: all nodes were lost then."""

    def kill_both(world: World) -> None:
        world.accusable |= {(kind, each.host) for each in world.agents for kind in ("crash", "agent lost")}
        world.agents[1].die()
        world.timeline.call_later(0.9, world.agents[0].die)

    faults = [(0.1, once(lambda world: world.events()[-1].event == EventName.AGENTS_READY, kill_both))]
    settings = {**KEEPING, "elastic": {"min_nodes": 1}}
    world = lived(faults, until=40, seed=seed, nodes=2, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(4))
def test_a_requeue_beside_a_successor_of_a_killed_supervisor_is_no_second_continuation(seed: int) -> None:
    """Its guardian left the run to that requeue, and the successor waited beside."""
    faults = [(0.01, signal_supervisor), (1.14, requeue_job), (1.44 + 0.1 * seed, kill_supervisor)]
    settings = {**KEEPING, "slurm": {"partition": "low"}, "preemption": {"continue_by": "resubmit"}}
    world = lived(faults, until=60, seed=seed, in_slurm=SLURM, nodes=2, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("effect", range(12, 22))
def test_an_end_that_is_judged_twice_spends_one_retry(effect: int) -> None:
    """Its supervisor was killed between the verdict and the decision: both verdicts counted from then on."""

    def kill_soon(world: World) -> None:
        world.killed_at = world.effects + effect

    faults = [(2.5, kill_rank), (2.5, kill_soon), (4.5, kill_rank), (6.5, kill_rank)]
    section = {**PATIENT, "num_in_job_restarts": 0, "retry_delay_s": 0}
    settings = {"checkpoint": {"interval_steps": 10, "just_in_time": False}, "fault_tolerance": section}
    world = lived(faults, until=20, nodes=1, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_that_is_started_again_while_slurm_takes_its_time_is_no_end(seed: int) -> None:
    """All had ended when Slurm was asked why; when it answered, the next agent's ranks trained, and were killed."""

    def kill(world: World) -> None:
        assert world.slurm is not None
        world.slurm.errs, world.slurm.mood, world.slurm.mood_lasts = True, "late", 3
        world.timeline.call_later(0.004, kill_agent, world)

    faults = [(0.51, once(lambda world: world.agents[0].is_connected, kill))]
    world = lived(faults, until=60, seed=seed, in_slurm=SLURM, nodes=1, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def test_ranks_that_are_started_after_another_has_failed_are_ended() -> None:
    """The order came by a new connection, when the others had been killed already: they waited for these for ever."""

    def cut(world: World) -> None:
        world.accusable |= {("node lost", "n1"), ("hang", "n1"), ("crash", "n0")}
        world.network.cut("n1")
        world.timeline.call_later(2.0, world.agents[0].end_worker, 0, -9)
        world.timeline.call_later(30.0, world.network.heal, "n1")

    faults = [(0.1, once(lambda world: world.events()[-1].event == EventName.AGENTS_READY, cut))]
    settings = {**KEEPING, "fault_tolerance": {**PATIENT, "agent_timeout_s": 10.0}}
    world = lived(faults, until=60, peers_fail=False, nodes=2, nproc_per_node=1, **settings)
    assert not world.violations, story(world)


def test_the_lease_of_an_agent_that_was_stopped_while_it_began_is_not_over() -> None:
    """It ended when it went on, and had not looked for its supervisor yet."""

    def stop_first(world: World) -> None:
        world.accusable.add(("node lost", world.agents[0].host))
        stop(world, world.agents[0], 70.0)

    settings = {**KEEPING, "fault_tolerance": {**PATIENT, "supervisor_lease_s": 60.0}}
    world = lived([(0.01, stop_first)], until=60, nodes=1, bounds=Bounds(most_agents=1), **settings)
    assert not world.violations, story(world)


def test_a_stop_ends_a_run_whose_successor_waits_for_a_job_that_is_held_for_good() -> None:
    """Cron left both of them alone, since a stop was asked for, and neither ever began or ended."""
    has_successor = once(lambda world: world.events()[-1].event == EventName.RESUBMITTED, requeue_job)
    faults = [(4.0, _hold(HELD_FOR_GOOD)), (5.0, ask_for_requeue), (5.0, has_successor), (15.0, ask_for_stop)]
    settings = {**KEEPING, "slurm": {"partition": "low"}, "preemption": {"continue_by": "resubmit"}}
    world = lived(faults, until=60, in_slurm=SLURM, nodes=1, **settings)
    assert not world.violations, story(world)
    assert world.run.done() is None


def test_cron_finds_a_successor_of_which_a_full_disk_has_taken_nothing() -> None:
    """It requeued the job before it, and both of them waited."""
    faults = [(4.9, run_folder_is("full", 60.0)), (5.0, ask_for_requeue), (5.0, _drain(150.0))]
    settings = {**KEEPING, "slurm": {"partition": "low"}, "preemption": {"continue_by": "resubmit"}}
    world = lived(faults, until=60, in_slurm=SLURM, nodes=1, **settings)
    assert not world.violations, story(world)


@pytest.mark.parametrize("effects", range(1, 26, 2))
def test_a_batch_script_that_is_killed_while_it_begins_is_brought_back(effects: int) -> None:
    """With the run taken over and no line of it in the journal yet, cron took it for none that had begun."""
    faults = [(0.0, kill_in_work(effects)), (5.0, ask_for_requeue)]
    world = lived(faults, until=30, in_slurm=SLURM, nodes=1, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


@pytest.mark.parametrize("effects", range(1, 20, 2))
def test_a_run_whose_batch_script_is_killed_when_all_is_done_is_complete(effects: int) -> None:
    """Killed between the decision and the mark, it was neither complete nor brought back."""
    faults = [(1.0, once(lambda world: world.saved == world.until, kill_in_work(effects)))]
    world = lived(faults, until=20, in_slurm=SLURM, nodes=1, **KEEPING, slurm={"partition": "low"})
    assert not world.violations, story(world)


def test_a_life_that_fails_is_told_with_the_faults_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED["nodes are not asked for their state"].plant(monkeypatch)
    befalls = [(1.0, say_twice), (3.0, jump_clock), (5.0, kill_rank), (9.0, say_twice)]
    drawn = Drawn(befalls, 60, None, {**KEEPING, "nodes": 2, "nproc_per_node": 1})
    found = next(filter(None, (shortest(drawn, seed=seed) for seed in range(20))))
    assert [fault for _, fault in found] == [kill_rank]
