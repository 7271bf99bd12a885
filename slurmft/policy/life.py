"""The life of an attempt as a machine: ``step`` takes what happened, and returns the next state and what is to be done.

Pure: it knows no clock, process or file. ``supervisor.stops.Machine`` feeds it and has its actions carried out; whether
an attempt has failed, stops or is over is decided nowhere else. An attempt is in one ``Phase``, and beside that it may
be stopping, for one ``Stop``. All times are monotonic seconds of the supervisor.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slurmft.policy.judge import WorkerEnd, ends_attempt
from slurmft.policy.stop import REQUEUE_COST_S
from slurmft.policy.symptoms import cause_of_text
from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, Cause

LOOK_AGAIN_S = 1.0
"""Steps that were begun after Slurm's signal to all of them have not got it: so long is waited for what they report."""

PEER_GRACE_S = 3.0
"""After one rank has complained of others, or has spoken for all: how long the rest may take to end by itself."""

SAY_WHY_S = 0.25
"""The same after one rank has failed of its own error."""

ENDED_BY_TERM = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})

TERMINATED = "Terminated"
"""srun's word for an agent that TERM has ended."""


class Phase(StrEnum):
    """How far an attempt is."""

    MUSTER = "muster"
    """Its agents report; of its workers none has been started."""

    WORK = "work"
    """Its workers are being started, or run."""

    FAILED = "failed"
    """One of them cannot go on: what they have is kept, and the others are ended."""

    OVER = "over"
    """What is left is ended, and the verdict follows."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run's configuration and workload say."""

    signal: str = "SIGTERM"
    stop_timeout_s: float = math.inf
    is_local: bool = False
    complete_codes: frozenset[int] = frozenset()
    only_lead: bool = False
    steps_are_signalled: bool = True
    """Whether Slurm's signal reaches workers by themselves, so that the supervisor's own may wait for theirs."""


@dataclass(frozen=True, slots=True)
class Stop:
    """What was asked for; the first one begins the save, and a later one may change what follows it."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class State:
    """All that decides what an event leads to."""

    rules: Rules = field(default_factory=Rules)
    phase: Phase = Phase.MUSTER
    stop: Stop | None = None
    began: bool = False
    """Workers were about to be started: from then on a lost agent has workers, and every end has a cause in them."""

    asks_why: bool = False
    """The supervisor itself got a signal, and Slurm is asked whether it ends the job."""

    signals: frozenset[str] = frozenset()
    """Those that workers have got."""

    up_at_s: float = math.inf
    """When everything of the stop must be done."""

    ends_at_s: float | None = None
    """When Slurm will have ended the job, as far as a stop has shown it."""

    lost: tuple[str, ...] = ()
    """Nodes of this attempt whose agents are gone."""

    lost_early: tuple[str, ...] = ()
    """Nodes whose agents were gone before there was anything to do for them."""

    closed: frozenset[str] = frozenset()
    """Nodes that closed the connection of their agent, and so live."""

    problem: str = ""
    """Why nothing could be started, or an error of slurmft's own."""


# --- What happens ---


@dataclass(frozen=True, slots=True)
class Began:
    """Workers are started now."""


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """Nothing could be started."""

    reason: str


@dataclass(frozen=True, slots=True)
class AgentEndedEarly:
    """An agent has ended before it had reported."""

    node: str
    how: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent is gone.

    Args:
        is_member: it is of those that have, or are to have, workers.
        hung_up: its connection was closed, so its node lives.
    """

    node: str
    is_member: bool
    reason: str
    hung_up: bool = False


@dataclass(frozen=True, slots=True)
class LostInStart:
    """Workers could not be started on all nodes; these have lost their agents, or none has."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """All agents have gone together: their step was ended, which says nothing about any node."""


@dataclass(frozen=True, slots=True)
class ProcessesEnded:
    """All processes that started agents have ended; ``expected``: workers had begun, or Slurm ends the job."""

    codes: Sequence[int]
    expected: bool
    words: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The end of a rank is known."""

    end: WorkerEnd
    all_ended: bool


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank hangs, and it is known which."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodesBroken:
    """Nothing can be computed on these nodes any more."""

    nodes: Iterable[str]


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more is to be waited for: by another owner, by wrong replicas, by an error, or in good order."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class OwnSignal:
    """The supervisor got a signal itself: from Slurm, that ends the job, or from a user."""

    name: str


