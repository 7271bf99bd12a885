"""What follows the end of an attempt: what holds whatever comes of each thing, and a table of some lives."""

from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.policy.decide import FINDS, Answer, Decided, Do, Found, NoPlace, Rules, State, carried_out, step
from slurmft.policy.verdict import (
    EXIT_TEMPORARY,
    EXIT_VALIDATION_FAILED,
    Action,
    Cause,
    Decision,
    End,
    Suspect,
    Verdict,
)
from slurmft.supervisor.act import AttemptEnd

DECISIONS = [
    Decision(action=action, reason="x", exit_code=code, avoid=avoid, elsewhere=bool(avoid))
    for action, code, avoid in (
        (Action.FINISH, 0, ()), (Action.STOP, 1, ()), (Action.RESTART, 75, ()), (Action.CONTINUE, 75, ()),
        (Action.CONTINUE, 16, ("n1",)),
    )
]  # fmt: skip
RULES = [
    Rules(in_slurm=in_slurm, continue_by=by, resubmits=in_slurm and resubmits)
    for in_slurm, by, resubmits in product((True, False), ("auto", "requeue", "resubmit", "nothing", "job"), (0, 1))
]
VERDICTS = [
    Verdict(cause=cause, reason="y", suspects=suspects)
    for cause in (Cause.PREEMPTED, Cause.NODE_LOST, Cause.RERUN_ELSEWHERE, Cause.VALIDATION_FAILED, Cause.RECLAIMED)
    for suspects in ((), (Suspect(node="n1", gpu="GPU-1"),))
]
THINKS = {Do.ASK_WHOSE, Do.LEAVE, Do.DECIDE, Do.ASK_IN_DOUBT, Do.TELL_LIST, Do.SEEK, Do.NOTE_GPUS, Do.NOTE_INCONCLUSIVE}
"""What changes nothing for the run, or only notes it."""

WAYS = {
    Do.CLAIM, Do.OVERRULE, Do.LEAVE_TO_JOB, Do.LEAVE_TO_USER, Do.START_ANEW, Do.PLACE, Do.REQUEUE, Do.RESUBMIT,
}  # fmt: skip
SETTLED = {Do.SETTLE, Do.GIVE_BACK, Do.LEAVE_TO_JOB, Do.LEAVE_TO_USER, Do.START_ANEW}
CONTINUED = {Do.SETTLE, Do.TELL_USER, Do.LEAVE_TO_JOB, Do.LEAVE_TO_USER, Do.NOTE_CLAIMED, Do.START_ANEW, Do.WAIT}

Path = Sequence[tuple[Do, Found]]


def may_come_of(do: Do, decision: Decision) -> Iterator[Found]:
    for each in FINDS.get(do, (Answer.DONE,)):
        if each is Decided:
            yield from (Decided(decision, in_doubt) for in_doubt in (True, False))
        elif each is not NoPlace:
            yield each  # type: ignore[misc]
        elif decision.elsewhere:
            yield NoPlace("all others are excluded")


def paths(state: State, decision: Decision, done: Path = ()) -> Iterator[tuple[State, Path]]:
    """All that may happen from here on, each with the state in which it ends."""
    if state.do in (Do.OVER, Do.START_ANEW):
        yield state, [*done, (state.do, Answer.DONE)]
        return
    assert len(done) < 30, done
    for found in may_come_of(state.do, decision):
        yield from paths(step(state, found), decision, [*done, (state.do, found)])


def all_paths() -> Iterator[tuple[State, Path]]:
    for rules, verdict, decision in product(RULES, VERDICTS, DECISIONS):
        yield from paths(State(rules, verdict), decision)
        yield from paths(carried_out(State(rules, verdict), decision), decision)


