"""What an agent reports of folders that are kept (``sync:``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurmft.ipc.shapes import Count, Name, Seconds, Sent, Words


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport(Sent):
    """Something has happened to a kept folder. ``what``: as in ``supervisor.fleet.kept_folders``."""

    kind: ClassVar[str] = "synced"
    told_as: ClassVar[str] = "a report of a kept folder"
    what: Name
    path: Words
    reason: Words = ""
    version: Words = ""
    files: Count = 0
    bytes: Count = 0
    took_s: Seconds = 0.0
