"""When a standby supervisor may take a run over, and when a supervisor must take itself for cut off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LEASE_S = 4.0
"""A supervisor that has been heard of since then, by its connection or its file, keeps the run."""

RENEW_S = 0.5
"""How often a supervisor renews its lease."""

YIELD_S = 3 * LEASE_S
"""How long a supervisor that can reach neither Slurm nor its standby leaves the run to that one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """What a standby knows of the supervisor."""

    unheard_s: float
    """Since the last message by the connection."""

    lease_age_s: float | None
    """Of the file in the run folder, by the file server's clock; None where that cannot be told."""


def may_claim(silence: Silence) -> bool:
    """Whether the supervisor has lost its lease, as far as one look shows; unknown is not lost."""
    age_s = silence.lease_age_s
    return silence.unheard_s >= LEASE_S and age_s is not None and age_s >= LEASE_S


def is_valid(*, now_s: float, file_at_s: float, heard_at_s: float) -> bool:
    """Whether a supervisor still holds its lease: the standby has promised to wait, by either way, from then on.

    Args:
        now_s: of the supervisor's monotonic clock, as the others.
        file_at_s: just before the last renewal of the file that has succeeded.
        heard_at_s: when the message was sent that the standby has answered last.
    """
    return now_s < max(file_at_s, heard_at_s) + LEASE_S


def choose(nodes: Sequence[str], own: str, avoid: Collection[str]) -> str | None:
    """The first node, in the allocation's order, that is not the supervisor's own and has not failed at it before."""
    return next((node for node in nodes if node != own and node not in avoid), None)
