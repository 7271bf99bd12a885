"""Where a restart reads from: tables of what nodes hold, and what must be true of any decision."""

import math
import random

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.checkpoints import (
    DISK,
    Committed,
    Decision,
    Offer,
    Tier,
    Transfer,
    choose_snapshot,
    rounds_of,
    transfers_of,
    without,
)

M, P, L = Tier.MEMORY, Tier.PEER, Tier.LOCAL_DISK
OLD, NEW, NEWER = (100, 7, 11), (125, 7, 12), (150, 7, 13)


def offer(rank: int, name=NEW, *held: int, tier: Tier = M, **more) -> Offer:
    return Offer(**{"rank": rank, "name": name, "shards": 4, "held": dict.fromkeys(held, tier), **more})


BOTH = [offer(0, NEW, 0, 1), offer(2, NEW, 2, 3)]
ON_DISK = Committed(name=OLD, shards=4)


@pytest.mark.parametrize(
    ("offers", "committed", "suppliers", "reason"),
    [
        pytest.param([], None, (), "there is nothing to resume from", id="nothing"),
        pytest.param([], ON_DISK, (DISK,) * 4, "disk: step 100", id="disk alone"),
        pytest.param(BOTH, None, (0, 0, 2, 2), "memory: step 125, all 4 shards", id="memory alone"),
        pytest.param(BOTH, ON_DISK, (0, 0, 2, 2), "memory: step 125, all 4 shards", id="memory is newer"),
        pytest.param(
            BOTH, Committed(name=NEW, shards=4), (0, 0, 2, 2), "memory: step 125, all 4 shards", id="memory and disk"
        ),
        pytest.param(BOTH, Committed(name=NEWER, shards=4), (DISK,) * 4, "disk: step 150", id="disk is newer"),
        pytest.param(
            BOTH[:1], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 125 in memory: shards 2, 3 of 4 are lost", id="a node is gone",
        ),
        pytest.param(
            [offer(0, NEW, 0, 1), offer(2, NEW, 2)], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 125 in memory: shard 3 of 4 is lost", id="one shard is gone",
        ),
        pytest.param(
            [BOTH[0], offer(0, NEW, 2, 3, tier=P)], ON_DISK, (0, 0, 0, 0),
            "step 125: 2 of 4 shards from memory, 2 of 4 shards from memory of a peer", id="a peer has copies",
        ),
        pytest.param(
            [*BOTH, offer(0, NEW, 2, 3, tier=P)], ON_DISK, (0, 0, 2, 2),
            "memory: step 125, all 4 shards", id="own memory before a copy",
        ),
        pytest.param(
            [offer(2, NEW, 0, 1, 2, 3, tier=L)], ON_DISK, (2, 2, 2, 2),
            "a local disk: step 125, all 4 shards", id="a local disk",
        ),
        pytest.param(
            BOTH[:1], Committed(name=NEW, shards=4), (0, 0, DISK, DISK),
            "step 125: 2 of 4 shards from memory, 2 of 4 shards from disk", id="disk fills the gaps",
        ),
        pytest.param(
            [BOTH[0], offer(2, NEW, 2, 3, verified=False)], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 125 in memory: shards 2, 3 cannot be verified", id="no digests",
        ),
        pytest.param(
            [offer(0, NEW, 0, 1, 2, 3, verified=False)], Committed(name=NEW, shards=4), (DISK,) * 4,
            "disk: step 125", id="no digests, and on disk",
        ),
        pytest.param(
            [*BOTH, offer(0, NEWER, 0, 1)], ON_DISK, (0, 0, 2, 2),
            "memory: step 125, all 4 shards; step 150 in memory: shards 2, 3 of 4 are lost", id="newest whole one",
        ),
        pytest.param(
            [*BOTH, offer(0, OLD, 0, 1), offer(2, OLD, 2, 3)], None, (0, 0, 2, 2),
            "memory: step 125, all 4 shards", id="newest of two",
        ),
        pytest.param(
            [offer(0, (125, 9, 12), 0, 1, 2, 3)], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 125 in memory: generation 9 wrote it, and this is generation 8",
            id="beyond the fence",
        ),
        pytest.param(
            [offer(0, (130, 6, 14), 0, 1, 2, 3)], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 130 in memory: the run went back behind it and on to step 100", id="a branch it left",
        ),
        pytest.param(
            [offer(0, (130, 6, 14), 0, 1, 2, 3), offer(2, (110, 7, 12), 1)], Committed(name=(90, 6, 11), shards=4),
            (DISK,) * 4, "disk: step 90; step 130 in memory: the run went back behind it and on to step 110",
            id="and nothing else is left",
        ),
        pytest.param(
            [offer(0, (130, 6, 12), 0, 1, 2, 3), offer(2, (150, 8, 14), 1)], Committed(name=(90, 6, 11), shards=4),
            (0, 0, 0, 0), "memory: step 130, all 4 shards; step 150 in memory: shards 0, 2, 3 of 4 are lost",
            id="the trunk of what is lost",
        ),
        pytest.param(
            [offer(0, NEW, 0, 1, tries=2), BOTH[1]], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 125 in memory: 2 attempts have died after they began with it", id="tried twice",
        ),
        pytest.param(
            [offer(0, NEW, 0, 1, tries=1), BOTH[1]], ON_DISK, (0, 0, 2, 2),
            "memory: step 125, all 4 shards", id="tried once",
        ),
        pytest.param(
            [offer(0, NEW, 0, 1, 2, 3, tries=5)], Committed(name=NEW, shards=4), (0,) * 4,
            "memory: step 125, all 4 shards", id="what is committed has its own mark",
        ),
        pytest.param(
            [offer(0, NEW, 0, 1, tries=2), BOTH[1]], None, (),
            "there is nothing to resume from", id="tried twice, and nothing else",
        ),
        pytest.param(
            [BOTH[0], offer(2, NEW, 2, 3, shards=5)], ON_DISK, (DISK,) * 4,
            "disk: step 100; step 125 in memory: nodes disagree on its number of shards: [4, 5]", id="two sizes",
        ),
        pytest.param(
            BOTH, Committed(name=NEW, shards=2), (DISK,) * 2,
            "disk: step 125; step 125 in memory: nodes disagree on its number of shards: [2, 4]",
            id="disk of another size",
        ),
    ],
)  # fmt: skip
def test_decisions(offers, committed, suppliers, reason):
    decision = choose_snapshot(offers, committed, generation=8)
    assert (decision.suppliers, decision.reason) == (suppliers, reason)


