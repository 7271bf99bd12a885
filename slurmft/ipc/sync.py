"""What an agent reports of folders that are kept (``sync:``)."""

from __future__ import annotations

from slurmft.ipc.shapes import Count, Name, Seconds, Sent, Words, written


class SyncReport(Sent, frozen=True, kw_only=True, tag="synced"):
    """Something has happened to a kept folder. ``what``: as in ``supervisor.fleet.kept_folders``."""

    what: Name
    path: Words
    reason: Words = written("")
    version: Words = written("")
    files: Count = written(0)
    bytes: Count = written(0)
    took_s: Seconds = written(0.0)
