"""The slow path of the re-run state machine: the exchange between all ranks, and the outcome.

Nothing here runs while all is well. Every method is a collective: all ranks call it, and all get the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmft.policy.nodes.evidence import Suspect
from slurmft.policy.nodes.rerun_settings import RerunSettings
from slurmft.policy.nodes.reruns import MAX_ROUNDS_IN_PLACE, Outcome, Phase, Seen, after_rerun, on_suspects
from slurmft.policy.verdicts.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED
from slurmft.worker.rerun.agreement import Ranks
from slurmft.worker.rerun.record import Pending, Rejection, suspects_of
from slurmft.worker.rerun.reports import Departure, describe, report

log = logging.getLogger(__name__)

MAX_REJECTIONS = 256
"""Ranks whose results are remembered, in every rank's checkpoint. When more of them reject one, as all do after a
software error, these show as much as all would."""

SPOILED = "the weights themselves are not finite: an earlier step spoiled them; go on from an older checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One rank's report of a rerun."""

    seen: Seen
    doubt: str
    """Why its rerun proves nothing; empty when it does."""

    is_finite: bool
    """Whether the weights are."""

    anew: Rejection | None = None
    """Another result than the first time."""


class Proceedings:
    """One iteration with a rejected result, from the first rejection to its verdict."""

    pending: Pending | None
    """The iteration that waits for a rerun on other hardware; the same on all ranks."""

    departure: Departure | None
    """How this attempt ends, once it is known."""

    def __init__(self, settings: RerunSettings, ranks: Ranks, hardware: Suspect) -> None:
        self._settings, self._ranks, self._own_hardware = settings, ranks, hardware
        self.pending = self.departure = None
        self._hardware: Sequence[Suspect] = ()
        self._rejections: tuple[Rejection, ...] = ()
        self._iteration = self._rounds = 0

    @property
    def own(self) -> Rejection | None:
        """This rank's rejection of the case."""
        return next((one for one in self._rejections if one.rank == self._ranks.rank), None)

    def open(self, own: Rejection | None, iteration: int) -> bool:
        """Whether any rank has rejected a result; then the iteration is to be run again in place."""
        rows = self._ranks.exchange((self._own_hardware, own))
        self._hardware = [hardware for hardware, _ in rows]
        self._iteration, self._rounds = iteration, 1
        self._rejections = self._located([rejection for _, rejection in rows])
        if self._rejections and self._ranks.rank == 0:
            log.warning("%s; running it again in place", describe(self._rejections, iteration))
        return bool(self._rejections)

    def reopen(self, iteration: int) -> Departure | None:
        """After a restart: None when the pending case can be judged here, or nothing is pending any more."""
        pending = self.pending
        if pending is None:
            return None
        if pending.iteration != iteration:
            log.warning("the rerun of step %d is dropped: step %d begins", pending.iteration, iteration)
            self.pending = None
            return None
        self._iteration, self._rejections, self._rounds = iteration, pending.rejections, 1
        if pending.world_size != self._ranks.size:
            reason = f"{pending.world_size} ranks rejected it, and {self._ranks.size} go on"
            return self._inconclusive(reason)
        self._hardware = self._ranks.exchange(self._own_hardware)
        landed = [
            one for rejection in pending.rejections
            for one in on_suspects(rejection.on(self._hardware).suspects, rejection.suspects)
        ]  # fmt: skip
        if not landed:
            return None
        where = ", ".join(dict.fromkeys(one.node for one in landed[:8]))
        if pending.attempts >= self._settings.max_attempts:
            return self._inconclusive(f"{pending.attempts} placements asked for, and again on suspects: {where}")
        self.pending = replace(pending, attempts=pending.attempts + 1)
        return self._elsewhere(f"landed on suspects again: {where}")

    def conclude(self, phase: Phase, row: Row) -> tuple[Departure | None, bool]:
        """After a rerun: how to leave, if so, and whether to run the iteration again in place."""
        rows: list[Row] = self._ranks.exchange(row)
        seen = [Seen.UNKNOWN if one.doubt else one.seen for one in rows]
        anew = [one.anew for one in rows]
        outcome = after_rerun(phase, seen, rejected_others=any(anew))
        if outcome is Outcome.INCONCLUSIVE:
            doubt = next((one.doubt for one in rows if one.doubt), "it came out otherwise and was rejected again")
            return self._inconclusive(doubt), False
        if outcome in (Outcome.UNDECIDED, Outcome.CORRECT) and not all(one.is_finite for one in rows):
            return self._inconclusive(SPOILED), False
        for rejection in self._rejections:
            if rejection.rank == self._ranks.rank:
                own = seen[rejection.rank]
                report(_of_one(phase, own), rejection, self._iteration, own)
        if outcome is Outcome.AGAIN:
            return self._take_up(anew)
        if outcome is Outcome.UNDECIDED:
            self._rejections = tuple(
                one for one in self._rejections if _of_one(phase, seen[one.rank]) is Outcome.UNDECIDED
            )
            return self._ask_elsewhere(_why_elsewhere({seen[one.rank] for one in self._rejections})), False
        self.pending = None if outcome is not Outcome.CORRECT else self.pending
        return self._after_verdict(outcome), False

    def state_dict(self) -> dict[str, Any]:
        """The pending iteration, for the checkpoint."""
        return {"pending": None if self.pending is None else self.pending.plain()}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take up the pending iteration."""
        pending = state["pending"]
        self.pending = None if pending is None else Pending.from_plain(pending)

    def _located(self, rejections: Sequence[Rejection | None]) -> tuple[Rejection, ...]:
        return tuple(one.on(self._hardware) for one in rejections if one is not None)[:MAX_REJECTIONS]

    @property
    def _has_say(self) -> bool:
        return self._ranks.rank == 0 or self.own is not None

    def _take_up(self, anew: Sequence[Rejection | None]) -> tuple[Departure | None, bool]:
        """The first rejection is explained; go on with the one of the rerun."""
        self.pending = None
        self._rejections = self._located(anew)
        self._rounds += 1
        if self._rounds > MAX_ROUNDS_IN_PLACE:
            return self._ask_elsewhere("each rerun rejects something else"), False
        return None, True

    def _after_verdict(self, outcome: Outcome) -> Departure | None:
        what = f"{describe(self._rejections, self._iteration)}: {outcome}"
        if self._ranks.rank == 0:
            log.warning("verdict: %s", what)
        if outcome is Outcome.CORRECT or (outcome is Outcome.PERSISTENT and self._settings.exit_on_persistent):
            return Departure(
                exit_code=EXIT_VALIDATION_FAILED, should_checkpoint=outcome is Outcome.PERSISTENT, outcome=outcome,
                message=what, suspects=suspects_of(self._rejections) if outcome is Outcome.PERSISTENT else (),
                has_say=self._has_say,
            )  # fmt: skip
        return None

    def _ask_elsewhere(self, why: str) -> Departure:
        self.pending = Pending(
            iteration=self._iteration, attempts=1, world_size=self._ranks.size, rejections=self._rejections
        )
        return self._elsewhere(why)

    def _elsewhere(self, why: str) -> Departure:
        attempts = self.pending.attempts if self.pending is not None else 1
        message = (
            f"{describe(self._rejections, self._iteration)}: {why}; to be run again on other hardware "
            f"(placement {attempts} of {self._settings.max_attempts})"
        )
        if self._ranks.rank == 0:
            log.warning("verdict: %s", message)
        return Departure(
            exit_code=EXIT_RERUN_ELSEWHERE, should_checkpoint=True, outcome=Outcome.UNDECIDED, message=message,
            suspects=suspects_of(self._rejections), has_say=self._has_say,
        )  # fmt: skip

    def _inconclusive(self, why: str) -> Departure:
        message = f"{describe(self._rejections, self._iteration)}: inconclusive: {why}"
        if self._ranks.rank == 0:
            log.error("verdict: %s", message)
        return Departure(
            exit_code=EXIT_VALIDATION_FAILED, should_checkpoint=False, outcome=Outcome.INCONCLUSIVE, message=message,
            suspects=suspects_of(self._rejections), has_say=self._has_say,
        )  # fmt: skip


def _why_elsewhere(seen: Collection[Seen]) -> str:
    if Seen.DIFFERENT_REJECTED not in seen:
        return "reproduced in place"
    if Seen.REPRODUCED not in seen:
        return "different when run again in place, and rejected again"
    return "reproduced in place on some ranks, different and rejected again on others"


def _of_one(phase: Phase, seen: Seen) -> Outcome:
    """The outcome for the hardware of one rank that had rejected a result."""
    if seen is Seen.DIFFERENT:
        return Outcome.TRANSIENT if phase is Phase.IN_PLACE else Outcome.PERSISTENT
    return Outcome.UNDECIDED if phase is Phase.IN_PLACE else Outcome.CORRECT
