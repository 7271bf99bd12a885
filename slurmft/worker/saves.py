"""How a session saves: by the trainer's own function, reported to the agent, retried where waiting may help."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from slurmft.errors import CheckpointError, Fenced, StorageError
from slurmft.ipc.pages import NOTHING, Page, Phase, SectionStack, Slot, State
from slurmft.policy import checkpoints as policy
from slurmft.policy.worker_settings import CheckpointSettings, WorkerSettings
from slurmft.storage.checkpoint_names import MEMORY_VARIABLE, RUN_FOLDER_VARIABLE, check_fence
from slurmft.storage.history import METRICS_FILE, append_lines, cut_back
from slurmft.storage.patience import PASSING
from slurmft.trainer.savers import SAVERS, SaveOutcome, Team, is_lead
from slurmft.worker.digests import ReplicaDigests

# --- The numbers that a trainer reports, as one curve over all restarts: ``metrics.jsonl`` in the run folder ---
# Rank 0 writes. A step costs a few microseconds; a thread writes the lines about once a second, so that a filesystem
# that does not answer delays no step. Lines wait in a bounded queue; the oldest are dropped where it is full.

EVERY_S = 1.0
MAX_WAITING = 100_000
MAX_NAMES = 200
"""Numbers of one step."""

AT_SAVE_S = 2.0
"""How long a save waits for the lines of its steps."""

log = logging.getLogger(__name__)


class MetricsLog:
    """The lines of one session; does nothing where ``folder`` is None."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / METRICS_FILE
        self._step, self._values = -1, dict[str, float | None]()
        self._lines: deque[str] = deque(maxlen=MAX_WAITING)
        self._wanted, self._idle = threading.Event(), threading.Event()
        self._is_closing = self._has_failed = False
        self._cut_to: int | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environment(cls, *, is_lead: bool) -> MetricsLog:
        """That of the run which this process belongs to, on rank 0 alone."""
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        return cls(Path(folder) if folder and is_lead else None)

    def begin(self, step: int) -> None:
        """The loop begins at ``step``: later lines of an earlier attempt are replaced."""
        if self._path is None:
            return
        self._step, self._values = -1, {}
        self._cut_to = step
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="slurmft metrics", daemon=True)
            self._thread.start()

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers of ``step``; several calls within one step are one line."""
        if self._thread is None:
            return
        if step != self._step:
            self.step_is_over()
            self._step = step
        for name, value in metrics.items():
            if name in self._values or len(self._values) < MAX_NAMES:
                number = float(value)
                self._values[str(name)[:200]] = number if math.isfinite(number) else None

    def step_is_over(self) -> None:
        """No more numbers come for the newest step."""
        if self._values:
            line: dict[str, Any] = {**self._values, "step": self._step, "at": round(time.time(), 3)}
            self._lines.append(json.dumps(line))
            self._values = {}

    def flush(self, within_s: float = AT_SAVE_S) -> None:
        """Return when the lines so far are written, or that takes too long."""
        self.step_is_over()
        deadline_s, self._has_failed = time.monotonic() + within_s, False
        while self._thread is not None and (self._lines or self._cut_to is not None) and not self._has_failed:
            self._idle.clear()
            self._wanted.set()
            if not self._idle.wait(max(0.0, deadline_s - time.monotonic())):
                return

    def close(self) -> None:
        """Write what is left; nothing is written afterwards."""
        self.flush()
        self._is_closing = True
        self._wanted.set()

    def _work(self) -> None:
        assert self._path is not None
        told = False
        while True:
            self._wanted.wait(EVERY_S)
            self._wanted.clear()
            try:
                self._write(self._path)
                told = False
            except Fenced as error:
                log.warning("no metrics are written any more: %s", error.what)
                self._lines.clear()
                self._cut_to, self._is_closing = None, True
            except (OSError, StorageError) as error:
                if not told:
                    log.warning("metrics wait: %s", error)
                told = self._has_failed = True
            self._idle.set()
            if self._is_closing:
                return

    def _write(self, path: Path) -> None:
        if self._cut_to is None and not self._lines:
            return
        check_fence()
        if (step := self._cut_to) is not None:
            cut_back(path, step)
            self._cut_to = None
        if not (lines := list(self._lines)):
            return
        try:
            append_lines(path, lines)
        except OSError:
            self._cut_to = json.loads(lines[0])["step"]  # a part of them may be there
            raise
        for _ in lines:
            self._lines.popleft()


# --- schedule ---
# When to save periodically, and when to try again after a save that failed. Pure: no clock, no collective.
#
# Ranks must save before the same step, and their clocks differ. So with an interval in seconds rank 0 alone watches the
# time, and announces steps: at a *look*, whose step all ranks know, it says before which step the next save is due, or
# when to look again. An interval has a dozen looks, however long it is; where steps become F times slower all at once,
# a save comes late by an eighth of its interval times F at most.

RETRIES_PER_INTERVAL = 8
NO_STEP = 0
"""In a row: nothing is due yet."""

LOOKS = 8
"""The next look is at most one part of so many of the interval away."""

NEAR = 16
"""A save that is due within one part of so many of its interval is announced, and not looked at again."""

STEPS_REMEMBERED = 32


class SaveSchedule:
    """Every ``interval_steps`` (0: never); after a failure sooner, and from failure to failure later again."""

    def __init__(self, interval_steps: int, start: int) -> None:
        self._interval, self._start = interval_steps, start
        self._retry_at: int | None = None
        self._pause = 0

    def is_due(self, step: int) -> bool:
        """Whether a save is due before ``step`` begins."""
        if not self._interval or step <= self._start:
            return False
        return step % self._interval == 0 or (self._retry_at is not None and step >= self._retry_at)

    def done(self, step: int, *, worked: bool) -> None:
        """Take in how the save at ``step`` went."""
        if worked:
            self._retry_at, self._pause = None, 0
            return
        shortest = max(1, self._interval // RETRIES_PER_INTERVAL)
        self._pause = min(max(shortest, 2 * self._pause), self._interval)
        self._retry_at = step + self._pause


class ToldSchedule:
    """Every rank's copy of a schedule in seconds: what rank 0 announced last. Equal on all ranks at every step."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._look_at: int | None = start + 1
        self._due_at: int | None = None

    def is_look(self, step: int) -> bool:
        """Whether rank 0 updates all ranks before ``step`` begins (``SaveTimer.row``, then ``take``)."""
        return self._look_at is not None and step >= self._look_at

    def take(self, step: int, row: Sequence[int]) -> None:
        """Take in rank 0's row: steps from here to the save, and to the next look; one of them is NO_STEP."""
        until_due, until_look = row
        self._due_at = step + until_due - 1 if until_due else None
        self._look_at = step + max(1, until_look) if not until_due else None

    def is_due(self, step: int) -> bool:
        """Whether a save is due before ``step`` begins."""
        return self._due_at is not None and step >= self._due_at and step > self._start

    def done(self, step: int) -> None:
        """A save was tried at ``step``, periodic or not: the next one is announced before the step after it."""
        self._due_at, self._look_at = None, step + 1


