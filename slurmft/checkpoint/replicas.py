"""Copies of shards and notes of steps: on the node's own disk, in its memory, and in that of other nodes. No torch.

In one piece, since the sender and the keeper that takes the copies are the two ends of one protocol.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import mmap
import os
import random
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NoReturn

import xxhash

from slurmft.checkpoint.image_file import (
    MAX_INDEX_BYTES,
    Damaged,
    Item,
    ShardIndex,
    fingerprint,
    holdings_in,
    image_of,
    parse_index,
    read_index,
    write_index,
)
from slurmft.errors import StorageError, UsageError
from slurmft.policy.checkpoints import Name, Tier, copy_holders
from slurmft.policy.values import Strangers
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import (
    KEY_FILE,
    MAX_STEP,
    MEMORY_VARIABLE,
    PEERS,
    RUN_FOLDER_VARIABLE,
    Identity,
    announcement,
    read_copies_key,
    read_generation,
)
from slurmft.system.files import (
    NONCE_BYTES,
    TAG_BYTES,
    PieceTags,
    UnsafeFile,
    check_private,
    derived_key,
    new_nonce,
    open_regular,
    opened,
    own_folders,
    prefix,
    read_bytes,
    read_json,
    write_bytes,
)
from slurmft.system.foreign_text import log_to_stderr
from slurmft.system.processes import die_with_parent, fits

# --- slots ---
# Two places for each shard in a folder of copies: a newer image replaces the older one of two, once it is verified.
#
# An index (``shard-3.a.json``) lies there only while its image (``shard-3.a.image``) is whole. The files are written
# over in place: pages that are there already cost a quarter of new ones.


class Mismatch(Exception):
    """The bytes are not those that the index describes."""


class Verifier:
    """Compares the items of an image that pass by, piece by piece, with their digests."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._item = next(self._items, None)
        self._hash, self._done = xxhash.xxh3_128(), 0

    def feed(self, chunk: memoryview) -> None:
        """The next bytes.

        Raises:
            Mismatch: an item that ends in them is damaged, or there are more bytes than items.
        """
        while self._item is not None:
            piece = chunk[: self._item.length - self._done]
            self._hash.update(piece)
            self._done += len(piece)
            chunk = chunk[len(piece) :]
            if self._done < self._item.length:
                break
            if self._hash.hexdigest() != self._item.digest:
                raise Mismatch(f"{self._item.key} differs from its digest")
            self._item = next(self._items, None)
            self._hash, self._done = xxhash.xxh3_128(), 0
        if len(chunk):
            raise Mismatch("there are more bytes than the index lists")

    def finish(self) -> None:
        """Return when nothing is missing.

        Raises:
            Mismatch: bytes are.
        """
        self.feed(memoryview(b""))  # items without bytes end here
        if self._item is not None:
            raise Mismatch("bytes are missing")


class Incoming:
    """One image on its way into a folder: in the place of the older of two, and trusted only when all of it is there.

    As a context manager it leaves nothing of an image that was not finished.

    Args:
        items: those that come, in order; all of them unless given. The others are holes in the file.
        keep: a snapshot that is not written over, even where it is the older one.

    Raises:
        OSError: there is no room, or the folder is gone.
    """

    def __init__(
        self, folder: Path, index: ShardIndex, items: Sequence[Item] | None = None, *, keep: Name | None = None
    ) -> None:
        self._index = index
        self._path = place_for(folder, index, keep)
        self._path.unlink(missing_ok=True)
        self._verifier = Verifier(index.items if items is None else items)
        self._ranges = ranges_of(index.items if items is None else items)
        self._file = open_regular(image_of(self._path), os.O_RDWR | os.O_CREAT, follow=False)
        self._finished = False

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_error: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the image unless it was finished; nothing more can be written. Idempotent."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        if not self._finished:
            with contextlib.suppress(OSError):
                image_of(self._path).unlink(missing_ok=True)

    def write(self, chunk: memoryview) -> None:
        """The next bytes of the image.

        Raises:
            Mismatch: they are not the right ones.
            OSError: they cannot be written.
        """
        self._verifier.feed(chunk)
        while chunk:
            offset, length = self._ranges[0]
            count = os.pwrite(self._file, chunk[:length], offset)
            chunk = chunk[count:]
            self._ranges[:1] = [(offset + count, length - count)] if count < length else []

    def finish(self) -> None:
        """The image is whole: from now on it is offered.

        Raises:
            Mismatch: bytes are missing.
            OSError: it cannot be written.
        """
        self._verifier.finish()
        os.ftruncate(self._file, self._index.size_bytes)
        if not os.path.samestat(os.fstat(self._file), image_of(self._path).stat()):
            raise FileNotFoundError(f"{image_of(self._path)} was replaced by another process")
        write_index(self._path, self._index, durable=False)
        self._finished = True


