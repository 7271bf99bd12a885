"""The content of a checkpoint directory: names, markers, order. No torch, nothing is changed.

    <checkpoint_dir>/step-00000100.g7.c12/     step 100, written by generation 7, the 12th commit of this directory
        .metadata          the index of torch.distributed.checkpoint, which torch reads and slurmft never does
        __3_0.distcp       the image of shard 3 (checkpoint.format.shard_index)
        __3_0.json         its index with the digests of all its items; written when the image is durable
        manifest.json      the commit marker: names every file with its size; written last
        quarantined.json   written by a supervisor: runs die from this one (storage.checkpoint_names)

The commit number grows by one with every save, also when steps go back. It decides which checkpoint is newest, so that
a run which went back to an older step (and commits lower steps again) is followed, not the branch that it left.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slurmft.checkpoint.replicas.offers import MAX_WORLD
from slurmft.errors import NewerFormat, StorageError
from slurmft.storage.checkpoint_names import MANIFEST, MAX_NUMBER, Identity, Names, names_in, read_quarantine
from slurmft.system.files import read_json, write_json
from slurmft.system.opening import trusted_owners

log = logging.getLogger(__name__)

SHOWN = 3
MAX_MARKER_BYTES = 64 * 1024 * 1024
"""A marker has some 170 bytes for each rank."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file as its writer produced it."""

    size_bytes: int
    xxh3: str = ""
    """xxh3_128 of its bytes in hex; empty for an image, whose digests are in its index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One committed checkpoint, as its marker describes it. Its files have not been verified."""

    step: int
    path: Path
    metrics: Mapping[str, float]
    committed_at: datetime
    generation: int
    commit: int
    attempt: str
    world_size: int
    files: Mapping[str, FileRecord]
    quarantine: str = ""
    """Why runs do not begin with it any more; empty for a good one."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files, the marker not counted."""
        return sum(record.size_bytes for record in self.files.values())


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a checkpoint directory that carries a checkpoint's name; each list is sorted newest first."""

    committed: list[Entry] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    """Folders whose marker exists but cannot be believed, with the reason."""
    uncommitted: list[Path] = field(default_factory=list)
    """Saves that are running now, or that never finished."""
    foreign: list[tuple[Path, str]] = field(default_factory=list)
    """Folders of users who are not trusted there, with the reason; they count for nothing."""

    @property
    def unusable(self) -> list[tuple[Path, str]]:
        """Folders with a checkpoint's name and without a valid marker."""
        return [*self.unreadable, *self.foreign]


