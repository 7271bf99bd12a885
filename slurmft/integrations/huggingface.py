"""Hugging Face's Trainer, and those that are built on it, such as TRL's:

    trainer = Trainer(..., callbacks=[SlurmftCallback()])
    trainer.train(resume_from_checkpoint=last_good_checkpoint(args.output_dir))

The Trainer saves in its own way. slurmft says before which step all ranks do so, notes which folders are finished on
every rank, and ends the workers after the save where the run is to stop. Outside of a run it does nothing. With
``SlurmftCallback(engine="slurmft")`` checkpoints are those of slurmft (``huggingface_engine``).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from slurmft.errors import UsageError
from slurmft.integrations import finished_folders, huggingface_engine
from slurmft.integrations.huggingface_engine import Engine
from slurmft.integrations.huggingface_limits import INSTALL, check_settings, check_version
from slurmft.integrations.ranks import common_steps, wait_for_all
from slurmft.ipc.pages.heartbeat import PAGE_VARIABLE, StopAction
from slurmft.worker.framework_loop import FrameworkLoop
from slurmft.worker.session import Session, start_session

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
            finished_folders.begin(Path(args.output_dir), step)
        wait_for_all()  # no rank saves before that
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
            finished_folders.withdraw(_folder(args, state))
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
        step, folder = int(state.global_step), _folder(args, state)
        wait_for_all()  # a rank writes files of its own, which are synced too
        if args.local_process_index == 0:
            finished_folders.make_durable(folder)
        wait_for_all()
        if args.should_save:
            finished_folders.mark(folder, step, args.world_size)
        self._committed = step
        if args.should_save and self._limit is not None and self._limit > 0:
            finished_folders.prune(folder.parent, limit=self._limit, newest=step, best=state.best_model_checkpoint)
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
            finished_folders.about_to_save(Path(args.output_dir))
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
        return huggingface_engine.resume_folder(output, SlurmftCallback._resumed)
    if engine is None and huggingface_engine.has_folders(output):
        log.warning("%s was trained with engine='slurmft', and what that has saved is not looked at now", output)
    return str(Path(output_dir) / f"checkpoint-{steps[-1]}") if steps else None


def _end_before_the_next_step() -> None:
    """A Trainer that resumes at its last step trains another one before it looks: from now on it gets no batch."""
    draw = transformers.Trainer.get_batch_samples

    def get_batch_samples(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step < trainer.state.max_steps:
            return draw(trainer, *args, **kwargs)
        trainer.control.should_training_stop = True
        return [], None

    transformers.Trainer.get_batch_samples = get_batch_samples


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{int(state.global_step)}"
