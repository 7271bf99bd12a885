"""Which checkpoints stay. Pure: entries in, entries out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.checkpoint.catalog import Entry
from slurmft.checkpoint.writer.write_requests import BestMode

KEPT_QUARANTINED = 2
"""Enough to look into why runs die from them."""

NEVER_REMOVED = 2
"""The newest good checkpoint may turn out damaged when it is needed; then there is still one."""


def by_merit(entries: Sequence[Entry], metric: str, mode: BestMode) -> list[Entry]:
    """Entries that have a finite ``metric``, the best first, of equals the newest first.

    Not a number and infinity are never best: a diverged run must not push out its last good state.
    """
    sign = 1 if mode == "min" else -1
    known = [entry for entry in entries if math.isfinite(entry.metrics.get(metric, math.nan))]
    return sorted(known, key=lambda entry: (sign * entry.metrics[metric], -entry.commit))


@dataclass(frozen=True, slots=True)
class Retention:
    """The checkpoints that may be removed now."""

    remove: list[Entry]
    """Oldest first."""

    oldest_kept_commit: int
    """Checkpoints committed before this one are no longer needed as evidence either."""


def decide(
    newest_first: Sequence[Entry],
    *,
    keep_last_n: int,
    keep_every: int = 0,
    best: Entry | None = None,
    distrusted: Collection[Path] = (),
    verified: Collection[Path] = (),
) -> Retention:
    """Keep the newest commits of ``keep_last_n`` different steps, the first at or after every multiple of
    ``keep_every`` steps (saves that are spaced by time hit none), and ``best``.

    A distrusted checkpoint (a load found it damaged, or it is quarantined) does not count as one of the kept, so that
    the last good one is never removed in its favour. It stays as evidence until it is older than the newest
    ``keep_last_n``; of the quarantined ones, of any age, the newest ``KEPT_QUARANTINED`` stay. The newest
    ``NEVER_REMOVED`` good commits always stay, and so does the newest of ``verified``, on which all replicas agreed.
    """
    quarantined = [entry.path for entry in newest_first if entry.quarantine]
    bad = {*distrusted, *quarantined}
    good = [entry for entry in newest_first if entry.path not in bad]
    newest_of_step: dict[int, Entry] = {}
    for entry in good:
        newest_of_step.setdefault(entry.step, entry)
    last = list(newest_of_step.values())[:keep_last_n]
    sure = next((entry for entry in good if entry.path in verified), None)
    kept = {entry.path for entry in (*last, *good[:NEVER_REMOVED], *(each for each in (best, sure) if each))}
    if keep_every:
        first_since = {step // keep_every: entry for step, entry in sorted(newest_of_step.items(), reverse=True)}
        kept |= {entry.path for entry in first_since.values() if entry.step >= keep_every}
    oldest_kept = min((entry.commit for entry in last), default=0)
    evidence = {entry.path for entry in newest_first if entry.path in bad and entry.commit > oldest_kept}
    stays = ((kept | evidence) - set(quarantined)) | set(quarantined[:KEPT_QUARANTINED])
    return Retention([entry for entry in reversed(newest_first) if entry.path not in stays], oldest_kept)
