"""What follows an attempt: the runbook (verdict and history in, decision out), how it is carried out step by step, and
who takes part in the next one. Pure, as ``policy.life``, whose attempt is over here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, StrEnum

from slurmft.policy.symptoms import bug_of
from slurmft.policy.verdict import (
    BUDGETED,
    EXIT_DO_NOT_REQUEUE,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_RERUN_ELSEWHERE,
    EXIT_TEMPORARY,
    EXIT_UNSAVED,
    EXIT_USAGE,
    EXIT_VALIDATION_FAILED,
    PLANNED,
    Action,
    Cause,
    Decision,
    End,
    ExitAction,
    Verdict,
    end_of,
    explicit_action,
)

# --- The runbook: verdict and history in, decision out ---

DEFAULT_KNOB = "fault_tolerance.num_job_retries_on_failure"

HOPELESS = frozenset({EXIT_USAGE, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND})
"""Exit codes that another try, on any node, would only repeat."""

PATIENT = frozenset(
    {
        Cause.PREEMPTED, Cause.SIGNALLED, Cause.REQUEUED, Cause.REQUEUED_BY_USER, Cause.RESIZED, Cause.RECLAIMED,
    }
)  # fmt: skip
"""Ends that say nothing about the run: it may end like this any number of times before it makes progress."""

AVOIDING = PLANNED | {
    Cause.RERUN_ELSEWHERE, Cause.VALIDATION_FAILED, Cause.STRAGGLER, Cause.NODE_LOST, Cause.DATA_CORRUPTION,
    Cause.LAUNCH_FAILURE, Cause.REPLICAS_DIFFER,
}  # fmt: skip
"""Causes whose suspects are kept away from. A crash, a node short of memory or a peer that was missed is weak evidence:
it goes on the exclusion list, and the next placement may well be the same."""


RESTARTABLE = frozenset(
    {
        Cause.WORKER_ERROR, Cause.SIGNAL_CRASH, Cause.HOST_OUT_OF_MEMORY, Cause.DEVICE_OUT_OF_MEMORY, Cause.HANG,
        Cause.COMMUNICATION_ERROR, Cause.VALIDATION_FAILED, Cause.NODE_LOST, Cause.REPLICAS_DIFFER,
        Cause.UNKNOWN,
    }
)  # fmt: skip
"""Failures that are tried again in the allocation, as far as it has nodes for that, before the queue is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The run's remaining budget."""

    failures_so_far: int
    """Earlier ends of the verdict's own cause since the run last made progress."""

    max_failures: int
    """Retries that this cause has."""

    knob: str = DEFAULT_KNOB
    """The key of that limit."""

    idle_cycles: int = 0
    """Earlier ends in a row, of any cause that counts, after which no new step had been saved."""

    lost_cycles: int = 0
    """Those among them that had saved something, and the run came back to the same step all the same."""

    max_no_progress_cycles: int = 3

    restarts_so_far: int = 0
    """Restarts within this start of the job since the run last made progress."""

    max_restarts: int = 0

    is_same_bug: bool = False
    """The end before was the same exception at the same place, and no step was done since."""

    has_nodes: bool = True
    """Enough nodes for another attempt are left in this allocation."""

    outlived: bool = False
    """The agents have outlived their supervisor, and wait for the next one."""


def decide(verdict: Verdict, budget: Budget, exit_actions: Mapping[ExitAction, str] | None = None) -> Decision:
    """The decision on ``verdict``. Planned stops, exit 16 and moves away from a slow node never spend a budget."""
    has_code = verdict.cause is Cause.FINISHED or (verdict.exit_code != 0 and verdict.cause not in PLANNED)
    action = explicit_action(verdict.exit_code, exit_actions or {}) if has_code else None
    if action is ExitAction.COMPLETE or (action is None and verdict.cause is Cause.FINISHED):
        return Decision(Action.FINISH, verdict.reason, 0)
    if action is ExitAction.FAIL:
        reason = f"exit_actions maps {verdict.exit_code} to FAIL: {verdict.reason}"
        return Decision(Action.STOP, reason, verdict.exit_code)
    match verdict.cause:
        case Cause.CANCELLED:
            return Decision(Action.STOP, verdict.reason, EXIT_TEMPORARY)
        case Cause.STOPPED_BY_USER:
            return Decision(Action.STOP, verdict.reason, _code_of_stop(verdict))
        case Cause.RESIZED if budget.has_nodes:
            return Decision(Action.RESTART, verdict.reason, _code_of_stop(verdict))
        case cause if cause in PLANNED:
            return _after_planned_stop(verdict, budget)
        case Cause.REPLICAS_DIFFER if not verdict.suspects:
            return _after_failure(verdict, budget)  # computed again, which tells who was right
        case Cause.RERUN_ELSEWHERE | Cause.STRAGGLER | Cause.REPLICAS_DIFFER:
            return _move(verdict, budget)
        case Cause.VALIDATION_FAILED if action is None:
            return _after_validation(verdict, budget)
        case Cause.WORKER_ERROR if verdict.exit_code in HOPELESS and action is None:
            reason = f"{verdict.reason}; bad usage, bad input or a missing program fails again wherever it is tried"
            return Decision(Action.STOP, reason, verdict.exit_code)
        case Cause.WORKER_ERROR if budget.is_same_bug and action is None:
            reason = f"{verdict.reason}; the same exception at the same place as before, and no step was done"
            return Decision(Action.STOP, reason, verdict.exit_code or EXIT_DO_NOT_REQUEUE)
    return _after_failure(verdict, budget)


