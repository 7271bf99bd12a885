"""Of the ranks of a node that could keep a step just in time, one does; the others wait, in case it fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from slurmft.checkpoint.folders import own_generation
from slurmft.system.opening import open_regular
from slurmft.trainer.savers import SAVERS

OTHERS_S = 10.0
"""How long a rank waits for another one of its node that keeps the step."""

_LOOK_S = 0.005
_MARK = "rescue-"


@contextlib.contextmanager
def alone_on_this_node(folder: Path, step: int, part: int = 0) -> Iterator[int]:
    """A descriptor of the file with which the ranks of a node take turns at a step; the lock ends with its holder.

    Ranks that have different parts of the state do not wait for each other.

    Raises:
        OSError: another rank has it for too long, or there is no room for it.
    """
    of_this_load = f"{own_generation()}-{SAVERS.loads}-{step}"  # step numbers repeat after one
    descriptor = open_regular(folder / f"{_MARK}{of_this_load}-{part}", os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + OTHERS_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_S)
        yield descriptor
    finally:
        os.close(descriptor)


def remove_marks(folder: Path) -> None:
    """Of earlier attempts: none of their ranks lives."""
    for path in folder.glob(f"{_MARK}*"):
        if not path.name.startswith(f"{_MARK}{own_generation()}-"):
            path.unlink(missing_ok=True)
