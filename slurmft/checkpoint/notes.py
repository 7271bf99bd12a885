"""What ranks note at the end of each step, in shared memory and on other nodes, so that a step can be kept later."""

from __future__ import annotations

import json
import logging
import random
import secrets
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slurmft.checkpoint.catalog import own_generation
from slurmft.checkpoint.replicas import (
    MAX_CAPACITY_BYTES,
    NOTES,
    OVERHEAD_BYTES,
    SILENCE_S,
    BadCopy,
    NoteFile,
    Peer,
    Wire,
    connected,
    find_peers,
    key_file,
    read_note,
)
from slurmft.checkpoint.state import as_json, name_of_dtype
from slurmft.errors import StorageError, UsageError
from slurmft.storage.checkpoint_names import PEERS, Identity, ranks_of_this_node, read_copies_key
from slurmft.system.files import TAG_BYTES, PieceTags, derived_key
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS, Team
from slurmft.trainer.streams import is_on_device

# --- lead note ---
# What rank 0 alone has at a boundary, noted after each step: the run's ``extra``, and buffers, such as BatchNorm's.
#
# DDP leaves each rank with buffers of its own, and those of rank 0 count: it sends them to all before every step. So
# they must outlive rank 0. Where its model lies on a GPU they are not noted, as the host must not wait for them.

Extra = Callable[[], Mapping[str, Any]]

EXTRA_BYTES = 256 * 1024
MAX_BUFFER_BYTES = 4 << 20
"""More is not noted: a copy of them after each step would cost more than a failure that hits rank 0."""

_LENGTH = struct.Struct("=q")
_ALIGNED = 64


LEAD = "lead"
"""The name of rank 0's notes on the run; a rank's own are ``rank-<rank>``."""


def note_file(folder: Path, name: str) -> Path:
    """Where notes of that name lie."""
    return folder / f"{name}.record"


def raw_note(folder: Path, name: str, step: int, generation: int) -> bytes | None:
    """The note on that step of that attempt, as it travels; None where neither it nor a copy of it is on this node."""
    for place in (folder, folder / PEERS):
        if (payload := read_note(note_file(place, name), step, generation)) is not None:
            return payload
    return None


@dataclass(frozen=True, slots=True)
class LeadNote:
    """One note, as it is read."""

    era: int
    """As in ``RankRecord``."""

    extra: Mapping[str, Any] | None
    """In types that JSON takes (``state.original`` turns them back); None where the run gives none."""

    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


class LeadRecord:
    """The writing side, on rank 0, in one attempt.

    Args:
        extra: asked after every step; None where the run has none.
        buffers: copies of the model's buffers; their values are noted when ``note`` is called.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, generation: int, extra: Extra | None, buffers: Mapping[str, torch.Tensor]) -> None:
        self.extra = extra
        self._live = list(buffers.values()) if can_be_noted(buffers) else []
        self._raw, self._views = _room(self._live)
        self._names = json.dumps(
            [[name, name_of_dtype(one.dtype), list(one.shape)] for name, one in buffers.items()] if self._live else []
        ).encode()
        capacity = EXTRA_BYTES + len(self._names) + len(self._raw) + OVERHEAD_BYTES
        self.file = NoteFile(note_file(folder, LEAD), generation, capacity)

    def note(self, step: int) -> bytes:
        """Note what is so after ``step`` steps; returns the note.

        Raises:
            UsageError: the extra is more than JSON can hold, or too long.
        """
        extra = b"null" if self.extra is None else _extra_as_json(self.extra() or {})  # as a save takes it
        if self._views:
            torch._foreach_copy_(self._views, self._live)
        text = b'{"era":%d,"extra":%b,"buffers":%b}' % (SAVERS.loads, extra, self._names)
        payload = b"".join((_LENGTH.pack(len(text)), text, self._raw.numpy().tobytes()))
        self.file.note(step, payload, what="extra")
        return payload


def can_be_noted(buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether there are some, in main memory, and small."""
    values = buffers.values()
    plain = all(one.layout is torch.strided and not is_on_device(one) for one in values)
    return plain and 0 < sum(one.nbytes for one in values) <= MAX_BUFFER_BYTES


def read_lead(folder: Path, step: int, generation: int) -> LeadNote | None:
    """Rank 0's note on that step of that attempt; None where neither rank 0 nor a copy of it is on this node."""
    payload = raw_note(folder, LEAD, step, generation)
    return None if payload is None else decoded_lead(payload)