class Catalog:
    """The checkpoints of one directory, read from their markers alone: cheap, and safe beside a running trainer."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def committed(self) -> list[Entry]:
        """Committed checkpoints, newest commit first; empty when the directory does not exist."""
        return self.scan().committed

    def scan(self) -> Contents:
        """One look at the directory.

        Raises:
            StorageError: the directory exists but cannot be listed.
        """
        names = self._names()
        contents = Contents(unreadable=self._with_paths(names.damaged), foreign=self._with_paths(names.foreign))
        for identity in names.believed:
            path = self.folder / identity.folder_name
            try:
                entry = read_entry(path)
            except StorageError as error:
                contents.unreadable.append((path, error.what))
                continue
            if entry is None:
                contents.uncommitted.append(path)
            else:
                contents.committed.append(entry)
        return contents

    def identities(self) -> list[Identity]:
        """Every folder of ours with a checkpoint's name, committed or not, newest first.

        Raises:
            StorageError: the directory exists but cannot be listed.
        """
        return self._names().believed

    def has_names(self) -> bool:
        """Whether anything there has a checkpoint's name, of any kind.

        Raises:
            StorageError: the directory exists but cannot be listed.
        """
        names = self._names()
        return bool(names.believed or names.damaged or names.foreign)

    def newest_commit(self) -> int:
        """The number of the newest commit, or of a try of one; 0 where there is none.

        Ignored folders are logged here: once before the first save, and once for each load.

        Raises:
            StorageError: as ``identities``; or no number is left to count on with.
        """
        names = self._names()
        strange = [reason for _, reason in (*names.damaged, *names.foreign)]
        for reason in strange[:SHOWN]:
            log.warning("not a checkpoint: %s", reason)
        if (more := len(strange) - SHOWN) > 0:
            log.warning("%s: %d more of other users, or with impossible numbers", self.folder, more)
        newest = names.believed[0].commit if names.believed else 0
        if newest >= MAX_NUMBER:
            raise StorageError(f"{self.folder / names.believed[0].folder_name} has the last number that there is",
                               hint="move it away")  # fmt: skip
        return newest

    def _with_paths(self, found: Iterable[tuple[Identity, str]]) -> list[tuple[Path, str]]:
        return [(self.folder / identity.folder_name, reason) for identity, reason in found]

    def _names(self) -> Names:
        try:
            return names_in(self.folder)
        except FileNotFoundError:
            return Names([], [], [])
        except OSError as error:
            raise StorageError(f"cannot list {self.folder}: {error}") from error


def read_entry(path: Path) -> Entry | None:
    """The marker of one checkpoint folder, or None when it was never committed.

    Raises:
        NewerFormat: a newer slurmft wrote it.
        StorageError: the marker cannot be read or does not belong to this folder.
    """
    value = _marker(path)
    if value is None:
        return None
    try:
        return _entry(path, value)
    except KeyError as error:
        raise StorageError(f"{path / MANIFEST} is not a checkpoint's marker: it lacks {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StorageError(f"{path / MANIFEST} is not a checkpoint's marker: {error}") from error


def _marker(path: Path) -> dict[str, Any] | None:
    marker = path / MANIFEST
    try:
        owners = trusted_owners(path.parent)
        owner = path.stat().st_uid
        marker.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {marker}: {error.strerror}") from error
    if owner not in owners:  # that user wrote all of its content, even if it is a copy
        raise StorageError(f"{path} belongs to user id {owner}")
    return read_json(marker, limit_bytes=MAX_MARKER_BYTES, owners=owners)


def write_marker(entry: Entry) -> None:
    """Commit ``entry``: after this returns, the checkpoint exists, also after a power cut.

    Raises:
        OSError: there is no marker.
    """
    value = {
        "step": entry.step,
        "generation": entry.generation,
        "commit": entry.commit,
        "attempt": entry.attempt,
        "world_size": entry.world_size,
        "committed_at": entry.committed_at.isoformat(),
        "metrics": {name: _to_json(number) for name, number in entry.metrics.items()},
        "files": {name: {"bytes": one.size_bytes, "xxh3": one.xxh3} for name, one in entry.files.items()},
    }
    # The folder was made under the user's umask; the marker must be readable by the same people as the files beside it.
    write_json(entry.path / MANIFEST, value, mode=entry.path.stat().st_mode & 0o644)


def is_newer_format(path: Path) -> bool:
    """Whether a newer slurmft wrote this checkpoint; such a one is skipped, and never removed."""
    try:
        _marker(path)
    except NewerFormat:
        return True
    except StorageError:
        return False
    return False


def _entry(path: Path, value: Mapping[str, Any]) -> Entry:
    identity = Identity(*(_integer(value, key) for key in ("step", "generation", "commit")))
    if identity.folder_name != path.name:
        raise ValueError(f"it belongs to {identity.folder_name[:80]}")
    committed_at = datetime.fromisoformat(value["committed_at"])
    if committed_at.tzinfo is None:
        raise ValueError("committed_at has no time zone")
    committed_at.astimezone(UTC)  # a year that no clock can show
    if any("sha256" in one for one in value["files"].values()):
        raise ValueError("it is of an older kind (shared.pt and rank files), which this slurmft does not read")
    files = {name: FileRecord(_integer(one, "bytes"), str(one["xxh3"])) for name, one in value["files"].items()}
    if not 0 <= (world_size := _integer(value, "world_size")) <= MAX_WORLD:
        raise ValueError(f"it names {world_size} ranks")
    if any(Path(name).name != name or name in ("", "..") or "\0" in name for name in files):
        raise ValueError("a file name leaves the folder")
    return Entry(
        step=identity.step,
        path=path,
        metrics={str(name): float(number) for name, number in value["metrics"].items()},
        committed_at=committed_at,
        generation=identity.generation,
        commit=identity.commit,
        attempt=str(value.get("attempt", "")),
        world_size=world_size,
        files=files,
        quarantine=(mark.reason or "quarantined") if (mark := read_quarantine(path)) is not None else "",
    )


def _integer(value: Mapping[str, Any], key: str) -> int:
    number = value[key]
    if type(number) is not int or number < 0:
        raise ValueError(f"{key} is {str(number)[:40]!r}")
    return number


def _to_json(number: float) -> float | str:
    # JSON has no NaN and no infinity; other readers of the marker would refuse the whole file.
    return number if math.isfinite(number) else str(number)
