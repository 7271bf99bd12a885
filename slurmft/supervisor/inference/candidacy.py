"""The successor's side of a handover: a job that prepares an endpoint beside its owner, and then takes the run over.

Until then it decides nothing for the run, and changes nothing in the run folder but its own attempt's folder, its job's
identity and lines of the journal.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.errors import Fenced
from slurmft.inference.serving.endpoint import folder_of
from slurmft.inference.serving.handover import read_handover, write_handover
from slurmft.ipc.calls import ReplicaPlace
from slurmft.ipc.channel import BadMessage
from slurmft.policy.verdicts.final_ends import End
from slurmft.scheduler import own_jobs
from slurmft.storage import signs_of_life
from slurmft.storage.patience import write_state
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.supervisor.cluster import Cluster, SlurmCluster
from slurmft.supervisor.owner import job_of, owner_lives, this_process
from slurmft.supervisor.recovery.final_ends import Superfluous
from slurmft.system.files import read_json

GONE_LOOK_S = 10.0
"""How often Slurm is asked for an owner that gives no signs of life."""


def candidate_of(config: RunConfig, run: RunFolder, cluster: SlurmCluster) -> Owner | None:
    """The owner that wants to hand the endpoint over to this job; None where there is none that lives.

    Raises:
        Fenced: this start of the job is not the newest one.
    """
    if config.inference is None or config.inference.serving is None:
        return None
    with run.lock():
        owner, handover = run.owner(), read_handover(run.path)
        job = cluster.attempt.job
        if owner is None or handover is None or handover.predecessor != owner.job or owner.job == job:
            return None
        if not handover.successor:  # sbatch has not answered the owner yet
            handover = replace(handover, successor=job)
            write_handover(run.path, handover)
        if handover.successor != job:
            return None
    if not owner_lives(run, owner):
        return None
    if cluster.is_newest_start() is False:
        raise Fenced("this start of the job is not the newest one any more", hint="nothing to do")
    with run.lock():
        run.add_job(job, cluster.own.known)
    return owner


def handed_over(run: RunFolder, cluster: Cluster) -> Superfluous | None:
    """Why this job has nothing to do, as it has handed its endpoint over to one that lives."""
    owner = run.owner()
    if owner is None or not is_heir(run, cluster.attempt.job, owner) or not owner_lives(run, owner):
        return None
    return Superfluous(f"job {owner.job} has taken the endpoint over", str(cluster.attempt), End.HANDED_ON, 0)


def is_heir(run: RunFolder, job: str, owner: Owner) -> bool:
    """Whether ``owner`` has the run out of a handover by ``job``.

    Raises:
        StorageError: the run folder cannot be read.
    """
    with run.lock():
        handover = read_handover(run.path)
    return handover is not None and owner.job != job and (handover.predecessor, handover.successor) == (job, owner.job)


class Candidacy:
    """What a candidate knows of its owner; blocking, but for the properties."""

    def __init__(self, run: RunFolder, cluster: Cluster) -> None:
        self._run, self._cluster = run, cluster
        self._looked_s = time.monotonic()
        self.before: Owner | None = None
        """The owner from whom the run was taken."""

    def why_over(self) -> str:
        """Why this job is not to take the run over any more; empty while it is.

        Raises:
            StorageError: the run folder cannot be read.
        """
        with self._run.lock():
            return self._why_over()

    def is_alone(self) -> bool:
        """Whether the owner is gone, so that the run has no other one; asks Slurm now and then.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        owner = self._run.owner()
        if owner is None or signs_of_life.is_fresh(self._run, owner):
            return owner is None
        if time.monotonic() - self._looked_s < GONE_LOOK_S:
            return False
        self._looked_s = time.monotonic()
        return not owner_lives(self._run, owner)

    def claim(self, places: tuple[ReplicaPlace, ...]) -> Owner | None:
        """Become the owner; returns its record, or None where the handover is over or the run is to stop.

        Args:
            places: of the replicas here, for the routers of the owner before.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        write_state(_places_file(self._run), {"replicas": [place.as_mapping() for place in places]})
        with self._run.lock():
            before = self._run.owner()
            if self._why_over() or before is None or self._run.see_request("KILL") is not None:
                return None
            mine = this_process(self._run, self._cluster, before.generation + 1)
            self._run.take_over(mine)
            self.before = before
            return mine

    def _why_over(self) -> str:
        owner, handover = self._run.owner(), read_handover(self._run.path)
        if handover is None:
            return "the handover was called off"
        if handover.successor != self._cluster.attempt.job:
            return f"job {handover.successor} is to take the run over instead"
        if owner is not None and owner.job != handover.predecessor:
            return f"job {owner.job} owns the run, which this one was not to take over from"
        return ""


def see_off(run: RunFolder, before: Owner) -> str | None:
    """Cancel the job of the owner before, if that gives no signs of life any more: it would keep its nodes.

    Returns its state when it was cancelled, empty when it is gone, and None while it may be leaving; blocking.

    Raises:
        SlurmError: Slurm refused or did not answer.
        StorageError: the run folder cannot be read or written.
    """
    if signs_of_life.is_fresh(run, before):
        return None
    job = job_of(run, before)
    found = own_jobs.find_one(job)
    if found is None:
        return ""
    if found.state == "COMPLETING":
        return None
    own_jobs.cancel(job)
    return found.state


def places_of_owner(run: RunFolder) -> tuple[ReplicaPlace, ...]:
    """The replicas of the job that has taken the run over; none where that cannot be read.

    Raises:
        StorageError: the file cannot be read.
    """
    found = (read_json(_places_file(run)) or {}).get("replicas")
    try:
        return tuple(ReplicaPlace.parse(each, "a replica") for each in found or [])
    except (BadMessage, TypeError):
        return ()


def _places_file(run: RunFolder) -> Path:
    return folder_of(run.path) / "replicas.json"
