"""Parts of the output while the batch runs: a pair of files for each range of the input that is answered as a whole."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from pathlib import Path

from slurmft.inference.answers import ANSWERS, ERRORS, FORMATS, PARTS, AnswerIndex, begin_output, write_rows
from slurmft.inference.ledger import Entry, Ledger
from slurmft.inference.requests import Batch
from slurmft.storage.patience import writing

_NAME = re.compile(rf"\.?({ANSWERS}|{ERRORS})-\d{{12}}-\d{{12}}\.({'|'.join(FORMATS)})(\.tmp)?")


class OutputParts:
    """Writes parts as they become complete, and deletes them when the whole output is there. Blocking.

    Memory: 20 bytes for each request.

    Args:
        folder: of the output.
        size: requests in a part; a batch that has no more has none.
    """

    def __init__(self, batch: Batch, ledger: Ledger, folder: Path, *, size: int, format: str) -> None:
        self._batch, self._ledger, self._folder, self._size, self._format = batch, ledger, folder, size, format
        self._index: AnswerIndex | None = None
        self._fresh: deque[Entry] = deque()
        firsts = range(0, batch.total, size) if 0 < size < batch.total else range(0)
        self._open = [(first, min(first + size, batch.total)) for first in firsts]

    def write(self) -> int:
        """Write what has become complete since the last call; returns how many parts.

        Raises:
            StorageError: they cannot be written, or a segment not be read; the next call tries again.
        """
        complete = [each for each in self._open if self._ledger.done[slice(*each)].all()]
        if not complete:
            return 0
        self._look()
        assert self._index is not None
        begin_output(self._batch, self._folder)
        with writing(self._folder):
            (self._folder / PARTS).mkdir(mode=0o700, exist_ok=True)
        count = 0
        for first, last in complete:
            names = f"{ANSWERS}-{first:012d}-{last - 1:012d}", f"{ERRORS}-{first:012d}-{last - 1:012d}"
            is_there = (self._folder / PARTS / f"{names[0]}.{self._format}").exists()
            if not is_there and not self._index.missing(first, last):
                write_rows(self._batch, self._index, (first, last), self._folder / PARTS, names, format=self._format)
                count += 1
            self._open.remove((first, last))
        return count

    def remove(self) -> None:
        """Delete all parts of this batch, of earlier starts too; what cannot be deleted stays."""
        with contextlib.suppress(OSError):
            for path in (self._folder / PARTS).iterdir():
                if _NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            (self._folder / PARTS).rmdir()

    def _look(self) -> None:
        """Learn where the answers are that the ledger has by now."""
        if self._index is None:
            self._ledger.fresh = self._fresh
            self._index = AnswerIndex(self._batch)
            self._index.add(self._ledger.entries())
        while self._fresh:
            self._index.add([self._fresh.popleft()])
