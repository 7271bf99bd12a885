"""Requests change hands: none is lost, whatever agents do."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.inference.coordinator import Leases


def fresh(total: int = 100, *, done: tuple[int, ...] = ()) -> Leases:
    flags = np.zeros(total, dtype=np.bool_)
    flags[list(done)] = True
    return Leases(flags, tail_after_s=5.0)


def numbers(runs: list[tuple[int, int]]) -> list[int]:
    return [number for first, last in runs for number in range(first, last)]


def test_leases_follow_the_input_and_leave_out_what_is_done():
    requests = fresh(10, done=(0, 3, 4))
    assert requests.done == 3
    assert numbers(requests.lease(1, 4, 0.0)) == [1, 2, 5, 6]
    assert numbers(requests.lease(2, 100, 0.0)) == [7, 8, 9]
    assert requests.lease(3, 100, 0.0) == []


def test_what_a_lost_agent_held_goes_to_the_others_first():
    requests = fresh(10)
    requests.lease(1, 4, 0.0)
    requests.answered([(1, 2)])
    assert requests.lose(1) == 3
    assert numbers(requests.lease(2, 5, 0.0)) == [0, 2, 3, 4, 5]
    assert requests.lose(1) == 0


def test_what_an_agent_gave_back_is_not_taken_from_the_next_one_when_it_is_lost():
    requests = fresh(10)
    requests.lease(1, 4, 0.0)
    assert requests.give_back(1, [(0, 4)]) == 4
    assert numbers(requests.lease(2, 3, 0.0)) == [0, 1, 2]
    assert requests.give_back(1, [(0, 3)]) == 0, "it has them no more"
    assert requests.lose(1) == 0
    assert numbers(requests.lease(2, 2, 0.0)) == [3, 4]
    assert requests.lose(2) == 5


def test_at_the_end_old_leases_are_given_to_a_second_agent_once():
    requests = fresh(4)
    requests.lease(1, 4, 0.0)
    requests.answered([(0, 1)])
    assert requests.lease(2, 10, 4.0) == []
    assert numbers(requests.lease(2, 10, 6.0)) == [1, 2, 3]
    assert requests.lease(3, 10, 7.0) == []
    assert requests.lose(2) == 0, "the first one still has them"
    assert requests.lose(1) == 3
    requests.answered([(1, 4)])
    assert requests.finished


def test_requests_in_flight_at_one_death_go_to_others_at_once():
    requests = fresh(6)
    requests.lease(1, 5, 0.0)
    assert requests.died([2, 3], "n1/0#1", "SIGSEGV") == []
    assert requests.lease_alone(2, 1.0) is None
    assert numbers(requests.lease(2, 2, 1.0)) == [2, 3], "before those that were never tried"


def test_requests_in_flight_at_two_deaths_are_tried_alone_and_one_that_kills_two_alone_is_given_up():
    requests = fresh(6)
    requests.lease(1, 6, 0.0)
    requests.died([1, 2, 3], "n1/0#0", "SIGSEGV")
    requests.lease(1, 3, 0.0)
    requests.answered([(1, 2)])
    assert requests.died([2, 3], "n1/0#1", "SIGSEGV") == []
    assert requests.lease(1, 6, 1.0) == [], "suspects are leased alone"
    assert [requests.lease_alone(1, 1.0), requests.lease_alone(2, 1.0), requests.lease_alone(2, 1.0)] == [2, 3, None]
    requests.answered([(3, 4)])
    assert requests.died([2], "n1/0#2", "SIGSEGV") == []
    assert requests.lease_alone(2, 2.0) == 2
    ((given_up, why),) = requests.died([2], "n2/0#1", "SIGABRT")
    assert given_up == 2
    assert "n1/0#2: SIGSEGV" in why and "n2/0#1: SIGABRT" in why
    assert requests.lease_alone(1, 3.0) is None
    assert not requests.finished, "it is still to be answered, with an error"


def test_a_suspect_that_is_given_back_stays_one():
    requests = fresh(3)
    requests.lease(1, 3, 0.0)
    requests.died([1], "n1/0#1", "hang")
    assert requests.lease_alone(1, 0.0) == 1
    requests.lose(1)
    assert numbers(requests.lease(2, 9, 0.0)) == [0, 2]
    assert requests.lease_alone(2, 0.0) == 1


def test_an_answer_that_cannot_be_read_is_asked_for_again():
    requests = fresh(3)
    requests.lease(1, 3, 0.0)
    requests.answered([(0, 3)])
    requests.reopen([1])
    assert not requests.finished
    assert numbers(requests.lease(1, 9, 0.0)) == [1]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["lease", "alone", "answer", "lose", "return", "die"]), st.integers(0, 3),
              st.integers(1, 30)), max_size=60,
)  # fmt: skip


@settings(deadline=None)
@given(EVENTS)
def test_every_request_is_open_leased_done_or_given_up(story):
    """Whatever happens, agents that work on to the end get everything that is not done, and nothing twice at once."""
    requests, held, given_up, now_s = fresh(60), {agent: set() for agent in range(4)}, set(), 0.0
    for number, (what, agent, count) in enumerate(story):
        now_s += 0.01
        some = sorted(held[agent])[:count]
        match what:
            case "lease":
                held[agent] |= set(numbers(requests.lease(agent, count, now_s)))
            case "alone":
                if (index := requests.lease_alone(agent, now_s)) is not None:
                    held[agent].add(index)
            case "answer":
                requests.answered([(index, index + 1) for index in some])
                held[agent] -= set(some)
            case "lose":
                requests.lose(agent)
                held[agent].clear()
            case "return":
                requests.give_back(agent, [(index, index + 1) for index in some])
                held[agent] -= set(some)
            case "die":
                given_up |= {index for index, _ in requests.died(some, f"r#{number}", "SIGKILL")}
                held[agent] -= set(some)
        owned = [index for each in held.values() for index in each]
        assert len(owned) == len(set(owned))
    for agent in held:
        requests.lose(agent)
    while runs := requests.lease(9, 7, now_s):
        requests.answered(runs)
    while (index := requests.lease_alone(9, now_s)) is not None:
        requests.answered([(index, index + 1)])
    requests.answered([(index, index + 1) for index in given_up])
    assert requests.finished
