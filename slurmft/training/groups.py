"""Process groups with explicit timeouts: long until the first step of the process is done, short afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)


class ProcessGroups:
    """The world group and those made with ``new_group``.

    A timeout must be a ``timedelta`` and must be given to each group: torch ignores a float in some places, and
    ``new_group`` does not inherit it. So they are set here, read back, and logged.
    """

    def __init__(self, device: torch.device, init_timeout: timedelta, step_timeout: timedelta) -> None:
        self.device = device
        self._init_timeout, self._step_timeout = init_timeout, step_timeout
        self._timeout = init_timeout

    @classmethod
    def join(cls, backend: str | None = None) -> ProcessGroups:
        """Initialise torch.distributed from the environment; without RANK and WORLD_SIZE there is no group to join.

        Raises:
            torch.distributed.DistError: the group cannot be joined.
        """
        environment = os.environ
        init, step = (
            timedelta(minutes=float(environment.get(f"SLURMFT_{phase}_TIMEOUT_MINUTES", default)))
            for phase, default in (("INIT", "30"), ("STEP", "10"))
        )
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        wanted = backend or environment.get("SLURMFT_BACKEND", "auto")
        use_gpu = torch.cuda.is_available() and wanted in ("auto", "nccl")
        device = torch.device("cuda", local_rank % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(device)
        groups = cls(device, init, step)
        if "RANK" in environment and "WORLD_SIZE" in environment and not dist.is_initialized():
            name = ("nccl" if use_gpu else "gloo") if wanted == "auto" else wanted
            dist.init_process_group(name, timeout=init, device_id=device if use_gpu else None)
        return groups

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        """A group with the timeout of the present phase unless ``timeout`` is given."""
        options.setdefault("timeout", self._timeout)
        return dist.new_group(ranks, **options)

    def after_first_step(self) -> None:
        """Shorten the timeout of every group: start-up, compilation and the first load are over."""
        self._timeout = self._step_timeout
        if not dist.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(self._step_timeout, group)
        log.info("collective timeouts after the first step: %s", self.timeouts())

    def timeouts(self) -> dict[str, float]:
        """Seconds until a collective of each group times out, as the groups themselves say."""
        if not dist.is_initialized():
            return {}
        found: dict[str, float] = {}
        for group, (backend, _store) in distributed_c10d._world.pg_map.items():
            options = group._get_backend(self.device).options
            found[f"{distributed_c10d._world.pg_names[group]} ({backend})"] = options._timeout.total_seconds()
        return found

    def facts(self) -> dict[str, Any]:
        """What to log about the groups."""
        return {"device": str(self.device), "timeout_s": self.timeouts(), "step_timeout_s": self._step_timeout.seconds}

    def close(self, *, orderly: bool) -> None:
        """Leave the groups. After a failure only the process's own end is safe: a destroy may wait for the dead."""
        if not dist.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):
            # Never run its destructor: ProcessGroupGloo's takes a mutex while it holds the GIL, and its own thread may
            # hold that mutex while it frees a tensor, which takes the GIL (seen with torch 2.13: a hang at exit)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if orderly:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
