"""One rank's own state at the newest step boundaries, in shared memory, so that it outlives the rank.

When a rank dies, healthy replicas still have the weights, but not the dead rank's random numbers and its place in the
data. Both are noted here after each step, and never before its end: random numbers that a rank draws at the end of a
step, perhaps in rare steps only, cannot be predicted. With ``checkpoint.peer_copies`` the notes also lie with other
nodes (``replicas.note_sender``), in ``peers/`` of their memory folders.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from slurmft.checkpoint.staging.note_file import NoteFile, read_note
from slurmft.errors import UsageError
from slurmft.storage.memory_folder import PEERS
from slurmft.trainer import rng
from slurmft.trainer.savers import SAVERS

CAPACITY_BYTES = 256 * 1024
ERA = "era"
"""How often the process had loaded a state before it noted this: step numbers repeat after a load."""


def record_file(folder: Path, rank: int) -> Path:
    """Where ``rank`` notes its own state."""
    return folder / f"rank-{rank}.record"


class RankRecord:
    """The writing side: one rank's own, in one attempt.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self.file = NoteFile(record_file(folder, rank), generation, CAPACITY_BYTES)
        self._random = _RandomText()

    def note(self, step: int, loader: dict[str, Any] | None) -> bytes:
        """Note this rank's generators and its place in the data as those after ``step`` steps; returns the note.

        Raises:
            UsageError: the loader's state is more than JSON can hold.
        """
        text = b'{"rng":%b,"loader":%b,"era":%d}' % (self._random.now(), _as_json(loader), SAVERS.loads)
        try:
            self.file.note(step, text)
        except UsageError as error:
            raise UsageError(f"the loader's state is too long: {error.what}") from None
        return text


def read_record(folder: Path, rank: int, step: int, generation: int) -> dict[str, Any] | None:
    """The own state of ``rank`` after ``step`` steps of that attempt, as a checkpoint holds it, and its era.

    None where neither the rank nor a copy of its notes is on this node.
    """
    text = raw_record(folder, rank, step, generation)
    return None if text is None else decoded(text)


def raw_record(folder: Path, rank: int, step: int, generation: int) -> bytes | None:
    """The same, as it travels."""
    for place in (folder, folder / PEERS):
        if (text := read_note(record_file(place, rank), step, generation)) is not None:
            return text
    return None


def _as_json(loader: dict[str, Any] | None) -> bytes:
    try:
        text = json.dumps(loader)
        if json.loads(text) == loader:
            return text.encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise UsageError("the loader's state is not made of plain numbers, strings, lists and dicts")


def decoded(text: bytes) -> dict[str, Any] | None:
    """A note's content; None where it is damaged."""
    try:
        value = json.loads(text)
        state = value["rng"]
        for name in ("torch", "cuda"):
            if name in state:
                state[name] = torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.uint8)
        if not isinstance(state, dict):
            return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    own = {"rng": state, ERA: value.get(ERA, 0)}
    return own if value.get("loader") is None else own | {"loader": value["loader"]}


class _RandomText:
    """This process's generators in JSON; an unused generator costs a comparison."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}

    def now(self) -> bytes:
        parts = [self._part("python", random.getstate(), json.dumps)]
        parts.append(self._part("torch", torch.get_rng_state().numpy().tobytes(), _quoted))
        if (numpy := sys.modules.get("numpy")) is not None:
            state = numpy.random.get_state(legacy=False)
            inner = state["state"]
            key = (inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])
            parts.append(self._part("numpy", key, lambda _: json.dumps(rng.plain(state))))
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            parts.append(self._part("cuda", torch.cuda.get_rng_state().numpy().tobytes(), _quoted))
        return ("{" + ",".join(parts) + "}").encode()

    def _part(self, name: str, state: Any, encode: Any) -> str:
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = self._known[name] = (state, f'"{name}":{encode(state)}')
        return known[1]


def _quoted(raw: bytes) -> str:
    return f'"{raw.hex()}"'