def _after_planned_stop(verdict: Verdict, budget: Budget) -> Decision:
    if verdict.cause not in PATIENT and (given_up := _without_progress(verdict, budget)) is not None:
        return given_up
    return Decision(Action.CONTINUE, verdict.reason, _code_of_stop(verdict), avoid=verdict.suspect_nodes)


def _code_of_stop(verdict: Verdict) -> int:
    return EXIT_UNSAVED if verdict.unsaved_steps else EXIT_TEMPORARY


def _move(verdict: Verdict, budget: Budget) -> Decision:
    """Go on, on other nodes than the suspects; it costs nothing, and is bounded by progress alone."""
    if (given_up := _without_progress(verdict, budget)) is not None:
        return given_up
    code = EXIT_RERUN_ELSEWHERE if verdict.cause is Cause.RERUN_ELSEWHERE else EXIT_TEMPORARY
    return Decision(Action.CONTINUE, verdict.reason, code, avoid=verdict.suspect_nodes, elsewhere=True)


def _after_validation(verdict: Verdict, budget: Budget) -> Decision:
    """By the re-run state machine's verdict: only where it knows which node was wrong can training go on."""
    if verdict.rerun == "persistent" and verdict.suspects:
        if (given_up := _without_progress(verdict, budget)) is not None:
            return given_up
        who = ", ".join(verdict.suspect_nodes)
        reason = f"{verdict.reason}; {who} computes wrong, so on from the checkpoint without it"
        return Decision(Action.CONTINUE, reason, EXIT_TEMPORARY, avoid=verdict.suspect_nodes, elsewhere=True)
    if verdict.rerun == "transient":
        return _after_failure(verdict, budget)
    return Decision(Action.STOP, verdict.reason, EXIT_VALIDATION_FAILED)


def _after_failure(verdict: Verdict, budget: Budget) -> Decision:
    is_restartable = verdict.cause in RESTARTABLE or (verdict.cause is Cause.SUPERVISOR_LOST and budget.outlived)
    if is_restartable and budget.has_nodes and budget.restarts_so_far < budget.max_restarts:
        reason = f"{verdict.reason}; restart {budget.restarts_so_far + 1} of {budget.max_restarts} in this allocation"
        return Decision(Action.RESTART, reason, verdict.exit_code or EXIT_TEMPORARY)
    if budget.failures_so_far >= budget.max_failures:
        many = f"{budget.failures_so_far + 1} failures of this kind without progress"
        reason = f"{verdict.reason}; {many} are more than {budget.knob}={budget.max_failures} retries"
        return Decision(Action.STOP, reason, verdict.exit_code or EXIT_DO_NOT_REQUEUE)
    if (given_up := _without_progress(verdict, budget)) is not None:
        return given_up
    is_avoided = verdict.cause in AVOIDING and verdict.rerun != "transient"
    avoid = verdict.suspect_nodes if is_avoided or verdict.of_node else ()
    reason = f"{verdict.reason}; retry {budget.failures_so_far + 1} of {budget.max_failures}"
    elsewhere = bool(avoid) and verdict.cause is Cause.DATA_CORRUPTION
    return Decision(Action.CONTINUE, reason, verdict.exit_code or EXIT_TEMPORARY, avoid=avoid, elsewhere=elsewhere)


def _without_progress(verdict: Verdict, budget: Budget) -> Decision | None:
    """The final stop of a run that keeps coming back to the same step, for any cause; None while retries are left."""
    cycles = budget.idle_cycles + 1
    is_further = verdict.progressed and not budget.lost_cycles
    if is_further or cycles < budget.max_no_progress_cycles:
        return None
    advice = ""
    if verdict.progressed:
        advice = f"; what is saved after step {verdict.first_step} is not resumed from: see why in the workers' logs"
    elif verdict.cause is Cause.TIME_LIMIT:
        advice = "; the limit may be too short for one step and a save (slurm.time)"
    many = f"{cycles} ends in a row without a new saved step (fault_tolerance.max_no_progress_cycles)"
    return Decision(Action.STOP, f"{many}, the last: {verdict.reason}{advice}", EXIT_DO_NOT_REQUEUE)


