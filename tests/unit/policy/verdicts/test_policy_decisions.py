"""The runbook, row by row: every cause in every state that matters to it, and what follows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.decide import (
    MAX_BEGUN_AGAIN,
    PATIENT,
    BegunAgain,
    Budget,
    PastEnd,
    RoleEnd,
    budget_for,
    decide,
    role_begins_again,
)
from slurmft.policy.verdict import (
    BUDGETED,
    FREE,
    PLANNED,
    Action,
    Cause,
    Decision,
    ExitAction,
    Suspect,
    Verdict,
    by_cause,
    explicit_action,
    lists_as_texts,
    parse_codes,
    unambiguous,
)

FINISH, CONTINUE, STOP = Action.FINISH, Action.CONTINUE, Action.STOP
BAD = (Suspect(node="n3", gpu="GPU-1", rank=6), Suspect(node="n1"), Suspect(node="n3", rank=7))
NODES = ("n3", "n1")
NONE: tuple[str, ...] = ()


def verdict(cause: Cause, code: int = 0, *, rerun: str = "", saved: int = 10, blame: bool = True) -> Verdict:
    """At step 10, which was saved before the attempt unless ``saved`` is later; with suspects."""
    return Verdict(cause=cause, reason="why", exit_code=code, first_step=10, last_step=saved, saved_step=saved,
                   suspects=BAD if blame else (), rerun=rerun)  # fmt: skip


def fresh() -> Budget:
    return Budget(failures_so_far=0, max_failures=2)


def spent() -> Budget:
    return Budget(failures_so_far=2, max_failures=2)


def stuck() -> Budget:
    return Budget(failures_so_far=0, max_failures=2, idle_cycles=2, max_no_progress_cycles=3)


C = Cause
ROWS = [
    # cause, code, state of the verdict, budget -> action, exit code, avoid, elsewhere
    (verdict(C.FINISHED), fresh(), FINISH, 0, NONE, False),
    (verdict(C.FINISHED), spent(), FINISH, 0, NONE, False),
    (verdict(C.FINISHED), stuck(), FINISH, 0, NONE, False),
    (verdict(C.CANCELLED), fresh(), STOP, 75, NONE, False),
    (verdict(C.CANCELLED), stuck(), STOP, 75, NONE, False),
    *[(verdict(C.STOPPED_BY_USER), each, STOP, 75, NONE, False) for each in (fresh(), spent())],
    (replace(verdict(C.STOPPED_BY_USER), last_step=15), fresh(), STOP, 74, NONE, False),
    *[(verdict(cause), each, CONTINUE, 75, NODES, False)
      for cause in (C.PREEMPTED, C.SIGNALLED, C.REQUEUED, C.REQUEUED_BY_USER, C.RECLAIMED)
      for each in (fresh(), spent(), stuck())],
    *[(replace(verdict(cause), last_step=15), fresh(), CONTINUE, 74, NODES, False)
      for cause in (C.PREEMPTED, C.SIGNALLED, C.REQUEUED, C.REQUEUED_BY_USER, C.RECLAIMED, C.TIME_LIMIT)],
    *[(verdict(C.RESIZED), each, Action.RESTART, 75, NONE, False) for each in (fresh(), spent(), stuck())],
    (verdict(C.PREEMPTED, blame=False), fresh(), CONTINUE, 75, NONE, False),
    (verdict(C.TIME_LIMIT), fresh(), CONTINUE, 75, NODES, False),
    (verdict(C.TIME_LIMIT), spent(), CONTINUE, 75, NODES, False),
    (verdict(C.TIME_LIMIT), replace(stuck(), idle_cycles=1), CONTINUE, 75, NODES, False),
    (verdict(C.TIME_LIMIT), stuck(), STOP, 93, NONE, False),
    (replace(verdict(C.TIME_LIMIT), last_step=15), stuck(), STOP, 93, NONE, False),
    (verdict(C.TIME_LIMIT, saved=11), stuck(), CONTINUE, 75, NODES, False),
    (verdict(C.RERUN_ELSEWHERE, 16), fresh(), CONTINUE, 16, NODES, True),
    (verdict(C.RERUN_ELSEWHERE, 16), spent(), CONTINUE, 16, NODES, True),
    (verdict(C.RERUN_ELSEWHERE, 16), stuck(), STOP, 93, NONE, False),
    (verdict(C.RERUN_ELSEWHERE, 16, saved=11), stuck(), CONTINUE, 16, NODES, True),
    (verdict(C.RERUN_ELSEWHERE, 16, blame=False), fresh(), CONTINUE, 16, NONE, True),
    (verdict(C.REPLICAS_DIFFER), fresh(), CONTINUE, 75, NODES, True),
    (verdict(C.REPLICAS_DIFFER), spent(), CONTINUE, 75, NODES, True),
    (verdict(C.REPLICAS_DIFFER), stuck(), STOP, 93, NONE, False),
    (verdict(C.REPLICAS_DIFFER, blame=False), fresh(), CONTINUE, 75, NONE, False),
    (verdict(C.REPLICAS_DIFFER, blame=False), spent(), STOP, 93, NONE, False),
    (verdict(C.STRAGGLER, 75), fresh(), CONTINUE, 75, NODES, True),
    (verdict(C.STRAGGLER, 75), spent(), CONTINUE, 75, NODES, True),
    (verdict(C.STRAGGLER, 75), stuck(), STOP, 93, NONE, False),
    (verdict(C.STRAGGLER, 75, saved=11), stuck(), CONTINUE, 75, NODES, True),
    *[(verdict(C.VALIDATION_FAILED, 17, rerun=rerun), each, STOP, 17, NONE, False)
      for rerun in ("", "undecided", "correct", "inconclusive", "a word of tomorrow") for each in (fresh(), stuck())],
    (verdict(C.VALIDATION_FAILED, 17, rerun="persistent"), fresh(), CONTINUE, 75, NODES, True),
    (verdict(C.VALIDATION_FAILED, 17, rerun="persistent"), spent(), CONTINUE, 75, NODES, True),
    (verdict(C.VALIDATION_FAILED, 17, rerun="persistent"), stuck(), STOP, 93, NONE, False),
    (verdict(C.VALIDATION_FAILED, 17, rerun="persistent", blame=False), fresh(), STOP, 17, NONE, False),
    (verdict(C.VALIDATION_FAILED, 17, rerun="transient"), fresh(), CONTINUE, 17, NONE, False),
    (verdict(C.VALIDATION_FAILED, 17, rerun="transient"), spent(), STOP, 17, NONE, False),
    (verdict(C.VALIDATION_FAILED, 17, rerun="transient"), stuck(), STOP, 93, NONE, False),
    (verdict(C.DATA_CORRUPTION, 1), fresh(), CONTINUE, 1, NODES, True),
    (verdict(C.DATA_CORRUPTION, 1, blame=False), fresh(), CONTINUE, 1, NONE, False),
    (verdict(C.DATA_CORRUPTION, 1), spent(), STOP, 1, NONE, False),
    (verdict(C.DATA_CORRUPTION, 1), stuck(), STOP, 93, NONE, False),
    (verdict(C.NODE_LOST), fresh(), CONTINUE, 75, NODES, False),
    (verdict(C.NODE_LOST), spent(), STOP, 93, NONE, False),
    (verdict(C.NODE_LOST), stuck(), STOP, 93, NONE, False),
    *[row
      for cause, code in ((C.WORKER_ERROR, 1), (C.SIGNAL_CRASH, 139), (C.HOST_OUT_OF_MEMORY, 137),
                          (C.DEVICE_OUT_OF_MEMORY, 1), (C.HANG, 1), (C.COMMUNICATION_ERROR, 1))
      for row in ((verdict(cause, code), fresh(), CONTINUE, code, NONE, False),
                  (verdict(cause, code), spent(), STOP, code, NONE, False),
                  (verdict(cause, code), stuck(), STOP, 93, NONE, False),
                  (verdict(cause, code, saved=11), stuck(), CONTINUE, code, NONE, False))],
    *[(verdict(C.WORKER_ERROR, code), fresh(), STOP, code, NONE, False) for code in (2, 126, 127)],
    (verdict(C.WORKER_ERROR, 1), replace(spent(), failures_so_far=1), CONTINUE, 1, NONE, False),
    *[row for cause, avoid in ((C.LAUNCH_FAILURE, NODES), (C.SUPERVISOR_LOST, NONE), (C.UNKNOWN, NONE))
      for row in ((verdict(cause), fresh(), CONTINUE, 75, avoid, False),
                  (verdict(cause), spent(), STOP, 93, NONE, False),
                  (verdict(cause), stuck(), STOP, 93, NONE, False))],
]  # fmt: skip


def name_of(row: tuple) -> str:
    given, budget = row[:2]
    words = [given.cause.value, str(given.exit_code or ""), given.rerun, "" if given.suspects else "nobody blamed",
             "progressed" if given.progressed else "", "unsaved" if given.unsaved_steps else "",
             "spent" if budget == spent() else "stuck" if budget == stuck() else ""]  # fmt: skip
    return " ".join(filter(None, words))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_decision(row):
    given, budget, action, code, avoid, elsewhere = row
    decision = decide(given, budget)
    assert (decision.action, decision.exit_code, decision.avoid, decision.elsewhere) == (action, code, avoid, elsewhere)
    assert "why" in decision.reason


def test_the_rows_hold_every_cause_with_every_budget_that_matters_to_it():
    rows = {(given.cause, name_of((given, budget)).rpartition(" ")[2]) for given, budget, *_ in ROWS}
    assert {cause for cause, _ in rows} == set(Cause)
    assert {cause for cause, state in rows if state == "spent"} >= BUDGETED
    assert {cause for cause, state in rows if state == "stuck"} == set(Cause) - {C.STOPPED_BY_USER}


def test_every_cause_is_either_free_or_budgeted():
    assert set(Cause) == FREE | BUDGETED
    assert not FREE & BUDGETED
    assert PATIENT < PLANNED < FREE


@of_each(cause=sorted(FREE - {C.FINISHED, C.CANCELLED, C.STOPPED_BY_USER, C.RESIZED}))
def test_what_is_free_goes_on_with_any_number_of_failures_behind_it(cause):
    assert decide(verdict(cause), Budget(failures_so_far=10**6, max_failures=0)).action is CONTINUE


# exit_actions

MAPPED = {ExitAction.COMPLETE: "42", ExitAction.RESCHEDULE: "2,11-20", ExitAction.FAIL: "1,75-77"}


@pytest.mark.parametrize(
    ("given", "action", "code", "elsewhere"),
    [
        pytest.param(verdict(C.WORKER_ERROR, 42), FINISH, 0, False, id="COMPLETE"),
        pytest.param(verdict(C.FINISHED, 42), FINISH, 0, False, id="COMPLETE, of all ranks"),
        pytest.param(verdict(C.SIGNAL_CRASH, 42), FINISH, 0, False, id="COMPLETE, whatever the cause"),
        pytest.param(verdict(C.WORKER_ERROR, 1), STOP, 1, False, id="FAIL beats the retries"),
        pytest.param(verdict(C.STRAGGLER, 76), STOP, 76, False, id="FAIL beats a move"),
        pytest.param(verdict(C.VALIDATION_FAILED, 17), CONTINUE, 17, False, id="RESCHEDULE beats the stop after 17"),
        pytest.param(verdict(C.RERUN_ELSEWHERE, 16), CONTINUE, 16, True, id="RESCHEDULE of 16 is still elsewhere"),
        pytest.param(verdict(C.WORKER_ERROR, 2), CONTINUE, 2, False, id="RESCHEDULE beats bad usage"),
        pytest.param(verdict(C.WORKER_ERROR, 99), CONTINUE, 99, False, id="not named"),
        pytest.param(verdict(C.PREEMPTED, 42), CONTINUE, 75, False, id="a planned stop has no code"),
        pytest.param(verdict(C.NODE_LOST), CONTINUE, 75, False, id="nor has a lost node"),
        pytest.param(verdict(C.PREEMPTED, 1), CONTINUE, 75, False, id="also where FAIL names it"),
        pytest.param(verdict(C.STOPPED_BY_USER, 42), STOP, 75, False, id="nor has a person's stop"),
    ],
)
def test_what_the_configuration_says_beats_the_defaults(given, action, code, elsewhere):
    decision = decide(given, fresh(), MAPPED)
    assert (decision.action, decision.exit_code, decision.elsewhere) == (action, code, elsewhere)


def test_zero_may_be_mapped_like_any_code():
    assert decide(verdict(C.FINISHED), fresh(), {ExitAction.FAIL: "0"}).action is STOP
    assert decide(verdict(C.FINISHED), fresh(), {ExitAction.RESCHEDULE: "0-9"}).action is CONTINUE
    assert decide(verdict(C.FINISHED), fresh(), {ExitAction.COMPLETE: "1"}).action is FINISH


def test_a_list_is_as_good_as_a_text():
    assert lists_as_texts({"FAIL": [1, "3-5"], "COMPLETE": "0"}) == {"FAIL": "1,3-5", "COMPLETE": "0"}
    assert lists_as_texts(None) is None


@given(st.dictionaries(st.sampled_from(list(ExitAction)), st.lists(st.integers(0, 255), min_size=1, max_size=5)))
def test_a_code_is_never_in_two_actions(actions):
    texts = {action: ",".join(map(str, codes)) for action, codes in actions.items()}
    sets = [parse_codes(text) for text in texts.values()]
    if sum(map(len, sets)) == len(frozenset().union(*sets)):
        assert unambiguous(texts) == texts
        for action, codes in actions.items():
            assert {explicit_action(code, texts) for code in codes} == {action}
    else:
        with pytest.raises(ValueError, match="is in both"):
            unambiguous(texts)


# budgets


def test_by_cause_names_causes_like_people_do():
    assert by_cause({"node_lost": 5, "Worker Error": 1}) == {C.NODE_LOST: 5, C.WORKER_ERROR: 1}
    assert by_cause([1]) == [1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nod lost": 1}, "'nod lost' is not a cause; these do: communication error"),
        ({"preempted": 1}, "costs no retries"),
        ({"node lost": 1, "node_lost": 2}, "is there twice"),
        ({None: 1}, "is not a cause"),
        ({"x" * 999: 1}, "is not a cause"),
    ],
)
def test_what_has_no_budget(keys, message):
    with pytest.raises(ValueError, match=message) as error:
        by_cause(keys)
    assert len(str(error.value)) < 400


def history(ends: list[tuple[Cause, bool]]) -> list[PastEnd]:
    return [PastEnd(cause=cause.value, progressed=progressed) for cause, progressed in ends]


ENDS = st.lists(st.tuples(st.sampled_from(list(Cause)), st.booleans()), max_size=12)
RETRIES = st.dictionaries(st.sampled_from(sorted(BUDGETED)), st.integers(0, 4), max_size=3)


@given(ENDS, st.sampled_from(list(Cause)), st.booleans(), st.integers(0, 4), RETRIES, st.integers(1, 5))
def test_a_run_without_progress_comes_to_an_end(ends, cause, progressed, retries, own, cycles):
    """Whatever the mixture of causes, but for those that say nothing about the run."""
    given = verdict(cause, 1, saved=11 if progressed else 10)
    budget = budget_for(given, history(ends), retries=retries, retries_of=own, max_no_progress_cycles=cycles)
    decision = decide(given, budget)
    idle = 0
    for end, moved in reversed(ends):
        if moved:
            break
        idle += end not in PATIENT | {C.STOPPED_BY_USER}
    if not progressed and cause not in PATIENT | {C.FINISHED} and idle + 1 >= cycles:
        assert decision.action is STOP
    if progressed and cause in BUDGETED - {C.VALIDATION_FAILED} and own.get(cause, retries) > 0:
        assert decision.action is CONTINUE, "progress forgives everything that was before"


@given(ENDS, st.integers(0, 4))
def test_only_ends_of_its_own_cause_spend_a_causes_budget(ends, retries):
    given = verdict(C.NODE_LOST)
    rest = [(cause, moved) for cause, moved in ends if cause is C.NODE_LOST or moved]
    budgets = [
        budget_for(given, history(each), retries=retries, retries_of={}, max_no_progress_cycles=100)
        for each in (ends, rest)
    ]
    assert budgets[0].failures_so_far == budgets[1].failures_so_far <= len(rest)


@given(ENDS)
def test_a_decision_to_stop_ends_the_count(ends):
    given = verdict(C.WORKER_ERROR, 1)
    past = [*history(ends), PastEnd(cause="", given_up=True)]
    budget = budget_for(given, past, retries=2, retries_of={}, max_no_progress_cycles=3)
    assert (budget.failures_so_far, budget.idle_cycles) == (0, 0)


@given(
    st.builds(
        Verdict, cause=st.sampled_from(list(Cause)), reason=st.text(max_size=20), exit_code=st.integers(0, 255),
        first_step=st.integers(0, 5), last_step=st.integers(0, 5), saved_step=st.none() | st.integers(0, 5),
        suspects=st.lists(st.builds(Suspect, node=st.text(min_size=1, max_size=5)), max_size=3).map(tuple),
        rerun=st.sampled_from(["", "persistent", "transient", "correct", "\x00"]),
    ),
    st.builds(Budget, failures_so_far=st.integers(0, 9), max_failures=st.integers(0, 9), idle_cycles=st.integers(0, 9)),
)  # fmt: skip
def test_a_decision_holds_together(given, budget):
    decision = decide(given, budget)
    assert isinstance(decision, Decision)
    assert set(decision.avoid) <= {suspect.node for suspect in given.suspects}
    assert decision.action is CONTINUE or (decision.avoid, decision.elsewhere) == ((), False)
    assert (decision.exit_code == 0) <= (decision.action is FINISH or given.exit_code == 0)
    assert decide(given, budget) == decision


ROLE_ENDS = [
    # code, cause, decision, avoid, begun again -> begins again alone
    (137, "", "", NONE, 0, True),  # its supervisor and its guardian were killed
    (137, "", "", NONE, MAX_BEGUN_AGAIN - 1, True),
    (137, "", "", NONE, MAX_BEGUN_AGAIN, False),
    (2, "", "", NONE, 0, False),  # it could not begin
    (75, "", "", NONE, 0, False),
    (1, C.WORKER_ERROR, "continue", NONE, 0, True),
    (1, C.WORKER_ERROR, "continue", NONE, MAX_BEGUN_AGAIN, False),
    (1, C.WORKER_ERROR, "continue", NODES, 0, False),
    (1, C.WORKER_ERROR, "stop", NONE, 0, False),
    (17, C.WORKER_ERROR, "stop", NONE, 0, False),
    (75, C.LAUNCH_FAILURE, "continue", NONE, 0, True),
    (75, C.HANG, "continue", NONE, 0, True),
    (75, C.SUPERVISOR_LOST, "continue", NONE, 0, True),
    (75, C.NODE_LOST, "continue", NONE, 0, False),
    (75, C.DATA_CORRUPTION, "continue", NONE, 0, False),
    (75, C.STRAGGLER, "continue", NODES, 0, False),
    (75, C.RERUN_ELSEWHERE, "continue", NONE, 0, False),
    (137, C.PREEMPTED, "continue", NONE, 0, False),
    (75, C.STOPPED_BY_USER, "stop", NONE, 0, False),
    (75, "of a newer slurmft", "continue", NONE, 0, False),
]


@pytest.mark.parametrize(("code", "cause", "action", "avoid", "begun", "expected"), ROLE_ENDS)
def test_a_role_begins_again_alone_where_its_nodes_will_do(
    code: int, cause: str, action: str, avoid: tuple[str, ...], begun: int, expected: bool
) -> None:
    end = RoleEnd(code=code, cause=cause, action=action, avoid=avoid)
    assert role_begins_again(end, BegunAgain(begun)) is expected


def test_progress_clears_the_count_of_begins_and_the_same_step_does_not() -> None:
    spent = BegunAgain().at(5).once_more().once_more().once_more()
    assert spent.is_spent and spent.at(5).is_spent and spent.at(4).is_spent
    assert spent.at(6) == BegunAgain(0, 6)
