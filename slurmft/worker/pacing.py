"""When this run saves periodically: by steps, by seconds or by itself, before the same step on every rank.

By steps it is arithmetic. Otherwise rank 0 announces the step a few times in an interval, as two integers in a
broadcast (``schedule``); the steps between cost one comparison.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from slurmft.policy.checkpoints.checkpoint_settings import CheckpointSettings
from slurmft.policy.timing import checkpoint_interval
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.memory_folder import MEMORY_VARIABLE
from slurmft.trainer.host_group import host_group
from slurmft.trainer.savers import SAVERS
from slurmft.worker.schedule import Automatic, EverySeconds, SaveSchedule, SaveTimer, Spacing, ToldSchedule

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
        spacing = _spacing(settings, nodes)
        self._timer = SaveTimer(spacing, now_ns=now_ns(), on_cost=on_cost) if is_lead else None

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
            is_lead=not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0,
            tell=_from_rank_0,
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


def _spacing(settings: CheckpointSettings, nodes: int) -> Spacing:
    if settings.interval != "auto":
        return EverySeconds(settings.interval_seconds or checkpoint_interval.LONGEST_S)
    unseen = checkpoint_interval.FailureHistory()
    mtbf_s = settings.mtbf_s or checkpoint_interval.mtbf_s(unseen, nodes)
    return Automatic(mtbf_s, longest_s=settings.interval_seconds)


def _count(text: str) -> int:
    return max(1, int(text)) if text.isascii() and text.isdecimal() and len(text) < 8 else 1


def _from_rank_0(row: Sequence[int]) -> list[int]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(row)
    tensor = torch.tensor(list(row), dtype=torch.int64)
    dist.broadcast(tensor, src=0, group=host_group())
    values: list[int] = tensor.tolist()
    return values