# --- The budget spent by a run's history: failures by cause, and ends in a row without progress ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PastEnd:
    """One earlier end of the run, oldest first."""

    cause: str
    """As the journal has it; one that is not known counts as a failure of its own kind."""

    progressed: bool = False
    """It had saved a new step."""

    first_step: int | None = None
    """Step it had resumed from; None where it did not come that far."""

    bug: str = ""
    """The exception that it ended with, soon and before any step (``symptoms.bug_of``)."""

    restarted_in: str | None = None
    """The start of the job within which it was followed by a restart; None where none followed."""

    given_up: bool = False
    """The run was stopped by a decision: the user who resubmitted it has looked at it, and the count begins anew."""


def budget_for(
    verdict: Verdict,
    past: Iterable[PastEnd],
    *,
    retries: int,
    retries_of: Mapping[Cause, int],
    max_no_progress_cycles: int,
    restarts: int = 0,
    job_start: str = "",
) -> Budget:
    """The budget that the run had spent before ``verdict``, and its limits.

    Ends that a restart within the same start of the job followed count as restarts alone: only requeues spend retries.
    """
    spent: Counter[str] = Counter()
    idle = lost = restarted = lost_restarts = 0
    ends = list(past)
    for end, is_lost in zip(ends, _lost(ends, verdict), strict=True):
        if end.given_up or (end.progressed and not is_lost):
            spent.clear()
            idle = lost = restarted = lost_restarts = 0
        if end.given_up:
            continue
        if end.restarted_in is not None:
            here = end.restarted_in == job_start
            restarted, lost_restarts = restarted + here, lost_restarts + (here and is_lost)
            continue
        if end.cause in _COUNTED or end.cause not in _KNOWN:
            spent[end.cause] += 1
        if end.cause not in _PATIENT and end.cause != Cause.STOPPED_BY_USER.value:
            idle += not end.progressed or is_lost
            lost += is_lost
    if verdict.progressed:
        spent.clear()
        idle, restarted = lost, lost_restarts
    own = retries_of.get(verdict.cause)
    newest = next((end for end in reversed(ends) if end.given_up or end.cause not in _PATIENT), PastEnd(cause=""))
    bug = bug_of(verdict.traceback) if verdict.last_step <= verdict.first_step else ""
    return Budget(
        failures_so_far=spent[verdict.cause.value],
        max_failures=retries if own is None else own,
        knob=DEFAULT_KNOB if own is None else f"fault_tolerance.retries: {verdict.cause.value}",
        idle_cycles=idle,
        lost_cycles=lost,
        max_no_progress_cycles=max_no_progress_cycles,
        restarts_so_far=restarted,
        max_restarts=restarts,
        is_same_bug=bool(bug) and newest.bug == bug,
    )


def _lost(ends: Sequence[PastEnd], verdict: Verdict) -> list[bool]:
    """Ends whose saves were of no use: the run came back to the step that they had begun at."""
    lost = []
    began = verdict.first_step if verdict.last_step or verdict.saved_step is not None else None
    for end in reversed(ends):
        came_back = end.first_step is not None and began is not None and began <= end.first_step
        lost.append(end.progressed and came_back)
        if end.given_up:  # the user may have deleted the checkpoints
            began = None
        elif end.first_step is not None:
            began = end.first_step
    return lost[::-1]


_KNOWN = frozenset(cause.value for cause in Cause)
_COUNTED = frozenset(cause.value for cause in BUDGETED)
_PATIENT = frozenset(cause.value for cause in PATIENT)


# --- Parts of a job that begin again alone, while the others go on ---

MAX_BEGUN_AGAIN = 3
"""So often a part begins again without progress in between; then the job is tried again as a whole."""


@dataclass(frozen=True, slots=True)
class BegunAgain:
    """How often a part has begun again alone since it last made progress."""

    times: int = 0
    reached: int = 0
    """Its progress at the last look, in steps or requests."""

    @property
    def is_spent(self) -> bool:
        """Whether it does so no more."""
        return self.times >= MAX_BEGUN_AGAIN

    def at(self, reached: int) -> BegunAgain:
        """As of now; progress clears the count."""
        return BegunAgain(0, reached) if reached > self.reached else self

    def once_more(self) -> BegunAgain:
        """It begins again."""
        return replace(self, times=self.times + 1)


_OWN_FAULT = frozenset(
    {
        Cause.WORKER_ERROR, Cause.SIGNAL_CRASH, Cause.HANG, Cause.COMMUNICATION_ERROR, Cause.HOST_OUT_OF_MEMORY,
        Cause.DEVICE_OUT_OF_MEMORY, Cause.LAUNCH_FAILURE, Cause.SUPERVISOR_LOST, Cause.UNKNOWN,
    }
)  # fmt: skip
"""Causes after which the same nodes will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleEnd:
    """How the supervisor of a role has ended."""

    code: int
    """Its exit code; above 128 a signal's."""

    cause: str = ""
    """Of its verdict on the last attempt; empty where it left none."""

    action: str = ""
    """What it decided then; empty where it decided nothing."""

    avoid: tuple[str, ...] = ()
    """Nodes that the decision keeps away from."""