def test_whatever_comes_of_each_thing() -> None:
    count = 0
    for state, path in all_paths():
        count += 1
        dos = [do for do, _ in path]
        told = f"{state.rules} {state.verdict.cause} {path}"
        assert len({*dos}) == len(dos), f"twice: {told}"
        if Do.LEAVE in dos:
            assert dos == [Do.ASK_WHOSE, Do.LEAVE, Do.OVER], told
            assert state.exit_code == EXIT_TEMPORARY, told
            continue
        written, decision = dos.index(Do.WRITE), state.decision
        assert decision is not None
        assert {*dos[:written]} <= THINKS, f"done before it was written down: {told}"
        assert not {*dos[written:]} & THINKS, told
        if decision.action is not Action.CONTINUE:
            assert not {*dos} & WAYS, f"it goes on: {told}"
        elif not state.stays:
            assert len({*dos} & CONTINUED) == 1, f"it goes on in one way, or its user is told: {told}"
            assert dos.index(Do.DISMISS) < dos.index(Do.CLAIM), told
        requeued = path.index((Do.REQUEUE, Answer.DONE)) if (Do.REQUEUE, Answer.DONE) in path else len(path)
        assert Do.RESUBMIT not in dos[requeued:], f"it goes on twice: {told}"
        by_slurm = (Do.ASK_ENDING, Answer.REQUEUED) in path
        assert not (by_slurm and Do.REQUEUE in dos), f"it goes on twice: {told}"
        submitted = (Do.RESUBMIT, Answer.DONE) in path or (Do.FIND_LATER, Answer.YES) in path
        assert not (submitted and Do.PLACE in dos), f"it goes on twice: {told}"
        mine = (Do.CLAIM, Answer.YES) in path or Do.OVERRULE in dos
        assert len({*dos} & SETTLED) == mine, f"what becomes of the claim: {told}"
        assert (state.exit_code is None) == (Do.WAIT in dos), told
        assert (Do.KEEP_ENDED in dos) == (not {*dos} & {Do.WAIT, Do.START_ANEW}), told
        assert (Do.TAKE_STOP in dos) <= (state.end in (End.STOPPED, End.FINISHED)), told
        assert not (Do.TAKE_STOP in dos and (Do.ASK_UNDONE, Answer.REQUEUED) in path), told
    assert count > 5_000


def test_nothing_else_can_come_of_a_thing() -> None:
    decision = DECISIONS[-1]
    for do in Do:
        for answer in {*Answer} - {*FINDS.get(do, (Answer.DONE,))} if do is not Do.OVER else {*Answer}:
            with pytest.raises(ValueError, match="cannot come of"):
                step(State(RULES[0], VERDICTS[0], do=do, decision=decision), answer)


def test_there_is_a_way_to_do_each_thing() -> None:
    end = AttemptEnd(
        SimpleNamespace(), SimpleNamespace(cluster=SimpleNamespace(attempt=""), run=SimpleNamespace(ending=str),
                                           journal=None),
        *[SimpleNamespace()] * 2, dismiss=lambda: None, has_nodes=lambda: True)  # type: ignore[arg-type]  # fmt: skip
    assert {*end._work()} == {*Do} - {Do.OVER}


GOES_ON, ELSEWHERE = DECISIONS[3:]
IN_SLURM, PREEMPTED, LOST = Rules(in_slurm=True), Verdict(cause=Cause.PREEMPTED, reason="y"), VERDICTS[2]
YES, NO, DONE, FAILED = Answer.YES, Answer.NO, Answer.DONE, Answer.FAILED
CLAIMED = {Do.SEEK: NO, Do.CLAIM: YES, Do.ASK_ENDING: NO, Do.FIND_LATER: NO}

