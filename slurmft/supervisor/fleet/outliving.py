"""Agents that outlive their supervisor within a job: found by the one that follows, and taken over or ended.

Replicas of an inference run live and die alone, and their engines take minutes to load. So where a signal has ended the
supervisor, the guardian spares the processes that started the agents; the next supervisor listens at the same port,
with the same secret, and gives every agent new leases of a generation of its own. Ranks of a trainer need a restart
anyway: their agents are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmft.config.config import RunConfig
from slurmft.errors import StorageError
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.cluster import Cluster
from slurmft.supervisor.fleet.agents import open_port
from slurmft.system.files import read_json
from slurmft.system.opening import read_bytes
from slurmft.system.processes import birth_of, children_of, lives, words_of

LOOK_S = 0.05
END_S = 5.0

EXIT_UNKNOWN = 255
"""The end of a process that is another one's child."""

log = logging.getLogger(__name__)


def outlives_its_supervisor(config: RunConfig, pid: int) -> bool:
    """Whether the process starts agents, or is one, of an inference run; blocking."""
    words = words_of(pid)
    place = str(RunFolder(config.run_folder).config)
    return config.inference is not None and ("agent", place) in itertools.pairwise(words)


class Orphan:
    """A process of the lost supervisor's, now the guardian's child; used as a ``asyncio.subprocess.Process`` is."""

    def __init__(self, pid: int) -> None:
        self.pid, self._birth = pid, birth_of(pid)

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        return None if lives(self.pid, self._birth) else EXIT_UNKNOWN

    async def wait(self) -> int:
        """Return when it has ended."""
        while (code := self.returncode) is None:
            await asyncio.sleep(LOOK_S)
        return code

    def terminate(self) -> None:
        """SIGTERM: srun ends its step at once."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class StepElsewhere(Orphan):
    """The agents' step after the node of its srun has died; the step lives on, and agents end when they are told to."""

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self._has_ended = False

    @property
    def returncode(self) -> int | None:
        """None until it was ended."""
        return EXIT_UNKNOWN if self._has_ended else None

    def _send(self, number: int) -> None:
        self._has_ended = True


@dataclass(frozen=True, slots=True)
class Outlived:
    """The agents of a lost supervisor, as the next one finds them."""

    attempt: Attempt
    """In its folder they find their supervisor."""

    secret: bytes = field(repr=False)
    listener: socket.socket
    """At the port where they look for it; they are heard from now on."""

    processes: tuple[Orphan, ...]
    moved: bool = False
    """Their supervisor was on another node: they have to find this one."""

    def end(self) -> None:
        """End them, where nothing follows that needs them; blocking."""
        self.listener.close()
        end_orphans(self.processes)


def end_orphans(orphans: Sequence[Orphan]) -> None:
    """End these processes and the agents that they started; blocking."""
    deadline = time.monotonic() + END_S
    for orphan in orphans:
        orphan.terminate()
    while any(orphan.returncode is None for orphan in orphans):
        if time.monotonic() > deadline:
            for orphan in orphans:
                orphan.kill()
            return
        time.sleep(LOOK_S)


def find_outlived(config: RunConfig, run: RunFolder, cluster: Cluster) -> Outlived | None:
    """The agents that the guardian has spared; None where there are none, and none that cannot be taken over are left.

    Blocking; for a process that acts in the place of a lost supervisor, as a child of its guardian.
    """
    guardian = os.getppid()
    orphans = tuple(
        Orphan(pid) for pid, _ in children_of(guardian) if pid != os.getpid() and outlives_its_supervisor(config, pid)
    )
    if not orphans:
        return None
    try:
        if (attempt := crew_of(run)) is None:
            raise OSError("nothing says where they look for their supervisor")
        folder = run.attempts / str(attempt)
        where = read_json(folder / "control.json") or {}
        secret = read_bytes(folder / "secret", owners={os.geteuid()})
        listener = open_port(cluster.listen_host, int(where["port"]))
    except (OSError, StorageError, KeyError, TypeError, ValueError, OverflowError) as error:
        log.warning("the agents cannot be taken over, and are ended: %s", error)
        end_orphans(orphans)
        return None
    return Outlived(attempt=attempt, secret=secret, listener=listener, processes=orphans)


def find_elsewhere(run: RunFolder, cluster: Cluster) -> Outlived | None:
    """The agents of a supervisor on another node, in whose place this process acts; None where there are none."""
    try:
        if (attempt := crew_of(run)) is None:
            return None
        secret = read_bytes(run.attempts / str(attempt) / "secret", owners={os.geteuid()})
        listener = open_port(cluster.listen_host)
    except (OSError, StorageError) as error:
        log.warning("the agents cannot be taken over: %s", error)
        return None
    return Outlived(attempt=attempt, secret=secret, listener=listener, processes=(StepElsewhere(),), moved=True)


def crew_of(run: RunFolder) -> Attempt | None:
    """The attempt in whose folder the run's agents find their supervisor; None when there is none now.

    Raises:
        StorageError: the run folder cannot be read.
    """
    owner = run.owner()
    if owner is None:
        return None
    for cycle in range(owner.cycle, -1, -1):
        attempt = Attempt(job=owner.job, restart=owner.restart, cycle=cycle)
        try:
            if all((run.attempts / str(attempt) / name).exists() for name in ("secret", "control.json")):
                return attempt
        except OSError as error:
            raise StorageError(f"cannot look into {run.attempts}: {error.strerror}") from error
    return None
