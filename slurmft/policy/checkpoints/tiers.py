"""Where a restart reads from: one decision from what all nodes hold and what is committed on disk.

A snapshot is named by (step, generation, commit), as its folder on disk would be. Copies that its nodes still hold in
memory, of their own or of a peer, or on their local disks, are as good as the disk where they are whole; and newer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

Name = tuple[int, int, int]
"""Step, generation, commit."""

MAX_TRIES = 2
"""So often a run may die from a snapshot that was never committed before it goes back to one that was."""

DISK = None
"""The supplier of a shard that no rank holds."""


class Tier(IntEnum):
    """Where a node holds a shard, in the order in which it is taken."""

    MEMORY = 0
    PEER = 1
    """A copy of another node's, in memory."""

    LOCAL_DISK = 2
    STAGING = 3
    """The folder beside the checkpoints that takes what does not fit into memory; every node sees it."""

    @property
    def text(self) -> str:
        return ("memory", "memory of a peer", "a local disk", "the staging folder")[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The shards of one snapshot that one rank can supply."""

    rank: int
    name: Name
    shards: int
    """How many make the whole."""

    held: Mapping[int, Tier]
    verified: bool = True
    """Its bytes have digests, and none was found to be wrong."""

    tries: int = 0
    """How often a run has begun with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The newest checkpoint on the shared filesystem that a run may begin with."""

    name: Name
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The snapshot that all ranks load."""

    name: Name | None
    """None where there is nothing to resume from."""

    suppliers: tuple[int | None, ...] = ()
    """For each shard the rank that supplies it, or DISK."""

    reason: str
    skipped: tuple[str, ...] = ()
    """Why each newer snapshot is not used."""

    is_committed: bool = False
    """It is on disk as well, so that any shard can come from there."""


def choose(
    offers: Iterable[Offer],
    committed: Committed | None,
    *,
    generation: int,
    quarantined: Collection[Name] = (),
    refused: Mapping[Name, str] | None = None,
    max_tries: int = MAX_TRIES,
) -> Decision:
    """The newest snapshot that can be supplied whole; the order of ``offers`` does not matter.

    Args:
        generation: of the attempt that resumes; snapshots of a newer one are another attempt's.
        quarantined: never used, wherever they lie.
        refused: those that turned out not to be usable, and why.

    Raises:
        ValueError: a number is not a whole number, or negative, or a shard lies outside its snapshot.
    """
    offers = list(offers)
    _check(offers, committed, generation)
    found: defaultdict[Name, list[Offer]] = defaultdict(list)
    for offer in offers:
        found[offer.name].append(offer)
    seen = {*found} | ({committed.name} if committed else set())
    skipped: list[str] = []
    for name in sorted(found, key=_age, reverse=True):
        if committed is not None and _age(name) < _age(committed.name):
            break  # a snapshot older than the committed one is never used, and not worth a message
        on_disk = committed if committed is not None and committed.name == name else None
        problem = (refused or {}).get(name) or _why_not(name, seen, generation, quarantined)
        problem = problem or _unfit(found[name], on_disk, max_tries)
        if not problem and on_disk is None:
            problem = _lacking(found[name])
        if problem:
            skipped.append(f"step {name[0]} in memory: {problem}")
            continue
        return _supplied(name, found[name], on_disk, skipped)
    if committed is None:
        return Decision(name=None, reason="there is nothing to resume from", skipped=tuple(skipped))
    return Decision(
        name=committed.name,
        suppliers=(DISK,) * committed.shards,
        reason=_words(committed.name, skipped),
        skipped=tuple(skipped),
        is_committed=True,
    )


def _words(name: Name, skipped: Sequence[str]) -> str:
    return f"disk: step {name[0]}" + (f"; {skipped[0]}" if skipped else "")


def _age(name: Name) -> tuple[int, int, int]:
    step, generation, commit = name
    return commit, generation, step


def _why_not(name: Name, seen: Collection[Name], generation: int, quarantined: Collection[Name]) -> str:
    if name[1] > generation:
        return f"generation {name[1]} wrote it, and this is generation {generation}"
    if name in quarantined:
        return "it is quarantined"
    # a run that had begun with it would count its commits on from there
    left = [other for other in seen if name[1] < other[1] <= generation and other[2] <= name[2]]
    if left:
        return f"the run went back behind it and on to step {max(left, key=_age)[0]}"
    return ""


def _unfit(offers: Sequence[Offer], on_disk: Committed | None, max_tries: int) -> str:
    sizes = {offer.shards for offer in offers} | ({on_disk.shards} if on_disk else set())
    if len(sizes) > 1:
        return f"nodes disagree on its number of shards: {sorted(sizes)}"
    tries = max(offer.tries for offer in offers)
    if on_disk is None and tries >= max_tries:
        return f"{tries} attempts have died after they began with it"
    return ""


def _lacking(offers: Sequence[Offer]) -> str:
    present = {shard for offer in offers if offer.verified for shard in offer.held}
    if not (missing := [shard for shard in range(offers[0].shards) if shard not in present]):
        return ""
    damaged = {shard for offer in offers for shard in offer.held} & {*missing}
    if damaged:
        return f"{_shards(sorted(damaged))} cannot be verified"
    return f"{_shards(missing)} of {offers[0].shards} {'is' if len(missing) == 1 else 'are'} lost"


def _supplied(name: Name, offers: Sequence[Offer], on_disk: Committed | None, skipped: Sequence[str]) -> Decision:
    best: dict[int, tuple[Tier, int]] = {}
    for offer in offers:
        for shard, tier in offer.held.items() if offer.verified else ():
            best[shard] = min(best.get(shard, (tier, offer.rank)), (tier, offer.rank))
    shards = offers[0].shards
    if not best:
        return Decision(name=name, suppliers=(DISK,) * shards, reason=_words(name, skipped), skipped=tuple(skipped),
                        is_committed=True)  # fmt: skip
    counts = [(sum(tier is one for one, _ in best.values()), tier.text) for tier in Tier]
    counts.append((shards - len(best), "disk"))
    used = [(count, text) for count, text in counts if count]
    if len(used) == 1:
        reason = f"{used[0][1]}: step {name[0]}, all {shards} shards"
    else:
        reason = f"step {name[0]}: " + ", ".join(f"{count} of {shards} shards from {text}" for count, text in used)
    suppliers = tuple(best[shard][1] if shard in best else DISK for shard in range(shards))
    return Decision(name=name, suppliers=suppliers, reason=reason + (f"; {skipped[0]}" if skipped else ""),
                    skipped=tuple(skipped), is_committed=on_disk is not None)  # fmt: skip


def _shards(shards: Sequence[int]) -> str:
    shown = ", ".join(str(shard) for shard in shards[:3])
    more = f" and {len(shards) - 3} more" if len(shards) > 3 else ""
    return f"shard{'s' if len(shards) > 1 else ''} {shown}{more}"


def _check(offers: Sequence[Offer], committed: Committed | None, generation: int) -> None:
    """Raises ValueError for impossible offers."""
    numbers, sizes = [generation], []
    if committed is not None:
        numbers += committed.name
        sizes.append(committed.shards)
    for offer in offers:
        numbers += [offer.rank, *offer.name, offer.tries, *offer.held]
        sizes.append(offer.shards)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("an offer holds a number that makes no sense")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError("a snapshot has at least one shard")
    if any(shard >= offer.shards for offer in offers for shard in offer.held):
        raise ValueError("an offer holds a shard that is none of its snapshot's")