def role_begins_again(end: RoleEnd, before: BegunAgain) -> bool:
    """Whether the role begins again alone on its nodes; else its end is that of the whole job.

    Args:
        before: within this attempt of the job.
    """
    if before.is_spent or end.avoid:
        return False
    if not end.action:  # its supervisor was killed, and its guardian with it
        return end.code > 128
    return end.action == Action.CONTINUE.value and end.cause in _OWN_FAULT


# --- What follows an end, as a machine: ``step`` takes what has come of one thing, and says what is next ---
# One thing is done at a time, and each may end the process that does it: a requeue ends the very job that asks for it,
# and a signal or a kill may come between any two. So nothing is done for the run before the decision is written down,
# and what was written down is carried out again by what acts in the place of a supervisor that was lost.
# ``supervisor.act.AttemptEnd`` does these things, and decides nothing itself.


class Do(StrEnum):
    """What is to be done."""

    ASK_WHOSE = "ask whose the run is"
    """Look whether another start has taken the run over."""

    LEAVE = "leave"
    """Write down that the run is another's, and end the agents."""

    DECIDE = "decide"
    """Write the verdict down, and decide."""

    ASK_IN_DOUBT = "ask in doubt"
    """Nodes were lost, or the supervisor: ask Slurm whether it requeues the job, before the run goes on in it."""

    TELL_LIST = "tell the list"
    """Hand in what is held against nodes: the exclusion list influences where the run goes on."""

    SEEK = "seek a place"
    """Look for nodes of this allocation, or for those that the next one must avoid."""

    NOTE_GPUS = "note GPUs"
    """Write down the GPUs that the run must go on without, since it cannot leave their node."""

    NOTE_INCONCLUSIVE = "note inconclusive"
    """Write down that the result cannot be computed again on different hardware."""

    WRITE = "write the decision"
    """Write the decision down."""

    WAIT = "wait"
    """Wait a moment with the nodes in hand; the next attempt begins here."""

    MARK_DONE = "mark as complete"
    """Mark the run as complete: agents may take long to end, and the job may be ended meanwhile."""

    DISMISS = "dismiss"
    """End the agents."""

    CLAIM = "claim"
    """Claim the right to continue the run after this attempt."""

    ASK_CLAIMED = "ask what the claim was for"
    """Another has claimed it: ask Slurm whether it puts the job back, or has cancelled it."""

    PLACE_CLAIMED = "place what was claimed"
    """Who has requeued the job may have been killed before it could give it a begin time that lies after our end."""

    NOTE_CLAIMED = "note the claim"
    """Write down that the end of this attempt was acted on already."""

    OVERRULE = "overrule the claim"
    """Nothing has come of it, as of one of cron's while this process lives: take it away, and claim."""

    LEAVE_TO_JOB = "leave to the job"
    """Write down that the job goes on as a whole, with all of its roles."""

    LEAVE_TO_USER = "leave to the user"
    """Write down that the run goes on by hand only, as its user wants."""

    START_ANEW = "start anew"
    """Without Slurm: begin the run's next start in this process."""

    ASK_ENDING = "ask whether it ends"
    """Ask Slurm whether it puts the job back, or has cancelled it, before slurmft requeues it."""

    PLACE = "place"
    """Slurm has requeued the job, so that a second requeue must not follow: give that one its begin time and its
    excluded nodes."""

    LEAVE_CANCELLED = "leave cancelled"
    """Write down that the job was cancelled, and must stay so."""

    FIND_LATER = "find a later job"
    """Look for a later job of the run in the queue: two of them would be one too many."""

    ASK_PREEMPTION = "ask about preemption"
    """Ask Slurm whether the partition cancels what it preempts."""

    REQUEUE = "requeue"
    """Write down that the job is requeued, and requeue it."""

    RESUBMIT = "resubmit"
    """Write down that a successor is submitted, and submit it."""

    SETTLE = "settle the claim"
    """Write into the claim what has become of it."""

    GIVE_BACK = "give the claim back"
    """Nothing has become of it, and another may try."""

    TELL_USER = "tell the user"
    """Write down, and say, how the run is continued by hand."""

    KEEP_ENDED = "keep it ended"
    """Tell Slurm not to requeue the job where that would undo this end."""

    ASK_UNDONE = "ask whether it is undone"
    """Ask Slurm whether it has requeued the job meanwhile."""

    NOTE_UNDONE = "note that it is undone"
    """Write down that Slurm has; the next start finds the request for a stop, and ends."""

    TAKE_STOP = "take the request"
    """Take the user's request for a stop away: the decision that has met it is written down."""

    OVER = "over"
    """Nothing: the run goes on here, or the process ends with its exit code."""


