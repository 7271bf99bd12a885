"""Checks and signals for loops of one's own, without a session, an agent or Slurm."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from slurmft.errors import UsageError
from slurmft.ipc.pages import PAGE_VARIABLE
from slurmft.policy.symptoms import FailureCategory
from slurmft.trainer.savers import host_group, takes_host_data, timeout_of
from slurmft.worker.failures import categorize_failure

# --- failure checks ---
# Is it the GPU, or the network? For loops of one's own: what to ask after a failure, and the little that can be done.
#
# The answers are None for no failure, or a word. Under an agent none of this is needed: let the exception pass, and all
# ranks are restarted from the newest checkpoint.

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


# --- Checks that a training loop may run on itself, without an agent and without Slurm ---

_OUT_OF_MEMORY = (FailureCategory.DEVICE_OUT_OF_MEMORY, FailureCategory.HOST_OUT_OF_MEMORY)

_FINITE = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))
"""Types without NaN and infinity."""


class HealthMonitor:
    """Looks at progress, results and memory of one process. Decides nothing, ends nothing. Safe to ask from any thread.

    Args:
        timeout_seconds: without progress for longer than this, the process is stuck.

    Raises:
        UsageError: the timeout is not a positive number.
    """

    def __init__(self, timeout_seconds: float = 300, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds < math.inf:
            raise UsageError(f"timeout_seconds is {timeout_seconds!r}; it is a positive number of seconds")
        self.timeout_seconds = timeout_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = clock()
        self._step: int | None = None
        self._failures_before = device_allocation_failures()

    @property
    def seconds_since_progress(self) -> float:
        """Since the last new step, or since this monitor was made."""
        with self._lock:
            return max(0.0, self._clock() - self._last_s)

    def update_progress(self, step: int | None = None) -> None:
        """Something was done just now."""
        with self._lock:
            self._last_s, self._step = self._clock(), step if step is not None else self._step

    def check_progress(self, step: int | None = None) -> bool:
        """Whether there was progress within the timeout.

        In the loop, with its ``step``: one that is another than at the last call is progress, which this call notes
        after it has looked. From elsewhere, without a step, it only looks.
        """
        with self._lock:
            now_s = self._clock()
            is_well = now_s - self._last_s <= self.timeout_seconds
            if step is not None and step != self._step:
                self._last_s, self._step = now_s, step
            return is_well

    def detect_nan_inf(self, loss: Any) -> bool:
        """Whether a number, a tensor of any type and layout, or any of those in a list or mapping is NaN or infinite.

        A tensor on a GPU is waited for, as by ``loss.item()``.

        Raises:
            UsageError: there is something in it that is not a number, or a tensor without data.
        """
        return _has_nan_or_inf(loss)

    def detect_oom(self, error: BaseException | None = None, *, threshold: float = 0.95) -> bool:
        """Whether ``error`` says that memory has run out, the host's or the device's.

        Without one, whether it has or is about to: an allocation on the device has failed since this monitor was made,
        or more than ``threshold`` of the device, the machine or the job's limit is in use.
        """
        if error is not None:
            return categorize_failure(error) in _OUT_OF_MEMORY
        if device_allocation_failures() > self._failures_before:
            return True
        return max(host_fraction_used(), device_fraction_used()) > threshold


def _comparable(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The values of ``tensor`` in tensors that torch can look at: it has no isfinite for float8 and sparse layouts."""
    if tensor.is_meta:
        raise UsageError("a tensor on the meta device has no values to look at")
    if tensor.is_quantized:  # its scale may be NaN
        return [tensor.dequantize()]
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype in _FINITE:
        return []
    if tensor.layout is torch.sparse_coo:
        # torch cannot add float8, so values that share a place are checked apart
        return _comparable(tensor._values() if tensor.dtype.itemsize == 1 else tensor.coalesce().values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return _comparable(tensor.values())
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in _comparable(each)]
    return [tensor.float() if tensor.dtype.itemsize == 1 else tensor]  # e8m0's isfinite calls its NaN finite


