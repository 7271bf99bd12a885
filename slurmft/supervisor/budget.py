"""The run's journal as the budget it has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slurmft.config.config import RunConfig
from slurmft.policy.verdicts.budget import PastEnd, budget_for
from slurmft.policy.verdicts.decide import Budget
from slurmft.policy.verdicts.symptoms import bug_of
from slurmft.policy.verdicts.verdict import Action, Verdict, has_progressed
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event

CHANGES = frozenset({EventName.BATCH_REDUCED, EventName.CHECKPOINT_QUARANTINED})
"""Changes of the run after which its count begins anew; they have limits of their own."""

EARLY_S = 600.0
"""A script without a session that ends later may have done a good part of its work."""


def budget_of(history: Sequence[Event], verdict: Verdict, config: RunConfig, attempt: str = "") -> Budget:
    """The budget spent before ``verdict`` of ``attempt``; ``history`` is the journal without that attempt."""
    section = config.fault_tolerance
    return budget_for(
        verdict,
        past_ends(history),
        retries=section.num_job_retries_on_failure,
        retries_of=section.retries,
        max_no_progress_cycles=section.max_no_progress_cycles,
        restarts=section.num_in_job_restarts,
        job_start=_job_start(attempt),
    )


def past_ends(history: Sequence[Event]) -> list[PastEnd]:
    """Each end in the journal, oldest first; damaged entries count as no progress."""
    ends, began_s = [], 0.0
    for event in history:
        facts = event.details
        if event.event == EventName.WORKERS_STARTED:
            began_s = event.seconds()
        elif event.event == EventName.VERDICT:
            ends.append(
                PastEnd(
                    cause=str(facts.get("cause", "")), progressed=progressed(facts), first_step=_first_step(facts),
                    bug=_bug(facts) if event.seconds() - began_s < EARLY_S else "",
                )
            )  # fmt: skip
        elif (event.event == EventName.DECISION and facts.get("action") == Action.STOP) or event.event in CHANGES:
            ends.append(PastEnd(cause="", given_up=True))
        elif event.event == EventName.DECISION and facts.get("action") == Action.RESTART and ends:
            ends[-1] = replace(ends[-1], restarted_in=_job_start(event.attempt))
    return ends


def _job_start(attempt: str) -> str:
    """The part of an attempt's name that all attempts of one start of a job share."""
    return attempt.rpartition(".")[0]


def _bug(facts: Mapping[str, object]) -> str:
    first, last = facts.get("first_step", 0), facts.get("last_step", 0)
    has_worked = type(first) is not int or type(last) is not int or last > first
    return "" if has_worked else bug_of(str(facts.get("traceback") or ""))


def _first_step(facts: Mapping[str, object]) -> int | None:
    first, last, saved = facts.get("first_step", 0), facts.get("last_step"), facts.get("saved_step")
    return first if type(first) is int and (last or saved is not None) else None


def progressed(facts: Mapping[str, object]) -> bool:
    """Whether the end that these details of an event ``verdict`` describe came after a new saved step."""
    first, saved = facts.get("first_step", 0), facts.get("saved_step")
    return has_progressed(first, saved) if type(first) is int and type(saved) is int else False
