"""The exclusion list of a cluster and user, or group: one versioned file that any number of processes add to.

Adding observations waits for no lock: they go into a small file of their own in the folder ``<list>.new``, and are part
of the list from then on. A process that finds many of those there, or makes another change, merges them into the list
under a lock. Readers take both, the small files first: observations merged meanwhile are in the list already.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from slurmft.policy.suspicion import MAX_WEIGHT, WEIGHTS, ManualEntry, Observation, Rules, worth_keeping
from slurmft.policy.verdict import Kind
from slurmft.storage.patience import SoftLock, translated, writing
from slurmft.storage.run_folder import followed
from slurmft.system import files

# --- Valid content of an exclusion list: values of the right kind, in bounds, with possible names of nodes ---
# A list is shared, and any user who can write it can write anything into it with a valid checksum.

MAX_TEXT = 1000
MAX_TIME_S = 1e12
"""Unix time beyond any clock: the year 33,658."""

_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}
_COLUMN_TYPES = tuple({int, float} if name in ("weight", "at") else {str} for name in Observation._fields)
_NODE, _WEIGHT, _AT, _ID = (Observation._fields.index(name) for name in ("node", "weight", "at", "id"))
_NODE_NAME = re.compile(r"[^\s,\[\]]{1,255}")


def observations_of_rows(values: Any) -> list[Observation]:
    """Rows as values; columns are looked at as a whole, since there may be very many.

    Raises:
        ValueError: one of them is not an observation.
    """
    if type(values) is not list:
        raise ValueError("the observations are not a list")
    if not values:
        return []
    try:
        columns = list(zip(*values, strict=True))
        sound = len(columns) == len(_COLUMN_TYPES) and all(
            set(map(type, column)) <= types for column, types in zip(columns, _COLUMN_TYPES, strict=True)
        )
        sound = sound and all(map(is_node, set(columns[_NODE]))) and all(columns[_ID])
        sound = sound and all(-MAX_WEIGHT <= weight <= MAX_WEIGHT for weight in columns[_WEIGHT])
        sound = sound and all(-MAX_TIME_S <= at <= MAX_TIME_S for at in columns[_AT])  # NaN is in no bounds
    except TypeError:
        sound = False
    if not sound:
        raise ValueError("a row is not an observation")
    kinds = (_KINDS.get(kind, kind) for kind in columns[0])  # those of a newer slurmft are kept as they are
    return list(map(Observation._make, zip(kinds, *columns[1:], strict=True)))


def sound_rows(values: Any) -> list[Observation]:
    """The rows that are valid observations."""
    found = []
    for value in values if type(values) is list else []:
        try:
            found += observations_of_rows([value])
        except ValueError:
            continue
    return found


def is_node(name: str) -> bool:
    """Whether a node can have this name, in the syntax of hostlists."""
    return bool(_NODE_NAME.fullmatch(name)) and name.isprintable()


def manual_entries(values: Any) -> tuple[list[ManualEntry], bool]:
    """The exclusions by hand as they are stored, and whether all of them are valid."""
    found = []
    for value in values if type(values) is list else []:
        with contextlib.suppress(KeyError, TypeError, StorageError):
            fields = {name: value[name] for name in ("node", "reason", "who", "at", "until")}
            found.append(checked_entry(ManualEntry(**fields)))
    return found, type(values) is list and len(found) == len(values)


def checked_observation(observation: Observation, now: float) -> Observation:
    """As it is stored: finite, not from the future, no longer than it may be.

    Raises:
        StorageError: its weight or time is not a number, or it has no id.
    """
    if not _is_time(observation.at) or not -float("inf") < observation.weight < float("inf"):
        raise StorageError(f"an observation of {observation.node[:80]!r} has a weight or time that is not a number")
    if not observation.node or not observation.id:
        raise StorageError("an observation names no node, or has no id")
    weight = max(-MAX_WEIGHT, min(MAX_WEIGHT, float(observation.weight)))
    return observation._replace(
        weight=weight, at=min(float(observation.at), now), evidence=observation.evidence[:MAX_TEXT]
    )


def checked_entry(entry: ManualEntry) -> ManualEntry:
    """As it is stored.

    Raises:
        StorageError: it names no node, or a time that is none.
    """
    if type(entry.node) is not str or not is_node(entry.node):
        raise StorageError("an exclusion by hand names no node")
    if not _is_time(entry.at) or not (entry.until is None or _is_time(entry.until)):
        raise StorageError(f"the exclusion of {entry.node[:80]!r} has a time that is not a number")
    if type(entry.reason) is not str or type(entry.who) is not str:
        raise StorageError(f"the exclusion of {entry.node[:80]!r} has a reason or author that is not a text")
    return replace(entry, reason=entry.reason[:MAX_TEXT])


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_TIME_S


# --- The exclusion list of a cluster and user, or group: one versioned file that any number of processes add to ---

LOCK_TIMEOUT_S = 20.0
MERGE_FROM = 16
"""Number of small files from which on each writer of one tries to merge them."""

TIDY_FROM = 5000
"""Observations from which on ``tidy`` looks for those that have faded."""

LEFT_OVER_S = 86_400.0
"""Age from which on ``gc`` removes files of killed writers, and small files that cannot be read."""

MAX_REVISION = 10**15

log = logging.getLogger(__name__)
_START = b'{"format":'
_TORN, _NOT_OURS = "it is torn", "it is not an exclusion list"
_HINT = "move it away and run again; nodes that it excluded will then be used again"


_Change = Callable[[list[Observation], list[ManualEntry]], None]
"""Changes the content of a list, in place."""


class Exclusions:
    """The content of a list when it was read. Observations are parsed on demand.

    Damaged parts are left out and named by ``damage``: a damaged list must not stop a run.
    """

    def __init__(
        self, observations: Iterable[Observation] = (), manual: Iterable[ManualEntry] = (), revision: int = 0,
        *, stored: Callable[[], tuple[list[Observation], str]] | None = None, damage: str = "",
    ) -> None:  # fmt: skip
        self.manual = tuple(manual)
        self.revision = revision
        """How often the list was written."""
        self._more = tuple(observations)
        self._stored = stored
        self._damage = damage

    @cached_property
    def observations(self) -> tuple[Observation, ...]:
        """Each once, by its id."""
        stored, damage = self._stored() if self._stored is not None else ([], "")
        self._damage = self._damage or damage
        by_id = {each.id: each for each in (*self._more, *stored)} if self._more else None
        return tuple(stored) if by_id is None else tuple(by_id.values())

    @property
    def damage(self) -> str:
        """The damage of the list, where, and its consequence, as one sentence; empty where there is none."""
        _ = self.observations
        return self._damage


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """Counts of what ``gc`` removed and kept."""

    observations: int
    manual: int
    files: int
    kept: int


class ExclusionList:
    """One shared list. Creating the object changes nothing on disk.

    Guarantees: when ``observe``, ``exclude`` and ``remove`` return, their change is on disk and stays in the list, with
    any number of concurrent writers, of which some may be killed; readers see each change whole. A missing list is
    empty.
    """

    def __init__(
        self, path: Path, mode: int = 0o600, *, clock: Callable[[], float] = time.time, host: str = ""
    ) -> None:
        self._refused: StorageError | None = None
        try:
            path = followed(path)  # else a link would be replaced by a list of its own
        except StorageError as error:
            self._refused = error
        self.path = path
        self._mode = mode
        self._clock = clock
        self._host = host or os.uname().nodename
        self._new = path.with_name(f"{path.name}.new")
        self._handed_in: set[str] = set()

    def read(self) -> Exclusions:
        """The list as it is now; damaged parts of it are left out (``Exclusions.damage``).

        Raises:
            NewerFormat: a newer slurmft wrote it.
            StorageError: it cannot be read, or is not a file.
        """
        found = [observation for _, observations in self._read_new() for observation in observations]
        return self._read_list(found)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Add observations; those with an id that is there already change nothing. Does not wait for a lock.

        Raises:
            StorageUnavailable: no space, read-only, and the like.
            StorageError: it cannot be written, or a weight or time is not a number.
        """
        now = self._clock()
        added = [checked_observation(each, now) for each in observations if each.id not in self._handed_in]
        for stranger in {each.node for each in added if not is_node(each.node)}:
            log.warning("%s cannot be the name of a node; observations of it are not kept", ascii(stranger[:80]))
        added = [each for each in added if is_node(each.node)]
        if not added:
            return
        self._make_folders()
        name = f"{time.time_ns():020d}-{secrets.token_hex(6)}.json"
        text = f'{{"format": {files.FORMAT}, "observations": [\n{_rows(added)}\n]}}\n'
        with writing(self._new / name):
            files.replace_atomically(self._new / name, text, mode=self._mode, group=self._group())
        self._handed_in.update(each.id for each in added)
        with contextlib.suppress(OSError):
            if len(self._new_files()) >= MERGE_FROM:
                self._merge_if_nobody_does()

    def exclude(self, *entries: ManualEntry) -> None:
        """Keep nodes out by hand; an entry replaces an older one of the same node by the same person.

        Raises:
            StorageError: as ``observe``; or another process holds the list.
        """
        given = {(entry.node, entry.who): entry for entry in map(checked_entry, entries)}

        def change(observations: list[Observation], manual: list[ManualEntry]) -> None:
            manual[:] = [entry for entry in manual if (entry.node, entry.who) not in given] + list(given.values())

        self._change(change)

    def remove(self, nodes: str | Sequence[str], who: str) -> list[str]:
        """Clear all earlier observations of these nodes; returns those of them that had any.

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
        """Remove faded and expired entries; no node's standing changes.

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
        """``gc`` when it has become long, and no other process writes. Never waits, never raises."""
        if len(found.observations) < TIDY_FROM:
            return

        def change(observations: list[Observation], manual: list[ManualEntry]) -> None:
            observations[:] = worth_keeping(observations, now, rules)

        self._merge_if_nobody_does(change)

    # the small files

    def _check_place(self) -> None:
        """Return when no link of another user decides where the list, or its folder of small files, lies.

        Raises:
            StorageError: one does.
        """
        if self._refused is not None:
            raise self._refused
        if self._new.is_symlink():
            raise StorageError(f"{self._new} is a symbolic link; slurmft makes a folder there", hint="remove it")

    def _new_files(self) -> list[str]:
        self._check_place()
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
                content = files.read_bytes(path, limit_bytes=files.LOG_LIMIT_BYTES, follow=False)
            except FileNotFoundError:  # merged meanwhile: the list, which is read after these, has it
                continue
            except (files.UnsafeFile, PermissionError) as error:
                log.warning("%s cannot be read and is left out: %s", path, error.strerror)
                continue
            except OSError as error:
                raise translated(f"cannot read {path}", error) from error
            try:
                value = files.parse_json(content)
                if value["format"] > files.FORMAT:
                    raise _newer(path, value["format"])
                observations = observations_of_rows(value["observations"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StorageError) as error:
                if isinstance(error, NewerFormat):
                    raise
                log.warning("%s cannot be read and is left out: %s", path, error)
                continue
            yield path, observations

    # the list itself

    def _read_list(self, found: Sequence[Observation]) -> Exclusions:
        """``found`` and what the list itself holds."""
        try:
            owners = None if self._mode & 0o070 else files.trusted_owners(self.path.parent)
            content = files.read_bytes(self.path, limit_bytes=files.LOG_LIMIT_BYTES, owners=owners, follow=False)
        except FileNotFoundError:
            return Exclusions(found)
        except files.UnsafeFile as error:
            raise StorageError(f"cannot read {self.path}: it {error.strerror}", hint=_HINT) from error
        except OSError as error:
            raise translated(f"cannot read {self.path}", error) from error
        # two lines of head, then a line for each observation: lines are parsed and copied only on demand
        match = re.match(rb'\{"format": (\d{1,9}), "crc": (\d{1,10}),\n', content)
        if match is None or int(match[1]) > files.FORMAT:
            self._refuse_newer(content, int(match[1]) if match is not None else None)
            start = content[: len(_START)].strip(b"\0 \r\n\t")
            return Exclusions(found, damage=self._damage(_TORN if _START.startswith(start) else _NOT_OURS))
        if zlib.crc32(memoryview(content)[match.end() :]) != int(match[2]):
            return Exclusions(found, damage=self._damage("its checksum is wrong"))
        try:
            facts = files.parse_json(b"{" + content[match.end() : content.index(b"\n", match.end())] + b"]}")
            entries, revision = facts["manual"], facts["revision"]
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return Exclusions(found, damage=self._damage("it has no head"))
        manual, whole = manual_entries(entries)
        damage = "" if whole else self._damage("an exclusion by hand is invalid")
        if type(revision) is not int or not 0 <= revision < MAX_REVISION:
            revision, damage = 0, self._damage("its revision is not a number")
        return Exclusions(found, manual, revision, stored=lambda: self._stored(content), damage=damage)

    def _stored(self, content: bytes) -> tuple[list[Observation], str]:
        """The observations in the list, and its damage."""
        try:
            rows = files.parse_json(content)["observations"]
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return [], self._damage("its observations cannot be read")
        try:
            return observations_of_rows(rows), ""
        except ValueError:
            return sound_rows(rows), self._damage("a row is not an observation")

    def _damage(self, why: str) -> str:
        return f"{self.path} is damaged: {why}; what cannot be believed is ignored, and set aside at the next change"

    def _set_aside(self, damage: str) -> None:
        """Keep a copy of the file that is about to be replaced."""
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        with writing(aside):
            try:
                aside.hardlink_to(self.path)
            except FileNotFoundError:
                return
            except OSError:  # a filesystem without links
                self.path.rename(aside)
        log.warning("%s: it is kept as %s", damage, aside)

    def _refuse_newer(self, content: bytes, version: int | None) -> None:
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            version = files.parse_json(content).get("format") if version is None else version
        if type(version) is int and version > files.FORMAT:
            raise _newer(self.path, version)

    def _change(self, change: _Change) -> None:
        self._make_folders()
        lock = self._lock()
        with lock.hold(LOCK_TIMEOUT_S):
            self._merge(lock, change)

    def _merge_if_nobody_does(self, change: _Change = lambda *_: None) -> None:
        """The observations are on disk already: a list that cannot be written does not matter here."""
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
        found = self._read_list([each for _, few in new for each in few])
        observations, manual = list(found.observations), list(found.manual)
        change(observations, manual)
        entries = json.dumps([asdict(entry) for entry in manual])
        rest = f'"revision": {found.revision + 1}, "manual": {entries}, "observations": [\n{_rows(observations)}\n]}}\n'
        text = f'{{"format": {files.FORMAT}, "crc": {zlib.crc32(rest.encode())},\n{rest}'
        if not lock.is_ours():
            raise StorageUnavailable(f"{lock.path} was taken from us: this process was stopped for too long")
        if _NOT_OURS in found.damage:
            raise StorageError(f"{self.path} is no exclusion list of slurmft, and is left as it is", hint=_HINT)
        if found.damage:
            self._set_aside(found.damage)
        with writing(self.path):
            files.replace_atomically(self.path, text, mode=self._mode, group=self._group())
        for path, _ in new:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # in another user's folder: it is in the list as well, and counts once
                log.warning("%s cannot be removed: %s", path, error.strerror)

    def _lock(self) -> SoftLock:
        return SoftLock(self.path.with_name(f"{self.path.name}.lock"), mode=self._mode, host=self._host)

    # folders and modes

    def _make_folders(self) -> None:
        self._check_place()
        for folder in (self.path.parent, self._new):
            if folder.is_dir():
                continue
            mode = self._mode | (self._mode & 0o444) >> 2  # users that may read a file may enter its folder
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                if self._mode & 0o070:
                    with contextlib.suppress(PermissionError):
                        os.chown(folder, -1, folder.parent.stat().st_gid)
                    mode |= 0o2000  # files in it belong to its group, independent of their creator
                folder.chmod(mode)

    def _group(self) -> int | None:
        return self.path.parent.stat().st_gid if self._mode & 0o070 else None

    def _remove_left_overs(self) -> int:
        removed = 0
        prefix = f".{self.path.name}."
        strays = [path for path in self.path.parent.glob(f"{prefix}*") if path.name.endswith(".tmp")]
        for path in [*strays, *self._new.glob("*.json"), *self._new.glob(".*.tmp")]:
            with contextlib.suppress(OSError):
                if self._clock() - path.stat().st_mtime > LEFT_OVER_S:
                    path.unlink()
                    removed += 1
        return removed


def _rows(observations: Iterable[Observation]) -> str:
    return ",\n".join(map(json.dumps, observations))


def _newer(path: Path, version: int) -> NewerFormat:
    return NewerFormat(f"{path} has format {version}; this slurmft reads up to {files.FORMAT}", hint="upgrade slurmft")
