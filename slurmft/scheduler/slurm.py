"""Everything slurmft asks of Slurm. Add a question here, nowhere else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.errors import SlurmError
from slurmft.scheduler import command
from slurmft.scheduler.environment import scrubbed
from slurmft.scheduler.parsing import JOB_FORMAT, JobEnding, JobRecord, parse_ending, parse_jobs, parse_pairs

PATIENCE_S = 30.0
log = logging.getLogger(__name__)
_CONFIGURATIONS = [Path(path) for path in ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf")]


class RequeueDisabled(SlurmError):
    """The site, or the job's own options, forbid requeueing it."""


def available() -> bool:
    """Whether this machine belongs to a cluster: it has Slurm's client commands and a configuration for them.

    Packages alone, such as a test lab installs, are no cluster. A controller that is down is: whoever waits for it does
    not want to train on the login node instead.
    """
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return False
    if "SLURM_CONF" in os.environ or any(path.exists() for path in _CONFIGURATIONS):
        return True
    try:  # a site may build its own paths in, or serve the configuration over the network
        return "ClusterName" in command.run(["scontrol", "show", "config"], timeout_s=3.0)
    except SlurmError:
        return False


def jobs(job_ids: Sequence[str], *, patience_s: float = 5.0) -> dict[str, JobRecord]:
    """What squeue knows of these jobs; one that it has forgotten is absent, which does not mean that it finished.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
    """
    if not job_ids:
        return {}
    argv = ["squeue", "-h", "-t", "all", "-j", ",".join(job_ids), "-o", JOB_FORMAT]
    try:
        text = command.run_patiently(argv, patience_s=patience_s)
    except SlurmError as error:
        if "Invalid job id" in error.what:  # all of them are forgotten
            return {}
        raise
    return {record.job_id: record for record in parse_jobs(text)}


def job(job_id: str, *, patience_s: float = 5.0) -> JobRecord | None:
    """One job, or None when squeue has forgotten it.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
    """
    return jobs([job_id], patience_s=patience_s).get(job_id)


def ending(job_id: str, restart: int) -> JobEnding:
    """Why Slurm is ending the job around this process, or that it is not.

    Raises:
        SlurmError: Slurm refused or did not answer; nothing is known.
    """
    return parse_ending(command.run_patiently(["scontrol", "-o", "show", "job", job_id], patience_s=3.0), restart)


def preempt_mode(partition: str) -> str:
    """How jobs of this partition are preempted: REQUEUE, CANCEL, SUSPEND or OFF, without extra flags.

    Raises:
        SlurmUnavailable: Slurm did not answer.
        SlurmError: no such partition.
    """
    pairs = parse_pairs(command.run_patiently(["scontrol", "-o", "show", "partition", partition], patience_s=5.0))
    return pairs.get("PreemptMode", "OFF").split(",")[0]


def requeue(job_id: str, *, delay_s: int, patience_s: float = PATIENCE_S) -> bool:
    """Put a job back into the queue, to begin ``delay_s`` seconds from now instead of Slurm's 121.

    The begin time must lie in the future when the job's last process and epilog are gone; else Slurm adds its own
    wait (``slurmctld/job_mgr.c``, batch_requeue_fini). Called from inside the job, the requeue ends the caller: call it
    with signals ignored (``command.ignoring_signals``). Idempotent: a job that is pending already counts as requeued.

    Returns whether the begin time could be set; when not, the job is requeued all the same, and waits Slurm's own time.

    Raises:
        RequeueDisabled: requeueing is off for this job and could not be switched on.
        SlurmUnavailable: Slurm did not answer for ``patience_s`` seconds.
        SlurmError: Slurm refused.
    """
    try:
        _requeue_only(job_id, patience_s)
    except RequeueDisabled:
        try:
            command.run_patiently(["scontrol", "update", f"JobId={job_id}", "Requeue=1"], patience_s=patience_s)
        except SlurmError as error:
            raise RequeueDisabled(f"job {job_id} may not be requeued: {error.what}") from error
        _requeue_only(job_id, patience_s)
    try:
        begin_in(job_id, delay_s, patience_s=patience_s)
    except SlurmError as error:
        log.warning("job %s is requeued, but begins only after Slurm's own delay: %s", job_id, error.what)
        return False
    return True


def begin_in(job_id: str, delay_s: int, *, patience_s: float = PATIENCE_S) -> None:
    """Set the begin time of a pending or completing job.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    when = "now" if delay_s <= 0 else f"now+{delay_s}"
    command.run_patiently(["scontrol", "update", f"JobId={job_id}", f"StartTime={when}"], patience_s=patience_s)


def _requeue_only(job_id: str, patience_s: float) -> None:
    try:
        command.run_patiently(["scontrol", "requeue", job_id], patience_s=patience_s, pause_s=0.5)
    except SlurmError as error:
        if "pending execution" in error.what:
            return
        if "presently disabled" in error.what:
            raise RequeueDisabled(f"requeueing job {job_id} is switched off") from error
        raise


def release(job_id: str) -> None:
    """Release a job that is held.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    command.run_patiently(["scontrol", "release", job_id], patience_s=5.0)


def cancel(job_id: str) -> None:
    """Cancel a job; one that is gone already is fine.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    command.run_patiently(["scancel", job_id], patience_s=5.0)


def batch_script(job_id: str) -> str:
    """The script a job was submitted with.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return command.run_patiently(["scontrol", "write", "batch_script", job_id, "-"], patience_s=5.0)


def successor_command(script: Path, *, after: str, options: Sequence[str] = ()) -> list[str]:
    """The command that submits ``script`` to start when job ``after`` has ended, however it ends."""
    return ["sbatch", "--parsable", f"--dependency=afterany:{after}", *options, str(script)]


def submit_successor(script: Path, *, after: str, options: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit ``script`` to start when job ``after`` has ended; returns the new job id.

    Not repeated when Slurm does not answer: the first try may have arrived, and two successors are worse than none.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    text = command.run(
        successor_command(script, after=after, options=options),
        timeout_s=60.0,
        environment=scrubbed(environment),
        folder=Path.cwd(),  # becomes its SLURM_SUBMIT_DIR, to which a script's relative paths belong
    )
    return text.strip().split(";")[0]


def inherited_options(environment: Mapping[str, str] = os.environ) -> list[str]:
    """sbatch options that give a successor the size and place of the job around us, where its script may not say."""
    names = {
        "SLURM_JOB_PARTITION": "--partition",
        "SLURM_JOB_NUM_NODES": "--nodes",
        "SLURM_JOB_ACCOUNT": "--account",
        "SLURM_JOB_QOS": "--qos",
        "SLURM_JOB_NAME": "--job-name",
        "SLURM_CPUS_PER_TASK": "--cpus-per-task",
        "SLURM_GPUS_PER_NODE": "--gpus-per-node",
        "SLURM_MEM_PER_NODE": "--mem",
        "SLURM_JOB_RESERVATION": "--reservation",
    }
    options = [f"{option}={value}" for name, option in names.items() if (value := environment.get(name))]
    record = job(environment["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environment else None
    if record is not None and record.limit_s is not None:
        options.append(f"--time={round(record.limit_s / 60)}")
    return options
