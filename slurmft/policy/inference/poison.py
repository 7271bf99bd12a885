"""Requests that kill engines: a death makes suspects of all that were in flight, and only one alone is proof."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

KILLS = 2
"""Replicas that a request must have killed while it was alone on them."""


OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that come from outside of an engine."""


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


def has_crashed(code: int) -> bool:
    """Whether an engine ended by its own fault, perhaps that of a request; ``code`` as ``Popen.returncode``."""
    return code != 0 and -code not in OUTSIDE


def poisonous(crashes: Sequence[int]) -> int | None:
    """Which of the requests on an engine of an endpoint that has crashed is to blame; None where it is not clear.

    Engines of an endpoint work on many requests at once, and none of them can wait until it is alone. All on a crashed
    engine are suspects, and are spread over the others: fewer have been on one more with each crash, in the end one.

    Args:
        crashes: of other engines with each of them, before this one.
    """
    most = max(crashes, default=0)
    return crashes.index(most) if most >= KILLS - 1 and crashes.count(most) == 1 else None


def weight(crashes: Sequence[int]) -> int:
    """By how much other suspects are to be kept from an engine that works on some: most by those with most crashes."""
    return sum(64 ** min(each, 8) for each in crashes)


def evidence_of(deaths: Sequence[Death]) -> str:
    """The deaths in one sentence, for the request's error record."""
    alone = [death for death in deaths if death.alone]
    told = "; ".join(f"{death.replica}: {death.how}" for death in alone)
    return f"the engine died {len(alone)} times while it worked on this request alone ({told})"
