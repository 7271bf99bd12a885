"""Three ranks over gloo, each one a node of its own: shards travel to where they are needed, verified.

The scenarios run one after the other in one set of processes (importing torch costs more than all of them); each rank
writes what it saw, and every test looks at its part.
"""

import pytest
from ranks import reports_of_ranks

WORLD = 3
SCRIPT = """
import hashlib, json, os, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from made_snapshots import flip_byte, stage
from slurmft.checkpoint import replicas as slots, memory_sources as supply
from slurmft.checkpoint.memory_sources import from_rows, scan, to_row
from slurmft.trainer.savers import Team
from slurmft.policy.checkpoints import without
from slurmft.policy.checkpoints import Committed, choose_snapshot

root, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=3,
                        timeout=timedelta(seconds=60))
torch.set_num_threads(1)
supply.CHUNK_BYTES = 64 * 1024
team, report, NAME = Team(), {}, (40, 3, 4)

def digest(path, size):
    return hashlib.sha256(path.read_bytes()[:size]).hexdigest()

def scenario(prepare, wanted=range(3), after=None, committed=None, chunk=64 * 1024):
    supply.CHUNK_BYTES = chunk
    name = prepare.__name__
    memory = root / name / f"node {rank}"
    memory.mkdir(parents=True)
    (memory / "copies.key").write_bytes(b"k" * 64)
    prepare(memory)
    sources = {path.name: digest(path, 300_000 + rank) for path in memory.glob("*.image")}
    thirds = {path.name: digest(path, 100_000) for path in memory.glob("*.image")}
    holdings = scan(memory, patience_s=0)
    mine = {one.index.shard: one for one in holdings if one.name == NAME}
    offers = from_rows(team.exchange(to_row(holdings)))
    if after:
        after(memory)
    rounds = []
    while True:
        decision = choose_snapshot(offers, committed, generation=3)
        failed = supply.supply(team, decision, offers, mine, wanted=wanted, memory=memory, node_lead=rank)
        rounds.append([[*one] for one in failed])
        if not failed:
            break
        for source, shard in failed:
            offers = without(offers, source, decision.name, [shard])
    got = supply.fetched(memory, decision.name)
    held = {shard: one.image.stat().st_blocks * 512 for shard, one in got.items()}
    report[name] = {
        "sources": sources, "thirds": thirds, "rounds": rounds, "name": decision.name, "suppliers": decision.suppliers,
        "held": held,
        "first_third": {shard: digest(one.image, 100_000) for shard, one in got.items()},
        "rests": {shard: one.image.read_bytes()[101_000:] == bytes(one.index.size_bytes - 101_000)
                  for shard, one in got.items()},
        "got": {shard: digest(one.image, one.index.size_bytes) for shard, one in got.items()},
        "left": sorted(path.name for path in (memory / "fetched").iterdir()) if (memory / "fetched").exists() else [],
    }
    supply.remove_fetched(memory)
    report[name]["removed"] = not (memory / "fetched").exists()

def own(memory):
    stage(memory, f"shard-{rank}.a", shard=rank, shards=3, size=300_000 + rank)

def everything(memory): own(memory)
scenario(everything)

def in_large_pieces(memory): own(memory)
scenario(in_large_pieces, chunk=1 << 24)

def only_its_own(memory):
    own(memory)
scenario(only_its_own, wanted=range(rank, rank + 1))

def one_node_is_new(memory):
    if rank != 2:
        own(memory)
    if rank == 0:
        stage(memory / "peers", "shard-2.a", shard=2, shards=3, size=300_000 + rank)
scenario(one_node_is_new)

def a_byte_is_wrong(memory):
    own(memory)
    if rank == 1:
        flip_byte(memory / "shard-1.a.image", 250_000)
scenario(a_byte_is_wrong, committed=Committed(name=(30, 3, 3), shards=3))

def a_file_vanishes(memory): own(memory)
scenario(a_file_vanishes, committed=Committed(name=NAME, shards=3),
         after=lambda memory: (memory / "shard-1.a.image").unlink() if rank == 1 else None)

def it_shrinks_meanwhile(memory): own(memory)
scenario(it_shrinks_meanwhile, committed=Committed(name=NAME, shards=3),
         after=lambda memory: os.truncate(memory / "shard-1.a.image", 1000) if rank == 1 else None)

def another_lies_there_now(memory): own(memory)
scenario(another_lies_there_now, committed=Committed(name=NAME, shards=3),
         after=lambda memory: stage(memory, "shard-1.a", shard=1, shards=3, identity=(50, 3, 5)) if rank == 1 else None)

def the_receiver_has_no_room(memory): own(memory)
def full(memory):
    if rank == 2:
        (memory / "fetched").mkdir()
        (memory / "fetched" / "shard-0.a.json").mkdir()
        (memory / "fetched" / "shard-0.b.json").mkdir()
scenario(the_receiver_has_no_room, committed=Committed(name=NAME, shards=3), after=full)

def a_node_has_another_key(memory):
    own(memory)
    if rank == 1:
        (memory / "copies.key").write_bytes(b"o" * 64)
scenario(a_node_has_another_key, committed=Committed(name=NAME, shards=3))

def a_node_has_no_key(memory):
    own(memory)
    if rank == 1:
        (memory / "copies.key").unlink()
scenario(a_node_has_no_key, committed=Committed(name=NAME, shards=3))

# What comes from rank 1 is changed on its way to rank 2, and has the right digests all the same.
send_and_receive, feed = team.send_and_receive, slots.Verifier.feed
def tamper(outgoing, incoming):
    send_and_receive(outgoing, incoming)
    if incoming and incoming[1] == 1 and (len(incoming[0]) < 1000) == lengths:
        incoming[0][20 if lengths else 500] ^= 1
def begin_tampering(memory):
    if rank == 2:
        team.send_and_receive, slots.Verifier.feed = tamper, lambda *_: None
        slots.Verifier.finish = lambda *_: None
def a_piece_is_forged(memory): own(memory)
lengths = False
scenario(a_piece_is_forged, committed=Committed(name=NAME, shards=3), after=begin_tampering)
def lengths_are_forged(memory): own(memory)
lengths = True
scenario(lengths_are_forged, committed=Committed(name=NAME, shards=3), after=begin_tampering)

(root / f"report-{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    return reports_of_ranks(SCRIPT, tmp_path_factory.mktemp("supplying"), WORLD)


def of(reports: list[dict], name: str) -> list[dict]:
    """One scenario's reports; all ranks came to the same decision."""
    found = [report[name] for report in reports]
    for key in ("rounds", "name", "suppliers"):
        assert all(one[key] == found[0][key] for one in found)
    assert all(one["removed"] for one in found)
    return found