def test_a_quarantined_snapshot_is_not_used_from_memory_either():
    decision = choose_snapshot(BOTH, ON_DISK, generation=8, quarantined={NEW})
    assert decision.name == OLD
    assert decision.skipped == ("step 125 in memory: it is quarantined",)


@of_each(
    where=["rank", "shards", "tries", "step", "generation", "commit", "held", "fence", "disk"],
    bad=[-1, 1.0, math.nan, math.inf, None, True, "1"],
)
def test_numbers_that_make_no_sense_are_refused(where, bad):
    values = {
        "rank": 0,
        "shards": 4,
        "tries": 0,
        "step": 1,
        "generation": 1,
        "commit": 1,
        "held": 0,
        "fence": 9,
        "disk": 4,
    }
    values[where] = bad
    name = (values["step"], values["generation"], values["commit"])
    with pytest.raises(ValueError):
        choose_snapshot(
            [
                Offer(
                    rank=values["rank"],
                    name=name,
                    shards=values["shards"],
                    held={values["held"]: M},
                    tries=values["tries"],
                )
            ],
            Committed(name=OLD, shards=values["disk"]),
            generation=values["fence"],
        )


def test_a_shard_outside_of_its_snapshot_is_refused():
    with pytest.raises(ValueError, match="none of its snapshot"):
        choose_snapshot([offer(0, NEW, 4)], None, generation=8)


NAMES = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 5))
OFFERS = st.lists(
    st.builds(
        Offer,
        rank=st.integers(0, 5),
        name=NAMES,
        shards=st.just(3) | st.integers(1, 4).map(lambda shards: max(3, shards)),
        held=st.dictionaries(st.integers(0, 2), st.sampled_from(Tier)),
        verified=st.sampled_from([True, True, False]),
        tries=st.integers(0, 3),
    ),
    max_size=8,
)
DISKS = st.none() | st.builds(
    Committed, name=NAMES.map(lambda name: (name[0], min(name[1], 2), name[2])), shards=st.just(3)
)


