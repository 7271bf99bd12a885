"""One simulated life of a run. What is decided is decided by the policy of a real run; what happens is drawn.

A discrete-event simulation (SimPy): a process for the run, one for the failures of its nodes, one for each repair.
Failures of a node are a Poisson process; they come while the run starts, trains, saves and restarts, and not while it
waits. Not simulated: stragglers, lent nodes, failures of nodes that wait in no job, requests of users.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import simpy

from slurmft.planning.scenario import Scenario
from slurmft.policy.nodes import suspicion
from slurmft.policy.nodes.capacity import Candidate, Place, choose
from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.nodes.membership import Agent, Members, Node, Standing, next_members
from slurmft.policy.nodes.suspicion import State
from slurmft.policy.timing import checkpoint_interval as interval
from slurmft.policy.verdicts.budget import PastEnd, budget_for
from slurmft.policy.verdicts.decide import decide
from slurmft.policy.verdicts.judge import held_against
from slurmft.policy.verdicts.verdict import Action, Cause, Verdict

Steps = Generator[simpy.Event, Any, None]

LONGEST = 20.0
"""A run that takes so many times its work is given up: nothing more can be learned from it."""

RECENT = 200
"""Ends that a budget looks back on; it begins anew with every step that is saved."""

CATEGORIES = ("training", "saving", "lost work", "restart", "start", "queue", "no nodes", "hang", "person")
"""Where the time of a life goes; together all of it."""


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
        self._is_exposed = False
        self._process: simpy.Process | None = None
        self._hazard: simpy.Process | None = None
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
        place = Place(name="all", nodes=frozenset(self._names), usable=frozenset(world.up))
        candidates = [Candidate(node=name, score=1.0) for name in sorted(world.excluded)]
        choice = choose(
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
        began_s = self._env.now
        end_s = min(whole_s, limit_s, max(0.0, self._limit_s - began_s))
        cut = yield from self._exposed(end_s)
        took_s = self._env.now - began_s
        world.node_s += took_s * len(world.members)
        if cut is None and end_s == whole_s:
            self._book(need_s, whole_s - need_s, 0.0)
            world.saved_s = scenario.work_s
            return None
        full, rest_s = divmod(took_s, cycle_s)
        done_s = min(need_s, full * every_s + min(rest_s, every_s))
        if not isinstance(cut, _Failure):  # a planned end saves first
            yield from self._spend("saving", cost_s)
            self._book(done_s, took_s - done_s, 0.0)
            world.saved_s = world.in_memory_s = before_s + done_s * speed
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
        history = interval.FailureHistory(failures=sum(world.failures.values()), node_s=world.node_s)
        mean_s = interval.mtbf_s(history, self._s.size.nodes)
        durable_s = 0.0 if self._s.is_copied else self._s.durable_s
        return interval.plan(
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
        if isinstance(cut, _Preemption):
            return self._planned(cut, before_s)
        world.failures[cut.cause] += 1
        if cut.cause is Cause.HANG:
            yield from self._spend("hang", self._s.hang_s)
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
        """Time in which nodes fail; returns what cut it short. Without a category the caller books it."""
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
        return cut

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