class Answer(StrEnum):
    """What has come of it."""

    DONE = "done"
    YES = "yes"
    NO = "no"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Decided:
    """``in_doubt``: nodes were lost, or the supervisor, and Slurm may be ending the job."""

    decision: Decision
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class NoPlace:
    """The run cannot get away from its suspects."""

    why: str


Found = Answer | Decided | NoPlace

FINDS: dict[Do, tuple[Answer | type, ...]] = {
    Do.ASK_WHOSE: (Answer.YES, Answer.NO),
    Do.DECIDE: (Decided,),
    Do.ASK_IN_DOUBT: (Answer.REQUEUED, Answer.CANCELLED, Answer.NO),
    Do.SEEK: (Answer.YES, Answer.NO, NoPlace),
    Do.CLAIM: (Answer.YES, Answer.NO),
    Do.ASK_CLAIMED: (Answer.REQUEUED, Answer.CANCELLED, Answer.NO),
    Do.ASK_ENDING: (Answer.REQUEUED, Answer.CANCELLED, Answer.NO),
    Do.FIND_LATER: (Answer.YES, Answer.NO),
    Do.ASK_PREEMPTION: (Answer.YES, Answer.NO),
    Do.REQUEUE: (Answer.DONE, Answer.CANCELLED, Answer.FAILED),
    Do.RESUBMIT: (Answer.DONE, Answer.CANCELLED, Answer.FAILED),
    Do.ASK_UNDONE: (Answer.REQUEUED, Answer.CANCELLED, Answer.NO),
}
"""What may come of each; of all others, that it is done.

``SEEK``: yes, nodes of this allocation will do; no, the queue will find some. ``CLAIM``: yes also where the run folder
does not answer, for requeueing twice is as good as once, and not at all is not.
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration, the job and its journal say."""

    in_slurm: bool
    continue_by: str = "auto"
    """``preemption.continue_by``."""

    resubmits: bool = False
    """A supervisor before this one was killed while it submitted a successor: a requeue must not follow then."""

    gpus: frozenset[str] = frozenset()
    """UUIDs of those that the run goes on without already."""


@dataclass(frozen=True, slots=True)
class State:
    """All that decides what comes next."""

    rules: Rules
    verdict: Verdict
    do: Do = Do.ASK_WHOSE
    decision: Decision | None = None
    why: str = ""
    """Why it goes on as it was, or is inconclusive."""

    stays: bool = False
    """It goes on here, on other nodes."""

    requeued: bool = False
    """Slurm has put the job back."""

    end: End = End.OPEN
    exit_code: int | None = None
    """None where the run goes on here."""


AFTER: dict[tuple[Do, Answer], Do] = {
    (Do.ASK_WHOSE, Answer.YES): Do.LEAVE,
    (Do.ASK_WHOSE, Answer.NO): Do.DECIDE,
    (Do.LEAVE, Answer.DONE): Do.OVER,
    (Do.ASK_IN_DOUBT, Answer.CANCELLED): Do.TELL_LIST,
    (Do.ASK_IN_DOUBT, Answer.NO): Do.TELL_LIST,
    (Do.NOTE_GPUS, Answer.DONE): Do.WRITE,
    (Do.NOTE_INCONCLUSIVE, Answer.DONE): Do.WRITE,
    (Do.WAIT, Answer.DONE): Do.OVER,
    (Do.MARK_DONE, Answer.DONE): Do.DISMISS,
    (Do.ASK_CLAIMED, Answer.REQUEUED): Do.PLACE_CLAIMED,
    (Do.ASK_CLAIMED, Answer.CANCELLED): Do.NOTE_CLAIMED,
    (Do.ASK_CLAIMED, Answer.NO): Do.OVERRULE,
    (Do.PLACE_CLAIMED, Answer.DONE): Do.NOTE_CLAIMED,
    (Do.NOTE_CLAIMED, Answer.DONE): Do.KEEP_ENDED,
    (Do.LEAVE_TO_JOB, Answer.DONE): Do.KEEP_ENDED,
    (Do.LEAVE_TO_USER, Answer.DONE): Do.KEEP_ENDED,
    (Do.ASK_ENDING, Answer.CANCELLED): Do.LEAVE_CANCELLED,
    (Do.ASK_ENDING, Answer.NO): Do.FIND_LATER,
    (Do.PLACE, Answer.DONE): Do.SETTLE,
    (Do.LEAVE_CANCELLED, Answer.DONE): Do.SETTLE,
    (Do.FIND_LATER, Answer.YES): Do.SETTLE,
    (Do.ASK_PREEMPTION, Answer.YES): Do.RESUBMIT,
    (Do.ASK_PREEMPTION, Answer.NO): Do.REQUEUE,
    (Do.REQUEUE, Answer.DONE): Do.SETTLE,
    (Do.REQUEUE, Answer.CANCELLED): Do.SETTLE,
    (Do.RESUBMIT, Answer.DONE): Do.SETTLE,
    (Do.RESUBMIT, Answer.CANCELLED): Do.SETTLE,
    (Do.SETTLE, Answer.DONE): Do.KEEP_ENDED,
    (Do.GIVE_BACK, Answer.DONE): Do.TELL_USER,
    (Do.TELL_USER, Answer.DONE): Do.KEEP_ENDED,
    (Do.ASK_UNDONE, Answer.REQUEUED): Do.NOTE_UNDONE,
    (Do.ASK_UNDONE, Answer.CANCELLED): Do.TAKE_STOP,
    (Do.ASK_UNDONE, Answer.NO): Do.TAKE_STOP,
    (Do.NOTE_UNDONE, Answer.DONE): Do.OVER,
    (Do.TAKE_STOP, Answer.DONE): Do.OVER,
}
"""What comes next wherever that does not depend on anything else; ``_depending`` has the rest."""

