"""The few collectives of the adapters: before and after a save, and before a load; none in the steps between."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from slurmft.integrations.finished_folders import finished_steps
from slurmft.trainer.host_group import host_group

COMPARED = 64
"""Of so many newest folders the ranks find those that all of them can read."""

log = logging.getLogger(__name__)


def wait_for_all() -> None:
    """Return when every rank is here; at once where ranks are not connected."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(torch.zeros(1), group=host_group())


def common_steps(parent: Path) -> list[int]:
    """The newest steps whose folders every rank finds finished, lowest first; this rank's own where ranks are not
    connected.

    Raises:
        OSError: the folder cannot be read.
    """
    steps = finished_steps(parent)[-COMPARED:]
    if not dist.is_available() or not dist.is_initialized():
        return steps
    mine = torch.full((COMPARED,), -1, dtype=torch.int64)
    mine[: len(steps)] = torch.tensor(steps, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine, group=host_group())
    found = [set(row.tolist()) - {-1} for row in rows]
    common = sorted(set.intersection(*found))
    if not common and any(found):
        lacking = [rank for rank, each in enumerate(found) if not each]
        log.warning("ranks %s find no finished checkpoint in %s, others do: is it on a shared disk?", lacking, parent)
    return common
