"""The micro-batch and the accumulation of this start: as asked for, unless an earlier start ran out of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.policy.checkpoints.batches import BatchSplit, split_batch
from slurmft.policy.checkpoints.oom import pieces
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.attempt_facts import note_batches
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE


class Batches:
    """Cuts the trainer's batch into as many pieces as the supervisor says, and reports the trainer's numbers.

    The supervisor cannot know a trainer's batch; the file in the attempt's folder shows it how far it may go.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        settings = WorkerSettings.from_environment(environment)
        self._base_world_size, self.divisor = settings.base_world_size, settings.batch_divisor
        folder = environment.get(ERROR_DIR_VARIABLE)
        self._folder = Path(folder) if folder and environment.get("RANK", "0") == "0" else None
        self._asked: set[int] = set()
        self._pieces = self.divisor

    def micro_batch(self, samples: int) -> int:
        """``samples``, or a part of them with which they can be covered exactly."""
        if type(samples) is not int or samples < 1:
            raise UsageError(f"a micro-batch of {samples!r} samples makes no sense")
        if samples not in self._asked:
            self._asked.add(samples)
            if self._folder is not None:
                note_batches(self._folder, self._asked, self.divisor)
        self._pieces = pieces(samples, self.divisor)
        return samples // self._pieces

    def accumulation(self, steps: int = 1) -> int:
        """``steps`` times the number of pieces of the micro-batch that was asked for last."""
        if type(steps) is not int or steps < 1:
            raise UsageError(f"an accumulation over {steps!r} micro-batches makes no sense")
        return steps * self._pieces

    def split(self, global_batch: int, world_size: int, max_micro_batch: int) -> BatchSplit:
        """``split_batch`` of ``policy.checkpoints.batches`` with this start's micro-batch, and its ranks' samples."""
        if self._base_world_size > 0:
            global_batch = max(1, global_batch * world_size // self._base_world_size)
        return split_batch(global_batch, world_size, self.micro_batch(max_micro_batch))
