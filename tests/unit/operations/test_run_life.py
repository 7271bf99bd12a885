"""Who owns a run, and who continues it, when Slurm, cron, people and old processes disagree."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import ALIVE, HELD_FOR_GOOD, UNREACHABLE_CLUSTER, WAITING
from run_life import StartOfAJob, World

from slurmft.errors import LaunchError, RunBusy, SlurmError
from slurmft.operations import rescue
from slurmft.operations.control import overviews
from slurmft.policy.job_identity import JobIdentity
from slurmft.policy.verdict import Cause
from slurmft.scheduler import own_jobs, slurm
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.run_folder import RunFolder


@pytest.fixture
def world(monkeypatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.close()


def running(world: World):
    world.submit()
    [job] = world.jobs("PENDING")
    start = world.begin(job)
    assert start.is_training and start.is_current
    return start


def events(world: World, name: str) -> list:
    return [event for event in world.run.journal().read() if event.event == name]


def settled(world: World) -> None:
    world.settle()
    world.check_settled()


def test_a_run_goes_through_the_queue_and_on(world):
    first = running(world)
    first.end(Cause.PREEMPTED)
    assert not first.is_alive
    settled(world)
    assert world.owner().restart == 1


def test_a_superseded_supervisor_ends_and_decides_nothing(world):
    """Its batch host was cut off, Slurm has requeued the job, and its workers' next save is fenced."""
    old = running(world)
    old.is_frozen = True
    world.slurm.requeue(world.jobs()[0], delay_s=0)
    new = world.begin(world.jobs()[0])
    old.is_frozen = False
    old.end(Cause.WORKER_ERROR)  # would be restarted in place
    assert not old.is_alive
    assert new.is_training and new.can_commit
    assert [event.event for event in world.run.journal().read() if event.attempt == str(old.cluster.attempt)][1:] == [
        "superseded"
    ]
    settled(world)
    assert world.owner() is new


def test_a_start_whose_node_was_given_up_leaves_the_job_to_the_start_that_runs_elsewhere(world):
    """That one has not come to take the run over: its batch script has just begun."""
    old = running(world)
    [job] = world.jobs("RUNNING")
    world.slurm.requeue(job, delay_s=0)
    world.slurm.start(job)
    assert (job.state, job.restarts) == ("RUNNING", 1)
    old.cluster.lost.add(old.host)
    old.end(Cause.NODE_LOST, progressed=False)
    assert not old.is_alive and len(events(world, "attempt started")) == 1, world.story()
    assert (job.state, job.restarts) == ("RUNNING", 1), world.story()
    assert [event.event for event in events(world, "left to slurm")] and not events(world, "requeueing")
    new = StartOfAJob(world, job)
    world.starts.append(new)
    new.begin()
    assert new.is_training
    settled(world)


def test_an_orphan_whose_newest_start_never_took_the_run_is_requeued(world):
    running(world)
    [job] = world.jobs("RUNNING")
    world.kill_starts_of(job)
    world.slurm.requeue(job, delay_s=0)
    world.slurm.start(job)
    job.batch_host = "gone"
    assert "is requeued" in world.cron()[0]
    assert (job.state, job.restarts) == ("PENDING", 2)
    settled(world)


def test_a_start_that_was_superseded_before_it_began_does_not_take_the_run(world):
    world.submit()
    old = world.begin(world.jobs()[0], frozen=True)
    world.slurm.requeue(world.jobs()[0], delay_s=0)
    new = world.begin(world.jobs()[0])
    old.is_frozen = False
    old.begin()
    assert not old.is_alive and new.can_commit
    settled(world)


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_CLUSTERS": "elsewhere"}, {"SQUEUE_STATES": "PENDING"}, {"SQUEUE_USERS": "0"}],
    ids=lambda each: next(iter(each)),
)
def test_the_variables_of_a_crontab_make_no_second_job_and_no_stop(world, monkeypatch, variables):
    start = running(world)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world.advance(400)
    assert world.cron() == []
    assert isinstance(world.submit(), RunBusy)
    assert len(world.jobs()) == 1
    assert "will save and end" in world.stop()
    start.beat()
    assert not start.is_alive
    settled(world)


def test_a_supervisor_that_writes_is_not_rescued_although_its_job_is_gone(world):
    """The controller has lost its newest state; what its jobs have started is not dead yet."""
    world.slurm.write_state()
    start = running(world)
    world.slurm.lose_state()
    for _ in range(5):
        world.advance(20)
        assert world.cron() == []
    assert isinstance(world.submit(), RunBusy)
    assert "will save and end" in world.stop()
    world.run.take_request("KILL")
    world.is_stopped = False
    start.die()
    world.advance(100)
    assert "goes on as job" in world.cron()[0]