class SaveInterval:
    """How far apart saves are to be: as configured, or by itself the interval that wastes least, by what saves have
    cost so far; a minute until two of them were measured."""

    def __init__(self, settings: CheckpointSettings, nodes: int) -> None:
        self._is_fixed, self._longest_s = settings.interval != "auto", settings.interval_seconds
        self._mtbf_s = settings.mtbf_s or policy.mtbf_s(policy.FailureHistory(), nodes)
        self._costs_s: list[float] = []

    def seconds(self, *, step_s: float) -> float:
        """Seconds of training between two saves, now; by itself Daly's interval within its bounds."""
        if self._is_fixed:
            return self._longest_s or policy.LONGEST_S
        cost_s = policy.typical_cost_s(self._costs_s)
        plan = policy.plan(cost_s or 0.0, self._mtbf_s, step_s=step_s, longest_s=self._longest_s)
        if len(self._costs_s) >= 2:
            return plan.interval_s
        return min(max(policy.FIRST_S, 10 * (cost_s or 0.0), step_s), self._longest_s or math.inf)

    def cost(self, seconds: float) -> None:
        """A save has cost the training loop so much: its stall, and what steps took longer while it was written."""
        if math.isfinite(seconds) and seconds >= 0:
            self._costs_s = [*self._costs_s[-2 * policy.SAVES_MEASURED :], seconds]


