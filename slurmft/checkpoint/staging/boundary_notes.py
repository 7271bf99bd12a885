"""Everything that one rank notes at the end of a step, so that any rank of its node can keep that step later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slurmft.checkpoint.folders import own_generation
from slurmft.checkpoint.staging.lead_note import Extra, LeadNote, LeadRecord, can_be_noted, read_lead
from slurmft.checkpoint.staging.note_file import NoteFile
from slurmft.checkpoint.staging.rank_records import ERA, RankRecord, read_record
from slurmft.errors import UsageError
from slurmft.storage.memory_folder import PEERS, ranks_of_this_node
from slurmft.trainer.savers import SAVERS

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
                self._send("lead", step, self._lead.file, payload)

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
