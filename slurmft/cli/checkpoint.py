"""``slurmft checkpoint``: the content of a checkpoint directory, for people. Only export imports torch."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from slurmft.checkpoint.catalog import NEVER_REMOVED, Catalog, Contents, Entry, by_merit, remove_folder, verify
from slurmft.checkpoint.image_file import reading
from slurmft.cli.arguments import STEP, json_option, refuse_foreign, runs_root
from slurmft.cli.main import Verbs, console, say, say_error, say_json, table
from slurmft.errors import CheckpointError, StorageError, UsageError
from slurmft.operations.run_configuration import configuration_of, refuse_shared, run_around
from slurmft.storage.checkpoint_names import MANIFEST, Identity, newest_first
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder, find_run, noted_runs
from slurmft.system.foreign_text import one_line
from slurmft.system.processes import who

FORMAT = 1
"""The journal's event."""

_EXIT_CODES = """\b
Exit codes:
  0   done; of verify: every byte that was looked at is what was written
  1   of verify: something is damaged; of rm: something could not be removed; of export: it is damaged
  2   bad usage: no such run, directory or step; of rm: the last good one, or one that takes --force
"""


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
    """A checkpoint directory, and what is known of the run that it belongs to."""

    directory: Path
    run: RunFolder | None = None
    best_metric: str = ""
    best_mode: str = "min"
    only: Identity | None = None
    """One checkpoint's own folder was named."""

    def best(self, entries: Sequence[Entry]) -> Entry | None:
        """The one that is kept for its metric."""
        good = [entry for entry in entries if not entry.quarantine]
        ranked = by_merit(good, self.best_metric, "max" if self.best_mode == "max" else "min")
        return ranked[0] if ranked and self.best_metric else None

    def scan(self) -> Contents:
        """Its content; all of it, or the one checkpoint that was named."""
        found = Catalog(self.directory).scan()
        if self.only is None:
            return found
        name = self.only.folder_name
        return Contents(
            [entry for entry in found.committed if entry.path.name == name],
            [one for one in found.unreadable if one[0].name == name],
            [path for path in found.uncommitted if path.name == name],
            [one for one in found.foreign if one[0].name == name],
        )


class _Where(click.ParamType[CheckpointDirectory]):
    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> CheckpointDirectory:
        return value if isinstance(value, CheckpointDirectory) else _place(str(value))


def _place(name: str) -> CheckpointDirectory:
    """The directory of a run (by name or folder), a checkpoint directory, or a single checkpoint's folder.

    Raises:
        UsageError: it is none of these.
    """
    if not name.strip():
        raise UsageError("the name of the run is empty", hint="slurmft status lists the runs")
    path = Path(name).absolute()
    try:
        if path.is_dir() and not RunFolder(path).exists():
            if (identity := Identity.parse(path.name)) is not None:
                return CheckpointDirectory(path.parent, only=identity)
            if path.name == "checkpoints" and RunFolder(path.parent).exists():
                return replace(_of_run(RunFolder(path.parent)), directory=path)
            if Catalog(path).has_names():
                return CheckpointDirectory(path)
        run = find_run(name, runs_root(), lambda: noted_runs(os.environ))
    except StorageError as error:
        raise UsageError(error.what, hint=error.hint or "name a run, or a checkpoint directory") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot look for {name[:80]!r}: {error}", hint="slurmft status lists the runs") from error
    return _of_run(run)


def _of_run(run: RunFolder) -> CheckpointDirectory:
    settings = configuration_of(run)
    metric = settings.checkpoint.best_metric if settings.checkpoint.save_best else ""
    return CheckpointDirectory(settings.checkpoint_dir, run, metric, settings.checkpoint.best_mode)


_run = click.argument("where", metavar="RUN", type=_Where())


@click.group(cls=Verbs, epilog=_EXIT_CODES)
def checkpoint() -> None:
    """The checkpoints of a run: list them, verify, export, remove.

    RUN is a run's name or folder, a checkpoint directory, or the folder of one checkpoint.
    """


