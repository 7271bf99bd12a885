"""Which shards travel from which rank to which, before a restart reads: those that a node needs and does not hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from slurmft.policy.checkpoints.tiers import DISK, Decision, Name, Offer


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Transfer:
    """One shard on its way; ``source`` and ``target`` are ranks that stand for their nodes."""

    source: int
    target: int
    shard: int
    is_whole: bool = True
    """Every item of it; else only those that are not spread over ranks, which every rank needs."""


def plan(decision: Decision, offers: Iterable[Offer], wanted: Iterable[tuple[int, Collection[int]]]) -> list[Transfer]:
    """The shards of the decision's snapshot that each node lacks and another rank supplies, once for each node.

    Args:
        wanted: for each rank the rank that stands for its node, and the shards that it needs every item of.
    """
    held: defaultdict[int, set[int]] = defaultdict(set)
    for offer in offers:
        if offer.verified and offer.name == decision.name:
            held[offer.rank].update(offer.held)
    needed: defaultdict[int, set[int]] = defaultdict(set)
    for node, shards in wanted:
        needed[node].update(shards)
    return sorted(
        Transfer(source=source, target=node, shard=shard, is_whole=shard in shards)
        for node, shards in needed.items()
        for shard, source in enumerate(decision.suppliers)
        if source is not DISK and source != node and shard not in held[node]
    )


def without(offers: Iterable[Offer], rank: int, name: Name, shards: Collection[int]) -> list[Offer]:
    """The same offers, less shards that ``rank`` turned out not to be able to supply."""
    return [
        replace(offer, held={shard: tier for shard, tier in offer.held.items() if shard not in shards})
        if (offer.rank, offer.name) == (rank, name)
        else offer
        for offer in offers
    ]


def rounds_of(rank: int, world_size: int, transfers: Sequence[Transfer]) -> list[tuple[list[Transfer], list[Transfer]]]:
    """What ``rank`` sends and receives, round by round.

    In round d every rank sends to the one that is d places further and receives from the one d places before it, so
    that all nodes are busy at once, and ranks that go through the rounds in order never wait for each other in a ring.
    """
    out: defaultdict[int, list[Transfer]] = defaultdict(list)
    into: defaultdict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        distance = (transfer.target - transfer.source) % world_size
        if transfer.source == rank:
            out[distance].append(transfer)
        if transfer.target == rank:
            into[distance].append(transfer)
    return [(out[distance], into[distance]) for distance in sorted({*out} | {*into})]
