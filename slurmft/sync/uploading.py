"""One folder's uploads: contents first, the manifest last, and the garbage after that."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from slurmft.errors import Fenced, StorageError, StorageUnavailable
from slurmft.policy.synced_folders import NONE, Version
from slurmft.storage.patience import translated
from slurmft.sync import manifest as stored
from slurmft.sync.manifest import Entry, Manifest
from slurmft.sync.record import Record
from slurmft.sync.scanning import Look, Tree, cut_off, look, open_for_writing, scan
from slurmft.sync.stores import CHUNK_BYTES, FolderStore, Store
from slurmft.system.opening import open_regular

QUIET_S = 1.0
"""How long files must not have changed before they are taken, by this process's own clock."""

QUIET_AT_THE_END_S = 0.2
"""The same when all workers have ended."""

HELD_OPEN_S = 30.0
"""A file that is open for writing and has not changed for so long is taken: logs stay open for the whole run."""

THREADS = 4
NAMED = 3
"""Files that an error names."""

log = logging.getLogger(__name__)


class StillChanging(StorageUnavailable):
    """Files change faster than they can be taken."""


class Throttle:
    """Spreads bytes over time; shared by threads.

    Args:
        bytes_per_s: 0 for no limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    def take(self, count: int) -> None:
        """Return when ``count`` bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now_s = time.monotonic()
            wait_s = max(0.0, self._free_at_s - now_s)
            self._free_at_s = max(now_s, self._free_at_s) + count / self._rate
        time.sleep(wait_s)


