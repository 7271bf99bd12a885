"""A rank's failure as a few integers, and back: all ranks must get it, and none may wait for a rank that gave up."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from slurmft.checkpoint.image_file import Damage, Damaged, image_file, index_file
from slurmft.errors import CheckpointError, DirectoryInUse, Fenced, SlurmftError
from slurmft.storage.checkpoint_names import MANIFEST
from slurmft.trainer.savers import host_group

# --- How the ranks of one training run agree: rows of integers in tensor collectives, nothing else ---
# No pickles cross the network (``all_gather_object`` and its like would run any code that a peer sends), and every rank
# sees every row, so that all ranks reach the same conclusion without a second message.


class Team:
    """The ranks of the default process group, or this process alone when there is none.

    Making one may be a collective, and every method is: all ranks call the same ones in the same order. Exchanged
    tensors lie in main memory and travel over a group for that (``trainer.savers``), never over NCCL. A rank that
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


# --- agreement ---

log = logging.getLogger(__name__)

_OTHER, FENCED, _IN_USE = -1, -2, -3
_SHARD_FILE = re.compile(r"__(\d+)_0\.(distcp|json)")


class Guard:
    """Runs one rank's part of a collective operation and holds its error back until every rank knows of it.

    Without it, a rank whose disk is full would leave, and the others would wait for it until their timeout.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True

    @property
    def code(self) -> int:
        """0 for success, the errno of an operating system's error, or a negative code."""
        if self.error is None:
            return 0
        if isinstance(self.error, Fenced):
            return FENCED
        if isinstance(self.error, DirectoryInUse):
            return _IN_USE
        return (isinstance(self.error, OSError) and self.error.errno) or _OTHER

    @property
    def damage_row(self) -> list[int]:
        """The damage that a failed read found, and its file."""
        if self.error is None:
            return [Damage.NONE, 0]
        if not isinstance(self.error, Damaged):
            return [_OTHER, 0]
        return [self.error.damage, _file_number(self.error.file_name)]


def failure(what: str, codes: Sequence[int], team: Team, guard: Guard) -> SlurmftError:
    """The error that every rank raises; the rank that failed keeps its own as the cause.

    Args:
        codes: one per rank, starting with rank 0; 0 where all went well.
    """
    if FENCED in codes:
        return guard.error if isinstance(guard.error, Fenced) else Fenced(f"{what}: a newer attempt owns the run")
    if _IN_USE in codes:
        mine = guard.error if isinstance(guard.error, DirectoryInUse) else None
        return mine or DirectoryInUse(f"{what}: on another rank a second manager saves in the same directory")
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    shown = "; ".join(f"rank {rank}: {_reason(rank, code, team, guard)}" for rank, code in failed[:8])
    if len(failed) > 8:
        shown += f"; and {len(failed) - 8} more ranks"
    if guard.error is not None:
        log.error("rank %d: %s", team.rank, what, exc_info=guard.error)
    error = CheckpointError(f"{what}: {shown}", hint="older checkpoints are untouched")
    error.__cause__ = guard.error
    error.errno = next((code for code in codes if code > 0), 0)
    return error


def damage_report(rows: Sequence[Sequence[int]], team: Team, guard: Guard) -> str:
    """Why the ranks cannot use a checkpoint, in one line that is the same on every rank."""
    found: dict[str, None] = {}  # a set that keeps the order
    for damage, number, *_ in rows:
        if damage:
            found.setdefault(f"{_file_name(number)} {Damage(damage).text}")
    if guard.error is not None:
        log.warning("rank %d: %s", team.rank, guard.error)
    return "; ".join(found)


def _file_number(file_name: str) -> int:
    match = _SHARD_FILE.fullmatch(file_name)
    return 1 + 2 * int(match[1]) + (match[2] == "json") if match else 0


def _file_name(number: int) -> str:
    if not number:
        return MANIFEST
    shard, is_index = divmod(number - 1, 2)
    return index_file(shard) if is_index else image_file(shard)


def _reason(rank: int, code: int, team: Team, guard: Guard) -> str:
    if code > 0:
        return os.strerror(code)
    if rank == team.rank and guard.error is not None:
        return f"{type(guard.error).__name__}: {guard.error}"
    return "an error that its log shows"
