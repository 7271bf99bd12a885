"""A sweep of the cluster, which cron does: from one look at its nodes to what is changed, and what monitoring gets.

A sweep asks Slurm first. Where it does not answer, nothing is changed, as no node is at fault then.
"""

from __future__ import annotations

import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path

from slurmft.errors import (
    SlurmError,
    SlurmUnavailable,
    StorageError,
    StorageUnavailable,
)
from slurmft.health.checker import Results, read_results
from slurmft.operations.rescue import rescue_below
from slurmft.policy.node_health import Condition, HealthRules, NodeFact, SweepPlan, Visits, sweep_plan
from slurmft.policy.suspicion import Rules, State
from slurmft.scheduler import slurm
from slurmft.scheduler.slurm import NotPermitted
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.patience import SoftLock
from slurmft.system.exposition import GAUGE, Family, Sample, text
from slurmft.system.files import replace_atomically

# --- Look at Slurm, at the nodes' results and at the exclusion list; then act on it, and report ---

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

    qos: str = ""
    """Their QOS, such as one that others preempt."""

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
        _rescue_runs(order, report)
    except SlurmError as error:  # a refusal of these questions says as little as no answer
        report.silent = error.what
        report.problems.append(f"Slurm did not answer, so nothing more is changed: {error.what}")


def _look(order: SweepOrder, report: SweepReport) -> SweepPlan:
    facts = slurm.node_facts()
    visits = order.visits
    if visits.room(len(facts)) and order.results is not None:
        visits = replace(visits, under_way=slurm.nodes_under_test(), switch_of=slurm.switches())
    try:
        results = Results(checkups={}) if order.results is None else read_results(order.results)
    except StorageError as error:
        results = Results(checkups={}, problems=(error.what,))
    report.problems += results.problems
    found = order.exclusions.read()
    report.problems += [found.damage] if found.damage else []
    report.nodes = len(facts)
    report.plan = sweep_plan(
        facts, results.checkups, observations=found.observations, manual=found.manual, now=time.time(),
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
        changes = ("State=DRAIN", f"Reason={verdict.reason}")
        report.drained += _change(order, report, f"drained: {verdict.reason}", plan.nodes[verdict.node], changes)
    for seen in plan.resume:
        report.resumed += _change(order, report, "resumed", seen, ("State=RESUME",))


def _change(order: SweepOrder, report: SweepReport, words: str, seen: NodeFact, changes: Sequence[str]) -> bool:
    command = shlex.join(slurm.change_argv(seen.node, changes))
    if order.dry_run or not order.may_drain:
        report.for_admin.append(command)
        return False
    try:
        why = slurm.change_node(seen, changes)
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
    report.done.append(f"{seen.node} {words}")
    return True


def _test(order: SweepOrder, plan: SweepPlan, report: SweepReport) -> None:
    if order.results is None:
        return
    for pair in plan.test:
        probe, names = slurm.probe_command(order.health_file), " and ".join(pair)
        argv = slurm.probe_argv(pair, probe, order.test_minutes, partition=order.partition, qos=order.qos)
        if order.dry_run:
            report.done.append(f"{names} would be looked at by a job")
            continue
        try:
            job = slurm.submit(argv)
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            report.problems.append(f"no job to look at {names}: {error.what}")
            return  # an error of one is an error of all
        report.tested += 1
        report.done.append(f"{names} {'are' if len(pair) > 1 else 'is'} looked at by job {job}")


def _rescue_runs(order: SweepOrder, report: SweepReport) -> None:
    """Runs that have lost their supervisor, and requeues that were interrupted."""
    if order.dry_run or order.runs is None:
        return
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


# --- A sweep's results for monitoring: a file for the textfile collector, and a heartbeat for a dead-man switch ---

HEARTBEAT_S = 10.0
MAX_LEMONS = 20
"""Nodes that the file names."""

_HELD = (State.EXCLUDED, State.PROBATION)


def metrics_text(report: SweepReport, *, may_exclude: float = 0.5) -> str:
    """The report in the text format of Prometheus, without timestamps. Unknown values are left out.

    Args:
        may_exclude: the part of the nodes that may be excluded, ``exclusions.max_excluded_fraction``.
    """
    return text(
        Family(name, about, GAUGE, [Sample(labels, value) for labels, value in values])
        for name, about, values in _metrics(report, may_exclude)
    )


def _metrics(report: SweepReport, may_exclude: float) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
    yield "slurmft_sweep_slurm_up", "Whether Slurm answered the last sweep.", [({}, float(report.saw_cluster))]
    yield "slurmft_sweep_timestamp_seconds", "When the last sweep was done.", [({}, round(time.time(), 3))]
    yield "slurmft_sweep_duration_seconds", "Time of the last sweep.", [({}, round(report.took_s, 3))]
    if (plan := report.plan) is None:
        return
    yield "slurmft_sweep_nodes", "Nodes that Slurm names.", [({}, report.nodes)]
    by_condition = [({"condition": str(each)}, float(len(plan.assessment.of(each)))) for each in Condition]
    yield "slurmft_sweep_nodes_checked", "Nodes with results, by what they come to.", by_condition
    states = {state: [node for node, held in plan.standings.items() if held.state is state] for state in _HELD}
    by_state = [({"state": str(state)}, float(len(nodes))) for state, nodes in states.items()]
    yield "slurmft_sweep_nodes_held", "Nodes on the exclusion list before the last sweep.", by_state
    lemons = sorted(states[State.EXCLUDED], key=lambda node: -plan.standings[node].score)[:MAX_LEMONS]
    about = "Nodes that their failures keep excluded, the worst first; not those that were excluded by hand."
    yield (
        "slurmft_sweep_lemon_info", about, [({"node": node}, 1.0) for node in lemons
                                            if not plan.standings[node].by_hand]
    )  # fmt: skip
    if report.nodes and may_exclude:
        used = len(states[State.EXCLUDED]) / (may_exclude * report.nodes)
        about = "Part of the nodes that may be excluded (exclusions.max_excluded_fraction) which are."
        yield "slurmft_sweep_exclusions_used_ratio", about, [({}, round(used, 4))]
    for name, about, value in (
        ("excluded", "Nodes that the last sweep excluded.", len(plan.excluded)),
        ("held_back", "Sick nodes that a safety limit kept.", len(plan.held_back)),
        ("cluster_problems", "Failures that many nodes share.", len(plan.cluster_problems)),
        ("drained", "Nodes that the last sweep drained.", report.drained),
        ("resumed", "Nodes that the last sweep resumed.", report.resumed),
        ("tests", "Jobs that the last sweep submitted to look at nodes.", report.tested),
        ("rescued", "Runs that the last sweep brought back.", report.rescued),
        ("problems", "What the last sweep could not look at or do.", len(report.problems)),
    ):
        yield f"slurmft_sweep_{name}", about, [({}, float(value))]


def write_metrics(path: Path, report: SweepReport, *, may_exclude: float) -> None:
    """Replace the file, readable by all: the collector is another user.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, metrics_text(report, may_exclude=may_exclude), mode=0o644, durable=False)


def send_heartbeat(url: str) -> str:
    """Tell a dead-man switch that a sweep saw the cluster; returns what went wrong, or nothing."""
    try:
        with urllib.request.urlopen(url, timeout=HEARTBEAT_S) as answer:  # noqa: S310 - its scheme was looked at
            answer.read(1024)
    except (OSError, ValueError, HTTPException) as error:  # OSError: URLError, HTTPError and timeouts
        return f"the heartbeat was not taken: {getattr(error, 'reason', None) or error}"
    return ""