class Uploader:
    """Stores versions of one folder, for one attempt.

    Args:
        generation: of the attempt; nothing is stored once a newer one has begun.
        newest: the newest version that is stored.
        moves: called whenever a piece of a file was read, or is about to be; from any thread.
    """

    def __init__(
        self, store: Store, record: Record, *, run: str, generation: int, newest: Manifest | None, keep: int,
        exclude: Sequence[str], bytes_per_s: float, moves: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._store, self._record, self._path = store, record, record.path
        self._run, self._generation, self._keep, self._exclude = run, generation, keep, tuple(exclude)
        self._throttle = Throttle(bytes_per_s)
        self._newest, self._moves = newest, moves
        self._sequence = max((each.sequence for each in self._versions() if each.generation == generation), default=0)
        self._blobs = dict(store.names(stored.DATA))
        self._digests: dict[str, tuple[Look, str]] = {}
        self._stored_tree: Tree | None = None
        self._quiet_since: dict[str, tuple[Look, float]] = {}
        if isinstance(store, FolderStore):
            for folder in (stored.DATA, stored.VERSIONS):
                store.remove_partly_written(folder)

    def upload(self, *, at_end: bool, patience_s: float) -> Manifest | None:
        """Store what the folder holds now; None where that is stored already.

        Raises:
            StillChanging: the files did not come to rest within ``patience_s`` seconds.
            Fenced: a newer attempt has begun.
            StorageError: it cannot be read or stored.
        """
        deadline_s = time.monotonic() + patience_s
        if self._stored_tree is not None and not self._scan().changed_since(self._stored_tree):
            return None
        while True:
            tree = self._at_rest(deadline_s, QUIET_AT_THE_END_S if at_end else QUIET_S)
            try:
                self._digest(tree)
                self._send(tree)
            except _Changed as error:
                self._refuse_late(deadline_s, [str(error)])
                continue
            if not (changed := self._scan().changed_since(tree)):
                break
            self._refuse_late(deadline_s, changed)
        found = self._publish(tree)
        self._stored_tree = tree
        version = found.version if found is not None else self._newest.version if self._newest else NONE
        self._record.write(tree, run=self._run, version=version, generation=self._generation)
        if found is not None:
            collect_garbage(self._store, self._run, keep=self._keep)
        return found

    def _scan(self) -> Tree:
        try:
            return scan(self._path, self._exclude)
        except OSError as error:
            raise translated(f"cannot read {self._path}", error) from error

    def _at_rest(self, deadline_s: float, quiet_s: float) -> Tree:
        """The folder, once nothing in it changes."""
        while True:
            self._moves()
            before = self._scan()
            time.sleep(quiet_s)
            tree = self._scan()
            busy = tree.changed_since(before)
            now_s = time.monotonic()
            since = self._quiet_since
            self._quiet_since = {
                name: since[name] if name in since and since[name][0] == each else (each, now_s)
                for name, each in tree.files.items()
            }
            fresh = [name for name, (_, since_s) in self._quiet_since.items() if now_s - since_s < HELD_OPEN_S]
            busy += sorted(open_for_writing(self._path, fresh) - {*busy})
            if not busy:
                known = self._stored_tree.files if self._stored_tree else {}
                if torn := cut_off(self._path, [name for name, it in tree.files.items() if known.get(name) != it]):
                    raise StorageUnavailable(
                        f"{self._path} is not uploaded: {_named(torn)} ends in the middle",
                        hint="its writer was killed, or writes in pieces; the version before it stays the newest one",
                    )
                return tree
            self._refuse_late(deadline_s, busy)

    def _refuse_late(self, deadline_s: float, changing: Sequence[str]) -> None:
        if time.monotonic() > deadline_s:
            raise StillChanging(
                f"{self._path} is not uploaded: {_named(changing)} did not stop changing",
                hint="leave files out that are always written to: sync.exclude",
            )

    def _digest(self, tree: Tree) -> None:
        new = [name for name, each in tree.files.items() if self._digests.get(name, (None, ""))[0] != each]
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(lambda name: self._digest_of(name, tree.files[name]), new))
        self._digests = {name: found for name, found in self._digests.items() if name in tree.files}
        self._digests |= {name: (tree.files[name], digest) for name, digest in zip(new, digests, strict=True)}

    def _digest_of(self, name: str, expected: Look) -> str:
        digest = hashlib.sha256()
        for chunk in self._content(name, expected):
            digest.update(chunk)
        return digest.hexdigest()

    def _content(self, name: str, expected: Look) -> Iterator[bytes]:
        """The file's bytes.

        Raises:
            _Changed: it is not the one that was looked at, or was changed meanwhile.
        """
        path = self._path / name
        try:
            descriptor = open_regular(path, follow=False)
        except FileNotFoundError:
            raise _Changed(name) from None
        except OSError as error:
            raise translated(f"cannot read {path}", error) from error
        try:
            left = expected.size
            while left > 0 and look(os.fstat(descriptor)) == expected:
                if not (chunk := os.read(descriptor, min(left, CHUNK_BYTES))):
                    break
                left -= len(chunk)
                self._moves()
                yield chunk
            if left or look(os.fstat(descriptor)) != expected:
                raise _Changed(name)
        except OSError as error:
            raise translated(f"cannot read {path}", error) from error
        finally:
            os.close(descriptor)

    def _send(self, tree: Tree) -> None:
        """Have every content stored."""
        wanted = {self._digests[name][1]: name for name in tree.files}
        missing = [
            (digest, name) for digest, name in wanted.items() if self._blobs.get(digest) != tree.files[name].size
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            sent = pool.map(lambda each: self._send_one(each[0], each[1], tree.files[each[1]]), missing)
            for digest, size in sent:
                self._blobs[digest] = size

    def _send_one(self, digest: str, name: str, expected: Look) -> tuple[str, int]:
        seen = hashlib.sha256()

        def checked() -> Iterator[bytes]:
            for chunk in self._content(name, expected):
                self._throttle.take(len(chunk))
                seen.update(chunk)
                yield chunk
            if seen.hexdigest() != digest:  # with the same times and size: memory-mapped
                raise _Changed(name)

        self._store.write(f"{stored.DATA}/{digest}", checked(), size=expected.size)
        return digest, expected.size

    def _publish(self, tree: Tree) -> Manifest | None:
        """Write the manifest; None where the newest one says the same."""
        files = tuple(
            Entry(path=name, size=each.size, mode=each.mode & 0o777, mtime_ns=max(0, each.mtime_ns),
                  sha256=self._digests[name][1])
            for name, each in sorted(tree.files.items())
        )  # fmt: skip
        version = Version(self._generation, self._sequence + 1)
        found = Manifest(run=self._run, version=version, files=files, folders=tuple(tree.folders),
                         links=tuple(sorted(tree.links.items())))  # fmt: skip
        if found.says_the_same(self._newest) or (self._newest is None and not files):
            return None
        self._refuse_fenced()
        blobs = self._store.names(stored.DATA)
        if lost := [each.path for each in files if blobs.get(each.sha256) != each.size]:
            self._blobs = dict(blobs)
            raise StorageUnavailable(f"{len(lost)} files of {self._path} were removed where they are stored")
        self._store.write(stored.new_name(version), [content := found.as_bytes()], size=len(content))
        self._newest, self._sequence = found, version.sequence
        return found

    def _refuse_fenced(self) -> None:
        begun = [int(name) for name in self._store.names(stored.BEGUN) if name.isdecimal() and len(name) <= 12]
        if max(begun, default=0) > self._generation:
            raise Fenced(f"{self._path} is not uploaded: a newer attempt of the run has begun")

    def _versions(self) -> list[Version]:
        return [each for each in map(stored.version_of, self._store.names(stored.VERSIONS)) if each is not None]


def begin(store: Store, generation: int) -> None:
    """Note that an attempt has begun, so that older ones, cut off and still alive, store and remove nothing more.

    Raises:
        StorageError: it cannot be noted.
    """
    names = store.names(stored.BEGUN)
    store.write(f"{stored.BEGUN}/{generation}", [b"1"], size=1)
    older = [name for name in names if name.isdecimal() and int(name) < generation]
    store.remove(f"{stored.BEGUN}/{name}" for name in older)


def collect_garbage(store: Store, run: str, *, keep: int) -> None:
    """Remove versions beyond the newest ``keep``, then contents that no version needs.

    A kill in between leaves contents that the next one removes. Unless every version that stays can be read, no
    contents are removed.

    Raises:
        StorageError: it could not be done.
    """
    blobs = store.names(stored.DATA)  # first: what is stored later belongs to a version that is not seen here
    versions = sorted(
        (version, name) for name in store.names(stored.VERSIONS) if (version := stored.version_of(name)) is not None
    )
    kept: list[Manifest] = []
    old: list[str] = []
    for version, name in reversed(versions):
        if len(kept) >= keep:
            old.append(f"{stored.VERSIONS}/{name}")
            continue
        content = store.read(f"{stored.VERSIONS}/{name}", limit_bytes=stored.MAX_MANIFEST_BYTES)
        try:
            kept.append(stored.parse(content, run=run, version=version))
        except StorageError as error:
            log.warning("nothing is removed beside a version that cannot be read: %s", error.what)
            return
    store.remove(old)
    needed = {each.sha256 for manifest in kept for each in manifest.files}
    store.remove(f"{stored.DATA}/{name}" for name in blobs if stored.is_blob(name) and name not in needed)


class _Changed(Exception):
    """A file is not what it was."""


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name)[1:-1] for name in names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
