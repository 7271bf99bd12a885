"""Who takes part in the next attempt: a table of values, and what must hold for any allocation."""

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.decide import (
    Agent,
    Members,
    Node,
    Size,
    Standing,
    TooFew,
    Wait,
    growth,
    lost_after_s,
    next_members,
)

CONDITIONS = {
    "": {}, "-": {"agent": Agent.LOST}, "~": {"agent": Agent.RETURNING},
    "x": {"standing": Standing.EXCLUDED}, "!": {"standing": Standing.BARRED}, "+": {"joined": True},
    "*": {"warm": False}, ">": {"joined": True, "leaving": True},
}  # fmt: skip


def nodes_of(text: str) -> list[Node]:
    """``"a b- cx"``: a name and, behind it, its condition."""
    return [Node(name=word[0], **CONDITIONS[word[1:]]) for word in text.split()]


def fixed(nodes: int) -> Size:
    return Size(nodes=nodes, minimum=nodes, maximum=nodes)


def elastic(minimum: int, nodes: int, maximum: int) -> Size:
    return Size(nodes=nodes, minimum=minimum, maximum=maximum)


FOUR, ONE_TO_SIX = fixed(4), elastic(1, 4, 6)


@pytest.mark.parametrize(
    ("nodes", "last", "size", "taken"),
    [
        pytest.param("a b c d e", "", FOUR, "abcd", id="at first the allocation's order"),
        pytest.param("a b c d e", "abcd", FOUR, "abcd", id="nothing happened"),
        pytest.param("a b- c d e", "abcd", FOUR, "aecd", id="a spare fills the gap"),
        pytest.param("a- b c d e", "abcd", FOUR, "ebcd", id="even the first"),
        pytest.param("a b- c d e f", "aecd", FOUR, "aecd", id="a spare that took over stays"),
        pytest.param("a b c d e-", "aecd", FOUR, "abcd", id="a node that is back is a spare"),
        pytest.param("a b* c d e", "abcd", FOUR, "aecd", id="one that has just come back gives way to a warm spare"),
        pytest.param("a b* c d e*", "abcd", FOUR, "abcd", id="not to a cold one"),
        pytest.param("a bx c d e", "abcd", FOUR, "aecd", id="an excluded one gives way"),
        pytest.param("a bx c- d e f", "abcd", FOUR, "aefd", id="two gaps, in the allocation's order"),
        pytest.param("a bx c d", "abcd", FOUR, "abcd", id="an excluded one rather than none"),
        pytest.param("a bx c d", "abcd", elastic(3, 4, 4), "adc", id="fewer rather than an excluded one"),
        pytest.param("a b- c d", "abcd", elastic(1, 4, 4), "adc", id="the last one moves, the others stay"),
        pytest.param("a- b- c- d", "abcd", elastic(1, 4, 4), "d", id="down to the least"),
        pytest.param("a b c- d e+ f+", "abd", ONE_TO_SIX, "abdef", id="lent nodes come on top"),
        pytest.param("a b c d e+ f+ g+", "abcd", ONE_TO_SIX, "abcdef", id="up to the most"),
        pytest.param("a b c d e f+", "abcd", ONE_TO_SIX, "abcde", id="the job's own ones first: they stay longer"),
        pytest.param("a b- c d e f+", "abcde", ONE_TO_SIX, "afcde", id="then the lent one is the spare"),
        pytest.param("a b c d e+ f>", "abcdef", ONE_TO_SIX, "abcde", id="a lender that ends"),
        pytest.param("a b c d e+", "ebcda", elastic(1, 4, 5), "ebcda", id="a lent node may be the first"),
        pytest.param("a b c d a-", "abcd", FOUR, "abcd", id="a name that comes twice is looked at once"),
    ],
)
def test_who_takes_part(nodes: str, last: str, size: Size, taken: str):
    members = next_members(nodes_of(nodes), list(last), size)
    assert isinstance(members, Members)
    assert "".join(members.nodes) == taken


@pytest.mark.parametrize(
    ("nodes", "size", "words"),
    [
        ("a b- c d", FOUR, "3 of 4 nodes can be used, fewer than nodes=4 (lost: b)"),
        ("a b! c d", FOUR, "3 of 4 nodes can be used, fewer than nodes=4 (barred: b)"),
        ("a b- c! d>", elastic(2, 4, 4), "1 of 4 nodes can be used, fewer than elastic.min_nodes=2 "
         "(lost: b, barred: c, about to leave: d)"),
        ("", fixed(1), "0 of 0 nodes can be used, fewer than nodes=1"),
    ],
)  # fmt: skip
def test_too_few_nodes_say_why(nodes: str, size: Size, words: str):
    assert next_members(nodes_of(nodes), "abcd", size) == TooFew(reason=words)


