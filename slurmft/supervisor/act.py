"""Actions after a verdict: journal the decision, then act on it. A requeue ends the very process that asks for it."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import SlurmError, SlurmUnavailable, StorageError
from slurmft.policy.checkpoints import COUNTING, Hopeless, NodeSuspected, Poisoned, Trial, examine
from slurmft.policy.decide import (
    HOPELESS,
    RESTARTABLE,
    Answer,
    Budget,
    Decided,
    Do,
    Found,
    NoPlace,
    Rules,
    State,
    carried_out,
    decide,
    step,
)
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.stop import delay_of_requeue
from slurmft.policy.verdict import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_TEMPORARY,
    FREE,
    GOES_ON,
    PLANNED,
    Action,
    Cause,
    Decision,
    End,
    Evidence,
    ExitAction,
    Kind,
    Suspect,
    Verdict,
    end_of,
    explicit_action,
    why_no_requeue,
    why_superfluous,
)
from slurmft.policy.worker_settings import OUT_OF_MEMORY, Irreducible, smaller
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.slurm import compress, expand, ignoring_signals
from slurmft.storage.checkpoint_names import Identity, Quarantine, usable, write_quarantine
from slurmft.storage.journal import Event, EventName, listed, newest_of
from slurmft.storage.patience import PatientJournal, patiently
from slurmft.storage.run_folder import SUPERVISOR, Attempt, Owner
from slurmft.storage.verdicts import noted_batches, noted_resuming
from slurmft.supervisor.cluster import Cluster, LocalCluster, SlurmCluster, Start
from slurmft.supervisor.guardian import any_kept
from slurmft.supervisor.observations import began_to_resubmit, budget_of
from slurmft.supervisor.placement import EvidenceSender, Placement, all_busy, duty_of, next_placement, nodes_to_use
from slurmft.system.background import BackgroundLog
from slurmft.system.files import replace_atomically

# --- How a run goes on in Slurm: a requeue of this job, or a successor; on other nodes, where that is asked ---

FLUSH_S = 5.0
"""How long an action waits for the run folder to take the decision it follows."""

SLURM_PATIENCE_S = 600.0
"""How long a silent Slurm is asked again where no end of the job presses."""

OTHERS_PATIENCE_S = 2.0
"""How long a silent Slurm is asked for a job that may be this one's successor already."""


def successor_options(config: RunConfig, script: Path, cluster: SlurmCluster) -> list[str]:
    """sbatch options with which ``script`` makes a job like this one; writes the script where it is not there.

    Raises:
        SlurmError: Slurm has the script, and refused or did not answer.
        OSError: it cannot be written.
    """
    options = [f"--chdir={Path.cwd()}"]
    if not script.is_file():  # submitted with plain sbatch: Slurm has the script, the environment its options
        replace_atomically(script, own_jobs.batch_script(cluster.own))
        section = config.preemption
        signal_option = f"--signal={section.signal}@{section.signal_lead_s}"
        options += ["--requeue", "--open-mode=append", signal_option, *own_jobs.inherited_options(os.environ)]
    return options


def past_requeues(history: Iterable[Event], job_id: str) -> list[tuple[int, float]]:
    """Of each requeue of the job that asked for a begin time: the delay, and the seconds until the job began."""
    found: list[tuple[int, float]] = []
    requeued: dict[int, Event] = {}
    for event in history:
        job, restart = restart_of(event)
        if job != job_id:
            continue
        if event.event in (EventName.REQUEUED, EventName.PLACED):
            requeued[restart] = event
        elif event.event == EventName.ATTEMPT_STARTED and (before := requeued.pop(restart - 1, None)) is not None:
            delay_s = before.details.get("delay_s")
            found += [(delay_s, (event.at - before.at).total_seconds())] if isinstance(delay_s, int) else []
    return found


def restart_of(event: Event) -> tuple[str, int]:
    """Job and restart of the writer; ("", 0) where a user wrote it."""
    job, _, rest = event.attempt.partition(".")
    count = rest.partition(".")[0]
    return (job, int(count)) if count.isdecimal() else ("", 0)


def in_folder(start: Start, work: Callable[[], Any]) -> Any:
    """What ``work`` returns; None when the run folder fails, which must not block what follows."""
    try:
        return start.thread.call(work, timeout_s=FLUSH_S)
    except (StorageError, OSError) as error:
        log.warning("%s", error)
        return None


# --- final ends ---
# Makes an end of the run in this job stay one: Slurm is told not to requeue the job, and a start that it makes all the
# same ends at once.

CONTINUE_BY_NOTHING = "preemption.continue_by is nothing"
"""Reason in the journal of a run that is not continued because its user wants that."""

ASK_S = 4.0
TELL_S = 8.0
"""A Slurm that does not answer delays the end of a job by no more than both."""

_MAYBE_PREEMPTED = frozenset({Cause.PREEMPTED.value, Cause.REQUEUED.value, Cause.SUPERVISOR_LOST.value})
_TOLD = frozenset({EventName.REQUEUE_STAYS_ON, EventName.REQUEUED_MEANWHILE})


