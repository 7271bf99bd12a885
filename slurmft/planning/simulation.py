"""A simulated life of a run, and what several of them come to: decided by a real run's policy, from what is drawn.

A discrete-event simulation (SimPy): a process for the run, one for the failures of its nodes, one for each repair.
Failures of a node are a Poisson process; they come while the run starts, trains, saves and restarts, and not while it
waits. Not simulated: stragglers, lent nodes, failures of nodes that wait in no job, requests of users.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from statistics import NormalDist, fmean, stdev
from typing import Any

import simpy

from slurmft.policy import checkpoints, suspicion
from slurmft.policy.decide import Agent, Members, Node, PastEnd, Size, Standing, budget_for, decide, next_members
from slurmft.policy.judge import held_against
from slurmft.policy.suspicion import Candidate, PartitionNodes, Rules, State, choose_exclusions
from slurmft.policy.verdict import Action, Cause, Evidence, Kind, Suspect, Verdict

DAY_S = 86_400.0
Steps = Generator[simpy.Event, Any, None]

LONGEST = 20.0
"""A run that takes so many times its work is given up: nothing more can be learned from it."""

RECENT = 200
"""Ends that a budget looks back on; it begins anew with every step that is saved."""

CATEGORIES = ("training", "saving", "lost work", "restart", "start", "queue", "no nodes", "hang", "person")
"""Where the time of a life goes; together all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A role beside the trainer, which is restarted alone."""

    name: str
    first: int
    """Of its nodes, in the order of the job's."""

    nodes: int
    restart_s: float
    share: float
    """Of the training that stands still meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One alternative."""

    size: Size
    parts: tuple[Part, ...] = ()
    """Nodes of ``size`` that are other roles'."""

    trainer: str = ""
    """The role that trains."""

    spares: int = 0
    cluster: int
    """Nodes that the job may run on."""

    rates_s: Mapping[Cause, float]
    """Failures of one node that is no lemon, by cause, per second."""

    lemons: int = 0
    lemon_factor: float = 1.0
    repair_s: float = DAY_S
    named_right: float = 1.0
    seen_by_checks: float = 0.0

    wait_s: float = 0.0
    preemptions_s: float = 0.0
    """Per second of the job's life."""

    time_limit_s: float = 0.0
    person_s: float = 0.0

    start_s: float
    restart_s: float
    save_cost_s: float
    durable_s: float = 0.0
    hang_s: float = 0.0

    interval_s: float
    """Of training between two saves; 0: found by the policy, from the failures that the run has had."""

    longest_interval_s: float = 0.0
    is_copied: bool = False
    """The newest state is in the memory of other nodes as well."""

    restarts: int = 3
    retries: int = 2
    retries_of: Mapping[Cause, int] = field(default_factory=dict)
    max_no_progress_cycles: int = 3
    rules: Rules = field(default_factory=Rules)
    max_excluded_fraction: float = 0.5
    excludes: bool = True

    work_s: float
    """Seconds of training on ``size.nodes`` nodes without any fault."""


