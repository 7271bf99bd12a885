"""Containers that srun starts: whether it can, and a trial of one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from slurmft.scheduler import command

TRY_ON_A_NODE = "salloc --nodes=1 slurmft doctor CONFIG"
"""For a person: the command that tries on a node what cannot be tried elsewhere."""


def srun_knows(option: str) -> bool:
    """Whether srun's help names the long option; a plug-in's options are among them.

    Raises:
        SlurmUnavailable: there is no srun.
        SlurmError: it refused.
    """
    return names_option(command.run(["srun", "--help"]), option)


def names_option(text: str, option: str) -> bool:
    """Whether ``text``, the output of ``srun --help``, has a line for the long option itself."""
    return re.search(rf"^\s*(?:-\w, )?{re.escape(option)}(?:=|\s|$)", text, re.MULTILINE) is not None


def run_inside(options: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> str:
    """Run a command as one task of the job around us, with these options; its standard output.

    Raises:
        SlurmUnavailable: srun is missing or was too slow.
        SlurmError: it did not end with 0; with its words, and srun's.
    """
    one = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--input=none"]
    return command.run([*one, *options, *argv], timeout_s=timeout_s, environment=os.environ)
