"""Where versions are stored: a folder that all nodes share. ``object_store`` has what fsspec can reach."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from slurmft.errors import StorageError
from slurmft.storage.patience import translated
from slurmft.system.files import fsync_folder
from slurmft.system.opening import naming, open_regular, read_bytes
from slurmft.system.private_folder import open_folder

CHUNK_BYTES = 1 << 20
_PART = ".part-"


class Store(Protocol):
    """Names with contents, in folders of one level. Every method raises StorageError where it cannot be done, and
    StorageUnavailable where that may pass."""

    def names(self, folder: str) -> Mapping[str, int]:
        """What is in a folder, with sizes in bytes; nothing where there is no folder."""

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """The whole content."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content, piece by piece."""

    def write(self, name: str, chunks: Iterable[bytes], *, size: int) -> None:
        """Store ``size`` bytes; under its name there is all of it or nothing, also when ``chunks`` raises."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove what is there of these."""


class FolderStore:
    """A folder that this user alone can write to. No link is followed below it.

    Args:
        root: may belong to another user; ``inner`` below it is made by this one, for this one alone.
    """

    def __init__(self, root: Path, inner: str) -> None:
        self._root, self._folder = root, root / inner
        self._user = os.geteuid()

    def names(self, folder: str) -> Mapping[str, int]:
        """As of every store; partly written files are no names."""
        with self._errors():
            return {name: size for name, size in self._entries(folder) if not name.startswith(".")}

    def _entries(self, folder: str) -> list[tuple[str, int]]:
        try:
            with self._opened(folder) as place, os.scandir(place) as entries:
                return [
                    (entry.name, entry.stat(follow_symlinks=False).st_size)
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """As of every store."""
        with self._errors(), self._opened(name.partition("/")[0]):
            return read_bytes(self._folder / name, limit_bytes=limit_bytes, follow=False, owners={self._user})

    def chunks(self, name: str) -> Iterator[bytes]:
        """As of every store."""
        with self._errors(), self._opened(name.partition("/")[0]):
            descriptor = open_regular(self._folder / name, follow=False, owners={self._user})
        try:
            while True:
                with self._errors():
                    part = os.read(descriptor, CHUNK_BYTES)
                if not part:
                    return
                yield part
        finally:
            os.close(descriptor)

    def write(self, name: str, chunks: Iterable[bytes], *, size: int) -> None:
        """As of every store; durable when it returns."""
        folder, _, last = name.partition("/")
        part = self._folder / folder / f"{_PART}{secrets.token_hex(8)}"
        with self._errors():
            self._make(folder)
            descriptor = open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow=False)
        try:
            written = 0
            for chunk in chunks:
                with self._errors(), naming(part):
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(descriptor, view) :]
                written += len(chunk)
            if written != size:
                raise StorageError(f"{written} bytes of {name} instead of {size}")
            with self._errors(), naming(part):
                os.fsync(descriptor)
                part.rename(self._folder / folder / last)
                fsync_folder(part.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            os.close(descriptor)

    def remove(self, names: Iterable[str]) -> None:
        """As of every store."""
        for name in names:
            with self._errors(), contextlib.suppress(FileNotFoundError), self._opened(name.partition("/")[0]):
                (self._folder / name).unlink()

    def remove_partly_written(self, folder: str) -> None:
        """Remove what writers that were killed have left."""
        with self._errors():
            self.remove(f"{folder}/{name}" for name, _ in self._entries(folder) if name.startswith(_PART))

    @contextlib.contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        with open_folder(self._folder, owner=self._user), open_folder(self._folder / folder, owner=self._user) as it:
            yield it

    def _make(self, folder: str) -> None:
        if not self._root.is_dir():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self._root
        for part in (*self._folder.relative_to(self._root).parts, folder):
            place /= part
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            with open_folder(place, owner=self._user):
                pass

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPERM and error.filename:
                raise StorageError(f"{error.filename} {error.strerror}: it is not believed") from error
            raise translated(f"{self._folder}", error) from error


def open_store(url: str, inner: str) -> Store:
    """The store at ``url``, below ``inner`` in it.

    Raises:
        StorageError: fsspec is not installed, or knows no such address.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderStore(Path(unquote(parts.path)), inner)
    from slurmft.sync.object_store import ObjectStore  # an optional dependency

    return ObjectStore(url, inner)