def test_a_claim_that_was_made_in_the_absence_of_a_supervisor_does_not_bind_it(world):
    """cron was told that the job is gone, and its own job has vanished since."""
    start = running(world)
    claim = world.run.ending(start.cluster.attempt)
    assert claim.take("cron")
    claim.settle("rescued as job 99")
    start.end(Cause.PREEMPTED)
    assert events(world, "claim overruled") and events(world, "requeued")
    settled(world)


def test_a_successor_that_waits_already_is_left_to_go_on(world):
    """A wrong rescue has submitted it: a requeue on top would make two."""
    start = running(world)
    other = world.slurm.submit(str(world.run.script), after=start.job_id)
    world.run.add_job(other.job_id)
    start.end(Cause.PREEMPTED)
    assert [job.job_id for job in world.jobs(*ALIVE, *WAITING)] == [other.job_id]
    settled(world)


def test_a_number_that_belongs_to_another_run_is_left_alone(world):
    """The controller was killed 20 s after a submission; the number went to another run's job."""
    world.slurm.write_state()
    start = running(world)
    start.die()
    world.slurm.lose_state()
    world.submit_another_run()
    theirs = world.slurm.state.jobs[start.job_id]
    assert theirs.script == "/another/run/job.sh"
    world.slurm.end(theirs, "COMPLETED")
    world.advance(100)
    assert "the run goes on as job 2" in world.cron()[0]
    settled(world)


def test_another_runs_job_that_waits_under_our_number_is_neither_cancelled_nor_begun(world):
    world.slurm.write_state()
    start = running(world)
    start.die()
    world.slurm.lose_state()
    world.submit_another_run()
    world.advance(100)
    assert "is not running" in world.stop()
    assert world.slurm.state.jobs[start.job_id].state == "PENDING"
    settled(world)


def test_a_supervisor_whose_number_went_to_another_run_submits_a_successor_without_waiting_for_that(world):
    world.slurm.write_state()
    start = running(world)
    world.slurm.lose_state()
    world.submit_another_run()
    start.end(Cause.PREEMPTED)
    assert events(world, "resubmitted")
    assert not any("afterany" in call for call in world.slurm.calls)
    settled(world)


def test_a_controller_that_goes_back_gives_the_same_restart_twice(world):
    first = running(world)
    world.slurm.write_state()
    first.end(Cause.PREEMPTED)
    world.advance(10)
    second = world.begin(world.jobs("PENDING")[0])
    assert second.restart == 1
    second.end(Cause.PREEMPTED)
    world.slurm.lose_state()  # the job is in its first start again, says the controller, and its node is gone
    world.slurm.requeue(world.jobs()[0], delay_s=0)
    third = world.begin(world.jobs()[0])
    assert third.restart == 1 and third.is_training
    third.end(Cause.PREEMPTED)
    settled(world)


def test_a_cancelled_job_stays_cancelled_after_slurm_has_forgotten_it(world):
    world.slurm.accounting = False
    running(world)
    world.scancel()
    assert world.cron() == []
    world.slurm.forget()
    world.advance(400)
    settled(world)
    assert events(world, "cancelled")


def test_a_rescue_whose_job_has_vanished_is_done_again(world):
    start = running(world)
    start.die()
    world.slurm.end(world.jobs()[0], "NODE_FAIL")
    world.slurm.forget()
    world.slurm.write_state()
    world.advance(100)
    assert "goes on as job 2" in world.cron()[0]
    world.slurm.lose_state()
    world.advance(100)
    world.cron()
    settled(world)


@pytest.mark.parametrize("trouble", ["", "no room for two", "a crash before the old one is cancelled"])
def test_a_job_that_slurm_holds_for_good_gives_way_to_another_one(world, monkeypatch, trouble):
    start = running(world)
    world.advance(10)
    start.end(Cause.PREEMPTED)
    (held,) = world.jobs("PENDING")
    held.reason, held.submitted = HELD_FOR_GOOD, held.submitted + 5  # the run has not seen it since
    monkeypatch.setattr(world.run, "script", Path(held.script))  # as of a sweep: its script is the job's
    submit, cancel = own_jobs.submit_script, own_jobs.cancel

    def only_alone(*args, **more):
        if world.jobs("PENDING"):
            raise SlurmError("sbatch: error: MaxSubmitJobs")
        return submit(*args, **more)

    def crash(job):
        monkeypatch.setattr(own_jobs, "cancel", cancel)
        raise KeyboardInterrupt

    if trouble == "no room for two":
        monkeypatch.setattr(own_jobs, "submit_script", only_alone)
    elif trouble:
        monkeypatch.setattr(own_jobs, "cancel", crash)
        with pytest.raises(KeyboardInterrupt):
            world.cron()
        assert held.state == "PENDING"
        assert "is cancelled" in world.cron()[0]
    if not trouble.startswith("a crash"):
        assert world.cron() == ["Slurm has requeued job 1 too often and holds it; the run goes on as job 2"]
    assert held.state == "CANCELLED"
    assert [job.job_id for job in world.jobs("PENDING")] == ["2"]
    assert world.cron() == []
    settled(world)


