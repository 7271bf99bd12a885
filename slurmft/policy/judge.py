"""From all findings about an attempt's end to one verdict: the most specific one wins, victims never do.

In one piece, since a verdict is one table of rules: which finding outweighs which can only be judged where all findings
are made.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from slurmft.policy.hangs import Hang
from slurmft.policy.stop import END, step_of
from slurmft.policy.symptoms import Remedy, Signature, cause_of_text, end_of
from slurmft.policy.values import few
from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, Cause, Evidence, Kind, Suspect, Verdict

# --- Which ranks had not entered a collective that others wait in: the flight recorders of all ranks, compared ---
# A wait on the device does not show in Python stacks. A recorder knows for each process group how far its rank
# has come: the newest collective that was entered (enqueued by the host), and the newest that the device has done.

MAX_TOLD = 8
"""Groups, and kinds of calls in one of them, that are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far one rank has come in one process group."""

    group: str
    """Its name."""

    description: str = ""
    members: tuple[tuple[int, int], ...] = ()
    """Ranks of the whole job, from the first to the last of each span, as jobs have thousands; empty where the recorder
    does not say."""

    entered: int = 0
    """Number of the newest collective that it has called."""

    done: int = 0
    """Of the newest that has finished on its device."""

    operation: str = ""
    """The first one that it has entered and not done, with the shapes of its input."""

    called_from: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stuck:
    """A collective that does not end."""

    group: str
    description: str
    number: int
    operation: str
    """Of most of those that wait."""

    called_from: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Members that have not entered it, as their recorders say."""

    silent: tuple[int, ...]
    """Members without a record."""

    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Different calls that ranks made under the same number."""


def stuck_collectives(records: Mapping[int, Sequence[Progress]]) -> list[Stuck]:
    """The first collective of each group that some rank waits in, those that ranks are missing from first."""
    groups: dict[tuple[str, tuple[tuple[int, int], ...]], dict[int, Progress]] = {}
    for rank, progress in records.items():
        for each in progress:
            groups.setdefault((each.group, each.members), {})[rank] = each
    found = []
    for (_, members), by_rank in groups.items():
        pending = {rank: each for rank, each in by_rank.items() if each.entered > each.done}
        if pending:
            ranks = [rank for first, last in members for rank in range(first, last + 1)]
            found.append(_stuck(by_rank, pending, ranks or _everyone(by_rank, records), records))
    return sorted(found, key=lambda each: (not each.absent, not each.others, each.group, each.waiting))


def _everyone(by_rank: Mapping[int, Progress], records: Mapping[int, Sequence[Progress]]) -> Iterable[int]:
    """The members of a group whose recorders do not name them: of torch's default one all ranks."""
    return records if any(each.description == "default_pg" for each in by_rank.values()) else by_rank


def _stuck(
    by_rank: Mapping[int, Progress], pending: Mapping[int, Progress], members: Iterable[int],
    records: Mapping[int, Sequence[Progress]],
) -> Stuck:  # fmt: skip
    number = min(each.done + 1 for each in pending.values())
    waiting = sorted(rank for rank, each in pending.items() if each.done < number)
    calls: dict[str, list[int]] = {}
    for rank in waiting:
        calls.setdefault(pending[rank].operation, []).append(rank)
    (operation, most), *others = sorted(calls.items(), key=lambda call: (-len(call[1]), call[1]))
    reached = {rank: each.entered for rank, each in by_rank.items()}
    first = pending[most[0]]
    return Stuck(
        group=first.group, description=first.description, number=number, operation=operation or "a collective",
        called_from=first.called_from, waiting=tuple(waiting),
        absent=tuple(sorted(rank for rank in members if rank in records and reached.get(rank, 0) < number)),
        silent=tuple(sorted(rank for rank in members if rank not in records)),
        others=tuple((other, tuple(ranks)) for other, ranks in others[:MAX_TOLD]),
    )  # fmt: skip


def absent_ranks(stuck: Sequence[Stuck]) -> dict[int, str]:
    """Ranks that others wait for and that wait for none themselves, each with what it has not entered."""
    waiting = {rank for each in stuck for rank in each.waiting}
    found: dict[int, str] = {}
    for each in stuck:
        for rank in each.absent:
            if rank not in waiting:
                found.setdefault(rank, f"has not entered {_name(each)}, which {_count(each.waiting)} for")
    return found


def stuck_told(stuck: Sequence[Stuck]) -> list[str]:
    """A line for each of them."""
    lines = []
    for each in stuck[:MAX_TOLD]:
        parts = [f"{_name(each)}: entered by {ranks_told(each.waiting)}"]
        if each.absent:
            parts.append(f"not entered by {ranks_told(each.absent)}")
        if each.silent:
            parts.append(f"no record of {ranks_told(each.silent)}")
        parts += [f"{ranks_told(ranks)} called {other or 'something else'} instead" for other, ranks in each.others]
        if not (each.absent or each.silent or each.others):
            parts.append("by all of its ranks: the network or a device, rather than a rank's program")
        if each.called_from:
            parts.append(f"called from {each.called_from}")
        lines.append("; ".join(parts)[:1000])
    if len(stuck) > MAX_TOLD:
        lines.append(f"and {len(stuck) - MAX_TOLD} more")
    if _wait_for_each_other(stuck):
        lines.append("ranks wait for each other in different groups: they call the groups' collectives in other orders")
    return lines


def _wait_for_each_other(stuck: Sequence[Stuck]) -> bool:
    return any(each.absent for each in stuck) and not absent_ranks(stuck) and not any(each.silent for each in stuck)


def _name(each: Stuck) -> str:
    description = f" ({each.description})" if each.description not in ("", "undefined", each.group) else ""
    return f"{each.operation}, number {each.number} of the group {each.group or 'without a name'}{description}"


def _count(ranks: Sequence[object]) -> str:
    return f"{len(ranks)} rank{'s wait' if len(ranks) > 1 else ' waits'}"


def ranks_told(ranks: Sequence[int], limit: int = 32) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ", ".join("-".join(map(str, span)) for span in spans[:limit])
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}{', ...' if len(spans) > limit else ''}"


# --- Reports about an attempt's end beside exit codes: files of workers, srun's lines ---

