"""How runs end for good, and what a configuration says of exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurmft.policy.verdict import Action

# --- exit actions ---
# A trainer's own exit codes, mapped to what should follow: ``{COMPLETE: "0", RESCHEDULE: "11-20", FAIL: "17"}``.


class ExitAction(StrEnum):
    """The meaning of an exit code; the names are those of workflow schedulers."""

    COMPLETE = "COMPLETE"
    RESCHEDULE = "RESCHEDULE"
    FAIL = "FAIL"


def parse_codes(text: str) -> frozenset[int]:
    """The exit codes in ``"0"``, ``"1,3"`` or ``"11-20,42"``; each from 0 to 255.

    Raises:
        ValueError: names the part that is not a code or a range.
    """
    codes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither an exit code nor a range such as 11-20")
        low, high = int(first), int(last or first)
        if low > high or high > 255:
            raise ValueError(f"{part.strip()!r}: exit codes go from 0 to 255, and a range from low to high")
        codes.update(range(low, high + 1))
    return frozenset(codes)


def lists_as_texts(value: Any) -> Any:
    """``{FAIL: [1, "3-5"]}`` as ``{FAIL: "1,3-5"}``; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {
        action: ",".join(map(str, codes)) if isinstance(codes, (list, tuple)) else codes
        for action, codes in value.items()
    }


def unambiguous(actions: Mapping[ExitAction, str]) -> Mapping[ExitAction, str]:
    """``actions``, when every code can be read and has one meaning.

    Raises:
        ValueError: names the code with two meanings.
    """
    seen: dict[int, ExitAction] = {}
    for action, codes in actions.items():
        for code in parse_codes(codes):
            if seen.setdefault(code, action) is not action:
                raise ValueError(f"exit code {code} is in both {seen[code]} and {action}")
    return actions


def codes_of(action: ExitAction, actions: Mapping[ExitAction, str]) -> frozenset[int]:
    """Every exit code that the configuration gives to ``action``."""
    return parse_codes(actions[action]) if action in actions else frozenset()


def explicit_action(code: int, actions: Mapping[ExitAction, str]) -> ExitAction | None:
    """The configured action for ``code``, or None when the configuration does not name it."""
    return next((action for action, codes in actions.items() if code in parse_codes(codes)), None)


# --- Ends after which the job must not run again, and what Slurm would make of them ---
# Slurm from 24.05 on requeues a job that ends by itself in the grace of a preemption, whatever its exit code is. 24.11
# also remembers a preemption out of which the job was requeued in any other way, shows nothing of it, and requeues the
# job at the end of a later start.

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
