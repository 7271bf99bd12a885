"""Where every second of a run went, from the events of its journal alone.

A boundary closes the open stretch of time and begins the next one, so the categories sum to the wall time by
construction. Boundaries that become known later (when the newest step was done, when the session began) cut the stretch
that is still open. Events may come from hosts whose clocks differ: time never goes back. Memory is bounded, whatever
the journal holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurmft.policy.verdicts.verdict import BUDGETED, Action
from slurmft.reporting.times import (
    MAX_CAUSES,
    MAX_KEPT,
    MAX_NODES,
    Account,
    AttemptRow,
    Category,
    End,
    Inference,
    Interval,
    Loss,
    Mark,
)
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event

_FAILURES = frozenset(cause.value for cause in BUDGETED)
_NOTICED = frozenset(
    {
        EventName.WORKER_FAILED, EventName.WORKER_HUNG, EventName.AGENTS_GONE, EventName.ENDED_FROM_OUTSIDE,
        EventName.SUPERVISOR_LOST, EventName.KILLING_WORKERS,
    }
)  # fmt: skip
"""The first of these in an attempt is the moment in which its failure was noticed."""

_QUEUED = frozenset(
    {EventName.REQUEUED, EventName.RESUBMITTED, EventName.LEFT_TO_SLURM, EventName.REQUEUED_MEANWHILE,
     EventName.RELEASED, EventName.RESCUING, EventName.PLACED}
)  # fmt: skip
_MARKS: Mapping[str, str] = {
    EventName.STOP_SAVED: "save", EventName.SAVE_REQUESTED: "save", EventName.SAVE_FAILED: "save failed",
    EventName.FAULT_INJECTED: "injected", EventName.STOP_REQUESTED: "stop",
}  # fmt: skip
_WORKING = frozenset({Category.TRAINING, Category.REDONE})
_FIRST_CAUSE = "first start"
_OTHERS = "other causes"
_MAX_RANKS = 1 << 24
IMPORT_S = 600.0
"""A script that says nothing of its steps, and fails earlier than this, has not come to its training."""


class Accounting:
    """Takes in events, oldest first; ``finish`` gives the account.

    Args:
        since_s: Unix time before which nothing is counted.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self.account = Account()
        self._since_s = since_s
        self._cursor_s = self._newest_s = 0.0
        self._phase = Category.IDLE
        self._began = False
        self._ranks = 0
        self._end = End("", 0.0, _FIRST_CAUSE)
        self._row: AttemptRow | None = None
        self._noticed_s: float | None = None
        self._stop_s: float | None = None
        self._measured: Mapping[str, Any] = {}
        self._is_judged = True
        self._is_injected = False
        self._reached = 0
        self._resumed = 0
        self._stalled_s = 0.0
        self._loop_s = 0.0
        self._has_stepped = False
        self._job = ""
        self._down: dict[tuple[str, Any], float] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Take in events."""
        for event in events:
            self.note(event)

    def note(self, event: Event) -> None:
        """Take in one event; what does not fit in it is left out."""
        at_s, account = event.seconds(), self.account
        account.events += 1
        self._newest_s = max(self._newest_s, at_s)
        if not self._began:
            self._began = True
            self._cursor_s = account.begin_s = max(at_s, self._since_s)
        if (handler := _HANDLERS.get(event.event)) is not None:
            handler(self, event, at_s)
        elif event.event in _NOTICED:
            if not self._is_judged and self._noticed_s is None:
                self._noticed_s = at_s
                self._mark(at_s, "fault", str(event.details.get("reason") or event.details.get("error") or event.event))
        elif event.event in _QUEUED and self._is_judged:
            self._turn(at_s, Category.QUEUE)
        if (kind := _MARKS.get(event.event)) is not None:
            self._mark(at_s, kind, str(event.details.get("reason") or event.details.get("who") or ""))

    def finish(self, *, now_s: float, seen: Mapping[str, Any] | None = None, fresh_s: float = 60.0) -> Account:
        """Close the account: now, where the run goes on, else with its last sign of life.

        Args:
            seen: the newest progress report: ``attempt``, ``at`` (Unix time), ``step``, ``stall_s``.
        """
        account, seen = self.account, seen or {}
        mine = self._row is not None and not self._is_judged and seen.get("attempt") == self._row.attempt
        at_s = _number(seen.get("at")) if mine else 0.0
        account.is_open = self._phase is Category.QUEUE or (
            not self._is_judged and now_s - max(at_s, self._newest_s) < fresh_s
        )
        end_s = now_s if account.is_open and now_s > self._newest_s else max(self._newest_s, min(at_s, now_s))
        if mine:
            account.step = max(account.step, _whole(seen.get("step")))
            account.saves += _whole(seen.get("saves_done"))
        self._turn(end_s, self._phase)
        if mine and self._phase in _WORKING:
            self._book_stall(_number(seen.get("stall_s")), self._phase)
        account.end_s = max(self._cursor_s, account.begin_s)
        if self._row is not None and not self._row.ended_s:
            self._row.ended_s = account.end_s
            self._row.last_step = max(self._row.last_step, _whole(seen.get("step")) if mine else 0)
        for key, since_s in self._down.items():
            self._back(key, account.end_s, since_s)
        self._close(self._end)
        return account

    # Stretches of time

    def _turn(self, at_s: float, category: Category) -> None:
        """The open stretch ends at ``at_s``; what follows is of ``category``."""
        if at_s > self._cursor_s:
            self._book(self._cursor_s, at_s, self._phase)
            self._cursor_s = at_s
        self._phase = category

    def _book(self, begin_s: float, end_s: float, category: Category) -> None:
        begin_s, account = max(begin_s, self._since_s), self.account
        if end_s <= begin_s:
            return
        self._add(category, end_s - begin_s)
        last = account.intervals[-1] if account.intervals else None
        if last is not None and last.category is category and last.end_s == begin_s:
            account.intervals[-1] = last._replace(end_s=end_s)
        else:
            account.intervals.append(Interval(begin_s, end_s, category))
        if category in _WORKING or category in (Category.IMPORT, Category.SETUP, Category.LOAD, Category.DETECTION):
            account.exposed_s += end_s - begin_s

    def _add(self, category: Category, seconds: float) -> None:
        account = self.account
        account.seconds[category] += seconds
        if category in (Category.TRAINING, Category.SAVES):
            account.rank_s[category] += seconds * self._ranks
        elif category is not Category.IDLE:
            self._end.seconds[category] += seconds

    def _book_stall(self, stalled_s: float, of: Category) -> None:
        """Of the newest stretch of work, saves have taken what was added to their sum since the last time."""
        seconds, self._stalled_s = stalled_s - self._stalled_s, stalled_s
        if (seconds := min(seconds, self.account.seconds[of])) > 0:
            self._add(of, -seconds)
            self._add(Category.SAVES, seconds)

    def _mark(self, at_s: float, kind: str, text: str) -> None:
        if at_s >= self._since_s:
            self.account.marks.append(Mark(at_s, kind, text[:200]))

    # Starts

    def _submitting(self, event: Event, at_s: float) -> None:
        is_local = event.details.get("cluster") == "local"
        if self._is_judged:
            self._begin_anew()
            self._turn(at_s, Category.LAUNCH if is_local else Category.QUEUE)

    def _refused(self, _event: Event, at_s: float) -> None:
        """A submission that sbatch refused never was in the queue."""
        if self._is_judged:
            self._phase = Category.IDLE
            self._turn(at_s, Category.IDLE)

    def _begin_anew(self) -> None:
        if self._phase is Category.IDLE:
            self._close(self._end)
            self._end = End("", self._newest_s, _FIRST_CAUSE, ranks=self._ranks)

    def _attempt_started(self, event: Event, at_s: float) -> None:
        account = self.account
        if not self._is_judged:
            self._lost(event, at_s)
        elif self._phase is Category.IDLE:
            self._begin_anew()
        job = event.attempt.rsplit(".", 2)[0]
        account.jobs, self._job = account.jobs + (job != self._job), job
        account.attempts += 1
        if self._phase is not Category.RESTART:
            self._turn(at_s, Category.LAUNCH)
        self._row = AttemptRow(event.attempt, at_s, ranks=self._ranks)
        account.rows.append(self._row)
        self._noticed_s = self._stop_s = None
        self._measured, self._is_judged, self._has_stepped, self._is_injected = {}, False, False, False
        self._stalled_s = self._loop_s = 0.0

    def _lost(self, event: Event, at_s: float) -> None:
        """The attempt before has left no verdict: its supervisor was lost, with its node or alone."""
        before = event.details.get("before")
        seen = before if isinstance(before, Mapping) else {}
        last_s = min(_number(seen.get("at")), at_s)
        facts = {"cause": "supervisor lost", "last_step": seen.get("step"), "reason": "it left no verdict"}
        self._measured = seen
        self._judge(facts, last_s or self._newest_known(at_s), event.attempt)
        self._turn(at_s, Category.LAUNCH)

    def _newest_known(self, at_s: float) -> float:
        # nothing says how long it went on after its last event
        self._turn(self._cursor_s, Category.UNKNOWN)
        return at_s

    def _workers_started(self, event: Event, at_s: float) -> None:
        self._turn(at_s, Category.IMPORT)
        self._take_ranks(_whole(event.details.get("world_size")))

    def _take_ranks(self, ranks: int) -> None:
        self._ranks = min(ranks, _MAX_RANKS) or self._ranks
        self.account.world_size = self._ranks
        if self._row is not None:
            self._row.ranks = self._ranks
        if not self._end.ranks:
            self._end.ranks = self._ranks

    def _agents_ready(self, event: Event, _at_s: float) -> None:
        hosts = event.details.get("hosts")
        self.account.nodes = len(hosts) if isinstance(hosts, list) else self.account.nodes

    def _first_step(self, event: Event, at_s: float) -> None:
        facts, self._resumed = event.details, _whole(event.details.get("resumed_from"))
        done_s = min(at_s, _number(facts.get("first_step_at")) or at_s)
        loop_s = min(done_s, _number(facts.get("loop_at")) or done_s)
        attached_s = min(loop_s, _number(facts.get("attached_at")) or loop_s)
        self._turn(attached_s, Category.SETUP)
        self._turn(max(self._cursor_s, loop_s - _number(facts.get("load_s"))), Category.LOAD)
        self._turn(loop_s, Category.REDONE if self._reached > self._resumed else Category.TRAINING)
        self._loop_s, self._has_stepped = self._cursor_s, True
        if self._row is not None:
            self._row.first_step = self._row.last_step = self._resumed

    def _caught_up(self, event: Event, at_s: float) -> None:
        self._turn(min(at_s, _number(event.details.get("step_at")) or at_s), Category.REDONE)
        self._book_stall(_number(event.details.get("stall_s")), Category.REDONE)
        self._phase = Category.TRAINING
        self._reached = max(self._resumed, 0)

    def _suspended(self, event: Event, at_s: float) -> None:
        phase = self._phase
        self._turn(at_s - _number(event.details.get("seconds")), Category.IDLE)
        self._turn(at_s, phase)

    # Ends

    def _injected(self, _event: Event, _at_s: float) -> None:
        self._is_injected = not self._is_judged

    def _stop_requested(self, _event: Event, at_s: float) -> None:
        if self._stop_s is None and not self._is_judged:
            self._stop_s = at_s

    def _agent_lost(self, event: Event, at_s: float) -> None:
        if not event.details.get("spare") and self._noticed_s is None and not self.account.inference:
            self._noticed_s = at_s
            self._mark(at_s, "fault", str(event.details.get("reason") or event.event))

    def _note_measured(self, event: Event, _at_s: float) -> None:
        self._measured = event.details

    def _verdict(self, event: Event, at_s: float) -> None:
        if not self._is_judged:
            self._judge(event.details, at_s, event.attempt)

    def _judge(self, facts: Mapping[str, Any], at_s: float, attempt: str) -> None:
        cause, reason = str(facts.get("cause") or "unknown")[:60], str(facts.get("reason") or "")[:300]
        last = max(_whole(facts.get("last_step")), self._resumed if self._has_stepped else 0)
        is_failure = cause in _FAILURES
        died_early = is_failure and (self._noticed_s or at_s) - self._cursor_s < IMPORT_S
        if self._measured.get("attached") is False and self._phase is Category.IMPORT and not died_early:
            self._phase = Category.TRAINING  # a script that says nothing of its steps
        noticed_s = min(at_s, self._noticed_s or at_s)
        is_sudden = is_failure or (self._noticed_s is not None and noticed_s < (self._stop_s or at_s))
        was_working = self._phase in _WORKING
        self._end_attempt(last, at_s, noticed_s if is_sudden else None)
        self._close(self._end)
        self._end = End(
            attempt, at_s, cause, reason, is_failure, () if self._is_injected else _nodes_of(facts), self._ranks
        )
        if is_sudden:
            self._phase = Category.DETECTION if was_working else self._phase
            self._turn(noticed_s, Category.EVIDENCE)
        self._turn(at_s, Category.SHUTDOWN)
        account = self.account
        account.saves += _whole(self._measured.get("saves_done"))
        account.step, self._reached = max(account.step, last), max(self._reached, last)
        if at_s >= self._since_s:
            account.ends.append(self._end)
            account.failures += is_failure
        if self._row is not None:
            self._row.ended_s, self._row.last_step = at_s, last
            self._row.cause, self._row.reason = cause, reason
        self._is_judged = True

    def _end_attempt(self, last: int, at_s: float, noticed_s: float | None) -> None:
        """Close what the attempt did until its failure was noticed, or until its stop."""
        step_s, end_s = min(_number(self._measured.get("step_at")), at_s), at_s
        if noticed_s is not None:
            end_s = min(step_s or noticed_s, noticed_s) if self._phase in _WORKING else noticed_s
        elif self._stop_s is not None:
            end_s = max(self._stop_s, step_s)  # steps go on until the ranks have agreed where to stop
        elif step_s and self._phase in _WORKING:
            end_s = step_s
        if self._phase is Category.REDONE and last > self._reached > self._resumed:  # a journal without "caught up"
            share = (self._reached - self._resumed) / (last - self._resumed)
            self._turn(self._loop_s + share * max(0.0, end_s - self._loop_s), Category.TRAINING)
        work = self._phase
        self._turn(end_s, Category.SHUTDOWN if noticed_s is None else work)
        if work in _WORKING:
            self._book_stall(_number(self._measured.get("stall_s")), work)

    def _decision(self, event: Event, at_s: float) -> None:
        action = event.details.get("action")
        if action == Action.RESTART:
            self._turn(at_s, Category.RESTART)
        elif action == Action.CONTINUE:
            self._turn(at_s, Category.SHUTDOWN)
        else:
            self._turn(at_s, Category.IDLE)

    def _gone(self, _event: Event, at_s: float) -> None:
        if self._is_judged:
            self._turn(at_s, Category.IDLE)

    def _starting_anew(self, _event: Event, at_s: float) -> None:
        self._turn(at_s, Category.LAUNCH)

    def _close(self, end: End) -> None:
        """Nothing more is added to this end: add it to the sums of its cause and of its nodes."""
        end.ranks = end.ranks or self._ranks
        if not end.attempt and not end.seconds:
            return  # before the first start
        causes, nodes = self.account.by_cause, self.account.by_node
        cause = end.cause if end.cause in causes or len(causes) < MAX_CAUSES else _OTHERS
        for key, table in ((cause, causes), *((node, nodes) for node in end.nodes)):
            if table is causes or key in nodes or len(nodes) < MAX_NODES:
                loss = table.setdefault(key, Loss())
                loss.ends += end.at_s >= self._since_s
                loss.seconds += end.cost_s
                loss.rank_s += end.rank_s
        for category, seconds in end.seconds.items():
            self.account.rank_s[category] += 0 if category in (Category.QUEUE, Category.IDLE) else seconds * end.ranks

    # Inference

    def _requests_opened(self, event: Event, at_s: float) -> None:
        of = self.account.inference = self.account.inference or Inference()
        self.account.nodes = 0
        of.total, of.answered = _whole(event.details.get("total")), _whole(event.details.get("answered"))
        self._turn(at_s, Category.SETUP)

    def _endpoint_opened(self, _event: Event, at_s: float) -> None:
        self.account.inference = self.account.inference or Inference()
        self.account.inference.is_endpoint, self.account.nodes = True, 0
        self._turn(at_s, Category.SETUP)

    def _replica_ready(self, event: Event, at_s: float) -> None:
        if not self._is_judged and self._phase in (Category.SETUP, Category.LAUNCH, Category.RESTART):
            self._turn(at_s, Category.TRAINING)
            self._has_stepped = True
        key = str(event.details.get("node")), str(event.details.get("replica"))
        if (since_s := self._down.pop(key, None)) is not None:
            self._back(key, at_s, since_s)

    def _replica_died(self, event: Event, at_s: float) -> None:
        of = self.account.inference = self.account.inference or Inference()
        of.deaths += 1
        if len(self._down) < MAX_KEPT:
            self._down.setdefault((str(event.details.get("node")), str(event.details.get("replica"))), at_s)
        self._mark(at_s, "fault", str(event.details.get("reason") or "a replica died"))

    def _back(self, _key: tuple[str, str], at_s: float, since_s: float) -> None:
        if self.account.inference is not None:
            self.account.inference.down_s += max(0.0, at_s - max(since_s, self._since_s))

    def _node_answers(self, event: Event, _at_s: float) -> None:
        self.account.nodes += 1
        self._take_ranks(self.account.nodes)  # a node is what an inference run loses

    def _given_up(self, _event: Event, _at_s: float) -> None:
        if self.account.inference is not None:
            self.account.inference.given_up += 1

    def _output(self, event: Event, _at_s: float) -> None:
        of = self.account.inference = self.account.inference or Inference()
        of.errors = _whole(event.details.get("errors"))
        of.answered = _whole(event.details.get("answers")) + of.errors


_HANDLERS: Mapping[str, Callable[[Accounting, Event, float], None]] = {
    EventName.SUBMITTING: Accounting._submitting,
    EventName.SUBMISSION_FAILED: Accounting._refused,
    EventName.FAULT_INJECTED: Accounting._injected,
    EventName.ATTEMPT_STARTED: Accounting._attempt_started,
    EventName.AGENTS_READY: Accounting._agents_ready,
    EventName.WORKERS_STARTED: Accounting._workers_started,
    EventName.FIRST_STEP: Accounting._first_step,
    EventName.CAUGHT_UP: Accounting._caught_up,
    EventName.MEASURED: Accounting._note_measured,
    EventName.WAS_SUSPENDED: Accounting._suspended,
    EventName.STOP_REQUESTED: Accounting._stop_requested,
    EventName.AGENT_LOST: Accounting._agent_lost,
    EventName.VERDICT: Accounting._verdict,
    EventName.DECISION: Accounting._decision,
    EventName.NOT_CONTINUED: Accounting._gone,
    EventName.CANCELLED: Accounting._gone,
    EventName.STARTING_ANEW: Accounting._starting_anew,
    EventName.REQUESTS_OPENED: Accounting._requests_opened,
    EventName.ENDPOINT_OPENED: Accounting._endpoint_opened,
    EventName.REPLICA_READY: Accounting._replica_ready,
    EventName.REPLICA_DIED: Accounting._replica_died,
    EventName.REQUEST_GIVEN_UP: Accounting._given_up,
    EventName.OUTPUT_WRITTEN: Accounting._output,
    EventName.NODE_ANSWERS: Accounting._node_answers,
}
WANTED = frozenset(str(name).encode() for name in (*_HANDLERS, *_NOTICED, *_QUEUED, *_MARKS))
"""Names of the events whose details count; of others, the number and the time."""


def _nodes_of(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Nodes that a verdict blames: its suspects', else its culprit's."""
    suspects = facts.get("suspects")
    listed = suspects if isinstance(suspects, list) else []
    nodes = [str(each.get("node"))[:255] for each in listed[:64] if isinstance(each, Mapping) and each.get("node")]
    named = [str(facts["node"])[:255]] if facts.get("node") else []
    return tuple(dict.fromkeys(nodes or named))


def _number(value: Any) -> float:
    """A time or a duration; 0 for anything else."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e11 else 0.0


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 50 else 0
