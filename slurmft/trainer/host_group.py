"""The process group for data in main memory: the default one where it takes such data, else a gloo group beside it.

NCCL moves memory of a GPU only, runs one operation after the other on each communicator, and waits for all pending work
of the device. Agreements of ranks, and transfers from memory to memory, must not go over it. Every rank makes the group
at the same place: right after the default group (``worker.groups``), or at the first collective of this package in a
script that has made its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

DESCRIPTION = "slurmft host"
"""By which the group is found again; torch forgets it together with the default group."""

BACKEND = "gloo"
DEFAULT_TIMEOUT = timedelta(minutes=30)

_CPU = torch.device("cpu")


def takes_host_data(group: Any = None) -> bool:
    """Whether ``group``, or the default one, moves tensors in main memory."""
    return _CPU in _device_types(group if group is not None else distributed_c10d._get_default_group())


def host_group(timeout: timedelta | None = None) -> Any:
    """The group over all ranks to give to collectives of tensors in main memory; a collective where it is made.

    Args:
        timeout: of the group where it is made now; the default group's own when it is not given.
    """
    world = distributed_c10d._get_default_group()
    if takes_host_data(world):
        return world
    for group in distributed_c10d._world.pg_map:
        if group.group_desc == DESCRIPTION:
            return group
    timeout = timeout or timeout_of(world) or DEFAULT_TIMEOUT
    return dist.new_group(backend=BACKEND, timeout=timeout, group_desc=DESCRIPTION)


def any_rank(mine: bool) -> bool:
    """Whether it is so on some rank; a collective where there are several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=host_group())
    return bool(flag.item())


def timeout_of(group: Any) -> timedelta | None:
    """After how long a collective of ``group`` times out, as the group itself says; None where it cannot be asked.

    Of several backends the shortest one counts.
    """
    found = list[timedelta]()
    for device in _device_types(group):
        try:
            options = group._get_backend(device).options
        except (RuntimeError, AttributeError):  # a backend without options has no timeout that could be read
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout)
    return min(found, default=None)


def _device_types(group: Any) -> list[torch.device]:
    return [torch.device(device) for device in group._device_types]