@checkpoint.command("list")
@_run
@json_option
def list_(*, where: CheckpointDirectory, as_json: bool) -> int:
    """Show the checkpoints, newest first. Only their markers are read."""
    found = where.scan()
    best = where.best(found.committed)
    if as_json:
        _print_json(
            directory=str(where.directory),
            checkpoints=[_entry_json(entry) | {"best": entry is best} for entry in found.committed],
            unreadable=[{"path": str(path), "reason": reason} for path, reason in found.unusable],
            uncommitted=[str(path) for path in found.uncommitted],
        )
    elif not (found.committed or found.unusable or found.uncommitted):
        say(f"there is no checkpoint in {where.directory}")
    else:
        console().print(_table(found, best))
    return 0


def _table(found: Contents, best: Entry | None) -> Table:
    made = table("step", "commit", "committed", "size", "ranks", "metrics", "note", wrapped=("metrics", "note"))
    newest = next((entry for entry in found.committed if not entry.quarantine), None)
    for entry in found.committed:
        notes = ["newest"] * (entry is newest) + ["best"] * (entry is best)
        notes += [f"quarantined: {entry.quarantine}"] * bool(entry.quarantine)
        made.add_row(
            *_named(entry.path),
            entry.committed_at.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            _size(entry.size_bytes),
            str(entry.world_size),
            Text(one_line(", ".join(f"{name}={value:.6g}" for name, value in sorted(entry.metrics.items())))),
            Text(one_line(", ".join(notes)), style="red" if entry.quarantine else ""),
        )
    for path, reason in found.unusable:
        made.add_row(*_named(path), "-", "-", "-", "", Text(one_line(reason), style="red"))
    for path in found.uncommitted:
        made.add_row(*_named(path), "-", "-", "-", "", "being saved, or never finished")
    return made


def _named(path: Path) -> tuple[str, str]:
    """A checkpoint's step, and the rest of its folder's name."""
    step, _, rest = path.name.removeprefix("step-").partition(".")
    return str(int(step)), rest


@checkpoint.command("verify")
@_run
@json_option
@click.option("--step", type=STEP, help="Only those of this step.")
@click.option(
    "--newest", "only_newest", is_flag=True, help="Only the newest good one, and newer ones that are damaged."
)
def verify_(*, where: CheckpointDirectory, as_json: bool, step: int | None, only_newest: bool) -> int:
    """Read every byte and compare it with what was written; torch is not needed."""
    found = where.scan()
    entries = [entry for entry in found.committed if step is None or entry.step == step]
    judged = found.unusable if where.only is not None else found.unreadable
    if where.only is None and found.foreign:
        more = f", and {len(found.foreign) - 1} more of other users" if len(found.foreign) > 1 else ""
        say(f"warning: left out: {found.foreign[0][1]}{more}", err=True)
    unreadable = [one for one in judged if step is None or _identity(one[0]).step == step]
    if only_newest:
        entries = [entry for entry in entries if not entry.quarantine][:1]
        newest = [entry.path for entry in entries]
        unreadable = [one for one in unreadable if _is_newest(one[0], newest)]
    if not entries and not unreadable:
        _refuse_nothing(where, found, step)
    checked = []
    for entry in entries:
        problems = _verified(entry, quiet=as_json)
        if problems is not None:
            checked.append((entry, problems))
        if not as_json:
            _tell(entry, problems)
    if as_json:
        checks = [_entry_json(entry) | {"problems": problems} for entry, problems in checked]
        _print_json(directory=str(where.directory), checkpoints=checks,
                    unreadable=[{"path": str(path), "reason": reason} for path, reason in unreadable])  # fmt: skip
    else:
        for path, reason in unreadable:
            say(f"{path.name}: damaged: {reason}")
    is_damaged = bool(unreadable) or any(problems for _, problems in checked)
    return CheckpointError.exit_code if is_damaged else 0


def _identity(path: Path) -> Identity:
    found = Identity.parse(path.name)
    assert found is not None, path  # of a scan
    return found


