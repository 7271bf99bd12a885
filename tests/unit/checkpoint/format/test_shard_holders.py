"""A rank reads the indexes that it needs: of its own part, of shard 0, and of the holders of what it lacks."""

import json
from dataclasses import replace

import pytest
import stored_state
import torch
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.checkpoint.image import SMALL_BYTES, SPREAD_SHARDS, Layout
from slurmft.checkpoint.image_file import (
    Damaged,
    Holders,
    Spread,
    index_file,
    parse_index,
    read_index,
    stamp_of,
    write_index,
)
from slurmft.checkpoint.reading import Target
from slurmft.checkpoint.state import FlatState
from slurmft.storage.checkpoint_names import Identity

SHARDS, SIZE = 8, 12
"""torch.chunk makes 6 parts of two values of it, and two empty ones."""


def write_spread(folder, *, with_holders: bool = True) -> None:
    """The values 0 - 11, two on each of the first six shards; a plain tensor on shard 5; an object on each."""
    for shard in range(SHARDS):
        tensors = {"model.w": torch.arange(SIZE, dtype=torch.float32)[2 * shard : 2 * shard + 2]} if shard < 6 else {}
        if shard == 5:
            tensors["model.b"] = torch.ones(3)
        state = FlatState(tensors=tensors)
        state.put(f"slurmft.rank.{shard}", {"rng": shard})
        memory, index = stored_state.stage(state)
        items = tuple(
            replace(item, shape=(SIZE,), starts=(2 * shard,), sizes=(2,)) if item.key == "model.w" else item
            for item in index.items
        )
        holders = (
            Holders.of({"model.w": Spread(0, 1, SHARDS, 0), "model.b": 5}) if shard == 0 and with_holders else None
        )
        index = replace(index, shard=shard, shards=SHARDS, items=items, texts=(), holders=holders)
        stored_state.write(folder, memory, index)


def read(folder, rank: int | None, start: int, length: int) -> tuple[list[int], list[float]]:
    """The shards that were looked at, and the values."""
    stored = stored_state.opened(folder, rank=rank, ranks=SHARDS)
    target = Target(torch.full((length,), -1.0), (start,))
    stored.fill({"model.w": target})
    return sorted(stored.seen), target.tensor.tolist()


@pytest.mark.parametrize(
    ("rank", "start", "length", "seen"),
    [
        pytest.param(3, 6, 2, {0, 3, 5}, id="its own part, shard 0, and the holder of the plain tensor"),
        pytest.param(0, 0, 2, {0, 5}, id="shard 0"),
        pytest.param(7, 11, 0, {0, 5, 7}, id="an empty part"),
        pytest.param(1, 3, 4, {0, 1, 2, 3, 5}, id="other cuts than those that were saved"),
        pytest.param(9, 10, 2, {0, 5}, id="more ranks than saved"),
        pytest.param(2, 0, 12, {0, 1, 2, 3, 4, 5, 6, 7}, id="all of it"),
    ],
)
def test_only_what_is_needed(tmp_path, rank, start, length, seen):
    write_spread(tmp_path / "c")
    found, values = read(tmp_path / "c", rank, start, length)
    assert set(found) <= seen
    assert len(found) < SHARDS or length == SIZE
    assert values == [float(n) for n in range(start, start + length)]


def test_without_holders_all_are_read(tmp_path):
    """Checkpoints of before have none."""
    write_spread(tmp_path / "c", with_holders=False)
    assert read(tmp_path / "c", 3, 6, 2) == (list(range(SHARDS)), [6.0, 7.0])


def test_wrong_holders_cost_time_and_no_value(tmp_path):
    write_spread(tmp_path / "c")
    path = tmp_path / "c" / index_file(0)
    wrong = Holders.of({"model.w": Spread(4, 1, 2, 0), "model.b": 5})
    write_index(path, replace(read_index(path), texts=(), holders=wrong), durable=False)
    assert read(tmp_path / "c", 1, 3, 4) == (list(range(SHARDS)), [3.0, 4.0, 5.0, 6.0])


def test_a_part_that_no_shard_has_is_found_before_it_is_missed(tmp_path):
    write_spread(tmp_path / "c")
    path = tmp_path / "c" / index_file(2)
    index = read_index(path)
    moved = tuple(replace(item, starts=(6,)) if item.key == "model.w" else item for item in index.items)
    write_index(path, replace(index, texts=(), items=moved), durable=False)
    with pytest.raises(Damaged, match=r"parts of model.w are missing"):
        read(tmp_path / "c", 1, 3, 4)
    assert read(tmp_path / "c", 0, 0, 2)[1] == [0.0, 1.0], "a rank that does not need it does not look"


@of_each(holders=[{"model.w": 8}, {"model.w": -1}, {"model.w": [0, 1, 9, 0]}, {"model.w": [0, 1, 2]},
     {"model.w": "0"}, [1], {"model.w": [7, 0, 1, 0]}, {"model.w": [0, 1, 0, 0]}, {"model.w": True}])  # fmt: skip
def test_holders_that_lead_nowhere_are_damage(tmp_path, holders):
    write_spread(tmp_path / "c")
    raw = json.loads((tmp_path / "c" / index_file(0)).read_text())
    with pytest.raises(Damaged, match=r"__0_0\.json cannot be read"):
        parse_index(json.dumps({**raw, "holders": holders}).encode(), index_file(0))


@given(st.integers(1, 40), st.integers(1, 200), st.data())
def test_a_row_names_the_shards_that_torch_chunk_fills(count, size, data):
    start = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, size - start))
    parts, begin = [], 0
    for part in torch.arange(size).chunk(count):
        parts.append(range(begin, begin + len(part)))
        begin += len(part)
    expected = [n for n, part in enumerate(parts) if part.start < start + length and start < part.stop]
    row = Spread(first=3, stride=2, count=count, dimension=0)
    assert list(row.shards_of(size, start, length)) == [3 + 2 * n for n in expected]


def test_in_a_large_world_shard_0_keeps_what_is_small():
    shards = SPREAD_SHARDS + 1
    tensors = {f"model.{n}": torch.zeros(SMALL_BYTES // 4 + n % 2) for n in range(40)}
    first = Layout.plan(tensors, shard=0, shards=shards)
    assert [item.key for item in first.items if item.data_length <= SMALL_BYTES] == [
        f"model.{n}" for n in range(0, 40, 2)
    ]
    others = [item.key for shard in range(1, shards) for item in Layout.plan(tensors, shard=shard, shards=shards).items]
    assert len(others) + len(first.items) == 40


def test_a_stamp_is_what_the_whole_index_says(tmp_path):
    write_spread(tmp_path / "c")
    for shard in range(SHARDS):
        raw = (tmp_path / "c" / index_file(shard)).read_bytes()
        whole, stamp = parse_index(raw, ""), stamp_of(raw, "")
        assert stamp.identity == whole.identity == Identity(7, 0, 1)
        assert (stamp.shard, stamp.shards, stamp.size_bytes) == (shard, SHARDS, whole.size_bytes)
        for cut in (raw[:-2], raw[1:], b"", raw[:60]):
            with pytest.raises(Damaged):
                stamp_of(cut, "")
