"""One ``Trainer.fit`` of Lightning in a run: its safe points, its saves, and where it goes on.

The safe point lies before a batch is fetched, and before an epoch begins: whatever belongs to the step before (its
validation, schedulers, other callbacks' saves) is done, and nothing of the next one has begun. Lightning has no hook
there, so for the time of ``fit`` a few methods are replaced on the objects of that Trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import io
import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from slurmft.integrations.lightning_data import EpochData
from slurmft.integrations.lightning_io import SlurmftCheckpointIO
from slurmft.integrations.marked_folders import MarkedFolders
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.system import opening
from slurmft.system.files import replace_atomically
from slurmft.trainer import rng
from slurmft.worker.ddp import settle_order_of_gradients
from slurmft.worker.session import Session, start_session

STATE_FILE = "trainer.ckpt"
"""As ``Trainer.save_checkpoint`` writes it: one file, or a folder where the strategy shards."""

RANK_LIMIT_BYTES = 1 << 30
"""Of a rank's own file: generators, and the states of its data loaders."""

ENDLESS = 2**29 - 1
"""Steps of a training whose length is unknown: the most that a session counts."""

log = logging.getLogger(__name__)


class Process:
    """What the Trainers of a process share: the session, and how many fits and steps were before."""

    current: ClassVar[Process | None] = None

    def __init__(self) -> None:
        self.session: Session = start_session()
        self.fits = self.steps = 0
        atexit.register(self.leave)

    @classmethod
    def shared(cls) -> Process:
        """The one of this process; joins the run the first time."""
        if cls.current is None:
            cls.current = cls()
        return cls.current

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the process groups, once; all at once where an error has ended the training."""
        atexit.unregister(self.leave)
        self.session.__exit__(type(error) if error else None, error, None)


class Fit:
    """One call of ``Trainer.fit``."""

    def __init__(self, trainer: Any, process: Process, callback: Any) -> None:
        self._trainer, self._process, self.session = trainer, process, process.session
        self._callback = callback
        process.fits += 1
        settings = WorkerSettings.from_environment(os.environ).checkpoint
        root = self.session.checkpoint_dir / "lightning" / f"fit-{process.fits}"
        self._folders = MarkedFolders(root, settings.keep_last_n)
        self._undo = contextlib.ExitStack()
        self._data = EpochData(trainer)
        self._walk: Any = None
        self._batches = trainer.fit_loop.epoch_loop.batch_progress
        self._ready: int | None = None
        self._ended = self.saves_between_epochs = False
        found = self._folders.newest()
        self._steps = found.place.step if found else 0
        if found is not None:
            self._resume(found.path, found.world_size)

    def begin(self) -> None:
        """The loop begins; its state is the loaded one."""
        trainer = self._trainer
        loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        settle_order_of_gradients(trainer.strategy.model)
        self._walk = self._steps_until(max(self._steps + 1, _length(trainer)))
        self._replace(loop, "on_advance_start", self._before_epoch)
        self._replace(epoch, "advance", self._before_batch)
        self._replace(epoch, "on_run_start", self._data.begin_epoch)
        if hasattr(epoch, "_broadcast_sigterm_tensor"):  # Lightning's own agreement: a collective in every step
            self._replace(epoch, "_broadcast_sigterm_tensor", lambda _original: None)

    def end(self) -> None:
        """The last step is done, or there was none to do: save, where that is not done already."""
        if self._ended:
            return
        self._ended = self.saves_between_epochs = True
        if self._walk is not None and self._ready not in (None, self._batches.total.ready):
            with contextlib.suppress(StopIteration):
                self._walk.send(True)
            self._steps += 1
        else:  # no step is under way: a resumed training that was complete
            next(self.session.steps(start=self._shown(), until=self._shown(), save=self._save), None)
        self.saves_between_epochs = False
        self._process.steps = self._shown()

    def restore_methods(self) -> None:
        """Lightning's own methods are back."""
        self._undo.close()

    def _shown(self) -> int:
        """Steps of the session: those of earlier fits count."""
        return self._process.steps + self._steps

    def _steps_until(self, length: int) -> Any:
        until = min(ENDLESS, self._process.steps + length)
        return self.session.steps(start=self._shown(), until=until, save=self._save)

    def _before_epoch(self, original: Any) -> None:
        self.saves_between_epochs = not self._trainer.fit_loop.restarted_mid_epoch
        self._safe_point()
        self.saves_between_epochs = False
        self._data.restore_randomness()
        original()

    def _before_batch(self, original: Any, data_fetcher: Any) -> None:
        trainer = self._trainer
        # inside of an accumulation the gradients would be lost
        if trainer.accumulate_grad_batches == 1 or not trainer.fit_loop.epoch_loop._should_accumulate():
            self._safe_point()
        every, callbacks = trainer.log_every_n_steps, trainer.callbacks
        if (every and not (self._batches.current.ready + 1) % every) or self._callback not in callbacks:
            original(data_fetcher)
            return
        # our callback has nothing to do in this batch, and each of its hooks costs as much as a step of the session
        place = callbacks.index(self._callback)
        del callbacks[place]
        try:
            original(data_fetcher)
        finally:
            callbacks.insert(place, self._callback)

    def _safe_point(self) -> None:
        ready = self._batches.total.ready
        if ready == self._ready:  # no batch since then
            return
        self._steps += self._ready is not None
        self._ready = ready
        try:
            next(self._walk)
        except StopIteration:  # longer than was estimated
            self._walk = self._steps_until(ENDLESS)
            next(self._walk)

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        """``method`` gets the original first; for this object alone."""
        setattr(owner, name, functools.partial(method, getattr(owner, name)))
        self._undo.callback(vars(owner).pop, name, None)

    def _save(self, shown: int) -> None:
        strategy, connector = self._trainer.strategy, self._trainer._checkpoint_connector
        own = {"rng": rng.capture(), **self._data.state(between_epochs=self.saves_between_epochs)}

        def fill(folder: Path) -> None:
            with _writing_at_once(strategy):
                strategy.save_checkpoint(connector.dump_checkpoint(False), folder / STATE_FILE)
            content = io.BytesIO()
            torch.save(own, content)
            replace_atomically(_rank_file(folder, self.session.rank), content.getvalue())

        self._folders.write(shown - self._process.steps, fill)

    def _resume(self, folder: Path, world_size: int) -> None:
        """Let Lightning load the save where it would load what ``fit`` was given, or nothing."""
        own: dict[str, Any] = {}
        if world_size == self.session.world_size:
            content = opening.read_bytes(_rank_file(folder, self.session.rank), limit_bytes=RANK_LIMIT_BYTES)
            own = _loaded(functools.partial(torch.load, io.BytesIO(content)), {})
        else:
            log.warning("%s was saved by %d ranks: random numbers and the place in the data begin anew",
                        folder, world_size)  # fmt: skip
        self._data.resume(own)

        def load(original: Any, checkpoint_path: Any = None, **options: Any) -> None:
            if self.session.is_lead:
                log.info("step %d: going on from %s, instead of ckpt_path=%r", self._steps, folder, checkpoint_path)
            vars(connector).pop("resume_start", None)  # a tuner's own restores are its own
            takes = "weights_only" in inspect.signature(original).parameters
            _loaded(functools.partial(original, folder / STATE_FILE), options if takes else None)
            state = connector._loaded_checkpoint["loops"]["fit_loop"]["state_dict"]
            if own.get("loaders"):
                state["combined_loader"] = own["loaders"]  # Lightning's file has those of rank 0

        connector = self._trainer._checkpoint_connector
        self._replace(connector, "resume_start", load)


