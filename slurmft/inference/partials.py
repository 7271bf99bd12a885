"""Checkpoints of requests: what engines have generated so far, so that another one goes on from there.

In memory they belong to the one that talks to the engine. In the run folder a replica keeps them in a file of its own
in ``partials``, a segment as answers have them: a line for each request that has grown, with what is new. Nothing
counts on them: one that is lost, damaged, too old or of another engine costs the time to compute it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.config.inference import EngineConfig
from slurmft.errors import StorageError
from slurmft.inference.ledger import SEGMENT_NAME
from slurmft.inference.requests import SegmentWriter, read, segment_name
from slurmft.policy.streams import Prefix
from slurmft.system.files import fsync_folder

FORMAT = 1
MAX_FILE_BYTES = 64 << 20
"""A file that has grown to this is written anew with what is in flight."""

MAX_READ_BYTES = 256 << 20
"""Of what earlier starts left behind, the newest files first."""

CLOCKS_S = 60.0
"""By so much clocks of nodes may differ."""

SAVE_INTERVAL_S = 1.0
"""Between two writes of a replica's file."""

NOTE_S = 0.2
"""Between two notes of what one request has so far."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    prefix: Prefix
    at_s: float
    saved: int = 0
    """Characters that ``changes`` has handed out."""

    @property
    def size_bytes(self) -> int:
        return sys.getsizeof(self.prefix.text)


class RequestCheckpointer:
    """The text that requests in flight have so far, by their ids.

    An entry that was not noted anew for ``expire_after_s`` is gone; where there are too many, or they are too large,
    the one that was noted longest ago goes first. Used by one thread.

    Args:
        max_bytes: of memory, for all texts together.
        now: seconds since 1970.
    """

    def __init__(
        self, *, expire_after_s: float = 3600.0, max_entries: int = 65536, max_bytes: int = 256 << 20,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._expire_after_s, self._max_entries, self._max_bytes = expire_after_s, max_entries, max_bytes
        self._now = now
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, request_id: str, text: str, *, tokens: int = 0, prompt_tokens: int | None = None) -> None:
        """The beginning of this request's answer is ``text``, all of it, in so many tokens."""
        self._put(request_id, Prefix(text, tokens, prompt_tokens), self._now())

    def take(self, request_id: str) -> Prefix | None:
        """The beginning of this request's answer, for the one that goes on from there; None when none is known."""
        entry = self._drop(request_id)
        return None if entry is None or self._is_expired(entry.at_s) else entry.prefix

    def forget(self, request_id: str) -> None:
        """It has its answer."""
        self._drop(request_id)

    def changes(self) -> list[dict[str, Any]]:
        """What has grown since the last call, as records for a file; each is the text from some character on."""
        records = []
        for request_id, entry in self._entries.items():
            prefix = entry.prefix
            if len(prefix.text) > entry.saved:
                records.append({
                    "request": request_id, "from": entry.saved, "text": prefix.text[entry.saved :],
                    "tokens": prefix.tokens, "prompt_tokens": prefix.prompt_tokens, "at": entry.at_s,
                })  # fmt: skip
                entry.saved = len(prefix.text)
        return records

    def begin_anew(self) -> None:
        """The next ``changes`` are for an empty file."""
        for entry in self._entries.values():
            entry.saved = 0

    def adopt(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take over what another one's ``changes`` were; of two texts of a request the longer one is kept.

        Raises:
            TypeError: one is no such record.
        """
        found: dict[str, tuple[list[str], int, Mapping[str, Any]]] = {}
        for record in records:
            _check(record)
            name, text = record["request"], record["text"]
            if record["from"] == 0:
                found[name] = [text], len(text), record
            elif name in found and found[name][1] == record["from"]:
                found[name][0].append(text)
                found[name] = found[name][0], record["from"] + len(text), record
            else:  # its beginning is missing
                found.pop(name, None)
        for name, (parts, length, last) in found.items():
            known = self._entries.get(name)
            if not self._is_expired(last["at"]) and (known is None or len(known.prefix.text) < length):
                prefix = Prefix("".join(parts), last["tokens"], last["prompt_tokens"])
                self._put(name, prefix, min(last["at"], self._now()))

    def _put(self, request_id: str, prefix: Prefix, at_s: float) -> None:
        before = self._drop(request_id)
        if not prefix.text:
            return
        entry = _Entry(prefix, at_s)
        if before is not None and prefix.text.startswith(before.prefix.text):
            entry.saved = before.saved
        self._entries[request_id] = entry
        self._bytes += entry.size_bytes
        while self._entries and (
            len(self._entries) > self._max_entries
            or self._bytes > self._max_bytes
            or self._is_expired(next(iter(self._entries.values())).at_s)
        ):
            self._drop(next(iter(self._entries)))

    def _drop(self, request_id: str) -> _Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._bytes -= entry.size_bytes
        return entry

    def _is_expired(self, at_s: float) -> bool:
        return self._now() - at_s > self._expire_after_s


class CheckpointFile:
    """The file in which one replica keeps the checkpoints of its requests, one for each epoch of its agent.

    Args:
        owner: ``generation``, ``node``, ``replica`` and ``life``.
        engine: its fingerprint.
    """

    def __init__(self, folder: Path, owner: Mapping[str, int], engine: str, checkpointer: RequestCheckpointer) -> None:
        self._folder, self._owner, self._engine, self._checkpointer = partials_of(folder), owner, engine, checkpointer
        self.epoch = 0
        """Of the newest lease; what is written from now on is for it."""

        self._segment: SegmentWriter | None = None
        self._segment_epoch = -1
        self._is_writing = asyncio.Lock()

    async def save_regularly(self) -> None:
        """Save again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self.save()

    async def save(self) -> None:
        """Return when all that was noted is on the disk; an error is logged, since nothing depends on it."""
        async with self._is_writing:
            epoch = self.epoch
            is_full = self._segment is not None and self._segment.end > MAX_FILE_BYTES
            anew = is_full or epoch != self._segment_epoch
            if anew:
                self._checkpointer.begin_anew()
            if not (records := self._checkpointer.changes()):
                return
            try:
                await asyncio.to_thread(self._begin if anew else self._append, records, epoch)
            except (OSError, StorageError) as error:
                log.warning("checkpoints of requests cannot be written: %s", error)
                self._checkpointer.begin_anew()

    def _append(self, records: Iterable[Mapping[str, Any]], _epoch: int) -> None:
        assert self._segment is not None
        self._segment.append(records)
        self._segment.sync()

    def _begin(self, records: Iterable[Mapping[str, Any]], epoch: int) -> None:
        """Write a new file, with all that is in flight, and have it take the place of the old one."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / segment_name(**self._owner, epoch=epoch)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        header = {**self._owner, "epoch": epoch, "engine": self._engine, "partials": FORMAT}
        segment = SegmentWriter(temporary, header)
        try:
            segment.append(records)
            segment.sync()
            temporary.rename(path)
        except OSError:
            segment.close()
            raise
        fsync_folder(self._folder)
        if self._segment is not None:
            self._segment.close()
        self._segment, self._segment_epoch = segment, epoch


def partials_of(folder: Path) -> Path:
    """Where replicas keep checkpoints of requests."""
    return folder / "partials"


def fingerprint(engine: EngineConfig) -> str:
    """Text of an engine is continued by the same one alone: a digest of what decides what it generates."""
    facts = {name: getattr(engine, name) for name in ("command", "callable", "url", "request_path")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def records_in(folder: Path, name: str, engine: str) -> Iterator[dict[str, Any]]:
    """The records of a file, up to the first that is torn; none when it is gone, or of another engine or generation."""
    path = partials_of(folder) / name
    if not SEGMENT_NAME.fullmatch(name) or not path.exists():
        return
    try:
        for record in read(path):
            if record.start == 0:
                facts = [record.value.get(key) for key in ("partials", "engine", "generation")]
                if facts != [FORMAT, engine, int(name[1:].partition("-")[0])]:
                    return
            elif _is_record(record.value):
                yield record.value
            else:
                return
    except StorageError as error:
        log.warning("checkpoints of requests are not used: %s", error)


def left_behind(folder: Path, engine: str, *, expire_after_s: float) -> dict[int, tuple[str, ...]]:
    """Which files hold text of which requests (their numbers); expired files are deleted.

    Raises:
        StorageError: the folder cannot be looked into.
    """
    files = []
    try:
        with os.scandir(partials_of(folder)) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                if time.time() - facts.st_mtime > expire_after_s + CLOCKS_S:
                    Path(entry.path).unlink(missing_ok=True)
                elif SEGMENT_NAME.fullmatch(entry.name):
                    files.append((facts.st_mtime, facts.st_size, entry.name))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"cannot look into {partials_of(folder)}: {error.strerror or error}") from error
    found: dict[int, tuple[str, ...]] = {}
    room = MAX_READ_BYTES
    for _, size, name in sorted(files, reverse=True):
        room -= size
        if room < 0:
            break
        for number in {each["request"] for each in records_in(folder, name, engine)}:
            if number.isdecimal():
                found[int(number)] = (*found.get(int(number), ()), name)
    return found


def forget_all(folder: Path) -> None:
    """Delete the checkpoints of a batch that is finished; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        for path in partials_of(folder).iterdir():
            path.unlink(missing_ok=True)
        partials_of(folder).rmdir()


def _is_record(value: Mapping[str, Any]) -> bool:
    try:
        _check(value)
    except (KeyError, TypeError):
        return False
    return True


def _check(record: Mapping[str, Any]) -> None:
    counts = [record["from"], record["tokens"], 0 if record["prompt_tokens"] is None else record["prompt_tokens"]]
    is_text = isinstance(record["request"], str) and isinstance(record["text"], str)
    is_time = isinstance(record["at"], int | float) and math.isfinite(record["at"])
    if not is_text or not is_time or not all(type(each) is int and each >= 0 for each in counts):
        raise TypeError("not a record of a request's checkpoint")
