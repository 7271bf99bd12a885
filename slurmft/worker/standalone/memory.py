"""How full the memory of this process's host and device is. Limits of the job (cgroups) count, page cache does not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import torch

_CGROUPS = Path("/sys/fs/cgroup")


def host_fraction_used() -> float:
    """Between 0 and 1, of the machine or of the tightest limit above this process; the larger one."""
    return max([psutil.virtual_memory().percent / 100, *_cgroup_fractions(_own_cgroup())])


def device_fraction_used() -> float:
    """Between 0 and 1, of the current CUDA device, whoever uses it; 0 where there is none or it is not in use yet."""
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
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit here
            limit_bytes = int((folder / "memory.max").read_text())
            used_bytes = int((folder / "memory.current").read_text())
            rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache_bytes = sum(int(value) for name, value in rows if name in ("active_file", "inactive_file"))
            found.append((used_bytes - cache_bytes) / max(limit_bytes, 1))
        folder = folder.parent
    return found
