"""``slurmft sweep``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from slurmft.cli.arguments import Amount, runs_root
from slurmft.cli.exclude import may_exclude, opened_list
from slurmft.cli.main import say, say_error, say_json
from slurmft.errors import SlurmftError, UsageError
from slurmft.health.checker import CONFIG_VARIABLE, load_config
from slurmft.operations.sweep import SweepOrder, SweepReport, heartbeat_url, send_heartbeat, write_metrics
from slurmft.operations.sweep import sweep as do_sweep
from slurmft.policy.node_health import Condition, Visits
from slurmft.system.isolation import bounded
from slurmft.system.processes import who

FORMAT = 1
_EXIT_CODES = """\b
Exit codes:
  0   all well
  1   something to look at: suspects, resumed nodes, rescued runs, commands for the admin, what could not be done
  2   sick nodes, or a problem of the whole cluster; also bad usage
  75  Slurm did not answer, another sweep is at work, or it took too long; nothing is held against any node
"""


class IdleNodes(click.ParamType[Visits]):
    """A number of nodes, or a share of them such as 5%."""

    name = "NODES|SHARE%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Visits:
        """Raises ``BadParameter`` for anything else, and for more than 1000 nodes or the half of them."""
        if isinstance(value, Visits):
            return value
        wrong = f"{str(value)[:40]!r} is neither a number of nodes up to 1000 nor a share from 1% to 50%"
        number, percent, rest = str(value).strip().partition("%")
        count = int(number) if number.isascii() and number.isdecimal() and len(number) <= 4 and not rest else -1
        if not 0 <= count <= (50 if percent else 1000) or (percent and not count):
            self.fail(wrong, param, ctx)
        return Visits(share=count / 100) if percent else Visits(at_most=count)


@click.command(epilog=_EXIT_CODES)
@click.option("--config", type=click.Path(path_type=Path), help="Configuration with the section exclusions.")
@click.option("--file", "file", type=click.Path(path_type=Path), help="The exclusion list itself; overrides --config.")
@click.option(
    "--health",
    type=click.Path(path_type=Path),
    help="Where results lie and when they count. Default: $SLURMFT_HEALTH_CONFIG, or /etc/slurmft/health.yaml.",
)
@click.option("--drain", is_flag=True, help="Drain sick nodes and resume those that are well; only reasons of our own.")
@click.option("--check-idle", "--test", "visits", type=IdleNodes(), default="0", show_default=True,
              help="Look at idle nodes with short jobs: so many nodes at a time, or a share such as 5%.")  # fmt: skip
@click.option("--partition", default="", help="Partition of those jobs.")
@click.option("--qos", default="", help="QOS of those jobs, such as one that others preempt.")
@click.option("--metrics", type=click.Path(path_type=Path), help="File for a textfile collector, replaced each time.")
@click.option("--heartbeat-url-file", type=click.Path(path_type=Path),
              help="File with a URL that is asked for when the sweep saw the cluster.")  # fmt: skip
@click.option("--limit", default=300.0, show_default=True, type=Amount(1, 86_400), help="Seconds it may take.")
@click.option("--dry-run", is_flag=True, help="Look, say what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, of a versioned format.")
def sweep(
    *, config: Path | None, file: Path | None, health: Path | None, drain: bool, visits: Visits, partition: str,
    qos: str, metrics: Path | None, heartbeat_url_file: Path | None, limit: float, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Sweep the cluster once, for cron: exclude and drain sick nodes, resume healthy ones, restart lost runs.

    A node is taken out when N of its last M looks agree, no more than a few in an hour, and none for a failure that
    many share. Without --drain, or without permission, the administrator's commands are printed.
    """
    url = heartbeat_url(heartbeat_url_file) if heartbeat_url_file is not None else ""

    def work() -> int:
        try:
            list_, rules = opened_list(file, config)
            settings = load_config(health, os.environ)
            if visits != Visits() and settings.results_folder is None:
                raise UsageError("--check-idle: the jobs leave what they find in results_folder, which is not set",
                                 hint="see --health")  # fmt: skip
            order = SweepOrder(
                exclusions=list_, rules=rules, results=settings.results_folder, health=settings.verdict.rules(),
                health_file=_health_file(health), runs=runs_root(), who=who(),
                may_drain=drain, dry_run=dry_run, visits=visits, partition=partition, qos=qos, limit_s=limit,
            )  # fmt: skip
            report = do_sweep(order)
        except SlurmftError as error:
            say_error(str(error))
            return error.exit_code
        except Exception as error:  # this is a child, whose frames end here
            logging.getLogger(__name__).debug("traceback", exc_info=True)
            say_error(f"internal error: {error!r}\n  hint: please report this; -v for the traceback")
            return 70
        if metrics is not None and not dry_run:
            try:
                write_metrics(metrics, report, may_exclude=may_exclude(config))
            except OSError as error:
                report.problems.append(f"{metrics} cannot be written: {error.strerror}")
        if url and report.saw_cluster and not dry_run and (problem := send_heartbeat(url)):
            report.problems.append(problem)
        if as_json:
            say_json(as_object(report))
        for line in () if as_json else as_lines(report):
            say(line)
        return report.exit_code

    return bounded(work, limit_s=limit, name="slurmft-sweep", environment=os.environ)


def _health_file(given: Path | None) -> Path | None:
    """The configuration file that jobs that check nodes are given; None: they find it by themselves."""
    named = given or os.environ.get(CONFIG_VARIABLE)
    return Path(named).absolute() if named else None


def as_lines(report: SweepReport) -> Iterator[str]:
    """The report for people; mails of cron begin with what matters."""
    yield from (f"PROBLEM: {problem}" for problem in report.problems)
    yield from report.done
    if report.left_alone:
        yield report.left_alone
    if report.for_admin:
        yield "for the administrator:"
        yield from (f"  {command}" for command in report.for_admin)
    if report.plan is not None:
        counts = {each: len(report.plan.assessment.of(each)) for each in Condition}
        told = ", ".join(f"{count} {each}" for each, count in counts.items() if count) or "no results"
        yield f"{report.nodes} nodes in Slurm; {told}; {report.took_s:.1f} s"


def as_object(report: SweepReport) -> dict[str, Any]:
    """The report for scripts."""
    found: dict[str, Any] = {
        name: getattr(report, name)
        for name in (
            "nodes",
            "done",
            "for_admin",
            "problems",
            "drained",
            "resumed",
            "tested",
            "rescued",
            "left_alone",
            "silent",
        )
    }
    found |= {"format": FORMAT, "exit_code": report.exit_code, "seconds": round(report.took_s, 3)}
    if report.plan is not None:
        found["cluster_problems"] = [asdict(problem) for problem in report.plan.cluster_problems]
        found["sick"] = [
            {"node": each.node, "check": each.check, "detail": each.detail, "remedy": each.remedy}
            for each in report.plan.assessment.of(Condition.SICK)
        ]
        found["suspects"] = [each.node for each in report.plan.assessment.of(Condition.SUSPECT)]
    return found