def _is_newest(path: Path, others: Sequence[Path]) -> bool:
    return newest_first(_identity(one) for one in [path, *others])[0] == _identity(path)


def _tell(entry: Entry, problems: Sequence[str] | None) -> None:
    if problems is None:
        say(f"{entry.path.name}: removed meanwhile")
        return
    state = f"damaged, {len(problems)} problem(s)" if problems else "intact"
    say(f"{entry.path.name}: {state} ({_size(entry.size_bytes)}, {entry.world_size} ranks)")
    for problem in problems:
        say(f"  {problem}")


@checkpoint.command()
@_run
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--format", "form", type=click.Choice(["torch", "safetensors"]), default="torch", show_default=True)
@click.option("--step", type=STEP, help="The newest one of this step. Default: the newest good one.")
@click.option("--best", "want_best", is_flag=True, help="The one with the best metric, by the run's configuration.")
@click.option("--optimizer", "with_optimizer", is_flag=True, help="The optimizer's state, too.")
@click.option("--overwrite", is_flag=True, help="Replace OUT where it exists.")
def export(
    *,
    where: CheckpointDirectory,
    out: Path,
    form: str,
    step: int | None,
    want_best: bool,
    with_optimizer: bool,
    overwrite: bool,
) -> int:
    """Write one file OUT with the whole model, verified; needs torch and memory for all of it."""
    entry = _chosen(where, step, want_best=want_best)
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists", hint="--overwrite replaces it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {out.absolute().parent}", hint="make it first")
    from slurmft.checkpoint import reading as checkpoint_export

    if sys.stderr.isatty():
        say(f"reading {_size(entry.size_bytes)} of {entry.path}", err=True)
    write = checkpoint_export.export_torch if form == "torch" else checkpoint_export.export_safetensors
    with _kept(entry) as is_there:
        if not is_there:
            raise CheckpointError(f"{entry.path} was removed meanwhile", hint="try again")
        size_bytes = write(entry, out.absolute(), with_optimizer=with_optimizer)
    say(f"{out}: step {entry.step} of {entry.path}, {_size(size_bytes)}")
    return 0


def _chosen(where: CheckpointDirectory, step: int | None, *, want_best: bool) -> Entry:
    if want_best and step is not None:
        raise UsageError("--step and --best exclude each other")
    found = where.scan()
    entries = [entry for entry in found.committed if step is None or entry.step == step]
    if want_best:
        if not where.best_metric:
            raise UsageError(f"nothing says which metric is best in {where.directory}",
                             hint="name a run whose checkpoint.save_best is on, or give --step")  # fmt: skip
        best = where.best(found.committed)
        entries = [best] if best is not None else []
    elif step is None:
        entries = [entry for entry in entries if not entry.quarantine]
    if not entries:
        _refuse_nothing(where, found, step)
    return entries[0]