def decoded_lead(payload: bytes) -> LeadNote | None:
    """A note's content; None where it is damaged."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        value = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
        raw = torch.frombuffer(bytearray(payload[_LENGTH.size + length :]) or bytearray(1), dtype=torch.uint8)
        likes = [(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in value["buffers"]]
        views = _views(raw, [(dtype, shape) for _, dtype, shape in likes])
        buffers = {name: view.clone() for (name, _, _), view in zip(likes, views, strict=True)}
        extra = value["extra"]
        if not (type(value["era"]) is int and (extra is None or isinstance(extra, dict))):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, struct.error):
        return None
    return LeadNote(value["era"], extra, buffers)


def _extra_as_json(extra: Mapping[str, Any]) -> bytes:
    value = as_json(dict(extra))
    try:
        text = json.dumps(value)
        if json.dumps(json.loads(text)) == text:  # as text: NaN is a value, too
            return text.encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise UsageError("extra is not made of plain numbers, strings, lists, dicts and small tensors")


def _room(likes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    raw = torch.zeros(sum(_aligned(one.nbytes) for one in likes), dtype=torch.uint8)
    return raw, _views(raw, [(one.dtype, one.shape) for one in likes])


def _views(raw: torch.Tensor, likes: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.Tensor]:
    views, at = [], 0
    for dtype, shape in likes:
        length = shape.numel() * dtype.itemsize
        views.append(raw[at : at + length].view(dtype).view(shape))
        at += _aligned(length)
    return views


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


# --- One rank's own state at the newest step boundaries, in shared memory, so that it outlives the rank ---
# When a rank dies, healthy replicas still have the weights, but not the dead rank's random numbers and its place in the
# data. Both are noted here after each step, and never before its end: random numbers that a rank draws at the end of a
# step, perhaps in rare steps only, cannot be predicted. With ``checkpoint.peer_copies`` the notes also lie with other
# nodes (``NoteSender``), in ``peers/`` of their memory folders.

CAPACITY_BYTES = 256 * 1024
ERA = "era"
"""How often the process had loaded a state before it noted this: step numbers repeat after a load."""


class RankRecord:
    """The writing side: one rank's own, in one attempt.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self.file = NoteFile(note_file(folder, f"rank-{rank}"), generation, CAPACITY_BYTES)
        self._random = _RandomText()

    def note(self, step: int, loader: dict[str, Any] | None) -> bytes:
        """Note this rank's generators and its place in the data as those after ``step`` steps; returns the note.

        Raises:
            UsageError: the loader's state is more than JSON can hold.
        """
        text = b'{"rng":%b,"loader":%b,"era":%d}' % (self._random.now(), _loader_as_json(loader), SAVERS.loads)
        self.file.note(step, text, what="the loader's state")
        return text


def read_record(folder: Path, rank: int, step: int, generation: int) -> dict[str, Any] | None:
    """The own state of ``rank`` after ``step`` steps of that attempt, as a checkpoint holds it, and its era.

    None where neither the rank nor a copy of its notes is on this node.
    """
    text = raw_note(folder, f"rank-{rank}", step, generation)
    return None if text is None else decoded_record(text)


def _loader_as_json(loader: dict[str, Any] | None) -> bytes:
    try:
        text = json.dumps(loader)
        if json.loads(text) == loader:
            return text.encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise UsageError("the loader's state is not made of plain numbers, strings, lists and dicts")


def decoded_record(text: bytes) -> dict[str, Any] | None:
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
            parts.append(self._part("numpy", key, lambda _: json.dumps(savers.plain(state))))
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


# --- At a load of a state that was kept just in time: each rank's own notes, from whichever node has them ---
# A rank that has moved to another node finds its notes with a peer of the one that was lost. ``gather`` is a
# collective; notes are JSON and the bytes of buffers, nothing that is run. As the process group authenticates nothing,
# each carries a tag under the run's key for copies, for this load alone, as in ``memory_sources``; one without
# the right tag is none.

MAX_ASKED = 256
"""Ranks whose notes are looked for with other nodes; of more lost ones nothing is to be found."""

_LEAD = -1
_CONTEXT = struct.Struct("!qqqq")


@dataclass(frozen=True, slots=True)
class OwnNotes:
    """What this rank has found of one step; of which load before it, ``era`` says."""

    own: Mapping[str, Any] | None = None
    lead: LeadNote | None = None

    def of(self, era: int) -> OwnNotes:
        """Only what was noted after so many loads: step numbers repeat after one."""
        own = self.own if self.own is not None and self.own.get(ERA) == era else None
        lead = self.lead if self.lead is not None and self.lead.era == era else None
        return OwnNotes(None if own is None else {name: one for name, one in own.items() if name != ERA}, lead)


