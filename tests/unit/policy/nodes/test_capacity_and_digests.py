"""How much of a list a request bears: never unschedulable, never more than the share, the weakest gives way first."""

import math
import time

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.policy.reruns import Comparison, Digest, compare, convicted, is_left_out, left_out
from slurmft.policy.suspicion import Candidate, PartitionNodes, Strength, choose_exclusions

NAMES = [f"n{number}" for number in range(1, 9)]


def place(count: int = 4, *, down: tuple[str, ...] = (), name: str = "p") -> PartitionNodes:
    nodes = frozenset(NAMES[:count])
    return PartitionNodes(name=name, nodes=nodes, usable=nodes - set(down))


def against(node: str, score: float = 1.0, strength: Strength = Strength.SCORE) -> Candidate:
    return Candidate(node=node, score=score, strength=strength)


def chosen(candidates, places, *, needed=1, fraction=1.0, known=NAMES, asked_for=()):
    return choose_exclusions(
        candidates, places, known=known, nodes_needed=needed, max_excluded_fraction=fraction, asked_for=asked_for
    )


SUSPECT, HAND = Strength.SUSPECT, Strength.BY_HAND


@pytest.mark.parametrize(
    ("candidates", "places", "options", "nodes", "dropped"),
    [
        pytest.param([against("n1")], [place()], {}, "n1", "", id="room enough"),
        pytest.param([against("n1", 1.0), against("n2", 2.0), against("n3", 3.0)], [place()], {"needed": 2}, "n3 n2",
                     "n1", id="the weakest gives way"),
        pytest.param([against("n1", 9.0), against("n2", 1.0, HAND)], [place(2)], {}, "n2", "n1",
                     id="a hand beats a score"),
        pytest.param([against("n1", 9.0, HAND), against("n2", 0.0, SUSPECT)], [place(2)], {}, "n2", "n1",
                     id="a suspect beats a hand"),
        pytest.param([against("n1"), against("n2")], [place(4)], {"fraction": 0.25}, "n1", "n2", id="the share"),
        pytest.param([against("n1")], [place(3)], {"fraction": 0.25}, "", "n1", id="a share of less than one node"),
        pytest.param([against("n1")], [place(3)], {"fraction": 1 / 3}, "n1", "", id="a share of one node"),
        pytest.param([against("n1", 0, SUSPECT), against("n2", 0, SUSPECT)], [place(4)],
                     {"fraction": 0.25, "needed": 2}, "n1 n2", "", id="suspects are not bound by the share"),
        pytest.param([against("n1", 0, SUSPECT), against("n2")], [place(4)], {"fraction": 0.25}, "n1", "n2",
                     id="and use it up"),
        pytest.param([against(name, 0, SUSPECT) for name in NAMES[:3]], [place(4)], {"needed": 2}, "n1 n2", "n3",
                     id="suspects do not make the job wait for ever"),
        pytest.param([against("n1"), against("n2")], [place(3, down=("n1",))], {"needed": 2}, "n1", "n2",
                     id="a node that is down takes nothing from the job"),
        pytest.param([against("n1")], [place(4, down=("n2", "n3"))], {"needed": 3}, "", "n1",
                     id="a job that has to wait already need not wait longer"),
        pytest.param([against("n1"), against("n8")], [place(4)], {}, "n1", "",
                     id="other partitions' nodes are no matter"),
        pytest.param([against("n1")], [place(8), place(2, name="small")], {"needed": 2}, "", "n1",
                     id="each partition that could take it must"),
        pytest.param([against("n1")], [place(8), place(2, name="small")], {"needed": 3}, "n1", "",
                     id="one that could not does not count"),
        pytest.param([against("n1")], [place()], {"asked_for": {"n1"}}, "", "n1", id="asked for by name"),
        pytest.param([against("n1", 1.0), against("n1", 0.0, SUSPECT)], [place()], {"fraction": 0}, "n1", "",
                     id="twice"),
        pytest.param([], [place()], {}, "", "", id="nothing"),
        pytest.param([against("n1")], [], {}, "", "", id="no such partition"),
    ],
)  # fmt: skip
def test_what_is_excluded(candidates, places, options, nodes, dropped):
    found = chosen(candidates, places, **options)
    assert (" ".join(found.nodes), " ".join(each.node for each in found.dropped)) == (nodes, dropped)
    assert found.unknown == ()