ENDS = {
    (Do.LEAVE_TO_USER, Answer.DONE): End.NOT_CONTINUED,
    (Do.FIND_LATER, Answer.YES): End.HANDED_ON,
    (Do.RESUBMIT, Answer.DONE): End.HANDED_ON,
}
TEMPORARY = frozenset({(Do.ASK_WHOSE, Answer.YES), (Do.GIVE_BACK, Answer.DONE)})
"""After these, the exit code says that the run may be tried again."""


def step(state: State, found: Found = Answer.DONE) -> State:
    """The state after ``found`` has come of what was to be done.

    Raises:
        ValueError: that cannot come of it.
    """
    if not isinstance(found, Answer) or (then := AFTER.get((state.do, found))) is None:
        return _depending(state, found)
    end = ENDS.get((state.do, found), state.end)
    code = EXIT_TEMPORARY if (state.do, found) in TEMPORARY else state.exit_code
    return replace(state, do=then, end=end, exit_code=code)


def carried_out(state: State, decision: Decision) -> State:
    """The state from which a decision is carried out: the one just made, or that of a supervisor that was lost."""
    then = replace(state, decision=decision, do=Do.WRITE)
    if decision.action is not Action.CONTINUE:
        return then
    if state.rules.in_slurm:
        return replace(then, do=Do.SEEK)
    if state.verdict.cause is Cause.RECLAIMED:
        reason = f"{state.verdict.reason}; there is no queue to go on through: start it again elsewhere"
        return replace(then, decision=replace(decision, action=Action.STOP, reason=reason))
    return _without_others(then, decision, "there are no other nodes") if decision.elsewhere else then


def _depending(state: State, found: Found) -> State:
    decision = state.decision
    if state.do is Do.DECIDE and isinstance(found, Decided):
        asks = found.in_doubt and found.decision.action is Action.RESTART
        return replace(state, do=Do.ASK_IN_DOUBT if asks else Do.TELL_LIST, decision=found.decision)
    if decision is None:
        raise ValueError(f"{found} cannot come of {state.do}")
    match state.do, found:
        case Do.ASK_IN_DOUBT, Answer.REQUEUED:
            reason = f"{state.verdict.reason}; Slurm has requeued the job"
            return replace(state, do=Do.TELL_LIST, decision=replace(decision, action=Action.CONTINUE, reason=reason))
        case Do.TELL_LIST, Answer.DONE:
            return carried_out(state, decision)
        case Do.SEEK, NoPlace(why):
            return _without_others(state, decision, why)
        case Do.SEEK, (Answer.YES | Answer.NO):
            return replace(state, do=Do.WRITE, stays=found is Answer.YES)
        case Do.WRITE, Answer.DONE:
            if decision.action is Action.RESTART or state.stays:
                return replace(state, do=Do.WAIT)
            first = Do.MARK_DONE if decision.action is Action.FINISH else Do.DISMISS
            return replace(state, do=first, end=end_of(decision.action), exit_code=decision.exit_code)
        case Do.DISMISS, Answer.DONE:
            return replace(state, do=Do.CLAIM if decision.action is Action.CONTINUE else Do.KEEP_ENDED)
        case Do.KEEP_ENDED, Answer.DONE:
            last = {Action.STOP: Do.ASK_UNDONE, Action.FINISH: Do.TAKE_STOP}
            return replace(state, do=last.get(decision.action, Do.OVER))
    return _going_on(state, found)


