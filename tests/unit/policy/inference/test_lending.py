"""The nodes that an endpoint is lent follow its load, and what it has lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.serving import LOAN_WAIT_S, MOST_LOANS, Bounds, Lending, Loan, Scale, lending

BOUNDS = Bounds(least=0, most=4, concurrency=10, idle_s=60.0)


def test_a_loan_is_worth_what_was_needed_lately() -> None:
    scale = Scale(4).saw(None, BOUNDS, 0.0)
    assert scale.lately == 4
    scale = scale.saw(11, BOUNDS, 1.0).saw(0, BOUNDS, 2.0)
    assert (scale.wanted, scale.lately) == (4, 2)


def loan(job: str, since_s: float = 0.0, *, has_node: bool = True, serves: bool = False) -> Loan:
    return Loan(job=job, since_s=since_s, has_node=has_node, serves=serves)


ON, OFF, QUEUED, NEWER = loan("on", serves=True), loan("off"), loan("q", has_node=False), loan("n", 9.0, has_node=False)


@pytest.mark.parametrize(
    ("loans", "needed", "wanted", "own", "hoped", "then"),
    [
        pytest.param([], 1, 1, 1, 1, Lending(), id="its own nodes are enough"),
        pytest.param([], 4, 4, 1, 1, Lending(3), id="the load needs more"),
        pytest.param([ON, QUEUED], 4, 4, 1, 1, Lending(1), id="some are lent, or about to be"),
        pytest.param([], 1, 4, 1, 1, Lending(), id="more are wanted than were needed lately"),
        pytest.param([ON], 1, 4, 1, 1, Lending(), id="a loan is kept for the time of rest"),
        pytest.param([], 2, 2, 1, 2, Lending(), id="a lost node may come back"),
        pytest.param([], 2, 2, 1, 1, Lending(1), id="a node stays lost"),
        pytest.param([ON], 2, 2, 1, 2, Lending(), id="a supervisor that knows of no lost node keeps it"),
        pytest.param([ON], 2, 2, 2, 2, Lending(), id="what serves is not taken away"),
        pytest.param([OFF], 2, 2, 2, 2, Lending(0, ("off",)), id="a lost node is back"),
        pytest.param([ON, OFF, QUEUED, NEWER], 0, 3, 1, 1, Lending(0, ("n", "q")), id="what waits goes first"),
        pytest.param([ON, OFF, QUEUED, NEWER], 0, 1, 1, 1, Lending(0, ("n", "q", "off")), id="then the idle ones"),
        pytest.param([ON, OFF], 0, 0, 1, 1, Lending(0, ("off",)), id="none is needed"),
        pytest.param([], 100, 100, 1, 1, Lending(MOST_LOANS), id="not all at once"),
    ],
)  # fmt: skip
def test_nodes_are_borrowed_and_given_back(
    loans: list[Loan], needed: int, wanted: int, own: int, hoped: int, then: Lending
) -> None:
    assert lending(loans, needed=needed, wanted=wanted, own=own, hoped=hoped, now_s=10.0, again_s=0.0) == then


def test_a_job_that_the_queue_never_starts_is_given_up_and_none_follows_at_once() -> None:
    late_s = LOAN_WAIT_S + 1.0

    def decide(now_s: float, again_s: float, *loans: Loan) -> Lending:
        return lending(loans, needed=3, wanted=3, own=1, hoped=1, now_s=now_s, again_s=again_s)

    assert decide(late_s, 0.0, ON, QUEUED) == Lending(give_up=("q",))
    assert decide(late_s, 0.0, ON, NEWER) == Lending()
    assert decide(late_s, late_s + 1.0, ON) == Lending()
    assert decide(late_s + 1.0, late_s + 1.0, ON) == Lending(1)


@given(
    st.lists(st.tuples(st.floats(0, 4000), st.booleans(), st.booleans()), max_size=12), st.integers(0, 12),
    st.integers(0, 12), st.integers(0, 6), st.integers(0, 3),
)  # fmt: skip
def test_there_are_never_more_loans_than_are_needed_and_none_that_serves_is_taken(
    given_loans: list[tuple[float, bool, bool]], needed: int, more: int, own: int, lost: int
) -> None:
    loans = [loan(str(n), since_s, has_node=has, serves=has and on) for n, (since_s, has, on) in enumerate(given_loans)]
    then = lending(loans, needed=needed, wanted=needed + more, own=own, hoped=own + lost, now_s=4000.0, again_s=0.0)
    gone = {*then.give_back, *then.give_up}
    assert not gone & {each.job for each in loans if each.serves}
    assert len(then.give_back) + len(then.give_up) == len(gone)
    assert not (then.borrow and gone)
    if then.borrow:
        assert own + len(loans) + then.borrow <= needed
    assert own + len(loans) - len(then.give_back) >= min(own + len(loans), needed + more)
