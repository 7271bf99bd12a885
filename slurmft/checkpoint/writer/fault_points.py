"""Named points of a save at which a test makes the process die, stop, or meet an error. Costs nothing otherwise.

``SLURMFT_FAULT_POINT="image half written=kill"``, or ``=stop``, or ``=28`` for an OSError with that errno. With
``SLURMFT_FAULT_ONCE`` naming a file that does not exist yet, only the first process that gets there is hit.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "SLURMFT_FAULT_POINT"
ONCE_VARIABLE = "SLURMFT_FAULT_ONCE"


def reached(point: str) -> None:
    """Nothing, unless a test asked for a fault here.

    Raises:
        OSError: it was asked for.
    """
    name, _, fault = os.environ.get(VARIABLE, "").partition("=")
    if name != point or not _is_first():
        return
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread must not run on until another is woken
    else:
        raise OSError(int(fault), os.strerror(int(fault)), point)


def _is_first() -> bool:
    path = os.environ.get(ONCE_VARIABLE)
    if not path:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