def keep_ended(
    config: RunConfig, end: End, cluster: Cluster, journal: PatientJournal, history: Iterable[Event]
) -> None:  # fmt: skip
    """Tell Slurm not to requeue the job, where it would undo this end. Call right before the batch script ends.

    A role leaves that to its job, which has other roles.
    """
    is_role = config.preemption.continue_by == "job"
    if is_role or not isinstance(cluster, SlurmCluster) or end in (End.FINISHED, End.OPEN):
        return
    with ignoring_signals():  # the grace may end now, and its TERM must not reach scontrol
        try:
            job = own_jobs.requeueing(cluster.own, cluster.attempt.restart, patience_s=ASK_S)
        except own_jobs.ForeignJob:  # ours is gone, and is not requeued
            return
        except SlurmError as error:
            log.warning("cannot tell whether Slurm would requeue job %s: %s", cluster.own, error.what)
            journal.append(EventName.REQUEUE_STAYS_ON, job=cluster.own.job_id, reason=error.what)
            job = None
        if reason := why_no_requeue(end, job, was_preempted=was_preempted(history, cluster.attempt)):
            _switch_off(cluster.own, journal, reason)


def _switch_off(job: OwnJob, journal: PatientJournal, reason: str) -> None:
    journal.append(EventName.SWITCHING_REQUEUE_OFF, job=job.job_id, reason=reason)
    journal.flush(FLUSH_S)
    try:
        own_jobs.forbid_requeue(job, patience_s=TELL_S)
    except SlurmError as error:
        journal.append(EventName.REQUEUE_STAYS_ON, job=job.job_id, reason=error.what)
        log.error("Slurm may requeue job %s, which ends at once then: %s", job, error.what)


def was_preempted(history: Iterable[Event], attempt: Attempt) -> bool:
    """Whether an earlier start of the attempt's job was preempted, or left no word of how it ended."""
    ends: dict[int, str | None] = {}
    for event in history:
        job, restart = restart_of(event)
        if job != attempt.job or restart >= attempt.restart:
            continue
        if event.event == EventName.ATTEMPT_STARTED:
            ends[restart] = None
        elif event.event in (EventName.VERDICT, EventName.STOP_REQUESTED) and ends.get(restart) not in _MAYBE_PREEMPTED:
            ends[restart] = str(event.details.get("cause"))
    return any(cause is None or cause in _MAYBE_PREEMPTED for cause in ends.values())


@dataclass(frozen=True, slots=True)
class Superfluous:
    """A start of a job that is not to train."""

    reason: str
    earlier: str
    """The attempt of the same job after which nothing was to follow in it."""

    end: End
    exit_code: int
    """Of that end."""


def superfluous(history: Sequence[Event], attempt: Attempt, queued_at: float | None) -> Superfluous | None:
    """Why this start is one that Slurm alone wanted; None for one that is to train.

    Args:
        queued_at: Unix time at which Slurm put the job into the queue last; None where it is not known.
    """
    mine = [(restart, event) for event in history for job, restart in [restart_of(event)]
            if job == attempt.job and restart < attempt.restart]  # fmt: skip
    # a start that was killed at its very begin has left no entry of it, only the decision made in its place
    begun = (EventName.ATTEMPT_STARTED, EventName.DECISION)
    started = [restart for restart, event in mine if event.event in begun]
    if not started:
        return _submitted_without_answer(history, queued_at)
    last = [event for restart, event in mine if restart >= started[-1]]
    decided = newest_of(last, EventName.DECISION)
    if decided is None:
        return None
    told = any(event.event in _TOLD for event in last)
    end = _end(decided, last)
    lived = (last[0].at.timestamp(), last[-1].at.timestamp())
    reason = why_superfluous(end, lived=lived, queued_at=queued_at, told=told)
    return _after(decided, end, reason) if reason else None


def _submitted_without_answer(history: Sequence[Event], queued_at: float | None) -> Superfluous | None:
    """The same of a successor whose sbatch got no answer: the run has ended meanwhile, and could not cancel it."""
    tried = newest_of(history, EventName.RESUBMITTING, EventName.RESUBMITTED, EventName.RESUBMIT_FAILED)
    decided = newest_of(history, EventName.DECISION)
    if tried is None or tried.event != EventName.RESUBMITTING or decided is None or queued_at is None:
        return None
    if _end(decided, ()) is not End.STOPPED or not tried.seconds() - 1 <= queued_at <= decided.seconds():
        return None  # Slurm's times are whole seconds
    return _after(decided, End.STOPPED, "it was submitted to continue the run, which has ended since")


def _after(decided: Event, end: End, reason: str) -> Superfluous:
    code = decided.details.get("exit_code")
    return Superfluous(reason, decided.attempt, end, code if type(code) is int else 1)


def _end(decided: Event, lines: Iterable[Event]) -> End:
    """The end of a start, out of its lines in the journal."""
    try:
        end = end_of(Action(str(decided.details.get("action"))))
    except ValueError:  # of a newer slurmft
        return End.OPEN
    if end is not End.OPEN:
        return end
    for event in lines:
        if event.event == EventName.RESUBMITTED or (event.event == EventName.NOT_CONTINUED and "job" in event.details):
            return End.HANDED_ON
        if event.event == EventName.NOT_CONTINUED and event.details.get("reason") == CONTINUE_BY_NOTHING:
            return End.NOT_CONTINUED
    return End.OPEN


