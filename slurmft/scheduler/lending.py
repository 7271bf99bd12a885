"""The job whose only purpose is to lend its nodes to a run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from slurmft.config.config import RunConfig
from slurmft.scheduler import command
from slurmft.scheduler.environment import scrubbed
from slurmft.scheduler.nodes import compress
from slurmft.storage.run_folder import RunFolder

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
    return command.run(argv, timeout_s=60.0, environment=scrubbed(os.environ)).strip().split(";")[0]
