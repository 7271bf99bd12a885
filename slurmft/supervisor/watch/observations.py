"""The supervisor's view of an attempt's workers, and its reports in the run folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slurmft.errors import StorageError
from slurmft.ipc.pages.heartbeat import State
from slurmft.ipc.reports import WorkerExited
from slurmft.ipc.worker_facts import WorkerFacts
from slurmft.policy.verdicts.findings import WorkerEnd
from slurmft.policy.verdicts.symptoms import last_words
from slurmft.policy.verdicts.verdict import Action, steps_at_risk
from slurmft.storage.attempt_facts import noted_source
from slurmft.storage.events import EventName
from slurmft.storage.history import timings
from slurmft.storage.journal import Event, Journal
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.storage.verdicts import read_verdict
from slurmft.supervisor.watch.measurements import Measurements
from slurmft.supervisor.watch.saves import SaveWatch

UNCLOSED = "its session was neither closed nor stopped: a trainer inside of the command has failed or was killed"
TIMINGS_EVERY_S = 60.0
"""How often what was measured is written while the attempt goes on."""


class Observations:
    """Newest facts of every rank, and how those that have ended did.

    Args:
        workload: fingerprint under which what was measured is kept; nothing is kept when it is empty.
        history: the journal as it was before this attempt.
        done_before: newest step that an earlier attempt has done.
        max_failed_saves: failed saves in a row after which it is said loudly.
    """

    def __init__(
        self, run: RunFolder, journal: Journal, attempt: Attempt, world_size: int,
        *, workload: str, history: Sequence[Event], max_failed_saves: int = 3, done_before: int = 0,
    ) -> None:  # fmt: skip
        self._run, self._journal, self._attempt, self.world_size = run, journal, attempt, world_size
        self._workload, self._history = workload, history
        self._ranks: dict[int, WorkerFacts] = {}
        # kept up to date by each report: to look at 16,384 ranks a hundred times a second would take half a core
        self._attached = 0
        self._saved_by: Counter[int] = Counter()
        self._durable_by: Counter[int] = Counter()
        self._past_first: set[int] = set()
        self._caught_up: set[int] = set()
        self._first_step_seen, self._done_before = False, done_before
        self._saves = SaveWatch(journal, max_failed_saves)
        self._measured = Measurements(time.monotonic())
        self._timings_at_s = time.monotonic()
        self.ends: dict[int, WorkerEnd] = {}

    @property
    def all_ended(self) -> bool:
        """Every rank's end has been seen."""
        return len(self.ends) == self.world_size

    @property
    def any_started(self) -> bool:
        """Some agent has reported workers."""
        return bool(self._ranks)

    def ranks(self) -> dict[int, WorkerFacts]:
        """The newest facts of each rank."""
        return dict(self._ranks)

    def reached(self) -> tuple[int, int]:
        """First and newest step of the attempt that its ranks have reported; zeros before."""
        told = [facts for facts in list(self._ranks.values()) if facts.resumed >= 0]
        if not told:
            return 0, 0
        return max(facts.resumed for facts in told), max(facts.step for facts in told)

    def until(self) -> int:
        """Total steps of the run, as its ranks have reported; 0 before."""
        return max((facts.until for facts in list(self._ranks.values())), default=0)

    def saved(self) -> int | None:
        """Newest step that every rank has saved, or one has committed for all; None when there is none."""
        by_all = min(self._saved_by, default=-1) if self._attached == self.world_size else -1
        newest = max(by_all, max(self._durable_by, default=-1))
        return newest if newest >= 0 else None

    def all_answered(self, tick: int) -> bool:
        """Every rank has done what was agreed for ``tick``."""
        return bool(self._ranks) and all(facts.answered >= tick for facts in self._ranks.values())

    def note_progress(self, ranks: Sequence[WorkerFacts]) -> None:
        """Take in one agent's report."""
        for facts in ranks:
            self._take(facts)
        self._measured.note(ranks, time.monotonic())
        if (lead := self._ranks.get(0)) is not None:
            self._saves.note(lead)
        self._note_first_step()
        self._note_caught_up()

    def _take(self, facts: WorkerFacts) -> None:
        before = self._ranks.get(facts.rank)
        self._ranks[facts.rank] = facts
        if before is not None and before.attached:
            self._count(before, -1)
        if facts.attached:
            self._count(facts, 1)
        if facts.first_step_at > 0:
            self._past_first.add(facts.rank)
        if facts.step >= self._done_before:
            self._caught_up.add(facts.rank)

    def _count(self, facts: WorkerFacts, by: int) -> None:
        self._attached += by
        for steps, step in ((self._saved_by, facts.saved), (self._durable_by, facts.durable)):
            steps[step] += by
            if not steps[step]:
                del steps[step]

    def note_exit(self, host: str, report: WorkerExited) -> WorkerEnd:
        """Take in the end of one worker."""
        rank = report.rank
        self.note_progress([report])
        is_unclosed = report.attached and report.code == 0 and report.state == State.FAILED
        error = UNCLOSED if is_unclosed else ""
        end = self.ends[rank] = WorkerEnd(
            rank=rank,
            node=host,
            code=report.code,
            attached=report.attached,
            stopped=report.state == State.STOPPED,
            finished=report.state == State.FINISHED,
            unclosed=is_unclosed,
            killed=report.killed,
            starved=report.starved,
            error=error if report.code == 0 or report.killed else self._error_of(rank),
            step=report.step,
        )
        return end

    def _error_of(self, rank: int) -> str:
        with contextlib.suppress(StorageError, OSError):
            if (verdict := read_verdict(self._run.verdicts / f"{self._attempt}.rank-{rank}.json")) is not None:
                return (verdict.message or last_words(verdict.traceback))[:500]
        return ""

    def save_of_stop(self, *, since_s: float, left_s: float) -> dict[str, Any] | None:
        """The journal's entry of a stop's save: its step, seconds from the signal to the commit, seconds left then.

        ``since_s`` is the monotonic time of the signal, ``left_s`` how many seconds there were from it on. None when
        not all steps that were done are in a checkpoint of all ranks.
        """
        step = self.saved()
        if step is None or step < self.reached()[1]:
            return None
        took_s = self._measured.seconds_to_save(since_s) or 0.0  # none was needed where nothing was done since
        return {"step": step, "seconds": round(took_s, 3), "seconds_left": round(left_s - took_s, 3)}

    def unsaved_at_stop(self) -> dict[str, Any]:
        """The journal's entry of a stop whose time is up: steps since the newest checkpoint, how far its save was."""
        facts: dict[str, Any] = {"steps_at_risk": steps_at_risk(*self.reached(), self.saved())}
        if (seconds := self._measured.unfinished_save_s) is not None:
            facts["unfinished_save_s"] = round(seconds, 3)
        return facts

    def measured(self) -> dict[str, float]:
        """Unix time of the newest step; how long saves have stopped the training so far, and their number."""
        ranks = list(self._ranks.values())  # another thread may add to it meanwhile
        return {
            "step_at": round(max((each.step_at or 0.0 for each in ranks), default=0.0), 3),
            "stall_s": round(max((each.stall_s or 0.0 for each in ranks), default=0.0), 3),
            "saves_done": max((each.saves for each in ranks), default=0),
        }

    def close(self) -> None:
        """The workers have ended: journal what was measured."""
        if self.any_started:
            attached = any(each.attached for each in self._ranks.values())
            self._journal.append(EventName.MEASURED, attached=attached, **self.measured())

    def write_timings(self) -> None:
        """Keep what was measured for the next submission of this workload; nothing before anything was.

        Raises:
            OSError: the run folder cannot be written.
        """
        self._timings_at_s = time.monotonic()
        measured = self._measured.timings()
        if self._workload and measured != timings.Timings():
            timings.write(self._run.path, self._workload, str(self._attempt), measured)

    def write_progress(self) -> None:
        """Replace the run's progress report, and now and then the timings; nothing before the first rank has reported.

        May be called in another thread than the rest.

        Raises:
            OSError: the run folder cannot be written.
        """
        if not self._ranks:
            return
        if time.monotonic() - self._timings_at_s > TIMINGS_EVERY_S:
            self.write_timings()
        ranks = list(self._ranks.values())  # another thread may add to it meanwhile
        if not any(facts.attached for facts in ranks):
            # a script that does not use the session says nothing about its steps
            self._run.write_progress(at=time.time(), attempt=str(self._attempt), state="running")
            return
        lead = self._ranks.get(0)
        metric = None if lead is None else lead.metric
        self._run.write_progress(
            at=time.time(),
            attempt=str(self._attempt),
            resumed=self.reached()[0],
            step=max(facts.step for facts in ranks),
            until=max(facts.until for facts in ranks),
            saved=max(facts.saved for facts in ranks),
            state=State(min(facts.state for facts in ranks)).name.lower(),
            metric=metric if metric is not None and math.isfinite(metric) else None,
            world_size=self.world_size,
            **self.measured(),
            **self._saves.facts(),
        )

    def _note_first_step(self) -> None:
        if self._first_step_seen or len(self._past_first) < self.world_size:
            return
        self._first_step_seen = True
        resumed, step = self.reached()
        self._measured.first_step_done(step, time.monotonic())
        facts = since_last_stop(self._history, max(each.first_step_at for each in self._ranks.values()))
        if source := noted_source(self._run.attempts / str(self._attempt)):
            facts["source"] = source
        facts |= {
            name: round(max(getattr(each, name) or 0.0 for each in self._ranks.values()), 3)
            for name in ("attached_at", "loop_at", "load_s", "first_step_at")
            if any(getattr(each, name) for each in self._ranks.values())
        }
        self._journal.append(EventName.FIRST_STEP, resumed_from=resumed, **facts)

    def _note_caught_up(self) -> None:
        """Steps that an earlier attempt had done are done again, all of them."""
        if not self._done_before or not self._first_step_seen or len(self._caught_up) < self.world_size:
            return
        if self.reached()[0] < self._done_before:
            self._journal.append(EventName.CAUGHT_UP, step=self._done_before, **self.measured())
        self._done_before = 0


def since_last_stop(events: Sequence[Event], first_step_at: float) -> dict[str, Any]:
    """Seconds from the signal that asked for the newest stop to the first step after it.

    Empty when the newest end of an attempt was none that continues by itself.
    """
    decisions = [event for event in events if event.event == EventName.DECISION]
    stops = [event for event in events if event.event == EventName.STOP_REQUESTED]
    if not decisions or not stops or decisions[-1].details.get("action") != Action.CONTINUE:
        return {}
    if decisions[-1].attempt != stops[-1].attempt:
        return {}
    seconds = round(first_step_at - stops[-1].details["signal_at"], 3)
    return {"seconds_since_stop_request": seconds, "stop_of_attempt": stops[-1].attempt}