# --- Checkpoints from which runs die: their record in the journal, and the mark that quarantines them ---


def trials_of(history: Sequence[Event]) -> list[Trial]:
    """Trials in the journal, oldest first; damaged entries are left out."""
    found = []
    for event in history:
        facts = event.details
        if (
            event.event == EventName.CHECKPOINT_TRIED
            and (identity := Identity.parse(str(facts.get("checkpoint")))) is not None
        ):
            found.append(
                Trial(
                    checkpoint=identity.folder_name,
                    step=identity.step,
                    cause=str(facts.get("cause")),
                    nodes=frozenset(map(str, listed(facts.get("nodes")))),
                    committed=facts.get("committed") is True,
                )
            )
    return found


def quarantined_in(history: Sequence[Event]) -> list[int]:
    """Steps of checkpoints that were quarantined since the run last saved a step beyond them all."""
    steps: list[int] = []
    for event in history:
        step, saved = event.details.get("step"), event.details.get("saved_step")
        if event.event == EventName.CHECKPOINT_QUARANTINED and type(step) is int:
            steps.append(step)
        elif event.event == EventName.VERDICT and type(saved) is int and saved > max(steps, default=saved):
            steps = []
    return steps


# --- remedies ---
# Changes of a run before it is tried again: a smaller micro-batch after one that did not fit, an older checkpoint after
# one from which it dies.


class Remedies:
    """Looks at one verdict and what was decided about it.

    Args:
        has_nodes: enough nodes are left in this allocation to go on at once.
    """

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, *, has_nodes: bool) -> None:
        self._has_nodes, self._sender = has_nodes, sender
        self._config, self._start, self._journal = config, start, start.journal
        self._folder = start.run.attempts / str(start.cluster.attempt)

    def applied(self, verdict: Verdict, decision: Decision) -> Decision:
        """The decision, where the run changes and is tried again although its budget is spent, or stops because nothing
        is left to change. What is changed is journaled here, before the decision."""
        fails = explicit_action(verdict.exit_code, self._config.exit_actions) is ExitAction.FAIL
        if decision.action is Action.FINISH or (verdict.exit_code and fails):
            return decision
        if verdict.cause in OUT_OF_MEMORY and self._config.oom.action == "reduce_batch":
            return self._with_smaller_batch(verdict, decision)
        match self._look_at_checkpoint(verdict):
            case Poisoned(reason=reason) if self._may_retry(verdict, decision):
                return self._again(verdict, decision, reason)
            case NodeSuspected(node=node, reason=reason) if self._may_retry(verdict, decision):
                avoid = tuple(dict.fromkeys([*decision.avoid, node]))
                going_on = self._again(verdict, decision, f"{reason}; next on another node")
                return replace(going_on, action=Action.CONTINUE, avoid=avoid)
            case Hopeless(reason=reason):
                return Decision(action=Action.STOP, reason=f"{verdict.reason}; {reason}", exit_code=EXIT_DO_NOT_REQUEUE)
        return decision

    def _look_at_checkpoint(self, verdict: Verdict) -> Poisoned | NodeSuspected | Hopeless | None:
        """What ``verdict`` says of the checkpoint, as far as it has been acted on: a checkpoint is marked when this
        returns Poisoned, and the exclusion list knows of a node that is suspected. None: nothing follows."""
        counts = verdict.cause in COUNTING and verdict.exit_code not in HOPELESS
        name = in_folder(self._start, lambda: noted_resuming(self._folder)) if counts or verdict.progressed else None
        if (identity := Identity.parse(name or "")) is None:
            return None
        newest = Trial(
            checkpoint=identity.folder_name, step=identity.step, cause=verdict.cause.value,
            nodes=frozenset([verdict.node] if verdict.node else verdict.suspect_nodes), committed=verdict.progressed,
        )  # fmt: skip
        attempt = str(self._start.cluster.attempt)
        earlier = [event for event in self._start.history if event.attempt != attempt]
        trials = [*trials_of(earlier), newest]
        if newest.committed and all(trial.checkpoint != newest.checkpoint for trial in trials[:-1]):
            return None  # as expected, and not new
        self._journal.append(
            EventName.CHECKPOINT_TRIED, checkpoint=newest.checkpoint, cause=newest.cause, nodes=sorted(newest.nodes),
            committed=newest.committed,
        )  # fmt: skip
        section = self._config.fault_tolerance
        found = examine(
            trials,
            poison_after=section.poison_after,
            quarantined=quarantined_in(earlier),
            max_quarantines=section.max_no_progress_cycles,
            alone=self._start.cluster.name == "local",
        )
        if isinstance(found, Poisoned):
            return self._quarantine(newest, found)
        if isinstance(found, NodeSuspected):
            suspect = Suspect(node=found.node)
            self._sender.add(
                [Evidence(kind=Kind.REPEATED_DEATH, suspect=suspect, message=found.reason, at=time.time())]
            )
        return found

    def _quarantine(self, trial: Trial, found: Poisoned) -> Poisoned | Hopeless | None:
        directory = self._config.checkpoint_dir
        from_scratch = self._config.fault_tolerance.poison_from_scratch
        names = in_folder(self._start, lambda: usable(directory))
        if names is None:
            return None  # the folder cannot be read; the next failure asks again
        left = [name for name in names if name != trial.checkpoint]
        if not left and not from_scratch:
            why = "there is no other checkpoint, and fault_tolerance.poison_from_scratch is false"
            return Hopeless(reason=f"{found.reason}; {why}")
        mark = Quarantine(reason=found.reason, from_scratch=from_scratch)

        def write() -> bool:
            write_quarantine(directory / trial.checkpoint, mark)
            return True

        if not in_folder(self._start, write):
            return None
        then = f"next from {left[0]}" if left else "next from the beginning"
        self._journal.append(
            EventName.CHECKPOINT_QUARANTINED, checkpoint=trial.checkpoint, step=trial.step, reason=found.reason
        )
        return Poisoned(reason=f"{found.reason}; it is quarantined, {then}")

    def _may_retry(self, verdict: Verdict, decision: Decision) -> bool:
        """Whether failures of this kind are retried at all."""
        section = self._config.fault_tolerance
        retries = section.retries.get(verdict.cause, section.num_job_retries_on_failure)
        return decision.action in GOES_ON or retries + section.num_in_job_restarts > 0

    def _with_smaller_batch(self, verdict: Verdict, decision: Decision) -> Decision:
        noted = in_folder(self._start, lambda: noted_batches(self._folder))
        if noted is None:
            self._journal.append(EventName.BATCH_NOT_REDUCED, reason="the trainer has not asked session.micro_batch()")
            return decision
        found = smaller(noted.asked, divisor=noted.divisor, min_batch=self._config.oom.min_batch)
        if isinstance(found, Irreducible):
            reason = f"{verdict.reason}; {found.reason}"
            return Decision(action=Action.STOP, reason=reason, exit_code=EXIT_DO_NOT_REQUEUE)
        self._journal.append(EventName.BATCH_REDUCED, divisor=found.divisor, micro_batches=list(found.micro_batches))
        sizes = " and ".join(map(str, found.micro_batches))
        return self._again(verdict, decision, f"next with a micro-batch of {sizes} and the same global batch")

    def _again(self, verdict: Verdict, decision: Decision, change: str) -> Decision:
        """``decision`` as one to go on, since something has changed."""
        reason = f"{verdict.reason}; {change}"
        if decision.action in GOES_ON:
            return replace(decision, reason=reason)
        may_restart = verdict.cause in RESTARTABLE and self._config.fault_tolerance.num_in_job_restarts > 0
        action = Action.RESTART if may_restart and self._has_nodes else Action.CONTINUE
        return Decision(action=action, reason=reason, exit_code=verdict.exit_code or EXIT_TEMPORARY)


