"""Hugging Face's Trainer, and those that are built on it, such as TRL's:

    trainer = Trainer(..., callbacks=[SlurmftCallback()])
    trainer.train(resume_from_checkpoint=last_good_checkpoint(args.output_dir))

The Trainer saves in its own way. slurmft says before which step all ranks do so, notes which folders are finished on
every rank, and ends the workers after the save where the run is to stop. Outside of a run it does nothing. With
``SlurmftCallback(engine="slurmft")`` checkpoints are those of slurmft.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from slurmft.checkpoint.catalog import Catalog
from slurmft.checkpoint.manager import CheckpointManager
from slurmft.errors import CheckpointError, UsageError
from slurmft.integrations import folders
from slurmft.integrations.folders import common_steps, wait_for_all
from slurmft.ipc.pages import PAGE_VARIABLE, StopAction
from slurmft.storage.checkpoint_names import check_fence
from slurmft.system.files import replace_atomically
from slurmft.trainer import savers
from slurmft.worker.session import FrameworkLoop, Session, start_session

# --- What the callback for Hugging Face's Trainer supports: versions, and the Trainer's settings ---

LOWEST, NEWEST = (4, 57), (5, 23)
"""Versions of transformers that are tested; newer ones are tried."""

INSTALL = "pip install transformers accelerate"


def check_version(version: str) -> None:
    """Return when this version of transformers is supported.

    Raises:
        UsageError: it is too old, or no version.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < LOWEST:
        raise UsageError(
            f"transformers {version} is not supported: SlurmftCallback needs {LOWEST[0]}.{LOWEST[1]} or newer",
            hint=INSTALL,
        )
    if numbers > NEWEST:
        log.info("transformers %s is newer than those that were tested (up to %d.%d)", version, *NEWEST)


def check_settings(args: Any) -> None:
    """Raises UsageError for settings with which a stop could save nothing to resume from."""
    if args.save_only_model:
        raise UsageError("save_only_model=True: a stop would save nothing to resume from", hint="leave it out")
    if getattr(args, "enable_jit_checkpoint", False):
        raise UsageError("enable_jit_checkpoint=True: two would save at a stop", hint="leave it out under slurmft")


def check_engine_settings(args: Any) -> None:
    """Raises UsageError for settings of the Trainer that need its own files."""
    needs = {
        "load_best_model_at_end=True": args.load_best_model_at_end,
        "save_strategy='best'": str(getattr(args.save_strategy, "value", args.save_strategy)) == "best",
        "fsdp": bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"),
        "deepspeed": bool(args.deepspeed),
        "auto_find_batch_size=True": args.auto_find_batch_size,
        "ignore_data_skip=True": args.ignore_data_skip,
    }
    if wrong := [name for name, is_set in needs.items() if is_set]:
        raise UsageError(
            f"{wrong[0]} needs the Trainer's own files: SlurmftCallback(engine='slurmft') writes none",
            hint="leave one of the two out",
        )


# --- The state of a Hugging Face training in checkpoints of slurmft, instead of the Trainer's own files: ---
#     <run folder>/checkpoints/step-00000040.g1.c2/    weights, optimizer, schedule, random numbers of every rank
#     output/slurmft-40/trainer_state.json             the Trainer's counters, without which it finds no place in
#                                                      its data
#     output/slurmft-40/model.safetensors              no weights: the Trainer refuses a folder without such a file
#
# A save is made right before the next step, when evaluations, logs and the end of an epoch are over and the next
# batches are drawn. The folder in ``output`` is written first, so that each checkpoint has one, also one that is in
# memory only. Its name is none that the Trainer would find by itself: without the callback it would train on from
# nothing.

STATE, WEIGHTS = "trainer_state.json", "model.safetensors"
NO_WEIGHTS = "\x02\0\0\0\0\0\0\0{}"
"""A safetensors file with nothing in it: the length of its header, and that."""

_FOLDER = re.compile(r"slurmft-([0-9]{1,15})")
_OF_ALL_MODELS = "_keys_to_ignore_on_save"
_MISSING_KEYS = "There were missing keys in the checkpoint model loaded"


