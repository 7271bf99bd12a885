"""What a node says that it holds: the scan of real folders, and rows of integers and back."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_snapshots import stage
from waiting import slowness

from slurmft.checkpoint.image_file import Holding, ShardIndex, read_index, write_index
from slurmft.checkpoint.image_file import holding as file_holding
from slurmft.checkpoint.memory_sources import (
    MAX_SHARDS,
    MAX_SNAPSHOTS,
    ROW_LENGTH,
    forget_others,
    from_rows,
    note_try,
    scan,
    to_row,
    tries_of,
)
from slurmft.policy.checkpoints import Offer, Tier
from slurmft.storage.checkpoint_names import MAX_STEP, Identity


def seen(memory: Path | None, local: Path | None = None) -> list[tuple[int, int, Tier]]:
    return [(one.name[0], one.index.shard, one.tier) for one in scan(memory, local, patience_s=0)]


def test_own_shards_copies_and_local_disk_newest_first(tmp_path):
    stage(tmp_path, "shard-1.a", shard=1)
    stage(tmp_path, "shard-1.b", shard=1, identity=(50, 3, 5))
    stage(tmp_path / "peers", "shard-0.a", shard=0)
    stage(tmp_path / "disk", "shard-0.a", shard=0, identity=(30, 2, 3))
    assert seen(tmp_path, tmp_path / "disk") == [
        (50, 1, Tier.MEMORY), (40, 0, Tier.PEER), (40, 1, Tier.MEMORY), (30, 0, Tier.LOCAL_DISK),
    ]  # fmt: skip


def test_one_that_lies_there_twice_is_taken_from_memory_unless_only_the_other_can_be_verified(tmp_path):
    stage(tmp_path, "shard-0.a")
    stage(tmp_path / "disk", "shard-0.a")
    stage(tmp_path / "disk", "shard-1.a", shard=1)
    stage(tmp_path, "shard-1.a", shard=1, hashed=False)
    assert seen(tmp_path, tmp_path / "disk") == [(40, 0, Tier.MEMORY), (40, 1, Tier.LOCAL_DISK)]


def test_nothing_and_nowhere(tmp_path):
    assert seen(None) == seen(tmp_path) == seen(tmp_path / "none", tmp_path / "none either") == []


def _cut(index: Path, image: Path) -> None:
    os.truncate(image, 1000)


def _half(index: Path, image: Path) -> None:
    index.write_bytes(index.read_bytes()[:-20])


def _linked(index: Path, image: Path) -> None:
    os.rename(image, image.with_suffix(".elsewhere"))
    image.symlink_to(image.with_suffix(".elsewhere"))


def _pipe(index: Path, image: Path) -> None:
    index.unlink()
    os.mkfifo(index)


def _folder(index: Path, image: Path) -> None:
    index.unlink()
    index.mkdir()


def _huge(index: Path, image: Path) -> None:
    found = read_index(index)
    assert found is not None
    beyond = ShardIndex(identity=Identity(MAX_STEP + 1, 3, 4), shard=0, shards=2, size_bytes=found.size_bytes,
                        items=found.items)  # fmt: skip
    write_index(index, beyond, durable=False)


@pytest.mark.parametrize(
    "damage",
    [_cut, _half, _linked, _pipe, _folder, _huge, lambda _, image: image.unlink(), lambda index, _: index.unlink(),
     lambda index, _: index.write_bytes(b"\xff\xfe"), lambda index, _: index.write_text('{"format": 99}')],
    ids=["short image", "half index", "link", "pipe", "folder", "beyond any step", "no image", "no index", "no text",
         "newer format"],
)  # fmt: skip
def test_what_is_damaged_or_foreign_is_passed_over(tmp_path, damage):
    damage(*stage(tmp_path, "shard-0.a"))
    stage(tmp_path, "shard-1.a", shard=1)
    (tmp_path / "shard-x").write_text("")
    assert seen(tmp_path) == [(40, 1, Tier.MEMORY)]


def test_a_writer_that_still_hashes_is_waited_for(tmp_path):
    index, _ = stage(tmp_path)
    whole = read_index(index)
    stage(tmp_path, hashed=False)
    assert whole is not None
    threading.Timer(0.2, write_index, args=(index, whole), kwargs={"durable": False}).start()
    (found,) = scan(tmp_path, patience_s=10)
    assert found.index.is_hashed


def test_and_not_for_ever_nor_where_nobody_hashes(tmp_path):
    stage(tmp_path, hashed=False)
    began = time.monotonic()
    (found,) = scan(tmp_path, patience_s=0.2)
    assert not found.index.is_hashed
    assert time.monotonic() - began < 5 * slowness()


def seconds_of_a_scan(memory: Path) -> float:
    began = time.monotonic()
    scan(memory, patience_s=60)
    return time.monotonic() - began


def stage_long_ago(folder: Path, stem: str = "shard-0.a", **facts: Any) -> Path:
    """Staged, and not hashed by anybody since."""
    index, image = stage(folder, stem, hashed=False, **facts)
    os.utime(index, (time.time() - 60,) * 2)
    return image


def test_where_no_writer_is_left_nobody_waits_for_its_digests(tmp_path):
    stage_long_ago(tmp_path)
    assert seconds_of_a_scan(tmp_path) < 5


def test_nor_where_something_newer_is_whole(tmp_path):
    """As after a rescue: the older save's writer was told to leave it, or was killed."""
    stage(tmp_path, hashed=False)
    stage(tmp_path, "shard-0.b", identity=(50, 3, 5))
    assert seconds_of_a_scan(tmp_path) < 5


