"""The session: a trainer's connection to slurmft. A few lines of it are enough:

    with start_session(seed=1) as session:
        loaded = checkpoints.load_latest(model, optimizer)
        for step in session.steps(start=loaded.step, until=1000, save=save):
            ...

It finds out by itself whether an agent watches (a heartbeat page in the environment), and does without one under plain
srun, torchrun or python.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import operator
import os
import random
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmft.ipc.pages.heartbeat import NOTHING, PAGE_VARIABLE, Page, Slot, State, StopAction
from slurmft.ipc.pages.section_stack import Phase, SectionStack
from slurmft.policy.checkpoints.batches import BatchSplit
from slurmft.policy.timing.stop import END, NOT_STARTED, base_of, end_of_evaluation, inside_an_evaluation, tick_of
from slurmft.policy.verdicts.verdict import EXIT_RERUN_ELSEWHERE, EXIT_TEMPORARY, EXIT_VALIDATION_FAILED
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import MAX_STEP
from slurmft.trainer import rng, stateful_loader
from slurmft.trainer.host_group import any_rank
from slurmft.trainer.savers import SAVERS
from slurmft.worker.agreement import AgreementByAgent, AgreementByCollective
from slurmft.worker.batches import Batches
from slurmft.worker.ddp import Rehearsal, settled_ddp
from slurmft.worker.digests.replicas import ReplicaDigests
from slurmft.worker.faults import InjectedFaults
from slurmft.worker.groups import ProcessGroups, take_place_of_task
from slurmft.worker.metrics import MetricsLog
from slurmft.worker.rank_log import log_with_rank
from slurmft.worker.rerun.data import RerunDataIterator
from slurmft.worker.rerun.reports import Departure
from slurmft.worker.rerun.state_machine import RerunStateMachine
from slurmft.worker.saves import SAVE_RETRY_S, SaveFunction, Saves
from slurmft.worker.sections import Sections
from slurmft.worker.signals import StopSignal
from slurmft.worker.stragglers.stragglers import StragglerDetector

Batch = TypeVar("Batch")
SAVE_TRIES_BEFORE_EXIT = 60
NO_ACTION = StopAction.NONE, NOT_STARTED
REHEARSED_STEPS = 2
"""The first one compiles, and may compile again for the second."""


log = logging.getLogger(__name__)


class PlannedStop(SystemExit):
    """Ends the worker after an agreed stop; exit code 75. Not an ``Exception``, so that trainers do not swallow it."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_TEMPORARY)
        self.step = step


class RerunElsewhere(SystemExit):
    """Ends the worker so that a result is computed again on other hardware; exit code 16."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_RERUN_ELSEWHERE)
        self.step = step


class ValidationFailed(SystemExit):
    """Ends the worker after a verdict with which training does not go on; exit code 17."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_VALIDATION_FAILED)
        self.step = step


