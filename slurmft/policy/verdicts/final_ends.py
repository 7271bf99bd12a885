"""Ends after which the job must not run again, and what Slurm would make of them.

Slurm from 24.05 on requeues a job that ends by itself in the grace of a preemption, whatever its exit code is. 24.11
also remembers a preemption out of which the job was requeued in any other way, shows nothing of it, and requeues the
job at the end of a later start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slurmft.policy.verdicts.verdict import Action

UNDONE_WITHIN_S = 15.0
"""Slurm puts a job back at its very end. A person who wants the run to go on does not do so that soon after it."""


class End(StrEnum):
    """The end of a job's start, for the job."""

    STOPPED = "the run is not to go on"
    NOT_CONTINUED = "the run goes on by hand only"
    HANDED_ON = "another job continues the run"
    FINISHED = "the run is finished"
    OPEN = "the job is to run again, if that is possible"


@dataclass(frozen=True, kw_only=True, slots=True)
class Requeueing:
    """What Slurm shows of a job, as far as it may requeue it."""

    allowed: bool
    """The job's Requeue is not 0."""

    running: bool
    """It is this start of the job that runs, and Slurm is not ending it."""

    preempted: bool
    """The job is in the grace of a preemption."""


def end_of(action: Action) -> End:
    """The end that a decision makes of a start; one to go on leaves it open until it is carried out."""
    return {Action.FINISH: End.FINISHED, Action.STOP: End.STOPPED}.get(action, End.OPEN)


def why_no_requeue(end: End, job: Requeueing | None, *, was_preempted: bool) -> str:
    """Why Slurm must be told not to requeue the job; empty where nothing is to be changed.

    A finished run leaves the job as it is: started once more it ends at once, and ``scontrol requeue`` by hand, which
    Slurm refuses for a job that may not be requeued, still works.

    Args:
        job: None where Slurm did not say.
        was_preempted: an earlier start of the job was, or may have been.
    """
    if end in (End.FINISHED, End.OPEN) or (job is not None and not (job.allowed and job.running)):
        return ""
    if job is not None and job.preempted:
        return f"{end.value}, and Slurm may requeue a job that ends in the grace of a preemption"
    if was_preempted:
        return f"{end.value}, and Slurm may requeue a job that was preempted in an earlier start"
    return ""


def why_superfluous(end: End, *, lived: tuple[float, float], queued_at: float | None, told: bool) -> str:
    """Why a start of a job is one that Slurm alone wanted; empty for one that is to train.

    Args:
        end: of the job's start before this one.
        lived: Unix times of the first and the last line that it wrote.
        queued_at: Unix time at which the job was put back into the queue; None where it is not known.
        told: that start could not make Slurm keep to its end.
    """
    if end in (End.FINISHED, End.OPEN):
        return ""
    at_once = queued_at is not None and lived[0] <= queued_at + UNDONE_WITHIN_S <= lived[1] + 2 * UNDONE_WITHIN_S
    if not at_once and not (queued_at is None and told):
        return ""
    return f"Slurm has requeued the job at an end after which {end.value}"
