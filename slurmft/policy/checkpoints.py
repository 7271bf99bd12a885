"""Decisions about checkpoints: where copies lie and how often steps are copied, where a restart reads from, which is
poison, whether saves fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from slurmft.policy.verdict import Cause

# --- Whether saves keep failing: one that fails is tried again, many in a row mean that the run's work is at risk ---


class News(Enum):
    """The change since the last look."""

    NOTHING = "nothing"
    FAILED = "failed"
    """One more has failed; it will be tried again."""

    KEEP_FAILING = "keep failing"
    """So many in a row that the user should look; repeated each time their number has doubled."""

    WORK_AGAIN = "work again"
    """The first one that was done after KEEP_FAILING."""


class FailingSaves:
    """Counts failures in a row, from numbers that only grow while a process lives.

    Args:
        most: failures in a row that raise the alarm (``checkpoint.max_failed_saves``).
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._alarm_at = self._most
        self._failures = self._done = 0
        self.in_a_row = 0
        """Failures since the newest save that was done."""

    @property
    def is_alarming(self) -> bool:
        """Whether the user should look."""
        return self.in_a_row >= self._most

    def note(self, *, failures: int, done: int) -> News:
        """Take in how many saves of the process have failed, and how many were done."""
        new = max(0, failures - self._failures)
        was_alarming = self.is_alarming
        if done > self._done:
            self.in_a_row, self._alarm_at = 0, self._most
        self._failures, self._done = max(failures, self._failures), max(done, self._done)
        self.in_a_row += new
        if new and self.in_a_row >= self._alarm_at:
            while self._alarm_at <= self.in_a_row:
                self._alarm_at *= 2
            return News.KEEP_FAILING
        if was_alarming and not self.is_alarming:
            return News.WORK_AGAIN
        return News.FAILED if new else News.NOTHING


# --- Which nodes hold copies of which node's part of a snapshot ---
# The placement of GEMINI (Wang et al., SOSP 2023, section 4, "mixed" strategy): groups of m nodes, in which each node's
# part lies on all m. Where m does not divide the number of nodes, the last group has between m + 1 and 2m - 1 of them,
# each with its copies on the m - 1 nodes that follow it in the group, seen as a ring. Any m - 1 lost nodes lose
# nothing.


