"""Lightning, as ``lightning`` and as ``pytorch_lightning``: scripts need no line of their own.

Both packages ask the entry points below ``callbacks_factory`` for callbacks of every Trainer. In a worker of a run they
get one: it ends each step at a safe point of the session, where all ranks save or stop alike, and lets ``fit`` go on
from the newest complete save. Anywhere else they get none.

``MINIMUM`` and the newest version are tested.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib
import inspect
import io
import logging
import math
import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path
from typing import Any, ClassVar

import torch

from slurmft.errors import CheckpointError, StorageError, UsageError
from slurmft.integrations.folders import MarkedFolders, packed, verify, with_digest
from slurmft.ipc.pages import PAGE_VARIABLE
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import check_fence
from slurmft.storage.run_folder import followed
from slurmft.system import files
from slurmft.system.files import replace_atomically
from slurmft.trainer import savers
from slurmft.worker.session import Session, settle_order_of_gradients, start_session

# --- lightning data ---
# Where a Lightning training is in its data: which batches of the epoch are done, and the draws that ordered them.
#
# Lightning counts the batches of an unfinished epoch when it resumes, but reads them from the first one again, and
# saves no generator. Here the epoch begins as it did: with the same random numbers, and the batches that are done are
# read and left out. Loaders with ``state_dict`` (torchdata's StatefulDataLoader) go to their place by themselves.


class EpochData:
    """The data of one call of ``Trainer.fit``, on this rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] = {}
        self._epoch_rng: savers.RandomState | None = None
        self._is_first = True

    def state(self, *, between_epochs: bool) -> dict[str, Any]:
        """To save: batches of the epoch that are done, generators before it, and states of loaders that have one."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        savers.mend()
        loaders = [] if between_epochs else self._trainer.fit_loop._combined_loader._state_dicts()
        return {"batches": 0 if between_epochs else batches, "epoch_rng": self._epoch_rng, "loaders": loaders}

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state`` returned, with ``rng`` added; nothing where it is empty."""
        self._saved = saved

    def restore_randomness(self) -> None:
        """Before an epoch: a training that was saved between two epochs has its generators again."""
        if self._saved and not self._saved["batches"]:
            savers.restore(self._saved["rng"])
            self._saved = {}

    def begin_epoch(self, original: Any, data_fetcher: Any) -> None:
        """In place of the epoch loop's ``on_run_start``: the iterator is made with known random numbers.

        The first one of a process was made earlier, before loaders knew the epoch they shuffle for.
        """
        saved, self._saved = self._saved, {}
        is_first, self._is_first = self._is_first, False
        if saved:
            savers.restore(saved["epoch_rng"])
        self._epoch_rng = savers.capture()
        if is_first:
            savers.mend()
            data_fetcher.combined_loader._load_state_dicts(loaders := saved.get("loaders", []))
            iter(data_fetcher)
            if saved and not loaders:
                self._skip(data_fetcher, saved["batches"])
        if saved:
            savers.restore(saved["rng"])
        original(data_fetcher)

    def _skip(self, data_fetcher: Any, batches: int) -> None:
        if batches and self._trainer.is_global_zero:
            log.info("reading the first %d batches of the epoch again, to go on behind them", batches)
        for _ in range(batches):
            next(data_fetcher)
        data_fetcher.fetched = 0  # Lightning adds those that are done


def begin_a_new_epoch(loop: dict[str, Any]) -> None:
    """In the state of a fit loop between two epochs: no batch of the next one is done.

    Lightning leaves the counters of the old epoch there, and with ``max_steps`` would go on behind its last batch.
    """
    loop.get("state_dict", {}).pop("combined_loader", None)
    for key, progress in loop.items():
        if key.startswith("epoch_loop.") and not key.startswith("epoch_loop.val_loop."):
            _zero_current(progress)