@settings(max_examples=examples(150))
@given(OFFERS, DISKS, st.randoms(use_true_random=False))
def test_what_is_true_of_any_decision(offers, committed, chance: random.Random):
    decision = choose_snapshot(offers, committed, generation=2)
    shuffled = list(offers)
    chance.shuffle(shuffled)
    assert choose_snapshot(shuffled, committed, generation=2) == decision
    assert (decision.name is None) == (not decision.suppliers)
    if decision.name is None:
        assert committed is None
        return
    assert decision.name[1] <= 2
    if committed is not None:
        assert decision.name[2] >= committed.name[2]
    supplied = [(rank, shard) for shard, rank in enumerate(decision.suppliers) if rank is not DISK]
    for rank, shard in supplied:
        assert any(
            one.rank == rank and one.name == decision.name and shard in one.held and one.verified for one in offers
        )
    on_disk = committed is not None and decision.name == committed.name
    assert decision.is_committed == on_disk
    if not on_disk:
        assert DISK not in decision.suppliers
        assert all(one.tries < 2 for one in offers if one.name == decision.name)
        newer = [one.name for one in offers if decision.name[1] < one.name[1] <= 2 and one.name[2] <= decision.name[2]]
        assert not newer


# Which shards travel


def test_each_node_gets_what_it_lacks_once():
    decision = choose_snapshot(BOTH, None, generation=8)
    everything = range(4)
    wanted = [(0, everything), (0, everything), (2, everything), (2, [2]), (4, [1, 2]), (4, [2])]
    assert transfers_of(decision, BOTH, wanted) == [
        Transfer(source=0, target=2, shard=0),
        Transfer(source=0, target=2, shard=1),
        Transfer(source=0, target=4, shard=0, is_whole=False),
        Transfer(source=0, target=4, shard=1),
        Transfer(source=2, target=0, shard=2),
        Transfer(source=2, target=0, shard=3),
        Transfer(source=2, target=4, shard=2),
        Transfer(source=2, target=4, shard=3, is_whole=False),
    ]


def test_nothing_travels_that_lies_on_disk_or_in_the_node_itself():
    decision = choose_snapshot(BOTH[:1], Committed(name=NEW, shards=4), generation=8)
    assert transfers_of(decision, BOTH[:1], [(0, range(4))]) == []


def test_what_cannot_be_supplied_is_taken_off_the_offer():
    copies = [*BOTH, offer(0, NEW, 2, 3, tier=P)]
    assert choose_snapshot(without(copies, 2, NEW, [3]), None, generation=8).suppliers == (0, 0, 2, 0)
    assert choose_snapshot(without(BOTH, 2, NEW, [3]), ON_DISK, generation=8).name == OLD


@given(st.integers(2, 7), st.data())
def test_rounds_hold_every_transfer_and_ranks_meet_in_them(world_size, data):
    ranks = st.integers(0, world_size - 1)
    pairs = data.draw(st.sets(st.tuples(ranks, ranks, st.integers(0, 3)).filter(lambda one: one[0] != one[1])))
    transfers = sorted(Transfer(source=source, target=target, shard=shard) for source, target, shard in pairs)
    rounds = [rounds_of(rank, world_size, transfers) for rank in range(world_size)]
    sent = [transfer for of_rank in rounds for out, _ in of_rank for transfer in out]
    got = [transfer for of_rank in rounds for _, into in of_rank for transfer in into]
    assert sorted(sent) == sorted(got) == transfers
    for rank, of_rank in enumerate(rounds):
        for out, into in of_rank:
            assert len({transfer.target for transfer in out}) <= 1
            assert len({transfer.source for transfer in into}) <= 1
            assert all(transfer.source == rank for transfer in out)


def test_a_decision_for_ten_thousand_nodes_is_quick():
    held = [offer(8 * node, NEW, *range(8 * node, 8 * node + 8), shards=80_000) for node in range(10_000)]
    decision = choose_snapshot(held, None, generation=8)
    assert isinstance(decision, Decision)
    assert decision.suppliers[79_999] == 79_992
