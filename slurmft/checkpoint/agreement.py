"""A rank's failure as a few integers, and back: all ranks must get it, and none may wait for a rank that gave up."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from types import TracebackType

from slurmft.checkpoint.format.damage import Damage, Damaged
from slurmft.checkpoint.format.shard_index import image_file, index_file
from slurmft.checkpoint.team import Team
from slurmft.errors import CheckpointError, DirectoryInUse, Fenced, SlurmftError
from slurmft.storage.checkpoint_names import MANIFEST

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
