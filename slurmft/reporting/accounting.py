"""Where every second of a run went, from the events of its journal alone.

A boundary closes the open stretch of time and begins the next one, so the categories sum to the wall time by
construction. Boundaries that become known later (when the newest step was done, when the session began) cut the stretch
that is still open. Events may come from hosts whose clocks differ: time never goes back. Memory is bounded, whatever
the journal holds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from slurmft.policy.verdict import BUDGETED, Action
from slurmft.storage.journal import Event, EventName

# --- times ---
# The categories of a run's time, and the sums that a report is made of. Plain values: no files, no clock.

MAX_KEPT = 2000
"""Attempts, ends and marks that are kept one by one; sums are of all."""

MAX_NODES = 10_000
MAX_HOSTS = 64
MAX_CAUSES = 200


class Category(StrEnum):
    """Where a second went. Every second between a run's first event and its end is in exactly one."""

    TRAINING = "training"
    SAVES = "saves"
    REDONE = "redone"
    QUEUE = "queue"
    LAUNCH = "launch"
    IMPORT = "import"
    SETUP = "setup"
    LOAD = "load"
    DETECTION = "detection"
    EVIDENCE = "evidence"
    RESTART = "restart"
    SHUTDOWN = "shutdown"
    IDLE = "idle"
    UNKNOWN = "unknown"


MEANING = {
    Category.TRAINING: "new steps, or requests that are answered",
    Category.SAVES: "saves stop the training",
    Category.REDONE: "steps are done again that a failure has undone",
    Category.QUEUE: "the job waits in Slurm's queue",
    Category.LAUNCH: "agents are started on the nodes",
    Category.IMPORT: "workers start and import their modules",
    Category.SETUP: "model, process groups, everything up to the first step",
    Category.LOAD: "the checkpoint is read",
    Category.DETECTION: "from the last step until a failure is noticed",
    Category.EVIDENCE: "all ranks are looked at and ended, and the end is judged",
    Category.RESTART: "new workers are started in the same job",
    Category.SHUTDOWN: "the last save, and the end of the workers",
    Category.IDLE: "the run has stopped, or was suspended",
    Category.UNKNOWN: "the journal does not say",
}

PRODUCTIVE = frozenset({Category.TRAINING})
WITHOUT_NODES = frozenset({Category.QUEUE, Category.IDLE})
"""Categories in which the run holds no nodes."""

ALIASES = {
    Category.LAUNCH: "TPU_INITIALIZATION",
    Category.IMPORT: "PROGRAM_STARTUP",
    Category.SETUP: "TRAINING_PREP",
    Category.SAVES: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Category.LOAD: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Category.REDONE: "WASTED_PROGRESS_FROM_DISRUPTION",
    Category.DETECTION: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.EVIDENCE: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.RESTART: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.SHUTDOWN: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.QUEUE: "OTHER",
    Category.IDLE: "OTHER",
    Category.UNKNOWN: "OTHER",
}
"""Names of ``BadputType`` in Google's ml-goodput-measurement (goodput_utils.py) that mean the same, or the nearest."""


class Interval(NamedTuple):
    """A stretch of time; Unix times."""

    begin_s: float
    end_s: float
    category: Category


class Mark(NamedTuple):
    """Something at one moment of the timeline."""

    at_s: float
    kind: str
    """fault, save, save failed, stop or injected."""

    text: str


@dataclass(slots=True)
class End:
    """One end of an attempt, and the time that it cost until the run was as far as before."""

    attempt: str
    at_s: float
    cause: str
    reason: str = ""
    is_failure: bool = False
    """It counts for the mean time between failures."""

    nodes: tuple[str, ...] = ()
    """Nodes that are to blame."""

    ranks: int = 0
    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def cost_s(self) -> float:
        """Seconds of the wall clock."""
        return sum(self.seconds.values())

    @property
    def rank_s(self) -> float:
        """Rank-seconds: what its nodes could have done meanwhile."""
        return self.ranks * sum(s for category, s in self.seconds.items() if category not in WITHOUT_NODES)


