"""The state beside a kept folder: which version its files are of, and of which run and attempt."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.policy.synced_folders import Local, Version
from slurmft.storage.patience import writing
from slurmft.sync.scanning import INNER, Look, Tree, cut_off
from slurmft.system.files import read_json, write_json
from slurmft.system.opening import open_regular
from slurmft.system.private_folder import check_private

RECORD, ASIDE, LOCK = "state.json", "aside", "lock"
MAX_RECORD_BYTES = 128 << 20


def own_folder(path: Path) -> Path:
    """Our private folder for ``path``: beside it, else in it. Both are on its filesystem, so that files can be renamed.

    Raises:
        StorageError: neither can be made, or another user has made it.
    """
    beside, inside = path.parent / f".{path.name}{INNER}", path / INNER
    for place in (inside, beside):
        if place.is_dir():
            return _checked(place)
    with writing(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_dev == path.parent.stat().st_dev:
        with contextlib.suppress(OSError):
            beside.mkdir(mode=0o700)
            return _checked(beside)
    with writing(inside):
        inside.mkdir(mode=0o700)
    return _checked(inside)


def _checked(place: Path) -> Path:
    try:
        check_private(place)
    except OSError as error:
        raise StorageError(f"{place} {error.strerror}: it is not believed", hint="remove it") from error
    return place


class Record:
    """Reads and writes the state of one folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.own = path, own_folder(path)
        self.aside = self.own / ASIDE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for another process of this machine that restores the same folder; two nodes may share its filesystem.

        Raises:
            StorageError: the lock cannot be made.
        """
        with writing(self.own / LOCK):
            descriptor = open_regular(self.own / LOCK, os.O_RDWR | os.O_CREAT, follow=False)
        try:
            with writing(self.own / LOCK):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> Mapping[str, Any]:
        with contextlib.suppress(StorageError):  # damaged: its files are of an unknown run
            return read_json(self.own / RECORD, limit_bytes=MAX_RECORD_BYTES, owners={os.geteuid()}) or {}
        return {}

    def local(self, tree: Tree) -> Local:
        """What the folder has, as far as the record and the files say."""
        value = self._read()
        try:
            known = {str(name): Look(*map(int, numbers)) for name, numbers in value.get("files", {}).items()}
            return Local(
                has_files=bool(tree.files or tree.links),
                run=str(value.get("run", "")),
                version=Version(*map(int, value.get("version", (-1, -1)))),
                generation=int(value.get("generation", -1)),
                changed=known != tree.files,
                damaged=bool(value.get("restoring")) or bool(cut_off(self.path, tree.files)),
            )
        except (TypeError, ValueError, AttributeError):
            return Local(has_files=bool(tree.files or tree.links))

    def write(self, tree: Tree, *, run: str, version: Version, generation: int, restoring: bool = False) -> None:
        """Note what its files are now.

        Raises:
            StorageError: it cannot be written.
        """
        files = {name: [*each] for name, each in tree.files.items()}
        value = {"run": run, "version": [*version], "generation": generation, "files": files, "restoring": restoring}
        with writing(self.own / RECORD):
            write_json(self.own / RECORD, value)

    def note_use(self, *, run: str, generation: int) -> None:
        """Note that an attempt uses the files as they are; the version that they came from stays known.

        Raises:
            StorageError: it cannot be written.
        """
        value = self._read()
        same = value if value.get("run") == run else {}
        with writing(self.own / RECORD):
            write_json(self.own / RECORD, {**same, "run": run, "generation": generation, "restoring": False})

    def set_aside(self, *, keep: bool, goes_on: bool = False) -> bool:
        """Move everything out of the folder; what was set aside before is removed. Returns whether there was anything.

        Args:
            goes_on: an earlier restore did not come to its end; what it has set aside stays.

        Raises:
            StorageError: something cannot be moved; run again, it goes on with the rest.
        """
        with writing(self.path):
            entries = [entry for entry in self.path.iterdir() if entry.name != INNER]
            if not goes_on:
                shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir(mode=0o700, exist_ok=True)
            for entry in entries:
                if (there := self.aside / entry.name).is_dir() and not there.is_symlink():
                    shutil.rmtree(there)
                entry.rename(there)
            if not keep:
                shutil.rmtree(self.aside, ignore_errors=True)
        return bool(entries)

    def remove_partial_restores(self, prefix: str) -> None:
        """Remove what restores that were killed have left."""
        for each in self.own.glob(f"{prefix}*"):
            shutil.rmtree(each, ignore_errors=True)
