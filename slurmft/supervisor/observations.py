"""What the supervisor sees of an attempt: the files of workers, agents and srun, as values for the judge; its
workers by their agents' reports; and its own reports in the run folder.

Anything may lie in an attempt's folder: files of trainers, of other programs, damaged, huge, or no files at all.
None of it may end or delay the supervisor, so files that cannot be read or believed are reported as problems and
left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.ipc.messages import WorkerExited, WorkerFacts
from slurmft.ipc.pages import State
from slurmft.policy import symptoms
from slurmft.policy.checkpoints import FailingSaves, FailureHistory, News, mtbf_s
from slurmft.policy.decide import Budget, PastEnd, budget_for
from slurmft.policy.judge import Report, StepWords, Testimony, WorkerEnd, claimed
from slurmft.policy.verdict import (
    BUDGETED,
    EXIT_RERUN_ELSEWHERE,
    EXIT_VALIDATION_FAILED,
    Action,
    Cause,
    Evidence,
    Verdict,
    has_progressed,
    steps_at_risk,
)
from slurmft.policy.worker_settings import divisor_in
from slurmft.scheduler.parsing import parse_srun_lines
from slurmft.storage import history as storage_timings
from slurmft.storage.history import MAX_COSTS, MAX_SAVES, Timings
from slurmft.storage.journal import Event, EventName, Journal, newest_of
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.storage.verdicts import MAX_VERDICT_BYTES, WorkerVerdict, noted_source, parse_evidence, read_verdict
from slurmft.supervisor.cluster import Start
from slurmft.system.files import read_part

# --- The run's journal as the budget it has left ---

CHANGES = frozenset({EventName.BATCH_REDUCED, EventName.CHECKPOINT_QUARANTINED})
"""Changes of the run after which its count begins anew; they have limits of their own."""

EARLY_S = 600.0
"""A script without a session that ends later may have done a good part of its work."""


def budget_of(history: Sequence[Event], verdict: Verdict, config: RunConfig, attempt: str = "") -> Budget:
    """The budget spent before ``verdict`` of ``attempt``; ``history`` is the journal without that attempt."""
    return budget_after(past_ends(history), verdict, config, attempt)


def budget_after(past: Sequence[PastEnd], verdict: Verdict, config: RunConfig, attempt: str) -> Budget:
    """As ``budget_of``, after these ends."""
    section = config.fault_tolerance
    return budget_for(
        verdict,
        past,
        retries=section.num_job_retries_on_failure,
        retries_of=section.retries,
        max_no_progress_cycles=section.max_no_progress_cycles,
        restarts=section.num_in_job_restarts,
        job_start=_job_start(attempt),
    )


def past_ends(history: Sequence[Event]) -> list[PastEnd]:
    """Each end in the journal, oldest first; damaged entries count as no progress."""
    ends, began_s, is_again = list[PastEnd](), 0.0, False
    undecided: str | None = None
    for event in history:
        facts = event.details
        if event.event == EventName.WORKERS_STARTED:
            began_s = event.seconds()
        elif event.event == EventName.VERDICT:
            before = ends.pop().progressed if is_again else False
            undecided, is_again = event.attempt, False
            ends.append(
                PastEnd(
                    cause=str(facts.get("cause", "")), progressed=progressed(facts) or before,
                    first_step=_first_step(facts),
                    bug=_bug(facts) if event.seconds() - began_s < EARLY_S else "",
                )
            )  # fmt: skip
        elif event.event == EventName.SUPERVISOR_LOST:  # before it had decided: it is one end, which is judged again
            is_again = event.attempt == undecided
        elif event.event in CHANGES or event.event == EventName.DECISION:
            undecided, is_again = None, False
            if event.event in CHANGES or facts.get("action") == Action.STOP:
                ends.append(PastEnd(cause="", given_up=True))
            elif facts.get("action") == Action.RESTART and ends:
                ends[-1] = replace(ends[-1], restarted_in=_job_start(event.attempt))
    return ends


def _job_start(attempt: str) -> str:
    """The part of an attempt's name that all attempts of one start of a job share."""
    return attempt.rpartition(".")[0]


