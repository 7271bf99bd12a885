"""``slurmft plan``: its file (a cluster, its failures, and how long things take there), and alternatives of one run,
simulated and compared.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Annotated, Any
from xml.sax.saxutils import escape

import simpy
from pydantic import AfterValidator, BeforeValidator, Field

from slurmft.config.base import Positive, Section
from slurmft.config.run import RunConfig, load, load_section
from slurmft.errors import UsageError
from slurmft.operations.advise import counsel
from slurmft.policy import interval, suspicion
from slurmft.policy import values as plain
from slurmft.policy.decide import PastEnd, budget_for, decide
from slurmft.policy.interval import typical_cost_s
from slurmft.policy.judge import held_against
from slurmft.policy.membership import Agent, Members, Node, Size, Standing, next_members
from slurmft.policy.suspicion import Candidate, PartitionNodes, Rules, State, choose_exclusions
from slurmft.policy.verdict import Action, Cause, Evidence, Kind, Suspect, Verdict, by_cause

# --- The file of ``slurmft plan``: a cluster, its failures, and how long things take there ---

MOST = 1e9
Number = Annotated[float, Field(ge=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MOST))]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(plain.no_bool)]

DEFAULT_RATES = {
    Cause.NODE_LOST: 0.8, Cause.SIGNAL_CRASH: 1.5, Cause.HANG: 0.8, Cause.COMMUNICATION_ERROR: 0.7,
}  # fmt: skip
"""3.8 in 1,000 node-days together: 419 interruptions in 54 days on 2,048 nodes ("The Llama 3 Herd of Models", 2024,
table 5). How they divide among the causes is our assumption."""


class LemonConfig(Section):
    """Nodes that fail more often than the others."""

    share: Share = 0.01
    """Share of the cluster's nodes."""

    factor: Number = 10.0
    """How many times as often they fail."""


class ClusterConfig(Section):
    """The nodes that a job may run on."""

    nodes: Positive | None = None
    """All of them, those in repair included; empty: as many as the run asks for, and one in fifty more."""

    lemons: LemonConfig = Field(default_factory=LemonConfig)
    repair_hours: Number = 24.0
    """Mean time until a node that was lost is back."""


def _rates(value: Any) -> Any:
    return by_cause(value) if isinstance(value, dict) else value


class FailureConfig(Section):
    """How often, and what is seen of it."""

    per_1000_node_days: Annotated[dict[Cause, Number], BeforeValidator(_rates)] = Field(
        default_factory=lambda: {**DEFAULT_RATES}
    )
    """Failures of 1,000 nodes in a day, by the cause that a verdict would name. A lost node needs a repair; all others
    leave the node in the job."""

    named_right: Share = 0.9
    """How often the verdict names the node that failed; otherwise it names none."""

    seen_by_checks: Share = 0.2
    """How often a health check finds the fault as well, which is stronger evidence than a crash."""


class QueueConfig(Section):
    """What happens around the run."""

    wait_minutes: Number = 10.0
    """Mean time in the queue, at the first submission and after each requeue."""

    preemptions_per_day: Number = 0.0
    time_limit_hours: Number = 0.0
    """0: none."""

    person_hours: Number = 4.0
    """Until a person submits a run again that slurmft has given up."""


class DurationConfig(Section):
    """How long things take; empty: as ``slurmft advise`` has measured for the run, or else a typical value."""

    start_s: Number = 120.0
    """From a granted allocation to the first new step: launch, imports, setup, load."""

    restart_s: Number = 5.0
    """The same for a restart within the job."""

    save_cost_s: Number | None = None
    """What a save costs the training."""

    durable_s: Number | None = None
    """From the beginning of a save until it survives the loss of its node."""

    hang_s: Number = 180.0
    """Until a hang is noticed."""


class PlanConfig(Section):
    """All of it."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    failures: FailureConfig = Field(default_factory=FailureConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    durations: DurationConfig = Field(default_factory=DurationConfig)
    work_days: Annotated[float, Field(gt=0, le=3660), BeforeValidator(plain.no_bool)] = 30.0
    """Days of training on all nodes without any fault."""

    seeds: Annotated[int, Field(ge=2, le=1000), BeforeValidator(plain.no_bool)] = 10
    """Simulated lives of the run; more make the intervals narrower."""

    alternatives: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name -> keys that differ, of this file or of the run: ``{two spares: {spare_nodes: 2}}``."""