def gather(team: Team, memory: Path | None, identity: Identity, *, is_node_lead: bool) -> OwnNotes:
    """The notes of this rank, and of rank 0, on the step of ``identity``."""
    mine = _read(memory, team.rank, identity)
    lead = _read(memory, _LEAD, identity)
    rows, nonces = team.exchange_with_nonces([mine is None, lead is None])
    asked = [rank for rank, row in enumerate(rows) if row[0]][:MAX_ASKED]
    asked += [_LEAD] if any(row[1] for row in rows) else []
    if asked and team.world_size > 1:
        tags = _Tags(memory, identity, b"".join(nonces))
        found = {one: tags.added(one, _read(memory, one, identity)) for one in asked} if is_node_lead else {}
        lengths = team.exchange([len(found.get(one, b"")) for one in asked])
        for place, one in enumerate(asked):
            fitting = (0 < row[place] <= MAX_CAPACITY_BYTES + TAG_BYTES for row in lengths)
            source = next((rank for rank, fits in enumerate(fitting) if fits), None)
            if source is None:
                continue
            payload = tags.taken_off(one, team.bytes_from(source, found.get(one, b""), lengths[source][place]))
            if one == _LEAD:
                lead = lead or payload
            elif one == team.rank:
                mine = payload
    return OwnNotes(None if mine is None else decoded_record(mine), None if lead is None else decoded_lead(lead))


class _Tags:
    """Of the notes that travel at one load; without the run's key none does."""

    def __init__(self, memory: Path | None, identity: Identity, nonces: bytes) -> None:
        self._identity, self._nonces = identity, nonces
        try:
            self._key = read_copies_key(memory) if memory is not None else None
        except OSError:
            self._key = None

    def added(self, one: int, payload: bytes | None) -> bytes:
        """The note with its tag behind it; nothing where there is none."""
        return payload + self._tag(self._key, one, payload) if payload is not None and self._key is not None else b""

    def taken_off(self, one: int, received: bytes) -> bytes | None:
        """The note; None where it is not authentic."""
        payload, tag = received[:-TAG_BYTES], received[-TAG_BYTES:]
        if self._key is None or not secrets.compare_digest(tag, self._tag(self._key, one, payload)):
            return None
        return payload

    def _tag(self, key: bytes, one: int, payload: bytes) -> bytes:
        context = _CONTEXT.pack(*self._identity, one)
        return PieceTags(derived_key(key, "note", self._nonces, context), len(payload)).next_tag(payload)


def _read(memory: Path | None, one: int, identity: Identity) -> bytes | None:
    name = LEAD if one == _LEAD else f"rank-{one}"
    return None if memory is None else raw_note(memory, name, identity.step, identity.generation)


# --- Everything that one rank notes at the end of a step, so that any rank of its node can keep that step later ---

LATE_S = 1.0
"""How long a rank that has a part of the state waits for those of its node that end the same step after it: they may
have other parts."""

_LOOK_S = 0.002

Send = Callable[[str, int, NoteFile, bytes], None]
"""Sends a note (name, step, file and payload) to other nodes, and waits for nothing."""