def _zero_current(progress: dict[str, Any]) -> None:
    for key, value in progress.items():
        if key == "current":
            value.update(dict.fromkeys(value, 0))
        elif key == "is_last_batch":
            progress[key] = False
        elif isinstance(value, dict) and key != "total":
            _zero_current(value)


# --- Lightning's checkpoints, written in the background and verified when they are loaded: ---
#     trainer = Trainer(..., plugins=[SlurmftCheckpointIO()])
#
# A file has the name, place and format that Lightning gives it, so that ``load_from_checkpoint`` and Trainers without
# the plugin read it. Rank 0 copies the state into memory and trains on; a thread writes it under a hidden name, syncs
# it, and renames it last: a file under its own name is whole. It holds a digest of itself (``folders``).
#
# The state does not go through ``CheckpointManager``: its saves are collectives of all ranks, and Lightning saves and
# removes on rank 0 alone.

MOST = 2
"""States in memory at a time: one that is being written, and the next."""

ABANDONED_S = 3600.0
"""Without a change for so long, a hidden file has no writer any more."""

_HIDDEN = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")


class SlurmftCheckpointIO:
    """A ``CheckpointIO`` of Lightning, for ``lightning`` and for ``pytorch_lightning``, in a run and outside of one.

    Saves and removals are done in the order of the calls. A checkpoint that Lightning replaces by a newer one is
    removed when the newer one is on the disk, and stays where that failed. The Trainer waits at the end of ``fit``.

    Args:
        weights_only: load tensors and plain values only, and run no code of the file, where Lightning does not say.
    """

    def __init__(self, *, weights_only: bool = True) -> None:
        _be_a_checkpoint_io()
        self._weights_only = weights_only
        self._thread: ThreadPoolExecutor | None = None
        self._saves: deque[Future[None]] = deque()
        self._removals: deque[Future[None]] = deque()
        self._cleaned: set[Path] = set()
        self._at_once = self._last_failed = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy the state, and write it in the background.

        Raises:
            CheckpointError, Fenced: this save was not begun, or an earlier one has failed since the last call.
            UsageError: the path is none of a file on this machine.
        """
        if storage_options is not None:
            raise UsageError("SlurmftCheckpointIO has no storage_options", hint="leave them out, or the plugin")
        place = _local(path)
        _settle(self._saves, MOST - 1)
        copied = packed(checkpoint)
        self._do(place, lambda: self._write(copied, place), self._saves)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _place: storage, weights_only: bool | None = None
    ) -> Any:
        """The state in a file all of whose checksums are right; saves of this process are waited for.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it is torn or damaged, or an earlier save has failed; another user has put it, or a link to
                it, into a folder that is not theirs, or could have written it and objects of classes are asked for.
            pickle.UnpicklingError: there are objects of classes in it, and ``weights_only`` is true.
        """
        self.wait()
        place = _local(path)
        safe = self._weights_only if weights_only is None else weights_only
        try:
            real = followed(place)
            descriptor = files.open_regular(real, owners=files.trusted_owners(real.parent))
        except (StorageError, files.UnsafeFile) as error:
            if isinstance(error, OSError) and error.errno != errno.EPERM:
                raise
            raise CheckpointError(f"{place} is not loaded: {error}", hint="copy it, if you trust it") from error
        with BufferedReader(FileIO(descriptor)) as stream:
            status = os.fstat(descriptor)
            if not safe and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
                raise CheckpointError(
                    f"{place} belongs to another user, or others may write to it: its objects could run any code",
                    hint="copy it, if you trust it; with weights_only=True no code is run",
                )
            verify(stream, place)
            try:
                return torch.load(stream, map_location=map_location, weights_only=safe)
            except RuntimeError as error:
                raise CheckpointError(f"{place} cannot be loaded: {error}") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file, or the folder of a sharded checkpoint, after the saves before it; it stays if they failed."""
        place = _local(path)
        _settle(self._removals, len(self._removals))
        self._do(place, lambda: self._remove(place), self._removals)

    def wait(self) -> None:
        """Return when all saves are durable.

        Raises:
            CheckpointError, Fenced: one of them has failed; those behind it are waited for at the next call.
        """
        _settle(self._saves, 0)
        _settle(self._removals, 0)

    def teardown(self) -> None:
        """The Trainer is done: wait for all saves. Where it ends with an error of its own, theirs are only logged.

        Raises:
            CheckpointError, Fenced: one of them has failed.
        """
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        if sys.exc_info()[1] is not None:  # a planned stop would become a failure; the thread has logged it
            self._saves.clear()
            self._removals.clear()
        self.wait()

    @contextlib.contextmanager
    def writing_at_once(self) -> Iterator[None]:
        """Saves are durable on return."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _do(self, place: Path, task: Callable[[], None], tasks: deque[Future[None]]) -> None:
        # hidden ones are the tuner's and the launcher's: other processes read them as soon as rank 0 returns
        is_elsewhere = threading.current_thread() is not threading.main_thread()  # AsyncCheckpointIO's
        if self._at_once or is_elsewhere or place.name.startswith("."):
            task()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slurmft-lightning")
        tasks.append(self._thread.submit(self._in_order, task, place, is_save=tasks is self._saves))

    def _in_order(self, task: Callable[[], None], place: Path, *, is_save: bool) -> None:
        if self._last_failed and not is_save:
            log.warning("%s stays: the save before its removal has failed", place)
            return
        self._last_failed |= is_save
        task()
        self._last_failed = False

    def _write(self, copied: BytesIO, place: Path) -> None:
        began_s = time.monotonic()
        try:
            check_fence()
            place.parent.mkdir(parents=True, exist_ok=True)
            self._clean(place.parent)
            replace_atomically(place, with_digest(copied), mode=0o644 & ~_umask())
        except (OSError, StorageError) as error:
            log.error("%s was not saved: %s", place, error)
            if isinstance(error, StorageError):
                raise
            raise CheckpointError(f"{place} was not saved: {error}", hint="an older file is untouched") from error
        log.info("saved %s in %.2f s (%d bytes)", place, time.monotonic() - began_s, copied.tell())

    def _remove(self, place: Path) -> None:
        check_fence()
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        except OSError as error:
            raise CheckpointError(f"{place} was not removed: {error}") from error

    def _clean(self, folder: Path) -> None:
        """Once for each folder: remove what saves that were killed have left."""
        if folder in self._cleaned:
            return
        self._cleaned.add(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_old = time.time() - status.st_mtime > ABANDONED_S and status.st_uid == os.geteuid()
                    if _HIDDEN.fullmatch(entry.name) and is_old and entry.is_file(follow_symlinks=False):
                        os.unlink(entry.path)  # noqa: PTH108


def _settle(tasks: deque[Future[None]], most: int) -> None:
    """Raise what has failed, and wait until no more than so many are left."""
    while tasks and (len(tasks) > most or tasks[0].done()):
        tasks.popleft().result()


def _be_a_checkpoint_io() -> None:
    """Both packages have a class of their own, and ask whether a plugin is one; a class can be both without a base."""
    known = ("lightning.fabric", "lightning_fabric")
    found = 0
    for package in [name for name in known if name in sys.modules] or known:
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(f"{package}.plugins.io.checkpoint_io")
            module.CheckpointIO.register(SlurmftCheckpointIO)
            found += 1
    if not found:
        raise UsageError("SlurmftCheckpointIO needs Lightning", hint="pip install lightning")


def _local(path: str | Path) -> Path:
    if "://" in (text := os.fspath(path)):
        raise UsageError(f"SlurmftCheckpointIO writes files, and {text} is none", hint="leave the plugin out there")
    return Path(text).absolute()


def _umask() -> int:
    """Looked up, not set and set back: other threads make files meanwhile."""
    with contextlib.suppress(OSError, StopIteration):
        lines = files.read_text("/proc/self/status").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o077


# --- One ``Trainer.fit`` of Lightning in a run: its safe points, its saves, and where it goes on ---
# The safe point lies before a batch is fetched, and before an epoch begins: whatever belongs to the step before (its
# validation, schedulers, other callbacks' saves) is done, and nothing of the next one has begun. Lightning has no hook
# there, so for the time of ``fit`` a few methods are replaced on the objects of that Trainer.

STATE_FILE = "trainer.ckpt"
"""As ``Trainer.save_checkpoint`` writes it: one file, or a folder where the strategy shards."""

RANK_LIMIT_BYTES = 1 << 30
"""Of a rank's own file: generators, and the states of its data loaders."""

