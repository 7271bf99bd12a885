"""The section ``slurm`` of the configuration."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ConfigDict, model_validator

from slurmft.config.types import Positive, Section, Text
from slurmft.policy.site.sbatch_section import option_value

_HOSTLIST = re.compile(r"([^\[\]]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])*", re.ASCII)


class SlurmConfig(Section):
    """sbatch's long options with ``_`` for ``-``: any of its manual page, or of the site's own ``sbatch --help``."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _options_are_words(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        for key in ("exclude", "nodelist"):
            text = str(section.get(key) or "")
            if "/" not in text and not _HOSTLIST.fullmatch(text):  # sbatch reads a file of that name
                raise ValueError(f"{key}: {text[:80]!r} is no list of nodes, such as n[1-3,7],login1")
        return {key: value if key == "srun_args" else option_value(key, value) for key, value in section.items()}

    partition: Text | None = None
    """Partition to submit to; the cluster's default when empty."""

    time: Text | None = None
    """Time limit as sbatch reads it: minutes, ``"H:MM:SS"`` or ``"D-HH:MM:SS"``."""

    account: Text | None = None
    """Account to charge."""

    qos: Text | None = None
    """Quality of service."""

    cpus_per_task: Positive | None = None
    """CPUs of each node's agent, shared by its workers."""

    gpus_per_node: Text | None = None
    """GPUs on each node, as a number or ``type:number``."""

    mem: Text | None = None
    """Memory of each node, such as ``64G``; ``0`` asks for all of it."""

    constraint: Text | None = None
    """Node features."""

    exclude: Text | None = None
    """Nodes never to run on (a hostlist); the exclusion list is added to it."""

    job_name: Text | None = None
    """Name in squeue; the run's name when empty."""

    output: Text | None = None
    """Log of the batch script; in the run folder when empty."""

    requeue: bool = True
    """Let Slurm restart the job (``--requeue``)."""

    no_kill: bool = False
    """Keep the allocation when one of its nodes dies (``--no-kill``)."""

    srun_args: tuple[str, ...] = ()
    """More options for the ``srun`` that starts the agents, such as ``--mpi=none``."""
