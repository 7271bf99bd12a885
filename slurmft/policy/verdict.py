"""The causes of an attempt's end, the evidence against nodes, the decisions that follow; how runs end for good, and
what a configuration says of exit codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# --- Evidence against nodes: observations, each with its kind, and suspects of ending an attempt ---


class Kind(StrEnum):
    """The kind of an observation; the vocabulary of the exclusion list and of workers' evidence files."""

    RERUN_UNDECIDED = "rerun undecided"
    """A result was rejected and came out the same again in place: the node, or the software."""

    RERUN_TRANSIENT = "rerun transient"
    """A rejected result came out otherwise when it was computed again in place."""

    RERUN_PERSISTENT = "rerun persistent"
    """A rejected result came out the same in place and otherwise on other hardware: the first node is faulty."""

    RERUN_ACQUITTED = "rerun acquitted"
    """A rejected result came out the same on other hardware: the node computes correctly."""

    REPLICA_DIFFERS = "replica differs"
    """Its replica of the weights or the optimizer state was not that of the others."""

    STRAGGLER = "straggler"
    HANG = "hang"
    NODE_LOST = "node lost"
    LAUNCH_FAILED = "launch failed"
    """Slurm could not start a job there, and has drained it: a Prolog that fails."""

    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    REPEATED_DEATH = "repeated death"
    """Attempts died from the same checkpoint, all on this node."""

    COMMUNICATION = "communication"
    RECLAIMED = "reclaimed"
    """Its cloud has announced to take the machine away."""

    AT_RISK = "at risk"
    """Its cloud has announced that it may do so."""

    HEALTH = "health check"
    PASSED = "health check passed"
    FORGIVEN = "forgiven"
    """A user has cleared all earlier observations of the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """Hardware that may have ended an attempt or spoiled a result."""

    node: str
    gpu: str = ""
    """UUID of the GPU; empty where there is none or it is not known."""

    rank: int | None = None
    """The rank that ran there; None when it is the whole node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One thing that a worker, an agent or the supervisor has seen of a node."""

    kind: Kind
    suspect: Suspect
    message: str
    """One line for people."""

    at: float
    """Unix time."""

    step: int | None = None


# --- The causes of an attempt's end, and the decisions that follow ---


class Cause(StrEnum):
    """The cause of an attempt's end; the vocabulary of the journal and of ``slurmft explain``."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    SIGNALLED = "signalled"
    STOPPED_BY_USER = "stopped by user"
    REQUEUED_BY_USER = "requeued by user"
    REQUEUED = "requeued by Slurm"
    RESIZED = "resized"
    RECLAIMED = "node reclaimed"
    WORKER_ERROR = "worker error"
    SIGNAL_CRASH = "signal crash"
    HOST_OUT_OF_MEMORY = "out of host memory"
    DEVICE_OUT_OF_MEMORY = "out of device memory"
    HANG = "hang"
    NODE_LOST = "node lost"
    COMMUNICATION_ERROR = "communication error"
    DATA_CORRUPTION = "data corruption suspected"
    REPLICAS_DIFFER = "replicas differ"
    LAUNCH_FAILURE = "launch failure"
    RERUN_ELSEWHERE = "rerun elsewhere"
    VALIDATION_FAILED = "result validation failed"
    STRAGGLER = "straggler"
    SUPERVISOR_LOST = "supervisor lost"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


PLANNED = frozenset(
    {
        Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.SIGNALLED, Cause.STOPPED_BY_USER, Cause.REQUEUED_BY_USER,
        Cause.REQUEUED, Cause.RESIZED, Cause.RECLAIMED,
    }
)  # fmt: skip
"""Causes that never spend the failure budget."""

FREE = PLANNED | {Cause.FINISHED, Cause.CANCELLED, Cause.RERUN_ELSEWHERE, Cause.STRAGGLER, Cause.REPLICAS_DIFFER}
"""Causes that have no budget of retries: planned stops, ends, and moves away from a node."""

BUDGETED = frozenset(Cause) - FREE
"""Causes that ``fault_tolerance.retries`` may give a budget of their own."""


