"""The guardian: a small parent of the supervisor, so that a kill -9 of the supervisor does not end the run.

Slurm ends a job when its batch step's process ends, and requeues nothing by itself then. The guardian is that process.
It does nothing but wait: when a signal has ended the supervisor (an out-of-memory kill, ``kill -9``, a crash of the
interpreter) it ends the supervisor's left-over processes and becomes a new supervisor that decides what follows. What
it is told to spare lives on, for that new supervisor to take over. Whether one on another node lives is asked of Slurm,
and of what it writes.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from slurmft.errors import SlurmError
from slurmft.policy.job_identity import OwnJob
from slurmft.scheduler import own_jobs
from slurmft.storage import run_folder
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.system import processes
from slurmft.system.processes import adopt_orphans, children_of

# --- Signals to the supervisor itself: handled while it listens, kept pending otherwise; none ends the process ---
# A blocked mask alone would not do: any thread that was started while the mask was open takes the signal, and its
# default action ends the whole process.

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = frozenset({*HEARD, signal.SIGQUIT})
"""The signals that a guardian forwards to its child."""

_kept: list[int] = []
_listeners: list[Callable[[int], None]] = []


log = logging.getLogger(__name__)


def log_signal(line: str, name: str) -> None:
    """Log a line that other packages have as well, with the signal's number."""
    log.info(line, signal.Signals.__members__.get(name, 0))


def block_signals() -> None:
    """Keep signals pending while this process has one thread and no handlers yet; across a fork, and an exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def keep_signals() -> None:
    """From now on a signal in any thread waits for ``hearing``; call after ``block_signals``, with one thread."""
    for number in HEARD:
        signal.signal(number, _note)
    atexit.register(_ignore_signals)  # an interpreter on its way out has default actions again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def any_kept() -> bool:
    """Whether a signal is pending."""
    return bool(_kept)


def keep(numbers: Iterable[int]) -> None:
    """Have these signals wait for the next ``hearing``: nobody has acted on them."""
    for number in numbers:
        if number not in _kept:
            _kept.append(number)


@contextmanager
def hearing(listener: Callable[[int], None]) -> Iterator[None]:
    """Within the block ``listener`` is called with each signal, first with those that were kept.

    It runs inside a signal handler: it may only schedule.
    """
    _listeners.append(listener)
    try:
        while _kept:
            listener(_kept.pop(0))
        yield
    finally:
        _listeners.remove(listener)


def keep_across_exec() -> None:
    """Before an exec, which keeps neither handlers nor memory: leave what was kept pending for the next program."""
    block_signals()
    for number in _kept:
        signal.pthread_kill(threading.get_ident(), number)


def _note(number: int, _frame: FrameType | None) -> None:
    if _listeners:
        _listeners[-1](number)
    else:
        keep([number])


def _ignore_signals() -> None:
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)


# --- The guardian: a small parent of the supervisor, so that a kill -9 of the supervisor does not end the run ---

MAX_LOSSES = 3
CLEAN_UP_S = 5.0

_GUARD_VARIABLE = "SLURMFT_GUARD"
_LOSSES_VARIABLE = "SLURMFT_GUARD_LOSSES"
_LOST_VARIABLE = "SLURMFT_GUARD_LOST"


def guarded(after_loss: Sequence[str], spares: Callable[[int], bool] = lambda pid: False) -> None:
    """Fork; returns in the child alone, with signals kept. The parent guards it and ends with its exit code.

    ``after_loss`` is the command, less its last argument, that follows when a signal ends the child: the number of that
    signal is added. A process that is guarded already stays as it is.

    Args:
        spares: by its process id, whether a child of the lost process is left alone, but for the last loss.
    """
    if os.environ.get(_GUARD_VARIABLE) == str(os.getppid()):
        keep_signals()
        return
    adopt_orphans()
    block_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.stdout.flush()
    sys.stderr.flush()
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.environ[_GUARD_VARIABLE] = str(guardian)
        keep_signals()
        return
    code = _wait_for(child)
    if code < 0:
        _recover(after_loss, spares, child, -code)
    os._exit(code)


def _wait_for(child: int) -> int:
    """The child's exit code, negative for a signal; hands every signal on to it meanwhile."""
    while True:
        for pid, code in _reap():
            if pid == child:
                return code
        info = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, info.si_signo)


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def lost_pids(environment: Mapping[str, str]) -> frozenset[int]:
    """Process ids of the supervisor in whose place this process acts, and of those that tried to before it."""
    return frozenset(int(pid) for pid in environment.get(_LOST_VARIABLE, "").split())


