"""The options in the output of ``sbatch --help``. Pure; tested on recorded output."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPTION = re.compile(r"^ {1,8}(?:-\w, +)?--([a-z][a-z0-9-]*)(=|\[=|\[|\s|$)", re.MULTILINE)

NOT_FOR_A_RUN = frozenset({"help", "usage", "version", "test-only", "parsable", "wait"})
"""They print something else than the job's id, or make sbatch itself wait."""


@dataclass(frozen=True, slots=True)
class HelpedOptions:
    """The long options of one sbatch."""

    names: frozenset[str]
    flags: frozenset[str]
    """Those that may stand without a value."""


def parse_sbatch_help(text: str) -> HelpedOptions:
    """The options that ``text`` describes, less those that are not for a run."""
    found = [(name, mark) for name, mark in _OPTION.findall(text) if name not in NOT_FOR_A_RUN]
    return HelpedOptions(frozenset(name for name, _ in found), frozenset(name for name, mark in found if mark != "="))
