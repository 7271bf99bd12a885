"""Runs the stored callable of ``slurmft.submit``: ``python -m slurmft.worker.call CALL RESULT [SIGNAL] [--each]``; with
``--trial`` in place of RESULT one call of an array of ``slurmft.Executor``, which is a trial of a sweep.

The callable is code that the submitting user has chosen, as a script is; a file of any other user is refused. One with
a method ``checkpoint``, as submitit's have, is asked at a stop for the call that goes on: it takes the place of CALL.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle

from slurmft.errors import StorageError, UsageError
from slurmft.storage.run_folder import RunFolder, result_of
from slurmft.system.files import read_bytes, replace_atomically

MAX_CALL_BYTES = 2 << 30
LOOK_S = 0.2
CHECKPOINT_METHODS = ("__submitit_checkpoint__", "checkpoint")
"""In the order in which submitit looks for them."""


def checkpoint_of(function: object) -> Callable[..., Any] | None:
    """The method that names the call to go on with, where the callable has one."""
    methods = (getattr(function, name, None) for name in CHECKPOINT_METHODS)
    return next((method for method in methods if callable(method)), None)


def run(call: Path, result: Path, *, rank: int, stop_signal: str = "SIGTERM", each: bool = False) -> None:
    """Call what ``call`` holds, a pickled (function, args, kwargs); rank 0 stores what it returns in ``result``.

    Args:
        stop_signal: the one that workers without a session get at a stop; SIGTERM counts in any case.
        each: every rank stores what it returns, in a file of its own.

    Raises:
        UsageError: the file cannot be read, or belongs to another user.
        StorageError: the result, or the call to go on with, cannot be stored.
    """
    try:
        data = read_bytes(call, limit_bytes=MAX_CALL_BYTES, owners={os.geteuid()})
    except OSError as error:
        raise UsageError(f"cannot read the submitted callable {call}: {error.strerror or error}") from error
    function, args, kwargs = pickle.loads(data)  # noqa: S301 - the user's own code
    if checkpoint_of(function) is not None:
        handler = _Checkpointing(function, args, kwargs, call, rank)
        for name in {"SIGTERM", stop_signal}:
            signal.signal(signal.Signals[name], handler)
    value = function(*args, **kwargs)
    if rank == 0 or each:
        _store(result_of(result, rank), cloudpickle.dumps(value), "the result")


def run_trial(call: Path, *, stop_signal: str) -> None:
    """Call what ``call`` holds, in a world of one rank. Each try has a file of its own for what is returned, which the
    trial's result names: of two tries that do not know of each other one counts.

    Raises:
        UsageError, StorageError: as for ``run``.
    """
    told = Path(os.environ["SLURMFT_TRIAL_RESULT"])
    one = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one, MASTER_ADDR="127.0.0.1")
    if (jobs := RunFolder(call.parents[2]).jobs()) and "SLURM_JOB_ID" in os.environ:
        os.environ.update(SLURM_ARRAY_JOB_ID=jobs[0], SLURM_ARRAY_TASK_ID=call.parent.name)
    result = told.with_suffix(".pkl")
    run(call, result, rank=0, stop_signal=stop_signal)
    _store(told, json.dumps({"pickle": result.name}), "the result's name")


class _Checkpointing:
    """The handler of a stop: rank 0 stores the call to go on with and ends, as in submitit; then the others end.

    A second signal while the state is saved changes nothing.
    """

    def __init__(
        self, function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Path, rank: int
    ) -> None:
        self._now = (function, args, kwargs)
        self._call, self._rank = call, rank
        self._before = call.stat().st_ino
        self._asked = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._asked:
            return
        self._asked = True
        if self._rank != 0:
            threading.Thread(target=self._end_after_lead, args=(number,), daemon=True).start()
            return
        function, args, kwargs = self._now
        ask = checkpoint_of(function)
        delayed = ask(*args, **kwargs) if ask is not None else None
        goes_on = self._now if delayed is None else (delayed.function, tuple(delayed.args), dict(delayed.kwargs))
        _store(self._call, cloudpickle.dumps(goes_on), "the call to go on with")
        sys.exit(128 + number)

    def _end_after_lead(self, number: int) -> None:
        """Other ranks may be needed until rank 0 has saved, and may then wait for it in a collective for ever."""
        while self._call.stat().st_ino == self._before:
            time.sleep(LOOK_S)
        os._exit(128 + number)


def _store(path: Path, data: str | bytes, what: str) -> None:
    try:
        replace_atomically(path, data)
    except OSError as error:
        raise StorageError(f"cannot store {what} in {path}: {error.strerror or error}") from error


if __name__ == "__main__":
    stop_signal = next((each for each in sys.argv[3:] if each != "--each"), "SIGTERM")
    if sys.argv[2] == "--trial":
        run_trial(Path(sys.argv[1]), stop_signal=stop_signal)
    else:
        rank = int(os.environ.get("RANK", "0"))
        run(Path(sys.argv[1]), Path(sys.argv[2]), rank=rank, each="--each" in sys.argv[3:], stop_signal=stop_signal)