CLAIMABLE = frozenset(
    {
        Cause.WORKER_ERROR, Cause.SIGNAL_CRASH, Cause.HOST_OUT_OF_MEMORY, Cause.DEVICE_OUT_OF_MEMORY, Cause.HANG,
        Cause.COMMUNICATION_ERROR, Cause.DATA_CORRUPTION, Cause.RERUN_ELSEWHERE, Cause.VALIDATION_FAILED,
        Cause.STRAGGLER,
    }
)  # fmt: skip
"""Causes that a worker or an agent may report of itself. Preempted, cancelled or complete are for others to report."""


def claimed(word: str) -> Cause:
    """The cause that a verdict file names; UNKNOWN for anything that its writer cannot know."""
    return next((cause for cause in CLAIMABLE if cause.value == word), Cause.UNKNOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report that one rank, or the agent of one node, has left in a file."""

    source: str
    """Which file that is, in words."""

    rank: int | None = None
    """None when it is an agent's, about its node."""

    node: str = ""
    cause: Cause = Cause.UNKNOWN
    message: str = ""
    traceback: str = ""
    suspects: tuple[Suspect, ...] = ()
    rerun: str = ""
    binding: bool = False
    """It is a verdict file, which overrides the exit code. Other files only explain one."""

    guessed: bool = False
    """From a log, with any content: believed only where the exit code does not contradict it."""

    signature: Signature | None = None
    """What its words are a sign of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """One of srun's lines about tasks that did not end well."""

    nodes: tuple[str, ...]
    tasks: str
    """As srun writes it: ``4-7``."""

    word: str
    """``Killed``, ``Terminated``, ``Exited``, ``Out Of Memory``, ``Segmentation fault``, ..."""

    code: int | None = None
    """Exit code, for ``Exited``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWords:
    """The messages of srun and slurmstepd about the step. Tasks that were killed or terminated are victims."""

    ends: tuple[TaskEnd, ...] = ()
    failed_nodes: tuple[str, ...] = ()
    oom_nodes: tuple[str, ...] = ()
    oom_somewhere: bool = False
    """The kernel has ended processes of the step for memory; on which node is not said."""

    ended: Cause | None = None
    """What Slurm has ended the job or the step for, in slurmstepd's words."""

    refused: tuple[tuple[str, str], ...] = ()
    """Nodes on which srun could not start the step, and why, in its words; tasks elsewhere are killed for it."""

    def oom_on(self, node: str) -> bool:
        """Whether processes of ``node`` may have been ended for memory; srun and slurmstepd do not always name it."""
        return node in self.oom_nodes if self.oom_nodes else self.oom_somewhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Testimony:
    """All of it."""

    reports: tuple[Report, ...] = ()
    step: StepWords = field(default_factory=StepWords)
    evidence: tuple[Evidence, ...] = ()
    problems: tuple[str, ...] = ()
    """Files that could not be read or believed, in words."""


# --- The finding of each rank's end by itself: from its files before its exit code; victims give none ---
# ``Level`` orders findings that disagree.


class Level(IntEnum):
    """Precedence of findings: the lowest level wins, and within one level the one that was seen first."""

    FAILED_VALIDATION = 1
    """A result is wrong, or unverified: all training based on it would be wasted."""

    A_PERSONS_STOP = 2
    """A user who stops or cancels a run means it, independent of other events; nothing below may continue it."""

    RERUN = 3
    """A result is in doubt and was saved to be computed elsewhere: any other way to continue would lose that."""

    CORRUPTION = 4
    """Hardware or a check reports spoilt data: the next checkpoint may be, too."""

    SLURMS_END = 5
    """Slurm ends the job; what ranks report afterwards is an echo of it."""

    LAUNCH = 6
    """Nothing had begun, so no rank can be to blame."""

    PLANNED_STOP = 7
    """Ranks that fail during a stop have failed to save, which its reason states; they did not cause the stop."""

    STRAGGLER = 8
    """A deliberate end, after a save; ranks that fail of it are surprised by it."""

    NODE_LOST = 9
    """Ranks elsewhere fail of it, each in its own words."""

    HANG = 10
    """Peers of a rank that hangs run into time-outs."""

    OUT_OF_MEMORY = 11
    """The kernel's kill and its consequences look like other crashes; this finding has the reason."""

    CRASH = 12
    """A segmentation fault is no consequence of other failures; exceptions of peers may be one of it."""

    ERROR = 13
    """An exception, an exit code, or a kill from outside: the first one seen is usually the origin."""

    COMMUNICATION = 14
    """A rank that lost a peer; the lost peer has the better reason."""

    NOTHING = 15
    """No rank gave a reason."""


LEVEL_OF: Mapping[Cause, Level] = {
    Cause.VALIDATION_FAILED: Level.FAILED_VALIDATION,
    Cause.RERUN_ELSEWHERE: Level.RERUN,
    Cause.DATA_CORRUPTION: Level.CORRUPTION,
    Cause.STRAGGLER: Level.STRAGGLER,
    Cause.HANG: Level.HANG,
    Cause.HOST_OUT_OF_MEMORY: Level.OUT_OF_MEMORY,
    Cause.DEVICE_OUT_OF_MEMORY: Level.OUT_OF_MEMORY,
    Cause.SIGNAL_CRASH: Level.CRASH,
    Cause.WORKER_ERROR: Level.ERROR,
    Cause.COMMUNICATION_ERROR: Level.COMMUNICATION,
}
"""Levels of the causes that ranks report."""

DECIDING = frozenset(cause for cause, level in LEVEL_OF.items() if level <= Level.HANG)
"""Causes in a verdict file that also count for ranks that were killed or stopped, or ended with 0: kill-on-bad-exit
turns 16 into 143, a wrapper script may turn it into anything."""

RESUMABLE = frozenset({"persistent", "transient"})
"""Verdicts of the re-run state machine after which training goes on from the newest checkpoint."""

_KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})
_BY_SOMEBODY = _KILLED | {-signal.SIGTERM, 128 + signal.SIGTERM}
_GENERAL = frozenset({Cause.WORKER_ERROR, Cause.UNKNOWN})
_ABORTED = frozenset({-signal.SIGABRT, 128 + signal.SIGABRT})
_CANONICAL = {Cause.VALIDATION_FAILED: EXIT_VALIDATION_FAILED, Cause.RERUN_ELSEWHERE: EXIT_RERUN_ELSEWHERE}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnd:
    """How one worker ended, in the order in which ends were seen."""

    rank: int
    node: str
    code: int
    """As of subprocess: negative for a signal."""

    attached: bool = False
    """It used ``slurmft.session``."""

    stopped: bool = False
    """It stopped at the agreed tick."""

    finished: bool = False
    """It reached the end of its loop."""

    unclosed: bool = False
    """It exited with 0, and yet its session was neither closed nor stopped: something in a wrapper has failed."""

    killed: bool = False
    """We killed it, so it is a victim."""

    starved: bool = False
    """The kernel has ended processes of its node's agent for memory."""

    error: str = ""
    """Last line of its traceback."""

    step: int = 0
    """Steps it had completed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One candidate for the verdict."""

    level: Level
    cause: Cause
    reason: str
    code: int = 0
    rank: int | None = None
    node: str = ""
    suspects: tuple[Suspect, ...] = ()
    rerun: str = ""
    traceback: str = ""
    evidence: tuple[str, ...] = ()

    told: bool = False
    """A verdict file of the rank says it, and not its exit code alone."""

    of_node: bool = False
    """The program's error is one of a node that is not well."""

    living: tuple[str, ...] | None = None