def _going_on(state: State, found: Found) -> State:
    """How a run goes on for which this start can do nothing more."""
    rules = state.rules
    match state.do, found:
        case Do.CLAIM, Answer.NO:  # without Slurm, another claims only what it has begun
            return replace(state, do=Do.ASK_CLAIMED if rules.in_slurm else Do.NOTE_CLAIMED)
        case (Do.CLAIM, Answer.YES) | (Do.OVERRULE, Answer.DONE):
            here = Do.ASK_ENDING if rules.in_slurm else Do.START_ANEW
            ways = {"job": Do.LEAVE_TO_JOB, "nothing": Do.LEAVE_TO_USER}
            return replace(state, do=ways.get(rules.continue_by, here))
        case Do.ASK_ENDING, Answer.REQUEUED:  # a successor may be there: it goes on then, and that start is superfluous
            looks = rules.resubmits and rules.continue_by != "requeue"
            return replace(state, do=Do.FIND_LATER if looks else Do.PLACE, requeued=True)
        case Do.RESUBMIT, Answer.FAILED:
            return replace(state, do=Do.PLACE if state.requeued else Do.GIVE_BACK)
        case Do.FIND_LATER, Answer.NO:
            if rules.continue_by == "resubmit" or (rules.continue_by == "auto" and rules.resubmits):
                return replace(state, do=Do.RESUBMIT)
            asks = rules.continue_by == "auto" and state.verdict.cause is Cause.PREEMPTED
            return replace(state, do=Do.ASK_PREEMPTION if asks else Do.REQUEUE)
        case Do.REQUEUE, Answer.FAILED:
            return replace(state, do=Do.RESUBMIT if rules.continue_by == "auto" else Do.GIVE_BACK)
    raise ValueError(f"{found} cannot come of {state.do}")


def _without_others(state: State, decision: Decision, why: str) -> State:
    """It cannot leave the nodes that it was to leave."""
    verdict, state = state.verdict, replace(state, do=Do.WRITE, why=why)
    gpus = {suspect.gpu for suspect in verdict.suspects}
    if all(gpus) and not gpus <= state.rules.gpus:  # each node's agent checks whether it can
        reason = f"{decision.reason}; on other GPUs, since {why}"
        return replace(state, do=Do.NOTE_GPUS, decision=replace(decision, elsewhere=False, reason=reason))
    if verdict.cause is Cause.VALIDATION_FAILED:
        reason = f"{decision.reason}; there is no other hardware to go on with: {why}"
        return replace(state, decision=Decision(Action.STOP, reason, EXIT_VALIDATION_FAILED))
    if verdict.cause is not Cause.RERUN_ELSEWHERE:
        reason = f"{decision.reason}; it goes on where it was: {why}"
        return replace(state, decision=replace(decision, elsewhere=False, reason=reason))
    reason = f"inconclusive: {decision.reason}; it cannot be computed again on different hardware: {why}"
    then = Decision(Action.STOP, reason, EXIT_VALIDATION_FAILED)
    return replace(state, do=Do.NOTE_INCONCLUSIVE, why=reason, decision=then)


# --- Who takes part in the next attempt: nodes and their condition in, an ordered list of nodes out ---
# The place of a node in the list is its group rank, so nodes that go on keep their ranks where that can be.

PATIENCE_FACTOR = 4.0
"""How much longer silence must last where no node could take over: the node may come back, a requeue costs more."""


class Agent(Enum):
    """The state of a node's agent."""

    LIVING = "living"
    RETURNING = "returning"
    """Its node lives, and it is being started again."""

    LOST = "lost"


class Standing(IntEnum):
    """The fault of a node; a greater one is used later."""

    CLEAN = 0
    EXCLUDED = 1
    """On the exclusion list: used where the run could not go on without it."""

    BARRED = 2
    """Convicted, or suspect of an undecided rerun: never used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node that the run may use."""

    name: str
    agent: Agent = Agent.LIVING
    standing: Standing = Standing.CLEAN
    warm: bool = True
    """It can start at once; one that cannot gives way to one that can."""

    joined: bool = False
    """Lent by another job."""

    leaving: bool = False
    """The job that lends it is ending: it is not to be counted on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How many nodes the run trains on.

    Raises:
        ValueError: not 1 <= minimum <= nodes <= maximum.
    """

    nodes: int
    """The intended number of the job's own nodes; further ones of it are spares."""

    minimum: int
    """Fewer are not worth going on with; ``nodes`` for a run of one size."""

    maximum: int
    """With nodes that others lend; ``nodes`` for a run of one size."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.nodes <= self.maximum:
            raise ValueError(f"not 1 <= {self.minimum} <= {self.nodes} <= {self.maximum}")

    @property
    def is_elastic(self) -> bool:
        """Whether it may change."""
        return self.minimum < self.maximum


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Who takes part."""

    nodes: tuple[str, ...]
    """In the order of their ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Look again when one of these nodes is back, at the latest in ``seconds``."""

    nodes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TooFew:
    """The run cannot go on in this allocation."""

    reason: str


