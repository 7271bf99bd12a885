"""At a load of a state that was kept just in time: each rank's own notes, from whichever node has them.

A rank that has moved to another node finds its notes with a peer of the one that was lost. Every function here is a
collective; the notes are JSON and the bytes of buffers, nothing that is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.checkpoint.staging import lead_note, rank_records
from slurmft.checkpoint.staging.lead_note import LeadNote
from slurmft.checkpoint.team import Team
from slurmft.storage.checkpoint_names import Identity

MAX_ASKED = 256
"""Ranks whose notes are looked for with other nodes; of more lost ones nothing is to be found."""

_LEAD = -1


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
    rows = team.exchange([mine is None, lead is None])
    asked = [rank for rank, (lacks, _) in enumerate(rows) if lacks][:MAX_ASKED]
    asked += [_LEAD] if any(lacks for _, lacks in rows) else []
    if asked and team.world_size > 1:
        found = {one: _read(memory, one, identity) for one in asked} if is_node_lead else {}
        lengths = team.exchange([len(found.get(one) or b"") for one in asked])
        for place, one in enumerate(asked):
            source = next((rank for rank, row in enumerate(lengths) if row[place]), None)
            if source is None:
                continue
            payload = team.bytes_from(source, found.get(one) or b"", lengths[source][place])
            if one == _LEAD:
                lead = lead or payload
            elif one == team.rank:
                mine = payload
    return OwnNotes(
        None if mine is None else rank_records.decoded(mine), None if lead is None else lead_note.decoded(lead)
    )


def _read(memory: Path | None, one: int, identity: Identity) -> bytes | None:
    if memory is None:
        return None
    if one == _LEAD:
        return lead_note.raw_lead(memory, identity.step, identity.generation)
    return rank_records.raw_record(memory, one, identity.step, identity.generation)
