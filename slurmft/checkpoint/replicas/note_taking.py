"""Notes of other nodes' ranks, as a keeper takes them into ``peers/`` of its memory folder. No torch."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from slurmft.checkpoint.replicas.wire import SILENCE_S, BadCopy, Wire
from slurmft.checkpoint.staging.note_file import MAX_CAPACITY_BYTES, NOTES, NoteFile
from slurmft.errors import UsageError
from slurmft.storage.checkpoint_names import MAX_STEP
from slurmft.system.memory_limits import fits

PAUSE_S = 24 * 3600.0
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
            wire.silence_s, wire.deadline = PAUSE_S, time.monotonic() + PAUSE_S
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
