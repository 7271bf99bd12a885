"""The checkpoint manager under the names that many training scripts use already, to ease migration."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, SupportsFloat, cast

import torch

from slurmft.checkpoint.manager import CheckpointManager
from slurmft.checkpoint.mappings import ReadsAsMapping
from slurmft.checkpoint.state import Stateful
from slurmft.errors import UsageError

_EPOCH = "epoch"


@dataclass(frozen=True, slots=True)
class TrainingState(ReadsAsMapping):
    """The state at which a script goes on.

    Also a mapping, for scripts that know a loaded file as one: ``state["step"]``, ``state["epoch"]``,
    ``state["metrics"]``, and the keys of ``extra``. It is empty when there is no checkpoint yet, and its epoch is the
    step where a save was given only one number.
    """

    step: int = 0
    """Steps that are complete; 0 when there is no checkpoint yet."""

    epoch: int = 0
    """What ``save_checkpoint(epoch=...)`` was given; 0 where nothing was."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    """The folder; None when there is no checkpoint yet."""

    has_epoch: bool = False
    """Whether the save was given an epoch."""

    def as_mapping(self) -> Mapping[str, Any]:
        """Its keys and values; none when there is no checkpoint yet."""
        if self.path is None:
            return {}
        epoch = self.epoch if self.has_epoch else self.step
        return {**self.extra, "step": self.step, "epoch": epoch, "metrics": self.metrics, "path": self.path}


class DistributedCheckpointManager:
    """``save_checkpoint``, ``load_checkpoint`` and ``cleanup_old_checkpoints`` over a ``CheckpointManager``.

    Every method is called by all ranks, also where scripts used to call it on rank 0 only. Options are those of
    ``CheckpointManager``, which is available as ``manager``.
    """

    def __init__(self, checkpoint_dir: Path | str, keep_last_n: int | None = None, **options: Any) -> None:
        self.manager = CheckpointManager(checkpoint_dir, keep_last_n, **options)

    def save_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        epoch: int | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """``CheckpointManager.save``; the epoch is kept as well, and is the step where none is given.

        A script that counts epochs alone passes ``save_checkpoint(model, optimizer, epoch, metrics)``.

        An epoch, like ``extra``, is what it was at the last save: saving just in time is off then. It can often be
        computed from the step.

        Raises:
            CheckpointError: nothing was saved, older checkpoints are untouched.
            UsageError: ``extra`` has a key ``epoch``, or there is neither a step nor an epoch, or one is no number.
        """
        for name, number in (("step", step), ("epoch", epoch)):
            if number is not None and (isinstance(number, bool) or not hasattr(number, "__index__")):
                raise UsageError(f"{name} is {number!r:.60}; it is an integer")
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UsageError(f"metrics is {metrics!r:.60}; it is a dict of numbers")
        if step is None and epoch is None:
            raise UsageError("neither a step nor an epoch was given", hint="save_checkpoint(model, optimizer, step)")
        if step is None:
            step = epoch
        assert step is not None
        kept = dict(extra or {})
        if _EPOCH in kept:
            raise UsageError("extra has a key 'epoch'", hint="pass epoch= instead")
        if epoch is not None:
            kept[_EPOCH] = int(epoch)
        return self.manager.save(
            model, optimizer, step=step, metrics=metrics, scheduler=scheduler, scaler=scaler, loader=loader,
            extra=kept or None,
        )  # fmt: skip

    def load_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoint_path: Path | str | None = None,
        *,
        which: Literal["latest", "best"] = "latest",
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        allow_missing: Collection[str] = (),
        allow_cast: bool = False,
    ) -> TrainingState:
        """Load into the objects and say where to go on: at step 0 when there is no checkpoint yet.

        Args:
            checkpoint_path: the folder of a checkpoint; the newest one's when empty. The words "latest" and "best"
                count as ``which``.

        Raises:
            CheckpointError: checkpoints exist and none is usable, they do not fit the objects, or there is none in
                ``checkpoint_path``.
            UsageError: ``which`` is neither, or ``checkpoint_path`` is no path.
        """
        if checkpoint_path in ("latest", "best"):
            which, checkpoint_path = cast("Literal['latest', 'best']", checkpoint_path), None
        if which not in ("latest", "best"):
            raise UsageError(f"which is {which!r}; it is 'latest' or 'best'")
        load = self.manager.load_latest if which == "latest" else self.manager.load_best
        if checkpoint_path is not None:
            load = functools.partial(self.manager.load_from, checkpoint_path)
        loaded = load(
            model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader, allow_missing=allow_missing,
            allow_cast=allow_cast,
        )  # fmt: skip
        extra = dict(loaded.extra)
        epoch = extra.pop(_EPOCH, None)
        return TrainingState(
            step=loaded.step, epoch=epoch if type(epoch) is int else 0, metrics=loaded.metrics, extra=extra,
            path=loaded.path if loaded.found else None, has_epoch=type(epoch) is int,
        )  # fmt: skip

    def cleanup_old_checkpoints(self, keep_last_n: int | None = None) -> int:
        """Remove all but the newest ``keep_last_n`` (the manager's own number when empty) and what else is kept: the
        best one, every ``keep_every`` steps, and always the newest two good ones. Returns how many are gone.

        Every save does so by itself; this is for a lower number. Saves under way are waited for.

        Raises:
            CheckpointError: a save under way failed, or the folder cannot be read.
            UsageError: ``keep_last_n`` is not positive.
        """
        return self.manager.cleanup_old_checkpoints(keep_last_n)

    def wait(self) -> None:
        """``CheckpointManager.wait``: return when everything is durable."""
        self.manager.wait()

    def close(self) -> None:
        """``CheckpointManager.close``."""
        self.manager.close()
