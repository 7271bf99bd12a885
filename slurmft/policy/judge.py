"""From what was seen of the workers to one verdict: the most telling end wins, victims never do."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, PLANNED, Cause, Verdict


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

    killed: bool = False
    """We killed it, so it is a victim."""

    error: str = ""
    """Last line of its traceback."""

    step: int = 0
    """Steps it had completed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What the supervisor knows beside the workers' ends."""

    reached: tuple[int, int] = (0, 0)
    """First and newest step of the attempt."""

    saved: int | None = None
    """Newest step that every rank has saved."""

    planned: Cause | None = None
    """A stop had been asked for, and why."""

    planned_reason: str = ""
    lost_nodes: tuple[str, ...] = ()
    launch_error: str = ""
    outside: Cause | None = None
    """Slurm was ending the job, and why."""

    outside_reason: str = ""


def judge(ends: Sequence[WorkerEnd], *, world_size: int, seen: Circumstances) -> Verdict:
    """The verdict on an attempt of ``world_size`` ranks."""
    cause, reason, code = _cause(ends, world_size, seen)
    return Verdict(
        cause=cause,
        reason=reason,
        exit_code=code,
        first_step=seen.reached[0],
        last_step=seen.reached[1],
        saved_step=seen.saved,
    )


def _cause(ends: Sequence[WorkerEnd], world_size: int, seen: Circumstances) -> tuple[Cause, str, int]:
    if len(ends) == world_size and all(end.finished for end in ends) and not _culprits(ends, planned=False):
        return Cause.FINISHED, f"all {world_size} ranks finished at step {ends[0].step}", 0
    for code, cause in (
        (EXIT_VALIDATION_FAILED, Cause.VALIDATION_FAILED),
        (EXIT_RERUN_ELSEWHERE, Cause.RERUN_ELSEWHERE),
    ):
        for end in ends:
            if end.code == code:
                return cause, f"rank {end.rank} on {end.node} exited with {code}", code
    if seen.outside is not None:
        return seen.outside, seen.outside_reason, 0
    if seen.launch_error:
        return Cause.LAUNCH_FAILURE, seen.launch_error, 0
    if seen.planned is not None:
        return seen.planned, _planned_reason(ends, world_size, seen), 0
    culprits = _culprits(ends, planned=False)
    if seen.lost_nodes:  # ranks elsewhere fail because of it, in their own words
        felt = f"; felt by {_blame(culprits[0])[1]}" if culprits else ""
        return Cause.NODE_LOST, f"lost contact with {', '.join(seen.lost_nodes)}{felt}", 0
    if culprits:
        return _blame(culprits[0])
    if len(ends) == world_size and all(end.code == 0 for end in ends):
        return Cause.FINISHED, f"all {world_size} ranks exited with 0", 0
    return Cause.NODE_LOST, f"{world_size - len(ends)} of {world_size} ranks disappeared without an exit status", 0


def _culprits(ends: Sequence[WorkerEnd], *, planned: bool) -> list[WorkerEnd]:
    calm = {0, -signal.SIGTERM, 128 + signal.SIGTERM} if planned else {0}
    return [end for end in ends if end.code not in calm and not end.stopped and not end.killed]


def _planned_reason(ends: Sequence[WorkerEnd], world_size: int, seen: Circumstances) -> str:
    if culprits := _culprits(ends, planned=True):
        _, reason, _ = _blame(culprits[0])
        return f"{seen.planned_reason}; no save at the stop: {reason}"
    if not any(end.attached for end in ends):
        return f"{seen.planned_reason}; the workers have ended"
    stopped = [end for end in ends if end.stopped]
    if len(stopped) == world_size:
        return f"{seen.planned_reason}; all ranks stopped at step {stopped[0].step}"
    return f"{seen.planned_reason}; {len(stopped)} of {world_size} ranks stopped at a step boundary"


def _blame(end: WorkerEnd) -> tuple[Cause, str, int]:
    where = f"rank {end.rank} on {end.node}"
    detail = f": {end.error}" if end.error else ""
    if end.code < 0:
        name = signal.Signals(-end.code).name if -end.code in set(signal.Signals) else f"signal {-end.code}"
        return Cause.SIGNAL_CRASH, f"{where} was killed by {name}{detail}", 128 - end.code
    return Cause.WORKER_ERROR, f"{where} exited with {end.code}{detail}", end.code


def is_planned(cause: Cause) -> bool:
    """Whether somebody asked for the stop."""
    return cause in PLANNED
