"""torch's flight recorder: how it is switched on, where it writes, and how it is asked to write now.

It remembers the newest collectives of each rank, for NCCL; gloo has none that can be asked. Its dumps go straight into
the attempt's folder: ``flight-recorder-rank-N``, to be read with torch's own ``torchfrtrace``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from pathlib import Path

PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""torch makes a pipe of this name, the rank and ``.pipe``; any write to it asks for a dump. It looks there
once a second."""

_PREFIX = "flight-recorder-rank-"
_NEW_NAMES_SINCE = (2, 8)
"""From that torch on the old names do nothing but warn that they are old."""


@functools.cache
def knows_new_names() -> bool:
    """Whether the torch of this interpreter does; False where there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _NEW_NAMES_SINCE


def variables(entries: int, folder: Path, *, same_torch: bool) -> dict[str, str]:
    """Environment that makes it remember so many collectives and dump into ``folder``; 0 switches it off.

    Args:
        same_torch: the workers use this interpreter's torch. Where that is not known both generations of names are set.
    """
    prefix = str(folder / _PREFIX)
    new = {"TORCH_FR_BUFFER_SIZE": str(entries), "TORCH_FR_DUMP_TEMP_FILE": prefix}
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": str(entries), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix}
    names = new if same_torch and knows_new_names() else new | old
    return names | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if entries else "0"}


def dump_of(folder: Path, rank: int) -> Path:
    """Where a rank's recorder writes."""
    return folder / f"{_PREFIX}{rank}"


def pipe_prefix(private: Path) -> str:
    """Value of PIPE_VARIABLE for workers whose private folder that is."""
    return str(private / _PREFIX)


def ask(private: Path, rank: int) -> bool:
    """Ask a worker's recorder for a dump; False where no recorder reads its pipe."""
    path = f"{pipe_prefix(private)}{rank}.pipe"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no such pipe, or no reader
        return False
    try:
        return os.write(descriptor, b"1\n") > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)