def test_cron_goes_on_with_the_next_run_whatever_one_does_to_it(world, monkeypatch):
    running(world)
    bad = RunFolder(world.folder / "bad")
    seen = []

    def broken(run, *_):
        seen.append(run.path.name)
        if run.path == bad.path:
            raise ValueError("its hostlist is none")

    monkeypatch.setattr(rescue, "_rescue", broken)
    monkeypatch.setattr(rescue, "_jobs_to_ask_about", lambda run: world.run.own_jobs())
    assert rescue.rescue([bad, world.run], "cron") == []
    assert seen == ["bad", "run"]


def test_a_run_of_a_cluster_that_cannot_be_asked_keeps_no_other_from_its_rescue(world, monkeypatch):
    monkeypatch.setattr(slurm, "available", lambda: True)
    start = running(world)
    world.slurm.lose_state()
    start.die()
    world.advance(100)
    far = RunFolder(world.folder / "far")
    far.create()
    far.add_job("7", JobIdentity(cluster=UNREACHABLE_CLUSTER, script="/far/job.sh", submitted=(1.0,)))
    (said,) = rescue.rescue([far, world.run], "cron")
    assert "goes on as job" in said
    with pytest.raises(SlurmError, match="known by database"):
        rescue.rescue([far], "cron")
    seen = {each.run: each.state for each in overviews([far, world.run])}
    assert seen == {"far": "unknown", "run": "waiting"}


# what Slurm holds because a node could not start it


@pytest.mark.parametrize("has_begun", [False, True], ids=["at its first start", "at a later one"])
def test_a_job_whose_prolog_failed_goes_on_elsewhere(world, has_begun):
    if has_begun:
        running(world).end(Cause.PREEMPTED)
    else:
        world.submit()
    [job] = world.jobs("PENDING")
    world.slurm.refuse(job, "n1")
    assert "slurmft requeue --rescue releases it" in overviews([world.run])[0].detail
    [line] = world.cron()
    assert line == f"job {job.job_id} was held by Slurm (launch failed requeued held); it is released, now without n1"
    assert "n1" in job.excluded.split(",")
    assert not job.is_held and job.begin <= world.slurm.now + 2
    found = ExclusionList(world.config.exclusions.path, 0o600).read().observations
    assert [(each.node, each.kind) for each in found] == [("n1", "launch failed")]
    assert events(world, "evidence")[0].details["message"] == f"it could not start job {job.job_id}: Prolog error"
    settled(world)


def test_a_node_is_accused_once_of_one_refusal(world):
    world.submit()
    [job] = world.jobs("PENDING")
    for node in ("n1", "n2"):
        world.slurm.refuse(job, node)
        assert len(world.cron()) == 1
        world.advance(1)
    assert [event.details["node"] for event in events(world, "evidence")] == ["n1", "n2"]


def test_a_job_is_released_a_few_times_and_then_its_owner_is_told(world):
    world.submit()
    [job] = world.jobs("PENDING")
    for node in ("n1", "n2", "n3"):
        world.slurm.refuse(job, node)
        assert len(world.cron()) == 1
        world.advance(10)
    world.slurm.refuse(job, "n4")
    error = world.cron()
    assert isinstance(error, LaunchError)
    assert "was refused by nodes 4 times in a row (now by n4: Prolog error)" in str(error)
    assert job.is_held
    world.slurm.drained.clear()
    job.reason = "None"
    world.begin(job).end(Cause.PREEMPTED)
    world.slurm.refuse(job, "n1")
    assert len(world.cron()) == 1, "it has begun in between"


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "job requeued in held state"])
def test_what_a_person_holds_stays_held(world, reason):
    running(world).end(Cause.PREEMPTED)
    [job] = world.jobs("PENDING")
    job.reason = reason
    assert world.cron() == []
    assert job.is_held
    assert "scontrol release lets it begin" in overviews([world.run])[0].detail


def test_a_node_that_was_drained_at_another_time_is_not_blamed(world):
    world.submit()
    [job] = world.jobs("PENDING")
    world.slurm.drained["n3"] = (world.slurm.now, "Prolog error")
    world.slurm.drained["n4"] = (world.slurm.now + 3600, "bad disk")
    world.advance(3600)
    world.slurm.requeue(job, reason="user env retrieval failed requeued held")
    assert world.cron() == ["job 1 was held by Slurm (user env retrieval failed requeued held); it is released"]
    assert not events(world, "evidence")
