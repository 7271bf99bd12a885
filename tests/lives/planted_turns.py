"""Faults of ours in turns that a run seldom takes, each in one place; as ``planted``.

Most are of two things that come together: a stop, and the end of what was to carry it out; silence that is shorter than
the patience with it; failures in one job, and in its successor.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lives import faults
from lives.life import PATIENT, Bounds
from lives.planted import (
    EXCLUDED,
    FULL,
    ON_DISK,
    REQUEUE,
    Planted,
    _drain,
    _each,
    _in_slurm,
    _life,
    _look,
    _lose_job,
    _nothing,
    _put,
    _waits,
    _wrap,
    fail_everywhere,
    kill_in_work,
    once,
    preempted,
    run_folder_is,
    suspended,
)
from lives.world import World
from slurmft.agent import agent as agent_module
from slurmft.agent.agent import Agent
from slurmft.operations import rescue
from slurmft.policy.decide import Answer, Do
from slurmft.policy.verdict import Action
from slurmft.storage.journal import Event, EventName
from slurmft.storage.patience import PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import act as act_module
from slurmft.supervisor import observations
from slurmft.supervisor import run as run_module
from slurmft.supervisor.act import AttemptEnd
from slurmft.supervisor.crew import AttemptFolder, Reviver, Roster
from slurmft.supervisor.stops import Stops
from slurmft.system.background import overslept_s

NO_RETRIES = {**PATIENT, "num_in_job_restarts": 0, "num_job_retries_on_failure": 0}
SHORT_S = 5.0


def _after(event: EventName, fault: faults.Fault) -> faults.Fault:
    """The fault, as soon as this is the newest line of the journal."""
    return once(lambda world: world.events()[-1].event == event, fault)


def _cut_off(seconds: float) -> faults.Fault:
    """The node without the supervisor cannot be reached for so long, of which nobody can be accused."""

    def fault(world: World) -> None:
        world.note(f"n1 is cut off for {seconds} s")
        world.network.cut("n1")
        world.timeline.call_later(seconds, world.network.heal, "n1")

    return fault


def _lose_job_for_good(world: World) -> None:
    """The controller does not know the job any more, and errs in nothing else."""
    _lose_job(world)
    assert world.slurm is not None
    world.slurm.errs = False


def _agent_stopped(seconds: float) -> faults.Fault:
    """The first agent does nothing for so long."""
    return lambda world: faults.stop(world, world.agents[0], seconds)


def _fail_until(end_s: float) -> faults.Fault:
    """The Prolog fails on each node, and who resumes the nodes does not mend it before then, and releases the job."""

    def fault(world: World) -> None:
        assert world.slurm is not None
        world.slurm.drained.clear()
        if world.timeline.now_s - 1000.0 < end_s:
            fail_everywhere(world)
            world.timeline.call_later(1.0, fault, world)
            return
        world.slurm.sick.clear()
        world.note("a person mends the Prolog")
        for job in world.slurm.mine():
            job.reason = "None"

    return fault


REQUEUED = _in_slurm((5.0, faults.requeue_job), until=60, nodes=1, bounds=Bounds(within_s=60.0))
STOP_TAKEN = _each(lambda seed: _in_slurm(
    (5.0, faults.ask_for_stop), (5.0, _after(EventName.STOP_REQUESTED, kill_in_work(seed + 1, whole=False))),
    nodes=1))  # fmt: skip
STOPPED_IN_QUEUE = _in_slurm((5.0, REQUEUE), (5.0, _drain(100.0)), (5.5, once(_waits, faults.ask_for_stop)), nodes=1,
                             bounds=Bounds(stops=True))  # fmt: skip
STOPPED_WHEN_FULL = _in_slurm((4.9, run_folder_is("full", 30.0)), (5.0, faults.ask_for_stop), nodes=1)
STOPPED = _in_slurm((5.0, faults.ask_for_stop), nodes=1)
DOOMED_SUCCESSORS = _in_slurm(nodes=1, bounds=Bounds(most_starts=6), preemption={"continue_by": "resubmit"},
                              fault_tolerance={**NO_RETRIES, "num_job_retries_on_failure": 2,
                                               "retry_delay_s": 0})  # fmt: skip
NOTHING_SAVED = _life(*((at_s, faults.kill_rank) for at_s in (2.5, 5.5, 8.5)), nodes=1, **ON_DISK)
CUT_OFF_SHORTLY = _life((5.0, _cut_off(8.0)), nodes=2, nproc_per_node=1, bounds=Bounds(most_attempts=1),
                        fault_tolerance={**PATIENT, "agent_timeout_s": SHORT_S})  # fmt: skip
SCRIPTS_LATE = _in_slurm(*((at_s, faults.kill_batch_script) for at_s in (12.0, 150.0, 300.0, 450.0)), until=2400,
                         nodes=1)  # fmt: skip
DECIDED = _each(lambda seed: _in_slurm(
    (4.0, REQUEUE), (4.0, _after(EventName.DECISION, kill_in_work(seed + 1, whole=False))), nodes=1,
    fault_tolerance=NO_RETRIES))  # fmt: skip
HUNG_IN_GRACE = _in_slurm((4.5, faults.hang_rank), (5.0, preempted(30)), nodes=1, until=60,
                          bounds=Bounds(within_s=64.0))  # fmt: skip
SUSPENDED = _life((5.0, _agent_stopped(70.0)), (5.0, suspended(70.1)), nodes=1,
                  fault_tolerance={**PATIENT, "agent_timeout_s": 50.0, "supervisor_lease_s": 60.0})  # fmt: skip
ONE_AGENT = _life((5.0, faults.kill_agent), nodes=2, nproc_per_node=1, bounds=Bounds(most_agents=3))
RESCUED_ASLEEP = _in_slurm((5.0, _lose_job_for_good), (5.5, suspended(50.0)), (6.0, _drain(300.0)), (45.0, _look()),
                           (70.0, REQUEUE), until=800, nodes=1)  # fmt: skip
REFUSED = _in_slurm((4.0, _fail_until(700.0)), (5.0, faults.requeue_job), nodes=1)
AT_END = _life(until=20, nodes=1)


def _mark_first(real: Any, state: Any, found: Any) -> Any:
    then = real(state, found)
    if then.decision is None or then.decision.action is not Action.FINISH:
        return then
    order = {Do.WRITE: Do.MARK_DONE, Do.MARK_DONE: Do.DISMISS}
    return replace(then, do=Do.WRITE if state.do is Do.MARK_DONE else order.get(then.do, then.do))


def _taken_when_seen(self: AttemptFolder, *, ready: bool) -> Mapping[str, str]:
    kinds = ("KILL", "REQUEUE", "SAVE") if ready else ("KILL", "REQUEUE")
    return {kind: who for kind in kinds if (who := self._run.take_request(kind)) is not None}


def _drop_all(run: RunFolder, _: PatientJournal) -> None:
    for kind in ("SAVE", "REQUEUE", "KILL"):
        run.take_request(kind)


def _take_anyway(self: AttemptEnd) -> None:
    self.run.take_request("KILL")


def _of_this_job(real: Callable[..., Any], earlier: Sequence[Event], verdict: Any, config: Any, attempt: str) -> Any:
    job = attempt.partition(".")[0]
    return real([event for event in earlier if event.attempt.startswith(f"{job}.")], verdict, config, attempt)


def _any_step(facts: Mapping[str, Any]) -> bool:
    return (facts.get("last_step") or 0) > (facts.get("first_step") or 0)


async def _short_lease(self: Agent) -> None:
    while time.monotonic() - self._last_heard < SHORT_S:
        self._last_heard += await overslept_s(1.0)


def _suspects_alone(real: Any, *args: Any, **rest: Any) -> Any:
    found = real(*args, **rest)
    return None if found is None else replace(found, excluded=found.own | {*rest["suspects"]})


def _newest_first(self: PatientJournal, event: EventName, **details: Any) -> Event:
    record = self.compose(event, details)
    self._pending.appendleft((record, self.line_of(record)))
    self.retry()
    return record


def _rescues(events: Sequence[Event]) -> int:
    return sum(event.event == EventName.RESCUING for event in events)


PLANTED: dict[str, Planted] = {
    # what follows an end
    "a job that Slurm has put back gets no begin time": Planted(
        _put(AttemptEnd, "_place", lambda _: None), "in time", REQUEUED),
    "a run is marked as complete before that is decided": Planted(
        _wrap(act_module, "step", _mark_first), "entry before action", AT_END),
    "who follows a lost supervisor decides anew": Planted(
        _put(run_module, "_act_in_its_place", lambda ending, _, verdict: ending.act_on(verdict)), "the run goes on",
        DECIDED),
    "a job that cron has submitted meanwhile is not seen": Planted(
        _put(AttemptEnd, "_later_job", lambda _: Answer.NO), "one continuation", RESCUED_ASLEEP),
    # stops
    "a stop is taken away when it is seen": Planted(
        _put(AttemptFolder, "_look", _taken_when_seen), "stop means stop", STOP_TAKEN),
    "a stop counts as left for an earlier start": Planted(
        _put(run_module, "_drop_stale_requests", _drop_all), "stop means stop", STOPPED_IN_QUEUE),
    "a stop is taken away although no journal has its decision": Planted(
        _put(AttemptEnd, "_take_stop", _take_anyway), "stop means stop", STOPPED_WHEN_FULL),
    "a stop takes as long as its ranks": Planted(_put(Stops, "_end_in_time", _nothing), "in time", HUNG_IN_GRACE),
    # budgets
    "a successor has budgets of its own": Planted(
        _wrap(act_module, "budget_of", _of_this_job), "budgets add up", DOOMED_SUCCESSORS),
    "steps that were not saved count as progress": Planted(
        _put(observations, "progressed", _any_step), "budgets add up", NOTHING_SAVED),
    "rescues count although the run has progressed": Planted(
        _put(rescue, "rescues_without_progress", _rescues), "the run goes on", SCRIPTS_LATE),
    "a job that each node refuses is released for ever": Planted(
        _put(rescue, "releases_without_start", lambda _: 0), "budgets add up", REFUSED),
    # silence
    "an agent has a lease of five seconds": Planted(
        _put(Agent, "_watch_lease", _short_lease), "agents stay", CUT_OFF_SHORTLY),
    "the time in which an agent was stopped is part of its lease": Planted(
        _put(agent_module, "heard_awake", lambda heard_s, _: heard_s), "agents stay", SUSPENDED),
    "a node that none can replace is given up as soon as others": Planted(
        _put(Roster, "patience_s", lambda _self, _link, timeout_s: timeout_s), "an attempt goes on", CUT_OFF_SHORTLY),
    "an agent that was killed is not started again": Planted(
        _put(Reviver, "lost", lambda *_, **__: None), "agents outlive", ONE_AGENT),
    # the rest
    "a requeue keeps off its suspects alone": Planted(
        _wrap(act_module, "next_placement", _suspects_alone), "excluded nodes", EXCLUDED),
    "events that waited for the disk are written last first": Planted(
        _put(PatientJournal, "append", _newest_first), "the journal is in order", FULL),
    "cron brings back what was decided": Planted(
        _put(rescue, "is_unfinished", lambda *_: True), "stop means stop", STOPPED),
}  # fmt: skip
