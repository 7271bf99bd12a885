"""Which part of the weights a rank has where they are spread over ranks, and these have replicas (FSDP2's HSDP).

On a mesh of replicas by shards the ranks of one column have the same values, and one rank of each column, from any of
the replicas, make the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from slurmft.errors import UsageError


@dataclass(frozen=True, slots=True)
class Part:
    """One column of a mesh, or all of a state that every rank has."""

    number: int = 0
    """0 has what is not spread, too: counters, buffers, everything that is no tensor."""

    count: int = 1
    mesh: DeviceMesh | None = None

    def dimension_of(self, key: str, tensor: DTensor) -> int:
        """The dimension in which ``tensor`` is cut.

        Raises:
            UsageError: it is spread in another way than the weights: no replica is known to have it.
        """
        placements = tensor.placements
        is_alike = self.mesh is not None and tensor.device_mesh == self.mesh
        if not is_alike or [type(one) for one in placements] != [Replicate, Shard]:
            raise UsageError(f"{key} is spread over ranks in another way than the weights: {placements}")
        cut = placements[1]
        assert isinstance(cut, Shard)
        return cut.dim

    def parts_of(self, ranks: Iterable[int]) -> int:
        """How many different parts these ranks have."""
        return 1 if self.mesh is None else len({_column(self.mesh, rank) for rank in ranks})


WHOLE = Part()


def part_of(weights: Iterable[torch.Tensor], *, rank: int, world_size: int) -> Part:
    """The part of ``weights`` that this rank has; ``WHOLE`` where none is spread over ranks.

    Raises:
        UsageError: nothing is known of another rank with the same part; why.
    """
    spread = {id(one): one for one in weights if isinstance(one, DTensor)}
    if not spread:
        return WHOLE
    mesh = next(iter(spread.values())).device_mesh
    if any(one.device_mesh != mesh for one in spread.values()):
        raise UsageError("weights are spread over several meshes of ranks")
    if mesh.ndim == 1 or (mesh.ndim == 2 and mesh.size(0) == 1):
        raise UsageError("the state is spread over ranks, and no other has it")
    if mesh.ndim > 2:
        raise UsageError(f"the weights are spread over a mesh of {mesh.ndim} dimensions, not of replicas by shards")
    if mesh.size() != world_size:
        raise UsageError(f"the weights are spread over {mesh.size()} of {world_size} ranks")
    if 0 not in mesh.mesh[:, 0]:
        raise UsageError("rank 0 is not among the first shards of the mesh")
    part = Part(_column(mesh, rank), mesh.size(1), mesh)
    for one in spread.values():
        part.dimension_of("a weight", one)
    return part


def _column(mesh: DeviceMesh, rank: int) -> int:
    return int((mesh.mesh == rank).nonzero()[0, 1])
