"""Sending copies of a shard to the keepers of other nodes, from the process that writes it to disk. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmft.checkpoint.format.shard_index import MAX_INDEX_BYTES, ShardIndex, read_index
from slurmft.checkpoint.replicas.wire import PIECE_BYTES, BadCopy, Wire
from slurmft.errors import StorageError
from slurmft.policy.checkpoints.placement import copy_holders
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import Identity
from slurmft.storage.fence import RUN_FOLDER_VARIABLE
from slurmft.storage.memory_folder import KEY_FILE, MEMORY_VARIABLE, announcement
from slurmft.system.files import read_json
from slurmft.system.opening import opened, read_bytes

COPY_LIMIT_S = 300.0
CONNECT_S = 5.0
TRIES = 5
"""Connections that a keeper may close before it answers: strangers may have taken our place."""

_RETRY_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A node whose keeper takes copies; ``place`` is the node's in the run (GROUP_RANK)."""

    place: int
    announcement: Path
    """Where its agent writes host names and port of the keeper."""

    addresses: tuple[tuple[str, int], ...] = ()
    """What it said, where that is known: the announcement lies in a shared place, which is not asked at every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The result of one copy."""

    peer: Peer
    problem: str
    """Empty when the peer has the whole snapshot, verified."""

    seconds: float


def find_peers(environment: Mapping[str, str] = os.environ) -> list[Peer]:
    """The nodes that hold copies of this node's shards, in this attempt; none outside of a run."""
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
    index_path: Path, image_path: Path, peers: Sequence[Peer], key_file: Path, *,
    limit_s: float = COPY_LIMIT_S, bytes_per_s: float | None = None, stop: threading.Event | None = None,
    keep: Identity | None = None,
) -> list[Sent]:  # fmt: skip
    """Send a staged shard, hashed already, to each peer in turn; returns each result, and never raises.

    Args:
        limit_s: for each peer; one that cannot be reached, does not answer or is too slow costs no more.
        bytes_per_s: no faster than this, so that training keeps the network; None for no limit.
        stop: give up as soon as it is set; also done where the image is written over by a newer one.
        keep: a snapshot that the peer must still have when this one has not arrived whole.
    """
    stop = stop or threading.Event()
    results: list[Sent] = []
    for peer in peers:
        started_s = time.monotonic()
        try:
            pace = _Pace(started_s, limit_s, bytes_per_s, stop)
            problem = _send(index_path, image_path, peer, read_bytes(key_file), pace, keep=keep)
        except (BadCopy, OSError, StorageError) as error:
            problem = str(error) or type(error).__name__
        results.append(Sent(peer=peer, problem=problem, seconds=time.monotonic() - started_s))
    return results


def located(peer: Peer) -> Peer:
    """The same with the addresses that its agent has announced so far."""
    with contextlib.suppress(BadCopy, OSError):
        return replace(peer, addresses=tuple(_announced(peer)))
    return peer


def connected(peer: Peer, key_file: Path, *, limit_s: float, stop: threading.Event) -> Wire:
    """A connection to the peer's keeper, which has proved that it belongs to the run.

    Raises:
        BadCopy, OSError: there is none.
    """
    pace = _Pace(time.monotonic(), limit_s, None, stop)
    connection = _connect(peer, pace)
    try:
        return Wire(connection, read_bytes(key_file), is_keeper=False, deadline=pace.deadline)
    except BaseException:
        connection.close()
        raise


class Superseded(OSError):
    """A newer image is being written over the one that was to be sent."""


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
        """Raises TimeoutError where that would be too late, and Superseded when it is not needed any more."""
        if self.stop.wait(max(0.0, min(seconds, self.deadline - time.monotonic()))):
            raise Superseded("given up")
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
            raise Superseded("a newer snapshot is being staged")
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
    kept = None if keep is None else [keep.step, keep.generation, keep.commit]
    for number in range(1, TRIES + 1):
        connection = _connect(peer, pace)
        try:
            wire = Wire(connection, secret, is_keeper=False, deadline=pace.deadline)
            wire.send({"index_bytes": len(index), "keep": kept})
            wire.send_blob(index)
            return wire, wire.receive().get("answer")
        except (BadCopy, ConnectionError) as error:
            connection.close()
            if number == TRIES:
                raise
            log.debug("node %d closed the connection: %s", peer.place, error)
            pace.wait(_RETRY_S * random.random())  # noqa: S311 - not a secret
        except BaseException:
            connection.close()
            raise
    raise AssertionError("unreachable")


def _send_image(wire: Wire, image: int, index: ShardIndex, index_path: Path, pace: _Pace) -> None:
    present = index_path.stat().st_ino
    sent, since_s = 0, time.monotonic()
    while sent < index.size_bytes:
        pace.before(sent, since_s)
        room = wire.room(min(PIECE_BYTES, index.size_bytes - sent))
        count = os.preadv(image, [room], sent)
        if not _is_still(index_path, present):  # the bytes read may be of the next snapshot
            raise Superseded("a newer snapshot is being staged")
        if count < len(room):
            raise BadCopy("the image is shorter than its index says")
        wire.send_piece(count)
        sent += count


def _is_still(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except FileNotFoundError:
        return False


def _connect(peer: Peer, pace: _Pace) -> socket.socket:
    """A connection to the peer's keeper, which may still be starting.

    Raises:
        TimeoutError: there was none in time.
        Superseded: the wait was cut short.
    """
    problem = f"node {peer.place} has not said where its keeper listens"
    while True:
        addresses: Sequence[tuple[str, int]] = peer.addresses
        try:
            addresses = addresses or _announced(peer)
        except BadCopy as error:
            problem = str(error)
        for address in addresses:
            try:
                return socket.create_connection(address, timeout=CONNECT_S)
            except OSError as error:
                problem = f"{address[0]}:{address[1]}: {error}"
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
