"""The faults that can be injected on purpose, where each of them is carried out, and which rank is hit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_AFTER_S = 7 * 86_400.0
NOT_YET = "has not been forked yet"
"""Why an agent has not hit a rank whose worker waits for imports: the supervisor asks again."""


class Fault(StrEnum):
    """The kind of fault, as named by ``slurmft inject``."""

    KILL = "kill"
    """SIGKILL from outside, as from an operator or the kernel."""

    STOP = "stop"
    """SIGSTOP: it lives, holds all it has, and does nothing."""

    HANG = "hang"
    """Its main thread sleeps for ever at the next step boundary."""

    EXCEPTION = "exception"
    """It raises at the next step boundary."""

    NAN = "nan"
    """The first module of the next forward pass computes NaN, once; so the loss is NaN."""

    BIT_FLIP = "bit-flip"
    """At the next step boundary one bit of a parameter changes, silently."""

    BIT_FLIP_MOMENT = "bit-flip-moment"
    """One bit of the optimizer's state does."""

    BIT_FLIP_GRADIENT = "bit-flip-gradient"
    """One bit of a gradient does, after gradients were summed over the ranks and before the optimizer uses them."""

    CORRUPT_CHECKPOINT = "corrupt-newest-checkpoint"
    """Bytes in the newest committed checkpoint change."""


BY_SIGNAL: Mapping[Fault, str] = {Fault.KILL: "SIGKILL", Fault.STOP: "SIGSTOP"}
"""Faults that reach any process."""

IN_SESSION = frozenset(Fault) - {*BY_SIGNAL, Fault.CORRUPT_CHECKPOINT}
"""Faults that the worker's own session carries out at its next step boundary."""

SIMULATED: Mapping[str, Fault] = {"rank_killed": Fault.KILL, "rank_hung": Fault.STOP}
"""Values of fault_tolerance.simulated_fault_type, beside ``random``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request for a fault."""

    fault: Fault
    who: str
    rank: int | None = None
    """The rank to hit; by chance when neither it nor a node is given."""

    node: str = ""
    """All ranks of this node: its host name, or its number."""

    after_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For the request's file."""
        return {
            "fault": self.fault.value,
            "who": self.who,
            "rank": self.rank,
            "node": self.node,
            "after_s": self.after_s,
        }


def order_of(value: Any) -> Order:
    """An order from plain values.

    Raises:
        ValueError: it is invalid; says why.
    """
    if not isinstance(value, Mapping):
        raise ValueError("it is not an object")
    fault, rank, node = value.get("fault"), value.get("rank"), value.get("node", "")
    after_s, who = value.get("after_s", 0.0), value.get("who", "")
    if fault not in tuple(Fault) or fault not in (*BY_SIGNAL, *IN_SESSION):
        raise ValueError(f"{str(fault)[:40]!r} is not a fault of a rank")
    if rank is not None and (type(rank) is not int or not 0 <= rank < 2**31):
        raise ValueError(f"rank {str(rank)[:40]!r} is none")
    if not isinstance(node, str) or len(node) > 255 or not isinstance(who, str):
        raise ValueError("its node or its author is not a text")
    if type(after_s) not in (int, float) or not math.isfinite(after_s) or not 0 <= after_s <= MAX_AFTER_S:
        raise ValueError(f"after_s={str(after_s)[:40]} is not between 0 and {MAX_AFTER_S:.0f} seconds")
    return Order(fault=Fault(fault), who=who[:200], rank=rank, node=node, after_s=float(after_s))
