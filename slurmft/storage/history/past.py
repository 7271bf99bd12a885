"""What a start needs of a journal, kept beside it with the place up to which it was read: the next start goes on there.

The kept file is a copy of lines of the journal, never a source of its own: where it is damaged, or does not fit the
journal that is there (another file, a shorter one, other bytes before the place), all of the journal is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from slurmft.system.files import parse_json, replace_atomically
from slurmft.system.opening import opened, read_bytes, read_lines

PAST_SUFFIX = ".past"
WORTH_BYTES = 4 << 20
"""A journal that has grown by less than this is read again faster than a file is written."""

MAX_KEPT_BYTES = 32 << 20
LOOK_BYTES = 1 << 16
"""Of the beginning of the journal and of what lies before the place: by these the journal is recognised."""

_FORMAT = 1


class Past:
    """One reading of a journal, from where the one before has ended.

    Args:
        passed_over: names of the events that were not kept; another choice does not use what this one has kept.
    """

    def __init__(
        self, journal: Path, passed_over: Collection[bytes], *, limit_bytes: int, line_limit_bytes: int
    ) -> None:
        self._journal, self._limit, self._line_limit = journal, limit_bytes, line_limit_bytes
        self._path = journal.with_name(journal.name + PAST_SUFFIX)
        self._choice = hashlib.sha256(b"\n".join(sorted(passed_over))).hexdigest()
        self._begin = self._end = self._inode = 0
        self._last = b""
        self._fits = True

    def lines(self) -> Iterator[bytes]:
        """The kept lines, then those of the journal that came after them.

        Raises:
            UnsafeFile, OSError: as ``opening.read_lines``.
        """
        self._inode = self._journal.stat().st_ino
        known = self._known()
        yield from known
        self._end = self._begin
        for line in read_lines(
            self._journal, limit_bytes=self._limit, line_limit_bytes=self._line_limit, start=self._begin
        ):
            self._fits &= len(line) < self._line_limit  # of a longer one only the beginning has come
            self._end += len(line) + 1
            self._last = line
            yield line

    def keep(self, wanted: Sequence[bytes]) -> None:
        """Keep these lines of all that were read, where that saves time; what cannot be written is not kept."""
        if not self._fits or self._end - self._begin < WORTH_BYTES or sum(map(len, wanted)) > MAX_KEPT_BYTES:
            return
        with contextlib.suppress(OSError), opened(self._journal) as journal:
            end = self._end
            if os.fstat(journal).st_ino != self._inode:  # replaced meanwhile
                return
            if os.pread(journal, 1, end - 1) != b"\n":  # the last line has no end yet
                end -= len(self._last) + 1
                wanted = wanted[:-1] if wanted and wanted[-1] == self._last else wanted
            body = b"".join(line + b"\n" for line in wanted)
            header = {**self._facts(journal, end), "body": hashlib.sha256(body).hexdigest()}
            # without waiting for the disk: after a power cut a damaged file is not used
            replace_atomically(self._path, json.dumps(header).encode() + b"\n" + body, durable=False)

    def _known(self) -> list[bytes]:
        try:
            content = read_bytes(self._path, limit_bytes=2 * MAX_KEPT_BYTES, owners={os.geteuid()})
            first, _, body = content.partition(b"\n")
            header = parse_json(first)
            end = header["end"]
            if type(end) is not int or end <= 0 or header["body"] != hashlib.sha256(body).hexdigest():
                return []
            with opened(self._journal) as journal:
                if os.fstat(journal).st_size < end or {**self._facts(journal, end), "body": header["body"]} != header:
                    return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        self._begin = end
        return body.split(b"\n")[:-1]

    def _facts(self, journal: int, end: int) -> dict[str, object]:
        before = max(0, end - LOOK_BYTES)
        looks = os.pread(journal, min(end, LOOK_BYTES), 0), os.pread(journal, end - before, before)
        return {
            "format": _FORMAT, "choice": self._choice, "inode": os.fstat(journal).st_ino, "end": end,
            "looks": [hashlib.sha256(look).hexdigest() for look in looks],
        }  # fmt: skip
