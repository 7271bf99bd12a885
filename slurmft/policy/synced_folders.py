"""Whether a node keeps what its folder holds, or gets the version that is stored: ``sync`` in the configuration.

Nothing here looks at a clock, which may differ between nodes: versions are ordered by the generation of the attempt
that wrote them, and counted within it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Version(NamedTuple):
    """The order of versions; a newer attempt's are newer, whatever an older one still writes."""

    generation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.sequence}"


NONE = Version(-1, -1)


class Choice(StrEnum):
    """What is done before the workers start."""

    KEEP = "keep"
    RESTORE = "restore"
    SET_ASIDE = "set aside"
    """Move what is there away, and begin with an empty folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """What a node has in its folder.

    ``run``: the run that used it last, empty where that is unknown. ``version``: the one it was taken from, or stored
    as. ``generation``: of the last attempt that used it. ``changed``: files differ from that version. ``damaged``: a
    file was cut off while it was written, or a restore did not come to its end.
    """

    has_files: bool
    run: str = ""
    version: Version = NONE
    generation: int = -1
    changed: bool = False
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, its reason, and whether what is there is kept beside it."""

    choice: Choice
    reason: str
    spare_old: bool = False


def decide(local: Local, stored: Version | None, *, run: str, follows_lead: bool) -> Decision:
    """What follows from both.

    Args:
        stored: the newest complete version; None where there is none.
        follows_lead: the first node's version is for all nodes, and this is another one.
    """
    is_ours = local.run == run
    if stored is None:
        if local.has_files and local.run and not is_ours:
            return Decision(Choice.SET_ASIDE, "the files are those of another run", spare_old=True)
        return Decision(Choice.KEEP, "nothing is stored yet")
    if not local.has_files:
        return Decision(Choice.RESTORE, "the folder is empty")
    if not is_ours:
        return Decision(Choice.RESTORE, "the files are not of this run", spare_old=True)
    if local.damaged:
        return Decision(Choice.RESTORE, "a file here is incomplete", spare_old=True)
    if local.version >= stored:
        return Decision(Choice.KEEP, "nothing newer is stored")
    if not local.changed:
        return Decision(Choice.RESTORE, "an older version is here")
    if follows_lead:
        return Decision(Choice.RESTORE, "the first node has stored a newer one", spare_old=True)
    if local.generation >= stored.generation:
        return Decision(Choice.KEEP, "the last attempt saved here")
    return Decision(Choice.RESTORE, "a later attempt has saved elsewhere", spare_old=True)
