"""What is simulated: plain numbers, from the run's configuration and the description of its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmft.config.config import RunConfig
from slurmft.config.planning import PlanConfig
from slurmft.policy.nodes.membership import Size
from slurmft.policy.nodes.suspicion import Rules
from slurmft.policy.verdicts.verdict import Cause

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