class SaveTimer:
    """Rank 0's part: how long steps take, what saves cost, and how many steps remain until the next one.

    Times are nanoseconds of one monotonic clock, read before each step; ``now_ns`` never goes back. ``on_cost`` gets
    the seconds that each save has cost the training, once they are known.
    """

    def __init__(
        self, spacing: SaveInterval, *, now_ns: int, on_cost: Callable[[float], None] = lambda _: None
    ) -> None:
        self._spacing, self._on_cost = spacing, on_cost
        self._from_ns = self._step_began_ns = now_ns
        self._pause_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._quiet_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        """Of steps beside which nothing was written."""

        self._steps_seen = 0

        self._cost_ns: int | None = None
        """The stall of the newest save, until all of its cost is known."""

        self._excess_ns = 0
        """Additional time of the steps beside its write, which may be negative by chance."""

    def step_done(self, now_ns: int, *, is_writing: bool) -> None:
        """A step ended at ``now_ns``; a checkpoint was or was not being written beside it."""
        took_ns = max(0, now_ns - self._step_began_ns)
        self._step_began_ns = now_ns
        self._steps_ns.append(took_ns)
        self._steps_seen += 1
        if self._cost_ns is None:
            if not is_writing:
                self._quiet_ns.append(took_ns)
            return
        # it began while the newest save was written, or right behind its stall
        self._excess_ns += took_ns - int(median(self._quiet_ns)) if self._quiet_ns else 0
        if not is_writing:
            self._settle()

    def saved(self, now_ns: int, *, began_ns: int, worked: bool) -> None:
        """A save was tried between ``began_ns`` and ``now_ns``, before a step begins."""
        self._settle()
        self._step_began_ns = now_ns
        if worked:
            self._cost_ns = max(0, now_ns - began_ns)
            self._from_ns, self._pause_ns = now_ns, 0
            return
        interval_ns = self._interval_ns()
        self._pause_ns = min(max(interval_ns // RETRIES_PER_INTERVAL, 2 * self._pause_ns), interval_ns)
        self._from_ns = now_ns - interval_ns + self._pause_ns

    def row(self, now_ns: int) -> tuple[int, int]:
        """The row for all ranks before the step that begins now: see ``ToldSchedule.take``."""
        interval_ns = self._interval_ns()
        left_ns = self._from_ns + interval_ns - now_ns
        if left_ns <= 0:
            return 1, NO_STEP  # before this very step
        step_ns = max(1, self._step_ns())
        steps = math.ceil(left_ns / step_ns)
        believed = 2 * self._steps_seen  # so few steps do not predict many more
        if left_ns * NEAR <= interval_ns and steps <= believed:
            return 1 + steps, NO_STEP
        return NO_STEP, max(1, min(steps // 2, interval_ns // LOOKS // step_ns, believed))

    def _settle(self) -> None:
        if self._cost_ns is not None:
            seconds = (self._cost_ns + max(0, self._excess_ns)) / 1e9
            self._cost_ns, self._excess_ns = None, 0
            self._spacing.cost(seconds)
            self._on_cost(seconds)

    def _interval_ns(self) -> int:
        return max(1, round(self._spacing.seconds(step_s=self._step_ns() / 1e9) * 1e9))

    def _step_ns(self) -> int:
        """The mean of the newest steps, or the middle of the newest three if that is more: slower ones count at once.

        Too long a time does no harm: the next look comes sooner.
        """
        if not self._steps_ns:
            return 0
        newest = list(self._steps_ns)
        return max(sum(newest) // len(newest), int(median(newest[-3:])))


# --- When this run saves periodically: by steps, by seconds or by itself, before the same step on every rank ---
# By steps it is arithmetic. Otherwise rank 0 announces the step a few times in an interval, as two integers in a
# broadcast; the steps between cost one comparison.

Tell = Callable[[Sequence[int]], Sequence[int]]
"""Rank 0's row, on every rank; a collective, to which the others give a row of the same length."""


class SavePace:
    """Decides before which steps to save. Every rank calls the same methods in the same order, with the same steps.

    Args:
        tell: broadcasts rank 0's integers to all ranks; used only where the interval is not a number of steps.
        is_writing: whether a checkpoint is being written beside the training, as far as this rank knows.
        on_cost: on rank 0, called with the seconds that each save has cost the training.
        keeps_steps: whether steps can be kept just in time.
    """

    def __init__(
        self, settings: CheckpointSettings, start: int, *, nodes: int = 1, is_lead: bool = True,
        tell: Tell = lambda row: row, is_writing: Callable[[], bool] = lambda: False,
        on_cost: Callable[[float], None] = lambda _: None, now_ns: Callable[[], int] = time.monotonic_ns,
        keeps_steps: bool = False,
    ) -> None:  # fmt: skip
        self._tell, self._is_writing, self._now_ns = tell, is_writing, now_ns
        self._step = start
        self._first = 1 if (settings.peer_interval or keeps_steps) and not start else None
        self._by_steps = SaveSchedule(settings.interval_steps, start) if settings.interval == "steps" else None
        self._told = ToldSchedule(start)
        self._timer = SaveTimer(SaveInterval(settings, nodes), now_ns=now_ns(), on_cost=on_cost) if is_lead else None

    @classmethod
    def from_environment(
        cls, start: int, *, is_writing: Callable[[], bool] = lambda: False,
        on_cost: Callable[[float], None] = lambda _: None, environment: Mapping[str, str] = os.environ,
    ) -> SavePace:  # fmt: skip
        """As the agent says (``policy.worker_settings``); every 100 steps without one.

        Raises:
            ConfigError: the settings cannot be read.
        """
        settings = WorkerSettings.from_environment(environment).checkpoint
        return cls(
            settings,
            start,
            keeps_steps=settings.just_in_time and MEMORY_VARIABLE in environment and bool(SAVERS.savers),
            nodes=_count(environment.get("GROUP_WORLD_SIZE", "")),
            is_lead=is_lead(),
            tell=lambda row: Team().from_lead(row),
            is_writing=is_writing,
            on_cost=on_cost,
        )

    def is_due(self, step: int) -> bool:
        """Whether a periodic save is due before ``step`` begins. Now and then a small collective."""
        if self._timer is not None and step > self._step:
            self._timer.step_done(self._now_ns(), is_writing=self._is_writing())
        self._step = step
        if step == self._first:  # steps are copied and kept after a save, from which it is known what their state is
            return True
        if self._by_steps is not None:
            return self._by_steps.is_due(step)
        if self._told.is_look(step):
            row = self._timer.row(self._now_ns()) if self._timer is not None else (0, 0)
            self._told.take(step, self._tell(row))
        return self._told.is_due(step)

    def done(self, step: int, *, began_ns: int, worked: bool) -> None:
        """Take in the result of any save before ``step``. All ranks know alike whether it ``worked``.

        ``began_ns`` is of the monotonic clock; the save has stopped the training from then until now.
        """
        if self._timer is not None:
            self._timer.saved(self._now_ns(), began_ns=began_ns, worked=worked)
        if self._by_steps is not None:
            self._by_steps.done(step, worked=worked)
        else:
            self._told.done(step)


def _count(text: str) -> int:
    return max(1, int(text)) if text.isascii() and text.isdecimal() and len(text) < 8 else 1


# --- How a session saves: by the trainer's own function, reported to the agent, retried where waiting may help ---

SaveFunction = Callable[[int], Any]

SAVE_RETRY_S = 1.0


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

        Between this and ``CheckpointManager.save`` stands the trainer's own function: the manager finds in ``SAVERS``
        whether the save is urgent, and leaves there what came of it.

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
        if SAVERS.outcome is SaveOutcome.DONE:
            took_s = (time.monotonic_ns() - began_ns) / 1e9
            self._listener.on_saved(step, took_s, for_all=False)
            if self._is_lead:
                log.info("saved step %d in %.2f s", step, took_s)
        elif SAVERS.outcome is SaveOutcome.STAGED:
            self._staged, self._failures_then = step, page[Slot.SAVE_FAILURES]
        return self._ended(step, began_ns, worked=SAVERS.outcome is not SaveOutcome.SKIPPED)

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
    """The session as a ``savers.Listener``. Each field of a report is one store in the page, so any thread may."""

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
        self._page[Slot.SAVE_ERRNO] = errno
        self._page[Slot.SAVE_FAILURES] += 1

    def on_cost(self, seconds: float) -> None:
        """How long the newest finished save has kept this rank from training."""
        self._page[Slot.SAVE_COST_NS] = int(seconds * 1e9)

    def on_loaded(self, seconds: float) -> None:
        self._page[Slot.LOAD_NS] += int(seconds * 1e9)

    def on_rescuable(self, step: int) -> None:
        self._page[Slot.RESCUABLE] = step

    def on_part(self, number: int) -> None:
        self._page[Slot.RESCUE_PART] = number

    def on_rescuing(self, *, is_over: bool = False) -> None:
        self._page[Slot.RESCUING] = 0 if is_over else time.monotonic_ns()

    def on_rescued(self, step: int) -> None:
        self._page[Slot.RESCUED] = step

    def on_copied(self, step: int) -> None:
        self._page[Slot.COPIED] = step

    def on_spaced(self, interval: int, share: float) -> None:
        self._page[Slot.COPY_SHARE_PPM] = int(share * 1e6)
        self._page[Slot.COPY_INTERVAL] = interval
