"""One sweep: look at Slurm, at the nodes' results and at the exclusion list; then act on it, and report.

Slurm is asked first. Where it does not answer nothing is changed, as no node is at fault then.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurmft.errors import SlurmError, SlurmUnavailable, StorageError, StorageUnavailable
from slurmft.health.results import Results, read_results
from slurmft.operations.rescue import rescue_below
from slurmft.policy.nodes.node_health import HealthRules
from slurmft.policy.nodes.suspicion import Rules
from slurmft.policy.nodes.sweep import SweepPlan, Visits, sweep_plan
from slurmft.scheduler import node_control
from slurmft.scheduler.node_control import NotPermitted
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.soft_lock import SoftLock

RESCUE_FRACTION = 0.5
"""Part of a sweep's time in which the turns of runs' owners begin."""

EXIT_SILENT = SlurmUnavailable.exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOrder:
    """The inputs of a sweep, and its permissions."""

    exclusions: ExclusionList
    rules: Rules
    results: Path | None
    """Folder of the nodes' results; None: there are none, and only runs and the list are looked after."""

    health_file: Path | None = None
    """Configuration of the jobs that check nodes; None: they find it by themselves."""

    health: HealthRules = field(default_factory=HealthRules)
    runs: Path | None = None
    """Folder of the runs that may need a rescue; None: no runs."""

    who: str
    may_drain: bool = False
    """Drain and resume nodes; else only print the commands."""

    dry_run: bool = False
    """Change nothing."""

    visits: Visits = field(default_factory=Visits)
    partition: str = ""
    """Partition of the short jobs that check idle nodes; the default one when empty."""

    test_minutes: int = 10
    limit_s: float = 300.0
    """After so long the whole sweep is ended from outside; a lock older than that is a dead sweep's."""


@dataclass(kw_only=True, slots=True)
class SweepReport:
    """The findings and actions of a sweep."""

    plan: SweepPlan | None = None
    """None where Slurm did not answer, or the exclusion list cannot be read."""

    nodes: int = 0
    done: list[str] = field(default_factory=list)
    """In words, in this order."""

    for_admin: list[str] = field(default_factory=list)
    """Commands that only an administrator may run, or that ``--drain`` was not given for."""

    problems: list[str] = field(default_factory=list)
    """Looks and actions that failed."""

    drained: int = 0
    resumed: int = 0
    tested: int = 0
    rescued: int = 0
    left_alone: str = ""
    """Which runs of other users were not touched, in one line."""

    queries: int = 0
    """Questions asked of Slurm about the whole cluster."""

    silent: str = ""
    """Why Slurm did not answer; nothing is changed from then on."""

    took_s: float = 0.0

    @property
    def saw_cluster(self) -> bool:
        """Whether Slurm has reported its nodes, and went on answering."""
        return self.plan is not None and not self.silent

    @property
    def exit_code(self) -> int:
        """As of the plan; 1 at least where something was not done; 75 where Slurm did not answer."""
        if self.silent or (self.plan is None and not self.problems):
            return EXIT_SILENT
        planned = 0 if self.plan is None else self.plan.exit_code
        return max(planned, 1 if self.problems or self.for_admin or self.rescued else 0)


def sweep(order: SweepOrder) -> SweepReport:
    """Run one sweep; errors of single actions are in the report.

    Raises:
        StorageUnavailable: another sweep is at work.
        StorageError: the place of the exclusion list cannot be written.
    """
    began_s, report = time.monotonic(), SweepReport()
    if order.dry_run:
        _look_and_act(order, report)
    else:
        order.exclusions.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = order.exclusions.path.with_name(f"{order.exclusions.path.name}.sweep")
        lock = SoftLock(path, stale_s=2 * order.limit_s)
        if not lock.try_acquire():
            raise StorageUnavailable("another sweep is at work", hint=f"if there is none, remove {path}")
        try:
            _look_and_act(order, report)
        finally:
            lock.release()
    report.took_s = time.monotonic() - began_s
    return report


def _look_and_act(order: SweepOrder, report: SweepReport) -> None:
    try:
        try:
            plan = _look(order, report)
            for act in (_record, _change_nodes, _test):
                act(order, plan, report)
        except StorageError as error:  # of the exclusion list; lost runs need none
            report.problems.append(f"no node is judged: {error.what}")
        _rescue(order, report)
    except SlurmError as error:  # a refusal of these questions says as little as no answer
        report.silent = error.what
        report.problems.append(f"Slurm did not answer, so nothing more is changed: {error.what}")