# --- What is simulated: plain numbers, from the run's configuration and the description of its cluster ---

DAY_S = 86_400.0
MORE_NODES = 50
"""A cluster has one node in so many more than the run asks for, where nothing is said."""

TYPICAL_SAVE_S, TYPICAL_DURABLE_S = 5.0, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One alternative."""

    size: Size
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


def scenario(
    run: RunConfig,
    plan: PlanConfig,
    *,
    step_s: float = 0.0,
    save_cost_s: float | None = None,
    durable_s: float | None = None,
) -> Scenario:
    """The numbers of one alternative.

    Args:
        run: what the job asks for, and how it survives.
        plan: the cluster.
        step_s: seconds of a step, for intervals in steps; 0 where it is not known: those count as automatic.
        save_cost_s: as measured, where ``plan`` says nothing.
        durable_s: the same.
    """
    asked = run.nodes + run.spare_nodes
    cluster = plan.cluster.nodes or asked + max(1, asked // MORE_NODES)
    section, durations = run.checkpoint, plan.durations
    interval_s = {"seconds": section.interval_seconds, "steps": section.interval_steps * step_s}.get(
        section.interval, 0.0
    )
    return Scenario(
        size=run.elastic.size(run.nodes),
        spares=run.spare_nodes,
        cluster=max(cluster, asked),
        rates_s={cause: rate / 1000 / DAY_S for cause, rate in plan.failures.per_1000_node_days.items() if rate},
        lemons=round(plan.cluster.lemons.share * cluster),
        lemon_factor=plan.cluster.lemons.factor,
        repair_s=plan.cluster.repair_hours * 3600,
        named_right=plan.failures.named_right,
        seen_by_checks=plan.failures.seen_by_checks,
        wait_s=plan.queue.wait_minutes * 60,
        preemptions_s=plan.queue.preemptions_per_day / DAY_S,
        time_limit_s=plan.queue.time_limit_hours * 3600,
        person_s=plan.queue.person_hours * 3600,
        start_s=durations.start_s,
        restart_s=durations.restart_s,
        save_cost_s=_first(durations.save_cost_s, save_cost_s, TYPICAL_SAVE_S),
        durable_s=_first(durations.durable_s, durable_s, TYPICAL_DURABLE_S),
        hang_s=durations.hang_s,
        interval_s=interval_s,
        longest_interval_s=section.interval_seconds if section.interval == "auto" else 0.0,
        is_copied=section.peer_copies > 0,
        restarts=run.fault_tolerance.num_in_job_restarts,
        retries=run.fault_tolerance.num_job_retries_on_failure,
        retries_of=run.fault_tolerance.retries,
        max_no_progress_cycles=run.fault_tolerance.max_no_progress_cycles,
        rules=run.exclusions.rules(),
        max_excluded_fraction=run.exclusions.max_excluded_fraction,
        excludes=run.exclusions.max_excluded_fraction > 0,
        work_s=plan.work_days * DAY_S,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


# --- ``slurmft plan``: alternatives of one run, simulated and compared ---

AS_IT_IS = "as configured"
MOST_ALTERNATIVES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One thing to simulate."""

    name: str
    scenario: Scenario
    seeds: int


def alternatives(
    config: Path, site: Path | None, *, overrides: Sequence[str], varied: Sequence[str], seeds: int | None
) -> list[Alternative]:
    """The run as configured, what the site's file lists, and every combination of the varied keys.

    Args:
        config: the run's configuration.
        site: the description of its cluster; None: defaults.
        overrides: ``key=value``, of either file, for all alternatives.
        varied: ``key=value,value,...``.
        seeds: lives of each; None: as the site's file says.

    Raises:
        ConfigError: a file or a key is wrong.
        UsageError: there are too many alternatives, ``varied`` is not of that form, or the run has roles.
    """
    plan = load_section(site, PlanConfig, [each for each in overrides if _is_plans(each)])
    wanted = {AS_IT_IS: list[str]()}
    wanted |= {name: [f"{key}={json.dumps(value)}" for key, value in keys.items()] for name, keys in
               plan.alternatives.items()}  # fmt: skip
    wanted |= {", ".join(each): list(each) for each in _combinations(varied)}
    if len(wanted) > MOST_ALTERNATIVES:
        raise UsageError(f"{len(wanted)} alternatives are too many; at most {MOST_ALTERNATIVES}")
    found: list[Alternative] = []
    measured: Mapping[str, Any] | None = None
    for name, keys in wanted.items():
        all_keys = [*overrides, *keys]
        run = load(config, [each for each in all_keys if not _is_plans(each)])
        if run.roles:
            raise UsageError(f"{config} has roles, whose lives together are not simulated",
                             hint="plan its trainer alone: a configuration with the keys of that role")  # fmt: skip
        plan = load_section(site, PlanConfig, [each for each in all_keys if _is_plans(each)])
        if measured is None:
            measured = _measured(run)
        found.append(Alternative(name=name, scenario=scenario(run, plan, **measured), seeds=seeds or plan.seeds))
    return found


