"""The claim to act on the end of an attempt: supervisor, guardian and cron may all try (design, ordering rule 2)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from slurmft.storage.patience import write_state
from slurmft.system import processes
from slurmft.system.files import read_json

SUPERVISOR = "supervisor on "
"""Prefix of the name of an actor inside the job, which ends with the job."""

CLAIM_LEASE_S = 180.0
"""An older claim without an outcome belongs to a process that died on another host."""


class EndingClaim:
    """The right to act on the end of one (job, restart).

    It is held by one living process until it is settled with an outcome, which is for good, or given back.
    """

    def __init__(self, path: Path, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self.path, self._lock = path, lock

    def take(self, actor: str, *, instead_of: str = "") -> bool:
        """Whether the caller has the right to act.

        Args:
            instead_of: beginning of the name of an actor that is known to be gone; its claim without an outcome is
                void.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        with self._lock():
            claim = read_json(self.path)
            free = claim is not None and claim.get("outcome") is None and _is_of(claim, instead_of)
            if _is_taken(claim) and not free:
                return False
            me = processes.me()
            mine = {"actor": actor, "at": time.time(), "host": me.host, "pid": me.pid, "birth": me.birth}
            write_state(self.path, {**mine, "outcome": None})
            return True

    def outcome(self) -> str | None:
        """The outcome; None while it is not settled.

        Raises:
            StorageError: the run folder cannot be read.
        """
        return (read_json(self.path) or {}).get("outcome")

    def settle(self, outcome: str) -> None:
        """Mark it as acted on, for good.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        write_state(self.path, {**(read_json(self.path) or {}), "outcome": outcome})

    def give_back(self) -> None:
        """Acting failed, or the settled action did not happen; another process may try."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _is_taken(claim: Mapping[str, Any] | None) -> bool:
    if claim is None:
        return False
    if claim.get("outcome") is not None:
        return True
    me = processes.me()
    if claim.get("host") == me.host:
        pid = claim.get("pid")
        return isinstance(pid, int) and pid != me.pid and processes.lives(pid, str(claim.get("birth", "")))
    at = claim.get("at")
    return isinstance(at, int | float) and abs(time.time() - at) < CLAIM_LEASE_S


def _is_of(claim: Mapping[str, Any], actor: str) -> bool:
    return bool(actor) and str(claim.get("actor", "")).startswith(actor)
