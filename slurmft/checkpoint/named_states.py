"""Checkpoints by their name: one folder among others, or any plain state of a program that has no model."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from slurmft.checkpoint.agreement import Guard, failure
from slurmft.checkpoint.catalog import Catalog, Entry
from slurmft.checkpoint.folders import prune
from slurmft.checkpoint.format.plain_state import as_plain, original
from slurmft.checkpoint.loading import LoadedCheckpoint, Loading
from slurmft.checkpoint.state import Stateful, Tolerance, Trainee
from slurmft.checkpoint.team import Team
from slurmft.checkpoint.writer.write_requests import order_of
from slurmft.errors import CheckpointError, UsageError
from slurmft.storage.checkpoint_names import MAX_STEP
from slurmft.trainer.savers import SAVERS

_ID = "checkpoint_id: "
"""Beginning of the metric that an id which is no number is kept as: markers hold metrics, and can be read cheaply."""

_STATE = "plain state"


class NamedStates(ABC):
    """The part of ``CheckpointManager`` that knows checkpoints by name. All methods are collectives, as there."""

    directory: Path
    settings: Any
    _distrusted: Any

    def save_checkpoint(self, state: Any, checkpoint_id: int | str) -> Path | None:
        """Save any plain state, such as a dict of numbers, texts, lists and tensors; rank 0's where there are several.

        The id is a step number, or any other name, whose step is then the one after the newest. Saved like a model:
        committed last, verified when it is loaded, pruned by ``keep_last_n``. It is durable on return: of saves that
        overlap, a newer one may take the place of an older one, and each id is to be found again.

        Raises:
            CheckpointError: nothing was saved, older checkpoints are untouched.
            UsageError: the id is neither a number of a step nor a name, or this is a signal handler (see ``save``).
        """
        if SAVERS.is_left_to_the_session():
            return None
        step, name = _numbered(checkpoint_id)
        metrics = {f"{_ID}{name}": 0.0} if name else {}
        if step is None:
            step = self._newest_step() + 1
        model, optimizer = _nothing()
        return self.save(
            model, optimizer, step=step, metrics=metrics, extra={_STATE: as_plain(state)}, async_save=False
        )

    def load_checkpoint(self, checkpoint_id: int | str | None = None) -> Any:
        """The state that ``save_checkpoint`` was given under this id, or the newest one; None where there is none.

        Raises:
            CheckpointError: it exists and cannot be used, or holds a model (``load_latest`` loads those).
            UsageError: the id is neither a number of a step nor a name.
        """
        model, optimizer = _nothing()
        if checkpoint_id is None:
            loaded = self.load_latest(model, optimizer)
        else:
            step, name = _numbered(checkpoint_id)
            loaded = self._load_chosen(
                Trainee(model, optimizer),
                lambda entry: entry.step == step if step is not None else f"{_ID}{name}" in entry.metrics,
            )
        if not loaded.found:
            return None
        if _STATE not in loaded.extra:
            raise CheckpointError(f"{loaded.path} was not saved by save_checkpoint(state, id)",
                                  hint="load_latest(model, optimizer) loads the checkpoint of a model")  # fmt: skip
        return original(loaded.extra[_STATE])

    def cleanup_old_checkpoints(self, keep_last: int | None = None) -> int:
        """Remove all but the newest ``keep_last`` (``keep_last_n`` when empty), the best one, those of ``keep_every``,
        and always the newest two good ones. Returns how many are gone.

        Every save does so by itself; this is for a lower number. Saves under way are waited for.

        Raises:
            CheckpointError: a save under way failed, or the folder cannot be read.
            UsageError: ``keep_last`` is not positive.
        """
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise UsageError(f"keep_last is {keep_last!r:.60}; at least 1 checkpoint must be kept")
        self.wait()
        team, guard, gone = Team(), Guard(), 0
        if team.is_lead:
            with guard:
                keep = order_of(self.settings, {}, self._distrusted).keep
                before = len(Catalog(self.directory).committed())
                prune(self.directory, replace(keep, keep_last_n=keep_last or keep.keep_last_n))
                gone = before - len(Catalog(self.directory).committed())
        code, gone = team.from_lead([guard.code, gone])
        if code:
            raise failure(f"old checkpoints in {self.directory} were not removed", [code], team, guard)
        return gone

    def get_latest_checkpoint_id(self) -> int | str | None:
        """The id of the newest checkpoint, for ``load_checkpoint``: its step, or its name; None where there is none.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if (step := self._newest_step()) < 0:
            return None
        entry = next((each for each in Catalog(self.directory).committed() if each.step == step), None)
        return (named(entry) if entry else "") or step

    def load_from(
        self,
        path: Path | str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        allow_missing: Collection[str] = (),
        allow_cast: bool = False,
    ) -> LoadedCheckpoint:
        """As ``load_latest``, the checkpoint in the folder ``path``, from disk. It may be another run's.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit the objects.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise UsageError(f"checkpoint_path is {path!r:.60}; it is the folder of a checkpoint")
        folder = Path(path)
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        tolerance = Tolerance.of(allow_missing, allow_cast=allow_cast)
        loaded = self._load_chosen(trainee, lambda entry: entry.path.name == folder.name, folder.parent, tolerance)
        if loaded.found:
            return loaded
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file, and checkpoints of slurmft are folders",
                                  hint="load it once with torch.load, then save it here")  # fmt: skip
        raise CheckpointError(f"there is no checkpoint {folder}", hint=f"slurmft checkpoint list {folder.parent}")

    def _load_chosen(
        self, trainee: Trainee, chosen: Any, directory: Path | None = None, tolerance: Tolerance | None = None
    ) -> LoadedCheckpoint:
        self._settle()
        place = directory or self.directory
        loading = Loading(place, trainee, tolerance or Tolerance.of((), allow_cast=False))
        loaded = loading.chosen(chosen)
        return self._loaded(loading, loaded) if os.path.realpath(place) == os.path.realpath(self.directory) else loaded

    def _newest_step(self) -> int:
        """Of all checkpoints, also of one that is still being written; the same on all ranks."""
        self._settle()
        model, optimizer = _nothing()
        return Loading(self.directory, Trainee(model, optimizer)).newest_step()

    @abstractmethod
    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, step: int,
        metrics: Mapping[str, SupportsFloat] | None = None, extra: Mapping[str, Any] | None = None,
        async_save: bool | None = None,
    ) -> Path | None: ...  # fmt: skip

    @abstractmethod
    def load_latest(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> LoadedCheckpoint: ...

    @abstractmethod
    def wait(self) -> None: ...

    @abstractmethod
    def _settle(self) -> None: ...

    @abstractmethod
    def _loaded(self, loading: Loading, loaded: LoadedCheckpoint) -> LoadedCheckpoint: ...


def named(entry: Entry) -> str:
    """The id that ``save_checkpoint`` was given, where it was no number; else empty."""
    return next((name.removeprefix(_ID) for name in entry.metrics if name.startswith(_ID)), "")


def _numbered(checkpoint_id: object) -> tuple[int | None, str]:
    """(step, "") or (None, name)."""
    if isinstance(checkpoint_id, str):
        if checkpoint_id.isascii() and checkpoint_id.isdecimal() and int(checkpoint_id) <= MAX_STEP:
            return int(checkpoint_id), ""
        if checkpoint_id.strip() and checkpoint_id.isprintable() and len(checkpoint_id) <= 200:
            return None, checkpoint_id
    elif not isinstance(checkpoint_id, bool):
        try:
            step = operator.index(checkpoint_id)  # type: ignore[arg-type]
        except TypeError:
            step = -1
        if 0 <= step <= MAX_STEP:
            return step, ""
    raise UsageError(f"checkpoint_id is {checkpoint_id!r:.60}", hint="a step number from 0 on, or a name of one line")


def _nothing() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that stand for none: both must be there in a checkpoint."""
    model = torch.nn.ParameterDict({"none": torch.zeros(())})
    return model, torch.optim.SGD(model.parameters(), lr=0.0)
