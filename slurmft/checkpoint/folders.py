"""Folders of a checkpoint directory: begun, cleaned up, pruned. Called by rank 0 only; no torch."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from slurmft.checkpoint.catalog import Catalog, Entry, is_newer_format
from slurmft.checkpoint.retention import decide
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import MANIFEST, Identity
from slurmft.storage.fence import GENERATION_VARIABLE, check_fence
from slurmft.storage.files import fsync_folder

log = logging.getLogger(__name__)


def own_generation() -> int:
    """The generation of this attempt; 0 outside a run."""
    return int(os.environ.get(GENERATION_VARIABLE) or 0)


def begin_folder(directory: Path, step: int) -> Identity:
    """Make the folder of a new save and say which one it is.

    Raises:
        OSError, StorageError: the folder could not be made.
    """
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        fsync_folder(directory.parent)
    commits = [one.commit for one in Catalog(directory).identities()]
    identity = Identity(step, own_generation(), max(commits, default=0) + 1)
    (directory / identity.folder_name).mkdir()
    return identity


def remove_left_overs(directory: Path, *, is_saving: bool) -> None:
    """Remove what saves that never committed have left behind; what cannot be removed is logged and stays.

    The folder of a newer generation is somebody's running save: it stays. Outside a run nothing tells generations
    apart, and whoever saves there owns the directory; whoever only reads does not.
    """
    try:
        check_fence()
    except StorageError:
        return  # fenced, or the owner is unknown: nothing is removed on a guess
    mine = own_generation()
    owns_all = is_saving and mine == 0
    for identity in Catalog(directory).identities():
        folder = directory / identity.folder_name
        if (identity.generation <= mine or owns_all) and not (folder / MANIFEST).exists():
            log.info("removing %s: its save never finished", folder)
            remove_folder(folder)


def prune(directory: Path, *, keep_last_n: int, best: Entry | None, distrusted: Collection[Path]) -> None:
    """Remove what retention no longer wants. Failing to is logged; the checkpoints that matter are not concerned."""
    contents = Catalog(directory).scan()
    retention = decide(contents.committed, keep_last_n=keep_last_n, best=best, distrusted=distrusted)
    for entry in retention.remove:
        remove_folder(entry.path)
    for path, reason in contents.unreadable:
        identity = Identity.parse(path.name)
        if identity and identity.commit < retention.oldest_kept_commit and not is_newer_format(path):
            log.info("removing %s: older than every kept checkpoint, and unusable: %s", path, reason)
            remove_folder(path)


def remove_folder(folder: Path) -> None:
    """Remove one checkpoint; never raises for a file that resists.

    The marker goes first, durably: whoever looks half way, or after a crash, sees a save that never finished instead
    of a damaged checkpoint.
    """
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        fsync_folder(folder)
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("cannot remove %s: %s", folder, error)