ENDLESS = 2**29 - 1
"""Steps of a training whose length is unknown: the most that a session counts."""


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
        own = {"rng": savers.capture(), **self._data.state(between_epochs=self.saves_between_epochs)}

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
            content = files.read_bytes(_rank_file(folder, self.session.rank), limit_bytes=RANK_LIMIT_BYTES)
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


# --- Lightning, as ``lightning`` and as ``pytorch_lightning``: scripts need no line of their own ---

MINIMUM, BELOW = (2, 5), (3, 0)

log = logging.getLogger(__name__)


def lightning_callbacks() -> list[Any]:
    """The entry point ``lightning.pytorch.callbacks_factory``."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """The entry point ``pytorch_lightning.callbacks_factory``."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    if PAGE_VARIABLE not in os.environ:
        _say_idle()
        return []
    version = importlib.import_module(package).__version__
    if not MINIMUM <= tuple(int(part) for part in version.split(".")[:2]) < BELOW:
        lowest, end = (".".join(map(str, one)) for one in (MINIMUM, BELOW))
        raise UsageError(
            f"slurmft knows {package} from {lowest} on and below {end}; this is {version}",
            hint="install a version of that range, or uninstall slurmft from this environment",
        )
    return [_callback_class(package)()]


@functools.cache
def _say_idle() -> None:
    """Once in a process, and not as a warning: scripts get here because slurmft is installed."""
    log.info("this is not a run of slurmft (slurmft submit): Lightning saves and stops as ever")


