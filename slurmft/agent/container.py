"""Inside of the container: what an agent must know, have, and do without there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from slurmft.agent.container_outside import GREETING
from slurmft.config.run import RunConfig
from slurmft.errors import LaunchError
from slurmft.policy.container import SHARED_MEMORY, Container
from slurmft.scheduler.parsing import expand_hostlist
from slurmft.storage.run_folder import LOCAL_PREFIX

STANDARD_INPUT = 0
LITTLE_MEMORY_BYTES = 256 << 20
"""docker's and podman's /dev/shm has 64 MiB unless they are told otherwise."""

MACHINES_PROCESS_IDS = "pid:[4026531836]"
"""The first namespace of process ids has a number that never changes (PROC_PID_INIT_INO in Linux' proc_ns.h)."""

log = logging.getLogger(__name__)


class Outside:
    """The process outside of the container (``container_outside``), as far as there is one that can be heard.

    Args:
        on_signal: told the name of each signal that the process outside has got.
    """

    def __init__(self, on_signal: Callable[[str], None]) -> None:
        self._on_signal = on_signal
        self._received = b""
        self.is_heard = False
        """It has greeted: signals come from it, and those that come here as well are the same ones."""

        self.gone = asyncio.Event()
        """It was heard, and has ended."""

    def listen(self, descriptor: int = STANDARD_INPUT) -> None:
        """Listen from now on, where anything can come."""
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.set_blocking(descriptor, False)
                self._read(descriptor)  # the greeting is there already
                if not self.gone.is_set():
                    asyncio.get_running_loop().add_reader(descriptor, self._read, descriptor)

    def _read(self, descriptor: int) -> None:
        try:
            received = os.read(descriptor, 4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            asyncio.get_running_loop().remove_reader(descriptor)
            if self.is_heard:
                self.gone.set()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            word = line.decode(errors="replace")
            if not self.is_heard:
                self.is_heard = word == GREETING
            elif word in signal.Signals.__members__:
                self._on_signal(word)


def refuse_unusable(container: Container, attempt: str, environment: Mapping[str, str]) -> None:
    """Return when an agent can work in here.

    Raises:
        LaunchError: it would look at other processes than its own, or does not know which node it is.
    """
    where = f"container {container.name}"
    try:
        seen = Path("/proc/self").readlink().name
    except OSError as error:
        raise LaunchError(f"{where}: there is no /proc inside", hint="mount one (bubblewrap: --proc /proc)") from error
    if seen != str(os.getpid()):
        raise LaunchError(
            f"{where}: it has process ids of its own, and /proc shows those of the node",
            hint="mount a /proc of its own (bubblewrap: --proc /proc), or share the process ids",
        )
    if attempt.startswith(LOCAL_PREFIX):
        return
    if not {"SLURM_NODEID", "SLURMFT_NODE_INDEX"} & set(environment) or "SLURMD_NODENAME" not in environment:
        raise LaunchError(
            f"{where}: it does not pass the environment on (SLURM_NODEID, SLURMD_NODENAME)",
            hint="let it keep the variables of the job (podman: --env-host; apptainer: no --cleanenv)",
        )


def usable_environment(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """The environment without a folder for temporary files that is not in here, and with the node's name and number.

    Slurm gives ``--container`` the variables of the step, and not those of its tasks (seen on 22.05): ``host``, this
    machine's name, is looked for among the step's nodes.
    """
    usable = {
        name: value for name, value in environment.items()
        if not (name in ("TMPDIR", "TMP", "TEMP") and not os.access(value, os.W_OK | os.X_OK))
    }  # fmt: skip
    with contextlib.suppress(ValueError):
        nodes = expand_hostlist(environment.get("SLURM_STEP_NODELIST", ""))
        node = host if host in nodes else host.partition(".")[0]
        usable = {"SLURM_NODEID": str(nodes.index(node)), "SLURMD_NODENAME": node, **usable}
    return usable


def limits_here(config: RunConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """What does not work in here as it does outside, in words for the journal; the run goes on without."""
    with contextlib.suppress(OSError):
        memory = os.statvfs(SHARED_MEMORY)
        if memory.f_blocks * memory.f_frsize < LITTLE_MEMORY_BYTES:
            yield (f"{SHARED_MEMORY} has {memory.f_blocks * memory.f_frsize >> 20} MiB: snapshots in memory and "
                   "data-loader workers may not fit")  # fmt: skip
    if not os.path.ismount(SHARED_MEMORY):
        yield f"{SHARED_MEMORY} is no filesystem in memory: heartbeat pages and snapshots lie on a disk"
    if any(Path("/dev").glob("nvidia[0-9]*")):
        if shutil.which("nvidia-smi", path=environment.get("PATH")) is None:
            yield "nvidia-smi is not there: single suspect GPUs cannot be left out, nor GPU memory waited for"
        elif has_own_process_ids():
            yield "it has process ids of its own: GPU memory that killed workers still hold cannot be waited for"
    if config.notices.enabled == "auto" and not Path("/sys/class").is_dir():
        yield "/sys is not there: the cloud's notices that it takes a node away are only found with notices.plugin"
    if config.notices.plugin and shutil.which(config.notices.plugin[0], path=environment.get("PATH")) is None:
        yield f"the command of notices.plugin ({config.notices.plugin[0]}) is not there"


def has_own_process_ids() -> bool:
    """Whether process ids in here are others than the machine's. False where that is not known."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid") != MACHINES_PROCESS_IDS  # noqa: PTH115 - no path
    return False


def become_first_process() -> None:
    """Where this process is the first one of its process ids, fork; returns in the child alone.

    The first process gets no signal that it has no handler for, and has to reap every orphan. An agent does neither.
    The parent hands signals on, reaps, and ends as the child does; the kernel ends all others with it.
    """
    if os.getpid() != 1:
        return
    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _be_first(child, numbers)


def _be_first(child: int, numbers: set[signal.Signals]) -> NoReturn:
    while True:
        number = signal.sigwait(numbers)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
