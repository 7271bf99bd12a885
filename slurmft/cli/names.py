"""RUN arguments: a name below the runs' root, or a path; or all of them."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slurmft.errors import StorageError, UsageError
from slurmft.storage.run_folder import RunFolder, find_run, list_runs


def runs_root() -> Path:
    """Where runs are looked for by name: ``SLURMFT_RUNS``, else ``runs`` here."""
    return Path(os.environ.get("SLURMFT_RUNS") or "runs")


def every_run() -> list[RunFolder]:
    """Every run below the root, by name; also folders that cannot be looked into, which may be runs.

    Raises:
        UsageError: the root itself cannot be listed.
    """
    root = runs_root()
    try:
        return list_runs(root)
    except OSError as error:
        raise UsageError(f"cannot list {root}: {error.strerror}", hint="SLURMFT_RUNS names another folder") from error


def _named(name: str) -> RunFolder:
    if not name.strip():  # as in: slurmft stop "$FORGOTTEN"; a path of nothing would be the current folder
        raise UsageError("the name of the run is empty", hint="slurmft status lists the runs")
    try:
        return find_run(name, runs_root())
    except StorageError as error:
        raise UsageError(error.what, hint=error.hint) from error
    except (OSError, ValueError) as error:
        where, reason = getattr(error, "filename", None) or name, getattr(error, "strerror", None) or error
        hint = "slurmft status lists the runs; some of these folders may belong to somebody else"
        raise UsageError(f"cannot look for run {name[:80]!r}: {str(where)[-200:]}: {reason}", hint=hint) from error


class _Run(click.ParamType[RunFolder]):
    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunFolder:
        return value if isinstance(value, RunFolder) else _named(str(value))


def who() -> str:
    """The person at the prompt, as user@host."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container knows only the number
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """RUN, required."""
    return click.argument("run", type=_Run())(function)


def optional_run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """RUN, or every run."""
    return click.argument("run", type=_Run(), required=False)(function)
