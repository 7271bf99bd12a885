"""Files of ``torch.save`` that end with a digest of themselves, and the look at any such file before it is loaded.

The digest is in the comment that archives such as torch's may have, so that ``torch.load`` reads them anywhere. In a
file without one, the checksums of the parts are looked at, which torch itself does not do.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from slurmft.errors import CheckpointError

_HEX, _WORDS = 64, b"slurmft sha256 "
_MARK = (len(_WORDS) + _HEX).to_bytes(2, "little") + _WORDS
"""The end of an archive: the length of its comment, and the comment, of which only the digest is missing."""

_CHUNK_BYTES = 1 << 20
_AS_A_FOLDER = 0x10
_DAMAGES = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError, OverflowError)


def packed(state: Any) -> io.BytesIO:
    """What ``torch.save`` writes, with checksums also where the script has switched them off."""
    buffer, wanted = io.BytesIO(), get_crc32_options()
    set_crc32_options(True)
    try:
        torch.save(state, buffer)
    finally:
        set_crc32_options(wanted)
    return buffer


def with_digest(buffer: io.BytesIO) -> bytes:
    """The content of the file; ``buffer`` is what ``packed`` has returned, and changed."""
    buffer.seek(-2, os.SEEK_END)
    buffer.write(_MARK)
    with buffer.getbuffer() as content:
        digest = hashlib.sha256(content).hexdigest()
    buffer.seek(0, os.SEEK_END)
    buffer.write(digest.encode())
    return buffer.getvalue()


def verify(stream: BinaryIO, path: Path) -> None:
    """Return when the file is as it was written; ``stream`` is at its beginning, then and before.

    Raises:
        CheckpointError: it is torn or damaged, or torch has not written it.
    """
    try:
        wrong = _wrong(stream)
    except _DAMAGES as error:
        wrong = str(error) or type(error).__name__
    if wrong:
        raise CheckpointError(f"{path} is torn or damaged, and not loaded: {wrong}", hint="take an older checkpoint")
    stream.seek(0)


def _wrong(stream: BinaryIO) -> str | None:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - len(_MARK) - _HEX))
    tail = stream.read()
    stream.seek(0)
    if tail.startswith(_MARK):
        digest, left = hashlib.sha256(), size - _HEX
        while left and (part := stream.read(min(left, _CHUNK_BYTES))):
            digest.update(part)
            left -= len(part)
        return None if digest.hexdigest().encode() == tail[-_HEX:] else "its digest is another one"
    if tail[-2:] != b"\0\0":  # the length of a comment
        return "its end is missing"
    with zipfile.ZipFile(stream) as archive:  # torch compresses nothing, and would read a folder as empty
        odd = [one.filename for one in archive.infolist() if one.compress_type or one.external_attr & _AS_A_FOLDER]
        return odd[0] if odd else archive.testzip()
