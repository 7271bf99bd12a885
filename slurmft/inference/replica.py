"""One engine of a node, as its pool sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Self

from slurmft.inference.replica_health import Watched

EXIT_CODE = "exit code"
RENEWED = "it gets another engine"


class Phase(StrEnum):
    """A replica's state."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """For its next start."""

    DOWN = "down"
    """It stays so until the next attempt."""

    OFF = "off"
    """It is not needed for the load."""


@dataclass(slots=True)
class Replica:
    """One engine of this node."""

    number: int
    phase: Phase = Phase.WAITING
    life: int = 0
    generation: int = 0
    """The run's at the start of this life; part of its segments' names."""

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

    is_giving_back: bool = False
    """It was told to end with what it has, as the time of a stop is up."""

    is_leaving: bool = False
    """It was told to end, as it is not needed for the load."""

    answered: int = 0
    """Requests completed in this life."""

    ends: dict[str, int] = field(default_factory=dict)
    """Its segments of this life, and up to where they were reported."""

    is_held: bool = False
    """The disk takes none of its answers."""

    port: int = 0
    """Where its gate listens; 0 for a replica of a batch."""

    why: str = ""
    """What it is killed for."""

    is_hung: bool = False
    """That is a hang."""

    hung_before: bool = False
    """So was the end of the life before this one, in which it had answered nothing."""

    last: Watched = field(default_factory=lambda: Watched(0.0))
    """What was known of its last life at the end."""

    def begin(self, generation: int) -> None:
        """Another life of it, in which nothing of the last one counts."""
        self.life, self.generation = self.life + 1, generation
        self.phase, self.slots, self.answered, self.alone = Phase.STARTING, 0, 0, False
        self.in_flight, self.begun, self.void, self.ends, self.why = {}, set(), 0, {}, ""
        self.is_held = self.is_giving_back = self.is_hung = self.is_leaving = False

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


def slow_requests(replicas: Sequence[Replica], before_s: float) -> list[int]:
    """Requests that only one of these has, since before this moment (monotonic), and not alone."""
    held = Counter(index for replica in replicas for index in replica.in_flight)
    return [
        index for replica in replicas if not replica.alone for index, since_s in replica.in_flight.items()
        if held[index] == 1 and since_s < before_s
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """What the agent tells a driver."""

    socket: str
    config: str
    """The run's configuration."""

    generation: int
    node: int
    replica: int
    life: int
    """How often this replica was started by this agent; part of its segments' names."""

    device: str
    """For a callable; empty: whatever there is."""

    def as_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """As ``as_text`` wrote it."""
        return cls(**json.loads(text))
