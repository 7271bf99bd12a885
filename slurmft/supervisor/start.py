"""One attempt that may begin: the run is ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slurmft.storage.journal import Event
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.cluster import Cluster


class LeaseHolder(Protocol):
    """The supervisor's side of a lease that a standby watches."""

    @property
    def is_lost(self) -> bool:
        """Whether a standby may have taken the run over."""

    def confirm(self) -> bool:
        """Whether the run is this process's, now and for some seconds; blocks while that cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The inputs of an attempt's supervisor."""

    cluster: Cluster
    run: RunFolder
    journal: PatientJournal
    thread: FolderThread
    """Does everything in the run folder that the supervisor must not wait for."""

    generation: int
    """As which this process owns the run; of a candidate the owner's."""

    history: Sequence[Event] = field(repr=False)
    """The journal as it was before."""

    reached: int = 0
    """Newest step that an earlier attempt has done; those up to it are done again."""

    secret: bytes = field(repr=False)
    """The control channel's."""

    lease: LeaseHolder | None = None
    """What this process holds the run by, where a standby may take it over."""

    candidate: bool = False
    """Another job owns the run, and this one is to take it over: it decides nothing."""
