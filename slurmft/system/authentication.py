"""Keys for one purpose each, and tags by which a stream of bytes proves that it was sent by a holder of its key.

HMAC-SHA256 throughout: of the keyed hashes in Python's standard library it is the fastest on processors with
instructions for SHA, which is what clusters have (``bench/results/peer_copies.md``).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

TAG_BYTES = hashlib.sha256().digest_size
NONCE_BYTES = 32

_LENGTH = struct.Struct("!Q")
_PIECE = struct.Struct("!QQ?")


def new_nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def derived_key(key: bytes, purpose: str, *context: bytes) -> bytes:
    """A key for one purpose in one context, such as a connection's nonces; it reveals neither ``key`` nor others.

    The lengths of all parts go into it, so that no two contexts look alike.
    """
    mac = hmac.new(key, b"slurmft 2 ", hashlib.sha256)
    for part in (purpose.encode(), *context):
        mac.update(_LENGTH.pack(len(part)) + part)
    return mac.digest()


class PieceTags:
    """The tags of one stream of known length, piece by piece.

    Each tag covers the piece's place in the stream, its length and whether it is the last one. So pieces that were
    changed, repeated, left out, swapped, cut or taken from another stream are detected.

    Args:
        key: of this stream alone.
        size_bytes: of the whole stream.
    """

    def __init__(self, key: bytes, size_bytes: int) -> None:
        self._key, self._left_bytes, self._number = key, size_bytes, 0

    def next_tag(self, piece: bytes | memoryview) -> bytes:
        """The tag of the next piece."""
        self._left_bytes -= len(piece)
        head = _PIECE.pack(self._number, len(piece), self._left_bytes <= 0)
        self._number += 1
        mac = hmac.new(self._key, head, hashlib.sha256)
        mac.update(piece)
        return mac.digest()

    def is_next(self, piece: bytes | memoryview, tag: bytes | memoryview) -> bool:
        """Whether this is the next piece, with its tag. Compared in constant time."""
        return hmac.compare_digest(self.next_tag(piece), tag)