@dataclass(frozen=True, slots=True)
class EndingKnown:
    """Slurm has said whether it ends the job."""

    name: str
    is_ending: bool


@dataclass(frozen=True, slots=True)
class SignalDue:
    """Workers that got the signal as well have had the time to report it."""

    name: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal that asks for a stop was seen ``where``."""

    name: str
    where: str


@dataclass(frozen=True, slots=True)
class CauseFound:
    """Slurm has said why the signal came, and how long there is from ``at_s`` on."""

    cause: Cause
    left_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A stop is asked for, by a user or by slurmft itself."""

    cause: Cause
    reason: str


def asked_by(kind: str, who: str) -> Asked | None:
    """The stop that a user's request is for; None for a save, after which the attempt goes on."""
    match kind:
        case "KILL":
            return Asked(Cause.STOPPED_BY_USER, f"stopped by {who}")
        case "REQUEUE":
            return Asked(Cause.REQUEUED_BY_USER, f"requeued by {who}")
    return None


@dataclass(frozen=True, slots=True)
class Noticed:
    """A node will be gone in ``left_s`` seconds."""

    cause: Cause
    reason: str
    left_s: float


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another job has taken the run over, while this one finishes what is in flight."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlurmEnds:
    """It is known that Slurm ends the job: the workers must be gone at ``at_s``."""

    at_s: float


Event = (
    Began | LaunchFailed | AgentEndedEarly | AgentLost | LostInStart | StepEnded | ProcessesEnded | WorkerEnded | Hung
    | NodesBroken | Ended | OwnSignal | EndingKnown | SignalDue | Signalled | CauseFound | Asked | Noticed
    | TakenOver | SlurmEnds
)  # fmt: skip


# --- What is to be done ---


@dataclass(frozen=True, slots=True)
class AskWhetherEnding:
    """Ask Slurm whether it ends the job, and say so."""

    name: str


@dataclass(frozen=True, slots=True)
class AwaitWorkersWord:
    """Wait ``LOOK_AGAIN_S`` for what the workers report; then the signal is due."""

    name: str


@dataclass(frozen=True, slots=True)
class AskCause:
    """Begin to save, and meanwhile ask Slurm for the cause of the signal that came at ``at_s``."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class BeginStop:
    """Write down what stops the attempt, and have it ended in time. ``saves``: the save has not been begun yet."""

    stop: Stop
    at_s: float
    left_s: float
    saves: bool


@dataclass(frozen=True, slots=True)
class WillNotContinue:
    """Write down that nothing follows the stop that is under way."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndBy:
    """There is less time than was known."""

    at_s: float


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """Write down that this rank has failed."""

    end: WorkerEnd


@dataclass(frozen=True, slots=True)
class EndPeers:
    """Keep what the ranks have, let them say why they fail, and end them after so many seconds."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class EndHung:
    """Keep what the ranks have, and end them; their stacks may narrow down which hangs."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaveNodes:
    """Keep what the ranks have, and end the attempt, also where they cannot be ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndVictims:
    """Keep what is left of a lost node's attempt, and end it."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoteAgentsGone:
    """Write down that the agents are gone."""

    codes: tuple[int, ...] = ()


Action = (
    AskWhetherEnding | AwaitWorkersWord | AskCause | BeginStop | WillNotContinue | EndBy | NoteFailure | EndPeers
    | EndHung | LeaveNodes | EndVictims | NoteAgentsGone
)  # fmt: skip
Next = tuple[State, Sequence[Action]]


# --- The machine ---


