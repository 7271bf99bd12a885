"""``HealthChecker(worker_id)`` with one method for each kind of check, over the probes of ``slurmft health``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.errors import UsageError
from slurmft.health import checker

PROBES: Mapping[str, tuple[str, ...]] = {
    "gpu": ("gpu-count", "gpu-ecc", "gpu-clocks", "gpu-pcie", "gpu-nvlink", "gpu-processes", "xid"),
    "memory": ("memory", "edac", "shared-memory"),
    "network": ("links", "infiniband", "names"),
    "disk": ("disk-space", "read-only", "disk-write", "filesystems"),
}
"""Kind of check -> the probes that answer for it."""

Check = Mapping[str, Any]


class HealthChecker:
    """Health of the node that this worker runs on, by kind of check. Needs no torch, no GPU and no process group.

    A check is True when a probe of its kind could look and none is CRITICAL, False when one is, and None when there is
    nothing of that kind, such as no GPU, or no probe could look. Subclasses may override the checks. The probes run in
    a process of their own, so a look takes about a second, and a GPU that hangs does not hang the caller.

    Args:
        worker_id: a number or name, which the answers repeat.
        config: the file of the probes' limits; by default as for ``slurmft health``.

    Raises:
        ConfigError: the configuration cannot be used.
        UsageError: ``worker_id`` is neither a number nor a name.
    """

    def __init__(self, worker_id: int | str, *, config: Path | None = None) -> None:
        if isinstance(worker_id, bool) or not isinstance(worker_id, int | str):
            raise UsageError(f"worker_id is {worker_id!r:.60}; it is a number or a name")
        self.worker_id = worker_id
        self._config = config
        self._all: Sequence[Check] | None = None
        """The results of all kinds, within ``check_health``."""

        checker.HealthChecker(config)

    def check_health(self) -> dict[str, Any]:
        """All checks: ``{"healthy": True, "checks": {"gpu": None, "memory": True, ...}, "timestamp": ...}``.

        healthy: no check is False, and one at least is True. ``problems`` names what is not as it should be, and
        ``worker_id`` whose answer it is. timestamp: seconds since 1970.
        """
        self._all = self._look([name for names in PROBES.values() for name in names])
        try:
            checks = {
                "gpu": self.check_gpu(), "memory": self.check_memory(), "network": self.check_network(),
                "disk": self.check_disk(),
            }  # fmt: skip
            problems = [f"{one['name']}: {one['detail']}" for one in self._all if one["status"] != "OK"]
        finally:
            self._all = None
        healthy = any(checks.values()) and all(check is None or bool(check) for check in checks.values())
        return {
            "healthy": healthy, "checks": checks, "timestamp": time.time(), "worker_id": self.worker_id,
            "problems": problems,
        }  # fmt: skip

    def check_gpu(self) -> bool | None:
        """Count, memory errors, clocks, PCIe, NVLink and Xid messages of the node's GPUs; None where there are none."""
        return self._check("gpu")

    def check_memory(self) -> bool | None:
        """Free memory of the node and of the job, memory errors, left-over shared memory."""
        return self._check("memory")

    def check_network(self) -> bool | None:
        """Links, InfiniBand ports and name resolution; ``detect_network_failure`` tries the process group."""
        return self._check("network")

    def check_disk(self) -> bool | None:
        """Space, writing, and filesystems that do not answer."""
        return self._check("disk")

    def _check(self, kind: str) -> bool | None:
        names = PROBES[kind]
        found = self._all if self._all is not None else self._look(names)
        seen = {one["status"] for one in found if one["name"] in names} - {"UNKNOWN"}
        return None if not seen else "CRITICAL" not in seen

    def _look(self, names: Sequence[str]) -> Sequence[Check]:
        checks: Sequence[Check] = checker.HealthChecker(self._config, only=names).check_health()["checks"]
        return checks