@pytest.mark.parametrize("name", ["everything", "in_large_pieces"])
def test_each_node_gets_what_it_lacks_byte_for_byte(reports, name):
    found = of(reports, name)
    assert found[0]["rounds"] == [[]]
    for rank, one in enumerate(found):
        others = {str(other): found[other]["sources"][f"shard-{other}.a.image"] for other in range(3) if other != rank}
        assert one["got"] == others
        assert len(one["left"]) == 4


def test_of_shards_that_are_spread_over_ranks_only_the_common_items_travel(reports):
    found = of(reports, "only_its_own")
    for rank, one in enumerate(found):
        others = [other for other in range(3) if other != rank]
        assert one["first_third"] == {str(other): found[other]["thirds"][f"shard-{other}.a.image"] for other in others}
        assert one["rests"] == {str(other): True for other in others}, "the rest is a hole"
        assert all(held < 200_000 for held in one["held"].values())


def test_a_node_without_memory_gets_all_of_it_and_copies_of_peers_serve(reports):
    found = of(reports, "one_node_is_new")
    assert found[0]["suppliers"] == [0, 1, 0]
    assert [sorted(one["got"]) for one in found] == [["1"], ["0", "2"], ["0", "1", "2"]]


def test_a_wrong_byte_is_noticed_and_all_go_back_to_the_same_place(reports):
    found = of(reports, "a_byte_is_wrong")
    assert found[0]["rounds"] == [[[1, 1], [1, 1]], []]
    assert found[0]["name"] == [30, 3, 3]
    assert not any(name.startswith("shard-1") for one in found for name in one["left"])


@pytest.mark.parametrize("name", ["a_file_vanishes", "it_shrinks_meanwhile", "another_lies_there_now"])
def test_what_cannot_be_supplied_comes_from_disk(reports, name):
    found = of(reports, name)
    assert found[0]["rounds"] == [[[1, 1], [1, 1]], []]
    assert (found[0]["name"], found[0]["suppliers"]) == ([40, 3, 4], [0, None, 2])
    assert sorted(found[0]["got"]) == ["2"]


@pytest.mark.parametrize("name", ["a_node_has_another_key", "a_node_has_no_key"])
def test_nothing_is_believed_that_comes_from_a_node_without_the_runs_key(reports, name):
    found = of(reports, name)
    failed = {tuple(pair) for pairs in found[0]["rounds"] for pair in pairs}
    assert any(rank == 1 for rank, _ in failed)
    assert all(found[other]["got"].get("1") is None for other in (0, 2))
    assert found[1]["got"] == {}


@pytest.mark.parametrize("name", ["a_piece_is_forged", "lengths_are_forged"])
def test_what_was_changed_on_the_way_is_refused_even_if_its_digests_are_right(reports, name):
    found = of(reports, name)
    assert found[0]["rounds"] == [[[1, 1]], []]
    assert found[0]["suppliers"] == [0, None, 2]
    assert [sorted(one["got"]) for one in found] == [["1", "2"], ["0", "2"], ["0"]]
    assert not any(name.startswith("shard-1") for name in found[2]["left"])


def test_a_receiver_that_cannot_take_it_holds_nobody_up(reports):
    found = of(reports, "the_receiver_has_no_room")
    assert found[0]["rounds"][0] == [[0, 0]]
    assert found[0]["suppliers"] == [None, 1, 2]