@functools.cache
def _callback_class(package: str) -> type[Any]:
    return type("SlurmftCallback", (_Hooks, importlib.import_module(f"{package}.callbacks").Callback), {})


class _Hooks:
    """The methods of the callback; Lightning calls them."""

    _fit: Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if sum(isinstance(one, _Hooks) for one in trainer.callbacks) > 1:
            raise UsageError(
                "this Trainer has two callbacks of slurmft, which would both save",
                hint="remove the one in callbacks=[...]: in a run every Trainer gets one by itself",
            )
        if (world := int(os.environ.get("WORLD_SIZE", "1"))) != trainer.world_size:
            raise UsageError(
                f"the run has {world} workers, and this Trainer {trainer.world_size}",
                hint="give the Trainer devices=<nproc_per_node> and num_nodes=<nodes> of the configuration",
            )
        # Lightning's handlers save and call scontrol inside of a signal, and broadcast there: our session's remembers
        trainer._signal_connector.register_signal_handlers = lambda: None
        if self._fit is not None:
            self._fit.restore_methods()
        self._fit = Fit(trainer, Process.shared(), self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.begin()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._fit is not None and self._fit.saves_between_epochs:
            begin_a_new_epoch(checkpoint["loops"]["fit_loop"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:  # called once in log_every_n_steps: the value waits for the device
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._fit.session.report(loss=loss.item())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.session.start_section("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.session.end_section("validation")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.restore_methods()
        if Process.current is not None and not isinstance(exception, SystemExit):
            Process.current.leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._fit is not None and stage == "fit":
            self._fit.end()
            self._fit.restore_methods()
            self._fit = None
