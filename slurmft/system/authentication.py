"""Tokens in files that their owner alone can read, keys for one purpose each, and tags by which a stream of bytes
proves that it was sent by a holder of its key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import struct
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.system.files import read_text

# --- authentication ---
# Keys for one purpose each, and tags by which a stream of bytes proves that it was sent by a holder of its key.
#
# HMAC-SHA256 throughout: of the keyed hashes in Python's standard library it is the fastest on processors with
# instructions for SHA, which is what clusters have (``bench/results/peer_copies.md``).

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


# --- A token in a file that its owner alone can read: never on a command line ---

MAX_TOKEN_BYTES = 4096


def token_in(path: Path, *, at_least: int = 16) -> str:
    """The token in a file that its owner alone can read.

    Raises:
        UsageError: others can, it is another user's, it cannot be read, or holds no token.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others may read the token in {path}", hint=f"chmod 600 {path}")
        token = read_text(path, owners={os.geteuid()}, limit_bytes=MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {path}: {error}") from error
    if len(token) < at_least or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UsageError(f"{path} must hold one token of at least {at_least} printable characters without spaces")
    return token