def ranges_of(items: Iterable[Item]) -> list[tuple[int, int]]:
    """Where bytes of these items lie, as (offset, length), neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for item in items:
        if ranges and sum(ranges[-1]) == item.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + item.length)
        elif item.length:
            ranges.append((item.offset, item.length))
    return ranges


def place_for(folder: Path, index: ShardIndex, keep: Name | None = None) -> Path:
    """The index path of the place that an image goes to: a free one, else that of the older, but not of ``keep``."""
    places = [folder / f"shard-{index.shard}.{letter}.json" for letter in "ab"]
    held = {one.index_path: one for one in holdings_in(folder, Tier.PEER) if one.index_path in places}
    free = [place for place in places if place not in held]
    return (
        free[0] if free else min(places, key=lambda place: (held[place].name == keep, held[place].index.identity.age))
    )


def remove_unfinished(folder: Path) -> None:
    """Remove incomplete files of dead processes; call while no process writes here."""
    for path in (*folder.glob("shard-*.image"), *folder.glob(".*")):
        if path.name.startswith(".") or not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def remove_stale(folder: Path, keep: Name | None = None) -> None:
    """Remove images that no restart can need any more: older than the two newest snapshots in ``folder``.

    They belong to shards that the run has no more, since it goes on with fewer ranks. What is to be kept stays.
    """
    held = holdings_in(folder, Tier.PEER)
    newest = sorted({one.index.identity for one in held}, key=lambda one: one.age, reverse=True)[:2]
    for one in held:
        if one.index.identity not in newest and one.name != keep:
            one.index_path.unlink(missing_ok=True)
            one.image.unlink(missing_ok=True)


# --- How a copy of a shard travels between nodes: authenticated lines, and the image in authenticated pieces ---
#     keeper  -> sender   nonce
#     sender  -> keeper   nonce, then {index_bytes} and the index
#     keeper  -> sender   {"answer": "send"} or why not
#     sender  -> keeper   the image: pieces of PIECE_BYTES, the last one shorter, each followed by its tag
#     keeper  -> sender   {"answer": "kept"} or why not
#
# Notes on each step (``notes.NoteSender``) travel in the same way, on a connection that stays:
#
#     sender  -> keeper   {note, name, generation, capacity, bytes} and the note, again and again, ahead of the answers
#     keeper  -> sender   {"answer": "kept"} or why not, for each
#
# Each line and the index carry a HMAC under a key that is derived from the run's key and both nonces, bound to the
# direction and the place in the sequence. The image's key is derived from that one and the index, which names run
# generation, step, shard and length; its tags are those of ``system.files``. So only holders of the run's key
# are accepted, recorded messages cannot be replayed, and a piece is checked before it is used. Nothing that is sent is
# ever run: lines and indexes are JSON, the image is bytes. All of it is authentic, not confidential.
#
# Version 1 sent the image without tags. There is no negotiation: the version is part of the key, and a side of another
# version is a stranger.

MAX_LINE_BYTES = 16 * 1024
CHUNK_BYTES = 1 << 20
PIECE_BYTES = CHUNK_BYTES
"""Of an image between two tags; part of the protocol."""

SILENCE_S = 20.0
"""How long either side may be silent before the other one gives it up."""

_LENGTH = struct.Struct("!I")


class BadCopy(Exception):
    """The other side is a stranger, has another version, or violates the protocol; the connection is closed."""


class Wire:
    """One authenticated connection, blocking, with a limit on every wait. Close it after use, as a context manager.

    Raises, from every method: BadCopy; OSError (TimeoutError too) where the connection breaks or stalls.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, is_keeper: bool, deadline: float) -> None:
        self._socket = connection
        self.deadline = deadline
        """By the monotonic clock; nothing waits beyond it."""

        self.silence_s = SILENCE_S

        with contextlib.suppress(OSError):  # lines are short, and each one is waited for
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = new_nonce()
        if is_keeper:
            self._send_all(mine)
            nonces = mine, self._receive_exactly(NONCE_BYTES)
        else:
            nonces = self._receive_exactly(NONCE_BYTES), mine
            self._send_all(mine)
        self._key = derived_key(secret, "copies", *nonces)
        self._mine, self._theirs = (b"k", b"s") if is_keeper else (b"s", b"k")
        self._sent = self._received = 0
        self._tags = PieceTags(b"", 0)
        self._buffer = memoryview(b"")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send one line."""
        line = json.dumps(message, separators=(",", ":")).encode()
        self._send_all(_LENGTH.pack(len(line)))
        self.send_blob(line)

    def receive(self) -> dict[str, Any]:
        """The next line; it is authentic."""
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > MAX_LINE_BYTES:
            raise BadCopy("a line is too long")
        line = self.receive_blob(length)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadCopy("a line is not JSON") from error
        if not isinstance(message, dict):
            raise BadCopy("a line is not an object")
        return message

    def has_more(self) -> bool:
        """Whether ``receive`` would find something at once: a line, or that the connection has ended."""
        self._socket.settimeout(0.0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        return True

    def send_blob(self, blob: bytes) -> None:
        """Send bytes of which the other side knows how many there are."""
        text = self._mine + str(self._sent).encode() + b" "
        self._sent += 1
        self._send_all(hmac.new(self._key, text + blob, hashlib.sha256).digest() + blob)

    def receive_blob(self, length: int) -> bytes:
        """``length`` bytes; they are authentic."""
        mac = self._receive_exactly(TAG_BYTES)
        blob = self._receive_exactly(length)
        self._check(mac, blob)
        return blob

    def begin_image(self, index: bytes, size_bytes: int) -> None:
        """From now on the pieces of the image go, ``size_bytes`` in all, that this index describes."""
        self._tags = PieceTags(derived_key(self._key, "image", hashlib.sha256(index).digest()), size_bytes)
        self._buffer = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))

    def room(self, length: int) -> memoryview:
        """Room for a piece of the image that is to be sent; ``length`` is at most PIECE_BYTES."""
        return self._buffer[:length]

    def send_piece(self, length: int) -> None:
        """Send what lies in ``room``."""
        self._buffer[length : length + TAG_BYTES] = self._tags.next_tag(self._buffer[:length])
        self._send_all(self._buffer[: length + TAG_BYTES])

    def receive_piece(self, length: int) -> memoryview:
        """The image's next piece, ``length`` bytes; it is authentic, and valid until the next one."""
        whole = self._buffer[: length + TAG_BYTES]
        self._fill(whole)
        if not self._tags.is_next(whole[:length], whole[length:]):
            raise BadCopy("a piece of the image is not authentic")
        return whole[:length]

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            self._limit()
            count = self._socket.recv_into(buffer)
            if not count:
                raise BadCopy("the connection ended in the middle")
            buffer = buffer[count:]

    def _check(self, mac: bytes, blob: bytes) -> None:
        text = self._theirs + str(self._received).encode() + b" "
        self._received += 1
        if not hmac.compare_digest(mac, hmac.new(self._key, text + blob, hashlib.sha256).digest()):
            raise BadCopy("what was received is not authentic")

    def _send_all(self, blob: bytes | memoryview) -> None:
        view = memoryview(blob)
        while view:
            self._limit()
            view = view[self._socket.send(view) :]

    def _receive_exactly(self, length: int) -> bytes:
        received = bytearray()  # it grows with what comes: a stranger may announce any length
        while len(received) < length:
            piece = memoryview(bytearray(min(length - len(received), CHUNK_BYTES)))
            self._fill(piece)
            received += piece
        return bytes(received)

    def _limit(self) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        self._socket.settimeout(min(left_s, self.silence_s))


