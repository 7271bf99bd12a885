"""The lease of a run's supervisor in the run folder, where a standby of the same start of the job watches it.

Two files beside the attempts: one is touched, the other names the standby that may claim the run and where it finds the
supervisor. A claim is made with the run's lock held.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.scheduler.environment import current_job
from slurmft.storage import run_folder
from slurmft.storage.patience import writing
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor.cluster import Cluster
from slurmft.supervisor.guardian import any_kept
from slurmft.supervisor.owner import is_this_process
from slurmft.system.files import as_record, open_regular, parse_json, read_bytes, replace_atomically, trusted_owners

# --- The lease of a run's supervisor in the run folder, where a standby of the same start of the job watches it ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a supervisor tells its standby."""

    hosts: tuple[str, ...]
    port: int
    secret: str = field(repr=False)
    standby: str
    """The token of the one standby that may claim the run."""


class Lease:
    """The lease of one start of a job."""

    def __init__(self, run: RunFolder, attempt: Attempt) -> None:
        self._run = run
        name = f"{attempt.job}.{attempt.restart}"
        self._touched = run.attempts / f"{name}.lease"
        self._terms = run.attempts / f"{name}.lease.json"

    def renew(self) -> None:
        """Note that the supervisor lives.

        Raises:
            OSError: the run folder cannot be written.
        """
        descriptor = open_regular(self._touched, os.O_WRONLY | os.O_CREAT)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def age_s(self) -> float | None:
        """Seconds since it was renewed, by the file server's clock; None where that cannot be told."""
        try:
            return run_folder.seconds_since(self._run, self._touched)
        except StorageError:
            return None

    def write(self, terms: Terms) -> None:
        """Name the standby, in place of an earlier one.

        Raises:
            StorageError: the run folder cannot be written.
        """
        with writing(self._terms):
            replace_atomically(self._terms, json.dumps(asdict(terms)))

    def read(self) -> Terms | None:
        """The newest terms; None where there are none that can be read."""
        try:
            told = parse_json(read_bytes(self._terms, owners=trusted_owners(self._terms.parent)))
            return as_record(Terms, told, self._terms)
        except (OSError, ValueError, RecursionError, StorageError):
            return None

    @property
    def path(self) -> Path:
        """The file that is touched."""
        return self._touched


# --- A supervisor whose standby has taken the run over: it keeps the batch script alive, and does nothing else ---
# Slurm ends a job with its batch script, and the new supervisor with it.

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
