"""``slurmft standby``: watches the supervisor of its job, and becomes it when that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from slurmft.config.run import RunConfig
from slurmft.errors import SlurmError, SlurmftError, StorageUnavailable, UsageError
from slurmft.ipc.channel import BadMessage, Channel, connect
from slurmft.policy.stop import LEASE_S, RENEW_S, Silence, may_claim
from slurmft.policy.verdict import Cause, Suspect, Verdict
from slurmft.scheduler import own_jobs
from slurmft.scheduler.environment import current_job
from slurmft.scheduler.parsing import JobEnding
from slurmft.scheduler.slurm import ignoring_signals
from slurmft.storage.journal import Event, EventName
from slurmft.storage.patience import FolderThread, PatientJournal, patiently, translated
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor.act import Ending, restart_of
from slurmft.supervisor.agents import Outlived, find_elsewhere
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.lease import Lease
from slurmft.supervisor.owner import is_this_process, this_process
from slurmft.supervisor.placement import Accuser
from slurmft.supervisor.run import (
    STORAGE_PATIENCE_S,
    Taken,
    act_in_its_place,
    supervise,
    try_again_later,
    verdict_in_its_place,
)
from slurmft.system.background import overslept_s
from slurmft.system.logs import BackgroundLog

# --- The standby's side: it watches the supervisor of its job, and claims the run when that has lost its lease ---

CONNECT_S = 2.0
PAUSE_S = 0.3


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


# --- ``slurmft standby``: watches the supervisor of its job, and becomes it when that is gone ---

log = logging.getLogger(__name__)


def stand_by(config: RunConfig, token: str, *, supervisor_node: str) -> int:
    """Watch the supervisor on ``supervisor_node``, and act in its place when it is gone; with its environment.

    Raises:
        UsageError: this is no job of Slurm's.
        SlurmftError: the run could not go on.
    """
    if (job := current_job(os.environ)) is None:
        raise UsageError("a standby is started by the supervisor of a job")
    cluster, run = SlurmCluster(job), RunFolder(config.run_folder)
    problem = ""
    try:
        own_jobs.show(cluster.own)
        cluster.identify()
    except SlurmError as error:
        problem = f"Slurm does not answer on {os.environ.get('SLURMD_NODENAME', '')}: {error.what}"
    watch = Watch(run, cluster, token, problem=problem)
    if (taken := asyncio.run(watch.run())) is None:
        return 0
    before, mine = taken
    log.warning("the supervisor on %s is silent; acting in its place", supervisor_node)
    try:
        cluster.lost = {supervisor_node} if supervisor_node else set()
        try:
            found = _look(config, run, cluster, f"nothing was heard of the supervisor on {before.host}"
                                                f" for {watch.silent_s:.1f} s")  # fmt: skip
        except StorageUnavailable as error:
            return try_again_later(config, cluster, run, error)
        lost, cluster.given_back = lost_before(found.history, cluster.attempt)
        cluster.lost |= lost
        found.journal.append(EventName.STANDBY_TOOK_OVER, host=mine.host, before=before.host, node=supervisor_node,
                             silent_s=round(watch.silent_s, 3), generation=mine.generation)  # fmt: skip
        return _take_over(config, run, cluster, found, mine)
    finally:
        _end_job(run, cluster)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the supervisor before has left."""

    thread: FolderThread
    journal: PatientJournal
    history: Sequence[Event]
    verdict: Verdict
    outlived: Outlived | None


def _look(config: RunConfig, run: RunFolder, cluster: SlurmCluster, reason: str) -> _Found:
    """Read it, and judge its attempt; waits for a run folder that cannot be read: without one the job would be ended.

    Raises:
        StorageUnavailable: it could not be read in all that time.
    """
    thread = FolderThread()
    journal = PatientJournal(run.path, thread, attempt=str(cluster.attempt))
    lost = Verdict(cause=Cause.NODE_LOST, reason=reason, node="".join(cluster.lost),
                   suspects=tuple(Suspect(node=node) for node in cluster.lost))  # fmt: skip

    def read() -> _Found:
        try:
            history = journal.read_past()
            verdict = verdict_in_its_place(run, cluster.attempt, lost, config.world_size, how=reason)
            return _Found(thread, journal, history, verdict, find_elsewhere(run, cluster))
        except OSError as error:
            raise translated(f"cannot read {run.path}", error) from error

    return patiently(
        lambda: thread.call(read, timeout_s=STORAGE_PATIENCE_S), patience_s=STORAGE_PATIENCE_S
    )  # fmt: skip


def lost_before(history: Iterable[Event], attempt: Attempt) -> tuple[set[str], set[str]]:
    """Nodes that this start of the job has lost, and those of them that it has given back, by the journal.

    The allocation that the environment names still has them. A supervisor that was cut off takes all other nodes for
    lost, so what it lost in its last attempt, ``attempt``, counts for nothing: before another one it has to confirm
    its lease.
    """
    lost, given_back = set[str](), set[str]()
    for event in history:
        if restart_of(event) != (attempt.job, attempt.restart):
            continue
        nodes = event.details.get("lost") if event.event == EventName.SHRUNK else [event.details.get("node")]
        named = {node for node in nodes if isinstance(node, str)} if isinstance(nodes, list) else set()
        is_last = event.attempt == str(attempt)
        if event.event == EventName.STANDBY_TOOK_OVER or (event.event == EventName.AGENT_LOST and not is_last):
            lost |= named
        elif event.event == EventName.AGENT_BACK:
            lost -= named
        elif event.event in (EventName.NODE_GIVEN_BACK, EventName.SHRUNK):
            given_back |= named
    return lost | given_back, given_back


def _take_over(config: RunConfig, run: RunFolder, cluster: SlurmCluster, found: _Found, mine: Owner) -> int:
    """Act on the end of the attempt before, and go on; returns the exit code of a batch script."""
    outlived, verdict = found.outlived, found.verdict
    start = Start(cluster=cluster, run=run, journal=found.journal, thread=found.thread, generation=mine.generation,
                  history=found.history, secret=b"")  # fmt: skip
    ending = Ending(
        config, start, Accuser(config, start), BackgroundLog(), dismiss=lambda: _end(outlived),
        has_nodes=lambda: outlived is not None and len(cluster.present()) >= config.size.minimum,
    )  # fmt: skip
    code = act_in_its_place(ending, start, verdict)
    if code is not None:
        return code
    return supervise(config, os.environ, outlived, taken=Taken(
        mine.generation, frozenset(cluster.lost), frozenset(cluster.given_back)
    ))  # fmt: skip


def _end(outlived: Outlived | None) -> None:
    if outlived is not None:
        outlived.end()


def _end_job(run: RunFolder, cluster: SlurmCluster) -> None:
    """End the job, as no end of a batch script does; one that was requeued is not ended."""
    with ignoring_signals():
        try:
            owner = run.owner()
            if owner is None or not is_this_process(owner):  # the next standby has taken the run over
                return
            if own_jobs.ending(cluster.own, cluster.attempt.restart) is not JobEnding.NOT_ENDING:
                return
            journal = run.journal(Attempt(job=owner.job, restart=owner.restart, cycle=owner.cycle))
            journal.append(EventName.STANDBY_ENDS_JOB, job=cluster.own.job_id)
            own_jobs.cancel(cluster.own)
        except (SlurmftError, OSError) as error:
            log.error("the job stays until its time limit: scancel %s (%s)", cluster.own.job_id, error)
