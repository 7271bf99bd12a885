"""Submitting a run's script again: as the successor of the job around us, or anew from outside."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.job_identity import OwnJob, is_same_job
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.environment import scrubbed
from slurmft.scheduler.nodes import compress
from slurmft.scheduler.own_jobs import UNKNOWN_ID, ForeignJob, cluster_to_ask, show
from slurmft.scheduler.parsing import JOB_FORMAT, JobRecord, parse_jobs
from slurmft.scheduler.slurm import job
from slurmft.storage.run_folder import RunFolder

# --- The job whose only purpose is to lend its nodes to a run ---

LEAD_S = 60
"""Seconds before its time limit at which a lending job gives its nodes back; Slurm may be up to 30 s earlier."""

_NOT_TAKEN = frozenset({"requeue", "no_kill", "srun_args", "job_name", "output", "hold"})


def lending_command(
    config: RunConfig, run: RunFolder, *, nodes: int, options: Mapping[str, Any], avoid: frozenset[str]
) -> list[str]:
    """The sbatch that submits it: the run's own options, then the ones given, which override them."""
    section = config.slurm.model_dump(exclude_none=True, exclude=set(_NOT_TAKEN))
    chosen: dict[str, Any] = {key.replace("_", "-"): value for key, value in section.items()}
    chosen |= {
        "job-name": f"join-{config.name}"[:200],
        "output": str(run.logs).replace("%", "%%") + "/join-%j.log",
        **options,
    }
    if excluded := [str(part) for part in (chosen.get("exclude"), compress(avoid)) if part]:
        chosen["exclude"] = ",".join(excluded)
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items() if value is not False
    ]
    inside = shlex.join([sys.executable, "-P", "-u", "-m", "slurmft", "join", str(run.path), "--here"])
    return [
        "sbatch", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=1", "--open-mode=append", "--requeue",
        f"--signal=SIGTERM@{LEAD_S}", *words, f"--wrap=exec {inside}",
    ]  # fmt: skip


def submit_lender(argv: list[str]) -> str:
    """The new job's id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return slurm.run(argv, timeout_s=60.0, environment=scrubbed(os.environ)).strip().split(";")[0]


def lenders_name(run: RunFolder) -> str:
    """The name of the jobs that the run itself has lend nodes: no other job of the user has it."""
    whole = hashlib.sha256(os.fsencode(os.path.realpath(run.path))).hexdigest()[:12]
    return f"lend-{re.sub('[^A-Za-z0-9._-]', '_', run.path.name)[:100]}-{whole}"


def lenders(run: RunFolder) -> list[JobRecord]:
    """Those of them that wait, or have a node.

    Raises:
        SlurmError: Slurm refused or did not answer; nothing is known.
    """
    argv = ["squeue", "-h", "-a", "--me", f"--name={lenders_name(run)}", "-o", JOB_FORMAT]
    return [each for each in parse_jobs(slurm.run(argv)) if each.waiting or (each.alive and each.state != "COMPLETING")]


def end_lenders(run: RunFolder) -> list[str]:
    """Cancel them; returns their ids.

    Raises:
        SlurmError: Slurm refused or did not answer; some may be left.
    """
    found = lenders(run)
    for each in found:
        own_jobs.cancel(OwnJob(each.job_id, each.identity))
    return [each.job_id for each in found]


# --- Submitting a run's script again: as the successor of the job around us, or anew from outside ---

TEST_S = 2.0


def batch_script(job: OwnJob) -> str:
    """The script a job was submitted with.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    show(job, patience_s=5.0)
    argv = ["scontrol", "write", "batch_script", job.job_id, "-"]
    return slurm.run_patiently(argv, patience_s=5.0, cluster=cluster_to_ask(job))


def successor_command(script: Path, *, after: OwnJob, options: Sequence[str] = ()) -> list[str]:
    """The command that submits ``script`` to start when job ``after`` has ended, however it ends."""
    return ["sbatch", "--parsable", f"--dependency=afterany:{after}", *options, str(script)]


