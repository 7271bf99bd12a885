"""The exclusion list of a cluster and user, or group: one versioned file that any number of processes add to.

Whoever adds observations waits for nobody: they go into a small file of their own in the folder ``<list>.new``, and are
part of the list from then on. Who finds many of those there, or has another change to make, merges them into the list
under a lock. Readers take both, the small files first: what has left them meanwhile is in the list already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError, StorageUnavailable
from slurmft.policy.evidence import Kind
from slurmft.policy.suspicion import MAX_WEIGHT, WEIGHTS, ManualEntry, Observation, Rules, worth_keeping
from slurmft.storage.files import FORMAT, replace_atomically
from slurmft.storage.patience import translated, writing
from slurmft.storage.soft_lock import SoftLock

LOCK_TIMEOUT_S = 20.0
MERGE_FROM = 16
"""Small files from which on whoever adds one tries to merge them."""

TIDY_FROM = 5000
"""Observations from which on ``tidy`` looks for those that have faded."""

LEFT_OVER_S = 86_400.0
"""Age from which on ``gc`` removes what a writer that was killed has left, and small files that cannot be read."""

MAX_TEXT = 1000

log = logging.getLogger(__name__)
_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}
_COLUMN_TYPES = tuple(
    {int, float} if name in ("weight", "at") else {str} for name in Observation._fields
)  # fmt: skip
_HINT = "move it away and run again; what it excluded will then be used again"


_Change = Callable[[list[Observation], list[ManualEntry]], None]
"""Changes what a list holds, in place."""


class Exclusions:
    """What a list held when it was read. Observations are taken apart when they are asked for."""

    def __init__(
        self, observations: Iterable[Observation] = (), manual: Iterable[ManualEntry] = (), revision: int = 0,
        *, stored: Callable[[], list[Observation]] | None = None,
    ) -> None:  # fmt: skip
        self.manual = tuple(manual)
        self.revision = revision
        """How often the list was written."""
        self._more = tuple(observations)
        self._stored = stored

    @cached_property
    def observations(self) -> tuple[Observation, ...]:
        """Each once, by its id.

        Raises:
            StorageError: the list is a forgery; damage is found when it is read.
        """
        stored = self._stored() if self._stored is not None else []
        by_id = {each.id: each for each in (*self._more, *stored)} if self._more else None
        return tuple(stored) if by_id is None else tuple(by_id.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """What ``gc`` removed, and what is left."""

    observations: int
    manual: int
    files: int
    kept: int


class ExclusionList:
    """One shared list. Creating the object changes nothing on disk.

    Guarantees: what ``observe``, ``exclude`` and ``remove`` have returned from is on disk and stays in the list,
    however many do it at once and whoever is killed meanwhile; readers see each change whole. A list that is not there
    is empty.
    """

    def __init__(
        self, path: Path, mode: int = 0o600, *, clock: Callable[[], float] = time.time, host: str = ""
    ) -> None:
        self.path = path = Path(os.path.realpath(path))  # else a link would be replaced by a list of its own
        self._mode = mode
        self._clock = clock
        self._host = host or os.uname().nodename
        self._new = path.with_name(f"{path.name}.new")
        self._handed_in: set[str] = set()

    def read(self) -> Exclusions:
        """The list as it is now.

        Raises:
            NewerFormat: a newer slurmft wrote it.
            StorageError: it cannot be read or believed.
        """
        found = [observation for _, observations in self._read_new() for observation in observations]
        manual, revision, stored = self._read_list()
        return Exclusions(found, manual, revision, stored=stored)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Add observations; those with an id that is there already change nothing. Waits for nobody.

        Raises:
            StorageUnavailable: no space, read-only, and the like.
            StorageError: it cannot be written, or a weight or time is no number.
        """
        now = self._clock()
        added = [_checked(each, now) for each in observations if each.id not in self._handed_in]
        if not added:
            return
        self._make_folders()
        name = f"{time.time_ns():020d}-{secrets.token_hex(6)}.json"
        text = f'{{"format": {FORMAT}, "observations": [\n{_rows(added)}\n]}}\n'
        with writing(self._new / name):
            replace_atomically(self._new / name, text, mode=self._mode, group=self._group())
        self._handed_in.update(each.id for each in added)
        with contextlib.suppress(OSError):
            if len(self._new_files()) >= MERGE_FROM:
                self._merge_if_nobody_does()

    def exclude(self, *entries: ManualEntry) -> None:
        """Keep nodes out by hand; an entry replaces an older one of the same node by the same person.

        Raises:
            StorageError: as ``observe``; or another process holds the list.
        """
        given = {(entry.node, entry.who): entry for entry in map(_checked_entry, entries)}

        def change(observations: list[Observation], manual: list[ManualEntry]) -> None:
            manual[:] = [entry for entry in manual if (entry.node, entry.who) not in given] + list(given.values())

        self._change(change)

    def remove(self, nodes: str | Sequence[str], who: str) -> list[str]:
        """Lift whatever is held against these nodes until now; returns those of them that anything was known of.

        Raises:
            StorageError: as ``exclude``.
        """
        wanted = {nodes} if isinstance(nodes, str) else set(nodes)
        lifted: set[str] = set()

        def change(observations: list[Observation], manual: list[ManualEntry]) -> None:
            lifted.update(entry.node for entry in manual if entry.node in wanted)
            manual[:] = [entry for entry in manual if entry.node not in wanted]
            newest: dict[str, float] = {}
            for each in observations:
                if each.node in wanted:
                    newest[each.node] = max(each.at, newest.get(each.node, self._clock()))
            lifted.update(newest)
            observations += [
                Observation(
                    kind=Kind.FORGIVEN, node=node, weight=WEIGHTS[Kind.FORGIVEN], at=at, source=who,
                    id=f"forgiven|{node}|{secrets.token_hex(8)}", evidence="removed from the list by hand",
                )
                for node, at in newest.items()
            ]  # fmt: skip

        self._change(change)
        return sorted(lifted)

    def gc(self, now: float, rules: Rules) -> Swept:
        """Forget what has faded or expired; no node's standing changes.

        Raises:
            StorageError: as ``exclude``.
        """
        before: list[int] = []
        after: list[int] = []

        def change(observations: list[Observation], manual: list[ManualEntry]) -> None:
            before[:] = len(observations), len(manual)
            observations[:] = worth_keeping(observations, now, rules)
            manual[:] = [entry for entry in manual if entry.holds(now)]
            after[:] = len(observations), len(manual)

        if not self.path.exists() and not self._new.is_dir():
            return Swept(observations=0, manual=0, files=0, kept=0)
        self._change(change)
        return Swept(
            observations=before[0] - after[0],
            manual=before[1] - after[1],
            files=self._remove_left_overs(),
            kept=after[0] + after[1],
        )

    def tidy(self, found: Exclusions, now: float, rules: Rules) -> None:
        """``gc`` when it has become long, and nobody else writes. For those who pass by: never waits, never raises."""
        if len(found.observations) < TIDY_FROM:
            return

        def change(observations: list[Observation], manual: list[ManualEntry]) -> None:
            observations[:] = worth_keeping(observations, now, rules)

        self._merge_if_nobody_does(change)

    # the small files

    def _new_files(self) -> list[str]:
        try:
            names = os.listdir(self._new)  # noqa: PTH208 - half the time of iterdir, at every reading
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translated(f"cannot read {self._new}", error) from error
        return [name for name in names if name[0] != "." and name.endswith(".json")]

    def _read_new(self) -> Iterator[tuple[Path, list[Observation]]]:
        for path in map(self._new.joinpath, sorted(self._new_files())):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # merged meanwhile: the list, which is read after these, has it
                continue
            except OSError as error:
                raise translated(f"cannot read {path}", error) from error
            try:
                value = json.loads(content)
                if value["format"] > FORMAT:
                    raise _newer(path, value["format"])
                observations = _observations(value["observations"], path)
            except (ValueError, KeyError, TypeError, RecursionError, StorageError) as error:
                if isinstance(error, NewerFormat):
                    raise
                log.warning("%s cannot be read and is left out: %s", path, error)
                continue
            yield path, observations

    # the list itself

    def _read_list(self) -> tuple[list[ManualEntry], int, Callable[[], list[Observation]]]:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0, list
        except OSError as error:
            raise translated(f"cannot read {self.path}", error) from error
        # two lines of head, then a line for each observation: what is not needed is not taken apart, nor copied
        match = re.match(rb'\{"format": (\d{1,9}), "crc": (\d{1,10}),\n', content)
        if match is None or int(match[1]) > FORMAT:
            raise self._not_ours(content)
        if zlib.crc32(memoryview(content)[match.end() :]) != int(match[2]):
            raise StorageError(f"{self.path} is damaged: its checksum is wrong", hint=_HINT)
        try:
            facts = json.loads(b"{" + content[match.end() : content.index(b"\n", match.end())] + b"]}")
            manual = [ManualEntry(**{name: entry[name] for name in ("node", "reason", "who", "at", "until")})
                      for entry in facts["manual"]]  # fmt: skip
            revision = int(facts["revision"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageError(f"{self.path} is damaged: {error!r}", hint=_HINT) from error
        return manual, revision, lambda: _stored(content, self.path)

    def _not_ours(self, content: bytes) -> StorageError:
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            if type(version := json.loads(content).get("format")) is int and version > FORMAT:
                return _newer(self.path, version)
        return StorageError(f"{self.path} is damaged, or no exclusion list", hint=_HINT)

    def _change(self, change: _Change) -> None:
        self._make_folders()
        lock = self._lock()
        with lock.hold(LOCK_TIMEOUT_S):
            self._merge(lock, change)

    def _merge_if_nobody_does(self, change: _Change = lambda *_: None) -> None:
        """What has to be on disk is there already: a list that cannot be written is somebody else's problem."""
        lock = self._lock()
        try:
            if not lock.try_acquire():
                return
            try:
                self._merge(lock, change)
            finally:
                lock.release()
        except StorageError as error:
            log.warning("%s is not merged with %s for now: %s", self.path, self._new, error.what)

    def _merge(self, lock: SoftLock, change: _Change) -> None:
        """Call with the lock held. The order matters: see the top of the module."""
        new = list(self._read_new())
        manual, revision, stored = self._read_list()
        observations = list(Exclusions([each for _, few in new for each in few], stored=stored).observations)
        change(observations, manual)
        entries = json.dumps([asdict(entry) for entry in manual])
        rest = f'"revision": {revision + 1}, "manual": {entries}, "observations": [\n{_rows(observations)}\n]}}\n'
        text = f'{{"format": {FORMAT}, "crc": {zlib.crc32(rest.encode())},\n{rest}'
        if not lock.is_ours():
            raise StorageUnavailable(f"{lock.path} was taken from us: this process stood still for too long")
        with writing(self.path):
            replace_atomically(self.path, text, mode=self._mode, group=self._group())
        for path, _ in new:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # in another user's folder: it is in the list as well, and counts once
                log.warning("%s cannot be removed: %s", path, error.strerror)

    def _lock(self) -> SoftLock:
        return SoftLock(self.path.with_name(f"{self.path.name}.lock"), mode=self._mode, host=self._host)

    # folders and modes

    def _make_folders(self) -> None:
        for folder in (self.path.parent, self._new):
            if folder.is_dir():
                continue
            mode = self._mode | (self._mode & 0o444) >> 2  # who may read a file may enter its folder
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                if self._mode & 0o070:
                    with contextlib.suppress(PermissionError):
                        os.chown(folder, -1, folder.parent.stat().st_gid)
                    mode |= 0o2000  # files in it belong to its group, whoever makes them
                folder.chmod(mode)

    def _group(self) -> int | None:
        return self.path.parent.stat().st_gid if self._mode & 0o070 else None

    def _remove_left_overs(self) -> int:
        removed = 0
        prefix = f".{self.path.name}."
        strays = [path for path in self.path.parent.glob(f"{prefix}*") if path.name.endswith(".tmp")]
        for path in [*strays, *self._new.glob("*"), *self._new.glob(".*.tmp")]:
            with contextlib.suppress(OSError):
                if self._clock() - path.stat().st_mtime > LEFT_OVER_S:
                    path.unlink()
                    removed += 1
        return removed


def _rows(observations: Iterable[Observation]) -> str:
    return ",\n".join(map(json.dumps, observations))


def _stored(content: bytes, path: Path) -> list[Observation]:
    try:
        rows = json.loads(content)["observations"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: {error}", hint=_HINT) from error
    return _observations(rows, path)


def _observations(rows: Any, path: Path) -> list[Observation]:
    """Rows as values; columns are looked at as a whole, since there may be very many."""
    if not rows:
        return []
    try:
        columns = list(zip(*rows, strict=True))
        sound = len(columns) == len(_COLUMN_TYPES) and all(
            set(map(type, column)) <= types for column, types in zip(columns, _COLUMN_TYPES, strict=True)
        )
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise StorageError(f"{path} is damaged: a row is no observation", hint=_HINT)
    kinds = (_KINDS.get(kind, kind) for kind in columns[0])  # those of a newer slurmft are kept as they are
    return list(map(Observation._make, zip(kinds, *columns[1:], strict=True)))


def _checked(observation: Observation, now: float) -> Observation:
    """As it is stored: finite, not from the future, no longer than it may be."""
    if not (math.isfinite(observation.weight) and math.isfinite(observation.at)):
        raise StorageError(f"an observation of {observation.node[:80]!r} has a weight or time that is no number")
    if not observation.node or not observation.id:
        raise StorageError("an observation names no node, or has no id")
    weight = max(-MAX_WEIGHT, min(MAX_WEIGHT, float(observation.weight)))
    return observation._replace(
        weight=weight, at=min(float(observation.at), now), evidence=observation.evidence[:MAX_TEXT]
    )


def _checked_entry(entry: ManualEntry) -> ManualEntry:
    if not entry.node:
        raise StorageError("an exclusion by hand names no node")
    if not math.isfinite(entry.at) or (entry.until is not None and not math.isfinite(entry.until)):
        raise StorageError(f"the exclusion of {entry.node[:80]!r} has a time that is no number")
    return replace(entry, reason=entry.reason[:MAX_TEXT])


def _newer(path: Path, version: int) -> NewerFormat:
    return NewerFormat(f"{path} has format {version}; this slurmft reads up to {FORMAT}", hint="upgrade slurmft")
