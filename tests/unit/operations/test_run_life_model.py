"""Any order of starts, ends, losses, people, cron and a Slurm that errs: one owner, one continuation, and a stop stays.

At every point at most one start can commit, none takes the run from a healthy one, and nothing is done to another run's
job. After everything has settled there is exactly one continuation, or none where the run was stopped or is finished.
"""

import pytest
from fake_slurm import ALIVE, WAITING
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from run_life import StartOfAJob, World

from slurmft.policy.verdict import Cause

ENDS = [Cause.PREEMPTED, Cause.WORKER_ERROR, Cause.HANG, Cause.NODE_LOST, Cause.TIME_LIMIT]
NOISE = [{"SLURM_CLUSTERS": "elsewhere"}, {"SQUEUE_STATES": "PENDING"}, {"SQUEUE_USERS": "4711"}, {}]
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
SHORT = settings(QUIET, max_examples=60, stateful_step_count=25, derandomize=True)
LONG = settings(QUIET, max_examples=2000, stateful_step_count=50)


class LifeOfARun(RuleBasedStateMachine):
    """One run, and everything that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world = World(self.patch)

    def teardown(self) -> None:
        try:
            self.clean_environment()
            self.world.settle()
            self.world.check_settled()
        finally:
            self.world.close()
            self.patch.undo()

    def clean_environment(self) -> None:
        for name in {name for each in NOISE for name in each}:
            self.patch.delenv(name, raising=False)

    def one_of(self, data: st.DataObject, starts: list[StartOfAJob]) -> StartOfAJob:
        return starts[data.draw(st.integers(0, len(starts) - 1), label="which")]

    # people

    @initialize()
    def submit_first(self) -> None:
        self.world.submit()
        self.world.begin(self.world.jobs(*WAITING)[0])

    @rule()
    def submit(self) -> None:
        self.world.submit()

    @rule()
    def stop(self) -> None:
        self.world.stop()

    @rule()
    def cancel(self) -> None:
        self.world.scancel()

    @precondition(lambda self: self.world.jobs("RUNNING"))
    @rule()
    def requeue(self) -> None:
        job = self.world.jobs("RUNNING")[0]
        self.world.slurm.requeue(job, delay_s=2)
        self.world.kill_starts_of(job)

    # Slurm

    @precondition(lambda self: any(map(self.world.slurm.can_start, self.world.jobs(*WAITING))))
    @rule(frozen=st.booleans())
    def start(self, frozen: bool) -> None:
        job = next(job for job in self.world.jobs(*WAITING) if self.world.slurm.can_start(job))
        self.world.begin(job, frozen=frozen)

    @rule(seconds=st.sampled_from([1, 20, 130, 400]))
    def pass_time(self, seconds: int) -> None:
        self.world.advance(seconds)
        if seconds >= 400:
            self.world.slurm.forget()

    @rule(mood=st.sampled_from(["silent", "late"]), lasts=st.integers(1, 4))
    def misbehave(self, mood: str, lasts: int) -> None:
        self.world.slurm.mood, self.world.slurm.mood_lasts = mood, lasts

    @rule()
    def write_state(self) -> None:
        self.world.slurm.write_state()

    @rule()
    def lose_state(self) -> None:
        """The controller is killed, and restarted from what it had written last; what it forgot may be given again."""
        self.world.slurm.lose_state()
        self.world.advance(5)
        if self.world.is_stopped and self.world.jobs(*ALIVE, *WAITING):
            # Slurm itself has brought back what was cancelled: it goes on, or ends with what has died meanwhile
            self.world.is_stopped, self.world.may_end = False, True

    @rule()
    def another_run_is_submitted(self) -> None:
        self.world.submit_another_run()

    @rule()
    def another_runs_jobs_end(self) -> None:
        for job in self.world.slurm.state.jobs.values():
            if self.world.is_foreign(job) and not job.is_over:
                self.world.slurm.end(job, "COMPLETED")

    # processes and nodes

    @precondition(lambda self: self.world.training())
    @rule(data=st.data(), cause=st.sampled_from(ENDS))
    def end_attempt(self, data: st.DataObject, cause: Cause) -> None:
        self.one_of(data, self.world.training()).end(cause)

    @precondition(lambda self: self.world.training())
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        self.one_of(data, self.world.training()).beat()

    @precondition(lambda self: self.world.training())
    @rule(data=st.data(), then=st.sampled_from(["fails", "requeues", "is silent"]))
    def lose_batch_host(self, data: st.DataObject, then: str) -> None:
        start = self.one_of(data, self.world.training())
        was_current = start.is_current
        start.die()
        if was_current and then != "is silent":
            job = self.world.slurm.state.jobs[start.job_id]
            self.world.slurm.end(job, "NODE_FAIL") if then == "fails" else self.world.slurm.requeue(job, delay_s=0)

    @precondition(lambda self: self.world.training())
    @rule(data=st.data(), then=st.sampled_from(["fails", "requeues"]))
    def cut_batch_host_off(self, data: st.DataObject, then: str) -> None:
        """Its processes live on."""
        start = self.one_of(data, self.world.training())
        was_current, start.is_frozen = start.is_current, True
        if was_current:
            job = self.world.slurm.state.jobs[start.job_id]
            self.world.slurm.end(job, "NODE_FAIL") if then == "fails" else self.world.slurm.requeue(job, delay_s=0)

    @precondition(lambda self: any(start.is_alive and start.is_frozen for start in self.world.starts))
    @rule(data=st.data(), cause=st.sampled_from([None, Cause.WORKER_ERROR]))
    def thaw(self, data: st.DataObject, cause: Cause | None) -> None:
        start = self.one_of(data, [each for each in self.world.starts if each.is_alive and each.is_frozen])
        start.is_frozen = False
        if start.start is None:
            start.begin()
        elif cause is None:
            start.beat()
        else:
            start.end(cause)

    # cron

    @rule(noise=st.sampled_from(NOISE))
    def cron(self, noise: dict[str, str]) -> None:
        for name, value in noise.items():
            self.patch.setenv(name, value)
        self.world.cron()
        self.clean_environment()

    @invariant()
    def holds(self) -> None:
        self.world.check()


def test_the_life_of_a_run():
    run_state_machine_as_test(LifeOfARun, settings=SHORT)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_lives_of_a_run():
    run_state_machine_as_test(LifeOfARun, settings=LONG)