def _recover(after_loss: Sequence[str], spares: Callable[[int], bool], lost: int, number: int) -> NoReturn:
    losses = int(os.environ.get(_LOSSES_VARIABLE, "0")) + 1
    name = signal.Signals(number).name
    # after the last loss that is put up with, only a start of its own has losses of its own
    end_left_behind(spares if losses < MAX_LOSSES else lambda pid: False, parents=(os.getpid(),))
    if losses > MAX_LOSSES:
        sys.stderr.write(f"slurmft: the supervisor was ended {losses} times, now by {name}; giving up\n")
        sys.stderr.flush()
        os._exit(128 + number)
    sys.stderr.write(f"slurmft: {name} has ended the supervisor; acting in its place\n")
    sys.stderr.flush()
    all_lost = f"{os.environ.get(_LOST_VARIABLE, '')} {lost}"
    os.environ |= {_LOSSES_VARIABLE: str(losses), _LOST_VARIABLE: all_lost}
    os.environ.pop(_GUARD_VARIABLE, None)
    os.execv(after_loss[0], [*after_loss, str(number)])  # noqa: S606 - an argument list, no shell


def guardians() -> tuple[int, ...]:
    """The process id of this process's guardian, which adopts orphans as well; empty where it has none."""
    return (os.getppid(),) if os.environ.get(_GUARD_VARIABLE) == str(os.getppid()) else ()


def end_left_behind(spares: Callable[[int], bool], *, parents: Sequence[int], gentle_s: float = CLEAN_UP_S) -> int:
    """End what an ended process had started. Orphans become ours (subreaper), so that none escapes. Blocking.

    Args:
        spares: by its process id, whether a child is left alone.
        parents: process ids of those whose children are ended.
        gentle_s: a srun has so long to end its step, then it is killed.

    Returns:
        How many srun have ended by themselves, and their steps with them; 0 where one was killed.
    """
    deadline = time.monotonic() + gentle_s
    ended: set[int] = set()
    gently: dict[int, bool] = {}
    while children := [(pid, name) for parent in parents for pid, name in children_of(parent) if not spares(pid)]:
        if time.monotonic() > deadline + CLEAN_UP_S:
            return 0
        for pid, name in children:
            # srun ends its step at once when it gets TERM; killed, it would leave the step to find out by itself
            gentle = name == "srun" and time.monotonic() < deadline
            if name == "srun":
                gently[pid] = gentle
            ended.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if gentle else signal.SIGKILL)
        time.sleep(0.02)
    for pid in ended:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return len(gently) if all(gently.values()) else 0


# --- Whether a run's owner is still there ---

BEATS_S = 10.0
"""How long a process that takes a run over watches for a sign of its owner's life, where Slurm does not answer."""

LOOK_S = 0.5


def owner_lives(run: RunFolder, owner: Owner) -> bool:
    """Whether the owner's job has nodes, or its local process runs.

    Where Slurm does not answer, or does not know the job, the owner lives as long as it writes: Slurm may have lost its
    state. May take ``BEATS_S`` seconds.

    Raises:
        StorageError: the run folder cannot be read or written.
    """
    if owner.cluster == "local":
        return local_owner_lives(owner)
    try:
        record = own_jobs.find_one(job_of(run, owner.job), patience_s=30.0)
    except SlurmError as error:
        log.warning("cannot tell whether job %s still runs: %s", owner.job, error.what)
        record = None
    if record is not None:
        return record.alive and record.state != "COMPLETING"
    return owner_writes(run, owner)


def local_owner_lives(owner: Owner) -> bool:
    """Whether the owner is a process of this machine that runs."""
    return owner.cluster == "local" and owner.host == processes.me().host and processes.lives(owner.pid, owner.birth)


def job_of(run: RunFolder, job_id: str) -> OwnJob:
    """A job of the run's, with what the run knows of it."""
    return next((job for job in run.own_jobs() if job.job_id == job_id), OwnJob(job_id))


def owner_writes(run: RunFolder, owner: Owner) -> bool:
    """Whether the owner gives signs of life; may take ``BEATS_S`` seconds.

    Raises:
        StorageError: the run folder cannot be read or written.
    """
    if not run_folder.is_fresh(run, owner):
        return False
    before, until = run_folder.newest(run, owner), time.monotonic() + BEATS_S
    while time.monotonic() < until:
        if run_folder.newest(run, owner) != before:
            return True
        time.sleep(LOOK_S)
    return False