TABLE: dict[str, tuple[Rules, Verdict, Decision, dict[Do, Found], list[Do], End]] = {
    "it is requeued": (IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.REQUEUE: DONE}, [Do.REQUEUE, Do.SETTLE], End.OPEN),
    "it cannot be requeued": (
        IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.REQUEUE: FAILED, Do.RESUBMIT: DONE},
        [Do.REQUEUE, Do.RESUBMIT, Do.SETTLE], End.HANDED_ON),
    "only a requeue is wanted": (
        Rules(in_slurm=True, continue_by="requeue"), LOST, GOES_ON, {**CLAIMED, Do.REQUEUE: FAILED},
        [Do.REQUEUE, Do.GIVE_BACK, Do.TELL_USER], End.OPEN),
    "the partition cancels": (
        IN_SLURM, PREEMPTED, GOES_ON, {**CLAIMED, Do.ASK_PREEMPTION: YES, Do.RESUBMIT: DONE},
        [Do.ASK_PREEMPTION, Do.RESUBMIT, Do.SETTLE], End.HANDED_ON),
    "a successor was being submitted": (
        Rules(in_slurm=True, resubmits=True), PREEMPTED, GOES_ON, {**CLAIMED, Do.RESUBMIT: FAILED},
        [Do.RESUBMIT, Do.GIVE_BACK, Do.TELL_USER], End.OPEN),
    "Slurm requeues it": (
        IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.ASK_ENDING: Answer.REQUEUED}, [Do.PLACE, Do.SETTLE], End.OPEN),
    "Slurm requeues it, and a successor is there": (
        Rules(in_slurm=True, resubmits=True), LOST, GOES_ON,
        {**CLAIMED, Do.ASK_ENDING: Answer.REQUEUED, Do.RESUBMIT: DONE}, [Do.RESUBMIT, Do.SETTLE], End.HANDED_ON),
    "Slurm requeues it, and no successor can be had": (
        Rules(in_slurm=True, resubmits=True), LOST, GOES_ON,
        {**CLAIMED, Do.ASK_ENDING: Answer.REQUEUED, Do.RESUBMIT: FAILED}, [Do.RESUBMIT, Do.PLACE, Do.SETTLE],
        End.OPEN),
    "it is cancelled": (
        IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.ASK_ENDING: Answer.CANCELLED}, [Do.LEAVE_CANCELLED, Do.SETTLE],
        End.OPEN),
    "another job is there": (IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.FIND_LATER: YES}, [Do.SETTLE], End.HANDED_ON),
    "cron has requeued it": (
        IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.CLAIM: NO, Do.ASK_CLAIMED: Answer.REQUEUED},
        [Do.PLACE_CLAIMED, Do.NOTE_CLAIMED], End.OPEN),
    "cron has claimed it in vain": (
        IN_SLURM, LOST, GOES_ON, {**CLAIMED, Do.CLAIM: NO, Do.ASK_CLAIMED: NO, Do.REQUEUE: DONE},
        [Do.OVERRULE, Do.REQUEUE, Do.SETTLE], End.OPEN),
    "by hand": (
        Rules(in_slurm=True, continue_by="nothing"), LOST, GOES_ON, CLAIMED, [Do.LEAVE_TO_USER], End.NOT_CONTINUED),
    "other nodes are here": (IN_SLURM, LOST, ELSEWHERE, {Do.SEEK: YES}, [Do.WAIT], End.OPEN),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "verdict", "decision", "found", "dos", "end"), TABLE.values(), ids=TABLE)
def test_how_a_run_goes_on(
    rules: Rules, verdict: Verdict, decision: Decision, found: dict[Do, Found], dos: list[Do], end: End
) -> None:
    state, done = carried_out(State(rules, verdict), decision), list[Do]()
    while state.do is not Do.OVER:
        done.append(state.do)
        state = step(state, found.get(state.do, DONE))
    begins = [Do.SEEK, Do.WRITE, Do.DISMISS, Do.CLAIM, Do.ASK_CLAIMED, Do.ASK_ENDING, Do.FIND_LATER, Do.KEEP_ENDED]
    assert [do for do in done if do not in begins] == dos
    assert state.end is end


def test_where_there_is_no_other_place() -> None:
    def tried(cause: Cause, rules: Rules = IN_SLURM, **verdict: Any) -> State:
        state = carried_out(State(rules, Verdict(cause=cause, reason="y", **verdict)), ELSEWHERE)
        return step(state, NoPlace("none is free")) if rules.in_slurm else state

    gpu = {"suspects": (Suspect(node="n1", gpu="GPU-1"),)}
    of_node = {"suspects": (Suspect(node="n1"),)}
    for rules in (IN_SLURM, Rules(in_slurm=False)):
        lost = tried(Cause.NODE_LOST, rules, **of_node)
        assert (lost.do, lost.decision and lost.decision.elsewhere) == (Do.WRITE, False)
        assert tried(Cause.RERUN_ELSEWHERE, rules, **gpu).do is Do.NOTE_GPUS
    for cause, do in ((Cause.RERUN_ELSEWHERE, Do.NOTE_INCONCLUSIVE), (Cause.VALIDATION_FAILED, Do.WRITE)):
        for state in (tried(cause, **of_node), tried(cause, Rules(in_slurm=True, gpus=frozenset(["GPU-1"])), **gpu)):
            assert state.do is do
            assert state.decision is not None
            assert (state.decision.action, state.decision.exit_code) == (Action.STOP, EXIT_VALIDATION_FAILED)


def test_a_node_that_is_taken_away_on_one_machine_ends_the_run() -> None:
    state = carried_out(State(Rules(in_slurm=False), Verdict(cause=Cause.RECLAIMED, reason="y")), GOES_ON)
    assert state.decision is not None
    assert state.decision.action is Action.STOP
    assert "there is no queue" in state.decision.reason


def test_a_restart_in_doubt_becomes_a_requeue() -> None:
    state = step(State(IN_SLURM, LOST, do=Do.DECIDE), Decided(DECISIONS[2], in_doubt=True))
    assert state.do is Do.ASK_IN_DOUBT
    state = step(step(state, Answer.REQUEUED))
    assert (state.do, state.decision and state.decision.action) == (Do.SEEK, Action.CONTINUE)