def has_failed(end: WorkerEnd, calm: frozenset[int]) -> bool:
    """Whether it failed by itself: not as planned, and not killed by us."""
    return (end.code not in calm or end.unclosed) and not end.stopped and not end.killed


def findings_of_ranks(ends: Sequence[WorkerEnd], heard: Testimony, calm: frozenset[int]) -> Iterator[Finding]:
    """The findings of each end, and of each file of a rank without one; in the order in which the ends were seen."""
    reports: dict[int | None, list[Report]] = {}
    for report in heard.reports:
        reports.setdefault(report.rank, []).append(report)
    for end in ends:
        mine = reports.pop(end.rank, [])
        # a rank that we killed may have failed before, and left a verdict
        believed = LEVEL_OF.keys() if end.killed else DECIDING
        said = next((each for each in mine if each.binding and each.cause in believed), None)
        if has_failed(end, calm) or said is not None:
            yield _finding(end, said or _best(mine, end.code), heard)
    for rest in reports.values():  # an agent's, or of a rank whose end was not seen
        for report in rest:
            if report.binding and report.cause in LEVEL_OF:
                yield _from_report_alone(report)


def where(end: WorkerEnd) -> str:
    """Its rank and node, in words."""
    return f"rank {end.rank} on {end.node}"


def how(end: WorkerEnd) -> str:
    """How it ended, in words."""
    if end.code >= 0:
        return f"exited with {end.code}"
    name = signal.Signals(-end.code).name if -end.code in set(signal.Signals) else f"signal {-end.code}"
    return f"was killed by {name}"


def _best(reports: Sequence[Report], code: int) -> Report | None:
    """The file that explains ``code`` best: one that knows a cause, a verdict before others, a log last.

    A log is believed only where it does not contradict a signal.
    """
    by_signal = code < 0 and code not in _ABORTED
    fit = [report for report in reports if not (report.guessed and by_signal)]
    ordered = sorted(fit, key=lambda report: (report.cause in _GENERAL, report.guessed, not report.binding))
    return next(iter(ordered), None)


def _finding(end: WorkerEnd, report: Report | None, heard: Testimony) -> Finding:
    cause, rerun = _cause(end, report, heard), report.rerun if report is not None else ""
    is_kill = end.code in _BY_SOMEBODY and cause is Cause.SIGNAL_CRASH
    message = (report.message if report is not None else "") or end.error
    text = report.traceback if report is not None else ""
    return Finding(
        level=Level.ERROR if is_kill else _level(cause, rerun),
        cause=cause,
        reason=f"{where(end)} {_told(end, report, cause)}{f': {message}' if message else ''}",
        code=_CANONICAL.get(cause, 128 - end.code if end.code < 0 else end.code),
        rank=end.rank,
        node=end.node,
        suspects=_suspects(end.node, end.rank, report, cause),
        rerun=rerun,
        traceback=end_of(text),
        evidence=(f"{report.source} of rank {end.rank}", *_reading(report)) if report is not None else (),
        told=report is not None and report.binding and cause in DECIDING,
        of_node=_is_of_node(report, cause),
    )


def _cause(end: WorkerEnd, report: Report | None, heard: Testimony) -> Cause:
    told = report.cause if report is not None and report.cause in LEVEL_OF else None
    if told is not None and told in DECIDING and report is not None and report.binding:
        return told
    for cause, code in _CANONICAL.items():
        if end.code == code:
            return cause
    # a rank ends with an exit code of its own where the kernel has taken one of its children
    lost_a_child = report is not None and report.signature is not None and report.signature.strength == 0
    if (end.code in _KILLED or lost_a_child) and not end.killed and (end.starved or heard.step.oom_on(end.node)):
        return Cause.HOST_OUT_OF_MEMORY
    if told is not None and (told is not Cause.WORKER_ERROR or end.killed):
        return told
    return Cause.SIGNAL_CRASH if end.code < 0 else Cause.WORKER_ERROR


def _level(cause: Cause, rerun: str) -> Level:
    return Level.RERUN if cause is Cause.VALIDATION_FAILED and rerun in RESUMABLE else LEVEL_OF[cause]


def _told(end: WorkerEnd, report: Report | None, cause: Cause) -> str:
    if report is not None and report.binding and cause in DECIDING:
        said = f"{cause.value} ({report.rerun})" if report.rerun else cause.value
        return f"left the verdict {said!r} and {how(end)}"
    if cause in (Cause.HOST_OUT_OF_MEMORY, Cause.DEVICE_OUT_OF_MEMORY, Cause.DATA_CORRUPTION):
        return f"{how(end)}, {cause.value}"
    return how(end)


def _suspects(node: str, rank: int | None, report: Report | None, cause: Cause) -> tuple[Suspect, ...]:
    if report is not None and report.suspects:
        return report.suspects
    # a failed validation does not accuse this node: after a rerun the other one is suspected
    if not _is_of_node(report, cause) and cause in (
        Cause.VALIDATION_FAILED,
        Cause.WORKER_ERROR,
        Cause.COMMUNICATION_ERROR,
        Cause.DEVICE_OUT_OF_MEMORY,
    ):
        return ()
    return (Suspect(node=node, rank=rank),) if node else ()