def test_names_that_slurm_does_not_know_are_told_and_nothing_else():
    found = chosen([against("gone"), against("n1"), against("a b\n")], [place()])
    assert (found.nodes, found.dropped, found.unknown) == (("n1",), (), ("a b\n", "gone"))


def test_the_reason_names_the_knob_or_the_number():
    few = chosen([against("n1", 2.5)], [place(2)], needed=2).dropped[0]
    assert (few.node, few.score) == ("n1", 2.5)
    assert few.reason == "without it fewer than 2 usable nodes would be left"
    share = chosen([against("n1")], [place()], fraction=0.1).dropped[0]
    assert "max_excluded_fraction=0.1" in share.reason


candidates = st.lists(
    st.builds(against, st.sampled_from([*NAMES, "gone"]), st.floats(0, 5), st.sampled_from(list(Strength))), max_size=12
)
places = st.lists(
    st.builds(
        lambda nodes, down, name: PartitionNodes(name=name, nodes=nodes, usable=nodes - down),
        st.frozensets(st.sampled_from(NAMES)), st.frozensets(st.sampled_from(NAMES)), st.sampled_from("pqr"),
    ),
    max_size=3, unique_by=lambda each: each.name,
)  # fmt: skip


@settings(deadline=None, max_examples=examples(400))
@given(candidates, places, st.integers(0, 9), st.floats(0, 1))
def test_whatever_is_asked_it_stays_within_its_bounds(candidates, places, needed, fraction):
    found = chosen(candidates, places, needed=needed, fraction=fraction)
    out = set(found.nodes)
    strongest = {}
    for each in candidates:
        strongest[each.node] = max(strongest.get(each.node, (-1, 0.0)), (each.strength, each.score))
    able = [each for each in places if len(each.usable) >= needed]
    for each in able:
        assert len(each.usable - out) >= needed, "it could be scheduled and still can"
    if not able:
        assert not any(out & each.usable for each in places), "no worse than it was"
    for each in places:
        lasting = {node for node in out & each.nodes if strongest[node][0] < SUSPECT}
        assert len(lasting) <= math.floor(fraction * len(each.nodes) + 1e-9)
    assert out <= {each.node for each in candidates}
    assert out.isdisjoint(one.node for one in found.dropped)
    inside = {name for each in places for name in each.nodes}
    assert out | {one.node for one in found.dropped} == inside & strongest.keys(), "each is excluded or spoken of"
    assert set(found.unknown) == {"gone"} & strongest.keys()


@settings(deadline=None, max_examples=examples(300))
@given(candidates, st.frozensets(st.sampled_from(NAMES)), st.integers(0, 9), st.floats(0, 1))
def test_nobody_is_dropped_while_a_weaker_one_in_the_same_place_is_excluded(candidates, down, needed, fraction):
    nodes = frozenset(NAMES)
    only = PartitionNodes(name="p", nodes=nodes, usable=nodes - down)
    found = chosen(candidates, [only], needed=needed, fraction=fraction)
    rank = {}
    for each in candidates:
        rank[each.node] = max(rank.get(each.node, (-1, 0.0)), (each.strength, each.score))
    for each in found.dropped:
        weaker = [node for node in found.nodes if rank[node] < rank[each.node]]
        assert all(node in down for node in weaker), "but for nodes that take nothing from the job"


def test_ten_thousand_nodes_are_chosen_from_at_once():
    names = [f"n{number:05}" for number in range(10_000)]
    nodes = frozenset(names)
    began = time.process_time()
    found = chosen([against(name, score) for score, name in enumerate(names)],
                   [PartitionNodes(name="p", nodes=nodes, usable=nodes)], needed=6000, fraction=0.5,
                   known=nodes)  # fmt: skip
    assert time.process_time() - began < 2
    assert found.nodes == tuple(reversed(names[-4000:]))


# --- Digests of replicas: who differs, what differs by design, and what a repetition proves ---


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