def _bug(facts: Mapping[str, object]) -> str:
    first, last = facts.get("first_step", 0), facts.get("last_step", 0)
    has_worked = type(first) is not int or type(last) is not int or last > first
    return "" if has_worked else symptoms.bug_of(str(facts.get("traceback") or ""))


def _first_step(facts: Mapping[str, object]) -> int | None:
    first, last, saved = facts.get("first_step", 0), facts.get("last_step"), facts.get("saved_step")
    return first if type(first) is int and (last or saved is not None) else None


def progressed(facts: Mapping[str, object]) -> bool:
    """Whether the end that these details of an event ``verdict`` describe came after a new saved step."""
    first, saved = facts.get("first_step", 0), facts.get("saved_step")
    return has_progressed(first, saved) if type(first) is int and type(saved) is int else False


def began_to_resubmit(events: Iterable[Event], attempt: Attempt) -> bool:
    """Whether the attempt's supervisor began to submit a successor: if it was killed then, the run may not know it."""
    return any(event.event == EventName.RESUBMITTING and event.attempt == str(attempt) for event in events)


# --- The run's journal as a history of failures: how often work was lost, and the node-time of training ---

_LOST_WORK = frozenset(cause.value for cause in BUDGETED)
_MAX_NODES = 1 << 20


def history_of(events: Iterable[Event], nproc_per_node: int) -> FailureHistory:
    """Failures that lost work, and node-seconds of training, from the journal.

    A failure is an unplanned end after at least one step, or a planned stop that saved nothing. An attempt without
    a verdict counts until its newest event. Times of one attempt are of one clock, that of its supervisor.
    """
    began: dict[str, tuple[float, int]] = {}
    last: dict[str, float] = {}
    failures = 0
    for event in events:
        last[event.attempt] = event.seconds()
        if event.event == EventName.WORKERS_STARTED:
            began[event.attempt] = event.seconds(), _nodes(event.details.get("world_size"), nproc_per_node)
        elif event.event == EventName.VERDICT:
            failures += str(event.details.get("cause")) in _LOST_WORK and _has_worked(event.details)
        elif event.event == EventName.STOP_WITHOUT_A_SAVE:
            failures += 1
    node_s = sum(max(0.0, last[attempt] - at) * nodes for attempt, (at, nodes) in began.items())
    return FailureHistory(failures=failures, node_s=node_s)


def batch_divisor_of(history: Sequence[Event]) -> int:
    """The number of pieces in which the workers of the next attempt compute each micro-batch."""
    return divisor_in(event.details.get("divisor") for event in history if event.event == EventName.BATCH_REDUCED)


def facts_for_workers(history: Sequence[Event], config: RunConfig, *, nodes: int) -> dict[str, Any]:
    """Facts of the run's history for the workers of the next attempt, on ``nodes``."""
    seen = history_of(history, config.nproc_per_node)
    return {"batch_divisor": batch_divisor_of(history), "mtbf_s": round(mtbf_s(seen, nodes), 1)}


