"""The machine of an attempt: a table of what follows from what, and what holds in every order of events."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

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


# --- Every order of events ---

NODES, NAMES = st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(["SIGTERM", "SIGINT", "SIGUSR1"])
EVENTS = st.one_of(
    st.builds(life.Began), st.just(life.Ended()), st.builds(life.Ended, st.just("broken")),
    st.builds(life.LaunchFailed, st.just("no")), st.builds(life.StepEnded), st.builds(life.Hung, st.just("x")),
    st.builds(life.AgentEndedEarly, NODES, st.sampled_from([life.TERMINATED, "Exited"])),
    st.builds(life.AgentLost, NODES, st.booleans(), st.just("x")),
    st.builds(life.LostInStart, st.lists(NODES, unique=True).map(tuple), st.just("x")),
    st.builds(life.ProcessesEnded, st.lists(st.sampled_from([0, 1, 143])), st.booleans()),
    st.builds(life.WorkerEnded, st.sampled_from([GOOD, BAD]), st.booleans()),
    st.builds(life.NodesBroken, st.lists(NODES)), st.builds(life.OwnSignal, NAMES),
    st.builds(life.Signalled, NAMES, NODES),
    st.builds(life.Asked, st.sampled_from([USER, RESIZED, REQUEUED, Cause.STRAGGLER]), st.just("x")),
    st.builds(life.Noticed, st.sampled_from([RESIZED, Cause.RECLAIMED]), st.just("x"), st.floats(0, 300)),
    st.builds(life.SlurmEnds, st.floats(0, 1000)),
)  # fmt: skip
ORDER = list(Phase)
ENDING = (life.EndPeers, life.EndHung, life.LeaveNodes)
ASKING = (life.OwnSignal, life.Signalled, life.Asked, life.Noticed)


def answer_to(action: life.Action, data: st.DataObject) -> life.Event | None:
    match action:
        case life.AskWhetherEnding(name):
            return life.EndingKnown(name, data.draw(st.booleans()))
        case life.AwaitWorkersWord(name):
            return life.SignalDue(name)
        case life.AskCause(_, at_s):
            return life.CauseFound(data.draw(st.sampled_from([Cause.SIGNALLED, Cause.PREEMPTED])), 20.0, at_s)
    return None


@settings(max_examples=examples(900), deadline=None)
@given(data=st.data(), rules=st.builds(
    Rules, is_local=st.booleans(), steps_are_signalled=st.booleans(), stop_timeout_s=st.just(60.0)))  # fmt: skip
def test_in_every_order(data: st.DataObject, rules: Rules) -> None:
    state, done, now, fed = State(rules), Counter[type](), 0.0, []
    awaited: list[life.Event] = []
    given_events = data.draw(st.lists(EVENTS, max_size=25))
    while given_events or awaited:
        is_answer = awaited and (not given_events or data.draw(st.booleans()))
        event: Any = awaited.pop(0) if is_answer else given_events.pop(0)
        now += data.draw(st.floats(0, 10))
        before, (state, actions) = state, step(state, event, now)
        fed.append(event)
        done.update(type(action) for action in actions)
        awaited += [found for action in actions if (found := answer_to(action, data)) is not None]
        assert ORDER.index(state.phase) >= ORDER.index(before.phase), "phases do not come again"
        assert state.up_at_s <= before.up_at_s, "no deadline moves away"
        assert state.signals >= before.signals and state.began >= before.began
        if before.stop is not None:
            assert state.stop is not None, "no stop is forgotten"
            assert state.stop.cause is USER or before.stop.cause is not USER, "stop means stop"
        if life.EndVictims in map(type, actions):
            assert (before.phase, state.phase) != (Phase.OVER, Phase.OVER) and state.lost
    is_asked = [each for each in fed if isinstance(each, ASKING)]
    assert done[life.BeginStop] <= 1
    assert (state.stop is None) == (done[life.BeginStop] == 0), "each stop is begun, once"
    assert state.stop is not None or not is_asked, "nothing that asks for a stop is lost"
    assert sum(done[kind] for kind in ENDING) <= 1, "what is left is ended once"
    assert done[life.EndVictims] <= 1 and done[life.WillNotContinue] <= 1
    if any(isinstance(each, life.Asked) and each.cause is USER for each in fed):
        assert state.stop is not None and state.stop.cause is USER, "a user's word counts, whenever it comes"
    if state.phase in (Phase.FAILED, Phase.OVER):
        ends = (life.WorkerEnded, life.Hung, life.NodesBroken, life.Ended, life.LaunchFailed, life.StepEnded,
                life.AgentLost, life.LostInStart, life.ProcessesEnded, life.AgentEndedEarly)  # fmt: skip
        assert any(isinstance(each, ends) for each in fed), "it does not end by itself"