def step(state: State, event: Event, now: float) -> Next:
    """What follows from ``event`` at ``now``: the state after it, and what is to be done, in this order."""
    match event:
        case Began():
            is_first = state.phase is Phase.MUSTER
            return replace(state, phase=Phase.WORK if is_first else state.phase, began=True), ()
        case LaunchFailed(reason):
            return _over(replace(state, problem=reason, lost=_with(state.lost, *state.lost_early)))
        case Ended(problem):
            return _over(replace(state, problem=state.problem or problem))
        case AgentEndedEarly():
            return _ended_early(state, event, now)
        case AgentLost():
            return _lost(state, event)
        case LostInStart(nodes, reason):
            return _over(replace(state, lost=nodes, problem="" if nodes else reason))
        case StepEnded():
            return _over(state, NoteAgentsGone())
        case ProcessesEnded():
            return _processes_ended(state, event, now)
        case WorkerEnded():
            return _worker_ended(state, event)
        case Hung() | NodesBroken():
            return _fails(state, event) if state.phase is Phase.WORK else (state, ())
        case _:
            return _stopping(state, event, now)


def _over(state: State, *actions: Action) -> Next:
    return (state, ()) if state.phase is Phase.OVER and actions else (replace(state, phase=Phase.OVER), actions)


def _with(nodes: tuple[str, ...], *more: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*nodes, *more)))


def _ended_early(state: State, event: AgentEndedEarly, now: float) -> Next:
    if state.phase is not Phase.MUSTER or state.stop is not None:
        return state, ()
    if event.how == TERMINATED:  # TERM ends an agent that is still starting; that is not a failure
        return _signalled(state, "SIGTERM", f"the agent on {event.node}, which was still starting", now)
    why = f"the agent on {event.node} ended before it had reported: {event.how}{event.words}"
    return step(state, LaunchFailed(why), now)


def _lost(state: State, event: AgentLost) -> Next:
    state = replace(state, closed=state.closed | {event.node} if event.hung_up else state.closed - {event.node})
    if not state.began:
        return replace(state, lost_early=_with(state.lost_early, event.node)), ()
    if not event.is_member:
        return state, ()
    state = replace(state, lost=_with(state.lost, event.node))
    return _over(state, EndVictims(event.reason)) if state.phase is not Phase.OVER else (state, ())


def _processes_ended(state: State, event: ProcessesEnded, now: float) -> Next:
    if state.phase is Phase.OVER:
        return state, ()
    note = NoteAgentsGone(tuple(event.codes))
    if event.expected:
        return _over(state, note)
    if ENDED_BY_TERM.intersection(event.codes):
        # agents that were still starting are ended by a TERM like any process; it was not their failure
        state, actions = _signalled(state, "SIGTERM", "agents that were still starting", now)
        return state, (note, *actions)
    why = f"the agents ended with {list(event.codes)} before they had started a worker{event.words}"
    return _over(replace(state, problem=why), note)


def _fails(state: State, event: Hung | NodesBroken) -> Next:
    failed = replace(state, phase=Phase.FAILED)
    if isinstance(event, Hung):
        return failed, (EndHung(event.reason),)
    nodes = ", ".join(event.nodes)
    return (failed, (LeaveNodes(f"{nodes} cannot be used any more"),)) if nodes and not state.stop else (state, ())


def _worker_ended(state: State, event: WorkerEnded) -> Next:
    rules = state.rules
    actions: list[Action] = []
    planned = state.stop is not None
    if ends_attempt(event.end, planned=planned, complete_codes=rules.complete_codes, only_lead=rules.only_lead):
        actions.append(NoteFailure(event.end))
        if state.phase is Phase.WORK:
            state = replace(state, phase=Phase.FAILED)
            actions.append(EndPeers(_grace_of_peers(event.end)))
    return (replace(state, phase=Phase.OVER) if event.all_ended else state), actions


def _grace_of_peers(end: WorkerEnd) -> float:
    """Seconds that the others have after one worker ended, to report why they fail. Victims of a kill get none."""
    if end.code in (EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED):
        return PEER_GRACE_S
    if end.code < 0:
        return 0.0
    return PEER_GRACE_S if cause_of_text(end.error) is Cause.COMMUNICATION_ERROR else SAY_WHY_S


