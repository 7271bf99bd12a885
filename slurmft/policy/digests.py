"""What digests of replicas say: all agree, some differ from the majority, or it cannot be told which are right.

Pure. In data-parallel training the replicas of a state are bitwise equal, so one that differs was computed or kept
wrongly. Ranks that hold the same part of the state have the same group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """One rank's digest of its part of the state after some step."""

    group: int
    """Equal for ranks that hold the same part."""

    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The digests of all ranks after the same step, compared."""

    compared: int = 0
    """Ranks that have a replica to be compared with."""

    wrong: tuple[int, ...] = ()
    """Ranks that differ from the majority of their replicas."""

    split: tuple[int, ...] = ()
    """Ranks of groups that differ without a majority: some of them are wrong."""

    unlike: tuple[int, ...] = ()
    """Ranks of groups of three and more in which no two are equal: these are no replicas."""

    @property
    def agrees(self) -> bool:
        """Whether replicas were compared, and all of them are equal."""
        return bool(self.compared) and not (self.wrong or self.split or self.unlike)

    @property
    def differs(self) -> bool:
        """Whether a state must not be trained on."""
        return bool(self.wrong or self.split)


def compare(digests: Mapping[int, Digest]) -> Comparison:
    """Compare the digests of ranks after one step; the order of the ranks does not matter."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for rank in sorted(digests):
        groups[digests[rank].group].append(rank)
    compared, wrong, split, unlike = 0, list[int](), list[int](), list[int]()
    for ranks in groups.values():
        if len(ranks) < 2:
            continue
        compared += len(ranks)
        counts = Counter(digests[rank].value for rank in ranks)
        value, number = counts.most_common(1)[0]
        if number == len(ranks):
            continue
        if 2 * number > len(ranks):
            wrong += [rank for rank in ranks if digests[rank].value != value]
        elif number == 1 and len(ranks) > 2:
            unlike += ranks
        else:
            split += ranks
    return Comparison(
        compared=compared, wrong=tuple(sorted(wrong)), split=tuple(sorted(split)), unlike=tuple(sorted(unlike))
    )


def convicted(doubted: Mapping[str, Digest], agreed: Collection[Digest]) -> tuple[str, ...]:
    """Nodes whose digest in doubt was wrong, now that the same step was computed again and all replicas agree on it.

    Empty where the repetition agrees with none of ``doubted`` or with all: it was not the same computation, or it
    proves nothing.
    """
    right = {(one.group, one.value) for one in agreed}
    known = {one.group for one in agreed}
    cleared = {node for node, one in doubted.items() if (one.group, one.value) in right}
    wrong = [node for node, one in doubted.items() if one.group in known and node not in cleared]
    return tuple(sorted(wrong)) if cleared else ()


def left_out(
    differing: Collection[str], *, buffers: Collection[str], trained: bool, so_far: Collection[str] = ()
) -> frozenset[str]:
    """Names of tensors that differ between replicas by design, as far as the first digests of an attempt tell.

    Before the first step all replicas come from one checkpoint, or from the same seed: what differs then, and its
    optimizer state, is each rank's own. After it only buffers may (running statistics of each rank's own batches);
    parameters and moments are summed or computed from sums.
    """
    by_design = {name for name in differing if not trained or name in buffers}
    return frozenset(so_far) | by_design


def is_left_out(name: str, names: Collection[str]) -> bool:
    """Whether a tensor, or the parameter that an optimizer's tensor belongs to, is in ``names``."""
    return name in names or name.partition("#")[0] in names


def words(wrong: Mapping[int, str], compared: int, step: int) -> str:
    """A sentence about ranks (with their nodes) that differ from the other replicas."""
    named = ", ".join(f"rank {rank} on {node}" for rank, node in sorted(wrong.items())[:5])
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    verb = "differs" if len(wrong) == 1 else "differ"
    what = f"after step {step}, the weights or optimizer state of {named}{more} {verb} from the other replicas"
    return f"{what} ({compared} ranks compared): silent data corruption"


def words_of_split(split: Mapping[int, str], step: int) -> str:
    """A sentence about replicas, of ranks with their nodes, that differ without a majority."""
    nodes = sorted({*split.values()})
    where = ", ".join(nodes[:5])
    what = f"after step {step}, the replicas of {len(split)} ranks on {where} differ, and none has a majority"
    then = "" if len(nodes) == 1 else "; the steps are computed again to tell which was right"
    return f"{what}: silent data corruption{then}"
