"""How the ranks of one training run agree: rows of integers in tensor collectives, nothing else.

No pickles cross the network (``all_gather_object`` and its like would run any code that a peer sends), and every rank
sees every row, so that all ranks reach the same conclusion without a second message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slurmft.trainer.host_group import host_group


class Team:
    """The ranks of the default process group, or this process alone when there is none.

    Making one may be a collective, and every method is: all ranks call the same ones in the same order. Exchanged
    tensors lie in main memory and travel over a group for that (``trainer.host_group``), never over NCCL. A rank that
    is gone shows as the process group's own error or timeout.
    """

    def __init__(self) -> None:
        self._joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._joined else 0
        self.world_size = dist.get_world_size() if self._joined else 1
        self._group = host_group() if self._joined and self.world_size > 1 else None

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, in rank order. Rows have equal lengths; each number fits in 64 bits, signed."""
        table = torch.zeros(self.world_size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(list(row), dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(table, group=self._group)  # all other rows are zero here, so the sum is exact
        rows: list[list[int]] = table.tolist()
        return rows

    def least(self, row: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks; costs less than ``exchange``, and the same with any of them."""
        tensor = torch.tensor(list(row), dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        values: list[int] = tensor.tolist()
        return values

    def from_lead(self, row: Sequence[int]) -> list[int]:
        """Rank 0's row, on every rank; the others pass a row of the same length."""
        tensor = torch.tensor(list(row), dtype=torch.int64)
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)
        values: list[int] = tensor.tolist()
        return values

    def bytes_from(self, source: int, payload: bytes, length: int) -> bytes:
        """The ``length`` bytes of rank ``source``, on every rank; what the others pass does not matter."""
        tensor = torch.zeros(length, dtype=torch.uint8)
        if self.rank == source:
            tensor.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if self._group is not None:
            dist.broadcast(tensor, src=source, group=self._group)
        value: bytes = tensor.numpy().tobytes()
        return value

    def send_and_receive(
        self, outgoing: tuple[torch.Tensor, int] | None, incoming: tuple[torch.Tensor, int] | None
    ) -> None:
        """Send one tensor to a rank and receive one from a rank, both at once; return when both have happened.

        One batch: on a group that does one thing after the other, ranks that send first wait for each other in a ring.
        Not a collective. A rank receives another one's tensors in the order in which they were sent.

        Args:
            outgoing, incoming: a tensor in main memory, and the rank that it goes to or comes from.
        """
        operations = [
            dist.P2POp(function, *one, self._group)
            for function, one in ((dist.isend, outgoing), (dist.irecv, incoming))
            if one is not None
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
