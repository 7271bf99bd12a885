"""Actions after a verdict: journal the decision, then act on it. A requeue ends the very process that asks for it."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from slurmft.config.config import RunConfig
from slurmft.errors import StorageError
from slurmft.policy.verdicts.decide import Budget, decide
from slurmft.policy.verdicts.final_ends import End, end_of
from slurmft.policy.verdicts.verdict import (
    EXIT_TEMPORARY,
    EXIT_VALIDATION_FAILED,
    FREE,
    PLANNED,
    Action,
    Cause,
    Decision,
    Verdict,
)
from slurmft.scheduler.command import ignoring_signals
from slurmft.scheduler.nodes import expand
from slurmft.storage.claim import SUPERVISOR
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.patience import patiently
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.supervisor.budget import budget_of
from slurmft.supervisor.cluster import Cluster, LocalCluster, SlurmCluster
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.recovery.final_ends import CONTINUE_BY_NOTHING, keep_ended
from slurmft.supervisor.recovery.place_elsewhere import Placement, all_busy, choose, duty_of, next_placement
from slurmft.supervisor.recovery.remedies import Remedies
from slurmft.supervisor.recovery.requeue import FLUSH_S, HANDED_ON, Continuation, in_folder
from slurmft.supervisor.signals import any_kept
from slurmft.supervisor.standby.aside import is_standbys, stand_aside
from slurmft.supervisor.start import Start
from slurmft.system.logs import BackgroundLog

DONE_PATIENCE_S = 300.0
"""How long a complete run waits for a run folder that cannot take the mark of it."""

log = logging.getLogger(__name__)


class Ending:
    """Decides and acts on the end of one attempt.

    Args:
        ends_at_s: monotonic time at which Slurm will have ended the job; None when no end is known.
        dismiss: ends the agents; called once it is decided that no attempt follows with them.
        has_nodes: whether enough of them are left for another attempt.
        outlived: the agents have outlived the supervisor in whose place this process acts.
        abandon: leaves the agents to a standby of this job that has taken the run over.
    """

    def __init__(
        self, config: RunConfig, start: Start, accuser: Accuser, log_file: BackgroundLog,
        *, dismiss: Callable[[], None], has_nodes: Callable[[], bool], outlived: bool = False,
        ends_at_s: float | None = None, abandon: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._abandon = abandon
        self._dismiss, self._has_nodes, self._outlived = dismiss, has_nodes, outlived
        self.config, self.start, self.ends_at_s, self.log_file = config, start, ends_at_s, log_file
        self._accuser = accuser
        self.cluster: Cluster = start.cluster
        self.run, self.journal = start.run, start.journal
        self._placement: Placement | None = None
        self._stays = False
        self._end = End.OPEN
        self._budget = Budget(failures_so_far=0, max_failures=0)
        self._noted: list[Event] = []

    def act_on(self, verdict: Verdict) -> int | None:
        """Decide, journal, act; returns the supervisor's exit code, or None when the run goes on in this allocation.

        A start that another one has replaced decides nothing for the run. Main thread only.
        """
        if (owner := self._newer_owner()) is not None:
            return self._leave_to(owner)
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
        budget = replace(budget, has_nodes=self._has_nodes(), outlived=self._outlived)
        self._budget = budget
        decision = decide(verdict, budget, self.config.exit_actions)
        decision = Remedies(self.config, self.start, self._accuser, has_nodes=budget.has_nodes).applied(
            verdict, decision
        )
        if decision.action is Action.RESTART and self.cluster.lost and self._is_requeued():
            decision = replace(decision, action=Action.CONTINUE, reason=f"{verdict.reason}; Slurm has requeued the job")
        # the exclusion list influences where the run goes on
        self._accuser.finish(verdict, wait=decision.action is not Action.RESTART)
        return self.follow(verdict, decision)

    def _is_requeued(self) -> bool:
        """Whether Slurm has given up a node of this start and the job goes on in another one."""
        outside = self.cluster.why_ending()
        return outside is not None and outside[0] is Cause.REQUEUED

    def _newer_owner(self) -> Owner | None:
        if self.start.lease is not None and not self.start.lease.confirm():
            return _owner_of(self.run)
        owner = in_folder(self.start, self.run.owner)
        return owner if isinstance(owner, Owner) and owner.generation > self.start.generation else None

    def _leave_to(self, owner: Owner) -> int:
        reason = f"job {owner.job}, restart {owner.restart}, on {owner.host} has taken the run over"
        self.journal.append(EventName.SUPERSEDED, reason=reason)
        if is_standbys(owner, self.cluster.attempt):
            self._abandon()
            self._flush()
            return stand_aside(self.run, self.cluster)
        log.error("%s; this start ends and changes nothing", reason)
        self._dismiss()
        self._flush()
        return EXIT_TEMPORARY

    def leave(self, end: End, exit_code: int) -> int:
        """End this start, which decides nothing for the run; returns ``exit_code``."""
        self._dismiss()
        keep_ended(end, self.cluster, self.journal, self.start.history)
        self._flush()
        return exit_code

    @property
    def has_stopped(self) -> bool:
        """Whether it was decided that nothing follows."""
        return self._end in (End.STOPPED, End.FINISHED)

    def follow(self, verdict: Verdict, decision: Decision, *, may_stay: bool = True) -> int | None:
        """Find a place for what was decided, journal, act; returns as ``act_on`` does. Main thread only.

        Args:
            may_stay: other nodes of this allocation will do.
        """
        if decision.action is Action.CONTINUE:
            decision = self._where_to(verdict, decision, may_stay=may_stay)
        demands = {"avoid": list(decision.avoid), "elsewhere": decision.elsewhere}
        self.journal.append(
            EventName.DECISION, action=decision.action.value, reason=decision.reason, exit_code=decision.exit_code,
            **{key: value for key, value in demands.items() if value},
        )  # fmt: skip
        log.info("verdict: %s; decision: %s; %s", verdict.cause.value, decision.action.value, decision.reason)
        self._flush()
        self._end = end_of(decision.action)
        code = self._carry_out(verdict, decision)
        if code is not None:
            keep_ended(self._end, self.cluster, self.journal, self.start.history)
        if not self._flush():
            for event in self.journal.unwritten():
                log.error("not in the journal: %s %s %s", event.at.isoformat(), event.event, event.details)
        return code

    def _carry_out(self, verdict: Verdict, decision: Decision) -> int | None:
        if decision.action is Action.RESTART or self._stays:
            wait_before_restart(self.config, self._budget.restarts_so_far)
            return None
        self._dismiss()
        if self.start.lease is not None and (owner := self._newer_owner()) is not None:
            return self._leave_to(owner)
        if decision.action is Action.CONTINUE:
            return self._continue(verdict, decision)
        outside = self.cluster.why_ending() if decision.action is Action.STOP else None
        if outside is not None and outside[0] is Cause.REQUEUED:
            self.journal.append(
                EventName.REQUEUED_MEANWHILE, reason=outside[1]
            )  # the next start finds the KILL, and ends
        else:  # only now: a stop must outlive an attempt that could not finish it
            in_folder(self.start, lambda: self.run.take_request("KILL"))
        if decision.action is Action.STOP:
            return decision.exit_code
        done = {"step": verdict.last_step or None, "job": self.cluster.attempt.job, "reason": decision.reason}
        patiently(
            lambda: self.start.thread.call(lambda: self.run.mark_done(**done), timeout_s=DONE_PATIENCE_S),
            patience_s=DONE_PATIENCE_S,
        )
        return 0

    def _where_to(self, verdict: Verdict, decision: Decision, *, may_stay: bool) -> Decision:
        """The decision, as far as there are nodes for it. A run that may not go on here, and cannot elsewhere, ends."""
        if not isinstance(self.cluster, SlurmCluster):
            if verdict.cause is Cause.RECLAIMED:
                reason = f"{verdict.reason}; there is no queue to go on through: start it again elsewhere"
                return replace(decision, action=Action.STOP, reason=reason)
            why = "there are no other nodes"
            return self._without_others(verdict, decision, why) if decision.elsewhere else decision
        if (
            may_stay
            and decision.elsewhere
            and decision.avoid
            and choose(self.cluster.present(), frozenset(decision.avoid), self.config.size.minimum)
        ):
            self._stays = self.cluster.why_ending() is None
            if self._stays:
                return decision
        history = (*self.start.history, *self._noted)
        suspects = dict.fromkeys((*decision.avoid, *([] if decision.elsewhere else self._undecided(verdict))))
        self._placement = next_placement(
            self.config, partition=self.cluster.job.partition, job=self.cluster.own, history=history,
            suspects=tuple(suspects),
        )  # fmt: skip
        if self._placement is None:
            return decision
        why = self._placement.impossible
        if not why and verdict.cause is Cause.RERUN_ELSEWHERE and not self.config.rerun.wait_for_others:
            job = self.cluster.job
            why = all_busy(self.config, job.partition, expand(job.nodes), self._placement.excluded)
        if decision.elsewhere and why:
            return self._without_others(verdict, decision, why)
        self._note(EventName.AVOIDING, **self._placement.avoidance.as_event())
        return decision

    def _undecided(self, verdict: Verdict) -> list[str]:
        """Suspects of an earlier end that this attempt has not cleared or confirmed."""
        return [] if verdict.progressed else sorted(duty_of(self.start.history).undecided)

    def _without_others(self, verdict: Verdict, decision: Decision, why: str) -> Decision:
        gpus = {suspect.gpu for suspect in verdict.suspects}
        if all(gpus) and not gpus <= duty_of(self.start.history).gpus:  # each node's agent checks whether it can
            self._note(EventName.AVOIDING_GPUS, gpus=sorted(gpus), reason=why)
            return replace(decision, elsewhere=False, reason=f"{decision.reason}; on other GPUs, since {why}")
        if verdict.cause is Cause.VALIDATION_FAILED:
            reason = f"{decision.reason}; there is no other hardware to go on with: {why}"
            return Decision(action=Action.STOP, reason=reason, exit_code=EXIT_VALIDATION_FAILED)
        if verdict.cause is not Cause.RERUN_ELSEWHERE:
            return replace(decision, elsewhere=False, reason=f"{decision.reason}; it goes on where it was: {why}")
        reason = f"inconclusive: {decision.reason}; it cannot be computed again on different hardware: {why}"
        self._note(EventName.INCONCLUSIVE, reason=reason, suspects=list(decision.avoid))
        return Decision(action=Action.STOP, reason=reason, exit_code=EXIT_VALIDATION_FAILED)

    def _note(self, event: EventName, **details: Any) -> None:
        self._noted.append(self.journal.append(event, **details))

    def _continue(self, verdict: Verdict, decision: Decision) -> int | None:
        claim = self.run.ending(self.cluster.attempt)
        # an unreadable run folder must not block this: requeueing twice is as good as once
        if in_folder(self.start, lambda: claim.take(f"{SUPERVISOR}{os.uname().nodename}")) is False:
            if self._was_continued(verdict):
                reason = "the end of this attempt was acted on already"
                self.journal.append(EventName.NOT_CONTINUED, reason=reason)
                return decision.exit_code
            self.journal.append(EventName.CLAIM_OVERRULED, outcome=in_folder(self.start, claim.outcome) or "none")
            in_folder(self.start, claim.give_back)
            in_folder(self.start, lambda: claim.take(f"{SUPERVISOR}{os.uname().nodename}"))
        if self.config.preemption.continue_by == "nothing":
            self._end = End.NOT_CONTINUED
            self.journal.append(EventName.NOT_CONTINUED, reason=CONTINUE_BY_NOTHING)
            log.warning("to continue the run: %s", self._by_hand())
            return decision.exit_code
        if isinstance(self.cluster, LocalCluster):
            self.journal.append(EventName.STARTING_ANEW, restart=self.cluster.attempt.restart + 1)
            self._flush()  # the claim stays ours: the next start is this process, and may be killed before it begins
            from slurmft.scheduler.submission import RunSupervisor  # brings submitit, which only this branch needs

            self.log_file.close()
            self.cluster.start_anew(RunSupervisor(self.run.config).argv())
        if not isinstance(self.cluster, SlurmCluster):
            raise TypeError(f"no way to continue on {self.cluster.name}")
        with ignoring_signals():
            outcome = self._continuation(self.cluster, verdict).begin(verdict)
            in_folder(self.start, (lambda: claim.settle(outcome)) if outcome else claim.give_back)
        if outcome:
            self._end = End.HANDED_ON if outcome.startswith(HANDED_ON) else End.OPEN
            return decision.exit_code
        command = self._by_hand()
        self.journal.append(EventName.NOT_CONTINUED, reason="neither requeue nor resubmit worked", command=command)
        log.error("THE RUN IS SAVED BUT WILL NOT CONTINUE BY ITSELF. To continue it: %s", command)
        return EXIT_TEMPORARY

    def _was_continued(self, verdict: Verdict) -> bool:
        """Whether Slurm puts the job back into the queue already; what cron claims while this process lives is void."""
        if not isinstance(self.cluster, SlurmCluster):
            return True
        with ignoring_signals():
            return self._continuation(self.cluster, verdict).begin_after_another()

    def _continuation(self, cluster: SlurmCluster, verdict: Verdict) -> Continuation:
        return Continuation(
            self.config, self.start, cluster, ends_at_s=self.ends_at_s, placement=self._placement,
            retry_delay_s=0.0 if verdict.cause in FREE else retry_delay_s(self.config, self._budget.failures_so_far),
        )  # fmt: skip

    def _flush(self) -> bool:
        return self.journal.flush(FLUSH_S)

    def _by_hand(self) -> str:
        return shlex.join(["slurmft", "submit", str(self.run.config)])


def _owner_of(run: RunFolder) -> Owner:
    """The run's owner; waits for a run folder that cannot be read: to go on without it, or to end, would harm it."""
    while True:
        with contextlib.suppress(StorageError, OSError):
            if (owner := run.owner()) is not None:
                return owner
        time.sleep(LOOK_S)


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
