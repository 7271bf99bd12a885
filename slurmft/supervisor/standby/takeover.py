"""``slurmft standby``: watches the supervisor of its job, and becomes it when that is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmft.config.config import RunConfig
from slurmft.errors import SlurmError, SlurmftError, StorageUnavailable, UsageError
from slurmft.policy.nodes.evidence import Suspect
from slurmft.policy.verdicts.verdict import Cause, Verdict
from slurmft.scheduler import own_jobs
from slurmft.scheduler.command import ignoring_signals
from slurmft.scheduler.environment import current_job
from slurmft.scheduler.parsing.parsing import JobEnding
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.patience import FolderThread, PatientJournal, patiently, translated
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.fleet.outliving import Outlived, find_elsewhere
from slurmft.supervisor.owner import is_this_process
from slurmft.supervisor.recovery.act import Ending
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.recovery.requeue import restart_of
from slurmft.supervisor.run import (
    STORAGE_PATIENCE_S,
    Taken,
    act_in_its_place,
    supervise,
    try_again_later,
    verdict_in_its_place,
)
from slurmft.supervisor.standby.watch import Watch
from slurmft.supervisor.start import Start
from slurmft.system.logs import BackgroundLog

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