def _is_of_node(report: Report | None, cause: Cause) -> bool:
    row = report.signature if report is not None else None
    return row is not None and row.remedy is Remedy.ELSEWHERE and cause is Cause.WORKER_ERROR


def _reading(report: Report) -> tuple[str, ...]:
    """What its words are a sign of, for people."""
    row = report.signature
    return () if row is None or row.is_loose else (f"reads as: {row.name} (suspected: {row.suspected.value})",)


def _from_report_alone(report: Report) -> Finding:
    who = f"the agent on {report.node}"
    if report.rank is not None:
        who = f"rank {report.rank} on {report.node}" if report.node else f"rank {report.rank}"
    return Finding(
        level=_level(report.cause, report.rerun),
        cause=report.cause,
        reason=f"{who} left the verdict {report.cause.value!r}{f': {report.message}' if report.message else ''}",
        code=_CANONICAL.get(report.cause, 0),
        rank=report.rank,
        node=report.node,
        suspects=_suspects(report.node, report.rank, report, report.cause),
        rerun=report.rerun,
        traceback=end_of(report.traceback),
        evidence=(report.source,),
        told=report.binding and report.cause in DECIDING,
    )


# --- From all findings about an attempt's end to one verdict: the most specific one wins, victims never do ---

MAX_EVIDENCE = 12
_FEW = 10
"""Nodes that a line names."""


_SAID_BY_ALL = frozenset({Cause.RERUN_ELSEWHERE, Cause.VALIDATION_FAILED})

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_OBEYED = frozenset({*(-number for number in _STOPPING), *(128 + number for number in _STOPPING)})
_GONE = ("DOWN", "FAIL", "NO_RESPOND", "POWERED_DOWN", "POWERING_DOWN", "REBOOT")
_OF_ONE_RANK = frozenset({Level.CORRUPTION, Level.OUT_OF_MEMORY, Level.CRASH, Level.ERROR})
_LEVEL_OUTSIDE = {Cause.CANCELLED: Level.A_PERSONS_STOP}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """Digests have shown that replicas of the state differ."""

    reason: str
    step: int
    """After which they were seen to."""

    trusted_step: int
    """The newest one after which they did not, or the one that the attempt resumed from."""

    suspects: tuple[Suspect, ...] = ()
    """Those that are wrong; empty where that cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The supervisor's knowledge beside the workers' ends."""

    reached: tuple[int, int] = (0, 0)
    """First and newest step of the attempt."""

    saved: int | None = None
    """Newest step that every rank has saved."""

    planned: Cause | None = None
    """A stop had been asked for, and why."""

    planned_reason: str = ""
    planned_suspects: tuple[Suspect, ...] = ()
    """Nodes that the stop is to lead away from."""

    lost_nodes: tuple[str, ...] = ()
    """Nodes whose agent is gone."""

    closed: frozenset[str] = frozenset()
    """Those of them that closed its connection: the agent has ended, and the node lives."""

    broken: Mapping[str, str] = field(default_factory=dict)
    """Nodes on which hardware has failed, and what was seen of it."""

    corruption: Corruption | None = None
    """Replicas differ; the workers were killed for it, or have ended."""

    hang: Hang | None = None
    """Ranks hung, and were killed for it."""

    launch_error: str = ""
    outside: Cause | None = None
    """Slurm was ending the job, and why."""

    outside_reason: str = ""
    heard: Testimony = field(default_factory=Testimony)
    """Files that workers have left, and srun's messages."""

    node_states: Mapping[str, str] = field(default_factory=dict)
    """Slurm's states of the allocation's nodes; a node that is not in it is neither well nor sick."""

    complete_codes: frozenset[int] = frozenset()
    """Exit codes that mean the same as 0 (``final_ends``)."""

    only_ignored_signals: bool = False
    """The stop under way has sent the workers nothing but a signal that a script does not know unless it says so."""

    only_lead: bool = False
    """``ignore_nonlead_status``: how ranks other than 0 end does not matter."""


def judge(ends: Sequence[WorkerEnd], *, world_size: int, seen: Circumstances) -> Verdict:
    """The verdict on an attempt of ``world_size`` ranks; ``ends`` are in the order in which they were seen."""
    counted = [end for end in ends if end.rank == 0] if seen.only_lead else list(ends)
    expected = 1 if seen.only_lead else world_size
    is_sound = seen.corruption is None
    found = (_finished(counted, expected, seen) if is_sound else None) or _most_telling(
        _candidates(counted, expected, seen)
    )
    evidence = (*found.evidence, *_company(found, ends), *_lines(seen.heard.step), *seen.heard.problems)
    return Verdict(
        cause=found.cause,
        reason=found.reason,
        exit_code=found.code,
        first_step=seen.reached[0],
        last_step=seen.reached[1],
        saved_step=seen.saved,
        rank=found.rank,
        node=found.node,
        suspects=found.suspects,
        rerun=found.rerun,
        traceback=found.traceback,
        of_node=found.of_node,
        living=found.living,
        evidence=tuple(dict.fromkeys(evidence))[:MAX_EVIDENCE] if found.cause is not Cause.FINISHED else (),
    )


def _company(found: Finding, ends: Sequence[WorkerEnd]) -> list[str]:
    """Whether the culprit failed alone, or first of several, and whether those failed alike: then it is no rank's
    fault, but the program's."""
    if found.level not in _OF_ONE_RANK or found.rank is None or len(ends) < 2:
        return []
    failed = [end for end in ends if has_failed(end, frozenset({0}))]
    own = next((end for end in failed if end.rank == found.rank), None)
    if own is None:
        return []
    if len(failed) == 1:
        return [f"the only one of {len(ends)} ranks that failed by itself"]
    alike = sum((end.code, end.error) == (own.code, own.error) for end in failed)
    place = "first" if failed[0] is own else "one"
    return [f"{place} of {len(failed)} ranks that failed by themselves, {alike} of them alike"]


