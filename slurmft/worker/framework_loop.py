"""A training loop that belongs to a framework: its callbacks say where it is, and it saves in its own way.

    loop = FrameworkLoop(session, start=0, until=1000)
    if loop.step_done(step) is not StopAction.NONE:     # all ranks get the same answer at the same step
        ...                                             # let the framework save, now or a little later
    loop.saved(step)
    loop.answer()                                       # raises PlannedStop where that is what the save was for

``session.steps`` is for loops that can be written around; here the framework calls.
"""

from __future__ import annotations

import logging
import time

from slurmft.ipc.pages.heartbeat import NOTHING, Slot, State, StopAction
from slurmft.ipc.pages.section_stack import Phase
from slurmft.policy.timing.stop import END
from slurmft.trainer.savers import SAVERS
from slurmft.worker.saves import SAVE_RETRY_S, SaveFunction
from slurmft.worker.session import PlannedStop, Session

log = logging.getLogger(__name__)


class FrameworkLoop:
    """The steps of one training. All ranks call the same methods in the same order, with the same steps."""

    pending: StopAction
    """The agreed action that still needs a save."""

    def __init__(self, session: Session, *, start: int, until: int) -> None:
        """Training goes on after ``start`` complete steps, which are on disk, or none.

        Raises:
            PlannedStop: the run was asked to stop before its first step.
        """
        self._session, self._page = session, session._page
        self._step = self._start = session._start = session._step = start
        self._is_busy, self._tick = False, session._tick(start)
        self.until, self.pending = until, StopAction.NONE
        page = self._page
        page[Slot.RESUMED] = page[Slot.STEP] = start
        page[Slot.UNTIL] = until
        page[Slot.SAVED] = NOTHING
        self.training()
        session._end_rehearsal(start + 1, start, until)
        self._ask(session._tick(start))
        self.answer()

    @property
    def has_pending(self) -> bool:
        """Whether an agreed action still needs a save."""
        return self.pending is not StopAction.NONE

    @property
    def is_busy(self) -> bool:
        """Whether the last thing heard of was an evaluation or a save."""
        return self._is_busy

    def step_done(self, step: int) -> StopAction:
        """``step`` steps are complete: what all ranks are to do now; it stays ``pending`` until ``answer``.

        There is no stop after the last step: the training ends by itself. A stop that is asked for during an evaluation
        comes after the step that follows it.
        """
        session, page = self._session, self._page
        session._step = self._step = step
        session.stragglers.end_step()
        session._signal.chain_again()
        session._note_span()
        page[Slot.STEP] = step
        page.touch(Slot.PROGRESS_AT)
        if step == self._start + 1:
            page.touch(Slot.FIRST_STEP_AT)
        session._sections.phase(Phase.STEP)  # anew: the limit is of one step
        session.stragglers.begin_step()
        if page[Slot.FAULT] != session._faults.seen:
            session._faults.strike(step)
        session._end_rehearsal(step + 1, self._start, self.until)  # after the first: a framework may save soon
        if step >= self.until:
            page[Slot.TICK] = END
            return self.pending
        return self._ask(session._tick(step))

    def evaluating(self) -> None:
        """An evaluation begins, or goes on to its next batch: each may take as long as the section's limit."""
        self._is_busy = True
        self._page[Slot.STATE] = State.EVALUATING
        self._session._sections.phase(Phase.EVALUATION)

    def saving(self) -> None:
        """The framework is about to save."""
        self._is_busy = True
        self._page[Slot.STATE], self._page[Slot.SAVE_BEGAN_NS] = State.SAVING, time.monotonic_ns()
        self._session._sections.phase(Phase.CHECKPOINTING)

    def training(self) -> None:
        """Neither an evaluation nor a save is under way."""
        self._is_busy = False
        self._page[Slot.STATE], self._page[Slot.SAVE_BEGAN_NS] = State.TRAINING, 0
        self._session._sections.phase(Phase.STEP)

    def saved(self, step: int) -> None:
        """The state after ``step`` steps is on disk, that of every rank."""
        began_ns = self._page[Slot.SAVE_BEGAN_NS]
        self.training()
        self._session._saves.note_saved(step, (time.monotonic_ns() - began_ns) / 1e9 if began_ns else 0.0)

    def answer(self) -> None:
        """What is ``pending`` has been done; where nothing is, this does nothing.

        Raises:
            PlannedStop: the run is to end here.
        """
        if self.pending is StopAction.NONE:
            return
        action, self.pending = self.pending, StopAction.NONE
        self._session._agreement.answered(self._tick)
        if action is StopAction.SAVE_AND_STOP:
            self._page[Slot.STATE] = State.STOPPED
            raise PlannedStop(self._step)
        self._session._safe_at_ns = time.monotonic_ns()

    def saves_with(self, save: SaveFunction) -> None:
        """``save(step)`` saves through a checkpoint manager, on every rank, for ``save`` and ``save_last``."""
        self._session._saves.begin(self._start, save)

    def save(self, *, is_due: bool) -> None:
        """Save between two steps, where that is due or pending. What is only due may become durable later, or fail.

        Raises:
            PlannedStop: the run is to end here; its state is durable.
            CheckpointError: it failed for a reason that does not pass with time.
        """
        saves, action = self._session._saves, self.pending
        self.training()
        if action is StopAction.NONE:
            if is_due:
                saves.now(self._step, is_periodic=True)
            return
        while not saves.now(self._step) and action is StopAction.SAVE_AND_STOP:  # until the time of the stop is up
            time.sleep(SAVE_RETRY_S)
        self.answer()

    def save_last(self, *, is_due: bool) -> None:
        """After the last step: return when its state is durable, or where none is due, what was saved before.

        Raises:
            CheckpointError: it failed for a reason that does not pass with time.
        """
        self.training()
        while is_due and not self._session._saves.now(self._step):
            time.sleep(SAVE_RETRY_S)
        if not is_due:
            SAVERS.wait()

    def end(self) -> None:
        """The training is over; later code belongs to no step."""
        self._session._sections.phase(Phase.NONE)
        self._page[Slot.TICK], self._page[Slot.STATE] = END, State.FINISHED

    def _ask(self, tick: int) -> StopAction:
        action = self._session._agreement.at(tick)
        if action is StopAction.NONE:
            self._session._safe_at_ns = time.monotonic_ns()
        else:
            self.pending, self._tick = action, tick
        return self.pending
