"""Hangs: how long workers' sections are open, compared with limits; which hung rank is the culprit; and torch's own
watchdog, which must not act first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmft.policy.values import few
from slurmft.policy.verdict import Suspect

# --- hangs ---

STEP, SETUP, CHECKPOINTING, EVALUATION = "step", "setup", "checkpointing", "evaluation"
START_UP = "start-up"
"""From the start of the process to its first call of slurmft."""

OUT_OF_SECTION = "out of section"
HEARTBEAT = "heartbeat"

CLOSE_S = 0.1
"""Ranks whose last sign of life is as old as that of the oldest, give or take this, are equally old."""

ROUNDING_S = 0.005
"""Times that are as close as this are of the same moment."""

MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds that each may take; 0 or missing: for ever."""

    sections: Mapping[str, float] = field(default_factory=dict)
    out_of_section_s: float = 0.0
    start_up_s: float = 0.0
    heartbeat_s: float = 0.0

    def of(self, name: str, *, warming_up: bool) -> float:
        """The limit of a section. In its first steps a process may compile: they may take as long as the setup."""
        limit_s = self.sections.get(name, 0.0)
        if not limit_s or not warming_up or name in (SETUP, CHECKPOINTING):
            return limit_s
        setup_s = self.sections.get(SETUP, 0.0)
        return max(limit_s, setup_s) if setup_s else 0.0

    def smallest_s(self) -> float:
        """No limit is reached sooner than this after what it limits has begun; infinite when there is none."""
        all_s = (*self.sections.values(), self.out_of_section_s, self.start_up_s, self.heartbeat_s)
        return min((limit_s for limit_s in all_s if limit_s > 0), default=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLook:
    """One worker at one moment."""

    rank: int
    node: str = ""
    attached: bool = True
    """It has called slurmft."""

    age_s: float = 0.0
    """Since its process was started."""

    sections: tuple[tuple[str, float], ...] = ()
    """Name of each section that its main thread has open, outermost first, and for how long."""

    elsewhere: tuple[tuple[str, float], ...] = ()
    """The same of its other threads."""

    quiet_s: float = 0.0
    """Since it gave its last sign: a section begun or ended, a heartbeat, its first call."""

    heartbeat_s: float | None = None
    """Since its last heartbeat; None when it has never sent one."""

    step: int = 0
    """Steps it has completed."""

    own_work: int = 0
    """Steps in which it has done its own part and waits, or has waited, for the others; 0 where it is unknown."""

    stopped: bool = False
    """The kernel has stopped its process (SIGSTOP, a debugger)."""

    holding: bool = False
    """It waits for the other ranks to agree on a stop: the supervisor sees to that."""

    warming_up: bool = False
    """It is in its first steps since the process began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exceeded:
    """A limit that was exceeded."""

    rank: int
    section: str
    held_s: float
    limit_s: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Why an attempt hangs, as far as it is known."""

    section: str
    held_s: float
    limit_s: float
    reason: str
    ranks: tuple[int, ...] = ()
    """Possible culprits: one rank, or several that do not differ."""

    nodes: tuple[str, ...] = ()
    """Their nodes, in the same order."""

    victims: tuple[int, ...] = ()
    """Ranks that hang because they wait for those."""

    overdue: Mapping[int, str] = field(default_factory=dict)
    """In words, each limit that was exceeded, by rank."""

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """Hardware that may be the reason; empty where several ranks are equally suspicious."""
        if len(self.ranks) != 1 or not self.nodes[0]:
            return ()
        return (Suspect(node=self.nodes[0], rank=self.ranks[0]),)


def exceeded(look: WorkerLook, limits: Limits) -> Exceeded | None:
    """The limit that this worker has exceeded, the one that was exceeded first where it is several; else None."""
    over = [each for each in _clocks(look, limits) if each[1] > each[2]]
    if not over:
        return None
    section, held_s, limit_s = max(over, key=lambda each: each[1] - each[2])
    stopped = " and its process is stopped" if look.stopped else ""
    why = f"rank {look.rank} {_doing(section)} for {held_s:.1f} s{stopped}, limit {limit_s:g} s"
    return Exceeded(rank=look.rank, section=section, held_s=held_s, limit_s=limit_s, why=why)


def next_due_s(look: WorkerLook, limits: Limits) -> float:
    """In how many seconds this worker may exceed a limit at the earliest; infinite when it never does."""
    left_s = (limit_s - held_s for _, held_s, limit_s in _clocks(look, limits))
    return max(0.0, min(left_s, default=math.inf))


def used(look: WorkerLook, limits: Limits) -> float:
    """The largest part of a limit that this worker has used up: 1 is a hang; 0 where nothing is limited."""
    return max((held_s / limit_s for _, held_s, limit_s in _clocks(look, limits) if limit_s > 0), default=0.0)


def find_culprit(looks: Sequence[WorkerLook], first: Exceeded, limits: Limits, *, ranks: int = 0) -> Hang:
    """Find the culprit of the hang that ``first`` reports, among all ranks that could be looked at.

    Where those are no more than half of ``ranks``, none is singled out by its node: the others may be further behind.

    A rank that waits for another in a collective hangs as well. The culprit shows by, in this order: a stopped process,
    no call of slurmft, fewer steps, own work that is not done, other open sections than most, the oldest sign of life.
    Where ranks do not differ, all that have exceeded a limit are named, and all in the same place.
    """
    if 2 * len(looks) <= ranks:
        looks = [replace(look, node="") for look in looks]
    over = {first.rank: first} | {each.rank: each for look in looks if (each := exceeded(look, limits)) is not None}
    for split in _SPLITS:
        found, why = split(looks)
        if found and len(found) < len(looks):
            return _hang(found, why, over, limits)
    # where limits run out one after the other, the first rank to report is no more to blame than the next
    places = {(look.attached, _names(look)) for look in looks if look.rank in over}
    named = [look for look in looks if look.rank in over or (look.attached, _names(look)) in places]
    if len(named) <= 1:
        return _hang(named or [WorkerLook(rank=first.rank)], "", over, limits)
    return _hang(named, "no rank is behind the others", over, limits)


def _hang(found: Sequence[WorkerLook], why: str, over: Mapping[int, Exceeded], limits: Limits) -> Hang:
    one = over.get(found[0].rank) or _nearest(found[0], limits)
    ranks = tuple(look.rank for look in found)
    where = f" on {found[0].node}" if found[0].node else ""
    if len(found) == 1:
        limit = f", limit {one.limit_s:g} s" if one.limit_s else ""
        reason = f"rank {one.rank}{where} {_doing(one.section)} for {one.held_s:.1f} s{limit}"
    else:
        reason = f"ranks {few(ranks, MAX_NAMED)} {_doing(one.section, 'have')} for {one.held_s:.1f} s"
        reason += f", limit {one.limit_s:g} s" if one.limit_s else ""
    blamed = frozenset(ranks)
    victims = tuple(rank for rank in over if rank not in blamed)
    if why:
        reason += f"; {why}"
    if victims:
        reason += f"; rank{'s' if len(victims) > 1 else ''} {few(victims, MAX_NAMED)} only waited for it"
    return Hang(
        section=one.section, held_s=one.held_s, limit_s=one.limit_s, reason=reason, ranks=ranks,
        nodes=tuple(look.node for look in found), victims=victims,
        overdue={each.rank: each.why for each in over.values()},
    )  # fmt: skip


def narrowed(hang: Hang, rank: int, node: str, why: str) -> Hang:
    """``hang`` with one culprit, where the stacks of the ranks show it, and the pages did not."""
    if len(hang.ranks) == 1:
        return hang
    victims = tuple(each for each in hang.overdue if each != rank)
    reason = f"{hang.reason}; rank {rank} on {node}: {why}"
    return replace(hang, ranks=(rank,), nodes=(node,), victims=victims, reason=reason)


def _nearest(look: WorkerLook, limits: Limits) -> Exceeded:
    """Where a rank is that has exceeded no limit yet, but makes others wait: where it will, or else its innermost."""
    section, held_s = look.sections[-1] if look.sections else (OUT_OF_SECTION, look.quiet_s)
    if not look.attached:
        section, held_s = START_UP, look.age_s
    clocks = _clocks(look, limits)
    section, held_s, limit_s = min(clocks, key=lambda each: each[2] - each[1], default=(section, held_s, 0.0))
    return Exceeded(rank=look.rank, section=section, held_s=held_s, limit_s=limit_s, why="")


def _clocks(look: WorkerLook, limits: Limits) -> Iterator[tuple[str, float, float]]:
    """Everything of this worker that has a limit: its name, how long it has been so, the limit."""
    if not look.attached:
        if limits.start_up_s > 0:
            yield START_UP, look.age_s, limits.start_up_s
        return
    if look.holding:
        return
    for name, held_s in (*look.sections, *look.elsewhere):
        if (limit_s := limits.of(name, warming_up=look.warming_up)) > 0:
            yield name, held_s, limit_s
    if not look.sections and limits.out_of_section_s > 0:
        yield OUT_OF_SECTION, look.quiet_s, limits.out_of_section_s
    if look.heartbeat_s is not None and limits.heartbeat_s > 0:
        # a section that begins or ends is a sign of life, too
        yield HEARTBEAT, min(look.heartbeat_s, look.quiet_s), limits.heartbeat_s


def _doing(section: str, have: str = "has") -> str:
    if section == START_UP:
        return f"{have} not called slurmft since the start of the process,"
    if section == HEARTBEAT:
        return f"{have} sent no heartbeat"
    return f"{have} been out of any section" if section == OUT_OF_SECTION else f"{have} been in section {section!r}"


_Split = Callable[[Sequence[WorkerLook]], tuple[Sequence[WorkerLook], str]]


def _stopped(looks: Sequence[WorkerLook]) -> tuple[Sequence[WorkerLook], str]:
    return [look for look in looks if look.stopped], "its process is stopped"


def _never_called(looks: Sequence[WorkerLook]) -> tuple[Sequence[WorkerLook], str]:
    return [look for look in looks if not look.attached], "it has never called slurmft, unlike the others"


def _behind(looks: Sequence[WorkerLook]) -> tuple[Sequence[WorkerLook], str]:
    last = min((look.step for look in looks), default=0)
    furthest = max((look.step for look in looks), default=0)
    return [look for look in looks if look.step == last], f"it has done {last} steps, others {furthest}"


def _own_work_to_do(looks: Sequence[WorkerLook]) -> tuple[Sequence[WorkerLook], str]:
    done = max((look.own_work for look in looks), default=0)
    if not done:
        return [], ""
    return [look for look in looks if 0 < look.own_work < done], "others wait in a collective that it has not reached"


def _names(look: WorkerLook) -> tuple[str, ...]:
    return tuple(name for name, _ in look.sections)


def _odd_one_out(looks: Sequence[WorkerLook]) -> tuple[Sequence[WorkerLook], str]:
    """Ranks in other sections than most; with half of them there, and half here, nothing is odd."""
    groups: dict[tuple[str, ...], list[WorkerLook]] = {}
    for look in looks:
        groups.setdefault(_names(look), []).append(look)
    usual = max(groups, key=lambda names: len(groups[names]), default=())
    if len(groups.get(usual, ())) <= len(looks) / 2:
        return [], ""
    odd = [look for names, group in groups.items() if names != usual for look in group]
    return odd, "others are in other sections"


def _oldest_sign(looks: Sequence[WorkerLook]) -> tuple[Sequence[WorkerLook], str]:
    if all(_has_begun_its_step(look) for look in looks):
        return [], ""  # all are in the same step: the rank that began it first was the fastest
    oldest_s = max((look.quiet_s for look in looks), default=0.0)
    found = [look for look in looks if look.quiet_s >= oldest_s - CLOSE_S]
    return found, f"its last sign of life is {oldest_s:.1f} s old, older than that of the others"


def _has_begun_its_step(look: WorkerLook) -> bool:
    """Its newest sign of life is that."""
    section, held_s = look.sections[-1] if look.sections else ("", 0.0)
    return section == STEP and held_s - look.quiet_s < ROUNDING_S


_SPLITS: tuple[_Split, ...] = (_stopped, _never_called, _behind, _own_work_to_do, _odd_one_out, _oldest_sign)


# --- learned timeouts ---
# Limits learned from how long sections took: a decaying high quantile times a factor, between a floor and a ceiling.
#
# An outlier counts with a small part of itself, and fades; long durations that recur count like any other.

FLOOR_S = 10.0
"""No limit is shorter, however fast the steps: a page cache, a garbage collection, a neighbour's burst take seconds."""

CEILING_S = 6 * 3600.0

MIN_SAMPLES = 10
"""Fewer samples are not enough."""

MAX_SAMPLES = 200
HALF_LIFE = 50
"""Samples after which an older one counts half."""

QUANTILE = 0.95
OUTLIER_FACTOR = 1.5
"""The longest that was seen must fit this often into the limit, while it is new: it was not a hang."""


def learned_s(samples_s: Sequence[float], factor: float) -> float | None:
    """The limit that the samples, oldest first, suggest; None where they are too few."""
    usable = [each for each in samples_s if math.isfinite(each) and each >= 0][-MAX_SAMPLES:]
    if len(usable) < MIN_SAMPLES:
        return None
    weights = [2.0 ** (-age / HALF_LIFE) for age in range(len(usable) - 1, -1, -1)]
    typical_s = _quantile(usable, weights, QUANTILE)
    faded_s = max(each * weight for each, weight in zip(usable, weights, strict=True))
    limit_s: float = min(CEILING_S, max(FLOOR_S, factor * typical_s, OUTLIER_FACTOR * faded_s))
    return limit_s


def merged(
    configured: Mapping[str, float], given: frozenset[str], samples_s: Mapping[str, Sequence[float]], factor: float
) -> dict[str, float]:
    """Limits by name: the learned ones, and below those that were ``given`` by the user never; 0 stays 0.

    ``configured`` holds defaults as well; they hold where nothing is learned yet. That of the setup, which first steps
    have too, is only ever raised: they are rare, and one without a warm cache takes much longer than all before.
    """
    limits = dict(configured)
    for name, samples in samples_s.items():
        was_s = configured.get(name)
        if was_s == 0 or (found_s := learned_s(samples, factor)) is None:
            continue
        limits[name] = max(found_s, was_s or 0.0) if name in given or name == SETUP else found_s
    return limits


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The smallest value at or below which at least ``share`` of the weight is."""
    needed, seen = share * sum(weights), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        seen += weight
        if seen >= needed:
            return value
    return max(values)


# --- torch's own watchdog over NCCL: what acts first on a collective that hangs, and the settings that ensure it ---
# torch runs two threads in every rank that has a NCCL group. The watchdog ends the process when a collective has taken
# longer than its group's timeout, or when NCCL reports an error. The monitor ends it when the watchdog itself gives no
# sign of life. Names and defaults are those of torch 2.6 to 2.13.

HANDLING_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
OLD_HANDLING_VARIABLE = "NCCL_ASYNC_ERROR_HANDLING"
"""torch still accepts it, with a warning."""

HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"

NO_HANDLING, TEAR_DOWN, CLEAN_UP_ONLY, SKIP_CLEAN_UP = "0", "1", "2", "3"
"""Values of HANDLING_VARIABLE: do nothing; abort and end; abort and go on; end without an abort (torch's default)."""

MIN_HEARTBEAT_S = 480
"""torch's default."""

DUMP_S = 60
"""For the watchdog's own dump of the flight recorder, before the monitor may think that it hangs."""

BEFORE_THE_KILL_S = 20.0
"""The last look at all ranks, their dumps, and the copy of their last step, at the longest."""


def heartbeat_s(timeout_s: float, limit_s: float) -> int:
    """HEARTBEAT_VARIABLE with which the monitor is the last to act: after the agent, and after a dump."""
    return max(MIN_HEARTBEAT_S, round(timeout_s + DUMP_S), round(limit_s + BEFORE_THE_KILL_S))


def watchdog_variables(environment: Mapping[str, str], *, timeout_s: float, limit_s: float) -> dict[str, str]:
    """The variables for workers with this environment; the user's own values stay."""
    wanted = {HANDLING_VARIABLE: SKIP_CLEAN_UP, HEARTBEAT_VARIABLE: str(heartbeat_s(timeout_s, limit_s))}
    if OLD_HANDLING_VARIABLE in environment:
        del wanted[HANDLING_VARIABLE]
    return {name: value for name, value in wanted.items() if name not in environment}


def why_not_to_trust(environment: Mapping[str, str]) -> str:
    """Why weights of a rank whose collective has failed may be wrong; empty where they may not.

    An abort lets the device go on behind the collective, with a gradient that was never reduced: for a moment before
    the process ends (1), or for good (2).
    """
    handling = environment.get(HANDLING_VARIABLE) or environment.get(OLD_HANDLING_VARIABLE, SKIP_CLEAN_UP)
    if handling in (TEAR_DOWN, CLEAN_UP_ONLY):
        return f"{HANDLING_VARIABLE}={handling} lets the device go on with gradients that were never reduced"
    return ""
