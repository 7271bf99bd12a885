"""Running one Slurm command: an argument list, a time limit, both streams captured, errors translated once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slurmft.errors import SlurmError, SlurmUnavailable

COMMAND_TIMEOUT_S = 20.0

NOT_ANSWERING = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
    "Zero Bytes were transmitted",
    "Unexpected message received",
    "backup controller",
    "Resource temporarily unavailable",
    "munge",
    "Protocol authentication error",
    "Transport endpoint is not connected",
    "Insane message length",
    "Rate limit exceeded",
    "rate limit exceeded",
    "No route to host",
    "Network is unreachable",
    "Connection reset by peer",
)
"""Messages of a client that reached no controller, or not in time, or were asked to try later: nothing is known, trying
again is safe."""

_CHANGING_ANSWERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_", "SBATCH_", "SLURM_CLUSTERS")
"""Beginnings of variables that filter or redirect what Slurm's commands answer, also about a job that is named."""


def undisturbed(environment: Mapping[str, str], *, cluster: str = "") -> dict[str, str]:
    """The environment of a command whose answer must not depend on the shell or crontab that it was started from.

    Args:
        cluster: the cluster to ask, where that is another one than the machine's own.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(_CHANGING_ANSWERS)}
    return kept | {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CLUSTERS": cluster} if cluster else {})


def run(
    argv: Sequence[str],
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    cluster: str = "",
) -> str:
    """The command's standard output.

    Args:
        environment: exactly this one, for a job that is submitted as its user wishes; None: ours, ``undisturbed``.
        cluster: the cluster to ask, where that is another one than the machine's own.

    Raises:
        SlurmUnavailable: the command is missing, timed out, or reached no controller.
        SlurmError: Slurm refused; the message is its own.
    """
    try:
        result = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=undisturbed(os.environ, cluster=cluster) if environment is None else dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmUnavailable(f"the command {argv[0]} is not on this machine") from error
    except OSError as error:
        raise SlurmUnavailable(f"the command {argv[0]} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"{argv[0]} did not answer within {timeout_s:.0f} s") from error
    if result.returncode == 0:
        return result.stdout
    message = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
    kind = SlurmUnavailable if any(text in message for text in NOT_ANSWERING) else SlurmError
    raise kind(f"{' '.join(argv[:3])}: {message}")


def run_patiently(
    argv: Sequence[str],
    *,
    patience_s: float,
    cluster: str = "",
    pause_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Like ``run``, trying again for ``patience_s`` seconds while Slurm does not answer. For commands that may be
    repeated without harm.

    Raises:
        SlurmUnavailable: no answer in all that time.
        SlurmError: Slurm refused.
    """
    deadline = clock() + patience_s
    while True:
        try:
            return run(argv, timeout_s=min(COMMAND_TIMEOUT_S, max(2.0, deadline - clock())), cluster=cluster)
        except SlurmUnavailable:
            if clock() + pause_s >= deadline:
                raise
            sleep(pause_s)


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore the signals that a requeue sends to the very processes that ask for it, children included.

    Ignored signals stay ignored across exec, handlers do not: a handler would leave ``scontrol`` itself to be killed
    between the requeue and the update that follows it. Main thread only.
    """
    numbers = (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
