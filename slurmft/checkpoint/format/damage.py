"""The kinds of damage to a checkpoint. No torch."""

from __future__ import annotations

from enum import IntEnum


class Damage(IntEnum):
    """The damage to a file; an integer, so that ranks can exchange it."""

    NONE = 0
    MISSING = 1
    TRUNCATED = 2
    CHANGED = 3
    UNREADABLE = 4
    NEWER = 5
    MISFIT = 6
    QUARANTINED = 7
    GIVEN_UP = 8
    """Quarantined, and where nothing else is left the run begins anew."""

    ASTRAY = 9

    @property
    def text(self) -> str:
        """A text that continues the file's name."""
        return _DAMAGE_TEXT[self]


_DAMAGE_TEXT = {
    Damage.NONE: "is intact",
    Damage.MISSING: "is missing",
    Damage.TRUNCATED: "has the wrong size",
    Damage.CHANGED: "has the wrong checksum",
    Damage.UNREADABLE: "cannot be read",
    Damage.NEWER: "was written by a newer slurmft",
    Damage.QUARANTINED: "belongs to a quarantined checkpoint",
    Damage.GIVEN_UP: "belongs to a quarantined checkpoint",
    Damage.MISFIT: "does not fit the objects to load it into",
    Damage.ASTRAY: "has ranks at different places in the data",
}


class Damaged(Exception):
    """A file of a checkpoint cannot be used; never leaves this package."""

    def __init__(self, damage: Damage, file_name: str, detail: str = "", *, hint: str = "") -> None:
        super().__init__(f"{file_name} {damage.text}" + (f": {detail}" if detail else ""))
        self.damage = damage
        self.file_name = file_name
        self.hint = hint
