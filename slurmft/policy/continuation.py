"""What follows the end of an attempt, as a machine: ``step`` takes what has come of one thing, and says what is next.

Pure, as ``policy.life``, whose attempt is over here. One thing is done at a time, and each may end the process that
does it: a requeue ends the very job that asks for it, and a signal or a kill may come between any two. So nothing is
done for the run before the decision is written down, and what was written down is carried out again by what acts in
the place of a supervisor that was lost. ``supervisor.act.AttemptEnd`` does these things, and decides nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from slurmft.policy.verdict import (
    EXIT_TEMPORARY,
    EXIT_VALIDATION_FAILED,
    Action,
    Cause,
    Decision,
    End,
    Verdict,
    end_of,
)


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
        return replace(state, decision=_stop(reason))
    if verdict.cause is not Cause.RERUN_ELSEWHERE:
        reason = f"{decision.reason}; it goes on where it was: {why}"
        return replace(state, decision=replace(decision, elsewhere=False, reason=reason))
    reason = f"inconclusive: {decision.reason}; it cannot be computed again on different hardware: {why}"
    return replace(state, do=Do.NOTE_INCONCLUSIVE, why=reason, decision=_stop(reason))


def _stop(reason: str) -> Decision:
    return Decision(action=Action.STOP, reason=reason, exit_code=EXIT_VALIDATION_FAILED)
