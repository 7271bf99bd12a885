"""Where versions are stored: a folder that all nodes share, or whatever fsspec can reach."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.storage.patience import translated
from slurmft.system.files import fsync_folder, naming, open_folder, open_regular, read_bytes, write_all

# --- object store ---
# Versions in anything that fsspec reaches: S3, GCS, and others. Home of fsspec.
#
# Credentials are never handled here: each filesystem finds them in the environment or in its usual files.

SMALL_BYTES = 8 << 20
"""Written by one request."""

BLOCK_BYTES = 16 << 20
MAX_PARTS = 9000
"""S3 takes at most 10,000 parts of one object."""

REMOVED_AT_ONCE = 500
S3_OPTIONS: Mapping[str, Any] = {
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}
}
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY")
_MIN_SECRET = 6


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """``text`` without the values of variables whose names say that they are secret."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name.upper()) and len(value) >= _MIN_SECRET:
            text = text.replace(value, f"<{name}>")
    return text


def _install(url: str) -> str:
    packages = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs",
                "abfs": "adlfs", "abfss": "adlfs"}  # fmt: skip
    return f"pip install {packages.get(url.partition(':')[0], 'what it names')}"


class ObjectStore:
    """A store at an address of fsspec.

    An object appears under its name when all of it was sent; where a filesystem is another one, its size shows that a
    part is missing, and its digest that it was altered.
    """

    def __init__(self, url: str, inner: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise StorageError(f"{url} needs fsspec", hint="pip install fsspec s3fs") from error
        self._url = url
        options = S3_OPTIONS if url.startswith(("s3:", "s3a:")) else {}
        with self._errors():
            try:
                self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
            except ImportError as error:
                raise StorageError(f"{url} needs a package that is not installed on this node: {error}",
                                   hint=_install(url)) from error  # fmt: skip
            except ValueError as error:  # of fsspec, for a protocol that it does not know
                raise StorageError(f"{url}: {self._shown(error)}", hint="is the address right?") from error
        self._folder = f"{root.rstrip('/')}/{inner}"

    def names(self, folder: str) -> Mapping[str, int]:
        """As of every store."""
        with self._errors():
            try:
                found = self._files.ls(f"{self._folder}/{folder}", detail=True, refresh=True)
            except FileNotFoundError:
                return {}
            return {
                str(each["name"]).rpartition("/")[2]: int(each.get("size") or 0)
                for each in found
                if each.get("type") == "file"
            }

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """As of every store."""
        with self._errors():
            content: bytes = self._files.cat_file(f"{self._folder}/{name}", start=0, end=limit_bytes + 1)
        if len(content) > limit_bytes:
            raise StorageError(f"{name} at {self._url} is longer than {limit_bytes} bytes")
        return content

    def chunks(self, name: str) -> Iterator[bytes]:
        """As of every store."""
        with self._errors():
            stream = self._files.open(f"{self._folder}/{name}", "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        try:
            while True:
                with self._errors():
                    part = stream.read(BLOCK_BYTES)
                if not part:
                    return
                yield part
        finally:
            with self._errors():
                stream.close()

    def write(self, name: str, chunks: Iterable[bytes], *, size: int) -> None:
        """As of every store."""
        path = f"{self._folder}/{name}"
        if size <= SMALL_BYTES:
            content = b"".join(chunks)
            if len(content) != size:
                raise StorageError(f"{len(content)} bytes of {name} instead of {size}")
            with self._errors():
                self._files.pipe_file(path, content)
        else:
            self._write_in_parts(path, chunks, size)
        with self._errors():
            stored = int(self._files.info(path, refresh=True)["size"])
        if stored != size:
            raise StorageUnavailable(f"{name} at {self._url} has {stored} bytes instead of {size}")

    def _write_in_parts(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        with self._errors():
            stream = self._files.open(path, "wb", block_size=max(BLOCK_BYTES, size // MAX_PARTS))
        written = 0
        try:
            for chunk in chunks:
                with self._errors():
                    stream.write(chunk)
                written += len(chunk)
            if written != size:
                raise StorageError(f"{written} bytes of {path} instead of {size}")
            with self._errors():
                stream.close()
        except BaseException:
            # closing it would complete the object with what there is
            with contextlib.suppress(StorageError), self._errors():
                stream.discard()
            stream.closed = True
            raise

    def remove(self, names: Iterable[str]) -> None:
        """As of every store."""
        paths = [f"{self._folder}/{name}" for name in names]
        for first in range(0, len(paths), REMOVED_AT_ONCE):
            with self._errors(), contextlib.suppress(FileNotFoundError):
                self._files.rm(paths[first : first + REMOVED_AT_ONCE])

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (StorageError, FileNotFoundError):
            raise
        except PermissionError as error:
            raise StorageError(f"{self._url}: {self._shown(error)}", hint="see docs: credentials") from None
        except Exception as error:  # noqa: BLE001 - each filesystem of fsspec has errors of its own
            raise StorageUnavailable(f"{self._url}: {self._shown(error)}") from None

    @staticmethod
    def _shown(error: Exception) -> str:
        text = without_secrets(" ".join(str(error).split()), os.environ)
        return f"{type(error).__name__}: {text}"[:400]


# --- stores ---

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
                    write_all(descriptor, chunk)
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

    return ObjectStore(url, inner)