# --- local tier ---
# Copies of a node's own shards on its local disk, for a restart on the same node. No torch.
#
#     <local_directory>/slurmft-<user id>/<lineage>/shard-<shard>.<a|b>.image and .json     the newest two
#
# A lineage is one checkpoint directory's history, by a number that is drawn once and lies in it: a run that was begun
# anew under an old name does not find copies of the old one on some node. Nothing here is durable, or has to be.

LINEAGE_FILE = "lineage.json"
_LINEAGE = re.compile(r"[0-9a-f]{32}")

log = logging.getLogger(__name__)


def local_folder(local_directory: Path, checkpoint_dir: Path) -> Path:
    """This lineage's folder on the local disk, private; made where it does not exist.

    Raises:
        OSError: it cannot be made.
        StorageError: the lineage cannot be read.
    """
    folder = _own_folder(local_directory) / lineage_of(checkpoint_dir)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def _own_folder(local_directory: Path) -> Path:
    """This user's folder; under a random name where another user has taken the usual one."""
    mine, other_name = local_directory / f"slurmft-{os.geteuid()}", prefix("slurmft-local")
    try:
        mine.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(mine)
    except (FileExistsError, UnsafeFile) as error:
        log.warning("%s is not a folder of yours alone: %s", mine, error.strerror)
        if not own_folders(local_directory, other_name):
            mkdtemp(dir=local_directory, prefix=other_name)
        return own_folders(local_directory, other_name)[0]
    return mine


