"""Plain sbatch from a Python program with slurmft's dependencies: ``python sbatch_from_python.py SCRIPT``."""

from __future__ import annotations

import subprocess
import sys

import click  # noqa: F401 - what it costs to import these is what this program is for
import filelock  # noqa: F401
import pydantic
import submitit.local.local
import submitit.slurm.slurm  # noqa: F401
import yaml  # noqa: F401

_ = pydantic.BaseModel  # loaded on first use

subprocess.run(["sbatch", sys.argv[1]], check=True)