def as_one(found: Scenario) -> Scenario:
    """The same job without roles: after any failure all of it begins again, and waits for the slowest part."""
    slowest_s = max([found.restart_s, *(part.restart_s for part in found.parts)])
    return replace(found, parts=(), trainer="", restart_s=slowest_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """The outcome of one simulated life."""

    wall_s: float
    work_s: float
    """Training that was not lost, in seconds of the full size."""

    finished: bool
    spent_s: dict[str, float]
    """By category; their sum is ``wall_s``."""

    failures: Counter[Cause]
    restarts: int
    requeues: int
    given_up: int
    excluded: int
    """Nodes that were put on the exclusion list."""

    excluded_lemons: int
    of_roles_s: dict[str, float] = field(default_factory=dict)
    """Role -> time without training that its failures have cost, in seconds of the whole job."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio, with the queue."""
        return self.work_s / self.wall_s if self.wall_s else 1.0

    @property
    def goodput(self) -> float:
        """The same without the queue."""
        own_s = self.wall_s - self.spent_s["queue"] - self.spent_s["no nodes"]
        return self.work_s / own_s if own_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class _Failure:
    node: str
    cause: Cause


class _Preemption:
    """The queue takes the nodes back."""


@dataclass(slots=True)
class _World:
    """What a life changes."""

    up: set[str]
    members: tuple[str, ...] = ()
    factors: tuple[float, ...] = ()
    """How often each member fails, compared with a good node; added up."""

    condition: tuple[int, frozenset[str], frozenset[str]] = (0, frozenset(), frozenset())
    """Of the nodes, when the members were chosen: the job, and which were lost and excluded."""

    allocation: list[str] = field(default_factory=list)
    """Nodes of the job, spares included, in its order."""

    lost: set[str] = field(default_factory=set)
    """Those of them that are gone."""

    excluded: set[str] = field(default_factory=set)
    held: dict[str, list[suspicion.Observation]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    failures: Counter[Cause] = field(default_factory=Counter)
    ends: list[PastEnd] = field(default_factory=list)
    ever_excluded: set[str] = field(default_factory=set)
    of_roles: dict[str, float] = field(default_factory=dict)
    culprit: str = ""
    """The role whose failure has ended the training; empty: none has."""

    settled_s: float = 0.0
    """So much of the time without training is in an account."""

    stalled_s: float = 0.0
    """Time in which other roles kept the training from going on; among what is settled."""

    node_s: float = 0.0
    saved_s: float = 0.0
    """Work that survives, in seconds of the full size."""

    in_memory_s: float = 0.0
    """Work that a restart in the job finds again."""

    restarts: int = 0
    requeues: int = 0
    given_up: int = 0
    job: int = 0
    job_began_s: float = 0.0


def live(scenario: Scenario, seed: int) -> Life:
    """One life of the run, the same for the same seed."""
    return _Run(scenario, seed).live()


class _Run:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._s, self._random = scenario, random.Random(seed)  # noqa: S311 - a simulation
        self._env = simpy.Environment()
        names = [f"n{number}" for number in range(scenario.cluster)]
        self._lemons = set(self._random.sample(names, min(scenario.lemons, len(names))))
        self._world = _World(up=set(names))
        self._names = names
        self._causes, self._cause_rates = list(scenario.rates_s), list(scenario.rates_s.values())
        self._rate_s = math.fsum(self._cause_rates)
        self._repaired = self._env.event()
        self._process: simpy.Process | None = None
        self._limit_s = LONGEST * scenario.work_s

    def live(self) -> Life:
        self._process = self._env.process(self._life())
        self._env.run(until=self._process)
        world = self._world
        return Life(
            wall_s=self._env.now,
            work_s=world.saved_s,
            finished=world.saved_s >= self._s.work_s - 1e-6,
            spent_s=world.spent,
            failures=world.failures,
            restarts=world.restarts,
            requeues=world.requeues,
            given_up=world.given_up,
            excluded=len(world.ever_excluded),
            excluded_lemons=len(world.ever_excluded & self._lemons),
            of_roles_s=world.of_roles,
        )

    # ---- the run -------------------------------------------------------------------------------------------------

    def _life(self) -> Steps:
        yield from self._through_the_queue()
        while self._world.saved_s < self._s.work_s - 1e-6 and self._env.now < self._limit_s:
            verdict = yield from self._attempt()
            if verdict is None:
                break
            yield from self._carry_out(verdict)

    def _through_the_queue(self) -> Steps:
        """Wait for an allocation, and take it."""
        world = self._world
        world.allocation, world.members, world.lost = [], (), set()
        yield from self._spend("queue", self._exponential(self._s.wait_s))
        needed, began_s = self._s.size.nodes + self._s.spares, self._env.now
        while len(world.up) < needed:
            yield self._repaired
        world.spent["no nodes"] += self._env.now - began_s
        avoided = self._avoided(needed)
        free = [name for name in self._names if name in world.up and name not in avoided]
        self._random.shuffle(free)
        world.allocation = free[:needed]
        world.job, world.job_began_s = world.job + 1, self._env.now
        world.in_memory_s = world.saved_s

    def _avoided(self, needed: int) -> set[str]:
        """The nodes that the request excludes, by the policy that also sees to it that enough are left."""
        world = self._world
        if not world.excluded:
            return set()
        self._fade()
        place = PartitionNodes(name="all", nodes=frozenset(self._names), usable=frozenset(world.up))
        candidates = [Candidate(node=name, score=1.0) for name in sorted(world.excluded)]
        choice = choose_exclusions(
            candidates,
            [place],
            known=place.nodes,
            nodes_needed=needed,
            max_excluded_fraction=self._s.max_excluded_fraction,
        )
        return set(choice.nodes)

    def _attempt(self) -> Generator[simpy.Event, Any, Verdict | None]:
        """Start, train, and return why it ended; None when all the work is done."""
        world, scenario = self._world, self._s
        is_first = not world.members
        has_members = self._choose_members()
        assert has_members, "a restart is decided where there are nodes for it"
        before_s = world.saved_s if is_first else world.in_memory_s
        category = "start" if is_first else "restart"
        cut = yield from self._exposed(scenario.start_s if is_first else scenario.restart_s, category)
        self._settle()
        if cut is not None:
            return (yield from self._verdict(cut, before_s, before_s))
        return (yield from self._train(before_s))

    def _train(self, before_s: float) -> Generator[simpy.Event, Any, Verdict | None]:
        """Train until the work is done, or something ends it."""
        world, scenario = self._world, self._s
        speed = len(world.members) / scenario.size.nodes
        every_s, cost_s = self._interval_s(), scenario.save_cost_s
        cycle_s = every_s + cost_s
        need_s = (scenario.work_s - before_s) / speed
        saves = max(0, math.ceil(need_s / every_s) - 1)
        whole_s = need_s + (saves + 1) * cost_s  # the last save is the result
        limit_s = math.inf
        if scenario.time_limit_s:
            limit_s = max(0.0, world.job_began_s + scenario.time_limit_s - self._env.now - cost_s)
        began_s, stalled_s = self._env.now, world.stalled_s
        end_s = min(whole_s, limit_s, max(0.0, self._limit_s - began_s))
        cut = yield from self._exposed(end_s)
        took_s = self._env.now - began_s - (world.stalled_s - stalled_s)
        world.node_s += took_s * len(world.members)
        if cut is None and end_s == whole_s:
            self._book(need_s, whole_s - need_s, 0.0)
            world.saved_s = scenario.work_s
            return None
        full, rest_s = divmod(took_s, cycle_s)
        done_s = min(need_s, full * every_s + min(rest_s, every_s))
        if not isinstance(cut, _Failure) or self._part_of(cut.node):  # it is told, and saves first
            yield from self._spend("saving", cost_s)
            self._book(done_s, took_s - done_s, 0.0)
            world.saved_s = world.in_memory_s = before_s + done_s * speed
            if isinstance(cut, _Failure):
                return (yield from self._verdict(cut, before_s, before_s + done_s * speed))
            return self._planned(cut, before_s)
        world.in_memory_s = before_s + min(done_s, full * every_s) * speed
        durable = max(0.0, math.floor((took_s - scenario.durable_s) / cycle_s))
        durable_s = before_s + min(done_s, durable * every_s) * speed
        if cut.cause is Cause.NODE_LOST and not scenario.is_copied:
            world.in_memory_s = durable_s
        kept_s = (world.in_memory_s - before_s) / speed
        self._book(kept_s, took_s - done_s, done_s - kept_s)
        world.saved_s = max(world.saved_s, durable_s)
        return (yield from self._verdict(cut, before_s, before_s + done_s * speed))

    def _book(self, training_s: float, saving_s: float, lost_s: float) -> None:
        spent = self._world.spent
        spent["training"] += training_s
        spent["saving"] += saving_s
        spent["lost work"] += lost_s

    def _interval_s(self) -> float:
        if self._s.interval_s:
            return self._s.interval_s
        world = self._world
        history = checkpoints.FailureHistory(failures=sum(world.failures.values()), node_s=world.node_s)
        mean_s = checkpoints.mtbf_s(history, self._s.size.nodes)
        durable_s = 0.0 if self._s.is_copied else self._s.durable_s
        return checkpoints.plan(
            self._s.save_cost_s, mean_s, durable_s=durable_s, longest_s=self._s.longest_interval_s
        ).interval_s

    # ---- verdicts and what follows -------------------------------------------------------------------------------

    def _planned(self, cut: _Preemption | None, before_s: float) -> Verdict:
        cause = Cause.PREEMPTED if isinstance(cut, _Preemption) else Cause.TIME_LIMIT
        steps = int(self._world.saved_s)
        return Verdict(cause=cause, reason=cause.value, first_step=int(before_s), last_step=steps, saved_step=steps)

    def _verdict(
        self, cut: _Failure | _Preemption, before_s: float, reached_s: float
    ) -> Generator[simpy.Event, Any, Verdict]:
        world = self._world
        world.culprit = ""
        if isinstance(cut, _Preemption):
            return self._planned(cut, before_s)
        part = self._part_of(cut.node)
        world.culprit = part.name if part else self._s.trainer
        world.failures[cut.cause] += 1
        if cut.cause is Cause.HANG:
            yield from self._spend("hang", self._s.hang_s * (part.share if part else 1.0))
        if cut.cause is Cause.NODE_LOST:
            world.up.discard(cut.node)
            world.lost.add(cut.node)
            self._env.process(self._repair(cut.node))
        is_named = cut.cause is Cause.NODE_LOST or self._random.random() < self._s.named_right
        saved = int(world.in_memory_s)
        verdict = Verdict(
            cause=cut.cause,
            reason=cut.cause.value,
            first_step=int(before_s),
            last_step=int(reached_s),
            saved_step=saved if saved > int(before_s) else None,
            node=cut.node if is_named else "",
            suspects=(Suspect(node=cut.node),) if is_named else (),
            exit_code=1,
        )
        self._accuse(cut, verdict)
        return verdict

    def _accuse(self, cut: _Failure, verdict: Verdict) -> None:
        world, now = self._world, self._env.now
        told: list[Evidence] = []
        if self._random.random() < self._s.seen_by_checks:
            told.append(Evidence(kind=Kind.HEALTH, suspect=Suspect(node=cut.node), message="check", at=now))
        for each in held_against(verdict, told, at=now):
            seen = suspicion.observed(each, source="simulation", run="run", job=str(world.job))
            world.held.setdefault(seen.node, []).append(seen)
            if self._s.excludes and self._is_excluded(seen.node):
                world.excluded.add(seen.node)
                world.ever_excluded.add(seen.node)

    def _is_excluded(self, node: str) -> bool:
        held = suspicion.worth_keeping(self._world.held[node], self._env.now, self._s.rules)
        self._world.held[node] = held
        standing = suspicion.standing(held, (), self._env.now, self._s.rules).get(node)
        return standing is not None and standing.state is State.EXCLUDED

    def _fade(self) -> None:
        self._world.excluded = {name for name in self._world.excluded if self._is_excluded(name)}

    def _choose_members(self) -> bool:
        """Choose the members of the next attempt by the policy; whether enough are left."""
        world = self._world
        condition = (world.job, frozenset(world.lost), frozenset(world.excluded))
        if world.members and condition == world.condition:
            return True  # most failures leave all nodes as they were
        nodes = [
            Node(
                name=name,
                agent=Agent.LOST if name in world.lost else Agent.LIVING,
                standing=Standing.EXCLUDED if name in world.excluded else Standing.CLEAN,
            )
            for name in world.allocation
        ]
        found = next_members(nodes, world.members, self._s.size)
        if not isinstance(found, Members):
            return False
        world.condition, world.members = condition, found.nodes
        factors = (self._s.lemon_factor if name in self._lemons else 1.0 for name in found.nodes)
        world.factors = tuple(accumulate(factors))
        return True

    def _carry_out(self, verdict: Verdict) -> Steps:
        world, scenario = self._world, self._s
        members_before = len(world.members)
        has_nodes = self._choose_members()
        spent = budget_for(
            verdict,
            world.ends,
            retries=scenario.retries,
            retries_of=scenario.retries_of,
            max_no_progress_cycles=scenario.max_no_progress_cycles,
            restarts=scenario.restarts,
            job_start=str(world.job),
        )
        decision = decide(verdict, replace(spent, has_nodes=has_nodes))
        is_restart = decision.action is Action.RESTART
        world.ends.append(
            PastEnd(
                cause=verdict.cause.value,
                progressed=verdict.progressed,
                first_step=verdict.first_step,
                restarted_in=str(world.job) if is_restart else None,
                given_up=decision.action is Action.STOP,
            )
        )
        del world.ends[:-RECENT]
        if is_restart:
            world.restarts += 1
            return
        if decision.action is Action.STOP:
            world.given_up += 1
            yield from self._spend("person", scenario.person_s)
        else:
            world.requeues += 1
        # memory goes with the job: what was not durable is done again
        again_s = max(0.0, world.in_memory_s - world.saved_s) * scenario.size.nodes / max(1, members_before)
        world.spent["training"] -= again_s
        world.spent["lost work"] += again_s
        yield from self._through_the_queue()

    # ---- time ----------------------------------------------------------------------------------------------------

    def _exponential(self, mean_s: float) -> float:
        return self._random.expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def _spend(self, category: str, seconds: float) -> Steps:
        """Time in which no failure counts."""
        yield self._env.timeout(seconds)
        self._world.spent[category] += seconds

    def _exposed(
        self, seconds: float, category: str = ""
    ) -> Generator[simpy.Event, Any, _Failure | _Preemption | None]:
        """Time in which nodes fail; returns what cut it short. Without a category the caller books it. What fails in
        another role than the trainer's, and leaves its node, costs its share and cuts nothing short."""
        while True:
            began_s, cut = self._env.now, None
            hazard = self._env.process(self._hazards())
            try:
                yield self._env.timeout(seconds)
            except simpy.Interrupt as interrupt:
                cut = interrupt.cause
            if hazard.is_alive and cut is None:
                hazard.interrupt()
            if category:
                self._world.spent[category] += self._env.now - began_s
            seconds -= self._env.now - began_s
            if not isinstance(cut, _Failure) or cut.cause is Cause.NODE_LOST or not (part := self._part_of(cut.node)):
                return cut
            yield from self._stall(part, cut)

    def _stall(self, part: Part, cut: _Failure) -> Steps:
        """Another role recovers alone."""
        world, began_s, culprit = self._world, self._env.now, self._world.culprit
        yield from self._verdict(cut, world.in_memory_s, world.in_memory_s)
        yield from self._spend("restart", part.restart_s * part.share)
        world.culprit, took_s = culprit, self._env.now - began_s
        world.of_roles[part.name] = world.of_roles.get(part.name, 0.0) + took_s
        world.stalled_s += took_s
        world.settled_s += took_s

    def _settle(self) -> None:
        """What has not been training since the last call is on the account of the role that ended it."""
        world = self._world
        lost_s = math.fsum(spent for name, spent in world.spent.items() if name not in ("training", "saving"))
        if world.culprit:
            world.of_roles[world.culprit] = world.of_roles.get(world.culprit, 0.0) + lost_s - world.settled_s
        world.settled_s = lost_s

    def _part_of(self, node: str) -> Part | None:
        """The role beside the trainer's that has this node."""
        if not self._s.parts:
            return None
        at = self._world.allocation.index(node)
        return next((part for part in self._s.parts if part.first <= at < part.first + part.nodes), None)

    def _hazards(self) -> Steps:
        """The first failure of a member, or preemption, interrupts the run. Memoryless: drawn anew for each stretch."""
        scenario, world = self._s, self._world
        failing_s = self._rate_s * world.factors[-1]
        total_s = failing_s + scenario.preemptions_s
        if total_s <= 0:
            return
        try:
            yield self._env.timeout(self._random.expovariate(total_s))
        except simpy.Interrupt:
            return
        cut: _Failure | _Preemption = _Preemption()
        if self._random.random() * total_s < failing_s:
            [node] = self._random.choices(world.members, cum_weights=world.factors)
            [cause] = self._random.choices(self._causes, self._cause_rates)
            cut = _Failure(node, cause)
        assert self._process is not None
        self._process.interrupt(cut)

    def _repair(self, node: str) -> Steps:
        yield self._env.timeout(self._exponential(self._s.repair_s))
        self._world.up.add(node)
        self._repaired.succeed()
        self._repaired = self._env.event()


# --- outcome ---
# What several lives of a run come to: means with their confidence intervals, and the published formula beside them.

CONFIDENCE = 0.95
_EXACT_T = (12.706, 4.303, 3.182, 2.776)
"""Quantiles of Student's t at 97.5 % for 1 to 4 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over lives, and half the width of its 95 % confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.half_width:.3f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One alternative, over all its lives."""

    name: str
    scenario: Scenario
    lives: tuple[Life, ...]
    ettr: Estimate
    """Effective training time ratio: work by wall time, with the queue."""

    goodput: Estimate
    """The same without the queue."""

    days: Estimate
    failures: Estimate
    requeues: Estimate
    restarts: Estimate
    given_up: Estimate
    excluded: Estimate
    of_roles: dict[str, Estimate]
    """Role -> hours of the whole job that its failures have cost."""

    formula: float
    """E[ETTR] of the first-order model, without queue, lemons and restarts in the job; 0 where it says less."""

    @property
    def finished(self) -> int:
        """Lives that ended with all the work done."""
        return sum(life.finished for life in self.lives)

    def share(self, category: str) -> float:
        """Mean share of the wall time that went there."""
        return fmean(life.spent_s[category] / life.wall_s if life.wall_s else 0.0 for life in self.lives)


def simulate(name: str, scenario: Scenario, seeds: int, *, workers: int = 1) -> Projection:
    """Live ``seeds`` lives, and sum them up. The same numbers give the same outcome, on any number of workers."""
    if workers > 1:
        with ProcessPoolExecutor(max_workers=min(workers, seeds)) as pool:
            lives = tuple(pool.map(live, repeat(scenario), range(seeds)))
    else:
        lives = tuple(live(scenario, seed) for seed in range(seeds))

    def of(value: Callable[[Life], float]) -> Estimate:
        return estimate([value(life) for life in lives])

    return Projection(
        name=name,
        scenario=scenario,
        lives=lives,
        ettr=of(lambda life: life.ettr),
        goodput=of(lambda life: life.goodput),
        days=of(lambda life: life.wall_s / DAY_S),
        failures=of(lambda life: float(sum(life.failures.values()))),
        requeues=of(lambda life: life.requeues),
        restarts=of(lambda life: life.restarts),
        given_up=of(lambda life: life.given_up),
        excluded=of(lambda life: life.excluded),
        of_roles={
            name: estimate([life.of_roles_s.get(name, 0.0) / 3600 for life in lives])
            for name in (scenario.trainer, *(part.name for part in scenario.parts))
            if name
        },
        formula=expected_ettr(scenario),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, with Student's t: as many values as there are seeds are few."""
    spread = stdev(values) if len(values) > 1 else 0.0
    return Estimate(fmean(values), t_quantile(len(values) - 1) * spread / math.sqrt(len(values)) if spread else 0.0)


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %: M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions", 26.7.5."""
    if degrees <= len(_EXACT_T):
        return _EXACT_T[max(1, degrees) - 1]
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def expected_ettr(scenario: Scenario) -> float:
    """E[ETTR] = (1 - N r (u0 + dt/2)) / (1 + w/dt), at least 0.

    A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024, of a run of N
    nodes with r failures of a node in a second, u0 seconds until it trains again, dt between saves that cost w.
    """
    every_s = scenario.interval_s
    rate_s = math.fsum(scenario.rates_s.values()) * scenario.size.nodes
    if not every_s:
        every_s = math.sqrt(2 * scenario.save_cost_s / rate_s) if rate_s and scenario.save_cost_s else 3600.0
    return max(0.0, (1 - rate_s * (scenario.start_s + every_s / 2)) / (1 + scenario.save_cost_s / every_s))


def shares(outcome: Projection) -> dict[str, float]:
    """Where the time went, by category; together 1."""
    return {category: outcome.share(category) for category in CATEGORIES}
