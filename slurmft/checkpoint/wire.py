"""How a copy of a shard travels between nodes: three authenticated lines, and the bytes that the index's digests cover.

    keeper  -> sender   nonce
    sender  -> keeper   nonce, then {generation, index_bytes} and the index
    keeper  -> sender   {"answer": "send"} or why not
    sender  -> keeper   the image
    keeper  -> sender   {"answer": "kept"} or why not

Each line and the index carry a HMAC under a key that is derived from the attempt's secret and both nonces, bound to
the direction and the place in the sequence. So nobody without the secret is listened to, and nothing that is sent is
ever run: lines and indexes are JSON, the image is bytes. They are authentic, not confidential.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from typing import Any

MAX_LINE_BYTES = 16 * 1024
CHUNK_BYTES = 1 << 20
SILENCE_S = 20.0
"""How long either side may say nothing before the other one gives it up."""

_NONCE_BYTES = 32
_LENGTH = struct.Struct("!I")
_MAC_BYTES = hashlib.sha256().digest_size


class BadCopy(Exception):
    """The other side is a stranger, speaks another protocol, or sends what it must not; the connection is closed."""


class Wire:
    """One authenticated connection, blocking, with a limit on every wait. Close it after use, as a context manager.

    Raises, from every method: BadCopy; OSError (TimeoutError too) where the connection breaks or stalls.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, is_keeper: bool, deadline: float) -> None:
        self._socket = connection
        self.deadline = deadline
        """By the monotonic clock; nothing waits beyond it."""

        mine = secrets.token_hex(_NONCE_BYTES // 2).encode()
        if is_keeper:
            self._send_all(mine)
            theirs = self._receive_exactly(_NONCE_BYTES)
            nonces = mine + theirs
        else:
            theirs = self._receive_exactly(_NONCE_BYTES)
            self._send_all(mine)
            nonces = theirs + mine
        self._key = hmac.new(secret, b"slurmft copies 1 " + nonces, hashlib.sha256).digest()
        self._mine, self._theirs = (b"k", b"s") if is_keeper else (b"s", b"k")
        self._sent = self._received = 0

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

    def send_blob(self, blob: bytes) -> None:
        """Send bytes of which the other side knows how many there are."""
        text = self._mine + str(self._sent).encode() + b" "
        self._sent += 1
        self._send_all(hmac.new(self._key, text + blob, hashlib.sha256).digest() + blob)

    def receive_blob(self, length: int) -> bytes:
        """``length`` bytes; they are authentic."""
        mac = self._receive_exactly(_MAC_BYTES)
        blob = self._receive_exactly(length)
        self._check(mac, blob)
        return blob

    def send_file(self, file: int, offset: int, length: int) -> None:
        """Send a part of an open file, without a copy of it in this process; something else vouches for it."""
        while length:
            self._limit()
            try:
                count = os.sendfile(self._socket.fileno(), file, offset, length)
            except BlockingIOError:
                self._wait_for_room()
                continue
            if not count:
                raise BadCopy("the image is shorter than its index tells")
            offset, length = offset + count, length - count

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        left_s = max(0.001, min(self.deadline - time.monotonic(), SILENCE_S))  # poll(2) takes less than 0 for for ever
        if not poll.poll(1000 * left_s):
            raise TimeoutError("timed out")

    def receive_raw(self, buffer: memoryview) -> None:
        """Fill ``buffer``."""
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
        self._socket.settimeout(min(left_s, SILENCE_S))