class BoundaryNotes:
    """One rank's notes in one attempt.

    Args:
        folder: the node's memory folder.

    Raises:
        OSError: there is no room for them.
    """

    def __init__(self, folder: Path, rank: int, send: Send | None) -> None:
        self._folder, self._rank, self._send = folder, rank, send
        self._record = RankRecord(folder, rank, own_generation())
        self._lead: LeadRecord | None = None
        self._extra: Extra | None = None
        self._buffers: Mapping[str, torch.Tensor] | None = None

    @property
    def has_extra(self) -> bool:
        """Whether the run has an ``extra``, which rank 0 notes."""
        return self._extra is not None

    def covers(self, extra: Extra | None, buffers: Mapping[str, torch.Tensor] | None) -> bool:
        """From now on note these as well, on rank 0; whether they were noted at the last boundary, too.

        ``buffers`` are None where the host would have to wait for them.

        Raises:
            OSError: there is no room for them.
        """
        was, self._extra = self._extra, extra
        if self._lead is not None and self._buffers is buffers:
            self._lead.extra = extra  # often a function that is made anew at each save
            return was == extra
        # before the next one: where there is no room for that, this one's memory has no file behind it any more
        self._lead, self._buffers = None, buffers
        if self._rank == 0 and (extra is not None or can_be_noted(buffers or {})):
            self._lead = LeadRecord(self._folder, own_generation(), extra, buffers or {})
            return False
        return was == extra or self._rank != 0

    def note(self, step: int, loader: dict[str, Any] | None) -> None:
        """Note what is so after ``step`` steps.

        Raises:
            UsageError, CheckpointError: something is more than a note can hold.
        """
        payload = self._record.note(step, loader)
        if self._send is not None:
            self._send(f"rank-{self._rank}", step, self._record.file, payload)
        self.note_lead(step)

    def note_lead(self, step: int) -> None:
        """Note what rank 0 alone has; on other ranks nothing.

        Raises:
            UsageError, CheckpointError: something is more than a note can hold.
        """
        if self._lead is not None:
            payload = self._lead.note(step)
            if self._send is not None:
                self._send(LEAD, step, self._lead.file, payload)

    def own_states(self, step: int, *, within_s: float = 0.0) -> dict[int, dict[str, Any]]:
        """The own state of every rank of this node after ``step`` steps, and of those whose notes were sent here.

        A rank of this node may come to the end of the step a moment later: so long is it waited for.

        Raises:
            UsageError: that of a rank of this node is not known.
        """
        states: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + within_s
        for rank in ranks_of_this_node():
            while (state := self._own_state(rank, step)) is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if state is None:
                raise UsageError(f"the own state of rank {rank} after step {step} is not known")
            states[rank] = state
        for path in sorted((self._folder / PEERS).glob("rank-*.record")):
            number = path.stem.removeprefix("rank-")
            rank = int(number) if number.isdecimal() else -1
            if rank >= 0 and rank not in states and (state := self._own_state(rank, step)) is not None:
                states[rank] = state
        return states

    def _own_state(self, rank: int, step: int) -> dict[str, Any] | None:
        state = read_record(self._folder, rank, step, own_generation())
        return None if state is None or state.pop(ERA) != SAVERS.loads else state

    def lead(self, step: int) -> LeadNote | None:
        """What rank 0 had after ``step`` steps; None where that is unknown on this node."""
        note = read_lead(self._folder, step, own_generation())
        return None if note is None or note.era != SAVERS.loads else note


# --- note sender ---
# Notes of each step (``RankRecord``, ``LeadNote``) on their way to the memory of other nodes, from the trainer.
#
# A node that dies takes its ranks' random numbers and places in the data with it; these few bytes are all that the
# other replicas do not have. One thread for each peer sends them; the training loop waits for none, and what cannot be
# sent is dropped for what is newer.

SENDER_PAUSE_S = 0.5

log = logging.getLogger(__name__)


class _Note(NamedTuple):
    message: dict[str, Any]
    """What goes ahead of it (``replicas``)."""

    payload: bytes


class NoteSender:
    """Sends one rank's notes to each of its node's peers."""

    def __init__(self, peers: Sequence[Peer], key_file: Path) -> None:
        self._lanes = [_Lane(peer, key_file) for peer in peers]

    def offer(self, name: str, step: int, file: NoteFile, payload: bytes) -> None:
        """Send this one as soon as possible."""
        message = {"note": step, "name": name, "generation": file.generation, "capacity": file.capacity_bytes}
        note = _Note(message | {"bytes": len(payload)}, payload)
        for lane in self._lanes:
            lane.put(note)


def note_sender() -> Send | None:
    """Sends this rank's notes to the peers of its node; None where it has none."""
    return NoteSender(peers, key_file() or Path()).offer if (peers := find_peers()) else None


class _Lane:
    def __init__(self, peer: Peer, key_file: Path) -> None:
        self._peer, self._key_file = peer, key_file
        self._waiting: deque[_Note] = deque(maxlen=2 * NOTES)
        self._changed = threading.Condition()
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
                self._changed.wait_for(lambda: self._waiting, SENDER_PAUSE_S if unanswered else None)
                note = self._waiting.popleft() if self._waiting else None
            try:
                if note is not None:
                    unanswered.append(note)
                    wire = wire or connected(self._peer, self._key_file)
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
                time.sleep(SENDER_PAUSE_S)

    def _tell(self, note: _Note, problem: str) -> None:
        """Once when it fails, and when it works again."""
        if problem and not self._has_warned:
            log.warning(
                "node %d has no notes of this rank from step %d on, so a step may be lost with this node: %s",
                self._peer.place, note.message["note"], problem,
            )  # fmt: skip
        elif self._has_warned and not problem:
            log.info("node %d has notes of this rank again, from step %d on", self._peer.place, note.message["note"])
        self._has_warned = bool(problem)


def _send(wire: Wire, note: _Note) -> None:
    wire.deadline = time.monotonic() + SILENCE_S
    wire.send(note.message)
    wire.send_blob(note.payload)


def _answer(wire: Wire) -> str:
    """Why the peer has not taken its oldest note without an answer; empty where it has."""
    wire.deadline = time.monotonic() + SILENCE_S
    answer = wire.receive().get("answer")
    return "" if answer == "kept" else str(answer)[:500]
