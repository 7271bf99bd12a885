"""The rows of integers in which ranks agree on a save, and one rank's memory of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from slurmft.checkpoint.agreement import FENCED, Guard
from slurmft.checkpoint.staging.lead_note import Extra
from slurmft.checkpoint.staging.snapshots import LaidOut
from slurmft.checkpoint.team import Team
from slurmft.checkpoint.writer.write_requests import Standing
from slurmft.storage.checkpoint_names import Identity

_UNKNOWN_ERROR = -1


class Row(IntEnum):
    """The numbers of a rank's row, at the beginning of a save."""

    CODE = 0
    """0, or why this rank is not ready (``agreement.Guard``)."""

    STEP = 1
    FINGERPRINT = 2
    """Of the layout: equal on all ranks that save the same kind of state."""

    IS_BUSY = 3
    """Both places of this rank are in use."""

    COMMIT = 4
    """Rank 0's: the number of the commit that this is to be."""

    COMMITTED_STEP = 5
    COMMITTED_NS = 6
    """Rank 0's: which step was committed last, and how long that took; zeros before."""

    EXTRA = 7
    """Rank 0's: ``OfLead``; others may have been given none."""


class OfLead(IntEnum):
    """The ``extra`` of rank 0."""

    NONE = 0
    FIXED = 1
    """Values, which may be others at the end of a later step."""

    FUNCTION = 2

    @classmethod
    def of(cls, extra: object) -> OfLead:
        return cls.FUNCTION if callable(extra) else cls.FIXED if extra else cls.NONE

    def to_note(self, extra: object) -> tuple[Extra | None, str]:
        """What is noted after every step on a rank that was given ``extra`` itself, or why nothing can be."""
        if self is OfLead.FIXED:
            return None, "extra= is no function, so its value between two saves is unknown"
        if self is OfLead.NONE:
            return None, ""
        return (extra if callable(extra) else _never_called), ""


def _never_called() -> Mapping[str, Any]:
    """Stands for rank 0's function on ranks that were given none."""
    return {}


class Turn:
    """This rank's record of the saves of one manager; agreed values are alike on all ranks."""

    def __init__(self) -> None:
        self.commit = 0
        """Of the newest save that was agreed on."""

        self.awaited: Identity | None = None
        """The newest save, until ``wait`` has reported its result."""

        self.extra = OfLead.NONE
        """Of the newest save or load; each rank's own until they have agreed."""

        self.is_begun = self._has_agreed = False
        self._lock = threading.Lock()
        self._committed = (0, 0)
        self._told: set[int] = set()
        self._failures = 0

    def begin(self, newest_commit: int) -> None:
        """Commits are counted on from here."""
        self.commit, self.is_begun = max(self.commit, newest_commit), True

    def begin_again(self, newest_commit: int) -> None:
        """The same behind a load, alike on all ranks.

        Where this manager has saved or loaded before, one number is left out: a step that is kept just in time after a
        load must not get the name of the same step before it, whose parts may lie with other ranks still.
        """
        self.begin(max(self.commit, newest_commit) + 1 if self._has_agreed else newest_commit)
        self._has_agreed = True

    def next_commit(self) -> int:
        """The number of a copy of a step, which every rank begins at the same place between two saves."""
        self.commit += 1
        return self.commit

    def exchange(self, team: Team, guard: Guard, step: int, prepared: LaidOut | None) -> list[list[int]]:
        """Each rank's ``Row``; a collective. The commit that rank 0 names is this turn's from now on."""
        row = [0] * len(Row)
        row[Row.CODE] = guard.code
        if guard.error is None and prepared is not None:
            row[Row.STEP], row[Row.FINGERPRINT] = step, prepared.layout.fingerprint
            row[Row.IS_BUSY] = prepared.place is None
        if team.is_lead:
            row[Row.COMMIT] = self.commit + 1
            row[Row.COMMITTED_STEP], row[Row.COMMITTED_NS] = self._committed
            row[Row.EXTRA] = self.extra
        rows = team.exchange(row)
        if not any(row[Row.CODE] or row[Row.IS_BUSY] for row in rows):
            self.commit, self.is_begun, self._has_agreed = rows[0][Row.COMMIT], True, True
            self.extra = OfLead(rows[0][Row.EXTRA])
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
            return [0, _UNKNOWN_ERROR, 0]
        if standing.is_fenced:
            return [0, FENCED, 0]
        if standing.problem:
            return [0, standing.errno or _UNKNOWN_ERROR, 0]
        if team.is_lead and standing.is_committed:
            return [1, 0, self._committed[1]]
        return [0, 0, 0]


def mismatch(rows: Sequence[Sequence[int]]) -> str:
    """Which rank saves something else than rank 0 does; empty where all save the same."""
    first = rows[0]
    for rank, row in enumerate(rows):
        if row[Row.STEP] != first[Row.STEP]:
            return f"rank {rank} saves step {row[Row.STEP]}, and rank 0 step {first[Row.STEP]}"
        if row[Row.FINGERPRINT] != first[Row.FINGERPRINT]:
            return f"rank {rank} has another model or optimizer than rank 0"
    return ""