def _look(order: SweepOrder, report: SweepReport) -> SweepPlan:
    report.queries += 1
    nodes = node_control.node_facts()
    visits = order.visits
    if visits.at_most:
        report.queries += 1
        visits = Visits(at_most=visits.at_most, retest_s=visits.retest_s, stale_s=visits.stale_s,
                          under_way=node_control.nodes_under_test())  # fmt: skip
    try:
        results = Results(checkups={}) if order.results is None else read_results(order.results)
    except StorageError as error:
        results = Results(checkups={}, problems=(error.what,))
    report.problems += results.problems
    found = order.exclusions.read()
    report.problems += [found.damage] if found.damage else []
    report.nodes = len(nodes)
    report.plan = sweep_plan(
        nodes, results.checkups, observations=found.observations, manual=found.manual, now=time.time(),
        health=order.health, rules=order.rules, visits=visits,
    )  # fmt: skip
    return report.plan


def _record(order: SweepOrder, plan: SweepPlan, report: SweepReport) -> None:
    """Evidence and expiry."""
    would = "would be " if order.dry_run else ""
    report.done += [f"{verdict.node} {would}excluded: {verdict.detail} ({verdict.check}, {verdict.failed} of "
                    f"{verdict.looked} looks)" for verdict in plan.excluded]  # fmt: skip
    cleared = sorted({each.node for each in plan.observations if each.weight < 0})
    report.done += [f"{node} {would}credited with clean looks" for node in cleared]
    report.problems += [f"{verdict.node} is sick and stays: {why}" for verdict, why in plan.held_back]
    report.problems += [str(problem) for problem in plan.cluster_problems]
    if order.dry_run:
        return
    order.exclusions.observe(plan.observations)
    if order.exclusions.path.exists():
        swept = order.exclusions.gc(time.time(), order.rules)
        if swept.observations or swept.manual:
            report.done.append(f"{swept.observations + swept.manual} entries of the list have expired")


def _change_nodes(order: SweepOrder, plan: SweepPlan, report: SweepReport) -> None:
    for verdict in plan.drain:
        seen, reason = plan.nodes[verdict.node], verdict.reason
        command = node_control.drain_command(seen.node, reason)
        drain = functools.partial(node_control.drain, seen, reason)
        report.drained += _change(order, report, f"{seen.node} drained: {reason}", command, drain)
    for seen in plan.resume:
        command = node_control.resume_command(seen.node)
        resume = functools.partial(node_control.resume, seen)
        report.resumed += _change(order, report, f"{seen.node} resumed", command, resume)


def _change(order: SweepOrder, report: SweepReport, words: str, command: str, work: Callable[[], str]) -> bool:
    if order.dry_run or not order.may_drain:
        report.for_admin.append(command)
        return False
    try:
        why = work()
    except NotPermitted:
        report.for_admin.append(command)
        return False
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        why = error.what
    if why:
        report.problems.append(f"left alone: {why}")
        return False
    report.done.append(words)
    return True


def _test(order: SweepOrder, plan: SweepPlan, report: SweepReport) -> None:
    if order.results is None:
        return
    for node in plan.test:
        argv = node_control.probe_argv(
            node, node_control.probe_command(order.health_file), order.partition, order.test_minutes
        )
        if order.dry_run:
            report.done.append(f"{node} would be looked at by a job")
            continue
        try:
            job = node_control.submit_probe(argv)
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            report.problems.append(f"no job to look at {node}: {error.what}")
            return  # an error of one is an error of all
        report.tested += 1
        report.done.append(f"{node} is looked at by job {job}")


def _rescue(order: SweepOrder, report: SweepReport) -> None:
    """Runs that have lost their supervisor, and requeues that were interrupted."""
    if order.dry_run or order.runs is None:
        return
    report.queries += 1
    try:
        found = rescue_below(order.runs, order.who, limit_s=order.limit_s * RESCUE_FRACTION)
    except SlurmUnavailable:
        raise
    except (SlurmError, StorageError) as error:
        report.problems.append(error.what)
        return
    except OSError as error:
        report.problems.append(f"cannot list {order.runs}: {error.strerror or error}")
        return
    report.rescued, report.left_alone = len(found.done), found.left_alone
    report.done += found.done
    report.problems += found.problems
