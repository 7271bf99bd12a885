"""The configuration of a run folder, wherever the folder lay when it was written.

A folder that was moved or copied still names its old place. Verbs work on the folder that they were given, so paths
that lay inside of it are taken to lie in it now; files outside may be another run's, and are not changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from slurmft.config import run as configuration
from slurmft.config.run import RunConfig
from slurmft.errors import ConfigError, StorageError, UsageError
from slurmft.scheduler.slurm import known_options
from slurmft.storage.run_folder import RunFolder, may_exist

log = logging.getLogger(__name__)


def configuration_of(run: RunFolder) -> RunConfig:
    """The run's configuration, with the paths of the folder as it lies now.

    Raises:
        ConfigError: it cannot be used.
    """
    return _stored(run).placed_in(run.path)


def _stored(run: RunFolder) -> RunConfig:
    """The configuration in a run folder, whose options of sbatch were looked at when the run was submitted."""
    return configuration.load(run.config, known_here=lambda options: options)


def original_of(run: RunFolder) -> Path | None:
    """The other run folder that this one is a copy of, by its records or its configuration; None when it is not a copy.

    A folder that was moved is not a copy: nothing lies any more where it names its place.

    Raises:
        StorageError: its records cannot be read.
    """
    if (recorded := run.copied_from()) is not None:
        return Path(recorded)
    try:
        named = _stored(run).run_folder
    except ConfigError:
        return None
    return None if _is_same(named, run.path) or not _is_a_run(named) else named


def refuse_shared(run: RunFolder, directory: Path) -> None:
    """Return when what lies in ``directory``, which the run's configuration names, may be changed for this run.

    A directory outside of the run folder may be another run's. It counts as this run's only when the folder is known to
    be the one that it was recorded as: that the recorded place is empty now proves nothing, as the original may have
    been moved as well.

    Raises:
        UsageError: the run is, or may be, a copy of another one, which keeps its checkpoints there, too.
        StorageError: its records cannot be read.
    """
    original = original_of(run)
    real = Path(os.path.realpath(directory))  # of links in a circle, resolve() raises RuntimeError
    is_theirs = original is not None and _keeps_checkpoints_in(RunFolder(original), directory)
    if real.is_relative_to(os.path.realpath(run.path)) and not is_theirs:  # a bind mount of theirs may lie there
        return
    if _is_as_recorded(run) or (original is not None and is_theirs is False):
        return
    copied = "cannot be distinguished from a copy of its original" if original is None else f"is a copy of {original}"
    raise UsageError(
        f"{run.path} {copied}, and {directory}, which both name, is not changed for the copy",
        hint=f"name {original or 'the original'}, or {directory} itself; or set checkpoint.directory of the copy",
    )


def run_around(directory: Path) -> RunFolder | None:
    """The run folder that ``directory`` lies in by its name, as it was given: it may be a link that leads elsewhere."""
    inner = directory
    while inner.name != ".." and inner != inner.parent:
        inner = inner.parent
        if RunFolder(inner).exists():
            return RunFolder(inner)
    return None


def _keeps_checkpoints_in(run: RunFolder, directory: Path) -> bool | None:
    """None where that is not known."""
    try:
        return _is_same(configuration_of(run).checkpoint_dir, directory)
    except ConfigError:
        return None


def _is_as_recorded(run: RunFolder) -> bool:
    """Whether the folder is the very one of its records, or lies at its recorded place, or is a new run's."""
    if not run.has_records() and not may_exist(run.config):
        return True
    owner = run.owner()
    if owner is not None and owner.inode:
        return owner.folder == str(run.path) or run.path.stat().st_ino == owner.inode
    try:
        return _is_same(_stored(run).run_folder, run.path)
    except ConfigError:
        return False


def refuse_moved(run: RunFolder) -> None:
    """Return when the run's batch script, which names its folder, can be submitted as it is.

    Raises:
        StorageError: the folder was moved.
    """
    try:
        named = _stored(run).run_folder
    except ConfigError:
        return
    if not _is_same(named, run.path):
        raise StorageError(f"{run.path} was moved from {named}, which its batch script still names",
                           hint=f"slurmft submit {run.config}")  # fmt: skip


def refuse_foreign_configuration(path: Path) -> None:
    """Return when ``path`` may be executed: a run folder's own configuration only as the caller's.

    Any other file was chosen by the user who named it; this one is named by batch scripts that slurmft wrote, and
    may have been replaced since.

    Raises:
        UsageError: it belongs to another user.
    """
    if path.name != RunFolder(path.parent).config.name:
        return
    try:
        owner = path.stat().st_uid
    except OSError:
        return  # loading it reports the error
    if owner not in (0, os.getuid()):
        raise UsageError(f"{path} belongs to user id {owner}, not to you, and names the commands that would be run",
                         hint="copy it, or slurmft submit it as a run of your own")  # fmt: skip


def load_given(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration at ``path``; where that is a run folder's own, for that folder.

    Raises:
        ConfigError: it cannot be used.
        UsageError: the folder is a copy of another run, which its configuration would act on; or it is a script.
    """
    if path.suffix == ".py":
        raise UsageError(f"{path} is a script, and no configuration", hint=f"slurmft init {path} writes one for it")
    if path.suffix in (".sh", ".sbatch", ".slurm"):
        raise UsageError(f"{path} is a batch script, and no configuration", hint=f"slurmft sbatch {path} runs it")
    run = RunFolder(path.absolute().parent)
    is_stored = run.config.name == path.name and run.has_records()
    settings = configuration.load(path, overrides, known_here=(lambda options: options) if is_stored else known_options)
    is_of_another = is_stored and not _is_same(settings.run_folder, run.path)
    if any(override.startswith("run_folder=") for override in overrides):
        # another run that begins with the configuration of this one leaves its checkpoints alone
        if is_of_another and _is_same(configuration_of(run).checkpoint_dir, settings.checkpoint_dir):
            raise UsageError(
                f"{settings.checkpoint_dir} holds the checkpoints of {run.path}, "
                f"and {settings.run_folder} is another run",
                hint="set checkpoint.directory as well; slurmft checkpoint export writes what a new run can begin with",
            )
        return settings
    if not is_of_another:
        return settings
    if _is_a_run(settings.run_folder):
        raise UsageError(
            f"{path} lies in a copy of {settings.run_folder}, and is the configuration of that run",
            hint=f"name {settings.run_folder}/{path.name}, or give the copy --set run_folder={run.path}",
        )
    log.warning("%s was written for %s, which is gone; it is used for %s", path, settings.run_folder, run.path)
    return settings.placed_in(run.path)


def _is_a_run(folder: Path) -> bool:
    return may_exist(RunFolder(folder).config) or RunFolder(folder).has_records()


def _is_same(one: Path, other: Path) -> bool:
    if one == other:
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False
