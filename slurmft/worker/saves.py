"""How a session saves: by the trainer's own function, reported to the agent, retried where waiting may help."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from slurmft.errors import CheckpointError
from slurmft.ipc.pages.heartbeat import NOTHING, Page, Slot, State
from slurmft.ipc.pages.section_stack import Phase, SectionStack
from slurmft.storage.patience import PASSING
from slurmft.trainer.savers import SAVERS, Outcome
from slurmft.worker.digests.replicas import ReplicaDigests
from slurmft.worker.pacing import SavePace

SaveFunction = Callable[[int], Any]

SAVE_RETRY_S = 1.0

log = logging.getLogger(__name__)


class Saves:
    """The saves of one session. All ranks call each method alike, and get the same result."""

    def __init__(self, page: Page, sections: SectionStack, *, is_lead: bool, digests: ReplicaDigests) -> None:
        self._page, self._sections, self._is_lead, self._digests = page, sections, is_lead, digests
        self._listener = SAVERS.listener = PageListener(page)
        self._staged = NOTHING
        self._failures_then = 0
        self.stalled_ns = 0
        """How long saves have stopped the training thread, in all."""

        self.function: SaveFunction | None = None
        """The trainer's own."""

        self.pace: SavePace | None = None
        """When to save periodically; is notified of every save."""

    @property
    def is_writing(self) -> bool:
        """Whether the newest save that was staged is neither durable nor given up, as far as this rank knows."""
        page = self._page
        return self._staged > page[Slot.SAVED] and page[Slot.SAVE_FAILURES] == self._failures_then

    def now(self, step: int, *, is_periodic: bool = False) -> bool:
        """Whether all ranks have saved; a periodic save may become durable later, any other one is when this returns.

        Raises:
            CheckpointError: it failed for a reason that does not pass with time.
        """
        if self.function is None:
            raise RuntimeError("session.evaluating() needs session.steps() around it: only that knows how to save")
        page, began_ns = self._page, time.monotonic_ns()
        state, phase = page[Slot.STATE], self._sections.current_phase
        page[Slot.STATE], page[Slot.SAVE_BEGAN_NS] = State.SAVING, began_ns
        self._sections.phase(Phase.CHECKPOINTING)
        SAVERS.save_begins(urgent=not is_periodic)
        try:
            self._digests.at_save(step)
            self.function(step)
            if not is_periodic:
                SAVERS.wait()
                self._digests.flush()
        except CheckpointError as error:
            page[Slot.STATE] = state
            self._failed(step, error)
            return self._ended(step, began_ns, worked=False)
        finally:
            SAVERS.save_ended()
            page[Slot.SAVE_BEGAN_NS] = 0
            self.stalled_ns += time.monotonic_ns() - began_ns
            self._sections.phase(phase)
        page[Slot.STATE] = state
        if SAVERS.outcome is Outcome.DONE:
            took_s = (time.monotonic_ns() - began_ns) / 1e9
            self._listener.on_saved(step, took_s, for_all=False)
            if self._is_lead:
                log.info("saved step %d in %.2f s", step, took_s)
        elif SAVERS.outcome is Outcome.STAGED:
            self._staged, self._failures_then = step, page[Slot.SAVE_FAILURES]
        return self._ended(step, began_ns, worked=SAVERS.outcome is not Outcome.SKIPPED)

    def note_saved(self, step: int, seconds: float) -> None:
        """A framework has saved in its own way: on disk, the parts of all ranks, ``seconds`` after it began."""
        self._listener.on_saved(step, seconds, for_all=True)
        if self._is_lead:
            log.info("saved step %d in %.2f s", step, seconds)

    def begin(self, start: int, function: SaveFunction) -> SavePace:
        """The trainer's loop begins at step ``start`` and saves with ``function``; returns when it is to do so.

        Raises:
            ConfigError: a variable of the agent cannot be read.
        """
        self.function = function
        self.pace = SavePace.from_environment(start, is_writing=lambda: self.is_writing, on_cost=self._listener.on_cost)
        return self.pace

    def is_durable(self, step: int) -> bool:
        """Wait for what was staged at this step, or was read from memory; whether it is on disk now."""
        try:
            SAVERS.wait()
        except CheckpointError as error:
            self._failed(step, error)
            return False
        self._page[Slot.SAVED] = step
        return True

    def at_end(self, until: int, at_tick: Callable[[int], None]) -> None:
        """The save after the last step: it is retried for as long as the job lives, with a stop at any time."""
        for tries in itertools.count(1):
            if self.now(until):
                return
            time.sleep(SAVE_RETRY_S)
            at_tick(tries)

    def _ended(self, step: int, began_ns: int, *, worked: bool) -> bool:
        if self.pace is not None:
            self.pace.done(step, began_ns=began_ns, worked=worked)
        return worked

    def _failed(self, step: int, error: CheckpointError) -> None:
        """Note it; raises ``error`` where its reason does not pass with time."""
        if error.errno not in PASSING:
            raise error
        self._listener.on_save_failed(step, error.errno)
        if self._is_lead:
            log.error("STEP %d WAS NOT SAVED: %s; training goes on, and the save will be tried again", step, error)


class PageListener:
    """Reports saves to the agent, through the page. Each of its fields is one store, so any thread may."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def on_saved(self, step: int, seconds: float, *, for_all: bool = True) -> None:
        """The newest checkpoint on disk is that of ``step``, ``seconds`` after it was asked for.

        A manager's checkpoint is one of all ranks; with a trainer's own it is unknown whether the others have theirs.
        """
        page = self._page
        page[Slot.SAVED_AT_NS] = time.monotonic_ns()
        page[Slot.SAVE_NS] = int(seconds * 1e9)
        page[Slot.SAVES] += 1
        page[Slot.SAVED] = max(page[Slot.SAVED], step)
        if for_all:
            page[Slot.DURABLE] = max(page[Slot.DURABLE], step)

    def on_save_failed(self, _step: int, errno: int) -> None:
        """One more save failed that will be tried again."""
        self._page[Slot.SAVE_ERRNO] = errno
        self._page[Slot.SAVE_FAILURES] += 1

    def on_cost(self, seconds: float) -> None:
        """How long the newest finished save has kept this rank from training."""
        self._page[Slot.SAVE_COST_NS] = int(seconds * 1e9)

    def on_loaded(self, seconds: float) -> None:
        """A checkpoint was read, or looked for, in so long."""
        self._page[Slot.LOAD_NS] += int(seconds * 1e9)

    def on_rescuable(self, step: int) -> None:
        """The state after ``step`` steps is whole in memory, and in no checkpoint; a negative one: there is none."""
        self._page[Slot.RESCUABLE] = step

    def on_part(self, number: int) -> None:
        """This rank has that part of a state that is spread over ranks."""
        self._page[Slot.RESCUE_PART] = number

    def on_rescuing(self, *, is_over: bool = False) -> None:
        """As ``background.Listener``."""
        self._page[Slot.RESCUING] = 0 if is_over else time.monotonic_ns()

    def on_rescued(self, step: int) -> None:
        """The state after ``step`` steps was kept just in time."""
        self._page[Slot.RESCUED] = step

    def on_copied(self, step: int) -> None:
        """All ranks have the state after ``step`` steps in memory, and their peers have it, too."""
        self._page[Slot.COPIED] = step

    def on_spaced(self, interval: int, share: float) -> None:
        """Steps are copied less often from now on."""
        self._page[Slot.COPY_SHARE_PPM] = int(share * 1e6)
        self._page[Slot.COPY_INTERVAL] = interval
