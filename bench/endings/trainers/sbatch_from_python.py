"""Plain sbatch from a Python program with slurmft's dependencies: ``python sbatch_from_python.py SCRIPT [ask]``.

With ``ask`` it also asks Slurm what ``slurmft submit`` asks: three questions at once before, one after it.
"""

from __future__ import annotations

import subprocess
import sys

import click  # noqa: F401 - what it costs to import these is what this program is for
import filelock  # noqa: F401
import pydantic
import submitit.local.local
import submitit.slurm.slurm  # noqa: F401
import yaml  # noqa: F401

_ = pydantic.BaseModel, pydantic.Field  # loaded on first use, as by any model with a limit in it

asks = sys.argv[2:] == ["ask"]
if asks:
    questions = [["scontrol", "--all", "--oneliner", "show", "partition"], ["scontrol", "show", "config"],
                 ["scontrol", "show", "federation"]]  # fmt: skip
    running = [subprocess.Popen(question, stdout=subprocess.DEVNULL) for question in questions]
    for process in running:
        process.wait()
subprocess.run(["sbatch", sys.argv[1]], check=True)
if asks:
    subprocess.run(["squeue", "-h", "--me"], check=True)
