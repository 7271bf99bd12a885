"""Requests that kill engines: a death makes suspects of all that were in flight, and only one alone is proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KILLS = 2
"""Replicas that a request must have killed while it was alone on them."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a replica while a request was in flight on it."""

    replica: str
    """One life of a replica: a restart is another one."""

    alone: bool
    """Nothing else was in flight."""

    how: str
    """The end, in words: signal, exit code or hang."""


def is_poison(deaths: Sequence[Death]) -> bool:
    """Whether the request killed ``KILLS`` replicas alone: it is not tried again."""
    return len({death.replica for death in deaths if death.alone}) >= KILLS


def evidence_of(deaths: Sequence[Death]) -> str:
    """The deaths in one sentence, for the request's error record."""
    alone = [death for death in deaths if death.alone]
    told = "; ".join(f"{death.replica}: {death.how}" for death in alone)
    return f"the engine died {len(alone)} times while it worked on this request alone ({told})"