def submit_successor(
    script: Path, *, after: OwnJob, options: Sequence[str], environment: Mapping[str, str], patience_s: float,
    known: Sequence[OwnJob] = (), tried: bool = False,
) -> str:  # fmt: skip
    """Submit ``script`` to start when job ``after`` has ended; returns the new job id.

    A try that got no answer, or whose supervisor was killed, may have arrived all the same, and two successors are
    worse than none: each further try looks for the job of an earlier one first; the first as well when ``tried``.

    Args:
        known: jobs of the run that are not successors of this one.

    Raises:
        SlurmError: Slurm refused, or did not answer for ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if tried and (found := _earlier_try(script, [*known, after])):
                return found
            tried = True
            argv = successor_command(script, after=after, options=options)
            if _is_gone(after):  # another job that has its number now may run for weeks
                argv = [word for word in argv if not word.startswith("--dependency=")]
            return _sbatch(argv, environment, Path.cwd())
        except SlurmUnavailable:
            if time.monotonic() + 1.0 > deadline:
                raise
            time.sleep(1.0)


def submit_beside(
    script: Path, *, beside: OwnJob, options: Sequence[str], environment: Mapping[str, str], patience_s: float,
    known: Sequence[OwnJob] = (), tried: bool = False,
) -> str:  # fmt: skip
    """Submit ``script`` to start at once, while job ``beside`` still runs; returns the new job id.

    As ``submit_successor`` it looks for the job of an earlier try first.

    Raises:
        SlurmError: Slurm refused, or did not answer for ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if tried and (found := _earlier_try(script, [*known, beside])):
                return found
            tried = True
            return _sbatch(["sbatch", "--parsable", *options, str(script)], environment, Path.cwd())
        except SlurmUnavailable:
            if time.monotonic() + 1.0 > deadline:
                raise
            time.sleep(1.0)


def test_placement(script: Path, *, excluded: Collection[str]) -> str:
    """Ask Slurm whether it could ever place ``script`` without these nodes; returns its estimate.

    Raises:
        SlurmError: it could not, or did not answer, or there is no such script.
    """
    argv = ["sbatch", "--test-only", f"--exclude={compress(excluded)}", str(script)]
    return slurm.run(argv, timeout_s=TEST_S, environment=scrubbed(os.environ))


def _is_gone(job: OwnJob) -> bool:
    try:
        show(job, patience_s=0.0)
    except ForeignJob:
        return True
    except SlurmUnavailable:
        return False
    except SlurmError as error:
        return UNKNOWN_ID in error.what
    return False


def submit_script(
    script: Path, *, known: Sequence[OwnJob], options: Sequence[str] = (), environment: Mapping[str, str], folder: Path
) -> str:
    """Submit ``script`` anew, from ``folder``, now that the run's ``known`` jobs are gone; returns the job id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    if found := _earlier_try(script, known):  # it got no answer, or could not be noted
        return found
    argv = ["sbatch", "--parsable", f"--chdir={folder}", *options, str(script)]
    return _sbatch(argv, environment, folder, cluster=_cluster_of(known))


def _cluster_of(known: Sequence[OwnJob]) -> str:
    return cluster_to_ask(known[-1]) if known else ""


def _sbatch(argv: Sequence[str], environment: Mapping[str, str], folder: Path, *, cluster: str = "") -> str:
    """The id of a new job; ``folder`` becomes its SLURM_SUBMIT_DIR, to which a script's relative paths belong."""
    clean = scrubbed(environment) | ({"SLURM_CLUSTERS": cluster} if cluster else {})
    text = slurm.run(argv, timeout_s=60.0, environment=clean, folder=folder)
    return text.strip().split(";")[0]


def _earlier_try(script: Path, known: Sequence[OwnJob]) -> str | None:
    """A job of ours that waits or runs, was submitted with ``script``, and is none that the run knows."""
    text = slurm.run(["squeue", "-h", "-a", "--me", "-o", JOB_FORMAT], cluster=_cluster_of(known))
    mine = [record for record in parse_jobs(text) if record.identity.script == str(script)]
    return next((record.job_id for record in mine if not any(_is_of(record, job) for job in known)), None)


def _is_of(record: JobRecord, job: OwnJob) -> bool:
    # a job that was never seen is recognized by its script alone
    seen = bool(job.known.submitted) and not set(job.known.submitted) & set(record.identity.submitted)
    return record.job_id == job.job_id and is_same_job(job.known, record.identity) is not False and not seen


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