def lineage_of(checkpoint_dir: Path) -> str:
    """The number of this directory's history; drawn by the first rank that asks, of all that may ask at once.

    Raises:
        OSError, StorageError: it can be neither read nor written.
    """
    path = checkpoint_dir / LINEAGE_FILE
    if (value := read_json(path)) is None:
        checkpoint_dir.mkdir(parents=True, exist_ok=True)
        draft = checkpoint_dir / f".{LINEAGE_FILE}.{secrets.token_hex(8)}.tmp"
        try:
            write_bytes(draft, f'{{"format": 1, "lineage": "{secrets.token_hex(16)}"}}\n'.encode())
            os.link(draft, path)  # unlike a rename it never replaces what another rank drew
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        value = read_json(path)
    lineage = (value or {}).get("lineage")
    if not isinstance(lineage, str) or not _LINEAGE.fullmatch(lineage):
        raise StorageError(f"{path} is damaged", hint="remove it; copies on local disks are forgotten then")
    return lineage


def keep_local(index_path: Path, image_path: Path, folder: Path) -> str:
    """Copy a staged shard, hashed already, to the local disk; why it is not there, else empty. Never raises."""
    try:
        with opened(image_path) as image:
            index = read_index(index_path)
            if index is None or not index.is_hashed:
                return "a newer snapshot is being staged"
            buffer = memoryview(bytearray(CHUNK_BYTES))
            with Incoming(folder, index) as incoming:
                left = index.size_bytes
                while left:
                    if not (count := os.readv(image, [buffer[: min(left, CHUNK_BYTES)]])):
                        return "a newer snapshot is being staged"
                    incoming.write(buffer[:count])
                    left -= count
                incoming.finish()
        remove_stale(folder)
    except Mismatch:
        return "a newer snapshot is being staged"  # its bytes are in the image already
    except (OSError, StorageError) as error:
        return str(error)
    return ""


# --- replication ---
# Sending copies of a shard to the keepers of other nodes, from the process that writes it to disk. No torch.

COPY_LIMIT_S = 300.0
CONNECT_S = 5.0
TRIES = 5
"""Connections that a keeper may close before it answers: strangers may have taken our place."""

_RETRY_S = 0.2


@dataclass(kw_only=True, slots=True)
class Peer:
    """A node whose keeper takes copies; ``place`` is the node's in the run (GROUP_RANK)."""

    place: int
    announcement: Path
    """Where its agent writes host names and port of the keeper."""

    addresses: Sequence[tuple[str, int]] = field(default=(), compare=False)
    """What it said, until one of them is of no use: the announcement lies in a shared place, which is not asked for
    every copy."""


def find_peers(environment: Mapping[str, str] = os.environ) -> list[Peer]:
    """The nodes that hold copies of this node's shards, in this attempt; none outside of a run, and without its key."""
    if key_file(environment) is None:
        return []
    try:
        copies = WorkerSettings.from_environment(environment).checkpoint.peer_copies
        nodes = int(environment["GROUP_WORLD_SIZE"])
        folder = Path(environment[RUN_FOLDER_VARIABLE]) / "attempts" / environment["SLURMFT_ATTEMPT"]
        holders = copy_holders(nodes, copies)[int(environment["GROUP_RANK"])]
    except (KeyError, ValueError, IndexError):
        return []
    return [Peer(place=place, announcement=announcement(folder, place)) for place in holders]


def key_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where this node's agent has left the key for copies; None outside of a run."""
    return Path(environment[MEMORY_VARIABLE]) / KEY_FILE if environment.get(MEMORY_VARIABLE) else None


def send_copy(
    index_path: Path, image_path: Path, peer: Peer, key_file: Path, *,
    limit_s: float = COPY_LIMIT_S, bytes_per_s: float | None = None, stop: threading.Event | None = None,
    keep: Identity | None = None,
) -> str:  # fmt: skip
    """Send a staged shard, hashed already; empty when the peer has all of it, verified, else why not. Never raises.

    Args:
        limit_s: a peer that cannot be reached, does not answer or is too slow costs no more.
        bytes_per_s: no faster than this, so that training keeps the network; None for no limit.
        stop: give up as soon as it is set; also done where the image is written over by a newer one.
        keep: a snapshot that the peer must still have when this one has not arrived whole.
    """
    pace = _Pace(time.monotonic(), limit_s, bytes_per_s, stop or threading.Event())
    try:
        return _send(index_path, image_path, peer, read_bytes(key_file), pace, keep=keep)
    except (BadCopy, OSError, StorageError) as error:
        peer.addresses = ()  # another agent may have taken its place in the meantime
        return str(error) or type(error).__name__


