"""Lightning's checkpoints, written in the background and verified when they are loaded:

    trainer = Trainer(..., plugins=[SlurmftCheckpointIO()])

A file has the name, place and format that Lightning gives it, so that ``load_from_checkpoint`` and Trainers without the
plugin read it. Rank 0 copies the state into memory and trains on; a thread writes it under a hidden name, syncs it, and
renames it last: a file under its own name is whole. It holds a digest of itself (``checked_files``).

The state does not go through ``CheckpointManager``: its saves are collectives of all ranks, and Lightning saves and
removes on rank 0 alone.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path
from typing import Any

import torch

from slurmft.errors import CheckpointError, StorageError, UsageError
from slurmft.integrations.checked_files import packed, verify, with_digest
from slurmft.storage.fence import check_fence
from slurmft.storage.ownership import followed
from slurmft.system import opening
from slurmft.system.files import replace_atomically

MOST = 2
"""States in memory at a time: one that is being written, and the next."""

ABANDONED_S = 3600.0
"""Without a change for so long, a hidden file has no writer any more."""

_HIDDEN = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")

log = logging.getLogger(__name__)


class SlurmftCheckpointIO:
    """A ``CheckpointIO`` of Lightning, for ``lightning`` and for ``pytorch_lightning``, in a run and outside of one.

    Saves and removals are done in the order of the calls. A checkpoint that Lightning replaces by a newer one is
    removed when the newer one is on the disk, and stays where that failed. The Trainer waits at the end of ``fit``.

    Args:
        weights_only: load tensors and plain values only, and run no code of the file, where Lightning does not say.
    """

    def __init__(self, *, weights_only: bool = True) -> None:
        _be_a_checkpoint_io()
        self._weights_only = weights_only
        self._thread: ThreadPoolExecutor | None = None
        self._saves: deque[Future[None]] = deque()
        self._removals: deque[Future[None]] = deque()
        self._cleaned: set[Path] = set()
        self._at_once = self._last_failed = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy the state, and write it in the background.

        Raises:
            CheckpointError, Fenced: this save was not begun, or an earlier one has failed since the last call.
            UsageError: the path is none of a file on this machine.
        """
        if storage_options is not None:
            raise UsageError("SlurmftCheckpointIO has no storage_options", hint="leave them out, or the plugin")
        place = _local(path)
        _settle(self._saves, MOST - 1)
        copied = packed(checkpoint)
        self._do(place, lambda: self._write(copied, place), self._saves)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _place: storage, weights_only: bool | None = None
    ) -> Any:
        """The state in a file all of whose checksums are right; saves of this process are waited for.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it is torn or damaged, or an earlier save has failed; another user has put it, or a link to
                it, into a folder that is not theirs, or could have written it and objects of classes are asked for.
            pickle.UnpicklingError: there are objects of classes in it, and ``weights_only`` is true.
        """
        self.wait()
        place = _local(path)
        safe = self._weights_only if weights_only is None else weights_only
        try:
            real = followed(place)
            descriptor = opening.open_regular(real, owners=opening.trusted_owners(real.parent))
        except (StorageError, opening.UnsafeFile) as error:
            if isinstance(error, OSError) and error.errno != errno.EPERM:
                raise
            raise CheckpointError(f"{place} is not loaded: {error}", hint="copy it, if you trust it") from error
        with BufferedReader(FileIO(descriptor)) as stream:
            status = os.fstat(descriptor)
            if not safe and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
                raise CheckpointError(
                    f"{place} belongs to another user, or others may write to it: its objects could run any code",
                    hint="copy it, if you trust it; with weights_only=True no code is run",
                )
            verify(stream, place)
            try:
                return torch.load(stream, map_location=map_location, weights_only=safe)
            except RuntimeError as error:
                raise CheckpointError(f"{place} cannot be loaded: {error}") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file, or the folder of a sharded checkpoint, after the saves before it; it stays if they failed."""
        place = _local(path)
        _settle(self._removals, len(self._removals))
        self._do(place, lambda: self._remove(place), self._removals)

    def wait(self) -> None:
        """Return when all saves are durable.

        Raises:
            CheckpointError, Fenced: one of them has failed; those behind it are waited for at the next call.
        """
        _settle(self._saves, 0)
        _settle(self._removals, 0)

    def teardown(self) -> None:
        """The Trainer is done: wait for all saves. Where it ends with an error of its own, theirs are only logged.

        Raises:
            CheckpointError, Fenced: one of them has failed.
        """
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        if sys.exc_info()[1] is not None:  # a planned stop would become a failure; the thread has logged it
            self._saves.clear()
            self._removals.clear()
        self.wait()

    @contextlib.contextmanager
    def writing_at_once(self) -> Iterator[None]:
        """Saves are durable on return."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _do(self, place: Path, task: Callable[[], None], tasks: deque[Future[None]]) -> None:
        # hidden ones are the tuner's and the launcher's: other processes read them as soon as rank 0 returns
        is_elsewhere = threading.current_thread() is not threading.main_thread()  # AsyncCheckpointIO's
        if self._at_once or is_elsewhere or place.name.startswith("."):
            task()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slurmft-lightning")
        tasks.append(self._thread.submit(self._in_order, task, place, is_save=tasks is self._saves))

    def _in_order(self, task: Callable[[], None], place: Path, *, is_save: bool) -> None:
        if self._last_failed and not is_save:
            log.warning("%s stays: the save before its removal has failed", place)
            return
        self._last_failed |= is_save
        task()
        self._last_failed = False

    def _write(self, copied: BytesIO, place: Path) -> None:
        began_s = time.monotonic()
        try:
            check_fence()
            place.parent.mkdir(parents=True, exist_ok=True)
            self._clean(place.parent)
            replace_atomically(place, with_digest(copied), mode=0o644 & ~_umask())
        except (OSError, StorageError) as error:
            log.error("%s was not saved: %s", place, error)
            if isinstance(error, StorageError):
                raise
            raise CheckpointError(f"{place} was not saved: {error}", hint="an older file is untouched") from error
        log.info("saved %s in %.2f s (%d bytes)", place, time.monotonic() - began_s, copied.tell())

    def _remove(self, place: Path) -> None:
        check_fence()
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        except OSError as error:
            raise CheckpointError(f"{place} was not removed: {error}") from error

    def _clean(self, folder: Path) -> None:
        """Once for each folder: remove what saves that were killed have left."""
        if folder in self._cleaned:
            return
        self._cleaned.add(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_old = time.time() - status.st_mtime > ABANDONED_S and status.st_uid == os.geteuid()
                    if _HIDDEN.fullmatch(entry.name) and is_old and entry.is_file(follow_symlinks=False):
                        os.unlink(entry.path)  # noqa: PTH108


def _settle(tasks: deque[Future[None]], most: int) -> None:
    """Raise what has failed, and wait until no more than so many are left."""
    while tasks and (len(tasks) > most or tasks[0].done()):
        tasks.popleft().result()


def _be_a_checkpoint_io() -> None:
    """Both packages have a class of their own, and ask whether a plugin is one; a class can be both without a base."""
    known = ("lightning.fabric", "lightning_fabric")
    found = 0
    for package in [name for name in known if name in sys.modules] or known:
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(f"{package}.plugins.io.checkpoint_io")
            module.CheckpointIO.register(SlurmftCheckpointIO)
            found += 1
    if not found:
        raise UsageError("SlurmftCheckpointIO needs Lightning", hint="pip install 'slurmft[lightning]'")


def _local(path: str | Path) -> Path:
    if "://" in (text := os.fspath(path)):
        raise UsageError(f"SlurmftCheckpointIO writes files, and {text} is none", hint="leave the plugin out there")
    return Path(text).absolute()


def _umask() -> int:
    """Looked up, not set and set back: other threads make files meanwhile."""
    with contextlib.suppress(OSError, StopIteration):
        lines = opening.read_text("/proc/self/status").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o077
