"""``@slurmft.record``: an exception of the decorated function leaves a file that says why this rank failed.

For trainers that run under srun or torchrun, or whose exceptions a framework swallows: the supervisor reads the file,
and the exit code, which does not survive srun and torchrun, matters less. Needs no agent, and no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, MAX_TEXT
from slurmft.system.files import replace_atomically

TORCH_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for a worker's reason."""

_RANK_VARIABLES = ("RANK", "SLURM_PROCID")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def record(main: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a trainer's main function; its exception is written down and raised again.

    The file is ``error.rank_N`` in the folder that SLURMFT_ERROR_DIR names; torchrun's own file is written as well
    where it asks for one that does not exist yet. Without either variable nothing is written. Ends that are meant,
    ``SystemExit`` and ``KeyboardInterrupt``, leave no file. That a file cannot be written never hides the exception.
    """

    @functools.wraps(main)
    def recorded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return main(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            leave_error(error, os.environ)
            raise

    return recorded


def leave_error(error: BaseException, environment: Mapping[str, str]) -> None:
    """Write what ``record`` writes; never raises."""
    text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    if folder := environment.get(ERROR_DIR_VARIABLE):
        _write(Path(folder) / f"error.rank_{_rank(environment)}", text)
    # inside of torchrun, torch's own decorator may have been first
    if (torchs := environment.get(TORCH_VARIABLE)) and not Path(torchs).exists():
        words = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        _write(Path(torchs), json.dumps({"message": {"message": words, "extraInfo": details}}))


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # UnicodeEncodeError is a ValueError
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, text.encode(errors="backslashreplace").decode())


def _rank(environment: Mapping[str, str]) -> str:
    values = [environment.get(name, "") for name in _RANK_VARIABLES]
    return next((value for value in values if value.isascii() and value.isdecimal()), "0")
