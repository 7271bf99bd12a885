"""Runs the callable that ``slurmft.submit`` has stored: ``python -m slurmft.worker.call CALL RESULT``.

The callable is code that the submitting user has chosen, as a script is; a file of any other user is refused.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import cloudpickle

from slurmft.errors import StorageError, UsageError
from slurmft.system.files import read_bytes, replace_atomically

MAX_CALL_BYTES = 2 << 30


def run(call: Path, result: Path, *, rank: int) -> None:
    """Call what ``call`` holds, a pickled (function, args, kwargs); rank 0 stores what it returns in ``result``.

    Raises:
        UsageError: the file cannot be read, or belongs to another user.
        StorageError: the result cannot be stored.
    """
    try:
        data = read_bytes(call, limit_bytes=MAX_CALL_BYTES, owners={os.geteuid()})
    except OSError as error:
        raise UsageError(f"cannot read the submitted callable {call}: {error.strerror or error}") from error
    function, args, kwargs = pickle.loads(data)  # noqa: S301 - the user's own code
    value = function(*args, **kwargs)
    if rank != 0:
        return
    stored = cloudpickle.dumps(value)
    try:
        replace_atomically(result, stored)
    except OSError as error:
        raise StorageError(f"cannot store the result in {result}: {error.strerror or error}") from error


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), rank=int(os.environ.get("RANK", "0")))
