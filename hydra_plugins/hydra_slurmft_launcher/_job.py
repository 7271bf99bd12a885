"""The nodes' side: one job of a Hydra app in a process of its own, and what keeps the sweep open between batches."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.system.files import read_bytes, read_json, trusted_owners

FOLDER_VARIABLE = "SLURMFT_HYDRA_SWEEP"
APP, CALL, CLOSED = "hydra/app.json", "hydra/call.pickle", "hydra/closed"
"""In the run folder: which app it is, what its jobs begin with, and that it has no further ones."""

MAX_CALL_BYTES = 1 << 30
SHOWN = 200


def job_id(run_folder: Path, number: int) -> str:
    """``hydra.job.id``: the same in each try of a job, on every node."""
    return f"{run_folder.name}_{number}"


def run(overrides: Sequence[str], number: int, config: str) -> dict[str, Any]:
    """Run one job, as Hydra's own launcher would; returns its ``return_value``, where that is no JSON as its repr and a
    ``pickle``, and its ``working_dir``.

    Raises:
        Exception: that of the app's function.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    try:
        stored = read_bytes(folder / CALL, limit_bytes=MAX_CALL_BYTES, owners={os.geteuid()})
    except OSError as error:
        raise StorageError(f"cannot read {folder / CALL}: {error.strerror or error}") from error
    call = pickle.loads(stored)  # noqa: S301 - the user's own, in a private folder
    sys.path[:] = [*call["path"], *(each for each in sys.path if each not in call["path"])]

    from hydra.core.singleton import Singleton
    from hydra.core.utils import run_job, setup_globals
    from omegaconf import open_dict, read_write

    task, master, context, state = pickle.loads(call["call"])  # noqa: S301
    Singleton.set_state(state)
    setup_globals()
    job = context.config_loader.load_sweep_config(master, list(overrides))
    with read_write(job), open_dict(job):
        job.hydra.job.num, job.hydra.job.id, job.hydra.sweep.dir = number, job_id(folder, number), call["folder"]
    done = run_job(
        hydra_context=context, task_function=task, config=job, job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )  # fmt: skip
    return {**_packed(done.return_value), "working_dir": done.working_dir}


def _packed(value: Any) -> dict[str, Any]:
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return {"return_value": value}
    except (TypeError, ValueError, RecursionError):
        pass  # NaN, an array, an object
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"what the job returned cannot be taken to the app: {type(error).__name__}: {error}") from error
    return {"return_value": repr(value)[:SHOWN], "pickle": base64.b64encode(data).decode()}


class _Batches:
    """``trials.next`` of a sweep to which its app adds the jobs: says when no further ones are to be expected."""

    def __init__(self) -> None:
        self._ended, self._idle_since_s = 0, 0.0

    def __call__(self, ended: Sequence[Any]) -> list[Any] | None:
        folder, now_s = Path(os.environ[FOLDER_VARIABLE]), time.monotonic()
        self._ended += len(ended)
        owners = trusted_owners(folder)
        facts = read_json(folder / "inference" / "input.json", owners=owners) or {}
        if facts.get("total", 0) > self._ended:
            self._idle_since_s = 0.0
            return []
        self._idle_since_s = self._idle_since_s or now_s
        linger_s = (read_json(folder / APP, owners=owners) or {}).get("linger_s", 0)
        return None if (folder / CLOSED).exists() or now_s - self._idle_since_s > linger_s else []


batches = _Batches()
