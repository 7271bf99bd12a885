"""How a copy of a shard travels between nodes: authenticated lines, and the image in authenticated pieces.

    keeper  -> sender   nonce
    sender  -> keeper   nonce, then {index_bytes} and the index
    keeper  -> sender   {"answer": "send"} or why not
    sender  -> keeper   the image: pieces of PIECE_BYTES, the last one shorter, each followed by its tag
    keeper  -> sender   {"answer": "kept"} or why not

Notes on each step (``note_sender``) travel in the same way, on a connection that stays:

    sender  -> keeper   {note, name, generation, capacity, bytes} and the note, again and again, ahead of the answers
    keeper  -> sender   {"answer": "kept"} or why not, for each

Each line and the index carry a HMAC under a key that is derived from the run's key and both nonces, bound to the
direction and the place in the sequence. The image's key is derived from that one and the index, which names run
generation, step, shard and length; its tags are those of ``system.authentication``. So only holders of the run's key
are accepted, recorded messages cannot be replayed, and a piece is checked before it is used. Nothing that is sent is
ever run: lines and indexes are JSON, the image is bytes. All of it is authentic, not confidential.

Version 1 sent the image without tags. There is no negotiation: the version is part of the key, and a side of another
version is a stranger.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import time
from typing import Any

from slurmft.system.authentication import NONCE_BYTES, TAG_BYTES, PieceTags, derived_key, new_nonce

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
        parts: list[bytes] = []
        while length:
            self._limit()
            part = self._socket.recv(min(length, CHUNK_BYTES))
            if not part:
                raise BadCopy("the connection ended in the middle")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _limit(self) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        self._socket.settimeout(min(left_s, self.silence_s))