# --- act ---

DONE_PATIENCE_S = 300.0
"""How long a complete run waits for a run folder that cannot take the mark of it."""

log = logging.getLogger(__name__)


class AttemptEnd:
    """Does what follows the end of one attempt, as ``policy.decide`` says.

    Args:
        dismiss: ends the agents; called once it is decided that no attempt follows with them.
        has_nodes: whether enough of them are left for another attempt.
        outlived: the agents have outlived the supervisor in whose place this process acts.
    """

    def __init__(
        self, config: RunConfig, start: Start, sender: EvidenceSender, log_file: BackgroundLog,
        *, dismiss: Callable[[], None], has_nodes: Callable[[], bool], outlived: bool = False,
    ) -> None:  # fmt: skip
        self._dismiss, self._has_nodes, self._outlived = dismiss, has_nodes, outlived
        self.config, self.start, self.log_file, self._sender = config, start, log_file, sender
        self.ends_at_s: float | None = None
        """Monotonic time at which Slurm will have ended the job; None when no end is known."""

        self.cluster: Cluster = start.cluster
        self.run, self.journal = start.run, start.journal
        self._claim = self.run.ending(self.cluster.attempt)
        self._placement: Placement | None = None
        self._budget = Budget(failures_so_far=0, max_failures=0)
        self._may_stay = True
        self._outcome = self._why = ""
        """What becomes of the claim; why the run is another's, or Slurm ends the job."""

        self._state: State

    def act_on(self, verdict: Verdict) -> int | None:
        """Decide, journal, act; returns the supervisor's exit code, or None when the run goes on in this allocation.

        A start that another one has replaced decides nothing for the run. Main thread only.
        """
        return self._do_all(State(self._rules(verdict), verdict))

    def follow(self, verdict: Verdict, decision: Decision, *, may_stay: bool = True) -> int | None:
        """Find a place for what was decided, journal, act; returns as ``act_on`` does. Main thread only.

        Args:
            may_stay: other nodes of this allocation will do.
        """
        self._may_stay = may_stay
        return self._do_all(carried_out(State(self._rules(verdict), verdict), decision))

    def leave(self, end: End, exit_code: int) -> int:
        """End this start, which decides nothing for the run; returns ``exit_code``."""
        self._dismiss()
        self._keep_ended(end)
        self._flush()
        return exit_code

    @property
    def has_stopped(self) -> bool:
        """Whether it was decided that nothing follows."""
        return self._state.end in (End.STOPPED, End.FINISHED)

    def _rules(self, verdict: Verdict) -> Rules:
        in_slurm = isinstance(self.cluster, SlurmCluster)
        on_gpus = any(suspect.gpu for suspect in verdict.suspects)
        return Rules(
            in_slurm=in_slurm,
            continue_by=self.config.preemption.continue_by,
            resubmits=in_slurm and began_to_resubmit(self.start.history, self.cluster.attempt),
            gpus=duty_of(self.start.history).gpus if on_gpus else frozenset(),
        )

    def _do_all(self, state: State) -> int | None:
        work, self._state = self._work(), state
        # one after the other, each as soon as the state says which
        for ignores, things in groupby(iter(lambda: self._state.do, Do.OVER), MAY_SIGNAL.__contains__):
            with ignoring_signals() if ignores else contextlib.nullcontext():
                for do in things:
                    self._state = step(self._state, work[do]() or Answer.DONE)
        if not self._flush():
            for event in self.journal.unwritten():
                log.error("not in the journal: %s %s %s", event.at.isoformat(), event.event, event.details)
        return self._state.exit_code

    def _work(self) -> dict[Do, Callable[[], Found | None]]:
        """How each thing is done; what has come of it, or None where it is just done."""

        def note(event: EventName, **details: Any) -> Callable[[], None]:
            return lambda: self._note(event, **details)

        return {
            Do.ASK_WHOSE: self._whose,
            Do.LEAVE: self._leave_to_owner,
            Do.DECIDE: self._decide,
            Do.ASK_IN_DOUBT: self._why_ending,
            Do.TELL_LIST: self._tell_list,
            Do.SEEK: self._seek,
            Do.NOTE_GPUS: self._note_gpus,
            Do.NOTE_INCONCLUSIVE: self._note_inconclusive,
            Do.WRITE: self._write,
            Do.WAIT: self._wait,
            Do.MARK_DONE: self._mark_done,
            Do.DISMISS: self._dismiss,
            Do.CLAIM: self._take_claim,
            Do.ASK_CLAIMED: self._why_ending,
            Do.PLACE_CLAIMED: self._place_claimed,
            Do.NOTE_CLAIMED: note(EventName.NOT_CONTINUED, reason="the end of this attempt was acted on already"),
            Do.OVERRULE: self._overrule,
            Do.LEAVE_TO_JOB: note(EventName.LEFT_TO_SLURM, reason="the job goes on as a whole, with all of its roles"),
            Do.LEAVE_TO_USER: self._leave_to_user,
            Do.START_ANEW: self._start_anew,
            Do.ASK_ENDING: self._why_ending,
            Do.PLACE: self._place,
            Do.LEAVE_CANCELLED: self._leave_to_slurm,
            Do.FIND_LATER: self._later_job,
            Do.ASK_PREEMPTION: self._is_cancelled_when_preempted,
            Do.REQUEUE: lambda: self._ends_as("requeued", self._requeue()),
            Do.RESUBMIT: lambda: self._ends_as("resubmitted", self._resubmit()),
            Do.SETTLE: lambda: in_folder(self.start, lambda: self._claim.settle(self._outcome)),
            Do.GIVE_BACK: lambda: in_folder(self.start, self._claim.give_back),
            Do.TELL_USER: self._tell_user,
            Do.KEEP_ENDED: lambda: self._keep_ended(self._state.end),
            Do.ASK_UNDONE: self._why_ending,
            Do.NOTE_UNDONE: lambda: self._note(EventName.REQUEUED_MEANWHILE, reason=self._why),
            Do.TAKE_STOP: self._take_stop,
        }

    def _note(self, event: EventName, **details: Any) -> None:
        self.journal.append(event, **details)

    @property
    def _slurm(self) -> SlurmCluster:
        if not isinstance(self.cluster, SlurmCluster):
            raise TypeError(f"there is no queue on {self.cluster.name}")
        return self.cluster

    @property
    def _decision(self) -> Decision:
        assert self._state.decision is not None
        return self._state.decision

    # the decision

    def _whose(self) -> Answer:
        owner = in_folder(self.start, self.run.owner)
        if not isinstance(owner, Owner) or owner.generation <= self.start.generation:
            return Answer.NO
        self._why = f"job {owner.job}, restart {owner.restart}, on {owner.host} has taken the run over"
        return Answer.YES

    def _leave_to_owner(self) -> None:
        self.journal.append(EventName.SUPERSEDED, reason=self._why)
        log.error("%s; this start ends and changes nothing", self._why)
        self._dismiss()

    def _decide(self) -> Decided:
        verdict = self._state.verdict
        facts = {key: value for key, value in asdict(verdict).items() if value is not None}
        self.journal.append(EventName.VERDICT, **facts)
        if verdict.cause in PLANNED and verdict.unsaved_steps:
            lost = verdict.unsaved_steps
            log.error("NOTHING WAS SAVED at this stop; up to %d steps will be done again", lost)
            self.journal.append(EventName.STOP_WITHOUT_A_SAVE, steps_at_risk=lost)
        # a supervisor in whose place we act may have judged this attempt already: it is one end all the same
        attempt = str(self.cluster.attempt)
        earlier = [event for event in self.start.history if event.attempt != attempt]
        budget = budget_of(earlier, verdict, self.config, attempt)
        self._budget = budget = replace(budget, has_nodes=self._has_nodes(), outlived=self._outlived)
        remedies = Remedies(self.config, self.start, self._sender, has_nodes=budget.has_nodes)
        decision = remedies.applied(verdict, decide(verdict, budget, self.config.exit_actions))
        # what a lost supervisor had heard of Slurm is not known here
        return Decided(decision, in_doubt=bool(self.cluster.lost) or self._outlived)

    def _tell_list(self) -> None:
        self._sender.finish(self._state.verdict, wait=self._decision.action is not Action.RESTART)

    def _seek(self) -> Answer | NoPlace:
        decision, cluster = self._decision, self._slurm
        if (
            self._may_stay
            and decision.elsewhere
            and decision.avoid
            and nodes_to_use(cluster.present(), frozenset(decision.avoid), self.config.size.minimum)
            and cluster.why_ending() is None
        ):
            return Answer.YES
        # suspects of an earlier end that this attempt has not cleared or confirmed
        may_be = not decision.elsewhere and not self._state.verdict.progressed
        undecided = sorted(duty_of(self.start.history).undecided) if may_be else []
        self._placement = next_placement(
            self.config, partition=cluster.job.partition, job=cluster.own, history=self.start.history,
            suspects=tuple(dict.fromkeys((*decision.avoid, *undecided))),
        )  # fmt: skip
        if self._placement is None:
            return Answer.NO
        why = self._placement.impossible
        if not why and self._state.verdict.cause is Cause.RERUN_ELSEWHERE and not self.config.rerun.wait_for_others:
            why = all_busy(self.config, cluster.job.partition, expand(cluster.job.nodes), self._placement.excluded)
        if decision.elsewhere and why:
            return NoPlace(why)
        self.journal.append(EventName.AVOIDING, **self._placement.avoidance.as_event())
        return Answer.NO

    def _note_gpus(self) -> None:
        gpus = sorted({suspect.gpu for suspect in self._state.verdict.suspects})
        self._note(EventName.AVOIDING_GPUS, gpus=gpus, reason=self._state.why)

    def _note_inconclusive(self) -> None:
        self._note(EventName.INCONCLUSIVE, reason=self._state.why, suspects=list(self._decision.avoid))

    def _write(self) -> None:
        decision = self._decision
        demands = {"avoid": list(decision.avoid), "elsewhere": decision.elsewhere}
        self.journal.append(
            EventName.DECISION, action=decision.action.value, reason=decision.reason, exit_code=decision.exit_code,
            **{key: value for key, value in demands.items() if value},
        )  # fmt: skip
        log.info(
            "verdict: %s; decision: %s; %s", self._state.verdict.cause.value, decision.action.value, decision.reason
        )
        self._flush()

    def _mark_done(self) -> None:
        reason, step_ = self._decision.reason, self._state.verdict.last_step or None
        done = {"step": step_, "job": self.cluster.attempt.job, "reason": reason}
        patiently(
            lambda: self.start.thread.call(lambda: self.run.mark_done(**done), timeout_s=DONE_PATIENCE_S),
            patience_s=DONE_PATIENCE_S,
        )

    def _wait(self) -> None:
        wait_before_restart(self.config, self._budget.restarts_so_far)

    # the ways to go on

    def _take_claim(self) -> Answer:
        # an unreadable run folder must not block this: requeueing twice is as good as once
        taken = in_folder(self.start, lambda: self._claim.take(f"{SUPERVISOR}{os.uname().nodename}"))
        return Answer.NO if taken is False else Answer.YES

    def _overrule(self) -> None:
        self.journal.append(EventName.CLAIM_OVERRULED, outcome=in_folder(self.start, self._claim.outcome) or "none")
        in_folder(self.start, self._claim.give_back)
        self._take_claim()

    def _start_anew(self) -> None:
        self.journal.append(EventName.STARTING_ANEW, restart=self.cluster.attempt.restart + 1)
        self._flush()  # the claim stays ours: the next start is this process, and may be killed before it begins
        from slurmft.scheduler.submission import RunSupervisor  # brings submitit, which only this branch needs

        if not isinstance(self.cluster, LocalCluster):
            raise TypeError(f"no way to continue on {self.cluster.name}")
        self.log_file.close()
        self.cluster.start_anew(RunSupervisor(self.run.config).argv())

    def _why_ending(self) -> Answer:
        if (outside := self.cluster.why_ending()) is None:
            return Answer.NO
        self._outcome, self._why = outside[0].value, outside[1]
        return {Cause.REQUEUED: Answer.REQUEUED, Cause.CANCELLED: Answer.CANCELLED}.get(outside[0], Answer.NO)

    def _leave_to_slurm(self) -> None:
        self.journal.append(EventName.LEFT_TO_SLURM, reason=self._why)

    def _place(self) -> None:
        self._outcome = Cause.REQUEUED.value
        self._leave_to_slurm()
        self._place_claimed()

    def _place_claimed(self) -> None:
        """Set a begin time for a job that Slurm requeues, to save two minutes; other nodes' processes end later."""
        job = self._slurm.own
        past = past_requeues(self.start.history, job.job_id)
        delay_s = delay_of_requeue(self.config.preemption.requeue_delay_s, past, in_order=False)
        done = own_jobs.place(job, delay_s, avoid=self._avoid)
        own_jobs.keep_ahead(job, done)
        self.journal.append(EventName.PLACED, job=job.job_id, **done.in_words(), **self._avoid_in_words())

    def _later_job(self) -> Answer:
        """Whether a later job of the run is in the queue, or about to start."""
        jobs: list[OwnJob] = in_folder(self.start, self.run.own_jobs) or []
        ids = [job.job_id for job in jobs]
        mine = self._slurm.job.job_id
        later = jobs[ids.index(mine) + 1 :] if mine in ids else []
        try:
            found = own_jobs.find(later, patience_s=OTHERS_PATIENCE_S) if later else {}
        except SlurmError:
            return Answer.NO  # two jobs are better than none: only one of them can own the run
        in_queue = [
            job for job, record in found.items() if record.waiting or record.state in ("CONFIGURING", "RUNNING")
        ]
        if not in_queue:
            return Answer.NO
        other = in_queue[-1]
        self.journal.append(
            EventName.NOT_CONTINUED, reason=f"job {other} of this run is in the queue", job=other.job_id
        )
        self._outcome = f"left to job {other}"
        return Answer.YES

    def _is_cancelled_when_preempted(self) -> Answer:
        """Whether its partition cancels what it preempts; not where Slurm does not say."""
        partition = self._slurm.job.partition
        try:
            # of a heterogeneous job that of the leader, with which Slurm requeues all components
            cancels = slurm.preempt_mode(partition.partition(",")[0]) == "CANCEL"
        except SlurmError:
            return Answer.NO
        if cancels:
            self.journal.append(EventName.REQUEUE_SKIPPED, reason=f"partition {partition} cancels what it preempts")
        return Answer.YES if cancels else Answer.NO

    def _ends_as(self, done: str, found: Answer) -> Answer:
        self._outcome = done if found is Answer.DONE else found.value
        return found

    def _requeue(self) -> Answer:
        verdict, cluster, job = self._state.verdict, self._slurm, self._slurm.own
        failures = 0 if verdict.cause in PLANNED | FREE else self._budget.failures_so_far
        lost = frozenset(cluster.lost).union(verdict.suspect_nodes if verdict.cause is Cause.NODE_LOST else ())
        is_shrunk = self._shrink(lost - cluster.given_back)
        delay_s = delay_of_requeue(
            self.config.preemption.requeue_delay_s, past_requeues(self.start.history, job.job_id),
            in_order=verdict.cause in PLANNED, backs_off_s=round(retry_delay_s(self.config, failures)),
            is_shrunk=is_shrunk,
        )  # fmt: skip
        nodes = (self.config.nodes_range or cluster.job.node_count) if cluster.given_back else None
        self.journal.append(EventName.REQUEUEING, job=job.job_id, delay_s=delay_s, **self._avoid_in_words())
        self._flush()
        try:
            done = own_jobs.requeue(
                job, restart=cluster.attempt.restart, delay_s=delay_s, avoid=self._avoid, nodes=nodes,
                patience_s=self._patience_s(), orderly=verdict.cause in PLANNED and not cluster.lost,
                has_epilog=cluster.has_epilog,
            )  # fmt: skip
        except own_jobs.JobCancelled as error:
            self.journal.append(EventName.NOT_CONTINUED, reason=error.what)
            return Answer.CANCELLED
        except SlurmError as error:
            self.journal.append(EventName.REQUEUE_FAILED, job=job.job_id, reason=error.what)
            log.warning("the job could not be requeued: %s", error.what)
            return Answer.FAILED
        own_jobs.keep_ahead(job, done)
        self.journal.append(EventName.REQUEUED, job=job.job_id, **done.in_words())
        return Answer.DONE

    def _shrink(self, lost: frozenset[str]) -> bool:
        """Whether the job was shrunk to its living nodes: a node that Slurm believes alive would delay the requeue."""
        cluster = self._slurm
        if cluster.job.components:
            return False
        nodes = [node for node in expand(cluster.job.nodes) if node not in cluster.given_back]
        living = [node for node in nodes if node not in lost]
        if len(living) == len(nodes) or not living or nodes[0] in lost:  # the first one is the batch host
            return False
        try:
            own_jobs.shrink(cluster.own, living)
        except SlurmError as error:  # Slurm has noticed by itself, or does not answer
            self.journal.append(EventName.NOT_SHRUNK, reason=error.what)
            return False
        cluster.given_back |= lost
        self.journal.append(EventName.SHRUNK, lost=sorted(lost & set(nodes)))
        return True

    def _resubmit(self) -> Answer:
        try:
            next_job = self._successor(successor_options(self.config, self.run.script, self._slurm))
        except own_jobs.JobCancelled as error:
            self.journal.append(EventName.NOT_CONTINUED, reason=error.what)
            return Answer.CANCELLED
        except (SlurmError, OSError) as error:
            self.journal.append(EventName.RESUBMIT_FAILED, reason=str(error))
            log.warning("no successor could be submitted: %s", error)
            return Answer.FAILED
        self.journal.append(EventName.RESUBMITTED, job=next_job, after=self._slurm.job.job_id)

        def note() -> None:
            with self.run.lock():
                self.run.add_successor(next_job, self._slurm.own)

        in_folder(self.start, note)
        return Answer.DONE

    def _successor(self, options: Sequence[str]) -> str:
        if self._placement is None:
            return self._sbatch(options)
        try:
            return self._sbatch([*options, f"--exclude={compress(self._placement.excluded)}"])
        except (SlurmUnavailable, own_jobs.JobCancelled):
            raise
        except SlurmError as error:  # perhaps for what we exclude: a run on a suspect node is better than none
            if self._placement.excluded == self._placement.own:
                raise
            self.journal.append(EventName.EXCLUSIONS_REFUSED, reason=error.what)
            log.warning("submitting without the nodes that the run would keep off: %s", error.what)
            return self._sbatch([*options, f"--exclude={compress(self._placement.own)}"])

    def _sbatch(self, options: Sequence[str]) -> str:
        job, script, attempt = self._slurm.own, self.run.script, self.cluster.attempt
        command = own_jobs.successor_command(script, after=job, options=options)
        self.journal.append(EventName.RESUBMITTING, command=shlex.join(command))
        self._flush()
        return own_jobs.submit_successor(
            script, after=job, restart=attempt.restart, options=options, environment=os.environ,
            patience_s=self._patience_s(), known=in_folder(self.start, self.run.own_jobs) or [],
            tried=began_to_resubmit(self.start.history, attempt),
        )  # fmt: skip

    def _patience_s(self) -> float:
        """How long to wait for Slurm's answer: until the job's time is up, where that is known."""
        if self.ends_at_s is None:
            return SLURM_PATIENCE_S
        return max(slurm.PATIENCE_S, self.ends_at_s - time.monotonic())

    @property
    def _avoid(self) -> frozenset[str] | None:
        """Nodes that the job is to exclude; None leaves those that it has alone."""
        return None if self._placement is None else self._placement.excluded

    def _avoid_in_words(self) -> dict[str, Any]:
        return {} if self._avoid is None else {"excluded": compress(self._avoid)}

    def _tell_user(self) -> None:
        command = self._by_hand()
        self.journal.append(EventName.NOT_CONTINUED, reason="neither requeue nor resubmit worked", command=command)
        log.error("THE RUN IS SAVED BUT WILL NOT CONTINUE BY ITSELF. To continue it: %s", command)

    def _leave_to_user(self) -> None:
        self.journal.append(EventName.NOT_CONTINUED, reason=CONTINUE_BY_NOTHING)
        log.warning("to continue the run: %s", self._by_hand())

    def _by_hand(self) -> str:
        return shlex.join(["slurmft", "submit", str(self.run.config)])

    # the end

    def _keep_ended(self, end: End) -> None:
        keep_ended(self.config, end, self.cluster, self.journal, self.start.history)

    def _take_stop(self) -> None:
        if not self.journal.unwritten():  # a decision that is in no journal yet may be lost with this process
            in_folder(self.start, lambda: self.run.take_request("KILL"))

    def _flush(self) -> bool:
        return self.journal.flush(FLUSH_S)