def test_a_node_that_is_coming_back_is_waited_for_as_long_as_that_pays():
    nodes = nodes_of("a b~ c d")
    assert next_members(nodes, "abcd", FOUR, waited_s=2.0, patience_s=5.0) == Wait(nodes=("b",), seconds=3.0)
    assert isinstance(next_members(nodes, "abcd", FOUR, waited_s=5.0, patience_s=5.0), TooFew)
    assert isinstance(next_members(nodes, "abcd", elastic(1, 4, 4), patience_s=5.0), Wait)
    assert isinstance(next_members(nodes_of("a b~ c d e"), "abcd", FOUR, patience_s=5.0), Members), "a spare is faster"
    assert isinstance(next_members(nodes_of("a b- c d"), "abcd", FOUR, patience_s=5.0), TooFew), "it will not come"
    assert isinstance(next_members(nodes_of("a bx c d e~"), "abcd", FOUR, patience_s=5.0), Wait), "better than b"


@pytest.mark.parametrize(
    ("nodes", "current", "new"),
    [
        ("a b c d", "abc", "d"),
        ("a b c d- e+ f+", "abc", "ef"),
        ("a b c d e f", "abcd", ""),
        ("a b- c d e+", "abcd", ""),
        ("a b c dx", "abc", ""),
        ("a b c d>", "abc", ""),
        ("a b cx d e", "abc", ""),
    ],
    ids=["one is back", "two are lent", "large enough", "a member is lost: its end comes",
         "an excluded one is no gain", "nor one that leaves", "replacing is not growing"],
)  # fmt: skip
def test_growing_at_the_next_checkpoint(nodes: str, current: str, new: str):
    assert "".join(growth(nodes_of(nodes), list(current), ONE_TO_SIX)) == new


def replaceable(nodes: Iterable[Node], current: str, lost: set[str], size: Size) -> bool:
    """Whether the run could go on at once without the nodes ``lost``."""
    rest = [node for node in nodes if node.name not in lost]
    return isinstance(next_members(rest, current, size), Members)


def test_silence_is_borne_longer_where_nobody_can_step_in():
    assert replaceable(nodes_of("a b c d e"), "abcd", {"b"}, FOUR)
    assert not replaceable(nodes_of("a b c d"), "abcd", {"b"}, FOUR)
    assert replaceable(nodes_of("a b c d"), "abcd", {"b"}, elastic(1, 4, 4))
    assert lost_after_s(3.0, replaceable=True) < lost_after_s(3.0, replaceable=False)


@pytest.mark.parametrize("size", [(0, 1, 1), (2, 1, 2), (1, 3, 2)])
def test_impossible_sizes_are_refused(size: tuple[int, int, int]):
    with pytest.raises(ValueError, match="not 1 <="):
        elastic(*size)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Node], list[str], Size]:
    names = draw(st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=10))
    nodes = [
        Node(name=name, agent=draw(st.sampled_from(Agent)), standing=draw(st.sampled_from(Standing)),
             joined=draw(st.booleans()), warm=draw(st.booleans()), leaving=draw(st.booleans()))
        for name in names
    ]  # fmt: skip
    last = draw(st.lists(st.sampled_from("abcdefghijkl"), unique=True, max_size=6))
    minimum, more, most = (draw(st.integers(low, 4)) for low in (1, 0, 0))
    return nodes, last, elastic(minimum, minimum + more, minimum + more + most)


@given(situations(), st.floats(0, 10), st.floats(0, 10))
def test_whatever_the_allocation_looks_like(situation, waited_s: float, patience_s: float):
    nodes, last, size = situation
    taken = next_members(nodes, last, size, waited_s=waited_s, patience_s=patience_s)
    if isinstance(taken, Wait):
        assert 0 < taken.seconds <= patience_s
        taken = next_members(nodes, last, size, waited_s=patience_s, patience_s=patience_s)
    usable = {
        n.name: n for n in nodes if n.agent is Agent.LIVING and not n.leaving and n.standing is not Standing.BARRED
    }
    if isinstance(taken, TooFew):
        assert len(usable) < size.minimum
        return
    assert isinstance(taken, Members)
    assert len(set(taken.nodes)) == len(taken.nodes), "nobody twice"
    assert set(taken.nodes) <= set(usable)
    assert size.minimum <= len(taken.nodes) <= size.maximum
    left_out = [usable[name] for name in usable if name not in taken.nodes]
    if any(usable[name].standing is Standing.EXCLUDED for name in taken.nodes):
        assert len(taken.nodes) == size.minimum
        assert all(node.standing is Standing.EXCLUDED for node in left_out), "never while others are there"
    worst = max(usable[name].standing for name in taken.nodes)
    assert all(node.standing >= worst for node in left_out)
    for place, name in enumerate(taken.nodes):
        if name in last[: len(taken.nodes)]:
            assert last[place] == name, "whoever goes on keeps its place"
    again = next_members(nodes, taken.nodes, size)
    assert again == taken, "the same question has the same answer"
    new = growth(nodes, taken.nodes, size)
    assert new == (), "a run that has just begun is as large as it can be"


def test_ten_thousand_nodes_are_no_matter():
    nodes = [Node(name=f"n{i}", agent=Agent.LOST if i % 7 == 0 else Agent.LIVING) for i in range(10_000)]
    last = [f"n{i}" for i in range(8_000)]
    before = time.process_time()
    taken = next_members(nodes, last, elastic(1, 8_000, 8_000))
    assert isinstance(taken, Members)
    assert len(taken.nodes) == 8_000
    assert time.process_time() - before < 1.0
