"""A run's jobs as Slurm has them now; another job that has got the id of one is recognized.

Job ids are reused. So the answer to an id is compared with what the run recorded of its job before it is believed or
acted on. A job that is not the run's counts as gone.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.final_ends import Requeueing
from slurmft.policy.grace import JobTimes
from slurmft.policy.job_identity import JobIdentity, OwnJob, is_same_job
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import (
    ALIVE,
    JobEnding,
    JobRecord,
    NamedNodes,
    job_pairs,
    parse_ending,
    parse_identity,
    parse_named,
    parse_requeueing,
    parse_time,
)
from slurmft.scheduler.slurm import parse_job_times

UNKNOWN_ID = "Invalid job id specified"


class ForeignJob(SlurmError):
    """The job with this id is not the run's; the run's job is gone."""


def find(jobs: Sequence[OwnJob], *, patience_s: float = 5.0) -> dict[OwnJob, JobRecord]:
    """What squeue knows of these jobs, with one question for each cluster.

    One that is absent is gone, or so old that Slurm has forgotten it, which does not mean that it has finished.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
        SlurmError: Slurm refused.
    """
    found, unknown = find_where_answered(jobs, patience_s=patience_s)
    for error in unknown.values():
        raise error
    return found


def find_where_answered(
    jobs: Sequence[OwnJob], *, patience_s: float = 5.0
) -> tuple[dict[OwnJob, JobRecord], dict[OwnJob, SlurmError]]:
    """The same for jobs of several runs; of the jobs of another cluster that cannot be asked, the error instead.

    Raises:
        SlurmUnavailable: this machine's own cluster did not answer; nothing is known.
        SlurmError: it refused.
    """
    found: dict[OwnJob, JobRecord] = {}
    unknown: dict[OwnJob, SlurmError] = {}
    for cluster in sorted({cluster_to_ask(job) for job in jobs}):
        mine = [job for job in jobs if cluster_to_ask(job) == cluster]
        try:
            found |= _find_in(cluster, mine, patience_s)
        except SlurmError as error:
            if not cluster:
                raise
            unknown |= dict.fromkeys(mine, error)
    return found, unknown


def _find_in(cluster: str, jobs: Sequence[OwnJob], patience_s: float) -> dict[OwnJob, JobRecord]:
    ids = list(dict.fromkeys(job.job_id for job in jobs))
    records = slurm.jobs(ids, patience_s=patience_s, cluster=cluster)
    found = {job: records[job.job_id] for job in jobs if job.job_id in records}
    return {job: record for job, record in found.items() if _is_ours(job, record.identity)}


def find_one(job: OwnJob, *, patience_s: float = 5.0) -> JobRecord | None:
    """One job, or None when it is gone or forgotten. Raises as ``find``."""
    return find([job], patience_s=patience_s).get(job)


def show(job: OwnJob, *, patience_s: float = 3.0) -> str:
    """What ``scontrol -o show job`` says of the job, which is the run's.

    Raises:
        ForeignJob: another job has its id now.
        SlurmUnavailable: Slurm did not answer; nothing is known.
        SlurmError: Slurm refused, or knows no such job.
    """
    argv = ["scontrol", "-a", "-o", "show", "job", job.job_id]
    text = slurm.run_patiently(argv, patience_s=patience_s, cluster=cluster_to_ask(job))
    refuse_another(job, text)
    return text


def refuse_another(job: OwnJob, text: str) -> None:
    """Return when ``text``, of ``scontrol -o show job``, is about the run's job.

    Raises:
        ForeignJob: it is about another one.
    """
    if is_same_job(job.known, parse_identity(text)) is False:
        raise ForeignJob(f"job {job} of this run is gone: another job has its number now")


def cluster_to_ask(job: OwnJob) -> str:
    """The job's cluster where it is another one than this machine's; else empty."""
    theirs = job.known.cluster
    if not theirs or theirs.lower() == (here := _local_cluster(os.environ.get("SLURM_CONF", ""))).lower():
        return ""
    return theirs if here else ""


def local_cluster() -> str:
    """The name of the cluster that plain commands ask; empty where it is not known."""
    return _local_cluster(os.environ.get("SLURM_CONF", ""))


@functools.cache
def _local_cluster(configuration: str) -> str:
    named = slurm.configured_cluster({"SLURM_CONF": configuration} if configuration else {})
    if named:
        return named
    try:
        return slurm.site().cluster
    except SlurmError:
        return ""


def _is_ours(job: OwnJob, seen: JobIdentity) -> bool:
    same = is_same_job(job.known, seen)
    if same is not None:
        return same
    try:
        show(job)
    except SlurmUnavailable:
        raise
    except SlurmError:  # another job, or gone since
        return False
    return True


def identity_of(text: str, cluster: str) -> JobIdentity:
    """The job in ``scontrol -o show job``, to be remembered."""
    return replace(parse_identity(text), cluster=cluster)


def ending(job: OwnJob, restart: int) -> JobEnding:
    """Why Slurm is ending the job around this process, or that it is not.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id; nothing is known.
    """
    return why_ending(show(job), restart)


def is_newest_start(job: OwnJob, restart: int, host: str) -> bool:
    """Whether the start of this job that has had ``restart`` restarts, with its batch script on ``host``, is the one
    that Slurm knows of.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
        SlurmError: Slurm refused, knows no such job, or another job has the id.
    """
    pairs = job_pairs(show(job))
    restarts, batch_host = pairs.get("Restarts", ""), pairs.get("BatchHost", "")
    if pairs.get("JobState") not in ALIVE or (restarts.isdecimal() and int(restarts) > restart):
        return False
    return not (host and batch_host) or host == batch_host


def restarts(job: OwnJob) -> int:
    """How often Slurm has started the job again.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id; nothing is known.
    """
    told = job_pairs(show(job)).get("Restarts", "")
    return int(told) if told.isdecimal() else 0


def why_ending(text: str, restart: int) -> JobEnding:
    """``parse_ending``, which has to know the grace when a user may have cancelled a job that is being preempted."""
    found = parse_ending(text, restart)
    if found is not JobEnding.PREEMPTED:
        return found
    partition = job_pairs(text).get("Partition", "")
    try:
        if not slurm.site().preempt_type.endswith("partition_prio"):
            return found  # the grace is a QOS's, which only the accounting knows
        grace_s = next((each.grace_s for each in slurm.partitions() if each.name == partition), None)
    except SlurmError:
        return found
    return parse_ending(text, restart, grace_s=grace_s or 0.0)


def job_times(job: OwnJob, *, patience_s: float = 3.0) -> JobTimes:
    """When a job started, when Slurm will end it, and when a preemption of it began.

    Raises:
        SlurmError: Slurm refused or did not answer; nothing is known.
    """
    return parse_job_times(show(job, patience_s=patience_s))


def requeueing(job: OwnJob, restart: int, *, patience_s: float) -> Requeueing:
    """Whether Slurm may requeue the job around this process, and whether it has a reason to.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id; nothing is known.
    """
    return parse_requeueing(show(job, patience_s=patience_s), restart)


def named_nodes(job: OwnJob) -> NamedNodes:
    """Nodes that the job will not be placed on, and those that it asks for.

    Raises:
        SlurmError: Slurm refused, did not answer, or its answer cannot be parsed.
    """
    return parse_named(show(job, patience_s=5.0))


def cancelled_by(job: OwnJob) -> int | None:
    """Id of the user who cancelled the job, from the accounting; None where it is not recorded there."""
    argv = ["sacct", "-X", "-D", "-P", "-n", "-o", "UID,Submit,State,WorkDir,JobName", "-j", job.job_id]
    try:
        text = slurm.run(argv, timeout_s=5.0, cluster=cluster_to_ask(job))
    except SlurmError:
        return None
    rows = [fields for line in text.splitlines() if len(fields := line.split("|", 4)) == 5]
    seen = [(_identity_of_row(fields), fields[2]) for fields in rows]
    ours = [(identity, state) for identity, state in seen if is_same_job(job.known, identity) is not False]
    # what began when it did is the job itself; a later row may be another one with its id
    certain = [each for each in ours if set(each[0].submitted) & set(job.known.submitted)]
    for _, state in [*certain, *ours[-1:]]:
        if match := re.search(r"CANCELLED by (\d+)", state):
            return int(match.group(1))
    return None


def _identity_of_row(fields: Sequence[str]) -> JobIdentity:
    user, submitted, _, folder, name = fields
    at = parse_time(submitted)
    return JobIdentity(
        user=int(user) if user.isdecimal() else None, name=name, folder=folder or None,
        submitted=() if at is None else (at,), restarts=1,
    )  # fmt: skip


def release(job: OwnJob) -> None:
    """Release a job that is held.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id.
    """
    show(job, patience_s=5.0)
    slurm.run_patiently(["scontrol", "release", job.job_id], patience_s=5.0, cluster=cluster_to_ask(job))


def cancel(job: OwnJob) -> None:
    """Cancel a job; one that is gone already is fine.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id.
    """
    try:
        show(job, patience_s=5.0)
    except SlurmError as error:
        if UNKNOWN_ID in error.what:
            return
        raise
    slurm.run_patiently(["scancel", job.job_id], patience_s=5.0, cluster=cluster_to_ask(job))
