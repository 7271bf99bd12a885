"""Whether a run's owner is still there. Apart from the rest, so that reading verbs need not load a supervisor."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from slurmft.errors import SlurmError
from slurmft.policy.job_identity import OwnJob
from slurmft.scheduler import own_jobs
from slurmft.storage import run_folder
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.system import processes

if TYPE_CHECKING:
    from slurmft.supervisor.cluster import Cluster

BEATS_S = 10.0
"""How long a process that takes a run over watches for a sign of its owner's life, where Slurm does not answer."""

LOOK_S = 0.5

log = logging.getLogger(__name__)


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
        record = own_jobs.find_one(job_of(run, owner), patience_s=30.0)
    except SlurmError as error:
        log.warning("cannot tell whether job %s still runs: %s", owner.job, error.what)
        record = None
    if record is not None:
        return record.alive and record.state != "COMPLETING"
    return owner_writes(run, owner)


def this_process(run: RunFolder, cluster: Cluster, generation: int) -> Owner:
    """The record of this process as the run's owner."""
    me = processes.me()
    return Owner(
        job=cluster.attempt.job,
        restart=cluster.attempt.restart,
        cycle=cluster.attempt.cycle,
        generation=generation,
        cluster=cluster.name,
        host=me.host,
        pid=me.pid,
        birth=me.birth,
        folder=str(run.path),
        inode=run.path.stat().st_ino,
    )


def local_owner_lives(owner: Owner) -> bool:
    """Whether the owner is a process of this machine that runs."""
    return owner.cluster == "local" and owner.host == processes.me().host and processes.lives(owner.pid, owner.birth)


def started_here(run: RunFolder) -> int | None:
    """The process that was started for the run on this machine, while it lives; None where there is none.

    It owns the run only a moment later, and again a moment after its supervisor was killed: its guardian goes on.

    Raises:
        StorageError: the journal cannot be read.
    """
    started = run.journal().newest(EventName.STARTED_HERE)
    if started is None or started.details.get("host") != processes.me().host:
        return None
    pid, birth = started.details.get("process"), started.details.get("birth")
    return pid if isinstance(pid, int) and isinstance(birth, str) and processes.lives(pid, birth) else None


def process_here(run: RunFolder, owner: Owner | None) -> int | None:
    """The process of this machine that runs it, or is about to; None for a run of Slurm's, and where there is none.

    Raises:
        StorageError: as ``started_here``.
    """
    if owner is not None and owner.cluster != "local":
        return None
    return owner.pid if owner is not None and local_owner_lives(owner) else started_here(run)


def job_of(run: RunFolder, owner: Owner | Attempt) -> OwnJob:
    """The owner's job, with what the run knows of it."""
    return next((job for job in run.own_jobs() if job.job_id == owner.job), OwnJob(owner.job))


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
