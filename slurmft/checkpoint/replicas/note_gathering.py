"""At a load of a state that was kept just in time: each rank's own notes, from whichever node has them.

A rank that has moved to another node finds its notes with a peer of the one that was lost. ``gather`` is a collective;
notes are JSON and the bytes of buffers, nothing that is run. As the process group authenticates nothing, each carries a
tag under the run's key for copies, for this load alone, as in ``supply``; one without the right tag is none.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.checkpoint.staging import lead_note, rank_records
from slurmft.checkpoint.staging.lead_note import LeadNote
from slurmft.checkpoint.staging.note_file import MAX_CAPACITY_BYTES
from slurmft.checkpoint.team import Team
from slurmft.storage.checkpoint_names import Identity
from slurmft.storage.memory_folder import read_copies_key
from slurmft.system.authentication import TAG_BYTES, PieceTags, derived_key

MAX_ASKED = 256
"""Ranks whose notes are looked for with other nodes; of more lost ones nothing is to be found."""

_LEAD = -1
_NONCE_WORDS, _WORD_BITS = 2, 62
_CONTEXT = struct.Struct("!qqqq")


@dataclass(frozen=True, slots=True)
class OwnNotes:
    """What this rank has found of one step; of which load before it, ``era`` says."""

    own: Mapping[str, Any] | None = None
    lead: LeadNote | None = None

    def of(self, era: int) -> OwnNotes:
        """Only what was noted after so many loads: step numbers repeat after one."""
        own, lead = self.own, self.lead
        if own is not None:
            own = {name: value for name, value in own.items() if name != rank_records.ERA}
            own = own if self.own is not None and self.own.get(rank_records.ERA) == era else None
        return OwnNotes(own, lead if lead is not None and lead.era == era else None)


def gather(team: Team, memory: Path | None, identity: Identity, *, is_node_lead: bool) -> OwnNotes:
    """The notes of this rank, and of rank 0, on the step of ``identity``."""
    mine = _read(memory, team.rank, identity)
    lead = _read(memory, _LEAD, identity)
    nonce = [secrets.randbits(_WORD_BITS) for _ in range(_NONCE_WORDS)]
    rows = team.exchange([mine is None, lead is None, *nonce])
    rows[team.rank][2:] = nonce  # never a value for ours that another rank sends
    asked = [rank for rank, row in enumerate(rows) if row[0]][:MAX_ASKED]
    asked += [_LEAD] if any(row[1] for row in rows) else []
    if asked and team.world_size > 1:
        tags = _Tags(memory, identity, b"".join(struct.pack("!2q", *row[2:]) for row in rows))
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
    return OwnNotes(
        None if mine is None else rank_records.decoded(mine), None if lead is None else lead_note.decoded(lead)
    )


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
        context = _CONTEXT.pack(self._identity.step, self._identity.generation, self._identity.commit, one)
        return PieceTags(derived_key(key, "note", self._nonces, context), len(payload)).next_tag(payload)


def _read(memory: Path | None, one: int, identity: Identity) -> bytes | None:
    if memory is None:
        return None
    if one == _LEAD:
        return lead_note.raw_lead(memory, identity.step, identity.generation)
    return rank_records.raw_record(memory, one, identity.step, identity.generation)
