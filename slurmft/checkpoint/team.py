"""How the ranks of one training run agree: rows of integers in tensor collectives, nothing else.

No pickles cross the network (``all_gather_object`` and its like would run whatever a peer sends), and every rank sees
every row, so that all ranks reach the same conclusion without a second message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Team:
    """The ranks of the default process group, or this process alone when there is none.

    Every method is a collective: all ranks call the same ones in the same order. A rank that is gone shows as the
    process group's own error or timeout.
    """

    def __init__(self) -> None:
        self._joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._joined else 0
        self.world_size = dist.get_world_size() if self._joined else 1
        self._device = _collective_device() if self._joined else torch.device("cpu")

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where tensors must lie that are exchanged."""
        return self._device

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, in rank order. Rows have equal lengths; each number fits in 64 bits, signed."""
        table = torch.zeros(self.world_size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(list(row), dtype=torch.int64)
        if self._joined and self.world_size > 1:
            table = table.to(self._device)
            dist.all_reduce(table)  # all other rows are zero here, so the sum is exact
        rows: list[list[int]] = table.cpu().tolist()
        return rows

    def from_lead(self, row: Sequence[int]) -> list[int]:
        """Rank 0's row, on every rank; the others pass a row of the same length."""
        tensor = torch.tensor(list(row), dtype=torch.int64)
        if self._joined and self.world_size > 1:
            tensor = tensor.to(self._device)
            dist.broadcast(tensor, src=0)
        values: list[int] = tensor.cpu().tolist()
        return values


def _collective_device() -> torch.device:
    """Where the default group can reduce: the CPU when it may (gloo), else this rank's current GPU (nccl)."""
    devices = [part.partition(":")[0] for part in str(dist.get_backend_config()).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])
