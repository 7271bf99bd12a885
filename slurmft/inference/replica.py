"""One engine of a node, as its pool sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass, field
from enum import StrEnum

EXIT_CODE = "exit code"


class Phase(StrEnum):
    """A replica's state."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """For its next start."""

    DOWN = "down"
    """It stays so until the next attempt."""


@dataclass(slots=True)
class Replica:
    """One engine of this node."""

    number: int
    phase: Phase = Phase.WAITING
    life: int = 0
    slots: int = 0
    writer: asyncio.StreamWriter | None = None
    in_flight: dict[int, float] = field(default_factory=dict)
    """Requests that it has, and since when (monotonic)."""

    begun: set[int] = field(default_factory=set)
    """Of those, the ones that its engine has; the others wait in the driver."""

    void: int = 0
    """Requests that it still works on although their lease was revoked."""

    alone: bool = False
    """It works on a suspect, and gets nothing else until that is over."""

    answered: int = 0
    """Requests completed in this life."""

    ends: dict[str, int] = field(default_factory=dict)
    """Its segments of this life, and up to where they were reported."""

    why: str = ""
    """What it is killed for."""

    def room(self, ahead: int = 0) -> int:
        """Requests that it can take now, of which ``ahead`` wait for a slot."""
        if self.phase is not Phase.READY or self.alone:
            return 0
        return max(0, self.slots + ahead - len(self.in_flight) - self.void)


def how_it_ended(code: int) -> str:
    """An exit code in words; negative, or above 128: a signal."""
    if code < 0 or 128 < code < 160:
        number = -code if code < 0 else code - 128
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(number).name}"
    return f"{EXIT_CODE} {code}"
