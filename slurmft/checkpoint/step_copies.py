"""Copies of every N steps in the memory of this node and of its peers (``checkpoint.peer_interval``).

Without a folder and without a commit: a restart finds them where it finds what saves have left in memory. With sharded
weights no other rank has what a lost one had, so this alone keeps the steps since the newest save.

At every N-th boundary the ranks exchange nine integers, once. A copy begins on all of them or on none, when the one
before it has ended everywhere; and the newest one that is whole on all ranks, and with all their peers, stays until
there is another. So the loss of a node in the middle of a copy costs that copy and nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from slurmft.checkpoint.agreement import Turn
from slurmft.checkpoint.catalog import own_generation
from slurmft.checkpoint.notes import Extra
from slurmft.checkpoint.snapshots import Snapshots
from slurmft.checkpoint.state import Trainee, for_save
from slurmft.policy.checkpoints import CopyInterval
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import Identity
from slurmft.trainer.savers import SAVERS, Team
from slurmft.trainer.streams import settle

LOOKS = 20
"""So often a save looks again for the place of a copy that gives way."""

WARN_AFTER = 3
"""So many copies in a row that some peer does not have are told of."""

log = logging.getLogger(__name__)


class _Row(IntEnum):
    """What each rank says at a boundary; all get the least of each."""

    HAS_ENDED = 0
    """Its newest copy is not under way any more."""

    IS_WHOLE = 1
    """And is in its own memory, hashed, and with all its peers."""

    HAS_PLACE = 2
    AGREEING = 3
    """Nanoseconds that it was in the exchange before this one: the rank that came last did not wait for others."""

    COPY = 4
    """Less the nanoseconds of its newest copy: the least is the slowest rank's."""

    TRAINING = 5
    STEP = 6
    NO_STEP = 7
    """Less the step: ranks at different ones are found."""

    IS_PLACE_TO_COPY = 8
    """No gradients wait for an optimizer."""