@checkpoint.command()
@_run
@click.argument("steps", metavar="STEP...", type=STEP, nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also the newest two good ones and the best, but never the last good one.")
def rm(*, where: CheckpointDirectory, steps: tuple[int, ...], force: bool) -> int:
    """Remove the checkpoints of STEPs, damaged ones too.

    Never the last good one: one good checkpoint that stays is read and verified before any other is removed. The newest
    two good ones and the best go only with --force; one that is being read stays.
    """
    _refuse_unless_own(where)
    found = Catalog(where.directory).scan()
    wanted = [entry for entry in found.committed if entry.step in steps]
    broken = [path for path, _ in found.unreadable if (named := Identity.parse(path.name)) and named.step in steps]
    if where.only is not None:
        wanted = [entry for entry in wanted if entry.path.name == where.only.folder_name]
        broken = [path for path in broken if path.name == where.only.folder_name]
    there = {entry.step for entry in wanted} | {named.step for path in broken if (named := Identity.parse(path.name))}
    if absent := sorted(set(steps) - there):
        _refuse_nothing(where, found, absent[0])
    _check_removal(where, found.committed, {entry.path for entry in wanted}, force=force)
    paths = [*(entry.path for entry in wanted), *broken]
    if where.run is not None:
        names = [path.name for path in paths]
        where.run.journal().append(EventName.CHECKPOINTS_REMOVED, who=who(), folders=names, forced=force)
    problems = []
    for path in paths:
        problem = remove_folder(path)
        problems += [problem] * bool(problem)
        if not problem:
            say(f"removed {path}")
    for problem in problems:
        say_error(str(problem))
    return StorageError.exit_code if problems else 0


def _refuse_unless_own(where: CheckpointDirectory) -> None:
    """Return when the directory is the caller's, and of no other run than the one that was named.

    Raises:
        UsageError: it is not.
        StorageError: the run's records cannot be read.
    """
    if (run := where.run or run_around(where.directory)) is not None:
        refuse_foreign(run)
        refuse_shared(run, where.directory)
    if where.directory.exists() and (owner := where.directory.stat().st_uid) != os.getuid():
        raise UsageError(f"{where.directory} belongs to user id {owner}, not to you", hint="only its owner may")


def _check_removal(
    where: CheckpointDirectory, entries: Sequence[Entry], gone: Collection[Path], *, force: bool
) -> None:
    """Return when a good checkpoint stays.

    Raises:
        UsageError: none would, or --force is needed.
    """
    good = [entry for entry in entries if not entry.quarantine]
    leaving = [entry for entry in good if entry.path in gone]
    if not leaving:
        return
    protected = good[:NEVER_REMOVED]
    best = where.best(entries)
    if not force and (held := [entry for entry in leaving if entry in protected or entry is best]):
        why = "the best one" if held[0] is best else f"one of the newest {NEVER_REMOVED} good ones"
        raise UsageError(f"step {held[0].step} ({held[0].path.name}) is {why}", hint="--force removes it all the same")
    for entry in good:
        if entry.path not in gone and _verified(entry, quiet=False) == []:
            return
    raise UsageError("that would remove the last good checkpoint", hint="slurmft checkpoint verify lists good ones")


def _verified(entry: Entry, *, quiet: bool) -> list[str] | None:
    """The problems of a checkpoint; None when it is gone meanwhile."""
    with _kept(entry) as is_there:
        if not is_there:
            return None
        with _progress(entry, quiet=quiet) as tick:
            return verify(entry, tick)


@contextlib.contextmanager
def _kept(entry: Entry) -> Iterator[bool]:
    """Keep it from being removed meanwhile; False when it is gone already."""
    with contextlib.ExitStack() as stack:
        is_there = True
        try:
            stack.enter_context(reading(entry.path))
        except FileNotFoundError:
            is_there = False
        except BlockingIOError:  # it is being removed, marker first; or a reader keeps it locked
            is_there = (entry.path / MANIFEST).exists()
        except OSError:
            pass  # reading it will report the error
        yield is_there


@contextlib.contextmanager
def _progress(entry: Entry, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _size_bytes: None
        return
    with click.progressbar(length=entry.size_bytes, label=entry.path.name, file=sys.stderr) as bar:
        yield bar.update


def _refuse_nothing(where: CheckpointDirectory, found: Contents, step: int | None) -> None:
    known = ", ".join(str(step) for step in sorted({entry.step for entry in found.committed})[-8:]) or "none"
    what = "no good checkpoint" if step is None else f"no checkpoint of step {step}"
    raise UsageError(f"there is {what} in {where.directory}", hint=f"its newest steps: {known}")


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "step": entry.step,
        "generation": entry.generation,
        "commit": entry.commit,
        "committed_at": entry.committed_at.isoformat(),
        "size_bytes": entry.size_bytes,
        "world_size": entry.world_size,
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in entry.metrics.items()},
        "attempt": entry.attempt,
        "path": str(entry.path),
        "quarantine": entry.quarantine,
    }


def _print_json(**value: Any) -> None:
    say_json({"format": FORMAT, **value})


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