def connected(peer: Peer, key_file: Path, *, limit_s: float = COPY_LIMIT_S) -> Wire:
    """A connection to the peer's keeper, which has proved that it belongs to the run.

    Raises:
        BadCopy, OSError: there is none.
    """
    pace = _Pace(time.monotonic(), limit_s, None, threading.Event())
    connection = _connect(peer, pace)
    try:
        return Wire(connection, read_bytes(key_file), is_keeper=False, deadline=pace.deadline)
    except BaseException:
        connection.close()
        peer.addresses = ()
        raise


@dataclass(slots=True)
class _Pace:
    """When the next bytes may go, and until when."""

    started_s: float
    limit_s: float
    bytes_per_s: float | None
    stop: threading.Event

    @property
    def deadline(self) -> float:
        return self.started_s + self.limit_s

    def wait(self, seconds: float) -> None:
        """Raises TimeoutError where that would be too late, and OSError when it is not needed any more."""
        if self.stop.wait(max(0.0, min(seconds, self.deadline - time.monotonic()))):
            raise OSError("given up")
        if time.monotonic() >= self.deadline:
            raise TimeoutError(f"not sent within {self.limit_s:.0f} s")

    def before(self, sent_bytes: int, since_s: float) -> None:
        """Wait until the byte after ``sent_bytes`` may go."""
        due_s = since_s + sent_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        self.wait(due_s - time.monotonic())


def _send(index_path: Path, image_path: Path, peer: Peer, secret: bytes, pace: _Pace, *, keep: Identity | None) -> str:
    with opened(image_path) as image:  # first: its bytes are those of the index that is there then
        index = read_index(index_path)
        if index is None:
            return "a newer snapshot is being staged"
        if not index.is_hashed:
            return "it has no digests yet"
        blob = read_bytes(index_path, limit_bytes=MAX_INDEX_BYTES)
        wire, answer = _asked(blob, peer, secret, pace, keep)
        with wire:
            if answer == "send":
                wire.begin_image(blob, index.size_bytes)
                _send_image(wire, image, index, index_path, pace)
                answer = wire.receive().get("answer")
    return "" if answer == "kept" else str(answer)[:500]


def _asked(index: bytes, peer: Peer, secret: bytes, pace: _Pace, keep: Identity | None) -> tuple[Wire, object]:
    """A connection over which the index went, and what the keeper answers."""
    for number in range(1, TRIES + 1):
        connection = _connect(peer, pace)
        try:
            wire = Wire(connection, secret, is_keeper=False, deadline=pace.deadline)
            wire.send({"index_bytes": len(index), "keep": keep})
            wire.send_blob(index)
            return wire, wire.receive().get("answer")
        except (BadCopy, ConnectionError) as error:
            connection.close()
            peer.addresses = ()
            if number == TRIES:
                raise
            log.debug("node %d closed the connection: %s", peer.place, error)
            pace.wait(_RETRY_S * random.random())  # noqa: S311 - not a secret
        except BaseException:
            connection.close()
            raise
    raise AssertionError("unreachable")


def _send_image(wire: Wire, image: int, index: ShardIndex, index_path: Path, pace: _Pace) -> None:
    present = fingerprint(index_path)
    sent, since_s = 0, time.monotonic()
    while sent < index.size_bytes:
        pace.before(sent, since_s)
        room = wire.room(min(PIECE_BYTES, index.size_bytes - sent))
        count = os.preadv(image, [room], sent)
        if present is None or fingerprint(index_path) != present:  # the bytes read may be of the next snapshot
            raise OSError("a newer snapshot is being staged")
        if count < len(room):
            raise BadCopy("the image is shorter than its index says")
        wire.send_piece(count)
        sent += count