class Engine:
    """The checkpoints of one training."""

    def __init__(self, session: Session, args: Any, model: Any) -> None:
        """
        Raises:
            UsageError: the Trainer has settings that need its own files.
        """
        check_engine_settings(args)
        if model is not None and not hasattr(model, _OF_ALL_MODELS):  # no PreTrainedModel
            setattr(type(model), _OF_ALL_MODELS, None)  # the Trainer asks for it where weights are missing
        self._session, self._output, self._should_write = session, Path(args.output_dir), bool(args.should_save)
        self._checkpoints = CheckpointManager(session.checkpoint_dir)
        self._randomness: dict[str, Any] | None = None
        self._parts: dict[str, Any] = {}
        self._state: Any = None
        self._is_due = False

    def next_step(self) -> int | None:
        """The step with which a training goes on; None where there is no checkpoint yet.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return self._checkpoints.next_step()

    def load(self, state: Any, objects: Mapping[str, Any], *, resumed: int | None) -> None:
        """Give the Trainer's ``objects`` the state of step ``resumed``, of which its counters are already.

        Raises:
            UsageError: the Trainer was not given what ``last_good_checkpoint`` returned.
            CheckpointError: it cannot be loaded, or is of another step.
        """
        if others := sorted({*state.stateful_callbacks} - {"TrainerControl"}):
            raise UsageError(
                f"SlurmftCallback(engine='slurmft') does not keep the state of {', '.join(others)}",
                hint="leave engine= out: the Trainer's own files hold it",
            )
        self._state = state
        optimizer = objects["optimizer"]
        self._parts = {"model": objects["model"], "optimizer": getattr(optimizer, "optimizer", optimizer),
                       "scheduler": objects["lr_scheduler"], "scaler": getattr(optimizer, "scaler", None)}  # fmt: skip
        if not state.global_step and self.next_step() is not None:
            raise UsageError(
                f"{self._checkpoints.directory} has checkpoints, and the Trainer begins anew",
                hint="train(resume_from_checkpoint=last_good_checkpoint(args.output_dir)), after Trainer(...)",
            )
        if resumed is None:
            return
        loaded = self._checkpoints.load_latest(**self._parts)
        if loaded.step != resumed or loaded.step != state.global_step:
            raise CheckpointError(
                f"step {loaded.step} was loaded, and the Trainer goes on from step {int(state.global_step)}",
                hint="a newer checkpoint could not be read; the next start leaves it out",
            )
        self._randomness = savers.capture()

    def take_over(self, control: Any) -> None:
        """What the Trainer was about to save, this saves before the next step."""
        self._is_due |= bool(control.should_save)
        control.should_save = False

    def before_step(self, loop: FrameworkLoop) -> None:
        """Save where that is due or asked for.

        Raises:
            PlannedStop: the run is to end here.
        """
        if self._randomness is not None:  # the Trainer has drawn from them to find its place in the data
            savers.restore(self._randomness)
            self._randomness = None
        if self._is_due or loop.has_pending:
            loop.save(is_due=self._is_due)
            self._is_due = False

    def begin(self, loop: FrameworkLoop) -> None:
        """Saves of the loop are made here."""
        loop.saves_with(self._save)

    def end(self, loop: FrameworkLoop) -> None:
        """The training is over: return when its last state is durable, where one was due."""
        loop.save_last(is_due=self._is_due)
        if self._should_write:
            self._prune()
        self._checkpoints.close()

    def _save(self, step: int) -> None:
        if self._should_write:
            self._write_folder(step)
        self._checkpoints.save(**self._parts, step=step, extra={"trainer": "huggingface"})
        if self._should_write:
            self._prune()

    def _write_folder(self, step: int) -> None:
        check_fence()
        folder = _folder_of_engine(self._output, step)
        folder.mkdir(parents=True, exist_ok=True)
        replace_atomically(folder / WEIGHTS, NO_WEIGHTS, mode=0o644)
        text = json.dumps(dataclasses.asdict(self._state), indent=2, sort_keys=True) + "\n"
        replace_atomically(folder / STATE, text, mode=0o644)

    def _prune(self) -> None:
        """Folders of checkpoints that are gone go, too."""
        there = {entry.step for entry in Catalog(self._checkpoints.directory).committed()}
        for step, folder in _folders(self._output):
            if there and step < max(there) and step not in there:
                shutil.rmtree(folder, ignore_errors=True)


def resume_folder(output: Path, step: int) -> str:
    """The folder for ``resume_from_checkpoint`` that belongs to the checkpoint of ``step``.

    Raises:
        UsageError: it is not there.
    """
    folder = _folder_of_engine(output, step)
    if not (folder / STATE).exists() or not (folder / WEIGHTS).exists():
        raise UsageError(
            f"the run has a checkpoint of step {step}, and there is no {folder}",
            hint="give the output_dir of the start that saved it, or use a new run folder",
        )
    logging.getLogger("transformers.trainer").addFilter(_not_of_the_empty_file)
    return str(folder)


def step_of(folder: str | None) -> int | None:
    """The step of a folder that ``resume_folder`` returned; None for any other."""
    match = _FOLDER.fullmatch(Path(folder).name) if folder else None
    return int(match[1]) if match else None


def has_folders(output: Path) -> bool:
    """Whether a training has saved through slurmft there."""
    return any(True for _ in _folders(output))


def _folder_of_engine(output: Path, step: int) -> Path:
    return output / f"slurmft-{step}"


def _folders(output: Path) -> Iterator[tuple[int, Path]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(output) as entries:
        yield from [(int(match[1]), Path(entry.path)) for entry in entries if (match := _FOLDER.fullmatch(entry.name))]


def _not_of_the_empty_file(record: logging.LogRecord) -> bool:
    """The weights come from the checkpoint, a moment after the Trainer has found none."""
    return not str(record.msg).startswith(_MISSING_KEYS)


# --- Hugging Face's Trainer, and those that are built on it, such as TRL's: ---

try:
    import transformers
except ImportError as missing:
    raise UsageError("slurmft.integrations.huggingface needs transformers", hint=INSTALL) from missing

log = logging.getLogger(__name__)


class SlurmftCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops, saves and progress of a Trainer under slurmft.

    A stop (a preemption, the time limit, ``slurmft stop``) and ``slurmft save`` make all ranks save after the same
    step, without a collective in the steps between. An evaluation that is due at that step comes first, as ever.
    ``save_total_limit`` is kept by this callback, after each save, so that the newest finished folder is never
    removed.

    Args:
        engine: ``"slurmft"``: weights, optimizer, schedule and random numbers go into checkpoints of slurmft, which are
            copied to memory and written in the background. None: into the Trainer's own files.

    Raises (in the ``train`` method):
        PlannedStop: the run was asked to stop, and its state is saved.
        UsageError: a Trainer has two of these callbacks, or settings with which nothing could be resumed.
    """

    _in_charge: ClassVar[SlurmftCallback | None] = None
    _session: ClassVar[Session | None] = None
    _said_idle: ClassVar[bool] = False
    _engine: ClassVar[Engine | None] = None
    _resumed: ClassVar[int | None] = None
    """The step that ``last_good_checkpoint`` has named, of a checkpoint of the engine."""

    def __init__(self, engine: Literal["slurmft"] | None = None) -> None:
        """
        Raises:
            UsageError: this version of transformers is not supported, or ``engine`` is no such word.
        """
        check_version(transformers.__version__)
        if engine not in (None, "slurmft"):
            raise UsageError(f"engine={engine!r}", hint="it is 'slurmft', or left out for the Trainer's own files")
        self._wants_engine = engine is not None
        self._loop: FrameworkLoop | None = None
        self._control: Any = None
        self._limit: int | None = None
        self._committed = -1
        self._is_at_epochs_end = False
        self._own: Engine | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """The process group exists now: join the run."""
        if PAGE_VARIABLE not in os.environ:
            if not SlurmftCallback._said_idle and args.should_log:
                log.warning("this is not a run of slurmft (slurmft submit): SlurmftCallback does nothing")
            SlurmftCallback._said_idle = True
            return
        check_settings(args)
        if SlurmftCallback._session is None:
            SlurmftCallback._session = start_session()
        if self._wants_engine:
            if SlurmftCallback._engine is not None:
                raise UsageError("two trainings of one run with engine='slurmft'", hint="submit a run for each of them")
            SlurmftCallback._engine = Engine(SlurmftCallback._session, args, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        session = SlurmftCallback._session
        if session is None:
            return
        if PAGE_VARIABLE in os.environ:
            check_settings(args)
        other = SlurmftCallback._in_charge
        if other is not None and other is not self and other._control is control:
            raise UsageError("this Trainer has two SlurmftCallbacks", hint="give it one")
        if state.is_hyper_param_search:
            raise UsageError(
                "SlurmftCallback does not support hyperparameter_search(), whose trials have folders of their own",
                hint="submit one run for each trial",
            )
        SlurmftCallback._in_charge, self._control = self, control
        if self._limit is None:
            # HF would remove the last finished folder before the new one is finished on every rank
            self._limit, args.save_total_limit = args.save_total_limit, None
        step = int(state.global_step)
        if args.should_save:
            folders.begin(Path(args.output_dir), step)
        wait_for_all()  # no rank saves before that
        _pass_epochs(objects.get("train_dataloader"), int(state.epoch or 0))
        self._committed, self._is_at_epochs_end = step, False
        if self._wants_engine and SlurmftCallback._engine is not None:
            self._own = SlurmftCallback._engine
            self._own.load(state, objects, resumed=SlurmftCallback._resumed)
        self._loop = FrameworkLoop(session, start=step, until=int(state.max_steps))
        if self._own is not None:
            self._own.begin(self._loop)
        if step >= int(state.max_steps):
            _end_before_the_next_step()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loop = self._loop
        if loop is not None and self._own is not None:
            self._own.before_step(loop)
        if loop is not None and loop.is_busy:
            loop.training()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loop = self._loop
        if loop is None:
            return
        pending = loop.step_done(state.global_step)
        if self._own is not None:
            self._own.take_over(control)
            self._announce(args, control)
            return
        # what is due at an epoch's end belongs to this step, and comes right after it
        self._is_at_epochs_end = float(state.epoch).is_integer()
        if pending is not StopAction.NONE and not self._is_at_epochs_end:
            control.should_save = True
        self._announce(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loop = self._loop
        if loop is None:
            return
        if self._own is not None:
            self._own.take_over(control)
            self._announce(args, control)
            return
        self._is_at_epochs_end = False
        is_saved = self._committed == state.global_step
        if loop.pending is not StopAction.NONE:
            if is_saved and not control.should_save and not control.should_evaluate:
                loop.answer()
                return
            control.should_save = True
        if is_saved and control.should_save and args.should_save:
            folders.withdraw(_folder_of_trainer(args, state))
        self._announce(args, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._loop is not None and self._loop.is_busy:
            self._loop.evaluating()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loop = self._loop
        if loop is None:
            return
        loop.training()
        if control.should_save:
            loop.saving()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        session = SlurmftCallback._session
        if session is not None and self._loop is not None and logs and "loss" in logs:
            session.report(loss=float(logs["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loop = self._loop
        if loop is None:
            return
        step, folder = int(state.global_step), _folder_of_trainer(args, state)
        wait_for_all()  # a rank writes files of its own, which are synced too
        if args.local_process_index == 0:
            folders.make_durable(folder)
        wait_for_all()
        if args.should_save:
            folders.mark(folder, step, args.world_size)
        self._committed = step
        if args.should_save and self._limit is not None and self._limit > 0:
            folders.prune(folder.parent, limit=self._limit, newest=step, best=state.best_model_checkpoint)
        wait_for_all()  # a save is over when the marker is there
        loop.saved(step)
        if not self._is_at_epochs_end and self._own is None:
            loop.answer()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._loop is None:
            return
        if self._own is not None:
            self._own.end(self._loop)
        self._loop.end()
        self._loop, SlurmftCallback._in_charge = None, None
        args.save_total_limit, self._limit = self._limit, None

    def _announce(self, args: Any, control: Any) -> None:
        """Say what the Trainer does before its next step."""
        assert self._loop is not None
        if control.should_save and args.should_save:
            folders.about_to_save(Path(args.output_dir))
        if control.should_evaluate:
            self._loop.evaluating()
        elif control.should_save:
            self._loop.saving()


def last_good_checkpoint(output_dir: str | Path) -> str | None:
    """The newest folder ``checkpoint-STEP`` in ``output_dir`` that is finished on every rank; None where there is none.

    For ``train(resume_from_checkpoint=...)``. Where the ranks of the run are connected already (that is so when
    ``TrainingArguments`` exist), all of them get the same answer: the newest one that each of them can read. It counts
    as finished when its marker says so and its files have the sizes in it. Folders that the Trainer wrote without this
    callback count as well, as long as none of their files is missing or cut off.

    Raises:
        OSError: the folder cannot be read.
    """
    output = Path(output_dir)
    steps, engine = common_steps(output), SlurmftCallback._engine
    own = engine.next_step() if engine is not None else None
    SlurmftCallback._resumed = own if own is not None and own >= max(steps, default=0) else None
    if SlurmftCallback._resumed is not None:
        return resume_folder(output, SlurmftCallback._resumed)
    if engine is None and has_folders(output):
        log.warning("%s was trained with engine='slurmft', and what that has saved is not looked at now", output)
    return str(Path(output_dir) / f"checkpoint-{steps[-1]}") if steps else None


def _pass_epochs(loader: Any, epochs: int) -> None:
    """Draw what a sampler with random numbers of its own has drawn before this epoch.

    The Trainer saves no such numbers, and tells the epoch only to samplers with ``set_epoch``: TRL's ``RepeatSampler``
    would begin again with the first epoch's order.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    if getattr(sampler, "generator", None) is not None and not hasattr(sampler, "set_epoch"):
        for _ in range(epochs):
            collections.deque(sampler, maxlen=0)


def _end_before_the_next_step() -> None:
    """A Trainer that resumes at its last step trains another one before it looks: from now on it gets no batch."""
    draw = transformers.Trainer.get_batch_samples

    def get_batch_samples(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step < trainer.state.max_steps:
            return draw(trainer, *args, **kwargs)
        trainer.control.should_training_stop = True
        return [], None

    transformers.Trainer.get_batch_samples = get_batch_samples


def _folder_of_trainer(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{int(state.global_step)}"
