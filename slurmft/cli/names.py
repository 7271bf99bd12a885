"""RUN arguments: a name below the runs' root, or a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slurmft.storage.run_folder import RunFolder, find_run


def runs_root() -> Path:
    """Where runs are looked for by name: ``SLURMFT_RUNS``, else ``runs`` here."""
    return Path(os.environ.get("SLURMFT_RUNS", "runs"))


class _Run(click.ParamType[RunFolder]):
    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunFolder:
        if isinstance(value, RunFolder):
            return value
        return find_run(str(value), runs_root())


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """RUN, required."""
    return click.argument("run", type=_Run())(function)


def optional_run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """RUN, or every run."""
    return click.argument("run", type=_Run(), required=False)(function)
