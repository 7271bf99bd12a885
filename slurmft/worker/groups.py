"""Process groups with explicit timeouts: long until the first step of the process is done, short afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import random
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slurmft.policy.worker_settings import WorkerSettings
from slurmft.trainer.savers import SAVERS, host_group, takes_host_data, timeout_of

ABORT_S = 5.0
FIRST_PORT, PORTS = 10_000, 20_000
"""Of steps that srun has started itself; below those that Linux gives away, and another one for each step."""

_IN_BRACKETS = re.compile(r"\[(\w+)[^\]]*\]")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.5

log = logging.getLogger(__name__)


def await_listener(host: str, port: str, limit: timedelta) -> None:
    """Return when rank 0's store takes connections, or ``limit`` is over.

    torch's own client waits half a second or longer after a connection that was refused, and after a restart most ranks
    come milliseconds before the store does. Pauses double up to that, so that many ranks do not crowd a slow host.
    """
    pause_s, deadline = FIRST_PAUSE_S, time.monotonic() + limit.total_seconds()
    while host and port.isdecimal() and time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=LONGEST_PAUSE_S).close()
        except (OSError, OverflowError):
            time.sleep(random.SystemRandom().uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            return


def take_place_of_task(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables, unless they are set, where srun has started this process as one task of several.

    A batch script and an interactive shell have variables of a task as well: both are a single process.
    """
    tasks, rank = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_PROCID", "")
    is_alone = not (rank.isdecimal() and tasks.isdecimal() and int(tasks) > 1) or "SLURM_PTY_PORT" in environment
    if is_alone or {"RANK", "WORLD_SIZE"} <= environment.keys():
        return
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    nodes = _IN_BRACKETS.sub(r"\1", environment.get("SLURM_STEP_NODELIST", ""))
    place = {
        "RANK": rank, "WORLD_SIZE": tasks, "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(len(environment.get("SLURM_GTIDS", rank).split(","))),
        "MASTER_ADDR": nodes.split(",")[0], "MASTER_PORT": str(FIRST_PORT + zlib.crc32(step.encode()) % PORTS),
    }  # fmt: skip
    environment.update({name: value for name, value in place.items() if name not in environment})


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
            ConfigError: the settings cannot be read.
            torch.distributed.DistError: the group cannot be joined.
        """
        environment = os.environ
        settings = WorkerSettings.from_environment(environment)
        init = timedelta(minutes=settings.init_timeout_minutes)
        step = timedelta(minutes=settings.step_timeout_minutes)
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        wanted = backend or settings.backend
        use_gpu = torch.cuda.is_available() and wanted in ("auto", "nccl")
        device = torch.device("cuda", local_rank % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(device)
        groups = cls(device, init, step)
        if "RANK" in environment and "WORLD_SIZE" in environment and not dist.is_initialized():
            name = ("nccl" if use_gpu else "gloo") if wanted == "auto" else wanted
            if environment["RANK"] != "0":
                await_listener(environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", ""), init)
            dist.init_process_group(name, timeout=init, device_id=device if use_gpu else None)
            host_group(init)  # here, where all ranks pass in the same order
            groups.check(init)
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
            if timeout_of(group) is not None:
                distributed_c10d._set_pg_timeout(self._step_timeout, group)
        self.check(self._step_timeout)
        log.info("collective timeouts after the first step: %s", self.timeouts())

    def timeouts(self) -> dict[str, float]:
        """Seconds until a collective of each group times out, as the groups themselves say; NaN where one cannot."""
        if not dist.is_initialized():
            return {}
        found: dict[str, float] = {}
        for group, (backend, _store) in distributed_c10d._world.pg_map.items():
            timeout, name = timeout_of(group), distributed_c10d._world.pg_names[group]
            found[f"{name} ({backend})"] = timeout.total_seconds() if timeout is not None else math.nan
        return found

    def check(self, timeout: timedelta) -> None:
        """Read every group's timeout back, and name those that differ: a hang of them would end at another time."""
        known = {name: seconds for name, seconds in self.timeouts().items() if not math.isnan(seconds)}
        wrong = {name: seconds for name, seconds in known.items() if seconds != timeout.total_seconds()}
        if wrong:
            log.warning("process groups without the timeout of %.0f s: %s", timeout.total_seconds(), wrong)

    def facts(self) -> dict[str, Any]:
        """What to log about the groups."""
        return {"device": str(self.device), "timeout_s": self.timeouts(), "step_timeout_s": self._step_timeout.seconds}

    def close(self, *, orderly: bool) -> None:
        """Leave the groups. After a failure a destroy may wait for the dead: NCCL's communicators are aborted instead.

        Save all state before this call: an abort lets the device go on behind a collective that has failed, with values
        that were never reduced.
        """
        if not dist.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):
            # Never run its destructor: ProcessGroupGloo's takes a mutex while it holds the GIL, and its own thread may
            # hold that mutex while it frees a tensor, which takes the GIL (seen with torch 2.13: a hang at exit)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if orderly:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        else:
            abort_device_groups()


def abort_device_groups(within_s: float = ABORT_S) -> bool:
    """End what NCCL's kernels wait for, so that this process and its memory on the device can go; whether it worked.

    In a thread, as an abort may itself hang. All groups at once: one that is aborted alone may wait for another one.
    From here on nothing that the device computes may be saved.
    """
    groups = [one for one in distributed_c10d._world.pg_map if not takes_host_data(one)]
    if not groups:
        return True
    SAVERS.forget()
    aborting = threading.Thread(target=_abort, args=(groups,), name="slurmft-abort", daemon=True)
    aborting.start()
    aborting.join(within_s)
    if aborting.is_alive():
        log.warning("NCCL's communicators could not be aborted within %.0f s", within_s)
    return not aborting.is_alive()


def _abort(groups: Sequence[Any]) -> None:
    names = distributed_c10d._world.pg_names
    try:
        with _together(groups[0]):
            for group in sorted(groups, key=lambda one: names.get(one, ""), reverse=True):
                group.abort()
    except (RuntimeError, AttributeError) as error:  # a torch or a backend that cannot
        log.info("communicators are left to the end of the process: %s", error)


@contextlib.contextmanager
def _together(group: Any) -> Iterator[None]:
    """NCCL's own bracket around what happens to several communicators at once, as torch does it."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        backend = None
    has_bracket = hasattr(backend, "_group_start") and hasattr(backend, "_group_end")
    if has_bracket:
        backend._group_start()
    try:
        yield
    finally:
        if has_bracket:
            backend._group_end()