class Session(Sections):
    """One worker's part of the run. Use ``start_session``; leave it as a context manager."""

    rank: int
    """This worker's rank in the world."""

    local_rank: int
    """Its rank on its node."""

    world_size: int
    """Ranks in all."""

    device: torch.device
    """Where its model belongs."""

    checkpoint_dir: Path
    """Where the run's checkpoints live."""

    is_rehearsal: bool
    """Whether a spare only tries the script (``spares: rehearse``): it ends after two steps; leave no trace then."""

    stragglers: StragglerDetector
    """Times this rank's own work; named sections and a role are for you to add."""

    def __init__(self, page: Page | None, groups: ProcessGroups, sections: SectionStack | None = None) -> None:
        environment = os.environ
        self.rank = int(environment.get("RANK", "0"))
        self.local_rank = int(environment.get("LOCAL_RANK", "0"))
        self.world_size = int(environment.get("WORLD_SIZE", "1"))
        self.device = groups.device
        self.checkpoint_dir = checkpoint_dir_of(environment)
        self.is_rehearsal = WorkerSettings.from_environment(environment).rehearsal
        self._groups = groups
        self._batches = Batches()
        self._signal = StopSignal.install()
        self.stragglers = StragglerDetector.from_environment(groups.device)
        self._page = page or Page.private()
        super().__init__(sections or SectionStack(self._page))
        self.stragglers.on_first_collective = self._note_own_work
        by_collective = AgreementByCollective(self._signal, self.world_size)
        self._agreement = AgreementByAgent(self._page) if page is not None else by_collective
        self._faults = InjectedFaults(self._page)
        self._digests = ReplicaDigests.from_environment(self._page, world_size=self.world_size, is_lead=self.is_lead)
        self._saves = Saves(self._page, self._sections, is_lead=self.is_lead, digests=self._digests)
        self._metrics = MetricsLog.from_environment(is_lead=self.is_lead)
        self._reruns: RerunStateMachine | None = None
        self._step = self._start = self._evaluations = self._safe_at_ns = 0
        self._deferred, self._is_over = NO_ACTION, False
        self._unfinished: tuple[int, int] | None = None
        self._page[Slot.STATE] = State.SETUP
        if page is not None:
            atexit.register(self._close_at_exit)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0: the one that prints."""
        return self.rank == 0

    def steps(self, *, start: int, until: int, save: SaveFunction) -> Generator[int, bool | None, None]:
        """The numbers of the steps to do: ``start`` up to ``until - 1``.

        ``save(step)`` is called on every rank, with the number of steps that are complete: as often as
        ``checkpoint.interval`` says, on request, before a stop, and at the end. A stop raises
        PlannedStop here, after the save, on all ranks at the same step. A loop that ends earlier says so with
        ``send(True)`` after its last step, on every rank.

        Raises:
            PlannedStop: the run was asked to stop, and its state is saved.
            ValueError: ``start`` or ``until`` is not a whole number of steps, or more than 10^15 - 1.
        """
        start, until = _steps("start", start), _steps("until", until)
        self._unfinished = (start, until)
        _warn_of_steps_ahead()
        with SAVERS.before_step(start):
            yield from self._walk(start, until, save)
        self._unfinished = None

    def _walk(self, start: int, until: int, save: SaveFunction) -> Generator[int, bool | None, None]:
        self._start, self._is_over, page = start, False, self._page
        page.touch(Slot.LOOP_AT)
        page[Slot.RESUMED] = page[Slot.STEP] = start
        page[Slot.UNTIL] = until
        page[Slot.STATE] = State.TRAINING
        saved = start if start else NOTHING  # resumed from it, so it is on disk
        page[Slot.SAVED] = NOTHING
        self._metrics.begin(start)

        def save_all(at: int) -> object:
            self._metrics.flush()  # a state that is on disk has its curve there, too
            return self.is_rehearsal or save(at)

        pace, is_due = self._saves.begin(start, save_all), False
        self._digests.begin(start)
        SAVERS.at_boundary(start)
        for step in range(start, until):
            self._step, self._evaluations = step, 0
            self._end_rehearsal(step, start, until)
            self._digests.at_boundary(step)
            is_due = (pace.is_due(step) or is_due) and saved != step
            if is_due and not any_rank(SAVERS.gradients.are_waiting):
                worked, is_due = self._saves.now(step, is_periodic=True), False
                saved = step if worked else saved
            self._at_tick(self._tick(step), saved)
            self._sections.phase(Phase.STEP)
            self.stragglers.begin_step()
            if page[Slot.FAULT] != self._faults.seen:
                self._faults.strike(step)
            SAVERS.first_step = SAVERS.loaded = None
            try:
                was_last = yield step
            except GeneratorExit:  # the loop was left early: later code belongs to no step
                self._sections.phase(Phase.NONE)
                raise
            self.stragglers.end_step()
            if self._reruns is not None:
                self._reruns.check_is_over()
            page[Slot.STATE] = State.TRAINING  # an evaluation that was begun and never ended is over now
            self._signal.chain_again()
            self._step_is_done(step + 1, start)
            if was_last:
                page[Slot.UNTIL] = until = step + 1
                break
        if until > start:
            self._step, self._is_over = until, True
            self._saves.at_end(until, lambda tries: self._at_tick(self._tick(until, 0, tries), None))
        self._sections.phase(Phase.NONE)
        page[Slot.TICK] = END
        page[Slot.STATE] = State.FINISHED

    def evaluating(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the batches of an evaluation inside a step, stopping between two of them when asked to.

        The evaluation leaves no trace in the training's random numbers. A stop inside of it saves the state of the step
        it belongs to, so that the resumed run repeats the whole evaluation: put it at the beginning of a step, on every
        rank, and run it to its end. Ranks may have different numbers of batches. One that only some ranks do works too,
        but a stop then waits for its end.

        Raises:
            PlannedStop: the run was asked to stop, and its state is saved.
        """
        before, base = rng.capture(), base_of(self._start)
        step, number, self._evaluations = self._step, self._evaluations, self._evaluations + 1
        state, phase = self._page[Slot.STATE], self._sections.current_phase
        if state == State.EVALUATING:  # another one that was left early
            state, phase = State.TRAINING, Phase.STEP
        self._page[Slot.STATE] = State.EVALUATING
        self._sections.phase(Phase.EVALUATION)
        try:
            for index, batch in enumerate(batches, start=1):
                self._note_span()
                self._at_tick(self._tick(step, number, index), None, before)
                self._sections.phase(Phase.EVALUATION)  # anew: an evaluation may take as long as it has batches
                yield batch
            self._note_span()
            self._at_tick(end_of_evaluation(step - base, number), None, before)
        finally:
            # an iterator that the trainer keeps may end much later, when neither page nor generators are its own
            is_current = (self._step, self._evaluations) == (step, number + 1)
            if is_current and self._page[Slot.STATE] == State.EVALUATING:
                self._page[Slot.TICK] = END if state == State.FINISHED else end_of_evaluation(step - base, number)
                rng.restore(before)
                self._page[Slot.STATE] = state
                self._sections.phase(phase)

    def report(self, **metrics: float) -> None:
        """Show numbers beside the step in ``slurmft status``; the first one is kept. Call it as often as you like.

        Rank 0's numbers are also in ``metrics.jsonl`` of the run folder, one line for each step of ``steps``: steps
        that are done again after a restart replace their lines.
        """
        self._sections.sign()
        if metrics:
            self._page.set_metric(float(next(iter(metrics.values()))))
            self._metrics.note(self._step, metrics)

    def distributed(self, model: nn.Module, rehearsal: Rehearsal) -> nn.Module:
        """``model`` in DDP that sums gradients in the same order after every start; itself where there is one rank.

        ``rehearsal(ddp_model)`` does one forward pass and returns the loss; it leaves no trace (``worker.ddp``).
        """
        if self.world_size == 1:
            return model

        def attached(wrapped: nn.Module) -> torch.Tensor:
            if isinstance(wrapped, DistributedDataParallel):
                self.stragglers.attach(wrapped)
            return rehearsal(wrapped)

        devices = [self.device] if self.device.type == "cuda" else None
        return settled_ddp(model, attached, device_ids=devices)

    def micro_batch(self, samples: int) -> int:
        """Samples to compute at once: ``samples``, or a half, a quarter... of it after an attempt without enough memory
        (``oom.action: reduce_batch``). Without this call, the supervisor does not know that there is one to reduce.

        Raises:
            UsageError: ``samples`` is not a positive number.
        """
        return self._batches.micro_batch(samples)

    def accumulation(self, steps: int = 1) -> int:
        """Micro-batches behind one optimizer step where there would be ``steps``; the global batch stays the same."""
        return self._batches.accumulation(steps)

    def split_batch(self, global_batch: int, max_micro_batch: int) -> BatchSplit:
        """How ``global_batch`` is spread over the present ranks, for elastic runs.

        With ``elastic.batch: keep_micro_batch`` it is what the configured number of ranks would have, and grows and
        shrinks with the ranks.

        Raises:
            UsageError: there are more ranks than samples, or a number is not positive.
        """
        return self._batches.split(global_batch, self.world_size, max_micro_batch)

    def rerun_machine(self, model: nn.Module, loader: Iterable[Any]) -> RerunStateMachine:
        """Reruns of steps whose results look wrong, as the section ``rerun:`` says (``worker.rerun.state_machine``).

        Give what this returns to ``save`` and ``load_latest`` as their ``loader``, take batches from its ``data``, and
        begin every step with ``while machine.should_run_forward_backward():``. It saves and ends the worker by itself.

        Raises (within the step):
            RerunElsewhere: the step is saved, and is to be repeated on other hardware.
            ValidationFailed: the verdict is correct or inconclusive.
        """
        self._reruns = RerunStateMachine(
            model=model, data=RerunDataIterator(loader), step=lambda: self._step, leave=self._leave_for_rerun
        )
        return self._reruns

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        """``torch.distributed.new_group`` with the configured timeout, which torch does not pass on by itself."""
        return self._groups.new_group(ranks, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._unfinished is not None and (error is None or (isinstance(error, SystemExit) and not error.code)):
            log.warning(
                "the loop over session.steps(until=%d) was left in step %d: that step counts as unfinished, and what "
                "was trained since the newest checkpoint is not saved. To end early, call send(True) on what "
                "session.steps() has returned, after the last step and on every rank, and then leave the loop",
                self._unfinished[1],
                self._step,
            )
        if error is not None and not isinstance(error, PlannedStop | SystemExit):
            self._page[Slot.STATE] = State.FAILED
        if isinstance(error, Exception):
            SAVERS.rescue()
        if error is None or isinstance(error, SystemExit):  # any other error may still be caught
            self._close(is_orderly=error is None or not error.code)
        self._metrics.close()
        if self._reruns is not None and error is None:
            self._reruns.report()
        self._groups.close(orderly=kind is None or isinstance(error, PlannedStop | RerunElsewhere | ValidationFailed))

    def _close(self, *, is_orderly: bool) -> None:
        """Say that this process ends as it means to, which an exit code of 0 alone does not: a wrapper may have it."""
        atexit.unregister(self._close_at_exit)
        if is_orderly and self._page[Slot.STATE] not in (State.STOPPED, State.FINISHED):
            self._page[Slot.STATE] = State.CLOSED

    def _close_at_exit(self) -> None:
        if self._page[Slot.PID] == os.getpid():  # not in a fork
            self._close(is_orderly=not hasattr(sys, "last_value"))

    def _note_own_work(self) -> None:
        """From here on this rank waits for the others: when all ranks hang, it is not the culprit."""
        self._page[Slot.OWN_WORK_DONE] = self._step + 1

    def _step_is_done(self, step: int, start: int) -> None:
        page = self._page
        self._note_span()
        page[Slot.STEP] = step
        page.touch(Slot.PROGRESS_AT)
        page[Slot.STALL_NS] = self._saves.stalled_ns  # only with a step that follows: not of the save of a stop
        SAVERS.at_boundary(step)
        if step == start + 1:
            page.touch(Slot.FIRST_STEP_AT)
            self._groups.after_first_step()

    def _tick(self, step: int, evaluation: int = 0, batch: int = 0) -> int:
        return tick_of(step - base_of(self._start), evaluation, batch)

    def _at_tick(self, tick: int, saved: int | None, randomness: dict[str, Any] | None = None) -> None:
        action, is_waiting = self._agreement.at(tick), SAVERS.gradients.are_waiting and not self._is_over
        if action is not StopAction.NONE:
            self._deferred = action, tick
        elif not inside_an_evaluation(tick):  # where ranks may have different numbers of batches
            action, tick = self._deferred
        if action is StopAction.NONE or any_rank(is_waiting):
            if not is_waiting:
                self._safe_at_ns = time.monotonic_ns()
            return
        step, self._deferred = self._step, NO_ACTION
        if saved != step or not self._saves.is_durable(step):
            if randomness is not None:
                now = rng.capture()
                rng.restore(randomness)
            worked = self._saves.now(step)
            while not worked and action is StopAction.SAVE_AND_STOP:  # until it works, or the time of the stop is up
                time.sleep(SAVE_RETRY_S)
                worked = self._saves.now(step)
            if randomness is not None:
                rng.restore(now)
        self._agreement.answered(tick)
        if action is StopAction.SAVE_AND_STOP:
            self._digests.flush()
            self._page[Slot.STATE] = State.STOPPED
            raise PlannedStop(step)
        self._safe_at_ns = time.monotonic_ns()

    def _leave_for_rerun(self, departure: Departure) -> NoReturn:
        """All ranks leave alike; the machine has put everything back to what it was before the step."""
        step = self._step
        for _ in range(SAVE_TRIES_BEFORE_EXIT if departure.should_checkpoint else 0):
            if self._saves.now(step):
                break
            time.sleep(SAVE_RETRY_S)
        departure.write_verdict()
        self._page[Slot.STATE] = State.STOPPED
        raise RerunElsewhere(step) if departure.exit_code == EXIT_RERUN_ELSEWHERE else ValidationFailed(step)

    def _end_rehearsal(self, step: int, start: int, until: int) -> None:
        """Before anything is saved, and before the code behind the loop."""
        if self.is_rehearsal and step - start >= min(REHEARSED_STEPS, until - start - 1):
            self._page[Slot.STATE] = State.STOPPED
            raise PlannedStop(step)

    def _note_span(self) -> None:
        """Note how long no stop was possible: a stop requested meanwhile waits so long, and then saves."""
        if not self._safe_at_ns:
            return
        span_ns = time.monotonic_ns() - self._safe_at_ns
        slot = Slot.FIRST_STEP_NS if self._step == self._start else Slot.LONGEST_STEP_NS
        self._page[slot] = max(self._page[slot], span_ns)


def _warn_of_steps_ahead() -> None:
    """A resumed run does again, or skips, what a script does of a step between the load and its loop."""
    if (loaded := SAVERS.loaded) is None:
        return
    what = ""
    if stateful_loader.has_handed_out(loaded.loader):
        what = "a batch was taken from the data loader"
    elif rng.has_drawn(loaded.random):
        what = "random numbers were drawn"
    if what:
        log.warning(
            "%s between the load of the checkpoint and session.steps(): each resume does so again, and goes on with "
            "other data or random numbers than an undisturbed run. Take each batch inside of its own step, and do what "
            "else draws before the load",
            what,
        )


def _steps(name: str, value: Any) -> int:
    """A number of steps; also one of numpy's, or a tensor of one."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise ValueError(f"{name}={value!r:.40} is not a number of completed steps")
    return number


def checkpoint_dir_of(environment: Mapping[str, str]) -> Path:
    """The run's; without a run ``checkpoints``, in which each task of an array and each job of submitit has its own."""
    if given := environment.get("SLURMFT_CHECKPOINT_DIR"):
        return Path(given)
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = environment.get("SLURM_JOB_ID") or environment.get("SUBMITIT_LOCAL_JOB_ID", "")
    own = f"{array}_{task}" if array and task else job if "SUBMITIT_EXECUTOR" in environment else ""
    return Path("checkpoints") / own


def start_session(*, seed: int | None = None, backend: str | None = None) -> Session:
    """Join the run: process group with the configured timeouts, device, seeds, and the agent's heartbeat page.

    The rank is that of torchrun's variables, or that of the task that srun has started.

    ``seed`` seeds python, torch and numpy's global generator (where numpy is installed) the same way on every rank and
    start; a checkpoint's own random state replaces it. ``backend`` overrides ``nccl.backend``.

    Raises:
        torch.distributed.DistError: the process group cannot be joined.
    """
    take_place_of_task(os.environ)
    log_with_rank()
    path = os.environ.get(PAGE_VARIABLE)
    page = Page.attach(Path(path)) if path else None
    sections = None
    if page is not None:
        sections = SectionStack(page)
        sections.phase(Phase.SETUP)
    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy.random").seed(seed % 2**32)
    groups = ProcessGroups.join(backend)
    session = Session(page, groups, sections)
    if session.is_lead:
        log.info("%s", json.dumps({"process group": groups.facts(), "agent": page is not None}))
    return session