# Stops


def _stopping(state: State, event: Event, now: float) -> Next:
    match event:
        case OwnSignal(name):
            return _own_signal(state, name, now)
        case EndingKnown(name, is_ending=True):
            return state, (AwaitWorkersWord(name),)
        case EndingKnown(name):
            return _signalled(replace(state, asks_why=False), name, "the supervisor", now)
        case SignalDue(name):
            return (state, ()) if state.stop is not None else _signalled(state, name, "the supervisor", now)
        case Signalled(name, where):
            return _signalled(state, name, where, now)
        case CauseFound():
            return _cause_found(state, event)
        case Asked(cause, reason):
            return _asked(state, Stop(cause, reason), now, state.rules.stop_timeout_s)
        case Noticed(cause, reason, left_s):
            left_s = max(1.0, left_s - REQUEUE_COST_S)
            if state.stop is None:
                return _asked(state, Stop(cause, reason), now, min(left_s, state.rules.stop_timeout_s))
            state, actions = _asked(state, Stop(cause, reason), now, left_s)
            return _ends_by(state, now + left_s, *actions)
        case TakenOver(reason):
            return replace(state, stop=Stop(state.stop.cause if state.stop else Cause.REQUEUED_BY_USER, reason)), ()
        case SlurmEnds(at_s):
            return _ends_by(state, at_s)
    raise TypeError(f"no event of an attempt: {event!r}")


def _own_signal(state: State, name: str, now: float) -> Next:
    """Slurm signals the batch step only when it ends the job; a user may at any time."""
    if state.rules.is_local and name == "SIGINT" != state.rules.signal:
        return _asked(state, Stop(Cause.STOPPED_BY_USER, "stopped with Ctrl-C"), now, state.rules.stop_timeout_s)
    if state.asks_why:
        return state, ()
    if not state.began or not state.rules.steps_are_signalled:
        return _signalled(state, name, "the supervisor", now)
    return replace(state, asks_why=True), (AskWhetherEnding(name),)


def _signalled(state: State, name: str, where: str, now: float) -> Next:
    """Further signals of a row change nothing."""
    state = replace(state, signals=state.signals | {name})
    stop = Stop(Cause.SIGNALLED, f"{name} at {where}")
    if state.stop is None:
        return replace(state, stop=stop), (AskCause(name, now),)
    return (replace(state, stop=stop) if state.stop.cause is Cause.RESIZED else state), ()


def _cause_found(state: State, event: CauseFound) -> Next:
    stop = state.stop or Stop(event.cause, "")
    if stop.cause is not Cause.STOPPED_BY_USER:  # asked for in the meantime
        stop = replace(stop, cause=event.cause)
    if event.cause in (Cause.PREEMPTED, Cause.TIME_LIMIT):
        state = replace(state, ends_at_s=event.at_s + event.left_s + REQUEUE_COST_S)
    return _begins(state, stop, event.at_s, event.left_s, saves=False)


def _asked(state: State, stop: Stop, now: float, left_s: float) -> Next:
    """The save is the same for all; of two causes the one counts after which less follows."""
    under_way = state.stop
    if under_way is None:
        return _begins(state, stop, now, left_s, saves=True)
    if under_way.cause is not Cause.STOPPED_BY_USER is stop.cause:
        return replace(state, stop=stop), (WillNotContinue(stop.reason),)
    if under_way.cause is Cause.RESIZED is not stop.cause:
        return replace(state, stop=stop), ()
    return state, ()


def _begins(state: State, stop: Stop, at_s: float, left_s: float, *, saves: bool) -> Next:
    state = replace(state, stop=stop, up_at_s=min(state.up_at_s, at_s + left_s))
    return state, (BeginStop(stop, at_s, left_s, saves),)


def _ends_by(state: State, at_s: float, *actions: Action) -> Next:
    return replace(state, up_at_s=min(state.up_at_s, at_s)), (*actions, EndBy(at_s))