def ends_attempt(end: WorkerEnd, *, planned: bool, complete_codes: frozenset[int], only_lead: bool) -> bool:
    """Whether this end is a failure that the other ranks cannot go on after.

    With ``planned``, a script that knows only the signal may die of it while its peers still save.
    """
    calm = {0, *complete_codes, *(_OBEYED if planned else ())}
    return has_failed(end, frozenset(calm)) and (end.rank == 0 or not only_lead)


def _most_telling(candidates: Sequence[Finding]) -> Finding:
    """The first of the highest level, with the suspects of all verdict files with the same cause."""
    found = min(candidates, key=lambda finding: finding.level)
    alike = [each for each in candidates if (each.told, each.cause, each.rerun) == (True, found.cause, found.rerun)]
    if not found.told or found.cause not in _SAID_BY_ALL:
        return found
    named = {(one.node, one.gpu): one for each in reversed(alike) for one in reversed(each.suspects)}
    return replace(found, suspects=tuple(reversed(named.values())))


def _without_echoes(said: Sequence[Finding]) -> list[Finding]:
    """A trainer's ranks agree to end with 16 or 17; only those that know of a wrong result leave a verdict file."""
    told = {finding.cause for finding in said if finding.told and finding.rerun != "transient"} & _SAID_BY_ALL
    return [finding for finding in said if finding.told or finding.cause not in told]


def _finished(ends: Sequence[WorkerEnd], expected: int, seen: Circumstances) -> Finding | None:
    calm = frozenset({0} | seen.complete_codes)
    if len(ends) != expected or any(has_failed(end, calm) for end in ends):
        return None
    code = max((end.code for end in ends), default=0)
    who = f"all {expected} ranks" if not seen.only_lead else "the lead rank"
    trouble = seen.lost_nodes or seen.broken or seen.hang or seen.launch_error
    # a script that knows the signal may have saved and ended with 0; one that says COMPLETE of this code has finished
    is_by_itself = seen.only_ignored_signals and all(
        end.code in seen.complete_codes and not end.attached for end in ends
    )
    others = (seen.planned and not is_by_itself) or seen.outside or trouble or _objections(seen.heard)
    if all(end.finished for end in ends):
        reason = f"{who} finished at step {ends[0].step}"
    elif not others and all(end.code in calm for end in ends):
        reason = f"{who} exited with {code}"
    else:
        return None
    code = max(code, 0)  # it had finished when it was killed
    return Finding(level=Level.FAILED_VALIDATION, cause=Cause.FINISHED, reason=reason, code=code)


def _objections(heard: Testimony) -> bool:
    """Whether a verdict file says otherwise than an exit code of 0."""
    return any(report.binding and report.cause in DECIDING and report.rerun != "transient" for report in heard.reports)


def _candidates(ends: Sequence[WorkerEnd], expected: int, seen: Circumstances) -> list[Finding]:
    calm = frozenset({0} | seen.complete_codes)
    said = _without_echoes(list(findings_of_ranks(ends, seen.heard, calm)))
    if complaints := [finding for finding in said if finding.cause is Cause.COMMUNICATION_ERROR]:
        said = [finding for finding in said if finding.cause is not Cause.COMMUNICATION_ERROR]
        said.append(who_is_missed(complaints, ends))
    found = [*said, *_from_srun(seen.heard.step, ends), *_of_nodes(said, seen)]
    if seen.corruption is not None:
        found.append(_corrupted(seen.corruption))
    if seen.hang is not None:
        found.append(_hung(seen.hang))
    if seen.outside is not None:
        level = _LEVEL_OUTSIDE.get(seen.outside, Level.SLURMS_END)
        found.append(Finding(level=level, cause=seen.outside, reason=seen.outside_reason))
    elif seen.planned is None and (ended := seen.heard.step.ended) is not None:
        found.append(Finding(level=Level.SLURMS_END, cause=ended, reason=f"Slurm ended the step: {ended.value}"))
    if seen.launch_error:
        found.append(_not_launched(seen.launch_error, seen.heard.step))
    if seen.planned is not None:
        found.append(_planned(seen.planned, ends, expected, seen, said))
    found.append(_nothing(ends, expected))
    return found


def _not_launched(error: str, step: StepWords) -> Finding:
    """srun kills the tasks on all other nodes when it cannot start one: those are victims."""
    if not step.refused:
        return Finding(level=Level.LAUNCH, cause=Cause.LAUNCH_FAILURE, reason=error)
    (node, words), more = step.refused[0], few([node for node, _ in step.refused[1:]], _FEW)
    return Finding(
        level=Level.LAUNCH, cause=Cause.LAUNCH_FAILURE, node=node,
        reason=f"srun could not start the agent on {node}{f' and {more}' if more else ''}: {words}",
        suspects=tuple(Suspect(node=each) for each, _ in step.refused),
    )  # fmt: skip


def _corrupted(seen: Corruption) -> Finding:
    one = seen.suspects[0] if len(seen.suspects) == 1 else None
    return Finding(
        level=Level.CORRUPTION, cause=Cause.REPLICAS_DIFFER, reason=seen.reason, suspects=seen.suspects,
        rank=one.rank if one else None, node=one.node if one else "",
    )  # fmt: skip


def _hung(hang: Hang) -> Finding:
    one = len(hang.ranks) == 1
    return Finding(
        level=Level.HANG, cause=Cause.HANG, reason=hang.reason, rank=hang.ranks[0] if one else None,
        node=hang.nodes[0] if one else "", suspects=hang.suspects,
    )  # fmt: skip


def _planned(
    cause: Cause, ends: Sequence[WorkerEnd], expected: int, seen: Circumstances, said: Sequence[Finding]
) -> Finding:
    level = Level.A_PERSONS_STOP if cause is Cause.STOPPED_BY_USER else Level.PLANNED_STOP
    # the stop goes on by itself; a node that a rank accuses is still worth avoiding
    held = tuple(suspect for finding in said if finding.cause in DECIDING for suspect in finding.suspects)
    suspects = (*seen.planned_suspects, *held)
    return Finding(level=level, cause=cause, reason=_planned_reason(ends, expected, seen), suspects=suspects)


