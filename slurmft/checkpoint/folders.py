"""Folders of a checkpoint directory: begun, cleaned up, pruned. For rank 0 only; no torch."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from stat import S_ISLNK

from slurmft.checkpoint.catalog import Catalog, Entry, is_newer_format, read_entry
from slurmft.checkpoint.retention import KEPT_QUARANTINED, NEVER_REMOVED, Retention, by_merit, decide
from slurmft.checkpoint.staging.holding import alone, is_claimed
from slurmft.checkpoint.writer.write_requests import LIFETIME_S, Keep
from slurmft.errors import NewerFormat, StorageError
from slurmft.storage.checkpoint_names import MANIFEST, Identity, newest_first, read_quarantine
from slurmft.storage.digest_record import read_digests
from slurmft.storage.fence import GENERATION_VARIABLE, check_fence
from slurmft.system.files import fsync_folder
from slurmft.system.opening import UnsafeFile, trusted_owners

log = logging.getLogger(__name__)


def own_generation() -> int:
    """The generation of this attempt; 0 outside a run."""
    return int(os.environ.get(GENERATION_VARIABLE) or 0)


def remove_left_overs(directory: Path) -> None:
    """Before the first save of a manager: remove what saves that never committed have left behind.

    What cannot be removed is logged and stays. So does a save that may still live: one of a newer generation, or of
    this one, and any that a writer has claimed. Outside of a run generations cannot be told apart, and only saves
    without a possible writer are removed now; the rest goes after a later commit.
    """
    try:
        check_fence()
    except StorageError:
        return  # fenced, or the owner is unknown: nothing is removed on a guess
    mine = own_generation()
    for identity in Catalog(directory).identities():
        folder = directory / identity.folder_name
        is_over = identity.generation < mine or (mine == 0 == identity.generation and _is_untouched(folder))
        if is_over and not (folder / MANIFEST).exists() and not is_claimed(folder):
            log.info("removing %s: its save never finished", folder)
            remove_folder(folder)


def _is_untouched(folder: Path) -> bool:
    """Whether every writer that has worked there has ended, as far as clocks show."""
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - newest > LIFETIME_S


def prune(directory: Path, keep: Keep) -> None:
    """Remove what retention no longer keeps, once; to do so after every save, keep a ``Pruner``."""
    Pruner(directory).prune(keep)


class Pruner:
    """Removes what retention no longer keeps; reads each marker once, so that a save costs the same after a thousand.

    A failure is reported, and does no harm: the kept checkpoints are not affected.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Identity, Entry] = {}

    def prune(self, keep: Keep, tick: Callable[[], None] = lambda: None) -> list[str]:
        """What could not be removed, and why. ``tick`` is called after every file.

        Raises:
            StorageError: the directory cannot be listed; nothing was removed.
        """
        identities = Catalog(self._directory).identities()
        unreadable, uncommitted = self._look(identities)
        retention = self._decide(keep, must_look=bool(unreadable))
        problems = [remove_folder(entry.path, tick) for entry in retention.remove]
        newest = max((identity.commit for identity in self._known), default=0)
        problems += [remove_folder(path, tick) for path in self._useless(uncommitted, newest)]
        for identity, reason in unreadable:
            path = self._directory / identity.folder_name
            if identity.commit < retention.oldest_kept_commit and not is_newer_format(path):
                log.info("removing %s: older than every kept checkpoint, and unusable: %s", path, reason)
                problems.append(remove_folder(path, tick))
        return [problem for problem in problems if problem]

    def _look(self, identities: Iterable[Identity]) -> tuple[list[tuple[Identity, str]], list[Identity]]:
        """Read the markers that are new; returns those that cannot be read, and folders without one."""
        unreadable: list[tuple[Identity, str]] = []
        uncommitted: list[Identity] = []
        known, self._known = self._known, {}
        for identity in identities:
            if (entry := known.get(identity)) is not None:
                self._known[identity] = entry
                continue
            try:
                if (entry := read_entry(self._directory / identity.folder_name)) is not None:
                    entry = replace(entry, files={})  # ten thousand ranks make long lists
            except StorageError as error:
                unreadable.append((identity, error.what))
                continue
            if entry is None:
                uncommitted.append(identity)
            else:
                self._known[identity] = entry
        return unreadable, uncommitted

    def _decide(self, keep: Keep, *, must_look: bool) -> Retention:
        """Decide by the supervisor's present marks, where something may go: on the newest, and on those to go."""
        in_order = newest_first(self._known)
        retention = self._retention(in_order, keep)
        if not retention.remove and not must_look:
            return retention  # to look at each of a thousand marks would be slow
        if self._look_at_marks(in_order[: keep.keep_last_n + NEVER_REMOVED + KEPT_QUARANTINED]):
            retention = self._retention(in_order, keep)
        if self._look_at_marks(Identity(e.step, e.generation, e.commit) for e in retention.remove):
            retention = self._retention(in_order, keep)
        return retention

    def _retention(self, in_order: Iterable[Identity], keep: Keep) -> Retention:
        entries = [self._known[identity] for identity in in_order]
        distrusted = {self._directory / name for name in keep.distrusted}
        good = [entry for entry in entries if entry.path not in distrusted and not entry.quarantine]
        best = by_merit(good, keep.best_metric, keep.best_mode)[:1] if keep.best_metric else []
        return decide(
            entries,
            keep_last_n=keep.keep_last_n,
            keep_every=keep.keep_every,
            best=best[0] if best else None,
            distrusted=distrusted,
            verified=self._verified(entries),
        )

    def _verified(self, entries: Iterable[Entry]) -> set[Path]:
        """Those on which all replicas agreed."""
        try:
            record = read_digests(self._directory)
        except NewerFormat as error:
            log.warning("%s", error.what)
            return set()
        return {entry.path for entry in entries if record.is_verified(entry.step, entry.generation)}

    def _look_at_marks(self, identities: Iterable[Identity]) -> bool:
        """Whether a mark has come or gone since the last look."""
        changed = False
        for identity in identities:
            entry = self._known[identity]
            mark = read_quarantine(entry.path)
            quarantine = "" if mark is None else mark.reason or "quarantined"
            if quarantine != entry.quarantine:
                self._known[identity] = replace(entry, quarantine=quarantine)
                changed = True
        return changed

    def _useless(self, uncommitted: Iterable[Identity], newest_commit: int) -> list[Path]:
        """Saves that never finished, and never will: a later one has, and no writer holds on to them."""
        mine = own_generation()
        return [
            self._directory / identity.folder_name
            for identity in uncommitted
            if identity.commit < newest_commit
            and (identity.generation <= mine or mine == 0)
            and not is_claimed(self._directory / identity.folder_name)
        ]


