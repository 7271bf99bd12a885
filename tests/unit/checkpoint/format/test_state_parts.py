"""Which part of a state a rank has, and when no other rank is known to have the same."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurmft.checkpoint import snapshots
from slurmft.checkpoint.image import Layout
from slurmft.checkpoint.snapshots import Snapshots
from slurmft.checkpoint.state import WHOLE, FlatState, part_of
from slurmft.errors import UsageError
from slurmft.policy.worker_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity

RANK, WORLD = 5, 8


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Of eight ranks, in which nothing is sent."""
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def weight(mesh: DeviceMesh, *placements: Placement) -> torch.nn.Parameter:
    return torch.nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False))


def mesh_of(ranks: torch.Tensor) -> DeviceMesh:
    return DeviceMesh("cpu", ranks)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_ranks_of_a_column_have_the_same_part(shards):
    mesh = mesh_of(torch.arange(WORLD).view(-1, shards))
    part = part_of([weight(mesh, Replicate(), Shard(1)), torch.zeros(2)], rank=RANK, world_size=WORLD)
    assert (part.number, part.count) == (RANK % shards, shards)
    assert part.dimension_of("a", weight(mesh, Replicate(), Shard(0))) == 0
    assert part.parts_of(range(4)) == shards and part.parts_of([0, shards]) == 1


def test_weights_that_every_rank_has_are_one_part():
    assert part_of([torch.zeros(2)], rank=RANK, world_size=WORLD) is WHOLE and WHOLE.parts_of(range(4)) == 1


RANKS = torch.arange(WORLD)
NONE = {
    "no replicas": (RANKS, [Shard(0)], "no other has it"),
    "one replica": (RANKS.view(1, -1), [Replicate(), Shard(0)], "no other has it"),
    "three dimensions": (RANKS.view(2, 2, 2), [Replicate(), Shard(0), Shard(1)], "a mesh of 3 dimensions"),
    "shards of shards": (RANKS.view(2, 4), [Shard(0), Shard(1)], "in another way"),
    "shards by replicas": (RANKS.view(2, 4), [Shard(0), Replicate()], "in another way"),
    "sums": (RANKS.view(2, 4), [Partial(), Shard(0)], "in another way"),
    "not all ranks": (RANKS[4:].view(2, 2), [Replicate(), Shard(0)], "over 4 of 8 ranks"),
    "rank 0 elsewhere": (RANKS.flip(0).view(2, 4), [Replicate(), Shard(0)], "rank 0 is not among the first"),
}


@pytest.mark.parametrize("case", NONE)
def test_where_no_other_rank_has_it_the_reason_says_so(case):
    ranks, placements, reason = NONE[case]
    with pytest.raises(UsageError, match=reason):
        part_of([weight(mesh_of(ranks), *placements)], rank=RANK, world_size=WORLD)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_memory_is_asked_for_for_all_parts_that_a_node_keeps_at_once(tmp_path, monkeypatch, shards):
    asked = []
    monkeypatch.setattr(snapshots, "fits", lambda size_bytes, _: asked.append(size_bytes) or "it is full")
    for name, value in (("RANK", RANK), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    one = weight(mesh_of(torch.arange(WORLD).view(-1, shards)), Replicate(), Shard(0)).detach()
    flat = FlatState({"a": one}, part=part_of([one], rank=RANK, world_size=WORLD))
    copies = Snapshots(
        CheckpointSettings(), memory=tmp_path, spill=tmp_path / "spill", on_committed=lambda *_: None,
        on_failed=lambda *_: None,
    )  # fmt: skip
    with pytest.raises(OSError, match="it is full"):
        copies.keep(flat, Identity(6, 1, 2), lambda: None)
    layout = Layout.plan_part(flat.tensors, flat.part)
    assert asked == [layout.capacity_bytes([]) * shards]


def test_weights_of_several_meshes_are_none():
    meshes = [mesh_of(RANKS.view(2, 4)), mesh_of(RANKS.view(4, 2))]
    with pytest.raises(UsageError, match="several meshes"):
        part_of([weight(mesh, Replicate(), Shard(0)) for mesh in meshes], rank=RANK, world_size=WORLD)


def test_a_tensor_beside_the_weights_that_is_spread_in_another_way_is_none():
    """Such as an optimizer's state."""
    part = part_of([weight(mesh_of(RANKS.view(2, 4)), Replicate(), Shard(0))], rank=RANK, world_size=WORLD)
    with pytest.raises(UsageError, match="exp_avg is spread"):
        part.dimension_of("exp_avg", weight(mesh_of(RANKS.view(4, 2)), Replicate(), Shard(0)))
    with pytest.raises(UsageError, match="exp_avg is spread"):
        WHOLE.dimension_of("exp_avg", weight(mesh_of(RANKS.view(2, 4)), Replicate(), Shard(0)))