def by_cause(value: Any) -> Any:
    """A mapping from the names of causes, with blanks or underscores, to anything; its keys become causes.

    Raises:
        ValueError: a key is not a cause that has a budget of retries; says which are.
    """
    if not isinstance(value, dict):
        return value
    found: dict[Cause, Any] = {}
    for key, number in value.items():
        name = str(key).replace("_", " ").strip().lower()
        cause = next((each for each in Cause if each.value.lower() == name), None)
        if cause is None or cause not in BUDGETED:
            why = "is not a cause" if cause is None else "costs no retries"
            known = ", ".join(sorted(each.value for each in BUDGETED))
            raise ValueError(f"{str(key)[:60]!r} {why}; these do: {known}")
        if cause in found:
            raise ValueError(f"{cause.value!r} is there twice")
        found[cause] = number
    return found


EXIT_USAGE = 2
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_RERUN_ELSEWHERE = 16
EXIT_VALIDATION_FAILED = 17
EXIT_UNSAVED = 74  # EX_IOERR of sysexits.h
EXIT_TEMPORARY = 75
EXIT_DO_NOT_REQUEUE = 93


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on one attempt."""

    cause: Cause
    reason: str
    """One sentence with the evidence: which rank, which node, which signal."""

    exit_code: int = 0
    """The first failing worker's own code; 0 when none failed."""

    first_step: int = 0
    """Step the attempt resumed from."""

    last_step: int = 0
    """Newest step any rank had reached."""

    saved_step: int | None = None
    """Step of the newest checkpoint that every rank of this attempt took part in; None when there is none."""

    rank: int | None = None
    """The rank to blame; None when it is none, or a whole node."""

    node: str = ""
    """Where that was; empty when no rank or node is to blame."""

    suspects: tuple[Suspect, ...] = ()
    """Hardware that may be the reason, the most suspicious first."""

    rerun: str = ""
    """The re-run state machine's verdict: undecided, transient, persistent, correct or inconclusive; else empty."""

    traceback: str = ""
    """End of the culprit's traceback."""

    of_node: bool = False
    """The program's error is one of a node that is not well, such as a GPU that is lost: not here again."""

    living: tuple[str, ...] | None = None
    """Lost nodes of which only the agent has ended: they closed its connection, so they live."""

    evidence: tuple[str, ...] = ()
    """Further evidence, in words: srun's lines, files that workers left."""

    @property
    def progressed(self) -> bool:
        """Whether the run is further than before: steps that were not saved will be done again."""
        return has_progressed(self.first_step, self.saved_step)

    @property
    def unsaved_steps(self) -> int:
        """Steps that were done since the newest save, and will be done again."""
        return steps_at_risk(self.first_step, self.last_step, self.saved_step)

    @property
    def suspect_nodes(self) -> tuple[str, ...]:
        """The suspects' nodes, each once, the most suspicious first."""
        return tuple(dict.fromkeys(suspect.node for suspect in self.suspects))


def has_progressed(first_step: int, saved_step: int | None) -> bool:
    """Whether an attempt that began at ``first_step`` has saved a step that was new."""
    return saved_step is not None and saved_step > first_step


def steps_at_risk(first_step: int, last_step: int, saved_step: int | None) -> int:
    """Steps of an attempt that no checkpoint holds."""
    return max(0, last_step - max(first_step, saved_step or 0))


class Action(StrEnum):
    """The action after an attempt."""

    FINISH = "finish"
    RESTART = "restart"
    """At once, in this allocation, with the agents that are there."""

    CONTINUE = "continue"
    """Through the queue."""

    STOP = "stop"


GOES_ON = frozenset({Action.RESTART, Action.CONTINUE})
"""Actions after which the run is to take up again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a verdict, always with its reason."""

    action: Action
    reason: str
    exit_code: int
    """The supervisor's exit code, unless Slurm restarts the job first."""

    avoid: tuple[str, ...] = ()
    """Nodes to keep away from at the next placement."""

    elsewhere: bool = False
    """The next placement must have none of ``avoid``: on the same nodes, going on would prove nothing."""


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
