"""Outside of the container: the process that srun starts where a command (apptainer, bubblewrap, ...) does the rest.

    srun ── this process ── the container's command ──┊── agent ── workers
                  └──────── a pipe, its standard input ┘

Runtimes differ in what they do with a signal: some die of it and take the save with them, some keep it for themselves,
some hand it on. So the command begins with the signals of a stop ignored, which it passes on to what it starts unless
it has a handler of its own, and the agent learns of them by the pipe (``inside``). The end of the pipe tells it that
this process is gone: a container that outlives its command, or a kill -9 of either, leaves nothing behind.

Run as ``python -m slurmft.agent.container_outside NAME FOLDERS -- COMMAND...``; FOLDERS are made first, one per line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GREETING = "slurmft 1"
"""The first line in the pipe: other things that are connected to the agent's standard input do not begin with it."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
NOT_FOUND, NOT_STARTED = 127, 126
QUIET_CODES = (0, 75)


def main(arguments: Sequence[str]) -> int:
    """Run the command, tell it of signals, and return its exit code as a shell would."""
    name, folders, _, *command = arguments
    for folder in filter(None, folders.split("\n")):
        with contextlib.suppress(OSError):  # the runtime's own error names the mount
            Path(folder).mkdir(parents=True, exist_ok=True)
    told_by, tells = os.pipe()
    os.write(tells, f"{GREETING}\n".encode())

    def tell(number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):  # its reader has ended, and this process will notice
            os.write(tells, f"{signal.Signals(number).name}\n".encode())

    def ignore() -> None:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)

    for number in PASSED_ON:
        signal.signal(number, tell)
    try:
        # not a session of its own: where Slurm follows process groups, the container stays in the step's
        process = subprocess.Popen(command, stdin=told_by, env=_environment(), preexec_fn=ignore)  # noqa: PLW1509
    except OSError as error:
        reason = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        _say(name, f"cannot be started on {_node()}: {command[0]!r}: {error.strerror}")
        return reason
    finally:
        os.close(told_by)
    code = process.wait()
    if code < 0:
        _say(name, f"was ended by {signal.Signals(-code).name} on {_node()}")
        return 128 - code
    if code not in QUIET_CODES:
        _say(name, f"ended with exit code {code} on {_node()}")
    return code


def _environment() -> dict[str, str]:
    """Without the folder of this Python's library, where another Python would look for its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _say(name: str, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"slurmft: container {name}: {text}\n".encode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
