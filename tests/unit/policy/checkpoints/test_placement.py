"""Where copies of a node's part lie, and which losses they outlive."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.checkpoints import copy_holders

FEW = st.integers(1, 40)
COPIES = st.integers(0, 5)


@pytest.mark.parametrize(
    ("nodes", "copies", "holders"),
    [
        (1, 0, ((),)),
        (1, 3, ((),)),
        (4, 0, ((), (), (), ())),
        (2, 1, ((1,), (0,))),
        (4, 1, ((1,), (0,), (3,), (2,))),
        (3, 1, ((1,), (2,), (0,))),
        (5, 1, ((1,), (0,), (3,), (4,), (2,))),
        (6, 2, ((1, 2), (2, 0), (0, 1), (4, 5), (5, 3), (3, 4))),
        (5, 2, ((1, 2), (2, 3), (3, 4), (4, 0), (0, 1))),
        (2, 3, ((1,), (0,))),
    ],
)
def test_where_copies_lie(nodes, copies, holders):
    assert copy_holders(nodes, copies) == holders


@pytest.mark.parametrize(
    ("nodes", "copies"), [(0, 1), (-1, 0), (2, -1), (2.0, 1), (2, 1.5), (float("nan"), 1), (3, True)]
)
def test_numbers_that_make_no_sense_are_refused(nodes, copies):
    with pytest.raises(ValueError, match="make no sense"):
        copy_holders(nodes, copies)


def unsupplied(nodes: int, copies: int, lost: Iterable[int]) -> frozenset[int]:
    """The nodes whose part of a snapshot is gone from all memory once the ``lost`` nodes are; empty when none is."""
    gone = frozenset(lost)
    holders = copy_holders(nodes, copies)
    return frozenset(node for node in gone if 0 <= node < nodes and gone.issuperset(holders[node]))


@given(FEW, COPIES)
def test_every_node_has_its_copies_elsewhere_and_all_bear_alike(nodes, copies):
    holders = copy_holders(nodes, copies)
    wanted = min(copies, nodes - 1)
    assert len(holders) == nodes
    for node, others in enumerate(holders):
        assert len({*others} - {node}) == len(others) == wanted
        assert all(0 <= other < nodes for other in others)
    held = [sum(node in others for others in holders) for node in range(nodes)]
    assert set(held) == {wanted}


@given(st.integers(1, 9), st.integers(0, 4))
def test_as_many_nodes_may_go_as_there_are_copies_and_not_one_more(nodes, copies):
    for lost in itertools.combinations(range(nodes), min(copies, nodes)):
        assert unsupplied(nodes, copies, lost) == (frozenset(range(nodes)) if len(lost) == nodes else frozenset())
    if copies < nodes:
        first_group = {0, *copy_holders(nodes, copies)[0]}
        assert 0 in unsupplied(nodes, copies, first_group)


def test_groups_lose_less_than_a_ring_would():
    pairs = list(itertools.combinations(range(8), 2))
    by_groups = sum(bool(unsupplied(8, 1, lost)) for lost in pairs)
    by_ring = sum(b - a in (1, 7) for a, b in pairs)
    assert (by_groups, by_ring) == (4, 8)


def test_ten_thousand_nodes():
    assert len(copy_holders(10_001, 2)) == 10_001