def _planned_reason(ends: Sequence[WorkerEnd], expected: int, seen: Circumstances) -> str:
    calm = frozenset({0} | seen.complete_codes | _OBEYED)
    if failed := [end for end in ends if has_failed(end, calm)]:
        detail = f": {failed[0].error}" if failed[0].error else ""
        return f"{seen.planned_reason}; no save at the stop: {where(failed[0])} {how(failed[0])}{detail}"
    if not any(end.attached for end in ends):
        return f"{seen.planned_reason}; the workers have ended"
    stopped = [end for end in ends if end.stopped]
    if len(stopped) == expected:
        return f"{seen.planned_reason}; all ranks stopped at step {stopped[0].step}"
    return f"{seen.planned_reason}; {len(stopped)} of {expected} ranks stopped at a step boundary"


def _of_nodes(said: Sequence[Finding], seen: Circumstances) -> list[Finding]:
    """Nodes that are gone, or broken; one that has ended processes for memory is not gone."""
    step, found = seen.heard.step, []
    if seen.broken:
        told = "; ".join(f"{node} cannot be used: {what}" for node, what in seen.broken.items())
        found.append(
            Finding(level=Level.NODE_LOST, cause=Cause.NODE_LOST, reason=told[:1000], node=next(iter(seen.broken)),
                    suspects=tuple(Suspect(node=node) for node in seen.broken),
                    traceback=said[0].traceback if said else "")
        )  # fmt: skip
    starved = [node for node in seen.lost_nodes if node in step.oom_nodes]
    down = [node for node, state in seen.node_states.items() if state.upper().startswith(_GONE)]
    lost = tuple(dict.fromkeys([*(n for n in seen.lost_nodes if n not in starved), *step.failed_nodes, *down]))
    for node in starved:
        reason = f"lost contact with {node}, where the kernel has ended processes for memory"
        found.append(
            Finding(level=Level.OUT_OF_MEMORY, cause=Cause.HOST_OUT_OF_MEMORY, reason=reason, node=node,
                    suspects=(Suspect(node=node),))
        )  # fmt: skip
    if lost:
        felt = f"; felt by {said[0].reason}" if said else ""
        found.append(
            Finding(
                level=Level.NODE_LOST, cause=Cause.NODE_LOST, reason=f"lost contact with {few(lost, _FEW)}{felt}",
                node=lost[0], suspects=tuple(Suspect(node=node) for node in lost),
                traceback=said[0].traceback if said else "",
                living=tuple(node for node in lost if node in seen.closed and node not in down) or None,
                evidence=tuple(f"Slurm says {node} is {seen.node_states[node]}" for node in down),
            )
        )  # fmt: skip
    return found


def _from_srun(step: StepWords, ends: Sequence[WorkerEnd]) -> list[Finding]:
    """Exit codes that only srun has seen."""
    found = []
    for end in step.ends if not ends else ():
        for cause, code, level in (
            (Cause.VALIDATION_FAILED, EXIT_VALIDATION_FAILED, Level.FAILED_VALIDATION),
            (Cause.RERUN_ELSEWHERE, EXIT_RERUN_ELSEWHERE, Level.RERUN),
        ):
            if end.code == code:
                reason = f"srun: tasks {end.tasks} on {few(end.nodes, _FEW)} exited with {code}"
                suspects = tuple(Suspect(node=node) for node in end.nodes) if cause is Cause.RERUN_ELSEWHERE else ()
                found.append(Finding(level=level, cause=cause, reason=reason, code=code, suspects=suspects))
    return found


def _lines(step: StepWords) -> list[str]:
    lines = [f"srun: {few(end.nodes, _FEW)}: {end.tasks}: {end.word}" + (f" with {end.code}" if end.code else "")
             for end in step.ends]  # fmt: skip
    lines += [f"srun: node failure on {node}" for node in step.failed_nodes]
    lines += [f"srun: launch failed on {node}: {words}" for node, words in step.refused]
    if step.oom_nodes or step.oom_somewhere:
        lines.append(f"srun: processes ended for memory{f' on {few(step.oom_nodes, _FEW)}' if step.oom_nodes else ''}")
    return lines


def _nothing(ends: Sequence[WorkerEnd], expected: int) -> Finding:
    if len(ends) < expected:
        reason = f"{expected - len(ends)} of {expected} ranks disappeared without an exit status"
    elif all(end.code == 0 for end in ends):
        reason = f"all {expected} ranks exited with 0"
    else:
        reason = "the workers were ended, and none of them says why"
    return Finding(level=Level.NOTHING, cause=Cause.UNKNOWN, reason=reason)


_KIND_OF = {
    Cause.RERUN_ELSEWHERE: Kind.RERUN_UNDECIDED,
    Cause.REPLICAS_DIFFER: Kind.REPLICA_DIFFERS,
    Cause.STRAGGLER: Kind.STRAGGLER,
    Cause.HANG: Kind.HANG,
    Cause.NODE_LOST: Kind.NODE_LOST,
    Cause.SIGNAL_CRASH: Kind.CRASH,
    Cause.HOST_OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    Cause.COMMUNICATION_ERROR: Kind.COMMUNICATION,
}
_KIND_OF_RERUN = {
    "persistent": Kind.RERUN_PERSISTENT,
    "transient": Kind.RERUN_TRANSIENT,
    "correct": Kind.RERUN_ACQUITTED,
}


def held_against(verdict: Verdict, told: Sequence[Evidence], *, at: float) -> tuple[Evidence, ...]:
    """An attempt's entries for the exclusion list: the workers' observations, and those of the verdict alone.

    A worker's own report on a node counts once: the verdict adds nothing of the same kind on the same node.
    """
    kind = _KIND_OF.get(verdict.cause) if verdict.rerun != "inconclusive" else None
    if verdict.of_node:
        kind = Kind.CRASH
    if verdict.cause is Cause.VALIDATION_FAILED:
        kind = _KIND_OF_RERUN.get(verdict.rerun)
    known = {(each.kind, each.suspect.node) for each in told}
    if kind is None:
        return tuple(told)
    found = [
        # who kills an agent on a node that lives may be the script itself, or its user
        Evidence(kind=Kind.CRASH if suspect.node in (verdict.living or ()) else kind, suspect=suspect,
                 message=verdict.reason[:1000], at=at, step=verdict.last_step or None)
        for suspect in {each.node: each for each in reversed(verdict.suspects)}.values()
    ]  # fmt: skip
    return (*told, *(each for each in found if (each.kind, each.suspect.node) not in known))


MAX_NAMED_NODES = 8
"""More ranks than that are not behind: the others are ahead, for an unknown reason."""