@dataclass(slots=True)
class AttemptRow:
    """One attempt, for the table."""

    attempt: str
    began_s: float
    ended_s: float = 0.0
    ranks: int = 0
    first_step: int = 0
    last_step: int = 0
    cause: str = ""
    reason: str = ""


@dataclass(slots=True)
class Loss:
    """What the ends of one cause, or those that one node is blamed for, have cost."""

    ends: int = 0
    seconds: float = 0.0
    rank_s: float = 0.0


@dataclass(slots=True)
class Inference:
    """Facts of a run that answers requests."""

    is_endpoint: bool = False
    total: int = 0
    answered: int = 0
    errors: int = 0
    deaths: int = 0
    down_s: float = 0.0
    """Seconds in which a replica that had died was not ready again, summed over replicas."""

    given_up: int = 0


@dataclass(slots=True)
class Account:
    """Where a run's time went. Sums are of the whole period, lists hold the newest MAX_KEPT entries."""

    begin_s: float = 0.0
    end_s: float = 0.0
    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    rank_s: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    by_cause: dict[str, Loss] = field(default_factory=dict)
    by_node: dict[str, Loss] = field(default_factory=dict)
    intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=8 * MAX_KEPT))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    ends: deque[End] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    rows: deque[AttemptRow] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    attempts: int = 0
    failures: int = 0
    exposed_s: float = 0.0
    """Seconds in which workers lived, and could fail."""

    jobs: int = 0
    events: int = 0
    step: int = 0
    saves: int = 0
    world_size: int = 0
    nodes: int = 0
    hosts: tuple[str, ...] = ()
    """The nodes of the newest attempt; the first MAX_HOSTS of them."""

    is_open: bool = False
    """The run goes on."""

    inference: Inference | None = None

    @property
    def wall_s(self) -> float:
        """From the first event to the end."""
        return max(0.0, self.end_s - self.begin_s)

    @property
    def productive_s(self) -> float:
        """Seconds of new work."""
        return sum(self.seconds[category] for category in PRODUCTIVE)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: new work of all time, with the queue; None where no time has passed.

        The name and the definition are of "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
        2024. Time in which the run had been stopped by a person does not count.
        """
        return _share(self.productive_s, self.wall_s - self.seconds[Category.IDLE])

    @property
    def goodput(self) -> float | None:
        """New work of the time in which the run had nodes; None where it had none."""
        held_s = self.wall_s - sum(self.seconds[category] for category in WITHOUT_NODES)
        return _share(self.productive_s, held_s)


def _share(part_s: float, whole_s: float) -> float | None:
    return min(1.0, part_s / whole_s) if whole_s > 0 else None


# --- Where every second of a run went, from the events of its journal alone ---

FAILURES = frozenset(cause.value for cause in BUDGETED)
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
FRESH_S = 60.0
"""After so long without an event or a progress report, an attempt without a verdict counts as over."""

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

    def finish(self, *, now_s: float, seen: Mapping[str, Any] | None = None) -> Account:
        """Close the account: now, where the run goes on, else with its last sign of life.

        Args:
            seen: the newest progress report: ``attempt``, ``at`` (Unix time), ``step``, ``stall_s``.
        """
        account, seen = self.account, seen or {}
        mine = self._row is not None and not self._is_judged and seen.get("attempt") == self._row.attempt
        at_s = _number(seen.get("at")) if mine else 0.0
        account.is_open = self._phase is Category.QUEUE or (
            not self._is_judged and now_s - max(at_s, self._newest_s) < FRESH_S
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
        if isinstance(hosts, list):
            self.account.nodes = len(hosts)
            self.account.hosts = tuple(str(host)[:255] for host in hosts[:MAX_HOSTS])

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
        is_failure = cause in FAILURES
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
