"""Before an attempt begins: which nodes of the allocation it runs on, and whether it must keep off them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slurmft.config.config import RunConfig
from slurmft.policy.verdicts.verdict import (
    EXIT_RERUN_ELSEWHERE,
    EXIT_VALIDATION_FAILED,
    Action,
    Cause,
    Decision,
    Verdict,
)
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.recovery.place_elsewhere import MAX_ESCAPES, Duty, choose, duty_of, left, to_keep_off
from slurmft.supervisor.start import Start

_MOVING = frozenset({Cause.STRAGGLER, Cause.VALIDATION_FAILED, Cause.DATA_CORRUPTION, Cause.REPLICAS_DIFFER})
_STARTS = frozenset({EventName.ATTEMPT_STARTED, EventName.CANDIDATE_STARTED})
log = logging.getLogger(__name__)


def next_cycle(attempt: Attempt, history: Sequence[Event]) -> Attempt:
    """``attempt`` with the number of starts that its job and restart have had already."""
    mine = f"{attempt.job}.{attempt.restart}."
    cycles = [
        int(event.attempt.removeprefix(mine))
        for event in history
        if event.event in _STARTS and event.attempt.startswith(mine)
    ]
    return Attempt(job=attempt.job, restart=attempt.restart, cycle=max(cycles, default=-1) + 1)


def settle(config: RunConfig, start: Start) -> tuple[Verdict, Decision] | None:
    """Choose the nodes to run on; what to follow instead of an attempt, when the allocation is on nodes to keep off."""
    cluster = start.cluster
    if not isinstance(cluster, SlurmCluster):
        return None
    cluster.nodes = ()  # those of the last attempt, whose reasons may be gone
    duty = duty_of(start.history)
    allocated = cluster.present()
    excluded = to_keep_off(
        config, partition=cluster.job.partition, job=cluster.own, history=start.history, allocated=allocated
    )
    suspects = duty.nodes & set(allocated)
    former = left(start.history)
    if not (duty.undecided | former) & set(allocated) and not excluded:
        return None
    for avoid in (duty.undecided | former | excluded, duty.undecided | excluded, duty.nodes | excluded, duty.nodes):
        chosen = choose(allocated, avoid, config.size.minimum)
        if chosen is not None and (not excluded & set(chosen) or duty.escapes >= MAX_ESCAPES):
            cluster.nodes = chosen
            if avoid & set(allocated):
                start.journal.append(
                    EventName.KEEPING_OFF, nodes=sorted(set(allocated) - set(chosen)), chosen=list(chosen)
                )
            return None
    return _escape(suspects, excluded, duty, start)


def _escape(
    suspects: frozenset[str], excluded: frozenset[str], duty: Duty, start: Start
) -> tuple[Verdict, Decision] | None:
    """Placed on a node to be avoided: move again, at most MAX_ESCAPES times in a row."""
    nodes = sorted(suspects | excluded)
    start.journal.append(EventName.EXCLUSION_ESCAPED, nodes=nodes, suspects=sorted(suspects), times=duty.escapes + 1)
    log.warning("placed on %s, which the run was to keep off (time %d)", ", ".join(nodes), duty.escapes + 1)
    verdict = Verdict(cause=_why_elsewhere(start.history), reason=f"placed on {', '.join(nodes)}, to be kept off")
    if duty.escapes < MAX_ESCAPES:
        decision = Decision(
            action=Action.CONTINUE, reason=verdict.reason, exit_code=EXIT_RERUN_ELSEWHERE,
            avoid=tuple(sorted(duty.nodes)), elsewhere=bool(duty.nodes),
        )  # fmt: skip
        return verdict, decision
    if not suspects or verdict.cause is Cause.STRAGGLER:  # slow is better than not at all
        return None
    reason = f"inconclusive: {verdict.reason} {duty.escapes + 1} times in a row"
    start.journal.append(EventName.INCONCLUSIVE, reason=reason, suspects=sorted(duty.nodes))
    return verdict, Decision(action=Action.STOP, reason=reason, exit_code=EXIT_VALIDATION_FAILED)


def _why_elsewhere(history: Sequence[Event]) -> Cause:
    """The cause of the newest decision to go on elsewhere."""
    causes = [event.details.get("cause") for event in history if event.event == EventName.VERDICT]
    return Cause(causes[-1]) if causes and causes[-1] in _MOVING else Cause.RERUN_ELSEWHERE