@pytest.mark.parametrize("name", ["shard-0.a.image", "shard-0.b.image"])
def test_a_writer_that_is_at_work_on_either_place_of_its_rank_is_waited_for(tmp_path, name):
    """Also where another rank's part of the same save is done."""
    stage_long_ago(tmp_path)
    stage(tmp_path, "shard-0.b", identity=(30, 3, 2))
    stage(tmp_path, "shard-1.a", shard=1)
    with file_holding(tmp_path / name):
        began = time.monotonic()
        scan(tmp_path, patience_s=0.5)
        assert time.monotonic() - began >= 0.5


def holding(name: tuple[int, int, int], shard: int, *, shards: int = 4, tier: Tier = Tier.MEMORY) -> Holding:
    index = ShardIndex(identity=Identity(*name), shard=shard, shards=shards, size_bytes=0, items=())
    return Holding(index=index, image=Path(), index_path=Path(), tier=tier)


NUMBERS = st.integers(0, MAX_STEP)
SNAPSHOTS = st.dictionaries(
    st.tuples(NUMBERS, NUMBERS, NUMBERS),
    st.tuples(st.integers(1, 1 << 20), st.integers(0, 3), st.sampled_from(Tier), st.integers(0, 5)),
    max_size=MAX_SNAPSHOTS,
)


@given(SNAPSHOTS)
def test_rows_say_exactly_what_is_held(snapshots):
    held = [
        holding(name, shard, shards=shards, tier=tier)
        for name, (shards, count, tier, _) in snapshots.items()
        for shard in {0, shards - 1, shards // 2, count % shards}
    ]
    row = to_row(held, lambda name: snapshots[name][3])
    assert len(row) == ROW_LENGTH
    assert all(type(number) is int and -(2**63) <= number < 2**63 for number in row)
    offers = from_rows([[0] * ROW_LENGTH, row])
    assert {offer.name: offer for offer in offers} == {
        name: Offer(
            rank=1,
            name=name,
            shards=shards,
            tries=tries,
            verified=True,
            held=dict.fromkeys(sorted({0, shards - 1, shards // 2, count % shards}), tier),
        )
        for name, (shards, count, tier, tries) in snapshots.items()
    }


def test_more_than_fits_is_left_out_oldest_first():
    many = [holding((step, 1, step), shard, shards=100) for step in range(8) for shard in range(100)]
    offers = from_rows([to_row(many)])
    assert [offer.name[0] for offer in offers] == [7, 6, 5, 4, 3, 2]
    assert all(set(offer.held) == set(range(MAX_SHARDS)) for offer in offers)


def test_shards_without_digests_are_not_told_beside_those_with(tmp_path):
    stage(tmp_path, "shard-0.a")
    stage(tmp_path, "shard-1.a", shard=1, hashed=False)
    stage(tmp_path, "shard-1.b", shard=1, hashed=False, identity=(50, 3, 5))
    offers = from_rows([to_row(scan(tmp_path, patience_s=0))])
    assert [(offer.name[0], set(offer.held), offer.verified) for offer in offers] == [(50, {1}, False), (40, {0}, True)]


def test_ranks_that_went_elsewhere_give_their_memory_back_once_something_newer_is_durable(tmp_path):
    for rank in (0, 1, 10):
        stage(tmp_path, f"shard-{rank}.a", shard=rank, shards=11)
        stage(tmp_path, f"shard-{rank}.b", shard=rank, shards=11, identity=(60, 3, 6))
    stage(tmp_path / "peers", "shard-7.a", shard=7, shards=11)
    forget_others(tmp_path, [1], older_than=6)
    assert sorted(path.name for path in tmp_path.glob("*.image")) == [
        "shard-0.b.image", "shard-1.a.image", "shard-1.b.image", "shard-10.b.image",
    ]  # fmt: skip
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert len(list((tmp_path / "peers").iterdir())) == 2


def test_tries_are_counted_for_each_snapshot(tmp_path):
    name, other = (40, 3, 4), (50, 3, 5)
    for generation in (3, 4, 4):
        note_try(tmp_path, name, generation=generation)
    assert (tries_of(tmp_path)(name), tries_of(tmp_path)(other), tries_of(None)(name)) == (2, 0, 0)
    note_try(tmp_path, other, generation=5)
    assert tries_of(tmp_path)(other) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "tries": {"step-00000040.g3.c4": NaN}}',
                                  '{"format": 1, "tries": {"step-00000040.g3.c4": [null, "4", NaN]}}'])  # fmt: skip
def test_a_damaged_count_is_none(tmp_path, text):
    (tmp_path / "tries.json").write_text(text)
    assert tries_of(tmp_path)((40, 3, 4)) == 0
    note_try(tmp_path, (40, 3, 4), generation=5)
    assert tries_of(tmp_path)((40, 3, 4)) == 1


def test_a_count_that_cannot_be_written_is_no_error(tmp_path, caplog):
    note_try(tmp_path / "none", (40, 3, 4), generation=5)
    assert "cannot note" in caplog.text
