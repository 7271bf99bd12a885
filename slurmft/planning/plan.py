"""``slurmft plan``: its file (a cluster, its failures, and how long things take there), alternatives of one run, and
their chart.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

from pydantic import AfterValidator, BeforeValidator, Field

from slurmft.config.base import Positive, Section, Share
from slurmft.config.run import Role, RunConfig, load, load_section, roles_of
from slurmft.errors import UsageError
from slurmft.operations.site import counsel
from slurmft.planning.simulation import DAY_S, Part, Projection, Scenario, as_one, shares, simulate
from slurmft.policy import values as plain
from slurmft.policy.checkpoints import typical_cost_s
from slurmft.policy.verdict import Cause, by_cause

# --- The file of ``slurmft plan``: a cluster, its failures, and how long things take there ---

MOST = 1e9
Number = Annotated[float, Field(ge=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MOST))]

DEFAULT_RATES = {Cause.NODE_LOST: 0.8, Cause.SIGNAL_CRASH: 1.5, Cause.HANG: 0.8, Cause.COMMUNICATION_ERROR: 0.7}
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

    role_restart_s: dict[str, Number] = Field(default_factory=dict)
    """Role -> seconds until what has failed in it works again; default: ``start_s`` for engines, which load their
    weights, and ``restart_s`` for others."""


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

MORE_NODES = 50
"""A cluster has one node in so many more than the run asks for, where nothing is said."""

TYPICAL_SAVE_S, TYPICAL_DURABLE_S = 5.0, 30.0


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
    parts: tuple[Part, ...] = ()
    trainer, size, asked = "", run.elastic.size(run.nodes), run.nodes + run.spare_nodes
    if run.roles:
        trainer, run, parts = _parts(run, plan.durations)
    cluster = plan.cluster.nodes or asked + max(1, asked // MORE_NODES)
    section, durations = run.checkpoint, plan.durations
    interval_s = {"seconds": section.interval_seconds, "steps": section.interval_steps * step_s}.get(
        section.interval, 0.0
    )
    return Scenario(
        size=size,
        parts=parts,
        trainer=trainer,
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


def _trainer_of(roles: Sequence[Role]) -> Role:
    return max((role for role in roles if not role.is_endpoint), key=lambda role: role.nodes)


def _parts(run: RunConfig, durations: DurationConfig) -> tuple[str, RunConfig, tuple[Part, ...]]:
    """The role that trains, its configuration, and the others that have nodes. Of an endpoint's replicas one fails at a
    time, and the training goes on as fast as the others feed it."""
    roles, first, parts = roles_of(run), 0, list[Part]()
    trainer = _trainer_of(roles)
    if unknown := set(durations.role_restart_s) - {role.name for role in roles}:
        raise UsageError(f"durations.role_restart_s: {run.name} has no role {', '.join(sorted(unknown))}")
    for role in roles:
        if role.nodes and role.name != trainer.name:
            inference = role.config.inference
            restart_s = durations.start_s if role.is_endpoint else durations.restart_s
            parts.append(
                Part(
                    name=role.name,
                    first=first,
                    nodes=role.nodes,
                    restart_s=durations.role_restart_s.get(role.name, restart_s),
                    share=1 / (inference.replicas_per_node * role.nodes) if inference and role.is_endpoint else 1.0,
                )
            )
        first += role.nodes
    return trainer.name, trainer.config, tuple(parts)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


# --- ``slurmft plan``: alternatives of one run, simulated and compared ---

AS_IT_IS = "as configured"
AS_ONE = "restarted as a whole"
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
        UsageError: there are too many alternatives, or ``varied`` is not of that form.
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
        plan = load_section(site, PlanConfig, [each for each in all_keys if _is_plans(each)])
        if measured is None:
            measured = _measured(_trainer_of(roles_of(run)).config if run.roles else run)
        one = Alternative(name=name, scenario=scenario(run, plan, **measured), seeds=seeds or plan.seeds)
        found.append(one)
        if one.scenario.parts and name == AS_IT_IS:
            found.append(replace(one, name=AS_ONE, scenario=as_one(one.scenario)))
    return found


def simulated(found: Sequence[Alternative], tell: Callable[[str], None]) -> Iterator[Projection]:
    """The outcome of each, as it is there."""
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
