"""The keeper: one small process per node, the agent's child, that keeps copies of other nodes' shards in memory.

Run as ``python -m slurmft.checkpoint.keeper MEMORY_FOLDER FD``: FD is a socket that listens already. It reads
the key from ``copies.key`` and the run's generation from ``generation`` in the folder, takes copies into ``peers/``,
and ends with its parent. No torch, nothing unpickled; peers without the key are refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slurmft.checkpoint.holding import holdings_in, image_of
from slurmft.checkpoint.image_file import ShardIndex, read_index
from slurmft.checkpoint.replicas import (
    PIECE_BYTES,
    BadCopy,
    Incoming,
    Mismatch,
    NoteTaker,
    Wire,
    place_for,
    remove_stale,
    remove_unfinished,
)
from slurmft.errors import StorageError
from slurmft.policy.checkpoints import Name, Tier
from slurmft.policy.values import Strangers
from slurmft.storage.checkpoint_names import PEERS, read_copies_key, read_generation
from slurmft.system.files import write_bytes
from slurmft.system.foreign_text import log_to_stderr
from slurmft.system.processes import die_with_parent, fits

MAX_CONNECTIONS = 64
"""Copies under way; further senders are asked to come again."""

MAX_STRANGERS, STRANGERS_PER_ADDRESS = 128, 32
"""Connections that have not proved that they belong to the run: when there are more, the oldest is closed."""

MAX_INDEX_BYTES = 64 << 20
HANDSHAKE_S = 5.0
"""How long a connection may take to prove that it belongs to the run."""

COPY_S = 600.0
"""The longest that one copy may take; a silent sender is given up much earlier."""

TOLD_REFUSALS = 10
"""Strangers that the log names; the others are counted, and every thousandth is logged."""

_BUSY_S = 5.0
_PAUSE_S = 0.1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)


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
        self._number = 0
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
                if error.errno in _NO_ROOM:
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
        if type(length) is not int or not 0 < length <= MAX_INDEX_BYTES:
            raise Refused("an index of that length is not taken")
        wire.deadline = time.monotonic() + COPY_S
        blob = wire.receive_blob(length)
        index = self._index(blob)
        if not index.is_hashed:
            raise Refused("the index has no digests")
        lock = self._lock_of(index.shard)
        if not lock.acquire(timeout=_BUSY_S):
            raise Refused("busy with another copy of this shard")
        try:
            keep = _name(request.get("keep"))
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

    def _lock_of(self, shard: int) -> threading.Lock:
        with self._changing:
            return self._shards[shard]

    def _index(self, blob: bytes) -> ShardIndex:
        with self._changing:
            self._number += 1
            path = self._peers / f".incoming-{self._number}"
        try:
            write_bytes(path, blob)
            index = read_index(path)
        except StorageError as error:
            raise Refused(f"not an index: {error.what}") from error
        except OSError as error:
            raise Refused(f"no room: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)
        if index is None:
            raise Refused("not an index")
        return index

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


def _name(told: object) -> Name | None:
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