def simulated(found: Sequence[Alternative], tell: Callable[[str], None]) -> Iterator[Projection]:
    """The outcome of each, as it is there.

    Raises:
        UsageError: SimPy is not installed.
    """
    try:
        pass
    except ModuleNotFoundError as error:
        raise UsageError("SimPy is not installed here", hint="pip install simpy") from error
    for number, each in enumerate(found, start=1):
        tell(f"{each.name}: {each.seeds} lives ({number} of {len(found)})")
        yield simulate(each.name, each.scenario, each.seeds, workers=len(os.sched_getaffinity(0)))


def _is_plans(override: str) -> bool:
    return override.partition("=")[0].partition(".")[0] in PlanConfig.model_fields


def _combinations(varied: Sequence[str]) -> Iterator[tuple[str, ...]]:
    choices = []
    for each in varied:
        key, equals, values = each.partition("=")
        if not key or not equals or not all(values.split(",")):
            raise UsageError(f"--vary {each[:80]!r} is not of the form key=value,value,...")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return itertools.product(*choices) if choices else iter(())


def _measured(run: RunConfig) -> Mapping[str, Any]:
    """Durations that earlier attempts of this run, or of runs like it, have measured."""
    known = counsel(run, {}).advice.measured
    cost_s = typical_cost_s(list(known.costs_s))
    durable = sorted(known.saves_s)
    return {"step_s": known.need.step_s or 0.0, "save_cost_s": cost_s,
            "durable_s": durable[len(durable) // 2] if durable else None}  # fmt: skip


# --- simulation ---
# One simulated life of a run. What is decided is decided by the policy of a real run; what happens is drawn.
#
# A discrete-event simulation (SimPy): a process for the run, one for the failures of its nodes, one for each repair.
# Failures of a node are a Poisson process; they come while the run starts, trains, saves and restarts, and not while it
# waits. Not simulated: stragglers, lent nodes, failures of nodes that wait in no job, requests of users.

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


# --- chart ---
# A plot of alternatives: where the time goes, as one bar each, with the confidence interval of the useful part.

WIDTH, LEFT, BAR, GAP = 860, 230, 22, 14
COLOURS = {
    "training": "#2a9d5c", "saving": "#8ab17d", "lost work": "#d1495b", "restart": "#f4a261", "start": "#e9c46a",
    "queue": "#8d99ae", "no nodes": "#5c677d", "hang": "#9d4edd", "person": "#222831",
}  # fmt: skip


def svg(outcomes: Sequence[Projection]) -> str:
    """The picture, of a size that does not depend on a font."""
    scale = WIDTH - LEFT - 90
    height = 60 + len(outcomes) * (BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img"><title>Where the time goes</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    ]
    x = 10.0
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x:.0f}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="23" fill="#222831">{name}</text>')
        x += 34 + 7.5 * len(name)
    for row, outcome in enumerate(outcomes):
        top, x = 48 + row * (BAR + GAP), float(LEFT)
        name = outcome.name if len(outcome.name) <= 34 else f"{outcome.name[:33]}…"
        parts.append(f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end" fill="#222831">{escape(name)}</text>')
        for category, share in shares(outcome).items():
            if share > 0:
                parts.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{share * scale:.1f}" height="{BAR}" '
                    f'fill="{COLOURS[category]}"><title>{category}: {share:.1%}</title></rect>'
                )
                x += share * scale
        low, high = (LEFT + scale * (outcome.ettr.mean + sign * outcome.ettr.half_width) for sign in (-1, 1))
        middle = top + BAR / 2
        parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" '
                     'stroke="#000000" stroke-width="1.5" fill="none"/>')  # fmt: skip
        parts.append(f'<text x="{WIDTH - 84}" y="{top + 16}" fill="#222831">{outcome.ettr.mean:.1%}</text>')
    return "".join([*parts, "</svg>\n"])
