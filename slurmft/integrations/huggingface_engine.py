"""The state of a Hugging Face training in checkpoints of slurmft, instead of the Trainer's own files:

    <run folder>/checkpoints/step-00000040.g1.c2/    weights, optimizer, schedule, random numbers of every rank
    output/slurmft-40/trainer_state.json             the Trainer's counters, without which it finds no place in its data
    output/slurmft-40/model.safetensors              no weights: the Trainer refuses a folder without such a file

A save is made right before the next step, when evaluations, logs and the end of an epoch are over and the next batches
are drawn. The folder in ``output`` is written first, so that each checkpoint has one, also one that is in memory only.
Its name is none that the Trainer would find by itself: without the callback it would train on from nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmft.checkpoint.catalog import Catalog
from slurmft.checkpoint.manager import CheckpointManager
from slurmft.errors import CheckpointError, UsageError
from slurmft.integrations.huggingface_limits import check_engine_settings
from slurmft.storage.fence import check_fence
from slurmft.system.files import replace_atomically
from slurmft.trainer import rng
from slurmft.worker.framework_loop import FrameworkLoop
from slurmft.worker.session import Session

STATE, WEIGHTS = "trainer_state.json", "model.safetensors"
NO_WEIGHTS = "\x02\0\0\0\0\0\0\0{}"
"""A safetensors file with nothing in it: the length of its header, and that."""

_FOLDER = re.compile(r"slurmft-([0-9]{1,15})")
_OF_ALL_MODELS = "_keys_to_ignore_on_save"
_MISSING_KEYS = "There were missing keys in the checkpoint model loaded"

log = logging.getLogger(__name__)


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
        self._randomness = rng.capture()

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
            rng.restore(self._randomness)
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
        folder = _folder(self._output, step)
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
    folder = _folder(output, step)
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


def _folder(output: Path, step: int) -> Path:
    return output / f"slurmft-{step}"


def _folders(output: Path) -> Iterator[tuple[int, Path]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(output) as entries:
        yield from [(int(match[1]), Path(entry.path)) for entry in entries if (match := _FOLDER.fullmatch(entry.name))]


def _not_of_the_empty_file(record: logging.LogRecord) -> bool:
    """The weights come from the checkpoint, a moment after the Trainer has found none."""
    return not str(record.msg).startswith(_MISSING_KEYS)