def _connect(peer: Peer, pace: _Pace) -> socket.socket:
    """A connection to the peer's keeper, which may still be starting.

    Raises:
        TimeoutError: there was none in time.
        OSError: the wait was cut short.
    """
    problem = f"node {peer.place} has not said where its keeper listens"
    while True:
        try:
            peer.addresses = peer.addresses or _announced(peer)
        except BadCopy as error:
            problem = str(error)
        for address in peer.addresses:
            try:
                return socket.create_connection(address, timeout=CONNECT_S)
            except OSError as error:
                problem = f"{address[0]}:{address[1]}: {error}"
        peer.addresses = ()
        try:
            pace.wait(_RETRY_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {problem}") from error


def _announced(peer: Peer) -> list[tuple[str, int]]:
    """Where its keeper listens; nothing while its agent has not said so.

    Raises:
        BadCopy: that cannot be understood.
    """
    try:
        where = read_json(peer.announcement)
        return [(str(host), int(where["port"])) for host in where["hosts"]] if where is not None else []
    except (StorageError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadCopy(f"{peer.announcement} is damaged: {error}") from error


# --- Small notes of the newest steps in shared memory, so that they outlive the process that writes them ---
#
#     <memory folder>/rank-<rank>.record     one rank's own state; /lead.record: what rank 0 alone has
#     NOTES turns of equal size, each: number, step, format, generation, length, digest, payload ... number again
#
# A turn is only believed while both of its numbers agree and its payload has that digest: a note that was cut off is
# none, and so is one that is being written over, whatever order another core sees the stores in.

NOTES = 6
"""Of more steps than a host may be ahead of its GPU (``just_in_time.DeviceSteps``)."""

MAX_CAPACITY_BYTES = 8 << 20
"""Of one note, with its frame."""

_HEAD = struct.Struct("=qqqqqQ")
_NUMBER = struct.Struct("=q")
_FORMAT = 3
"""Below 2 were notes of steps that were not over; 2 had no digest."""

OVERHEAD_BYTES = _HEAD.size + _NUMBER.size


class NoteFile:
    """The writing side, of one generation.

    Args:
        capacity_bytes: of one note, with its frame.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, path: Path, generation: int, capacity_bytes: int) -> None:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(descriptor, 0, NOTES * capacity_bytes)
            self._memory = mmap.mmap(descriptor, NOTES * capacity_bytes)
        finally:
            os.close(descriptor)
        self._number, self.generation, self.capacity_bytes = 0, generation, capacity_bytes

    def note(self, step: int, payload: bytes, *, what: str = "the note") -> None:
        """Note the payload as that after ``step`` steps.

        Raises:
            UsageError: it does not fit; names it as ``what``.
        """
        length, capacity = len(payload), self.capacity_bytes
        if length > capacity - OVERHEAD_BYTES:
            raise UsageError(f"{what} is too long: it has {length} bytes")
        self._number += 1
        at, memory = self._number % NOTES * capacity, self._memory
        _NUMBER.pack_into(memory, at + capacity - _NUMBER.size, 0)
        digest = xxhash.xxh3_64_intdigest(payload)
        _HEAD.pack_into(memory, at, self._number, step, _FORMAT, self.generation, length, digest)
        memory[at + _HEAD.size : at + _HEAD.size + length] = payload
        _NUMBER.pack_into(memory, at + capacity - _NUMBER.size, self._number)


def read_note(path: Path, step: int, generation: int) -> bytes | None:
    """The newest note of that step and generation; None where there is none."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        capacity = os.fstat(descriptor).st_size // NOTES
        if not OVERHEAD_BYTES < capacity <= MAX_CAPACITY_BYTES:
            return None
        found = [_turn(descriptor, number * capacity, capacity, step, generation) for number in range(NOTES)]
    except (OSError, struct.error):  # begun anew meanwhile
        return None
    finally:
        os.close(descriptor)
    return max((one for one in found if one is not None), default=(0, None))[1]


def _turn(descriptor: int, at: int, capacity: int, step: int, generation: int) -> tuple[int, bytes] | None:
    """The number and the payload of a turn, where it is of that step and generation, and whole.

    Only such a payload is read, and before the number behind it, which its writer takes away first.
    """
    number, noted, version, by, length, digest = _HEAD.unpack(os.pread(descriptor, _HEAD.size, at))
    if (noted, version, by) != (step, _FORMAT, generation) or not 0 < length <= capacity - OVERHEAD_BYTES:
        return None
    payload = os.pread(descriptor, length, at + _HEAD.size)
    (end,) = _NUMBER.unpack(os.pread(descriptor, _NUMBER.size, at + capacity - _NUMBER.size))
    is_whole = number > 0 and number == end and xxhash.xxh3_64_intdigest(payload) == digest
    return (number, payload) if is_whole else None


# --- note taking ---
# Notes of other nodes' ranks, as a keeper takes them into ``peers/`` of its memory folder. No torch.

TAKER_PAUSE_S = 24 * 3600.0
"""Between two notes: a step may be long."""

_NAME = re.compile(r"rank-\d{1,8}|lead")


class NoteTaker:
    """Takes notes from all connections of one keeper.

    Args:
        fence: the oldest generation whose notes are taken.
    """

    def __init__(self, peers: Path, fence: Callable[[], int]) -> None:
        self._peers, self._fence = peers, fence
        self._files: dict[str, NoteFile] = {}
        self._changing = threading.Lock()

    def take(self, wire: Wire, message: Mapping[str, object]) -> NoReturn:
        """Take this note, and all that follow on the connection, until it ends.

        Raises:
            BadCopy, OSError: it has ended, or violates the protocol.
        """
        while True:
            wire.silence_s, wire.deadline = SILENCE_S, time.monotonic() + SILENCE_S
            numbers = [message.get(name) for name in ("note", "generation", "capacity", "bytes")]
            step, generation, capacity, length = (one if type(one) is int else -1 for one in numbers)
            name = message.get("name")
            if not (isinstance(name, str) and _NAME.fullmatch(name) and 0 <= step <= MAX_STEP and generation >= 0
                    and 0 < length < capacity <= MAX_CAPACITY_BYTES):  # fmt: skip
                raise BadCopy("it is no note")
            payload = wire.receive_blob(length)
            wire.send({"answer": self._kept(name, step, generation, capacity, payload)})
            wire.silence_s, wire.deadline = TAKER_PAUSE_S, time.monotonic() + TAKER_PAUSE_S
            message = wire.receive()

    def _kept(self, name: str, step: int, generation: int, capacity: int, payload: bytes) -> str:
        """``kept``, or why not."""
        if generation < (fence := self._fence()):
            return f"generation {generation} is over: this is generation {fence}"
        with self._changing:
            file = self._files.get(name)
            if file is not None and file.generation > generation:
                return f"generation {generation} is over: this is generation {file.generation}"
            try:
                if file is None or (file.generation, file.capacity_bytes) != (generation, capacity):
                    if reason := fits(NOTES * capacity, self._peers):
                        return f"no room: {reason}"
                    self._files.pop(name, None)  # where there is no room, its memory has no file behind it any more
                    file = self._files[name] = NoteFile(self._peers / f"{name}.record", generation, capacity)
                file.note(step, payload)
            except (OSError, UsageError) as error:
                return f"not kept: {error}"
        return "kept"


# --- keeper ---
# One small process per node, the agent's child, that keeps copies of other nodes' shards in memory.
#
# Run as ``python -m slurmft.checkpoint.replicas MEMORY_FOLDER FD``: FD is a socket that listens already. It reads
# the key from ``copies.key`` and the run's generation from ``generation`` in the folder, takes copies into ``peers/``,
# and ends with its parent. No torch, nothing unpickled; peers without the key are refused.

MAX_CONNECTIONS = 64
"""Copies under way; further senders are asked to come again."""

MAX_STRANGERS, STRANGERS_PER_ADDRESS = 128, 32
"""Connections that have not proved that they belong to the run: when there are more, the oldest is closed."""

MAX_SENT_INDEX_BYTES = 64 << 20
HANDSHAKE_S = 5.0
"""How long a connection may take to prove that it belongs to the run."""

COPY_S = 600.0
"""The longest that one copy may take; a silent sender is given up much earlier."""

TOLD_REFUSALS = 10
"""Strangers that the log names; the others are counted, and every thousandth is logged."""

_BUSY_S = 5.0
_PAUSE_S = 0.1
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Refused(Exception):
    """This copy is refused; the sender gets the reason."""


class Keeper:
    """Takes copies into the memory folder of one node."""

    def __init__(self, memory: Path, listener: socket.socket) -> None:
        self._memory, self._listener = memory, listener
        self._peers = memory / PEERS
        self._peers.mkdir(mode=0o700, exist_ok=True)
        remove_unfinished(self._peers)
        self._secret = read_copies_key(memory)
        self._shards: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._strangers: Strangers[socket.socket] = Strangers(MAX_STRANGERS, STRANGERS_PER_ADDRESS)
        self._senders = self._noting = self._refused = 0
        self._generation = 0
        self._changing, self._counting = threading.Lock(), threading.Lock()
        self._notes = NoteTaker(self._peers, self._fence)

    def serve(self) -> None:
        """Take copies until the listening socket is closed."""
        while True:
            try:
                connection, address = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in _OUT_OF:
                    log.warning("cannot take a connection now: %s", error)
                    time.sleep(_PAUSE_S)
                    continue
                log.error("no copies are taken any more: %s", error)
                return
            self._admit(connection, str(address[0]))

    def _admit(self, connection: socket.socket, sender: str) -> None:
        with self._counting:  # until they are closed: none of them authenticates meanwhile
            for one in self._strangers.admit(connection, sender):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
        try:
            threading.Thread(target=self._serve_one, args=(connection, sender), daemon=True).start()
        except RuntimeError as error:  # no more threads
            with self._counting:
                self._strangers.forget(connection)
            connection.close()
            self._tell_refusal(sender, error)

    def _serve_one(self, connection: socket.socket, sender: str) -> None:
        is_known = is_noting = False
        try:
            with (
                connection,
                Wire(connection, self._secret, is_keeper=True, deadline=time.monotonic() + HANDSHAKE_S) as wire,
            ):
                request = wire.receive()
                is_known = True
                with self._counting:
                    self._strangers.forget(connection)
                    self._senders += 1
                try:
                    if is_noting := "note" in request:
                        self._take_notes(connection, wire, request)
                    self._take(wire, request)
                except Refused as refusal:
                    wire.send({"answer": str(refusal)})
        except (BadCopy, Mismatch, StorageError, OSError) as error:
            if is_noting:
                log.info("no more notes from %s: %s", sender, error)
            elif is_known:
                log.warning("a copy from %s was not taken: %s", sender, error)
            else:
                self._tell_refusal(sender, error)
        finally:
            with self._counting:
                self._strangers.forget(connection)
                self._senders -= is_known

    def _tell_refusal(self, sender: str, error: Exception) -> None:
        with self._counting:
            self._refused += 1
            number = self._refused
        if number <= TOLD_REFUSALS or number % 1000 == 0:
            log.warning("refused a connection from %s: %s (%d so far)", sender, error, number)

    def _take_notes(self, connection: socket.socket, wire: Wire, request: Mapping[str, object]) -> NoReturn:
        """Raises BadCopy or OSError when the sender has gone; the connection stays for the whole attempt."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # it may go with its node, without a word
        with self._counting:
            self._noting += 1
        try:
            self._notes.take(wire, request)
        finally:
            with self._counting:
                self._noting -= 1

    def _take(self, wire: Wire, request: Mapping[str, object]) -> None:
        if self._senders - self._noting > MAX_CONNECTIONS:
            raise Refused("busy with other copies")
        length = request.get("index_bytes")
        if type(length) is not int or not 0 < length <= MAX_SENT_INDEX_BYTES:
            raise Refused("an index of that length is not taken")
        wire.deadline = time.monotonic() + COPY_S
        blob = wire.receive_blob(length)
        try:
            index = parse_index(blob, "it")
        except Damaged as error:
            raise Refused(f"not an index: {error}") from error
        if not index.is_hashed:
            raise Refused("the index has no digests")
        with self._changing:
            lock = self._shards[index.shard]
        if not lock.acquire(timeout=_BUSY_S):
            raise Refused("busy with another copy of this shard")
        try:
            keep = _kept_there(request.get("keep"))
            self._check(index, keep)
            self._receive(wire, blob, index, keep)
        finally:
            lock.release()

    def _receive(self, wire: Wire, blob: bytes, index: ShardIndex, keep: Name | None) -> None:
        wire.begin_image(blob, index.size_bytes)
        try:
            with self._changing:  # no place may be cleared away between its choice and its first byte
                incoming = Incoming(self._peers, index, keep=keep)
            with incoming:
                wire.send({"answer": "send"})
                left = index.size_bytes
                while left:
                    piece = wire.receive_piece(min(left, PIECE_BYTES))
                    incoming.write(piece)
                    left -= len(piece)
                with self._changing:
                    incoming.finish()
                    self._generation = max(self._generation, index.identity.generation)
                    remove_stale(self._peers, keep)
        except Mismatch as error:
            raise Refused(f"damaged on the way: {error}") from error
        wire.send({"answer": "kept"})

    def _fence(self) -> int:
        """The oldest generation that is not over."""
        return max(self._generation, read_generation(self._memory))

    def _check(self, index: ShardIndex, keep: Name | None) -> None:
        """Return when this copy is wanted.

        Raises:
            Refused: it is not.
        """
        fence = self._fence()
        if index.identity.generation < fence:
            raise Refused(f"generation {index.identity.generation} is over: this is generation {fence}")
        for one in holdings_in(self._peers, Tier.PEER):
            if one.index.shard != index.shard:
                continue
            if one.index.identity == index.identity:
                raise Refused("kept")  # by an earlier try whose answer the sender did not get
            mine, theirs = one.index.identity, index.identity
            if mine.age > theirs.age:
                raise Refused(f"a newer one is here: {mine.folder_name}")
        image = image_of(place_for(self._peers, index, keep))
        present = image.stat().st_size if image.exists() else 0
        if reason := fits(max(index.size_bytes - present, 0), self._peers):
            raise Refused(f"no room: {reason}")


def _kept_there(told: object) -> Name | None:
    """The snapshot that the sender still needs here.

    Raises:
        Refused: it is none.
    """
    if told is None:
        return None
    if not isinstance(told, list) or len(told) != 3 or any(type(number) is not int for number in told):
        raise Refused("what is to be kept is no snapshot")
    step, generation, commit = told
    return step, generation, commit


def main(arguments: Sequence[str]) -> int:
    """Take copies for as long as the parent lives."""
    die_with_parent()
    # Slurm sends its TERM to the whole tree on some sites; only the agent answers to it
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr("keeper: %(message)s")
    os.nice(5)
    memory, descriptor = Path(arguments[0]), int(arguments[1])
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(True)
    Keeper(memory, listener).serve()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