MAY_SIGNAL = frozenset(
    {
        Do.ASK_CLAIMED, Do.PLACE_CLAIMED, Do.ASK_ENDING, Do.PLACE, Do.LEAVE_CANCELLED, Do.FIND_LATER, Do.ASK_PREEMPTION,
        Do.REQUEUE, Do.RESUBMIT, Do.SETTLE, Do.GIVE_BACK,
    }
)  # fmt: skip
"""What is done with signals ignored: a requeue signals the very process that asks for it."""


LONGEST_RESTART_S = 10.0
"""Idle nodes that the run keeps cost more than nodes that another job uses meanwhile."""

LOOK_S = 0.05


def retry_delay_s(config: RunConfig, failures: int) -> float:
    """Seconds before the retry that follows ``failures`` earlier ones without progress; 0 for the first."""
    first_s, longest_s = config.fault_tolerance.retry_delay_s, config.fault_tolerance.max_retry_delay_s
    if failures <= 0 or first_s <= 0:
        return 0.0
    from tenacity import RetryCallState, Retrying, wait_exponential_jitter  # only failures pay for the import

    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = failures
    return float(wait_exponential_jitter(initial=first_s, max=max(first_s, longest_s), jitter=first_s)(state))


def wait_before_restart(config: RunConfig, restarts: int) -> float:
    """Wait with the nodes in hand, unless a signal comes; returns the seconds."""
    began = time.monotonic()
    until = began + min(retry_delay_s(config, restarts), LONGEST_RESTART_S)
    while time.monotonic() < until and not any_kept():
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
    return time.monotonic() - began
