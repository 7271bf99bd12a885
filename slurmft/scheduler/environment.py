"""The job around us as the environment describes it, and the variables that must not leak into another job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmft.config.sections import SlurmConfig
from slurmft.policy.job_identity import NOTHING_KNOWN, JobIdentity

_LEAKING = ("SLURM_", "SLURMD_", "SLURMFT_", "SUBMITIT_", "PMI_", "PMIX_", "TORCHELASTIC_", "SRUN_DEBUG")
_KEPT = frozenset({"SLURM_CONF", "SLURMFT_RUNS", "SUBMITIT_PREEMPT_SIGNAL"})


PART_VARIABLE = "SLURMFT_NODES"
TASKS_VARIABLE = "SLURMFT_TASKS"
"""A file with the variables of the tasks that workers stand for (``slurmft sbatch``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The job this process runs in."""

    job_id: str
    """As commands take it: ``123``, or ``123_4`` for an array task."""

    restart: int
    nodes: str
    """Hostlist of the allocation."""

    node_count: int
    partition: str
    part: str = ""
    """Hostlist of the nodes that the run is for, where that is not the whole allocation."""

    identity: JobIdentity = NOTHING_KNOWN
    """The job's identity as far as the environment shows it."""


def current_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """The Slurm job around this process; None outside of one."""
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    return SlurmJob(
        job_id=job_id,
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        nodes=environment.get("SLURM_JOB_NODELIST", ""),
        node_count=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
        partition=environment.get("SLURM_JOB_PARTITION", ""),
        part=environment.get(PART_VARIABLE, ""),
        identity=JobIdentity(
            user=os.getuid(),
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
            name=environment.get("SLURM_JOB_NAME", ""),
        ),
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What a new job asks for, as sbatch ranks where it is said; empty where the site's default is taken."""

    partition: str
    """One, or several with commas between them."""

    time: str


def asked_for(section: SlurmConfig, options: Mapping[str, Any], environment: Mapping[str, str]) -> Asked:
    """Partition and time limit; ``options`` are sbatch's from behind ``--``."""
    # as for sbatch: its command line overrides its variables, and these override the script
    partition = options.get("partition") or environment.get("SBATCH_PARTITION") or section.partition
    limit = options.get("time") or environment.get("SBATCH_TIMELIMIT") or section.time
    return Asked(str(partition or ""), str(limit or ""))


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a job that is submitted from inside a job: without what describes the parent.

    Slurm exports all of it otherwise, and the child would take over its parent's restart count and node list.
    """
    return {name: value for name, value in environment.items() if name in _KEPT or not name.startswith(_LEAKING)}
