"""Is it the GPU, or the network? For loops of one's own: what to ask after a failure, and the little that can be done.

The answers are None for no failure, or a word. Under an agent none of this is needed: let the exception pass, and all
ranks are restarted from the newest checkpoint.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from slurmft.errors import UsageError
from slurmft.ipc.pages.heartbeat import PAGE_VARIABLE
from slurmft.trainer.host_group import timeout_of
from slurmft.worker.standalone.failures import FailureCategory, categorize_failure

log = logging.getLogger(__name__)

SIZE = 100
LOOK_S = 0.01
JOIN_AGAIN_S = 1800.0

_again = itertools.count(1)


def detect_gpu_failure() -> str | None:
    """None, ``CUDA_UNAVAILABLE``, ``OOM``, ``CUDA_ERROR`` or ``UNKNOWN_GPU_ERROR``: the current device is tried.

    A product of small integers is compared with its known result, so a GPU that computes wrongly is a ``CUDA_ERROR``
    as well. Waits for what the current stream is doing; a device that hangs is not answered for.
    """
    if not torch.cuda.is_available():
        return "CUDA_UNAVAILABLE"
    try:
        ones = torch.ones(SIZE, SIZE, device="cuda")
        product = ones @ ones
        if bool((product == SIZE).all()):  # waits for the device
            return None
        log.error("a GPU computes wrongly: %d of %d sums are not %d", int((product != SIZE).sum()), SIZE**2, SIZE)
    except (RuntimeError, AssertionError) as error:
        log.error("the GPU cannot be used: %s", error)
        if categorize_failure(error) is FailureCategory.DEVICE_OUT_OF_MEMORY:
            return "OOM"
        return "CUDA_ERROR" if "CUDA" in str(error) or "HIP" in str(error) else "UNKNOWN_GPU_ERROR"
    return "CUDA_ERROR"


def detect_network_failure(timeout_seconds: float = 30) -> str | None:
    """None, ``TIMEOUT``, ``NCCL_ERROR`` or ``COMMUNICATION_ERROR``: a small all-reduce of the default group is tried.

    A collective: all ranks call it at the same place. After any failure the group must not be used again, since its
    all-reduce may still be under way: end the process, or ``handle_nccl_timeout``. Without a process group the answer
    is ``COMMUNICATION_ERROR``.

    Raises:
        UsageError: the timeout is not a positive number of seconds.
    """
    _check_seconds("timeout_seconds", timeout_seconds)
    if not dist.is_available() or not dist.is_initialized():
        log.error("there is no process group to try the network with")
        return "COMMUNICATION_ERROR"
    deadline_s = time.monotonic() + timeout_seconds
    try:
        on_gpu = dist.get_backend() == "nccl"
        one = torch.ones(1, device="cuda" if on_gpu else "cpu")
        work = dist.all_reduce(one, async_op=True)
        while work is not None and not work.is_completed():
            if time.monotonic() > deadline_s:
                return "TIMEOUT"
            time.sleep(LOOK_S)
        if work is not None:
            work.wait()  # raises what has gone wrong
        if one.item() == dist.get_world_size():
            return None
        log.error("the sum of %d ones over all ranks is %g", dist.get_world_size(), one.item())
    except (RuntimeError, ValueError) as error:
        log.error("the network cannot be used: %s", error)
        if "NCCL" in str(error) or "RCCL" in str(error):
            return "NCCL_ERROR"
    return "COMMUNICATION_ERROR"


def handle_nccl_timeout(retry_seconds: float = 5.0) -> bool:
    """Leave the process group and make a new one of the same ranks; whether that worked.

    A collective: all ranks of the group call it, and each of them must be alive. What was computed by a collective that
    failed is lost, so go on from a checkpoint. False under an agent, where it is not tried: let the exception pass, and
    all ranks are restarted, those too that cannot call this any more.

    Raises:
        UsageError: the wait is not a number of seconds.
    """
    _check_seconds("retry_seconds", retry_seconds, zero=True)
    if os.environ.get(PAGE_VARIABLE):
        log.warning("the process group is not made anew: the agent restarts all ranks when this process ends")
        return False
    if not dist.is_available() or not dist.is_initialized():
        log.error("there is no process group to make anew")
        return False
    backend, timeout = dist.get_backend(), timeout_of(dist.group.WORLD) or timedelta(seconds=JOIN_AGAIN_S)
    try:
        dist.destroy_process_group()
        time.sleep(retry_seconds)
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        own = PrefixStore(f"slurmft again {next(_again)}", store)  # the store may have the old group's keys
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        log.error("the process group cannot be made anew: %s", error)
        return False
    log.warning("the process group is made anew: %d ranks, %s", size, backend)
    return True


def handle_gpu_oom(batch_size: int | None = None) -> int | None:
    """Give the device's unused memory back; half of ``batch_size`` and at least 1, or None when it is not given.

    Call it outside of the ``except`` block: the exception keeps the tensors of its frames alive. With a session,
    ``oom.action: reduce_batch`` and ``session.micro_batch`` keep the global batch the same.

    Raises:
        UsageError: ``batch_size`` is not a positive integer.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise UsageError(f"batch_size is {batch_size!r:.60}; it is a positive integer")
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if batch_size is None:
        return None
    reduced = max(1, batch_size // 2)
    log.warning("out of memory: the batch size %d becomes %d", batch_size, reduced)
    return reduced


def _check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < math.inf or (zero and value == 0)):  # type: ignore[operator]
        raise UsageError(f"{name} is {value!r:.60}; it is a {'' if zero else 'positive '}number of seconds")