def who_is_missed(complaints: Sequence[Finding], ends: Sequence[WorkerEnd]) -> Finding:
    """One finding for all complaints: it blames the rank that is behind or absent, or none.

    Behind are ranks with fewer steps than the others, where they are not the larger part. Absent are ranks that did not
    complain although all others did: they were not in the collective that failed, and we had to kill them.
    """
    count = f"{len(complaints)} of {len(ends)} ranks report a communication error"
    first = complaints[0]
    missed, why = _behind(ends), "behind"
    if not missed:
        missed, why = _absent(complaints, ends), "absent"
    if not missed:
        return replace(first, rank=None, node="", suspects=(), reason=f"{first.reason}; {count}, and no rank is behind",
                       evidence=(count, *first.evidence))  # fmt: skip
    steps = max(end.step for end in ends) - missed[0].step
    tale = (
        f"was {steps} step{'s' if steps > 1 else ''} behind"
        if why == "behind"
        else "neither arrived nor reported an error"
    )
    theirs = next((finding for finding in complaints if finding.rank == missed[0].rank), first)
    return replace(
        first,
        rank=missed[0].rank,
        node=missed[0].node,
        suspects=tuple(Suspect(node=end.node, rank=end.rank) for end in missed),
        reason=f"{first.reason}; {where(missed[0])} {tale}",
        traceback=theirs.traceback,
        evidence=(count, f"{where(missed[0])} {tale}", *first.evidence),
    )