class StepCopies:
    """One rank's part. ``arm`` it with the objects that are trained; without that it does nothing.

    Args:
        interval: in steps; 0: none at all.
        snapshots: the places in memory, and the writer.
        turn: the numbers of commits, which copies share with saves.
        directory: of the checkpoints.
    """

    def __init__(self, interval: int, snapshots: Snapshots, turn: Turn, directory: Path) -> None:
        self._snapshots, self._turn, self._directory = snapshots, turn, directory
        self._places = snapshots.copies
        is_rehearsal = WorkerSettings.from_environment(os.environ).rehearsal
        self._spacing = CopyInterval(interval) if interval and not is_rehearsal else None
        self._is_agreed: bool | None = None
        self._trainee: Trainee | None = None
        self._extra: Extra | None = None
        self._since = 0
        self._pending: Identity | None = None
        self._is_late = False
        """The one that was due waits for gradients to be used."""

        self._problem = self._off = ""
        """What keeps this rank from copying; and all ranks, for good."""

        self._costs = dict.fromkeys((_Row.AGREEING, _Row.COPY), 0)
        self._boundary_ns = self._waited_ns = 0
        self._gave_way = self._in_a_row = 0
        self.skipped = self.made = 0
        """Boundaries at which a copy was due and none could be made; copies that were whole everywhere."""

        self.beside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Around a copy to a place, which nothing else may take meanwhile."""

        self.reason = "nothing was saved or loaded yet"
        """Why nothing is copied; empty when steps are."""

    def arm(self, trainee: Trainee, extra: Extra | None, reason: str, *, step: int, can: bool) -> None:
        """From now on copy ``trainee``, which has done ``step`` steps and is safe; with a ``reason`` do not.

        A collective. ``reason`` is the same on all ranks; ``can``, whether this one could, need not be.
        """
        if self._spacing is None:
            return
        if not reason and self._is_agreed is None:
            self._is_agreed = bool(Team().least([can])[0])
        if reason or not self._is_agreed:
            self._disarm(reason or self._off or "there is no session, or no memory that outlives it, on some rank")
            return
        if self._trainee is None:
            self._boundary_ns = time.perf_counter_ns()
        self.reason, self._trainee, self._extra, self._since = "", trainee, extra, step
        SAVERS.is_armed = True

    def loaded(self, identity: Identity | None) -> None:
        """The state was replaced, by that of ``identity`` where it lay in memory alone: that is needed until it is
        somewhere else."""
        if self._spacing is not None and self._is_agreed is not False:
            self._places.needed = identity or self._places.needed

    def disarm(self, reason: str) -> None:
        """Copy nothing from now on; all ranks call it alike."""
        if self._spacing is not None:
            self._disarm(reason)

    def at_boundary(self, step: int) -> None:
        """``step`` steps are complete. A collective at every interval of steps.

        Raises:
            RuntimeError: of torch, where another rank has gone.
        """
        if self._trainee is None or self._spacing is None or step <= self._since:
            return
        if not self._is_late and not self._spacing.is_due(step):
            return
        began_ns = time.perf_counter_ns()
        team, ended, is_whole = Team(), self._has_ended(), self._is_whole()
        least = team.least([
            ended, is_whole, self._has_place() if ended else True, self._costs[_Row.AGREEING], -self._costs[_Row.COPY],
            began_ns - self._boundary_ns + self._waited_ns, step, -step, not SAVERS.gradients.are_waiting,
        ])  # fmt: skip
        agreed_ns = time.perf_counter_ns()
        self._costs, self._waited_ns = {_Row.AGREEING: agreed_ns - began_ns, _Row.COPY: 0}, 0
        if least[_Row.STEP] != -least[_Row.NO_STEP]:
            self._end("ranks are at different steps")
        else:
            self._at(step, team, least)
        self._boundary_ns = time.perf_counter_ns()

    def _at(self, step: int, team: Team, least: list[int]) -> None:
        spacing = self._spacing
        assert spacing is not None
        if least[_Row.HAS_ENDED]:
            self._take_in(team, is_whole=bool(least[_Row.IS_WHOLE]))
        share = spacing.note(
            copy=-least[_Row.COPY], agreeing=least[_Row.AGREEING], training=least[_Row.TRAINING]
        )  # fmt: skip
        if share is not None and team.is_lead:
            log.warning("steps are copied every %d steps now: it took %.1f %% of their time", spacing.interval,
                        100 * share)  # fmt: skip
            if SAVERS.listener is not None:
                SAVERS.listener.on_spaced(spacing.interval, share)
        is_due, self._is_late = self._is_late or spacing.is_due(step), not least[_Row.IS_PLACE_TO_COPY]
        if not is_due or self._is_late:
            return
        if not least[_Row.HAS_ENDED]:
            self.skipped += 1
        elif least[_Row.HAS_PLACE] > 0:
            self._copy(step, team)
        elif least[_Row.HAS_PLACE] == 0:
            self.skipped += 1
        else:
            self._end(self._problem or self._places.problem or "some rank has no memory for it, or met an error")

    def _copy(self, step: int, team: Team) -> None:
        """Errors are this rank's alone: without its part the copy counts nowhere."""
        identity = Identity(step, own_generation(), self._turn.next_commit())
        self._pending, self._gave_way = identity, 0
        asked_ns = began_ns = time.perf_counter_ns()
        try:
            if self._trainee is None:
                return
            settle(self._trainee.model.parameters())  # until here the device does the work of the step
            began_ns = time.perf_counter_ns()
            flat = for_save(self._trainee, self._extra, {}, rank=team.rank, world_size=team.world_size)
            with self.beside():
                prepared = self._snapshots.prepare(flat, rank=team.rank, world_size=team.world_size, to="peers")
                self._snapshots.stage(prepared, identity, self._directory / identity.folder_name, to="peers")
        except Exception as error:
            log.exception("step %d is not copied", step)
            if not isinstance(error, OSError) or error.errno != errno.EBUSY:
                self._problem = f"{type(error).__name__}: {error}"
        finally:
            self._waited_ns = began_ns - asked_ns
            self._costs[_Row.COPY] = time.perf_counter_ns() - began_ns

    def give_way(self) -> bool:
        """A save found no place: end the copy that is under way. Whether it is worth while to look once more; the same
        on all ranks, which call it alike."""
        if self._pending is None or self._gave_way == LOOKS:
            return False
        self._gave_way += 1
        self._snapshots.give_up(self._pending)
        return True

    def _has_ended(self) -> bool:
        return self._pending is None or self._places.current != self._pending or self._places.ended is not None

    def _is_whole(self) -> bool:
        ended = self._places.ended
        is_this = self._pending is not None and self._places.current == self._pending
        return is_this and ended is not None and ended.kind == "copied" and not ended.text

    def _has_place(self) -> int:
        """1, or 0 where there may be one later, or -1 where there will be none."""
        try:
            has_place = self._snapshots.free("peers") is not None
        except OSError as error:
            has_place, self._problem = False, str(error)
        return -1 if self._problem or self._places.problem else has_place

    def _take_in(self, team: Team, *, is_whole: bool) -> None:
        """The pending copy has ended on all ranks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if is_whole:
            self._places.needed = pending
            self._snapshots.sends_saves = False  # each of them would take the place of a newer step
            self.made += 1
            self._in_a_row = 0
            if team.is_lead and SAVERS.listener is not None:
                SAVERS.listener.on_copied(pending.step)
            return
        self._in_a_row += 1
        if self._in_a_row == WARN_AFTER and team.is_lead:
            needed = self._places.needed
            log.warning(
                "%d copies of steps in a row were not whole on all nodes: a lost node goes back to %s", WARN_AFTER,
                f"step {needed.step}" if needed is not None else "the newest save",
            )  # fmt: skip

    def _end(self, reason: str) -> None:
        """All ranks have come to it together."""
        log.warning("no steps are copied between saves any more: %s", reason)
        self._is_agreed, self._off = False, reason
        self.reason = reason
        self._disarm(reason)

    def _disarm(self, reason: str) -> None:
        if reason != self.reason:
            log.info("no steps are copied between saves: %s", reason)
        self.reason, self._trainee = reason, None
        self._places.needed, self._snapshots.sends_saves = None, True
