"""Checks that a training loop may run on itself, without an agent and without Slurm."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from slurmft.errors import UsageError
from slurmft.worker.standalone.failures import FailureCategory, categorize_failure

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