def _nodes(world_size: Any, nproc_per_node: int) -> int:
    if type(world_size) is not int or not 0 < world_size <= _MAX_NODES * nproc_per_node:
        return 1
    return max(1, world_size // nproc_per_node)


def _has_worked(facts: dict[str, Any]) -> bool:
    first, last = facts.get("first_step", 0), facts.get("last_step", 0)
    return type(first) is int and type(last) is int and last > first


# --- The files of workers, agents and srun about an attempt in its run folder, as values for the judge ---

TAIL_BYTES = 64 * 1024
MAX_LOGS = 32
"""Logs whose last lines are read; the first ranks to fail come first."""

READ_S, HURRIED_READ_S = 20.0, 3.0
"""How long reading may take in all: with 10,000 ranks on a slow filesystem the files read by then must suffice. The
second is for ends that have a deadline: the requeue must still come before Slurm's kill."""

MAX_PROBLEMS = 5

_RANK_FILE = re.compile(r"\.rank_(\d{1,9})$")


@dataclass(slots=True)
class _Reading:
    """How long it may still take, and what could not be read."""

    deadline: float
    problems: list[str] = field(default_factory=list)

    @property
    def too_late(self) -> bool:
        return time.monotonic() > self.deadline

    def told(self) -> tuple[str, ...]:
        more = len(self.problems) - MAX_PROBLEMS
        return tuple([*self.problems[:MAX_PROBLEMS], *([f"{more} more problems with files"] if more > 0 else [])])


def testimony_of(
    start: Start, ends: Sequence[WorkerEnd], places: Mapping[int, str], *, within_s: float = READ_S
) -> Testimony:
    """All evidence of the attempt; waits ``within_s`` for the run folder, and goes on without it after that.

    ``places`` are the nodes of ranks, also of ranks whose end was not seen.
    """
    try:
        work = lambda: collect(start.run, start.cluster.attempt, ends, places, within_s=within_s)  # noqa: E731
        return start.thread.call(work, timeout_s=within_s + 1.0)
    except (StorageError, OSError) as error:
        return Testimony(problems=(f"what the workers left was not read: {error}",))


def collect(
    run: RunFolder, attempt: Attempt, ends: Sequence[WorkerEnd], places: Mapping[int, str] | None = None,
    *, within_s: float = READ_S,
) -> Testimony:  # fmt: skip
    """As ``testimony_of``, in this thread; never raises for what lies in the folder."""
    reading = _Reading(time.monotonic() + within_s)
    folder = run.attempts / str(attempt)
    nodes = {**(places or {}), **{end.rank: end.node for end in ends}}
    reports = [*_verdicts(run.verdicts, str(attempt), ends, nodes, reading), *_error_files(folder, nodes, reading)]
    told = {report.rank for report in reports}
    silent = [end for end in ends if end.code != 0 and not (end.killed or end.stopped or end.rank in told)]
    for end in silent[:MAX_LOGS]:
        if not reading.too_late and (report := _from_log(folder, end)) is not None:
            reports.append(report)
    reader = EvidenceReader(run.verdicts, str(attempt))
    return Testimony(
        reports=tuple(reports),
        step=step_words(folder),
        evidence=tuple(evidence for _, evidence in reader.new(reading.deadline)),
        problems=reading.told(),
    )


def step_words(folder: Path) -> StepWords:
    """What srun has said in the attempt's folder; nothing where it has not."""
    return parse_srun_lines(tail(folder / "srun.err", 4 * TAIL_BYTES) or "")


class EvidenceReader:
    """Reads what the workers of a run, or of one attempt, add to their evidence files, each line once."""

    def __init__(self, verdicts: Path, attempt: str = "") -> None:
        self._folder, self._prefix = verdicts, f"{attempt}." if attempt else ""
        self._read_to: dict[str, int] = {}

    def new(self, deadline: float | None = None) -> list[tuple[str, Evidence]]:
        """Whole lines that have been added since the last call, each with the name of its file; damage is left out."""
        found: list[tuple[str, Evidence]] = []
        for name in _names(self._folder, self._prefix, ".evidence.jsonl"):
            if deadline is not None and time.monotonic() > deadline:
                break
            start = self._read_to.get(name, 0)
            data = _bytes(self._folder / name, start, MAX_VERDICT_BYTES)
            whole = data.rpartition(b"\n")[0] if data else b""
            if data and len(data) == MAX_VERDICT_BYTES and not whole:
                whole = data  # one endless line: skip it
            if whole:
                self._read_to[name] = start + len(whole) + (len(whole) < len(data or b""))
                lines = whole.decode(errors="replace").split("\n")
                found += [(name, evidence) for line in lines if (evidence := parse_evidence(line)) is not None]
        return found


def tail(path: Path, limit: int = TAIL_BYTES) -> str | None:
    """The end of a file as text; None when there is no such file, or it is none."""
    data = _bytes(path, -limit, limit)
    return None if data is None else data.decode(errors="replace").replace("\r", "\n")


def report_of(verdict: WorkerVerdict, *, source: str, rank: int | None, node: str) -> Report:
    """A verdict file as the judge takes it; an unknown cause is looked up in the traceback."""
    cause, text = claimed(verdict.cause), verdict.traceback
    row = None
    if cause in (Cause.UNKNOWN, Cause.WORKER_ERROR):
        row = symptoms.signature_of(text, loosely=True)
        cause = symptoms.verdict_cause(row) or (Cause.WORKER_ERROR if text or cause is Cause.WORKER_ERROR else cause)
    return Report(
        source=source, rank=rank, node=node, cause=cause, message=verdict.message or symptoms.last_words(text),
        traceback=text, suspects=verdict.suspects, rerun=verdict.rerun, binding=True, signature=row,
    )  # fmt: skip


def report_of_text(text: str, *, source: str, rank: int, node: str, log: bool = False) -> Report:
    """An error file, or the end of a log, as the judge takes it."""
    text = symptoms.without_own_lines(text) if log else text
    begin = text.rfind(symptoms.TRACEBACK)
    codes, row = symptoms.codes_of_children(text), symptoms.signature_of(text, loosely=True)
    if EXIT_VALIDATION_FAILED in codes:
        cause = Cause.VALIDATION_FAILED
    elif EXIT_RERUN_ELSEWHERE in codes:
        cause = Cause.RERUN_ELSEWHERE
    else:
        cause = symptoms.verdict_cause(row) or Cause.WORKER_ERROR
    trace = text[begin:] if begin >= 0 else ("" if log else text)
    message = symptoms.last_words(trace) if trace else symptoms.last_words(text)[:300]
    return Report(source=source, rank=rank, node=node, cause=cause, message=message, traceback=trace,
                  binding=bool(codes), guessed=log, signature=row)  # fmt: skip


def _verdicts(
    folder: Path, attempt: str, ends: Sequence[WorkerEnd], nodes: Mapping[int, str], reading: _Reading
) -> Iterator[Report]:
    """The verdict files ``ATTEMPT.rank-N.json`` and ``ATTEMPT.agent-NODE.json``, those of ranks that failed first."""
    order = {end.rank: index for index, end in enumerate(sorted(ends, key=lambda end: end.code == 0))}
    mine: list[tuple[int, int | None, str]] = []
    for name in _names(folder, f"{attempt}.", ".json"):
        who = name.removeprefix(f"{attempt}.").removesuffix(".json")
        rank = int(who[5:]) if re.fullmatch(r"rank-\d{1,9}", who) else None
        if rank is not None or who.startswith("agent-"):
            mine.append((-1 if rank is None else order.get(rank, len(order)), rank, name))
    for unread, (_, rank, name) in enumerate(sorted(mine)):
        if reading.too_late:
            reading.problems.append(
                f"{len(mine) - unread} of {len(mine)} verdict files were not read: it took too long"
            )
            return
        try:
            if (verdict := read_verdict(folder / name)) is None:
                continue
        except StorageError as error:
            reading.problems.append(error.what)
            continue
        who = name.removeprefix(f"{attempt}.").removesuffix(".json")
        node = who.removeprefix("agent-") if rank is None else nodes.get(rank, "")
        yield report_of(verdict, source="verdict file", rank=rank, node=node)


def _error_files(folder: Path, nodes: Mapping[int, str], reading: _Reading) -> Iterator[Report]:
    for name in _names(folder, "", ""):
        if (match := _RANK_FILE.search(name)) is None:
            continue
        if reading.too_late:
            reading.problems.append("not all files of SLURMFT_ERROR_DIR were read: it took too long")
            return
        if (text := tail(folder / name)) is None:
            reading.problems.append(f"{name[:100]!r} is not a readable file")
        elif text.strip():
            rank = int(match[1])
            yield report_of_text(_words(text), source=f"error file {name[:100]}", rank=rank, node=nodes.get(rank, ""))


def _words(text: str) -> str:
    """The text of an error file; of torch's own, which are JSON, the traceback in it."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return message
        trace = message.get("extraInfo", {}).get("py_callstack", "")
        return str(trace or message["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return text


def _from_log(folder: Path, end: WorkerEnd) -> Report | None:
    text = tail(folder / f"rank-{end.rank}.log", TAIL_BYTES // 2)
    if text is None or not text.strip():
        return None
    return report_of_text(text, source="log", rank=end.rank, node=end.node, log=True)


def _names(folder: Path, prefix: str, suffix: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(each.name for each in entries if each.name.startswith(prefix) and each.name.endswith(suffix))
    except OSError:
        return []


def _bytes(path: Path, start: int, limit: int) -> bytes | None:
    """Up to ``limit`` bytes from ``start`` (from the end when negative); None for anything but a regular file."""
    try:
        return read_part(path, start, limit)
    except OSError:
        return None


# --- How fast an attempt is, from its ranks' reports: steps, saves, and how long a stop takes ---

SUSPENDED_S = 10.0
"""Agents report twice a second: after such a silence the job may have been suspended, and times in it are false."""

REPORTS_S = 2.0
"""A silence is longer than what caused it by up to this: reports and their way."""


class Measurements:
    """Keeps the extremes of what the ranks of one attempt report. All times are of this machine's monotonic clock."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._heard_s: float | None = None
        self._still_s = 0.0
        self._false_from_s = math.inf
        """Discard times that include a suspension of the job."""

        self._first_step_s = self._longest_step_s = 0.0
        self._saves_s: dict[int, float] = {}
        self._cost_s = 0.0
        self._costs_s: list[float] = []
        self._unfinished_s: dict[int, float] = {}
        self._saved_at_s: dict[int, float] = {}
        self._steps_from: tuple[float, int] | None = None
        self._steps_to: tuple[float, int] | None = None
        self._start_s: float | None = None

    def note(self, ranks: Sequence[WorkerFacts], now_s: float) -> None:
        """Take in one agent's report."""
        self._note_silence(now_s)
        for facts in ranks:
            self._first_step_s = max(self._first_step_s, self._believed(facts.first_step_s))
            self._longest_step_s = max(self._longest_step_s, self._believed(facts.longest_step_s))
            self._note_saves(facts, now_s)
        step = max((facts.step for facts in ranks), default=0)
        if self._steps_from is not None and step > (self._steps_to or self._steps_from)[1]:
            self._steps_to = now_s - self._still_s, step

    def first_step_done(self, step: int, now_s: float) -> None:
        """Every rank has done its first step; the newest is ``step``."""
        self._start_s = now_s - self._began_s - self._still_s
        self._steps_from = now_s - self._still_s, step

    def timings(self) -> Timings:
        """All of it, to be kept."""
        return Timings(
            longest_step_s=_rounded(self._longest_step_s),
            first_step_s=_rounded(self._first_step_s),
            start_s=_rounded(self._start_s),
            step_s=_rounded(self._mean_step_s()),
            saves_s=tuple(round(seconds, 3) for seconds in tuple(self._saves_s.values()) if seconds),
            unfinished_save_s=_rounded(self.unfinished_save_s),
            costs_s=tuple(round(seconds, 4) for seconds in tuple(self._costs_s) if seconds),
        )

    def seconds_to_save(self, since_s: float) -> float | None:
        """From ``since_s`` until the newest save had been done by every rank that has saved; 0 when that was before."""
        done_at_s = max(self._saved_at_s.values(), default=None)
        return None if done_at_s is None else max(0.0, done_at_s - since_s)

    @property
    def unfinished_save_s(self) -> float | None:
        """How long the save has taken that some rank has begun and not ended, by the newest reports."""
        return max(tuple(self._unfinished_s.values()), default=0.0) or None

    def _note_silence(self, now_s: float) -> None:
        silent_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        if silent_s > SUSPENDED_S:
            self._still_s += silent_s
            self._false_from_s = min(self._false_from_s, silent_s - REPORTS_S)
        self._heard_s = now_s

    def _note_saves(self, facts: WorkerFacts, now_s: float) -> None:
        rank, number = facts.rank, facts.saves
        if rank == 0 and facts.save_cost_s != self._cost_s:
            self._cost_s = facts.save_cost_s
            self._costs_s = [*self._costs_s[-MAX_COSTS + 1 :], self._believed(self._cost_s)]
        self._unfinished_s[rank] = self._believed(facts.saving_s)
        if number <= 0:
            return
        self._saved_at_s[rank] = now_s - facts.since_saved_s
        self._saves_s[number] = max(self._saves_s.get(number, 0.0), self._believed(facts.save_s))
        if len(self._saves_s) > MAX_SAVES:
            self._saves_s.pop(min(self._saves_s))

    def _believed(self, seconds: float) -> float:
        return float(seconds) if seconds < self._false_from_s else 0.0

    def _mean_step_s(self) -> float | None:
        if self._steps_from is None or self._steps_to is None:
            return None
        return (self._steps_to[0] - self._steps_from[0]) / (self._steps_to[1] - self._steps_from[1])


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 3) if seconds else None