def _length(trainer: Any) -> int:
    """Optimizer steps of the whole training, as an estimate; Lightning's own raises where they cannot be known."""
    found = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if (trainer.max_epochs or -1) >= 0 and trainer.num_training_batches < ENDLESS:
        found.append(trainer.max_epochs * math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
    length: int = min([ENDLESS, *found])
    return length


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pt"


def _loaded(load: Callable[..., Any], options: dict[str, Any] | None) -> Any:
    """What ``load`` returns; without objects of the user's classes where that works.

    The folder belongs to this user, and no other one may write there (``marked_folders``).
    """
    if options is None:  # a version that cannot choose
        return load()
    try:
        return load(**{**options, "weights_only": True})
    except pickle.UnpicklingError:
        if options.get("weights_only"):
            raise
        return load(**{**options, "weights_only": False})


@contextlib.contextmanager
def _writing_at_once(strategy: Any) -> Iterator[None]:
    """Without AsyncCheckpointIO and its like around the plugin: the marker must not come before the file."""
    given = inner = strategy.checkpoint_io
    while hasattr(inner, "checkpoint_io"):
        inner = inner.checkpoint_io
    if inner is not given:
        strategy.checkpoint_io = inner
    try:
        with inner.writing_at_once() if isinstance(inner, SlurmftCheckpointIO) else contextlib.nullcontext():
            yield
    finally:
        if inner is not given:
            strategy.checkpoint_io = given
