"""Digests of replicas: who differs, what differs by design, and what a repetition proves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.reruns import Comparison, Digest, compare, convicted, is_left_out, left_out


def of(*values: int, group: int = 1) -> dict[int, Digest]:
    return {rank: Digest(group=group, value=value) for rank, value in enumerate(values)}


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        (of(), Comparison()),
        (of(7), Comparison()),
        (of(7, 7), Comparison(compared=2)),
        (of(7, 8), Comparison(compared=2, split=(0, 1))),
        (of(7, 8, 7), Comparison(compared=3, wrong=(1,))),
        (of(7, 8, 9), Comparison(compared=3, unlike=(0, 1, 2))),
        (of(7, 8, 9, 7), Comparison(compared=4, split=(0, 1, 2, 3))),
        (of(7, 8, 7, 8), Comparison(compared=4, split=(0, 1, 2, 3))),
        (of(7, 8, 7, 9, 7), Comparison(compared=5, wrong=(1, 3))),
    ],
    ids=["none", "one", "equal", "two-split", "minority", "all-unlike", "plurality", "tie", "two-wrong"],
)
def test_a_minority_is_named_and_a_tie_is_not(digests: dict[int, Digest], expected: Comparison) -> None:
    assert compare(digests) == expected


def test_only_ranks_with_the_same_part_are_compared() -> None:
    digests = {0: Digest(group=1, value=5), 1: Digest(group=2, value=6), 2: Digest(group=1, value=5)}
    assert compare(digests) == Comparison(compared=2)
    assert compare({**digests, 3: Digest(group=2, value=7)}) == Comparison(compared=4, split=(1, 3))


@given(st.integers(3, 60), st.data())
def test_a_single_wrong_rank_is_always_the_one_named(ranks: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, ranks - 1))
    digests = {rank: Digest(group=4, value=-3 if rank == wrong else 11) for rank in range(ranks)}
    found = compare(digests)
    assert found.wrong == (wrong,)
    assert found.differs
    assert not found.agrees


@given(st.dictionaries(st.integers(0, 40), st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_a_rank_is_in_one_list_at_most_and_equal_replicas_in_none(drawn: dict[int, tuple[int, int]]) -> None:
    digests = {rank: Digest(group=group, value=value) for rank, (group, value) in drawn.items()}
    found = compare(digests)
    named = [*found.wrong, *found.split, *found.unlike]
    assert len(named) == len({*named})
    values: dict[int, set[int]] = {}
    for one in digests.values():
        values.setdefault(one.group, set()).add(one.value)
    assert {digests[rank].group for rank in named} == {group for group, seen in values.items() if len(seen) > 1}
    assert found.compared <= len(digests)


def test_before_the_first_step_all_differences_are_by_design_and_later_those_of_buffers() -> None:
    buffers = {"seed", "mean"}
    first = left_out({"seed", "expert.weight"}, buffers=buffers, trained=False)
    assert first == {"seed", "expert.weight"}
    later = left_out({"mean", "weight", "weight#exp_avg"}, buffers=buffers, trained=True, so_far=first)
    assert later == {"seed", "expert.weight", "mean"}
    assert is_left_out("expert.weight#exp_avg", later)
    assert not is_left_out("weight#exp_avg", later)


def test_a_repetition_convicts_the_node_that_computed_otherwise() -> None:
    doubted = {"n1": Digest(group=1, value=5), "n2": Digest(group=1, value=6)}
    assert convicted(doubted, [Digest(group=1, value=5)]) == ("n2",)
    assert convicted(doubted, [Digest(group=1, value=6)]) == ("n1",)
    assert convicted(doubted, [Digest(group=1, value=7)]) == (), "neither was repeated"
    assert convicted(doubted, [Digest(group=2, value=5)]) == (), "another part of the state"
