"""Changes of a run before it is tried again: a smaller micro-batch after one that did not fit, an older checkpoint
after one from which it dies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from slurmft.config.config import RunConfig
from slurmft.policy.checkpoints.oom import OUT_OF_MEMORY, Irreducible, divisor_in, smaller
from slurmft.policy.checkpoints.poison import Hopeless, NodeSuspected, Poisoned
from slurmft.policy.verdicts.decide import RESTARTABLE
from slurmft.policy.verdicts.exit_actions import ExitAction, explicit_action
from slurmft.policy.verdicts.verdict import EXIT_DO_NOT_REQUEUE, EXIT_TEMPORARY, GOES_ON, Action, Decision, Verdict
from slurmft.storage.attempt_facts import noted_batches
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.recovery.poison import Poisoning
from slurmft.supervisor.recovery.requeue import in_folder
from slurmft.supervisor.start import Start

log = logging.getLogger(__name__)


def batch_divisor_of(history: Sequence[Event]) -> int:
    """The number of pieces in which the workers of the next attempt compute each micro-batch."""
    return divisor_in(event.details.get("divisor") for event in history if event.event == EventName.BATCH_REDUCED)


class Remedies:
    """Looks at one verdict and what was decided about it.

    Args:
        has_nodes: enough nodes are left in this allocation to go on at once.
    """

    def __init__(self, config: RunConfig, start: Start, accuser: Accuser, *, has_nodes: bool) -> None:
        self._has_nodes = has_nodes
        self._poisoning = Poisoning(config, start, accuser)
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
        match self._poisoning.look_at(verdict):
            case Poisoned(reason=reason) if self._may_retry(verdict, decision):
                return self._again(verdict, decision, reason)
            case NodeSuspected(node=node, reason=reason) if self._may_retry(verdict, decision):
                avoid = tuple(dict.fromkeys([*decision.avoid, node]))
                going_on = self._again(verdict, decision, f"{reason}; next on another node")
                return replace(going_on, action=Action.CONTINUE, avoid=avoid)
            case Hopeless(reason=reason):
                return Decision(action=Action.STOP, reason=f"{verdict.reason}; {reason}", exit_code=EXIT_DO_NOT_REQUEUE)
        return decision

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
