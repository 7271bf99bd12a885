"""How the ranks of one training run agree: on a save, its end, a load, and on a failure of one of them.

Rows of integers in tensor collectives, and nothing else. No pickles cross the network (``all_gather_object`` and its
like would run any code that a peer sends), and every rank sees every row, so that all ranks reach the same conclusion
without a second message. A failure is a few integers, and back: all ranks must get it, and none may wait for one that
gave up.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any

from slurmft.checkpoint.image import LISTED, Layout
from slurmft.checkpoint.image_file import Damage, Damaged, image_file, index_file
from slurmft.checkpoint.write_requests import Standing
from slurmft.errors import CheckpointError, DirectoryInUse, Fenced, SlurmftError, UsageError
from slurmft.storage.checkpoint_names import MANIFEST, Identity
from slurmft.trainer.savers import Team

# --- A failure of one rank, known to all ---

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


# --- The rows in which they agree on a save, and one rank's memory of them ---

MAX_UNCOMMITTED = 2
"""Saves of rank 0 that have not ended: one may be written while another one is committed."""


class Row(IntEnum):
    """The numbers of a rank's row, at the beginning of a save."""

    CODE = 0
    """0, or why this rank is not ready (``Guard``)."""

    STEP = 1
    FINGERPRINT = 2
    """Of the layout: equal on all ranks that save the same kind of state."""

    IS_BUSY = 3
    """This rank has no place for it: two older saves are under way, or the copy of a step takes one."""

    OLDER = 4
    """How many older ones are under way on this rank."""

    WAITING = 5
    """The commit of the one that waits until another one is written; 0 where none does."""

    MUST_GO_FIRST = 6
    """Rank 0's: the newest of the older saves has to give way to this one, even where it is being written."""

    COMMIT = 7
    """Rank 0's: the number of the commit that this is to be."""

    COMMITTED_STEP = 8
    COMMITTED_NS = 9
    """Rank 0's: which step was committed last, and how long that took; zeros before."""

    EXTRA = 10
    """Rank 0's: ``LeadExtra``; others may have been given none."""


class LeadExtra(IntEnum):
    """The ``extra`` of rank 0."""

    NONE = 0
    FIXED = 1
    """Values, which may be others at the end of a later step."""

    FUNCTION = 2

    @classmethod
    def of(cls, extra: object) -> LeadExtra:
        return cls.FUNCTION if callable(extra) else cls.FIXED if extra else cls.NONE

    def to_note(self, extra: object) -> tuple[Callable[[], Mapping[str, Any]] | None, str]:
        """What is noted after every step on a rank that was given ``extra`` itself, or why nothing can be."""
        if self is LeadExtra.FIXED:
            return None, "extra= is no function, so its value between two saves is unknown"
        if self is LeadExtra.NONE:
            return None, ""
        return (extra if callable(extra) else dict), ""  # on ranks that were given none it is never called