# --- saves ---
# Failed saves, and copies of steps in memory, as the supervisor reports them: in journal, log and progress report.

log = logging.getLogger(__name__)


class SaveWatch:
    """Looks at rank 0's reports: all ranks fail alike.

    Args:
        most: failures in a row after which it warns loudly.
    """

    def __init__(self, journal: Journal, most: int) -> None:
        self._journal, self._failing = journal, FailingSaves(most)
        self._reason = ""
        self._saved = -1
        self._copied: int | None = None
        self._copy_interval = 0

    def note(self, lead: WorkerFacts) -> None:
        """Take in a report."""
        news = self._failing.note(failures=lead.save_failures, done=lead.saves)
        self._saved = max(self._saved, lead.saved)
        self._note_copies(lead)
        if news in (News.FAILED, News.KEEP_FAILING):
            self._reason = os.strerror(lead.save_errno) if lead.save_errno > 0 else "for an unknown reason"
            self._journal.append(
                EventName.SAVE_FAILED, step=lead.step, reason=self._reason, failures=lead.save_failures
            )
        if news is News.KEEP_FAILING:
            log.error("SAVES KEEP FAILING: %s", self._in_words(lead))
            self._journal.append(EventName.SAVES_KEEP_FAILING, step=lead.step, reason=self._in_words(lead),
                                 in_a_row=self._failing.in_a_row)  # fmt: skip
        elif news is News.WORK_AGAIN:
            log.warning("saves work again: step %d is saved", lead.saved)
            self._journal.append(EventName.SAVES_WORK_AGAIN, step=lead.step, saved=lead.saved)

    def facts(self) -> dict[str, Any]:
        """For the progress report: failures in a row and their reason, while there are any; the newest step in memory
        where steps are copied."""
        copied = {} if self._copied is None else {"copied": self._copied}
        if not self._failing.in_a_row:
            return copied
        return {"failed_saves": self._failing.in_a_row, "save_problem": self._reason, **copied}

    def _note_copies(self, lead: WorkerFacts) -> None:
        self._copied = lead.copied if lead.copied is not None else self._copied
        if (interval := lead.copy_interval or 0) > self._copy_interval:
            self._copy_interval = interval
            share = round((lead.copy_share_ppm or 0) / 1e6, 4)
            log.warning("steps are copied every %d steps now: it took %.1f %% of their time", interval, 100 * share)
            self._journal.append(EventName.STEP_COPIES_SPACED_OUT, step=lead.step, interval=interval, share=share)

    def _in_words(self, lead: WorkerFacts) -> str:
        newest = f"the newest checkpoint of this attempt is of step {self._saved}"
        saved = newest if self._saved >= 0 else "this attempt has saved nothing"
        return f"{self._failing.in_a_row} in a row, {self._reason}; {saved}, and the run is at step {lead.step}"


# --- The supervisor's view of an attempt's workers, and its reports in the run folder ---

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
        """Take in the end of one worker. Three say something of it: the zygote, whose child it was (its code), its page
        (how far it was), and the file that it left itself (which error)."""
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
                return (verdict.message or symptoms.last_words(verdict.traceback))[:500]
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
        if self._workload and measured != storage_timings.Timings():
            storage_timings.write(self._run.path, self._workload, str(self._attempt), measured)

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
    decision, stop = newest_of(events, EventName.DECISION), newest_of(events, EventName.STOP_REQUESTED)
    if decision is None or stop is None or decision.attempt != stop.attempt:
        return {}
    if decision.details.get("action") != Action.CONTINUE:
        return {}
    seconds = round(first_step_at - stop.details["signal_at"], 3)
    return {"seconds_since_stop_request": seconds, "stop_of_attempt": stop.attempt}
