"""What is counted of a run, from its journal alone: so counts survive requeues and never go back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from slurmft.policy.verdicts.verdict import PLANNED, Cause, steps_at_risk
from slurmft.storage.events import EventName
from slurmft.storage.history.journal_tail import Entry

QUEUE, START, WORK, BETWEEN = "queue", "start", "work", "between attempts"
SPANS = (QUEUE, START, WORK, BETWEEN)
"""Where the time of a run goes: it waits for nodes, gets to its first step, works, or is between two attempts."""

OTHER = "other"

_BEGINS: Mapping[str, str | None] = {
    EventName.SUBMITTED: QUEUE, EventName.REQUEUED: QUEUE, EventName.RESUBMITTED: QUEUE, EventName.RESCUING: QUEUE,
    EventName.ATTEMPT_STARTED: START, EventName.FIRST_STEP: WORK, EventName.REQUESTS_OPENED: WORK,
    EventName.ENDPOINT_OPENED: WORK, EventName.VERDICT: BETWEEN, EventName.CANCELLED: None,
    EventName.SUBMISSION_FAILED: None, EventName.NOT_CONTINUED: None,
}  # fmt: skip
"""Event -> the span that begins with it; None: the run waits for nothing."""

_COUNTED: Mapping[str, tuple[str, str]] = {
    EventName.ATTEMPT_STARTED: ("attempts", "Attempts that were started."),
    EventName.REQUEUED: ("requeues", "Times that the run's job was requeued."),
    EventName.RESUBMITTED: ("resubmissions", "Successors that were submitted."),
    EventName.WORKER_FAILED: ("worker_failures", "Ranks that failed."),
    EventName.WORKER_HUNG: ("hangs", "Hangs that were found."),
    EventName.AGENT_LOST: ("nodes_lost", "Nodes whose agent fell silent."),
    EventName.SAVE_FAILED: ("saves_failed", "Saves that failed."),
    EventName.STRAGGLER_DETECTED: ("stragglers", "Slow nodes that were found."),
    EventName.FAULT_INJECTED: ("faults_injected", "Faults that were injected on purpose."),
    EventName.SUPERVISOR_LOST: ("supervisors_lost", "Supervisors that were killed."),
    EventName.REPLICA_DIED: ("replicas_died", "Replicas that ended or hung."),
    EventName.REQUEST_GIVEN_UP: ("requests_given_up", "Requests that killed engines."),
}  # fmt: skip
"""Event -> name and meaning of its count."""

NAMES = frozenset(map(str, (*_COUNTED, *_BEGINS, EventName.DECISION, EventName.REPLICA_READY, EventName.REPLICA_DOWN)))
"""The events that change a count; no other need be read."""

ABOUT: Mapping[str, str] = dict(_COUNTED.values())
_CAUSES = frozenset(each.value for each in Cause)


class RunCounts:
    """The counts of one run so far, and what it is doing by its journal."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter(dict.fromkeys(ABOUT, 0))
        """By the names of ``ABOUT``."""

        self.ends: Counter[str] = Counter()
        """Verdicts, by cause."""

        self.span_s: dict[str, float] = dict.fromkeys(SPANS, 0.0)
        """Seconds of spans that have ended."""

        self.lost_steps = 0
        """Steps that had to be done again."""

        self.span: str | None = None
        """The span that goes on."""

        self.since: float | None = None
        """When it began, as Unix time."""

        self.job = self.nodes = self.attempt = ""
        self.ready_replicas: set[tuple[str, str]] = set()

    def take(self, entries: Iterable[Entry]) -> None:
        """Count these events; those of a newer slurmft, and values that do not fit, are left out."""
        for entry in entries:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        if (counted := _COUNTED.get(entry.name)) is not None:
            self.events[counted[0]] += 1
        if entry.name in _BEGINS:
            self._begin(_BEGINS[entry.name], entry.at)
        match entry.name:
            case EventName.ATTEMPT_STARTED:
                self.attempt, self.job = entry.attempt, entry.attempt.partition(".")[0]
                self.nodes = str(entry.details.get("nodes") or entry.details.get("host") or "")
                self.ready_replicas.clear()
            case EventName.VERDICT:
                self._judge(entry.details)
            case EventName.DECISION if entry.details.get("action") in ("stop", "finish"):
                self._begin(None, entry.at)
            case EventName.REPLICA_READY:
                self.ready_replicas.add(_replica(entry.details))
            case EventName.REPLICA_DIED | EventName.REPLICA_DOWN:
                self.ready_replicas.discard(_replica(entry.details))

    def _judge(self, facts: Mapping[str, Any]) -> None:
        cause = str(facts.get("cause", ""))
        self.ends[cause if cause in _CAUSES else OTHER] += 1
        first, last, saved = (facts.get(name) for name in ("first_step", "last_step", "saved_step"))
        if type(first) is int and type(last) is int:
            self.lost_steps += steps_at_risk(first, last, saved if type(saved) is int else None)

    def _begin(self, span: str | None, at: float) -> None:
        if self.span == span == QUEUE:
            return  # submitted, and then requeued: one wait
        if self.span is not None and self.since is not None:
            self.span_s[self.span] += max(0.0, at - self.since)  # clocks of two hosts differ
        self.span, self.since = span, at


def category_of(cause: str) -> str:
    """``planned``, ``finished`` or ``failure``."""
    if cause == Cause.FINISHED.value:
        return "finished"
    return "planned" if cause in {*(each.value for each in PLANNED), Cause.CANCELLED.value} else "failure"


def _replica(facts: Mapping[str, Any]) -> tuple[str, str]:
    return str(facts.get("node")), str(facts.get("replica"))
