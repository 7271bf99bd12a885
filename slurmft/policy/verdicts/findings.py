"""The finding of each rank's end by itself: from its files before its exit code; victims give none.

``Level`` orders findings that disagree.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from slurmft.policy.nodes.evidence import Suspect
from slurmft.policy.verdicts.symptoms import end_of
from slurmft.policy.verdicts.testimony import Report, Testimony
from slurmft.policy.verdicts.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, Cause


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


def shell_code(code: int) -> int:
    """An exit code as a shell shows it: 128 and the number of the signal."""
    return 128 - code if code < 0 else code


def _best(reports: Sequence[Report], code: int) -> Report | None:
    """The file that explains ``code`` best: one that knows a cause, a verdict before others, a log last.

    A log is believed only where it does not contradict a signal.
    """
    by_signal = code < 0 and code not in _ABORTED
    fit = [report for report in reports if not (report.guessed and by_signal)]
    ordered = sorted(fit, key=lambda report: (report.cause in _GENERAL, report.guessed, not report.binding))
    return next(iter(ordered), None)


def _finding(end: WorkerEnd, report: Report | None, heard: Testimony) -> Finding:
    cause = _cause(end, report, heard)
    level = LEVEL_OF[cause]
    if end.code in _BY_SOMEBODY and cause is Cause.SIGNAL_CRASH:
        level = Level.ERROR
    rerun = report.rerun if report is not None else ""
    if cause is Cause.VALIDATION_FAILED and rerun in RESUMABLE:
        level = Level.RERUN
    message = (report.message if report is not None else "") or end.error
    text = report.traceback if report is not None else ""
    return Finding(
        level=level,
        cause=cause,
        reason=f"{where(end)} {_told(end, report, cause)}{f': {message}' if message else ''}",
        code=_CANONICAL.get(cause, shell_code(end.code)),
        rank=end.rank,
        node=end.node,
        suspects=_suspects(end.node, end.rank, report, cause),
        rerun=rerun,
        traceback=end_of(text),
        evidence=(f"{report.source} of rank {end.rank}",) if report is not None else (),
        told=report is not None and report.binding and cause in DECIDING,
    )


def _cause(end: WorkerEnd, report: Report | None, heard: Testimony) -> Cause:
    told = report.cause if report is not None and report.cause in LEVEL_OF else None
    if told is not None and told in DECIDING and report is not None and report.binding:
        return told
    for cause, code in _CANONICAL.items():
        if end.code == code:
            return cause
    if end.code in _KILLED and not end.killed and (end.starved or heard.step.oom_on(end.node)):
        return Cause.HOST_OUT_OF_MEMORY
    if told is not None and (told is not Cause.WORKER_ERROR or end.killed):
        return told
    return Cause.SIGNAL_CRASH if end.code < 0 else Cause.WORKER_ERROR


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
    if cause in (Cause.VALIDATION_FAILED, Cause.WORKER_ERROR, Cause.COMMUNICATION_ERROR, Cause.DEVICE_OUT_OF_MEMORY):
        return ()
    return (Suspect(node=node, rank=rank),) if node else ()


def _from_report_alone(report: Report) -> Finding:
    who = f"the agent on {report.node}"
    if report.rank is not None:
        who = f"rank {report.rank} on {report.node}" if report.node else f"rank {report.rank}"
    level = LEVEL_OF[report.cause]
    if report.cause is Cause.VALIDATION_FAILED and report.rerun in RESUMABLE:
        level = Level.RERUN
    return Finding(
        level=level,
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