def _has_nan_or_inf(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(not bool(torch.isfinite(part).all()) for part in _comparable(value.detach()))
    if getattr(value, "shape", None) == ():  # of numpy: one number, but iterable by its type
        value = value.item()
    if isinstance(value, complex):
        return not (math.isfinite(value.real) and math.isfinite(value.imag))
    if isinstance(value, Mapping):
        return any([_has_nan_or_inf(each) for each in value.values()])
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return any([_has_nan_or_inf(each) for each in value])
    try:
        return not math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False
    except (TypeError, ValueError) as error:
        raise UsageError(f"{value!r:.60} is neither a number nor a tensor") from error


_CGROUPS = Path("/sys/fs/cgroup")


def host_fraction_used() -> float:
    """Between 0 and 1, of the machine or of the tightest limit above this process; the larger one."""
    return max([psutil.virtual_memory().percent / 100, *_cgroup_fractions(_own_cgroup())])


def device_fraction_used() -> float:
    """Between 0 and 1, of the current CUDA device, for all processes; 0 where there is none or it is unused yet."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0.0
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    reusable_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # ours, and free for ourselves
    return max(0.0, 1.0 - (free_bytes + reusable_bytes) / total_bytes)


def device_allocation_failures() -> int:
    """How often the allocator of the current device had to give up."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


def _own_cgroup() -> Path | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                return _CGROUPS / line.removeprefix("0::/")
    return None


def _cgroup_fractions(folder: Path | None, root: Path = _CGROUPS) -> list[float]:
    found = []
    while folder is not None and folder != root and root in folder.parents:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit here
            limit_bytes = int((folder / "memory.max").read_text())
            used_bytes = int((folder / "memory.current").read_text())
            rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache_bytes = sum(int(value) for name, value in rows if name in ("active_file", "inactive_file"))
            found.append((used_bytes - cache_bytes) / max(limit_bytes, 1))
        folder = folder.parent
    return found


# --- Remember a signal, and share it with all ranks: for own loops, without a session and without an agent ---


class DistributedSignalHandler:
    """While it is entered, ``sig`` is remembered instead of ending the process.

        with DistributedSignalHandler() as handler:
            for step in range(steps):
                train(step)
                if any(handler.signals_received()):
                    save(step)
                    break

    The handler does nothing but remember, and call the one that was there before where that is a function. It is put
    back on leaving, unless another one was installed meanwhile. ``session.steps`` does all of this by itself, without a
    collective.

    Args:
        sig: the signal.
        group: the ranks that exchange what they have seen; all of them, and not over NCCL, when not given.
    """

    def __init__(self, sig: int = signal.SIGTERM, *, group: Any = None) -> None:
        try:
            self.sig = signal.Signals(sig)
        except ValueError as error:
            raise UsageError(f"{sig!r} is not a signal") from error
        self._group = group
        self._seen = self._entered = False
        self._before: signal._HANDLER = None

    @property
    def signal_received(self) -> bool:
        """Whether this very process has got it."""
        return self._seen

    def signals_received(self) -> list[bool]:
        """For each rank, whether it has got the signal; the same on all of them. A collective: every rank calls it.

        Without a process group, the answer of this process alone.
        """
        if not dist.is_available() or not dist.is_initialized():
            return [self._seen]
        group = self._group if self._group is not None else host_group()
        device = torch.device("cpu") if takes_host_data(group) else torch.device("cuda", torch.cuda.current_device())
        own = torch.tensor([int(self._seen)], dtype=torch.int32, device=device)
        everybody = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everybody, own, group=group)
        return [bool(flag) for flag in torch.cat(everybody).tolist()]

    def release(self) -> bool:
        """Put the former handler back; False when that is done already."""
        if not self._entered:
            return False
        self._entered = False
        if signal.getsignal(self.sig) == self._note:
            signal.signal(self.sig, self._before if self._before is not None else signal.SIG_DFL)
        return True

    def __enter__(self) -> Self:
        if self._entered:
            raise UsageError("this DistributedSignalHandler is entered already", hint="make another one")
        self._seen = False
        try:
            self._before = signal.signal(self.sig, self._note)
        except (ValueError, OSError) as error:  # not the main thread; SIGKILL
            raise UsageError(f"{self.sig.name} cannot be handled here: {error}") from error
        self._entered = True
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self._seen = not self._seen, True
        if first and callable(self._before) and self._before is not signal.default_int_handler:  # that raises
            self._before(number, frame)