def remove_folder(folder: Path, tick: Callable[[], None] = lambda: None) -> str:
    """Remove one checkpoint; why it could not be, or nothing. One that is being read stays as it is.

    The marker goes first, durably: a reader in between, or after a crash, sees a save that never finished instead of a
    damaged checkpoint.
    """
    try:
        status = folder.lstat()
        if S_ISLNK(status.st_mode):  # its target may be anything
            raise UnsafeFile(errno.EINVAL, "is a symbolic link", str(folder))
        if status.st_uid not in trusted_owners(folder.parent):
            raise UnsafeFile(errno.EPERM, f"belongs to user id {status.st_uid}", str(folder))
        with contextlib.suppress(FileNotFoundError, UnsafeFile), alone(folder / MANIFEST):
            (folder / MANIFEST).unlink()
            fsync_folder(folder)
        _remove_entry(folder / MANIFEST)  # a link to nowhere, or no file at all
        _remove_tree(folder, tick)
    except BlockingIOError:
        log.info("%s stays for now: another process is reading it", folder)
        return f"{folder} is being read"
    except FileNotFoundError:
        return ""  # another process has removed it
    except OSError as error:
        log.warning("cannot remove %s: %s", folder, error)
        return f"cannot remove {folder}: {error}"
    return ""


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_tree(folder: Path, tick: Callable[[], None]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            _remove_entry(Path(entry.path))
            tick()
    folder.rmdir()
