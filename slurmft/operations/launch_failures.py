"""Jobs that Slurm holds because a node could not start them, which is what a failing Prolog does by default."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from slurmft.config.config import RunConfig
from slurmft.errors import ConfigError, LaunchError, SlurmError, StorageError
from slurmft.operations.run_configuration import configuration_of
from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.nodes.suspicion import observed
from slurmft.policy.site.job_identity import OwnJob
from slurmft.scheduler import nodes, own_jobs, queueing
from slurmft.scheduler.nodes import Refusal
from slurmft.scheduler.parsing.parsing import JobRecord
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.recovery import avoided_nodes
from slurmft.supervisor.recovery.place_elsewhere import next_placement

MAX_RELEASES = 3
"""Releases of a run's job in a row, without a start in between."""

log = logging.getLogger(__name__)


def release(run: RunFolder, job: OwnJob, record: JobRecord, who: str) -> str:
    """Let a job that Slurm holds after a failed launch begin elsewhere; says what was done.

    The nodes that refused it are recorded on the exclusion list. Call for a job of ``is_held_by_launch``.

    Raises:
        LaunchError: it was released often enough.
        SlurmError: Slurm refused or did not answer.
    """
    history, journal = run.journal().read(), run.journal()
    times = releases_without_start(history)
    refusals = _refusals(record, history)
    names = sorted({each.node for each in refusals})
    if times >= MAX_RELEASES:
        where = f" (now by {', '.join(f'{each.node}: {each.reason}' for each in refusals)})" if refusals else ""
        raise LaunchError(
            f"job {job} of run {run.path.name} was refused by nodes {times + 1} times in a row{where}",
            hint=f"fix what fails there (a Prolog?), then scontrol release {job}",
        )
    journal.append(EventName.RELEASED, job=job.job_id, reason=record.reason, nodes=names, times=times + 1, who=who)
    if (config := _configuration(run)) is not None:
        _accuse(run, config, job, refusals)
        placement = next_placement(config, partition=record.partition, job=job, history=history, suspects=names)
        queueing.place(job, queueing.SOONEST_S, avoid=None if placement is None else placement.excluded)
    own_jobs.release(job)
    where = f", now without {', '.join(names)}" if names else ""
    return f"job {job} was held by Slurm ({record.reason}); it is released{where}"


def releases_without_start(history: Sequence[Event]) -> int:
    """How often the run's job was released since the run last began."""
    count = 0
    for event in history:
        count = (
            0
            if event.event in (EventName.ATTEMPT_STARTED, EventName.SUBMITTED)
            else count + (event.event == EventName.RELEASED)
        )
    return count


def _refusals(record: JobRecord, history: Sequence[Event]) -> list[Refusal]:
    """Nodes that Slurm has drained when it put the job back into the queue, without those of an earlier time."""
    at = record.identity.submitted
    told = {
        (event.details.get("node"), event.details.get("seen_at"))
        for event in history
        if event.event == EventName.EVIDENCE
    }
    try:
        return [each for each in nodes.refusals(at[-1]) if (each.node, each.at) not in told] if at else []
    except SlurmError as error:
        log.warning("Slurm does not report which node refused job %s: %s", record.job_id, error.what)
        return []


def _configuration(run: RunFolder) -> RunConfig | None:
    try:
        return configuration_of(run)
    except ConfigError as error:
        log.warning("nothing is excluded: %s", error.what)
        return None


def _accuse(run: RunFolder, config: RunConfig, job: OwnJob, refusals: Sequence[Refusal]) -> None:
    evidence = [
        Evidence(kind=Kind.LAUNCH_FAILED, suspect=Suspect(node=each.node),
                 message=f"it could not start job {job}: {each.reason}", at=each.at)
        for each in refusals
    ]  # fmt: skip
    try:
        observations = [
            observed(each, source=f"launch of {job}", run=str(run.path), job=job.job_id) for each in evidence
        ]
        if observations:
            avoided_nodes.exclusion_list(config, os.environ).observe(observations)
    except (StorageError, SlurmError, OSError) as error:
        log.warning("the exclusion list cannot be written: %s", error)
        return
    for each in evidence:
        run.journal().append(
            EventName.EVIDENCE, kind=each.kind.value, node=each.suspect.node, message=each.message, seen_at=each.at
        )
