"""The files of workers, agents and srun about an attempt in its run folder, as values for the judge.

Anything may lie there: files of trainers, of other programs, damaged, huge, or no files at all. None of it may end or
delay the supervisor, so files that cannot be read or believed are reported as problems and left out.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.policy.decide import Budget, PastEnd, budget_for
from slurmft.policy.judge import Report, StepWords, Testimony, WorkerEnd, claimed
from slurmft.policy.symptoms import (
    TRACEBACK,
    bug_of,
    codes_of_children,
    last_words,
    signature_of,
    verdict_cause,
    without_own_lines,
)
from slurmft.policy.verdict import (
    EXIT_RERUN_ELSEWHERE,
    EXIT_VALIDATION_FAILED,
    Action,
    Cause,
    Evidence,
    Verdict,
    has_progressed,
)
from slurmft.scheduler.srun_lines import parse_srun_lines
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.storage.verdicts import MAX_VERDICT_BYTES, WorkerVerdict, parse_evidence, read_verdict
from slurmft.supervisor.cluster import Start
from slurmft.system.files import read_part

# --- The run's journal as the budget it has left ---

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
    reports = [
        *_verdicts(run.verdicts, str(attempt), ends, nodes, reading),
        *_error_files(folder, nodes, reading),
    ]
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
        row = signature_of(text, loosely=True)
        cause = verdict_cause(row) or (Cause.WORKER_ERROR if text or cause is Cause.WORKER_ERROR else cause)
    return Report(
        source=source, rank=rank, node=node, cause=cause, message=verdict.message or last_words(text), traceback=text,
        suspects=verdict.suspects, rerun=verdict.rerun, binding=True, signature=row,
    )  # fmt: skip


def report_of_text(text: str, *, source: str, rank: int, node: str, log: bool = False) -> Report:
    """An error file, or the end of a log, as the judge takes it."""
    text = without_own_lines(text) if log else text
    begin = text.rfind(TRACEBACK)
    codes, row = codes_of_children(text), signature_of(text, loosely=True)
    if EXIT_VALIDATION_FAILED in codes:
        cause = Cause.VALIDATION_FAILED
    elif EXIT_RERUN_ELSEWHERE in codes:
        cause = Cause.RERUN_ELSEWHERE
    else:
        cause = verdict_cause(row) or Cause.WORKER_ERROR
    trace = text[begin:] if begin >= 0 else ("" if log else text)
    message = last_words(trace) if trace else last_words(text)[:300]
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