def copy_holders(nodes: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """For each node, by its place in the run, the other nodes that hold a copy of its part.

    Args:
        copies: of each part beside the node's own: GEMINI's m - 1. Fewer where there are not that many other nodes.

    Raises:
        ValueError: there is no node, or a negative number of copies.
    """
    if type(nodes) is not int or type(copies) is not int or nodes < 1 or copies < 0:
        raise ValueError(f"{copies!r} copies on {nodes!r} nodes make no sense")
    size = copies + 1
    whole = nodes // size if nodes % size == 0 else nodes // size - 1
    holders: list[tuple[int, ...]] = []
    for first in range(0, max(whole, 0) * size, size):
        holders += _ring(first, size, copies)
    if rest := nodes - len(holders):
        holders += _ring(len(holders), rest, min(copies, rest - 1))
    return tuple(holders)


def _ring(first: int, size: int, copies: int) -> list[tuple[int, ...]]:
    return [tuple(first + (place + step) % size for step in range(1, copies + 1)) for place in range(size)]


# --- A checkpoint from which runs die, or a node on which they do: which of the two, by the nodes they died on ---
# Pure. A checkpoint is on trial from the moment that an attempt reads it until one commits the next.

COUNTING = frozenset({Cause.WORKER_ERROR, Cause.SIGNAL_CRASH, Cause.HANG, Cause.DATA_CORRUPTION})
"""Ends that a spoilt state can bring about. Planned stops, lost nodes, networks and lack of memory do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One attempt that began with a checkpoint, and how it ended."""

    checkpoint: str
    step: int
    cause: str
    nodes: frozenset[str] = frozenset()
    """The node to blame, or the suspects'; empty where it is unknown."""

    committed: bool = False
    """It had saved a new step: the checkpoint is good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Poisoned:
    """The checkpoint must not be resumed from any more."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSuspected:
    """All died on this node: the checkpoint has not been tried on another one."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopeless:
    """Going back further would not help."""

    reason: str


def examine(
    trials: Sequence[Trial],
    *,
    poison_after: int,
    quarantined: Collection[int] = (),
    max_quarantines: int = 3,
    alone: bool = False,
) -> Poisoned | NodeSuspected | Hopeless | None:
    """Judge the newest of ``trials`` (oldest first) together with earlier ones; None: nothing follows yet.

    Deaths on different nodes speak against the checkpoint, deaths on one node against the node. A further death on that
    node, although the run was to be moved, speaks against the checkpoint as well.

    Args:
        poison_after: deaths from one checkpoint that it takes.
        quarantined: steps of the checkpoints that were quarantined since the run last got beyond them.
        alone: there is one machine, so no other node can be tried.
    """
    newest = trials[-1]
    deaths = _deaths(trials, newest.checkpoint)
    if newest.committed or len(deaths) < poison_after:
        return None
    where = [death.nodes for death in deaths if death.nodes]
    common = frozenset[str]().union(*where).intersection(*where)
    died = f"{len(deaths)} attempts have died from {newest.checkpoint} before their next save"
    if not alone:
        if len(where) < 2 <= len(deaths) or len(common) > 1:
            return None  # the node is unknown
        if common and len(deaths) <= max(poison_after, 2):
            (node,) = common
            return NodeSuspected(node=node, reason=f"{died}, all on {node}")
    if newest.step in quarantined:
        return Hopeless(reason=f"{died}, as others have from an earlier checkpoint of step {newest.step}")
    if len(quarantined) >= max_quarantines:
        return Hopeless(reason=f"{died}, after {len(quarantined)} other checkpoints were quarantined for that")
    nodes = sorted(frozenset[str]().union(*where))
    on = f", on {', '.join(nodes[:5])}{' and others' * (len(nodes) > 5)}" if nodes and not alone else ""
    return Poisoned(reason=f"{died}{on}")


def _deaths(trials: Sequence[Trial], checkpoint: str) -> list[Trial]:
    """Those of ``checkpoint`` since it was last found good."""
    deaths: list[Trial] = []
    for trial in trials:
        if trial.checkpoint != checkpoint:
            continue
        if trial.committed:
            deaths = []
        elif trial.cause in COUNTING:
            deaths.append(trial)
    return deaths


# --- Where a restart reads from: one decision from what all nodes hold and what is committed on disk ---
# A snapshot is named by (step, generation, commit), as its folder on disk would be. Copies that its nodes still hold in
# memory, of their own or of a peer, or on their local disks, are as good as the disk where they are whole; and newer.

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


def choose_snapshot(
    offers: Iterable[Offer],
    committed: Committed | None,
    *,
    generation: int,
    quarantined: Collection[Name] = (),
    refused: Mapping[Name, str] | None = None,
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
        problem = problem or _unfit(found[name], on_disk)
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


def _unfit(offers: Sequence[Offer], on_disk: Committed | None) -> str:
    sizes = {offer.shards for offer in offers} | ({on_disk.shards} if on_disk else set())
    if len(sizes) > 1:
        return f"nodes disagree on its number of shards: {sorted(sizes)}"
    tries = max(offer.tries for offer in offers)
    if on_disk is None and tries >= MAX_TRIES:
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


# --- supply ---
# Which shards travel from which rank to which, before a restart reads: those that a node needs and does not hold.


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


# --- step copies ---
# How often the present step is copied to memory: as often as was asked for, until that costs the training too much.
#
# All ranks put the same numbers in and come to the same interval, without another word.

MAX_SHARE = 0.05
"""Of the time of the steps themselves."""

SAMPLES = 9
"""Copies behind each decision. Their middle counts: one that met a busy moment must not space out all that follow."""

NEW_PLACES = 4
"""The first copies meet memory that has no pages yet, which costs several times as much."""


@dataclass(kw_only=True, slots=True)
class Costs:
    """What copies have cost since the interval was looked at last, in nanoseconds."""

    copies: list[int] = field(default_factory=list)
    """How long the training stood still for each one, on the slowest rank."""

    agreeing: int = 0
    """All agreements together, on the rank that waited least: the others' waits are for ranks that are late."""

    training: int = 0
    """What was left to the training."""

    @property
    def share(self) -> float:
        """Of the training's own time, which stood still beside it; 0.0 where nothing was copied."""
        if not self.copies:
            return 0.0
        import statistics  # only a manager that copies steps pays for it

        stalls = statistics.median(self.copies) * len(self.copies) + self.agreeing
        return stalls / max(self.training, 1)


class Spacing:
    """The interval of one run, in steps. Every rank calls the same methods with the same numbers.

    Args:
        interval: as it was asked for, at least 1.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._met = 0
        self._costs = Costs()

    def note(self, *, copy: int, agreeing: int, training: int) -> float | None:
        """Take in what lies behind since the last call; the share for which the interval was doubled, or None.

        It is never halved again: what made copies dear would come back with it.

        Args:
            copy: nanoseconds of the newest copy on the slowest rank; 0 where none was made.
            agreeing: of the agreement, on the rank that waited least.
            training: of the training in between.
        """
        if copy:
            self._met += 1
        if self._met <= NEW_PLACES:
            return None
        self._costs.agreeing += agreeing
        self._costs.training += training
        if copy:
            self._costs.copies.append(copy)
        if len(self._costs.copies) < SAMPLES:
            return None
        share, self._costs = self._costs.share, Costs()
        if share <= MAX_SHARE:
            return None
        self.interval *= 2
        return share

    def is_due(self, step: int) -> bool:
        """Whether ranks look after ``step`` steps."""
        return step % self.interval == 0
