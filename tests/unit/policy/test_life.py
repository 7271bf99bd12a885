"""The machine of an attempt: a table of what follows from what, and what holds in every order of events."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from slurmft.policy import life
from slurmft.policy.judge import WorkerEnd
from slurmft.policy.life import Phase, Rules, State, Stop, step
from slurmft.policy.verdict import Cause

USER, RESIZED, REQUEUED = Cause.STOPPED_BY_USER, Cause.RESIZED, Cause.REQUEUED_BY_USER
MUSTER, WORK = State(), State(phase=Phase.WORK, began=True)
OVER = replace(WORK, phase=Phase.OVER)
SAVING = replace(WORK, stop=Stop(RESIZED, "grows"), up_at_s=90.0)
GOOD, BAD = (WorkerEnd(rank=0, node="n0", code=code) for code in (0, 1))
PREEMPTED = life.CauseFound(Cause.PREEMPTED, left_s=20.0, at_s=10.0)


def after(state: State, *events: life.Event, now: float = 10.0) -> tuple[State, list[life.Action]]:
    done: list[life.Action] = []
    for event in events:
        state, actions = step(state, event, now)
        done += actions
    return state, done


TABLE: dict[str, tuple[State, Sequence[life.Event], Phase, Cause | None, Sequence[type]]] = {
    "it begins": (MUSTER, [life.Began()], Phase.WORK, None, []),
    "nothing can be started": (MUSTER, [life.LaunchFailed("no")], Phase.OVER, None, []),
    "an agent ends early": (MUSTER, [life.AgentEndedEarly("n0", "Exited")], Phase.OVER, None, []),
    "an agent gets TERM early": (
        MUSTER, [life.AgentEndedEarly("n0", life.TERMINATED)], Phase.MUSTER, Cause.SIGNALLED, [life.AskCause]),
    "an agent is lost before there are workers": (MUSTER, [life.AgentLost("n0", True, "x")], Phase.MUSTER, None, []),
    "an agent with workers is lost": (
        WORK, [life.AgentLost("n0", True, "x")], Phase.OVER, None, [life.EndVictims]),
    "a spare is lost": (WORK, [life.AgentLost("n2", False, "x")], Phase.WORK, None, []),
    "two are lost": (
        WORK, [life.AgentLost("n0", True, "x"), life.AgentLost("n1", True, "x")], Phase.OVER, None, [life.EndVictims]),
    "the step ends": (WORK, [life.StepEnded(), life.StepEnded()], Phase.OVER, None, [life.NoteAgentsGone]),
    "all agents end before there are workers": (
        MUSTER, [life.ProcessesEnded([1, 1], expected=False)], Phase.OVER, None, [life.NoteAgentsGone]),
    "all agents get TERM before there are workers": (
        MUSTER, [life.ProcessesEnded([143], expected=False)], Phase.MUSTER, Cause.SIGNALLED,
        [life.NoteAgentsGone, life.AskCause]),
    "a rank fails": (
        WORK, [life.WorkerEnded(BAD, False)], Phase.FAILED, None, [life.NoteFailure, life.EndPeers]),
    "two ranks fail": (
        WORK, [life.WorkerEnded(BAD, False)] * 2, Phase.FAILED, None,
        [life.NoteFailure, life.EndPeers, life.NoteFailure]),
    "all ranks end well": (WORK, [life.WorkerEnded(GOOD, True)], Phase.OVER, None, []),
    "a rank hangs": (WORK, [life.Hung("x")], Phase.FAILED, None, [life.EndHung]),
    "a rank hangs since another failed": (
        WORK, [life.WorkerEnded(BAD, False), life.Hung("x")], Phase.FAILED, None, [life.NoteFailure, life.EndPeers]),
    "a node breaks": (WORK, [life.NodesBroken(["n1"])], Phase.FAILED, None, [life.LeaveNodes]),
    "no node breaks": (WORK, [life.NodesBroken([])], Phase.WORK, None, []),
    "a node breaks while all save": (SAVING, [life.NodesBroken(["n1"])], Phase.WORK, RESIZED, []),
    "a signal at an agent": (WORK, [life.Signalled("SIGTERM", "n0")] * 2, Phase.WORK, Cause.SIGNALLED, [life.AskCause]),
    "its cause": (
        WORK, [life.Signalled("SIGTERM", "n0"), PREEMPTED], Phase.WORK, Cause.PREEMPTED,
        [life.AskCause, life.BeginStop]),
    "a user stops meanwhile": (
        WORK, [life.Signalled("SIGTERM", "n0"), life.Asked(USER, "x"), PREEMPTED], Phase.WORK, USER,
        [life.AskCause, life.WillNotContinue, life.BeginStop]),
    "a signal at the supervisor": (
        WORK, [life.OwnSignal("SIGTERM")] * 2, Phase.WORK, None, [life.AskWhetherEnding]),
    "a user's signal at the supervisor": (
        WORK, [life.OwnSignal("SIGTERM"), life.EndingKnown("SIGTERM", False)], Phase.WORK, Cause.SIGNALLED,
        [life.AskWhetherEnding, life.AskCause]),
    "Slurm's signal at the supervisor": (
        WORK, [life.OwnSignal("SIGTERM"), life.EndingKnown("SIGTERM", True), life.SignalDue("SIGTERM")], Phase.WORK,
        Cause.SIGNALLED, [life.AskWhetherEnding, life.AwaitWorkersWord, life.AskCause]),
    "Slurm's signal, which the workers have got": (
        WORK, [life.OwnSignal("SIGTERM"), life.EndingKnown("SIGTERM", True), life.Signalled("SIGTERM", "n0"),
               life.SignalDue("SIGTERM")], Phase.WORK, Cause.SIGNALLED,
        [life.AskWhetherEnding, life.AwaitWorkersWord, life.AskCause]),
    "a request": (WORK, [life.Asked(REQUEUED, "x")] * 2, Phase.WORK, REQUEUED, [life.BeginStop]),
    "a user stops what goes on": (
        WORK, [life.Asked(REQUEUED, "x"), life.Asked(USER, "y"), life.Asked(REQUEUED, "z")], Phase.WORK, USER,
        [life.BeginStop, life.WillNotContinue]),
    "a signal while it is resized": (SAVING, [life.Signalled("SIGTERM", "n0")], Phase.WORK, Cause.SIGNALLED, []),
    "a request while it is resized": (SAVING, [life.Asked(REQUEUED, "x")], Phase.WORK, REQUEUED, []),
    "a notice": (WORK, [life.Noticed(Cause.RECLAIMED, "x", 60.0)], Phase.WORK, Cause.RECLAIMED, [life.BeginStop]),
    "a notice while it is resized": (
        SAVING, [life.Noticed(Cause.RECLAIMED, "x", 60.0)], Phase.WORK, Cause.RECLAIMED, [life.EndBy]),
    "a stop when it is over": (OVER, [life.Asked(USER, "x")], Phase.OVER, USER, [life.BeginStop]),
    "another job takes over": (WORK, [life.TakenOver("x")], Phase.WORK, REQUEUED, []),
}  # fmt: skip


@pytest.mark.parametrize(("state", "events", "phase", "cause", "actions"), TABLE.values(), ids=TABLE)
def test_what_follows(
    state: State, events: Sequence[life.Event], phase: Phase, cause: Cause | None, actions: Sequence[type]
) -> None:
    found, done = after(state, *events)
    assert found.phase is phase
    assert (found.stop.cause if found.stop else None) is cause
    assert [type(action) for action in done] == list(actions)


def test_ctrl_c_on_one_machine_ends_the_run_and_in_a_job_it_is_a_signal() -> None:
    local = replace(WORK, rules=Rules(is_local=True))
    assert after(local, life.OwnSignal("SIGINT"))[0].stop == Stop(USER, "stopped with Ctrl-C")
    assert after(WORK, life.OwnSignal("SIGINT"))[1] == [life.AskWhetherEnding("SIGINT")]
    by_it = replace(WORK, rules=Rules(is_local=True, signal="SIGINT"))
    assert after(by_it, life.OwnSignal("SIGINT"))[1] == [life.AskWhetherEnding("SIGINT")]


def test_what_is_known_of_the_time() -> None:
    state, (begin,) = after(WORK, life.Noticed(Cause.RECLAIMED, "x", 60.0))
    assert isinstance(begin, life.BeginStop)
    assert (state.up_at_s, begin.left_s) == (67.0, 57.0)  # 3 s are for what follows
    assert after(state, life.SlurmEnds(30.0))[0].up_at_s == 30.0
    assert after(state, life.SlurmEnds(300.0))[0].up_at_s == 67.0
    state, _ = after(WORK, life.Signalled("SIGTERM", "n0"), PREEMPTED)
    assert (state.up_at_s, state.ends_at_s) == (30.0, 33.0)


def test_nodes_that_are_lost() -> None:
    early, _ = after(MUSTER, life.AgentLost("n1", True, "x"))
    assert early.lost == ()
    assert after(early, life.LaunchFailed("too few"))[0].lost == ("n1",)
    state, _ = after(WORK, life.AgentLost("n0", True, "x"), life.LostInStart(("n0", "n1"), "x"))
    assert (state.lost, state.problem) == (("n0", "n1"), "")
    assert after(WORK, life.LostInStart((), "x"))[0].problem == "x"


# --- Every order of events: all states that can be reached, from each of them all that may happen ---

EVENTS: tuple[life.Event, ...] = (
    life.Began(), life.Ended(), life.Ended("broken"), life.LaunchFailed("no"), life.StepEnded(), life.Hung("x"),
    life.AgentEndedEarly("n0", life.TERMINATED), life.AgentEndedEarly("n0", "Exited"),
    life.AgentLost("n0", True, "x"), life.AgentLost("n0", False, "x"), life.LostInStart((), "x"),
    life.LostInStart(("n0",), "x"), life.ProcessesEnded((1,), False), life.ProcessesEnded((143,), False),
    life.ProcessesEnded((0,), True), life.WorkerEnded(BAD, False), life.WorkerEnded(BAD, True),
    life.WorkerEnded(GOOD, True), life.NodesBroken(("n0",)), life.OwnSignal("SIGTERM"),
    life.Signalled("SIGTERM", "n0"), life.Asked(USER, "x"), life.Asked(RESIZED, "x"), life.Asked(REQUEUED, "x"),
    life.Noticed(RESIZED, "x", 60.0), life.Noticed(Cause.RECLAIMED, "x", 60.0), life.SlurmEnds(30.0),
)  # fmt: skip
ORDER = list(Phase)
ENDING = (life.EndPeers, life.EndHung, life.LeaveNodes)
ONCE = (life.BeginStop, life.EndVictims, life.WillNotContinue, life.AskCause)
ENDS = {
    life.Ended, life.LaunchFailed, life.StepEnded, life.Hung, life.AgentEndedEarly, life.AgentLost, life.LostInStart,
    life.ProcessesEnded, life.WorkerEnded, life.NodesBroken,
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """A state that can be reached, and what of its past matters."""

    state: State
    awaited: frozenset[life.Event] = frozenset()
    """What will be answered, sooner or later."""

    done: frozenset[type] = frozenset()
    is_asked: bool = False
    """A stop has been asked for."""

    by_user: bool = False


class Where(NamedTuple):
    """In which state what happened: told only where something does not hold."""

    event: life.Event
    before: State


def answers_to(action: life.Action) -> Sequence[life.Event]:
    match action:
        case life.AskWhetherEnding(name):
            return [life.EndingKnown(name, True), life.EndingKnown(name, False)]
        case life.AwaitWorkersWord(name):
            return [life.SignalDue(name)]
        case life.AskCause(_, at_s):
            return [life.CauseFound(Cause.SIGNALLED, 20.0, at_s), life.CauseFound(Cause.PREEMPTED, 20.0, at_s)]
    return []


def follow(seen: Seen, event: life.Event) -> Seen:
    """What follows, and whether that may be."""
    before, (state, actions) = seen.state, step(seen.state, event, 0.0)
    where = Where(event, before)
    is_asked = seen.is_asked or isinstance(event, life.OwnSignal | life.Signalled | life.Asked | life.Noticed)
    by_user = seen.by_user or (isinstance(event, life.Asked) and event.cause is USER)
    kinds = [type(action) for action in actions]
    assert ORDER.index(state.phase) >= ORDER.index(before.phase), f"phases do not come again: {where}"
    assert state.phase is before.phase or type(event) in {*ENDS, life.Began}, f"it does not end by itself: {where}"
    assert state.up_at_s <= before.up_at_s, f"no deadline moves away: {where}"
    assert state.signals >= before.signals and state.began >= before.began, where
    if before.stop is not None:
        assert state.stop is not None, f"no stop is forgotten: {where}"
        assert state.stop.cause is USER or before.stop.cause is not USER, f"stop means stop: {where}"
    if life.EndVictims in kinds:
        assert state.phase is Phase.OVER is not before.phase and state.lost, where
    for kind in ONCE:
        assert kinds.count(kind) + (kind in seen.done) <= 1, f"{kind.__name__} twice: {where}"
    ending = [kind for kind in ENDING if kind in kinds or kind in seen.done]
    assert len(ending) <= 1, f"what is left is ended once: {where}"
    others = {each for each in seen.awaited if type(each) is not type(event)}
    awaited = frozenset(others | {answer for action in actions for answer in answers_to(action)})
    if not awaited:
        begun = life.BeginStop in kinds or life.BeginStop in seen.done
        assert (state.stop is None) is not begun, f"each stop is begun: {where}"
        assert state.stop is not None or not is_asked, f"no stop is lost: {where}"
    assert not by_user or (state.stop and state.stop.cause is USER), f"a user's word counts: {where}"
    done = seen.done | {kind for kind in kinds if kind in (*ONCE, *ENDING)}
    return Seen(replace(state, problem="x" * bool(state.problem)), awaited, done, is_asked, by_user)


@pytest.mark.parametrize("rules", [Rules(), Rules(is_local=True), Rules(steps_are_signalled=False)])
def test_in_every_order(rules: Rules) -> None:
    begin, events = Seen(State(rules)), (*EVENTS, life.OwnSignal("SIGINT" if rules.is_local else "SIGTERM"))
    reached, front = {begin}, [begin]
    while front:
        seen = front.pop()
        for event in (*events, *seen.awaited):
            if (found := follow(seen, event)) not in reached:
                reached.add(found)
                front.append(found)
    assert len(reached) > 1000
    assert {each.state.phase for each in reached} == {*Phase}


def test_what_a_user_asks_for() -> None:
    assert life.asked_by("KILL", "me@laptop") == life.Asked(USER, "stopped by me@laptop")
    assert life.asked_by("REQUEUE", "me@laptop") == life.Asked(REQUEUED, "requeued by me@laptop")
    assert life.asked_by("SAVE", "me@laptop") is None
