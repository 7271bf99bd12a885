"""The standby's side: it watches the supervisor of its job, and claims the run when that has lost its lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from slurmft.errors import SlurmftError
from slurmft.ipc.channel import BadMessage, Channel, connect
from slurmft.policy.timing.standby import LEASE_S, RENEW_S, Silence, may_claim
from slurmft.scheduler import own_jobs
from slurmft.scheduler.parsing.parsing import JobEnding
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.owner import is_this_process, this_process
from slurmft.supervisor.standby.lease import Lease
from slurmft.system.sleeping import overslept_s

CONNECT_S = 2.0
PAUSE_S = 0.3

log = logging.getLogger(__name__)


class Watch:
    """Watches one supervisor; the run's next owner has a standby of its own.

    Args:
        token: of this standby; another one may be named in its place.
        problem: why it cannot be one, which it only reports.
    """

    def __init__(self, run: RunFolder, cluster: SlurmCluster, token: str, *, problem: str = "") -> None:
        self._run, self._cluster, self._token, self._problem = run, cluster, token, problem
        self._lease = Lease(run, cluster.attempt)
        self._watched = run.owner()
        self._heard_s = time.monotonic()
        self._is_dismissed = False

    @property
    def silent_s(self) -> float:
        """Since the supervisor was heard of by the connection."""
        return time.monotonic() - self._heard_s

    async def run(self) -> tuple[Owner, Owner] | None:
        """The owner before and this process's own record, once the run is claimed; None where it is not needed."""
        listening = asyncio.create_task(self._listen())
        try:
            while not self._is_dismissed:
                asleep_s = await overslept_s(RENEW_S)
                self._heard_s += asleep_s  # in two steps: += reads before it awaits, and would lose a later time
                if self.silent_s < LEASE_S:
                    continue
                with contextlib.suppress(SlurmftError, OSError):
                    if (taken := await asyncio.to_thread(self._claim)) is not None:
                        return taken
            return None
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    def _claim(self) -> tuple[Owner, Owner] | None:
        """Become the owner, where the supervisor has lost its lease and the job goes on; blocking."""
        if not may_claim(Silence(unheard_s=self.silent_s, lease_age_s=self._lease.age_s())):
            return None
        if own_jobs.ending(self._cluster.own, self._cluster.attempt.restart) is not JobEnding.NOT_ENDING:
            return None
        with self._run.lock():
            before = self._run.owner()
            if before is not None and before.standby and is_this_process(before) and self._watched is not None:
                return self._watched, before  # an earlier claim has arrived, although it failed here
            if before is None or self._is_over(before):
                self._is_dismissed = True
                return None
            if not may_claim(Silence(unheard_s=self.silent_s, lease_age_s=self._lease.age_s())):
                return None
            self._cluster.attempt = replace(self._cluster.attempt, cycle=before.cycle)
            mine = this_process(self._run, self._cluster, before.generation + 1, standby=True)
            self._lease.renew()
            self._run.take_over(mine)
        return before, mine

    def _is_over(self, owner: Owner) -> bool:
        """Whether this standby is none any more; with the run's lock held."""
        watched, terms = self._watched, self._lease.read()
        is_same = watched is not None and (owner.host, owner.pid, owner.birth) == (
            watched.host, watched.pid, watched.birth
        )  # fmt: skip
        return not is_same or terms is None or terms.standby != self._token or self._run.done() is not None

    async def _listen(self) -> None:
        while not self._is_dismissed:
            with contextlib.suppress(OSError, BadMessage, TimeoutError):
                await self._listen_once()
            await asyncio.sleep(PAUSE_S)

    async def _listen_once(self) -> None:
        terms = await asyncio.to_thread(self._lease.read)
        if terms is None:
            return
        if terms.standby != self._token:
            self._is_dismissed = True
            return
        channel = await _connect_any(terms.hosts, terms.port, terms.secret.encode())
        try:
            channel.send({"kind": "standby", "token": self._token, "problem": self._problem})
            if self._problem:
                await channel.drain()
                self._is_dismissed = True
                return
            while (message := await channel.receive()) is not None:
                if message["kind"] == "end":
                    self._is_dismissed = True
                    return
                self._heard_s = time.monotonic()
                channel.send({"kind": "alive", "number": message.get("number", 0)})
        finally:
            channel.close()


async def _connect_any(hosts: tuple[str, ...], port: int, secret: bytes) -> Channel:
    problem: Exception = OSError("the supervisor has left no address")
    for host in hosts:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await connect(host, port, secret)
        except (OSError, BadMessage, TimeoutError) as error:
            problem = error
    raise problem