def _behind(ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    told = [end for end in ends if end.attached]
    if not told or (least := min(end.step for end in told)) == max(end.step for end in told):
        return []
    behind = [end for end in told if end.step == least]
    return behind if 2 * len(behind) <= len(told) and len(behind) <= MAX_NAMED_NODES else []


def _absent(complaints: Sequence[Finding], ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    complained = {finding.rank for finding in complaints}
    absent = [end for end in ends if end.killed and end.rank not in complained]
    few = 2 * len(absent) < len(ends) and len(absent) <= MAX_NAMED_NODES
    return absent if few and len(absent) + len(complained) == len(ends) else []


# --- whereabouts ---
# Where a worker's main thread is, from its innermost calls and its process state: does it wait for other ranks?

COLLECTIVE_DOING = "waits for the other ranks"

_STDLIB = re.compile(r"^<|/lib/python3\.\d+t?/(?!site-packages/|dist-packages/)")
_DISTRIBUTED = re.compile(r"/torch/distributed/(?!checkpoint/|elastic/|launcher/|launch\.py|run\.py)")
_DOING = (
    (re.compile(r"/torch/utils/data/"), "waits for its data loader"),
    (re.compile(r"/torch/distributed/checkpoint/|/slurmft/checkpoint/"), "is in a checkpoint"),
    (re.compile(r"/torch/_(?:inductor|dynamo|functorch)/"), "compiles"),
)


class Where(StrEnum):
    """Where a worker was found."""

    COLLECTIVE = "waiting in a collective"
    ELSEWHERE = "elsewhere"
    STOPPED = "stopped"
    """By SIGSTOP, a debugger or job control."""

    NO_ANSWER = "no answer"
    """It lives, but has not reported its stack: it cannot, or is not a Python process of ours."""

    DEAD = "dead"


def whereabouts(calls: Sequence[tuple[str, str, str]], state: str) -> tuple[Where, str]:
    """Where a main thread is, and what it does in a few words.

    Args:
        calls: file, line and function of its calls, innermost first; empty when it has not reported them.
        state: its letter in /proc/PID/stat.

    A GPU's wait does not show in a Python stack: a rank that waits for NCCL by way of ``.item()`` is ELSEWHERE.
    """
    if state in ("T", "t"):
        return Where.STOPPED, "is stopped (SIGSTOP, or a debugger)" if state == "T" else "is held by a debugger"
    if not calls:
        return Where.NO_ANSWER, "sleeps in the kernel, not interruptible" if state == "D" else "reports no stack"
    file, line, function = next((call for call in calls if not _STDLIB.search(call[0])), calls[0])
    if _DISTRIBUTED.search(file):
        return Where.COLLECTIVE, f"{COLLECTIVE_DOING} in {function if function != 'wrapper' else 'a collective'}"
    if file.endswith("/torch/autograd/graph.py") and state in ("S", "D"):
        return Where.COLLECTIVE, f"{COLLECTIVE_DOING} in the backward pass"
    if "/torch/cuda/" in file and function == "synchronize":
        return Where.COLLECTIVE, "waits for its GPU"
    if file.endswith("/slurmft/worker/signals.py") and function == "at":
        return Where.COLLECTIVE, f"{COLLECTIVE_DOING} to agree on a stop"
    for pattern, doing in _DOING:
        if pattern.search(file):
            return Where.ELSEWHERE, doing
    return Where.ELSEWHERE, f"is in {function} ({file.rpartition('/')[2]}:{line})"


# --- The culprits and victims of an attempt's end: the activity of all ranks at one moment, compared ---

MAX_NAMED_RANKS = 64
"""More culprits than this are no finding: the reason lies outside of the ranks."""

_SIGABRT, _SIGTERM = 6, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One rank at the moment of the look."""

    rank: int
    node: str
    where: Where
    doing: str = ""
    """In a few words."""

    attached: bool = False
    """It uses a session, so that ``step`` and ``tick`` mean something."""

    step: int = 0
    tick: int = 0
    """The safe point it has reached (``policy.stop``)."""

    frames: tuple[str, ...] = ()
    """Its main thread's innermost calls, innermost first."""

    sections: tuple[str, ...] = ()
    """Open sections, outermost first."""

    exit_code: int | None = None
    """Of one that is dead: as of subprocess, negative for a signal."""

    killed: bool = False
    """Dead because we killed it."""

    error: str = ""
    """Last line of a dead rank's traceback or log."""

    recorded: bool = False
    """Its flight recorder has been written: by the watchdog, where it has ended by SIGABRT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A rank, and the evidence against it."""

    rank: int
    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The culprits. None, with the reason why, when the look does not show them."""

    culprits: tuple[Named, ...] = ()
    victims: tuple[int, ...] = ()
    undecided: str = ""


def blame(
    ranks: Sequence[Summary], *, lost: Mapping[int, str] | None = None, overdue: Mapping[int, str] | None = None,
    absent: Mapping[int, str] | None = None,
) -> Blame:  # fmt: skip
    """Separate the culprits from the victims.

    Args:
        ranks: those that could be looked at; dead ones in the order in which they ended.
        lost: ranks that could not, with their nodes.
        overdue: ranks whose section is open for too long, with the text of that report.
        absent: ranks that have not entered a collective in which others wait, with the text of that finding.

    A rank that waits for the others at the newest step is never named while another rank is behind it.
    """
    lost, overdue, absent = lost or {}, overdue or {}, absent or {}
    dead = [rank for rank in ranks if rank.where is Where.DEAD and not rank.killed]
    living = [rank for rank in ranks if rank.where not in (Where.DEAD, Where.STOPPED)]
    found = (
        _named_ranks(
            [rank for rank in dead if _is_crash(rank)], lambda rank: f"was ended by signal {-(rank.exit_code or 0)}"
        )
        or _named_ranks([rank for rank in dead if rank.exit_code and not _is_echo(rank)][:1], _failure)
        or [Named(rank=rank, node=node, reason="its node does not answer") for rank, node in sorted(lost.items())]
        or _named_ranks(
            [rank for rank in ranks if rank.where is Where.STOPPED], lambda rank: rank.doing or "is stopped"
        )
        or _named_ranks(
            [rank for rank in ranks if rank.rank in absent and not rank.killed],
            lambda rank: "; ".join(filter(None, [absent[rank.rank], rank.doing + _at(rank)])),
        )
        or _slowest(living, overdue)
        or (_named_ranks([rank for rank in dead if not rank.exit_code], _failure) if living else [])
    )
    if not found or len(found) > MAX_NAMED_RANKS:
        if not living and any(map(_is_of_watchdog, ranks)):
            return Blame(
                undecided="torch's watchdog ended the ranks, and their flight recorders do not show which one caused it"
            )
        return Blame(victims=tuple(sorted(rank.rank for rank in living)), undecided=_why_undecided(living, found))
    guilty = {each.rank for each in found}
    everyone = {rank.rank for rank in ranks if rank.exit_code != 0} | set(lost)
    return Blame(culprits=tuple(found), victims=tuple(sorted(everyone - guilty)))


def _named_ranks(ranks: Sequence[Summary], reason: Callable[[Summary], str]) -> list[Named]:
    return [Named(rank=rank.rank, node=rank.node, reason=reason(rank)) for rank in ranks]


def _is_crash(rank: Summary) -> bool:
    ended_by_signal = rank.exit_code is not None and rank.exit_code < 0
    return ended_by_signal and rank.exit_code != -_SIGTERM and not _is_of_watchdog(rank)


def _is_of_watchdog(rank: Summary) -> bool:
    """torch has ended it because a collective took too long, for which another rank may be the reason."""
    return rank.recorded and rank.exit_code == -_SIGABRT


def _is_echo(rank: Summary) -> bool:
    """It reports that a peer was gone; so does every other one."""
    return _is_of_watchdog(rank) or (bool(rank.error) and cause_of_text(rank.error) is Cause.COMMUNICATION_ERROR)


def _failure(rank: Summary) -> str:
    if not rank.exit_code:
        return "has ended with code 0, while others go on"
    return f"failed with exit code {rank.exit_code}" + (f": {rank.error}" if rank.error else "")


def _slowest(living: Sequence[Summary], overdue: Mapping[int, str]) -> list[Named]:
    """The ranks that the others wait for; none where the ranks do not differ."""
    if not living:
        return []
    newest = max((rank.tick for rank in living if rank.attached), default=0)

    def reached(rank: Summary) -> int:
        return rank.tick if rank.attached else newest

    waiting = [rank for rank in living if rank.where is Where.COLLECTIVE]
    others = [rank for rank in living if rank.where is not Where.COLLECTIVE]
    if waiting and others:
        front = max(map(reached, waiting))
        if awaited := _last(others, reached, at_most=front):
            why = f"while {_count(waiting)} for it in a collective"
            return _named_ranks(awaited, lambda rank: f"{rank.doing}{_at(rank)}, {why}")
        return _named_ranks(
            _last(waiting, reached), lambda rank: f"{rank.doing}{_at(rank)}, which others have left behind"
        )
    if any(reached(rank) < newest for rank in living):
        where = f", while others have reached {_place(newest)}"
        return _named_ranks(_last(living, reached), lambda rank: f"{rank.doing}{_at(rank)}{where}")
    if odd := _odd_ones(living):
        return _named_ranks(odd, lambda rank: f"{rank.doing}{_at(rank)}; most others are somewhere else")
    late = [rank for rank in others if rank.rank in overdue]
    return (
        _named_ranks(late, lambda rank: f"{rank.doing}{_at(rank)}; {overdue[rank.rank]}")
        if len(late) < len(living)
        else []
    )


def _last(ranks: Sequence[Summary], reached: Callable[[Summary], int], at_most: int | None = None) -> list[Summary]:
    within = [rank for rank in ranks if at_most is None or reached(rank) <= at_most]
    lowest = min(map(reached, within), default=0)
    return [rank for rank in within if reached(rank) == lowest]


def _odd_ones(ranks: Sequence[Summary]) -> list[Summary]:
    """Ranks in another place than more than half of all; none where no place holds so many."""
    places = Counter(rank.doing for rank in ranks)
    common, number = places.most_common(1)[0]
    return [rank for rank in ranks if rank.doing != common] if len(ranks) > 2 and number * 2 > len(ranks) else []


def _at(rank: Summary) -> str:
    return f" at {_place(rank.tick)}" if rank.attached else ""


def _place(tick: int) -> str:
    if tick >= END:
        return "the end"
    return f"step {step_of(tick)}" if tick >= 0 else "its start, before the first step"


def _why_undecided(living: Sequence[Summary], found: Sequence[Named]) -> str:
    if len(found) > MAX_NAMED_RANKS:
        return f"{len(found)} ranks are alike, so the reason lies outside of them"
    if not living:
        return "no rank was alive any more"
    if all(rank.where is Where.COLLECTIVE for rank in living):
        return "all ranks wait in the same collective: the network or a device, rather than one rank's program"
    return "the ranks do not differ"