def next_members(
    nodes: Iterable[Node], last: Sequence[str], size: Size, *, waited_s: float = 0.0, patience_s: float = 0.0
) -> Members | Wait | TooFew:
    """The members of the next attempt.

    As many as ``size`` allows: ``size.nodes`` of the job's own and one more for each that is lent. Those of the last
    attempt go on where they have no fault, at the places they had; gaps are filled by the others, the job's own first.
    Where fewer are living, one that is returning is waited for, ``patience_s`` seconds in all.

    Args:
        nodes: all that there are, in the allocation's order; a name that comes again is looked at once.
        last: the members of the last attempt, in the order of its ranks; empty at first.
        waited_s: how long this decision has been waiting already.
    """
    first: dict[str, Node] = {}
    for node in nodes:
        first.setdefault(node.name, node)
    known = list(first.values())
    chosen = _choose(_ranked(known, last), size)
    if waited_s < patience_s:
        hoped = _choose(_ranked(known, last, hopeful=True), size)
        missing = [node.name for node in hoped if node.agent is Agent.RETURNING]
        if missing and len(_good(hoped)) > len(_good(chosen)):
            return Wait(nodes=tuple(missing), seconds=patience_s - waited_s)
    if len(chosen) < size.minimum:
        return TooFew(reason=_why_too_few(known, len(chosen), size))
    return Members(nodes=_placed([node.name for node in chosen], last))


def growth(nodes: Iterable[Node], current: Sequence[str], size: Size) -> tuple[str, ...]:
    """Nodes to take in at the next checkpoint; empty when the run is as large as it should be.

    Only nodes without a fault are worth a stop. A lost member does not matter here: its attempt ends by itself.
    """
    known = list(nodes)
    taken = next_members(known, current, size)
    if not isinstance(taken, Members) or not set(current) <= set(taken.nodes):
        return ()
    clean = {node.name for node in known if node.standing is Standing.CLEAN}
    new = tuple(name for name in taken.nodes if name not in set(current))
    return new if set(new) <= clean else ()


def lost_after_s(timeout_s: float, *, replaceable: bool) -> float:
    """Seconds of silence after which a node counts as lost.

    Where no node could take over, the attempt's end means a requeue, which costs more than a longer wait.
    """
    return timeout_s if replaceable else timeout_s * PATIENCE_FACTOR


def _ranked(nodes: Sequence[Node], last: Sequence[str], *, hopeful: bool = False) -> list[Node]:
    """Usable nodes, the ones to be preferred first."""
    agents = (Agent.LIVING, Agent.RETURNING) if hopeful else (Agent.LIVING,)
    usable = [n for n in nodes if n.agent in agents and n.standing is not Standing.BARRED and not n.leaving]
    before = set(last)
    return sorted(
        usable, key=lambda n: (n.standing, n.agent is Agent.RETURNING, not n.warm, n.name not in before, n.joined)
    )


def _choose(ranked: Sequence[Node], size: Size) -> list[Node]:
    good = _good(ranked)
    wanted = min(size.maximum, size.nodes + sum(node.joined for node in good))
    good = good[:wanted]
    others = [node for node in ranked if node.standing is Standing.EXCLUDED]
    return [*good, *others[: max(0, size.minimum - len(good))]]


def _good(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.standing < Standing.EXCLUDED]


def _placed(chosen: Sequence[str], last: Sequence[str]) -> tuple[str, ...]:
    """The chosen ones, each at the place it had as far as there still is that place; the others fill the gaps."""
    places: list[str | None] = [None] * len(chosen)
    among = set(chosen)
    for place, name in enumerate(last[: len(places)]):
        if name in among:
            places[place] = name
    kept = set(places)
    before = {name: place for place, name in enumerate(last)}
    moving = sorted((name for name in chosen if name not in kept), key=lambda name: before.get(name, len(before)))
    rest = iter(moving)
    return tuple(name if name is not None else next(rest) for name in places)


def _why_too_few(nodes: Sequence[Node], living: int, size: Size) -> str:
    out = {
        "lost": [n.name for n in nodes if n.agent is not Agent.LIVING],
        "barred": [n.name for n in nodes if n.agent is Agent.LIVING and n.standing is Standing.BARRED],
        "about to leave": [n.name for n in nodes if n.agent is Agent.LIVING and n.leaving],
    }
    words = ", ".join(
        f"{why}: {', '.join(names[:5])}{' ...' if names[5:] else ''}" for why, names in out.items() if names
    )
    needed = f"elastic.min_nodes={size.minimum}" if size.minimum < size.nodes else f"nodes={size.nodes}"
    return f"{living} of {len(nodes)} nodes can be used, fewer than {needed}" + (f" ({words})" if words else "")
