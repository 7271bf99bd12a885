"""Notes of each step (``rank_records``, ``lead_note``) on their way to the memory of other nodes, from the trainer.

A node that dies takes its ranks' random numbers and places in the data with it; these few bytes are all that the other
replicas do not have. One thread for each peer sends them; the training loop waits for none, and what cannot be sent is
dropped for what is newer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.checkpoint.replicas.replication import COPY_LIMIT_S, Peer, connected, find_peers, key_file
from slurmft.checkpoint.replicas.wire import SILENCE_S, BadCopy, Wire
from slurmft.checkpoint.staging.boundary_notes import Send
from slurmft.checkpoint.staging.note_file import NOTES, NoteFile
from slurmft.errors import StorageError

PAUSE_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Note:
    name: str
    step: int
    generation: int
    capacity_bytes: int
    payload: bytes


class NoteSender:
    """Sends one rank's notes to each of its node's peers."""

    def __init__(self, peers: Sequence[Peer], key_file: Path) -> None:
        self._lanes = [_Lane(peer, key_file) for peer in peers]

    def offer(self, name: str, step: int, file: NoteFile, payload: bytes) -> None:
        """Send this one as soon as possible."""
        note = _Note(name, step, file.generation, file.capacity_bytes, payload)
        for lane in self._lanes:
            lane.put(note)


def note_sender() -> Send | None:
    """Sends this rank's notes to the peers of its node; None where it has none."""
    key, peers = key_file(), find_peers()
    return NoteSender(peers, key).offer if key is not None and peers else None


class _Lane:
    def __init__(self, peer: Peer, key_file: Path) -> None:
        self._peer, self._key_file = peer, key_file
        self._waiting: deque[_Note] = deque(maxlen=2 * NOTES)
        self._changed, self._never = threading.Condition(), threading.Event()
        self._has_warned = False
        threading.Thread(target=self._run, name=f"slurmft-notes-{peer.place}", daemon=True).start()

    def put(self, note: _Note) -> None:
        with self._changed:
            self._waiting.append(note)
            self._changed.notify()

    def _run(self) -> None:
        wire: Wire | None = None
        unanswered = deque[_Note]()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, PAUSE_S if unanswered else None)
                note = self._waiting.popleft() if self._waiting else None
            try:
                if note is not None:
                    unanswered.append(note)
                    wire = wire or connected(self._peer, self._key_file, limit_s=COPY_LIMIT_S, stop=self._never)
                    _send(wire, note)
                # a busy peer answers late: were each answer waited for, it would not get the newest note in time
                while wire is not None and unanswered and (len(unanswered) > NOTES or wire.has_more()):
                    problem = _answer(wire)
                    self._tell(unanswered.popleft(), problem)
            except (BadCopy, OSError, StorageError) as error:
                if wire is not None:
                    with wire:
                        wire = None
                self._tell(unanswered[0], str(error) or type(error).__name__)
                with self._changed:
                    if len(self._waiting) < NOTES:  # else newer ones are enough to do
                        self._waiting.extendleft(reversed(unanswered))
                unanswered.clear()
                time.sleep(PAUSE_S)

    def _tell(self, note: _Note, problem: str) -> None:
        """Once when it fails, and when it works again."""
        if problem and not self._has_warned:
            log.warning(
                "node %d has no notes of this rank from step %d on, so a step may be lost with this node: %s",
                self._peer.place, note.step, problem,
            )  # fmt: skip
        elif self._has_warned and not problem:
            log.info("node %d has notes of this rank again, from step %d on", self._peer.place, note.step)
        self._has_warned = bool(problem)


def _send(wire: Wire, note: _Note) -> None:
    wire.deadline = time.monotonic() + SILENCE_S
    wire.send({"note": note.step, "name": note.name, "generation": note.generation,
               "capacity": note.capacity_bytes, "bytes": len(note.payload)})  # fmt: skip
    wire.send_blob(note.payload)


def _answer(wire: Wire) -> str:
    """Why the peer has not taken its oldest note without an answer; empty where it has."""
    wire.deadline = time.monotonic() + SILENCE_S
    answer = wire.receive().get("answer")
    return "" if answer == "kept" else str(answer)[:500]
