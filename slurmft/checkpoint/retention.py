"""Which checkpoints stay. Pure: entries in, entries out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmft.checkpoint.catalog import Entry

KEPT_QUARANTINED = 2
"""Enough to look into why runs die from them."""

BestMode = Literal["min", "max"]


def by_merit(entries: Sequence[Entry], metric: str, mode: BestMode) -> list[Entry]:
    """Entries that have a finite ``metric``, the best first, of equals the newest first.

    Not a number and infinity are never best: a diverged run must not push out its last good state.
    """
    sign = 1 if mode == "min" else -1
    known = [entry for entry in entries if math.isfinite(entry.metrics.get(metric, math.nan))]
    return sorted(known, key=lambda entry: (sign * entry.metrics[metric], -entry.commit))


@dataclass(frozen=True, slots=True)
class Retention:
    """What may go now."""

    remove: list[Entry]
    """Oldest first."""

    oldest_kept_commit: int
    """Whatever was committed before this one is no longer needed as evidence either."""


def decide(
    newest_first: Sequence[Entry], *, keep_last_n: int, best: Entry | None, distrusted: Collection[Path]
) -> Retention:
    """Keep the newest commits of ``keep_last_n`` different steps, and ``best``; the others may go.

    A distrusted checkpoint (a load found it damaged, or it is quarantined) does not count as one of the kept, so that
    the last good one is never removed in its favour. It stays as evidence until it is older than every kept one; of the
    quarantined ones, whatever their age, the newest ``KEPT_QUARANTINED`` stay.
    """
    quarantined = [entry.path for entry in newest_first if entry.quarantine]
    bad = {*distrusted, *quarantined}
    kept: list[Entry] = []
    for entry in newest_first:
        is_new_step = all(entry.step != other.step for other in kept)
        if len(kept) < keep_last_n and is_new_step and entry.path not in bad:
            kept.append(entry)
    oldest_kept = min((entry.commit for entry in kept), default=0)
    stays = {entry.path for entry in kept} | ({best.path} if best else set())
    stays |= {entry.path for entry in newest_first if entry.path in bad and entry.commit > oldest_kept}
    stays = (stays - set(quarantined)) | set(quarantined[:KEPT_QUARANTINED])
    return Retention([entry for entry in reversed(newest_first) if entry.path not in stays], oldest_kept)
