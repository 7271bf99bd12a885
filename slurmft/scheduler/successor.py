"""Submitting a run's script again: as the successor of the job around us, or anew from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurmft.errors import SlurmUnavailable
from slurmft.scheduler import command
from slurmft.scheduler.environment import scrubbed
from slurmft.scheduler.nodes import compress
from slurmft.scheduler.slurm import job

TEST_S = 2.0


def batch_script(job_id: str) -> str:
    """The script a job was submitted with.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return command.run_patiently(["scontrol", "write", "batch_script", job_id, "-"], patience_s=5.0)


def successor_command(script: Path, *, after: str, options: Sequence[str] = ()) -> list[str]:
    """The command that submits ``script`` to start when job ``after`` has ended, however it ends."""
    return ["sbatch", "--parsable", f"--dependency=afterany:{after}", *options, str(script)]


def submit_successor(
    script: Path, *, after: str, options: Sequence[str], environment: Mapping[str, str], patience_s: float,
    tried: bool = False,
) -> str:  # fmt: skip
    """Submit ``script`` to start when job ``after`` has ended; returns the new job id.

    A try that got no answer, or whose supervisor was killed, may have arrived all the same, and two successors are
    worse than none: each further try looks for the job of an earlier one first; the first as well when ``tried``.

    Raises:
        SlurmError: Slurm refused, or did not answer for ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if tried and (found := _job_with(script, not_before=after)):
                return found
            tried = True
            return _sbatch(successor_command(script, after=after, options=options), environment, Path.cwd())
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
    return command.run(argv, timeout_s=TEST_S, environment=scrubbed(os.environ))


def submit_script(
    script: Path, *, after: str, options: Sequence[str] = (), environment: Mapping[str, str], folder: Path
) -> str:
    """Submit ``script`` anew, from ``folder``, now that job ``after`` is gone; returns the job id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    if found := _job_with(script, not_before=after):  # an earlier try that got no answer, or could not be noted
        return found
    return _sbatch(["sbatch", "--parsable", f"--chdir={folder}", *options, str(script)], environment, folder)


def _sbatch(argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """The id of a new job; ``folder`` becomes its SLURM_SUBMIT_DIR, to which a script's relative paths belong."""
    text = command.run(argv, timeout_s=60.0, environment=scrubbed(environment), folder=folder)
    return text.strip().split(";")[0]


def _job_with(script: Path, *, not_before: str) -> str | None:
    """A job of ours that waits or runs and was submitted with ``script`` after job ``not_before``."""
    text = command.run(["squeue", "-h", "--me", "-o", "%i|%o"])
    found = [job_id for job_id, _, path in (line.partition("|") for line in text.splitlines()) if path == str(script)]
    return next((job_id for job_id in found if _number(job_id) > _number(not_before)), None)


def _number(job_id: str) -> int:
    return int(job_id.split("_", maxsplit=1)[0]) if job_id.split("_", maxsplit=1)[0].isdecimal() else 0


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
