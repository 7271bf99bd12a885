"""Decisions about checkpoints: how far apart they should be, where copies lie and how often steps are copied, where a
restart reads from, which is poison, whether saves fail; and the settings that measurements recommend.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from statistics import median

from slurmft.policy.stop import GraceNeed
from slurmft.policy.values import few
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
    return f"shard{'s' if len(shards) > 1 else ''} {few(shards, 3)}"


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


def transfers_of(
    decision: Decision, offers: Iterable[Offer], wanted: Iterable[tuple[int, Collection[int]]]
) -> list[Transfer]:
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


class CopyInterval:
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


# --- How far apart checkpoints should be: the cost of saving against the work that failures undo ---
# With a save that costs C seconds and failures M seconds apart on average, an interval t wastes about C / t for saving
# and t / (2 M) for work that is done again. First order: J. W. Young, "A first order approximation to the optimum
# checkpoint interval", Communications of the ACM 17 (9), 1974. Higher order, with failures during saves and restarts:
# J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
# Systems 22 (3), 2006.
#
# C is the cost to the training loop: the time a save stops it, and the slowdown of its steps while the save is written.
# The time of the write itself delays nothing; but a save that is not durable is lost with a node, so it counts too.

DAY_S = 86_400.0
PRIOR_NODE_DAYS = 50.0
"""Node-days per failure of a run that has not been seen to fail: an assumption, on the careful side. Published for
comparison: 419 interruptions in 54 days on 16,384 GPUs, which are 264 node-days each with 8 GPUs to a node ("The Llama
3 Herd of Models", 2024)."""

MOST_S = 1e12
"""Longer than any real time; sums of such numbers stay finite."""

SHORTEST_S, LONGEST_S = 1.0, 3600.0
"""No failure should cost more than an hour, independent of the formula; a save without a cost was measured badly."""

FIRST_S = 60.0
"""Until two saves have been measured: the first one also sets up what they use, and says little about their cost."""

SAVES_MEASURED = 5
LEAST_COST_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureHistory:
    """A run's failures: unplanned ends of attempts, and the node-time of training."""

    failures: int = 0
    node_s: float = 0.0


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Young's interval: the square root of 2 C M."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval, the time of training between two saves; the mean time between failures where a save costs more
    than twice that, and no interval is a good one."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def mtbf_s(history: FailureHistory, nodes: int) -> float:
    """Seconds between two failures of a run on ``nodes``, as expected after ``history``.

    A gamma prior of one failure in PRIOR_NODE_DAYS on the rate of one node: without observations it alone counts, and
    every observed failure and node-day moves it.
    """
    node_s = min(max(0.0, history.node_s), MOST_S) if math.isfinite(history.node_s) else 0.0
    rate = (1 + max(0, history.failures)) / (PRIOR_NODE_DAYS * DAY_S + node_s)
    return 1.0 / (rate * max(1, nodes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """An interval, and its expected costs."""

    interval_s: float
    cost_s: float
    mtbf_s: float
    durable_s: float = 0.0
    """From the beginning of a save until it survives the loss of its node."""

    limited_by: str = ""
    """The bound that keeps the interval from Daly's; empty where none does."""

    @property
    def overhead_fraction(self) -> float:
        """Share of the time spent on saving."""
        return self.cost_s / (self.interval_s + self.cost_s)

    @property
    def lost_s(self) -> float:
        """Seconds of work that a failure undoes on average."""
        return self.interval_s / 2.0 + self.durable_s

    @property
    def lost_fraction(self) -> float:
        """Share of the time that is done again."""
        return min(1.0, self.lost_s / self.mtbf_s)

    def __str__(self) -> str:
        limit = f" ({self.limited_by})" if self.limited_by else ""
        return (
            f"every {duration(self.interval_s)}{limit}: saving takes {_percent(self.overhead_fraction)} of the time, "
            f"a failure undoes {duration(self.lost_s)} on average, {_percent(self.lost_fraction)} of the time with one "
            f"in {duration(self.mtbf_s)}"
        )


def plan(cost_s: float, mtbf_s: float, *, step_s: float = 0.0, durable_s: float = 0.0, longest_s: float = 0.0) -> Plan:
    """The interval for what was measured: Daly's, not shorter than a step, a second or a write, and not longer than
    ``longest_s`` (0: an hour). Any numbers give an interval that can be kept; the bound above is the stronger one."""
    cost_s = max(LEAST_COST_S, _finite(cost_s))
    mtbf_s = max(1.0, _finite(mtbf_s) or PRIOR_NODE_DAYS * DAY_S)
    durable_s, step_s = _finite(durable_s), _finite(step_s)
    wanted_s, reason = daly_s(cost_s, mtbf_s), ""
    for floor_s, name in ((step_s, "no shorter than a step"), (durable_s, "no shorter than a write takes"),
                          (SHORTEST_S, "no shorter than a second")):  # fmt: skip
        if wanted_s < floor_s:
            wanted_s, reason = floor_s, name
    longest_s = _finite(longest_s) or LONGEST_S
    if wanted_s > longest_s:
        wanted_s, reason = longest_s, f"no longer than {duration(longest_s)}"
    return Plan(interval_s=wanted_s, cost_s=cost_s, mtbf_s=mtbf_s, durable_s=durable_s, limited_by=reason)


def typical_cost_s(costs_s: list[float]) -> float | None:
    """The typical cost of a save, from all costs so far, oldest first; None where none was measured.

    The middle of the newest ones. The first one of a process does not count once there is another.
    """
    from statistics import median  # not at every start: with fractions and decimals, 5 ms

    return median((costs_s[1:] or costs_s)[-SAVES_MEASURED:]) if costs_s else None


def _finite(value: float) -> float:
    return min(value, MOST_S) if math.isfinite(value) and value > 0 else 0.0


def duration(seconds: float) -> str:
    """Seconds in readable units: ``0.25 s``, ``90 s``, ``25 min``, ``3.5 h``, ``12 days``."""
    for unit_s, name, least_s in ((DAY_S, "days", 2 * DAY_S), (3600.0, "h", 7200.0), (60.0, "min", 120.0)):
        if seconds >= least_s:
            return f"{seconds / unit_s:.3g} {name}" if seconds < 1000 * unit_s else f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.3g} s"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction >= 1e-4 else "less than 0.01 %"


# --- The mean time between failures, and how sure of it one can be after so few of them ---
# For failures that come independently at a constant rate, their number in a time T has Poisson's distribution. The
# limits are the exact ones, half of a quantile of chi-square: F. Garwood, "Fiducial limits for the Poisson
# distribution", Biometrika 28 (1936). They are found by bisection of the distribution itself, so that no table of
# chi-square is needed.

_PRECISION = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtbf:
    """Seconds between two failures, with a confidence interval; None: no failure was seen, there is no upper limit."""

    mean_s: float | None
    low_s: float
    high_s: float | None
    confidence: float


def mtbf_of(failures: int, exposed_s: float, *, confidence: float = 0.95) -> Mtbf | None:
    """From ``failures`` seen in ``exposed_s`` seconds; None where no time was observed.

    Without any failure only the lower limit exists, with the whole doubt on its side.
    """
    if not 0 < exposed_s < math.inf or failures < 0:
        return None
    doubt = (1.0 - confidence) / (2 if failures else 1)
    # with the mean that is looked for, so few failures or fewer have the probability ``doubt``
    most = _bisected(lambda mean: mean <= failures or _at_most(failures, mean) > doubt, failures)
    low_s = exposed_s / most
    if not failures:
        return Mtbf(mean_s=None, low_s=low_s, high_s=None, confidence=confidence)
    # so many or more
    least = _bisected(lambda mean: mean < failures and _at_least(failures, mean) < doubt, failures)
    return Mtbf(mean_s=exposed_s / failures, low_s=low_s, high_s=exposed_s / least, confidence=confidence)


def _bisected(is_below: Callable[[float], bool], number: int) -> float:
    low, high = 0.0, 20.0 + 4.0 * number
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _at_most(number: int, mean: float) -> float:
    """Probability of ``number`` events or fewer, with more of them expected: terms fall from the first one on."""
    term, total, k = 1.0, 0.0, number
    while k >= 0 and term > _PRECISION * total:
        total += term
        term, k = term * k / mean, k - 1
    return total * _probability(number, mean)


def _at_least(number: int, mean: float) -> float:
    """Probability of ``number`` events or more, with fewer of them expected."""
    term, total, k = 1.0, 0.0, number
    while term > _PRECISION * total:
        total += term
        k += 1
        term *= mean / k
    return total * _probability(number, mean)


def _probability(number: int, mean: float) -> float:
    return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) if mean > 0 else float(number == 0)


# --- Recommended settings from measurements: the lead of Slurm's signal, and the checkpoint interval ---

NEWEST_SAVES = 20
SHORTEST_STEP_S = 1e-6
"""A shorter time of a step was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of a workload."""

    need: GraceNeed
    saves_s: tuple[float, ...] = ()
    """Until each save was durable, oldest first."""

    costs_s: tuple[float, ...] = ()
    """The cost of saves to the training, oldest first."""

    history: FailureHistory = field(default_factory=FailureHistory)
    attempts: int = 0
    """Attempts that were measured; 0: none."""

    is_own: bool = True
    """They are of this run, and not of runs of the same workload beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How checkpoints are spaced now."""

    interval: str
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Recommended settings, and why; None where too little is known."""

    measured: Measured
    nodes: int
    mtbf_s: float
    lead_s: int | None
    """The least ``preemption.signal_lead_s``."""

    plan: Plan | None
    """The best interval."""

    steps: int | None
    """The same in steps: ``checkpoint.interval_steps``."""

    now: Plan | None
    """Costs of the present interval; None where there is none, or it is automatic."""

    is_cost_known: bool
    """Whether the cost of saves to the training was measured; else the time until they are durable stands for it."""


def advise(measured: Measured, *, nodes: int, setting: Setting) -> Advice:
    """The least lead that leaves a stop its save, and the interval that wastes least."""
    mean_s = mtbf_s(measured.history, nodes)
    durable_s = median(measured.saves_s[-NEWEST_SAVES:]) if measured.saves_s else 0.0
    cost_s = typical_cost_s(list(measured.costs_s))
    known_s = cost_s if cost_s is not None else durable_s
    step_s = measured.need.step_s or 0.0
    best = plan(known_s, mean_s, step_s=step_s, durable_s=durable_s) if known_s else None
    now_s = {"steps": setting.steps * step_s, "seconds": setting.seconds}.get(setting.interval, 0.0)
    return Advice(
        measured=measured,
        nodes=nodes,
        mtbf_s=mean_s,
        lead_s=measured.need.lead_s if measured.need.known else None,
        plan=best,
        steps=max(1, round(best.interval_s / step_s)) if best is not None and step_s > SHORTEST_STEP_S else None,
        now=Plan(interval_s=now_s, cost_s=best.cost_s, mtbf_s=mean_s, durable_s=durable_s) if best and now_s else None,
        is_cost_known=cost_s is not None,
    )


def in_words(advice: Advice, *, lead_s: int, setting: Setting) -> list[tuple[str, str]]:
    """The advice as names and sentences, in the order in which they are read."""
    return [
        ("measured", _measured(advice)),
        ("failures", _failures(advice)),
        ("signal lead", _lead(advice, lead_s)),
        ("interval", _interval(advice, setting)),
    ]


def _measured(advice: Advice) -> str:
    known = advice.measured
    if not known.attempts:
        return "nothing yet: a run of this workload must have saved once; then ask again"
    whose = "of this run" if known.is_own else "of runs of the same workload beside it"
    parts = [f"{known.attempts} attempt{'s' if known.attempts > 1 else ''} {whose}"]
    if known.need.step_s is not None:
        parts.append(f"a step takes {duration(known.need.step_s)}")
    if known.saves_s:
        parts.append(f"a save is durable after {duration(median(known.saves_s[-NEWEST_SAVES:]))}")
    if (cost_s := typical_cost_s(list(known.costs_s))) is not None:
        parts.append(f"it costs the training {duration(cost_s)}")
    return ", ".join(parts)


def _failures(advice: Advice) -> str:
    seen = advice.measured.history
    nodes = f"{advice.nodes} node{'s' if advice.nodes > 1 else ''}"
    expected = f"one in {duration(advice.mtbf_s)} is to be expected on {nodes}"
    prior = f"one in {PRIOR_NODE_DAYS:g} node-days is assumed before anything is seen"
    if not seen.node_s and not seen.failures:
        return f"none seen; {expected} ({prior})"
    return f"{seen.failures or 'none'} in {seen.node_s / DAY_S:.3g} node-days; {expected} ({prior})"


def _lead(advice: Advice, lead_s: int) -> str:
    need = advice.measured.need
    if advice.lead_s is None:
        return f"preemption.signal_lead_s is {lead_s}; whether that is enough is not known before a save was measured"
    at_least = "more than" if need.cut_off else "at least"
    enough = "which is enough" if lead_s >= advice.lead_s and not need.cut_off else "which is not enough"
    if need.cut_off and lead_s >= advice.lead_s:
        enough = "which may not be enough"
    return f"preemption.signal_lead_s: {at_least} {advice.lead_s} (it is {lead_s}, {enough}); {need}"


def _interval(advice: Advice, setting: Setting) -> str:
    if advice.plan is None:
        return "checkpoint.interval: auto measures what saves cost, and finds it by itself"
    best = f"checkpoint.interval_steps: {advice.steps}" if advice.steps is not None else (
        f"checkpoint.interval_seconds: {advice.plan.interval_s:.0f}")  # fmt: skip
    words = [f"{best}, {advice.plan}"]
    if not advice.is_cost_known:
        words.append("what saves cost the training was not measured: the time until they are durable stands for it")
    if advice.now is not None:
        now = f"{setting.steps} steps" if setting.interval == "steps" else duration(setting.seconds)
        words.append(f"now it is {now}, {advice.now}")
    elif setting.interval == "auto":
        words.append("it is auto now, which finds it by itself")
    elif setting.interval == "steps" and not setting.steps:
        words.append("now there are none but at stops and at the end")
    return "; ".join(words)
