"""A supervisor whose standby has taken the run over: it keeps the batch script alive, and does nothing else.

Slurm ends a job with its batch script, and the new supervisor with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from slurmft.config.config import RunConfig
from slurmft.errors import StorageError
from slurmft.policy.verdicts.verdict import EXIT_TEMPORARY
from slurmft.scheduler.environment import current_job
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor.cluster import Cluster
from slurmft.supervisor.owner import is_this_process
from slurmft.supervisor.signals import any_kept
from slurmft.supervisor.standby.lease import Lease

GONE_S = 300.0
"""A lease of that age is that of a supervisor which is gone, with every standby of it. One that has just taken over may
wait for minutes for Slurm and the run folder before it renews its lease again."""

LOOK_S = 1.0
LAST_LOOKS = 10
"""After the run is done: its supervisor has some things to write and to tell, and ends the job then."""


log = logging.getLogger(__name__)


def is_standbys(owner: Owner, attempt: Attempt) -> bool:
    """Whether a standby in this very start of the job owns the run."""
    return owner.standby and (owner.job, owner.restart) == (attempt.job, attempt.restart)


def stand_aside(run: RunFolder, cluster: Cluster) -> int:
    """Return when the job is not needed any more; returns the batch script's exit code."""
    log.warning("a standby has taken the run over; this process only keeps the job alive")
    lease, left_looks = Lease(run, cluster.attempt), LAST_LOOKS
    while True:
        time.sleep(LOOK_S)
        try:
            owner, done = run.owner(), run.done()
        except (StorageError, OSError):
            continue
        if done is not None and (left_looks := left_looks - 1) <= 0:
            return 0
        age_s = lease.age_s()
        if owner is None or not is_standbys(owner, cluster.attempt) or (age_s is not None and age_s > GONE_S):
            return EXIT_TEMPORARY
        if any_kept() and cluster.why_ending() is not None:
            return EXIT_TEMPORARY if done is None else 0


def standby_has_taken_over(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether one owns the run of the job around this process; what the supervisor has started is its own then."""
    job = current_job(environment) if config.fault_tolerance.standby_supervisor else None
    if job is None:
        return False
    try:
        owner = RunFolder(config.run_folder).owner()
    except (StorageError, OSError):
        return False
    attempt = Attempt(job=job.job_id, restart=job.restart)
    return owner is not None and is_standbys(owner, attempt) and not is_this_process(owner)


def refuse_claims(run: RunFolder, attempt: Attempt, of: Owner) -> None:
    """No standby that the process ``of`` has named may claim the run from now on, unless one has already.

    Raises:
        StorageError: the run folder cannot be read or written, or another process holds it.
    """
    lease = Lease(run, attempt)
    with run.lock():
        if run.owner() == of and (terms := lease.read()) is not None:
            lease.write(replace(terms, standby=""))