class Turn:
    """This rank's record of the saves of one manager; agreed values are alike on all ranks."""

    def __init__(self) -> None:
        self.commit = 0
        """Of the newest save that was agreed on."""

        self.awaited: Identity | None = None
        """The newest save, until ``wait`` has reported its result."""

        self._before: Identity | None = None
        """The one before it, which is the newest again where that one gives way."""

        self.extra = LeadExtra.NONE
        """Of the newest save or load; each rank's own until they have agreed."""

        self._has_agreed = False
        self._lock = threading.Lock()
        self._committed = (0, 0)
        self._told: set[int] = set()
        self._failures = 0

    def begin(self, newest_commit: int) -> None:
        """Commits are counted on from here."""
        self.commit = max(self.commit, newest_commit)

    def begin_again(self, newest_commit: int) -> None:
        """The same behind a load, alike on all ranks.

        Where this manager has saved or loaded before, one number is left out: a step that is kept just in time after a
        load must not get the name of the same step before it, whose parts may lie with other ranks still.
        """
        self.begin(max(self.commit, newest_commit) + 1 if self._has_agreed else newest_commit)
        self._has_agreed = True
        with self._lock:  # a step that is done again is saved again
            self._committed, self._told = (0, 0), set()

    def next_commit(self) -> int:
        """The number of a copy of a step, which every rank begins at the same place between two saves."""
        self.commit += 1
        return self.commit

    def begins(self, save: Identity) -> None:
        """It is the newest from now on."""
        self._before, self.awaited = self.awaited, save

    def has_ended(self) -> None:
        """The result of the newest save is known, and so is what became of those before it."""
        self._before = self.awaited = None

    def gives_way(self, rows: Sequence[Sequence[int]]) -> Identity | None:
        """The save that the next one takes the place of, alike on all ranks, each of which gives it up; or None.

        It is the newer one of two. Where some rank has begun to write it, that would be lost: then it gives way only to
        a save that must go first.
        """
        newest = self.awaited
        if newest is None or not two_are_under_way(rows):
            return None
        if not rows[0][Row.MUST_GO_FIRST] and any(row[Row.WAITING] != newest.commit for row in rows):
            return None
        self.awaited, self._before = self._before, None
        return newest

    def exchange(self, team: Team, own: Mapping[Row, int], *, must_go_first: bool) -> list[list[int]]:
        """Each rank's ``Row``, of which this one has the numbers ``own``; a collective. The commit that rank 0 names is
        this turn's from now on."""
        row = [own.get(number, 0) for number in Row]
        if team.is_lead:
            row[Row.MUST_GO_FIRST] = must_go_first
            row[Row.COMMIT] = self.commit + 1
            row[Row.COMMITTED_STEP], row[Row.COMMITTED_NS] = self._committed
            row[Row.EXTRA] = self.extra
        rows = team.exchange(row)
        if not any(row[Row.CODE] or row[Row.IS_BUSY] for row in rows):
            self.commit, self._has_agreed = rows[0][Row.COMMIT], True
            self.extra = LeadExtra(rows[0][Row.EXTRA])
        return rows

    def committed_here(self, step: int, seconds: float) -> None:
        """Rank 0's writer has committed a checkpoint."""
        with self._lock:
            self._committed, self._failures = (step, int(seconds * 1e9)), 0

    def failed_here(self) -> int:
        """How many saves of this rank have failed in a row, with this one."""
        with self._lock:
            self._failures += 1
            return self._failures

    def is_news(self, step: int) -> bool:
        """Whether the session does not know yet that ``step`` is durable."""
        with self._lock:
            if step in self._told or not step:
                return False
            self._told = {*sorted(self._told)[-16:], step}
            return True

    def progress_row(self, team: Team, standing: Standing | None) -> list[int]:
        """While ranks wait for a save: is it done here, has it failed here, and how long it took."""
        if standing is None:
            return [0, _OTHER, 0]
        if standing.is_fenced:
            return [0, FENCED, 0]
        if standing.problem:
            return [0, standing.errno or _OTHER, 0]
        if team.is_lead and standing.is_committed:
            return [1, 0, self._committed[1]]
        return [0, 0, 0]


def two_are_under_way(rows: Sequence[Sequence[int]]) -> bool:
    """On some rank, which has no place for a save before one of them has ended."""
    return any(row[Row.OLDER] >= MAX_UNCOMMITTED for row in rows)


SAVED_ONCE = "and a tensor that is no DTensor is saved once for all"
OWN_STATE = "state of each rank's own is saved where it is a DTensor (fully_shard, DTensor.from_local)"


def refuse_unlike(team: Team, rows: Sequence[Sequence[int]], layout: Layout, what: str) -> None:
    """A collective, which costs something only where ranks save different things.

    Raises:
        CheckpointError: a rank saves another step than rank 0.
        UsageError: a tensor is not on all ranks, or not of one shape and type.
    """
    lead = rows[0]
    for rank, row in enumerate(rows):
        if row[Row.STEP] != lead[Row.STEP]:
            raise CheckpointError(
                f"{what}: rank {rank} saves step {row[Row.STEP]}, and rank 0 step {lead[Row.STEP]}",
                hint="all ranks save the same step of the same model",
            )
        if row[Row.FINGERPRINT] != lead[Row.FINGERPRINT]:
            raise UsageError(f"{what}: {_first_unlike(team, rank, layout)}, {SAVED_ONCE}", hint=OWN_STATE)


def _first_unlike(team: Team, odd: int, layout: Layout) -> str:
    own = layout.listing
    lengths = [length for (length,) in team.exchange([len(own)])]
    lead, other = [team.bytes_from(rank, own, lengths[rank]).decode().split("\n") for rank in (0, odd)]
    for rank, has, lacks in ((odd, lead, set(other)), (0, other, set(lead))):
        for line in has:
            if line not in lacks:
                return f"rank {rank} has no {line.partition(LISTED)[0]} of the same shape and type"
    return f"rank {odd} has its tensors in another order than rank 0"
