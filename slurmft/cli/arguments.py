"""Arguments that several verbs share: RUN (a name below the root of all runs, or a path), and numbers with limits."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmft.cli.main import say
from slurmft.errors import StorageError, UsageError
from slurmft.storage.checkpoint_names import MAX_STEP
from slurmft.storage.run_folder import RunFolder, find_run, list_runs, noted_runs, walk_runs

if TYPE_CHECKING:
    from slurmft.config.run import RunConfig


def runs_root() -> Path:
    """Where runs are looked for by name: ``SLURMFT_RUNS``, else ``runs`` here."""
    return Path(os.environ.get("SLURMFT_RUNS") or "runs")


def every_run() -> list[RunFolder]:
    """Every run below the root, by name; also folders that cannot be looked into, which may be runs. Where there are
    none here, and no root is named: those that the user has submitted, the newest first.

    Raises:
        UsageError: the root itself cannot be listed.
    """
    root = runs_root()
    try:
        return list_runs(root) or ([] if os.environ.get("SLURMFT_RUNS") else noted_runs(os.environ))
    except OSError as error:
        raise UsageError(f"cannot list {root}: {error.strerror}", hint="SLURMFT_RUNS names another folder") from error


def _named(name: str) -> RunFolder:
    if not name.strip():  # as in: slurmft stop "$FORGOTTEN"; a path of nothing would be the current folder
        raise UsageError("the name of the run is empty", hint="slurmft status lists the runs")
    try:
        return find_run(name, runs_root(), lambda: noted_runs(os.environ))
    except StorageError as error:
        raise UsageError(error.what, hint=error.hint) from error
    except (OSError, ValueError) as error:
        where, reason = getattr(error, "filename", None) or name, getattr(error, "strerror", None) or error
        hint = "slurmft status lists the runs; some of these folders may belong to another user"
        raise UsageError(f"cannot look for run {name[:80]!r}: {str(where)[-200:]}: {reason}", hint=hint) from error


class RunType(click.ParamType[RunFolder]):
    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunFolder:
        return value if isinstance(value, RunFolder) else _named(str(value))


def refuse_foreign(run: RunFolder) -> RunFolder:
    """The run, when the caller may act on it: the caller owns it, and it is not a copy that names another run's jobs.

    Raises:
        UsageError: it is another user's.
        StorageError: it is a copy, or its records cannot be read.
    """
    _refuse_foreign(run)
    run.refuse_copy()
    return run


def _refuse_foreign(run: RunFolder) -> None:
    try:
        run.refuse_foreign()
    except StorageError as error:
        raise UsageError(error.what, hint=error.hint) from error


def own_configuration(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """CONFIG of a verb that asks, tries or writes something for the run that it describes, which need not exist yet.

    Raises:
        ConfigError: it cannot be used.
        UsageError: its run is another user's.
        StorageError: its run folder cannot be looked at.
    """
    from slurmft.operations.run_configuration import load_given

    settings = load_given(path, overrides)
    run = RunFolder(settings.run_folder)
    if run.may_exist():
        _refuse_foreign(run)
    return settings


class OwnRun(RunType):
    """A run that is to be acted on, and not only read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunFolder:
        return refuse_foreign(super().convert(value, param, ctx))


run_argument = click.argument("run", type=RunType())
"""RUN of a verb that reads; may be another user's."""

own_run_argument = click.argument("run", type=OwnRun())
"""RUN of a verb that acts; the caller's own."""

optional_run_argument = click.argument("run", type=RunType(), required=False)
"""RUN, or every run."""


def _newest() -> RunFolder | None:
    if _is_completing():
        return None
    if runs := noted_runs(os.environ):
        return _chosen(runs[0])
    raise UsageError("which run? None of yours is known", hint="slurmft status lists the runs")


def only_run() -> RunFolder | None:
    """The only run of the caller that is not finished, of those that were submitted and those below the root of all
    runs; None where the shell completes a word.

    One that cannot be looked at, such as on a filesystem that is away, counts as well: it may be the one that is meant.

    Raises:
        UsageError: there is none, or there are several; names them.
        StorageError: whether one is finished cannot be read.
    """
    if _is_completing():
        return None
    me, root = os.geteuid(), runs_root()
    try:
        below = [RunFolder(path.absolute()) for path, owner in walk_runs(root, {0, me}) if owner == me]
    except OSError as error:
        raise UsageError(f"which run? Cannot list {root}: {error.strerror}", hint="give its name or path") from error
    found = {os.path.realpath(run.path): run for run in (*below, *noted_runs(os.environ))}
    runs = [run for run in found.values() if run.done() is None]
    if len(runs) == 1:
        return _chosen(runs[0])
    names = ", ".join(str(run.path) for run in runs[:10]) or "slurmft status lists the runs"
    what = f"{len(runs)} of yours are not finished" if runs else "none that is not finished is known"
    raise UsageError(f"which run? {what}", hint=names)


def _is_completing() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.resilient_parsing


def _chosen(run: RunFolder) -> RunFolder:
    say(f"run {run.path}", err=True)
    return run


newest_run_argument = click.argument("run", type=RunType(), default=_newest)
"""RUN of a verb that reads; the one that was submitted last where none is named."""

only_run_argument = click.argument("run", type=OwnRun(), default=only_run)
"""RUN of a verb that acts; the only one of the caller's that is not finished where none is named."""


class Amount(click.FloatRange):
    """A finite number between two limits; click itself lets NaN through every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number of some size.", param, ctx)
        return number


UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def seconds_in(text: str) -> float | None:
    """Seconds of 90m, 12h, 7d or 2w; None for anything else, for none at all and for more than a thousand years."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", text.strip(), re.ASCII)
    seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    return seconds if 0 < seconds <= 1000 * 366 * UNITS_S["d"] else None


RANK = click.IntRange(0, 999_999)
STEP = click.IntRange(0, MAX_STEP)
LINES = click.IntRange(0, 999_999_999)
MAX_TIMEOUT_S = 366 * 86_400

PATH = click.Path(path_type=Path)
config_argument = click.argument("config", type=PATH)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object, of a versioned format.")
wait_option = click.option("--wait", is_flag=True,
                           help="Show progress until the run ends; exit with the run's exit code.")  # fmt: skip
CLUSTERS = click.Choice(["auto", "slurm", "local"])
cluster_option = click.option("--cluster", type=CLUSTERS, default="auto", show_default=True,
                              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip


def set_option(about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--set`` of a verb that takes a configuration, with this help."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=about)
