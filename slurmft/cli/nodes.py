"""The verbs about the nodes of a cluster: ``slurmft exclude``, ``sweep``, ``doctor`` and ``drill``."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from slurmft.cli import arguments
from slurmft.cli.main import Verbs, console, say, say_block, say_error, say_json, table
from slurmft.config.sections import ExclusionsConfig
from slurmft.errors import SlurmftError, StorageError, UsageError
from slurmft.health.checker import CONFIG_VARIABLE, load_config
from slurmft.operations.site import as_lines, carry_out, diagnose, prepared
from slurmft.operations.sweep import SweepOrder, SweepReport, send_heartbeat, write_metrics
from slurmft.operations.sweep import sweep as do_sweep
from slurmft.policy.node_health import Condition, Visits
from slurmft.policy.site import passed
from slurmft.policy.suspicion import (
    ManualEntry,
    Rules,
    Standing,
    State,
    Weighed,
    standing,
    suspect_gpus,
    weigh,
)
from slurmft.scheduler import slurm
from slurmft.scheduler.own_jobs import preempt_argv, signal_argv
from slurmft.storage.exclusions import ExclusionList, Exclusions
from slurmft.supervisor.avoided_nodes import list_path
from slurmft.system.files import url_in
from slurmft.system.foreign_text import one_line
from slurmft.system.processes import bounded, who

# --- ``slurmft exclude``: the exclusion list, for people ---

FORMAT = 1
DEFAULT_DAYS = 30
_COLOURS = {State.EXCLUDED: "red", State.PROBATION: "yellow", State.FREE: "green"}
_EXIT_CODES = """\b
Exit codes:
  0   done; the list, or the node, may well be empty
  1   the list cannot be read or written, is damaged (the rest of it is shown), or is of a newer version
  2   bad usage: no hostlist, no time
  75  temporary: no space, another process is writing for too long, or Slurm does not say the cluster's name
"""


@dataclass(frozen=True, slots=True)
class _Opened:
    list: ExclusionList
    rules: Rules
    path: Path
    may_exclude: float
    """The part of the nodes that may be excluded."""


def _list_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--file, --config and --json, which every verb of the group takes."""
    for option in (
        arguments.json_option,
        click.option("--config", type=arguments.PATH, help="Configuration with the section exclusions."),
        click.option("--file", "file", type=arguments.PATH, help="The list itself; overrides --config."),
    ):
        function = option(function)
    return function


def _open(file: Path | None, config: Path | None) -> _Opened:
    settings = arguments.own_configuration(config).exclusions if config is not None else ExclusionsConfig()
    path = file if file is not None else list_path(settings.path, os.environ)
    list_ = ExclusionList(path, _mode_of(path, settings))
    return _Opened(list_, settings.rules(), path, settings.max_excluded_fraction)


def _mode_of(path: Path, settings: ExclusionsConfig) -> int:
    """A list keeps its mode: without --config it is not known whether it is a group's."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return settings.mode_bits()


@click.group(cls=Verbs, epilog=_EXIT_CODES)
def exclude() -> None:
    """The exclusion list: list nodes, show why, add, remove, forget what has faded.

    Works without Slurm. NODES are hostlists, such as gpu-[07,12-15]. Without --file and --config it is your own list of
    this cluster.
    """


@exclude.command("list")
@_list_options
@click.option("--all", "show_all", is_flag=True, help="Include nodes that are free again.")
@click.option("--nodes", "only_nodes", is_flag=True, help="Only the excluded nodes, as one hostlist.")
def list_(*, file: Path | None, config: Path | None, as_json: bool, show_all: bool, only_nodes: bool) -> int:
    """Show which nodes are excluded or on probation, why, and until when."""
    opened, now = _open(file, config), time.time()
    found = opened.list.read()
    standings = standing(found.observations, found.manual, now, opened.rules)
    excluded = [node for node, each in standings.items() if each.state is State.EXCLUDED]
    if only_nodes:
        say(slurm.compress(excluded))
        return _tell_damage(found)
    shown = sorted((each for each in standings.values() if show_all or each.state is not State.FREE), key=_order)
    gpus = suspect_gpus(found.observations, now, opened.rules)
    if as_json:
        _print_json(path=str(opened.path), revision=found.revision, excluded=slurm.compress(excluded),
                    nodes=[_standing_json(each) for each in shown], suspect_gpus=gpus)  # fmt: skip
        return _tell_damage(found)
    if not shown:
        say(f"no node is excluded or on probation in {opened.path}")
    else:
        console().print(_table(shown))
    for gpu, score in gpus.items():
        say(f"suspect GPU {gpu} ({score:.2f})")
    return _tell_damage(found)


@exclude.command()
@click.argument("nodes")
@_list_options
@click.option("--reason", required=True, help="Why, for the next reader of the list.")
@click.option("--for", "duration", metavar="TIME", help="For how long: 90m, 12h, 7d, 2w, or ever. Default: 30d.")
@click.option("--until", metavar="DATE", help="Until when: 2030-01-31, or 2030-01-31T18:00, in local time.")
def add(
    *, nodes: str, file: Path | None, config: Path | None, as_json: bool, reason: str, duration: str | None,
    until: str | None,
) -> int:  # fmt: skip
    """Exclude NODES by hand, independent of their score."""
    names, now = _expanded(nodes), time.time()
    if duration is not None and until is not None:
        raise UsageError("--for and --until are two ways to say one thing", hint="give one of them")
    end = _until(until, now) if until is not None else _after(duration or f"{DEFAULT_DAYS}d", now)
    opened = _open(file, config)
    opened.list.exclude(*(ManualEntry(node=node, reason=reason, who=who(), at=now, until=end) for node in names))
    if as_json:
        _print_json(path=str(opened.path), added=slurm.compress(names), until=end)
    else:
        say(f"excluded {slurm.compress(names)} {_told_until(math.inf if end is None else end)}")
    return 0


@exclude.command()
@click.argument("nodes")
@_list_options
def remove(*, nodes: str, file: Path | None, config: Path | None, as_json: bool) -> int:
    """Forget all observations of NODES and exclusions by hand; later observations count anew."""
    names, opened = _expanded(nodes), _open(file, config)
    lifted = opened.list.remove(names, who())
    strangers = sorted(set(names) - set(lifted))
    if as_json:
        _print_json(path=str(opened.path), removed=slurm.compress(lifted), unknown=slurm.compress(strangers))
        return 0
    if lifted:
        say(f"removed {slurm.compress(lifted)}")
    if strangers:
        say(f"nothing was held against {slurm.compress(strangers)}")
    return 0


@exclude.command()
@click.argument("node")
@_list_options
def why(*, node: str, file: Path | None, config: Path | None, as_json: bool) -> int:
    """Show every observation of NODE: its age, its weight then and now, and its evidence."""
    opened, now = _open(file, config), time.time()
    found = opened.list.read()
    held = [each for each in found.observations if each.node == node]
    manual = [entry for entry in found.manual if entry.node == node]
    each = standing(held, manual, now, opened.rules).get(node)
    weighed = weigh(held, now, opened.rules)
    if as_json:
        _print_json(
            path=str(opened.path), node=node, standing=None if each is None else _standing_json(each),
            manual=[asdict(entry) | {"holds": entry.holds(now)} for entry in manual],
            observations=[_weighed_json(entry, now) for entry in weighed],
        )  # fmt: skip
        return _tell_damage(found)
    if each is None and not manual:
        say(f"nothing is known of {node} in {opened.path}")
        return _tell_damage(found)
    if each is not None:
        levels = f"excluded from {opened.rules.threshold:g}, on probation from {opened.rules.probation:g}"
        end = _told_until(each.until)
        say(f"{node} is {each.state}, score {each.score:.2f} ({levels}) {end}".rstrip())
    for entry in manual:
        ended = "" if entry.holds(now) else ", expired"
        end = _told_until(math.inf if entry.until is None else entry.until)
        say(f"  by hand: {entry.reason} (by {entry.who}, {_age(now - entry.at)} ago, {end}{ended})")
    for line in _observation_lines(weighed, now):
        say(line)
    return _tell_damage(found)


@exclude.command("gc")
@_list_options
def gc_(*, file: Path | None, config: Path | None, as_json: bool) -> int:
    """Forget what has faded or expired; no node's status changes."""
    opened = _open(file, config)
    swept = opened.list.gc(time.time(), opened.rules)
    if as_json:
        _print_json(path=str(opened.path), **asdict(swept))
    else:
        say(f"forgot {swept.observations} observations, {swept.manual} expired exclusions by hand and "
                   f"{swept.files} left-over files; {swept.kept} are kept")  # fmt: skip
    return 0


def _tell_damage(found: Exclusions) -> int:
    """The exit code of a verb that has shown what can be believed of a list."""
    if not found.damage:
        return 0
    say_error(str(found.damage))
    return StorageError.exit_code


def _expanded(hostlist: str) -> list[str]:
    try:
        names = slurm.expand(hostlist)
    except ValueError as error:
        raise UsageError(str(error), hint="such as gpu-07, or gpu-[07,12-15],login1") from error
    if not names:
        raise UsageError("no node is named", hint="such as gpu-07, or gpu-[07,12-15]")
    return names


def _after(text: str, now: float) -> float | None:
    if text in ("ever", "forever"):
        return None
    if (seconds := arguments.seconds_in(text)) is None:
        raise UsageError(f"--for {text[:80]!r} is not a time", hint="such as 90m, 12h, 7d, 2w, or ever")
    return now + seconds


def _until(text: str, now: float) -> float:
    try:
        end = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"--until {text[:80]!r} is not a date", hint="such as 2030-01-31 or 2030-01-31T18:00"
        ) from error
    if end <= now:
        raise UsageError(f"--until {text[:80]!r} is over", hint="give a time that is still ahead")
    return end


def _order(each: Standing) -> tuple[Any, ...]:
    ranks = {State.EXCLUDED: 0, State.PROBATION: 1, State.FREE: 2}
    return (ranks[each.state], not each.by_hand, -each.score, _natural(each.node))


def _natural(name: str) -> list[Any]:
    """n2 before n10."""
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part)
            for part in re.split(r"([0-9]{1,18})", name)]  # fmt: skip


def _table(shown: Iterable[Standing]) -> Table:
    made = table("node", "state", "score", "until", "reasons", wrapped=("node", "reasons"))
    for each in shown:
        made.add_row(
            Text(one_line(each.node)),
            Text(each.state, style=_COLOURS[each.state]),
            f"{each.score:.2f}",
            _told_until(each.until).removeprefix("until "),
            Text(one_line(", ".join(each.reasons) or "-")),
        )
    return made


def _observation_lines(weighed: Sequence[Weighed], now: float) -> Iterator[str]:
    """Two lines for each, the oldest first; not in columns: evidence is long, and is to be found with grep."""
    for entry in weighed:
        each = entry.observation
        parts = (each.gpu, f"job {each.job}" if each.job else "", Path(each.run).name)
        of = f" ({', '.join(part for part in parts if part)})" if any(parts) else ""
        seen_by = f" seen by {each.source}" if each.source else ""
        weight = "all" if each.weight < -1000 else f"{each.weight:+.2f}"
        weights = f"{weight}, now {f'{entry.value:+.2f}' if entry.counts else 'same run'}"
        yield f"  {_age(now - each.at):>4} ago  {each.kind}  {weights}{seen_by}{of}"
        if each.evidence:
            yield f"            {each.evidence}"


def _age(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * arguments.UNITS_S[unit]:
            return f"{seconds / arguments.UNITS_S[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"


def _told_until(until: float | None) -> str:
    if until is None:
        return ""
    try:
        return f"until {datetime.fromtimestamp(until).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # infinite, or further away than any calendar
        return "until it is removed"


def _standing_json(each: Standing) -> Mapping[str, Any]:
    value = asdict(each)
    if each.until is not None and math.isinf(each.until):
        value["until"] = "removed"
    return value


def _weighed_json(entry: Weighed, now: float) -> Mapping[str, Any]:
    return {**entry.observation._asdict(), "now": entry.value, "counts": entry.counts,
            "age_s": max(0.0, now - entry.observation.at)}  # fmt: skip


def _print_json(**facts: Any) -> None:
    say_json({"format": FORMAT, **facts})


# --- ``slurmft sweep`` ---

SWEEP_FORMAT = 1
_EXIT_CODES_OF_SWEEP = """\b
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


@click.command(epilog=_EXIT_CODES_OF_SWEEP)
@click.option("--config", type=arguments.PATH, help="Configuration with the section exclusions.")
@click.option("--file", "file", type=arguments.PATH, help="The exclusion list itself; overrides --config.")
@click.option(
    "--health",
    type=arguments.PATH,
    help="Where results lie and when they count. Default: $SLURMFT_HEALTH_CONFIG, or /etc/slurmft/health.yaml.",
)
@click.option("--drain", is_flag=True, help="Drain sick nodes and resume those that are well; only reasons of our own.")
@click.option("--check-idle", "--test", "visits", type=IdleNodes(), default="0", show_default=True,
              help="Look at idle nodes with short jobs: so many nodes at a time, or a share such as 5%.")  # fmt: skip
@click.option("--partition", default="", help="Partition of those jobs.")
@click.option("--qos", default="", help="QOS of those jobs, such as one that others preempt.")
@click.option("--metrics", type=arguments.PATH, help="File for a textfile collector, replaced each time.")
@click.option("--heartbeat-url-file", type=arguments.PATH,
              help="File with a URL that is asked for when the sweep saw the cluster.")  # fmt: skip
@click.option(
    "--limit", default=300.0, show_default=True, type=arguments.Amount(1, 86_400), help="Seconds it may take."
)
@click.option("--dry-run", is_flag=True, help="Look, say what would be done, and change nothing.")
@arguments.json_option
def sweep(
    *, config: Path | None, file: Path | None, health: Path | None, drain: bool, visits: Visits, partition: str,
    qos: str, metrics: Path | None, heartbeat_url_file: Path | None, limit: float, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Sweep the cluster once, for cron: exclude and drain sick nodes, resume healthy ones, restart lost runs.

    A node is taken out when N of its last M looks agree, no more than a few in an hour, and none for a failure that
    many share. Without --drain, or without permission, the administrator's commands are printed.
    """
    url = url_in(heartbeat_url_file) if heartbeat_url_file is not None else ""

    def work() -> int:
        try:
            opened = _open(file, config)
            settings = load_config(health, os.environ)
            if visits != Visits() and settings.results_folder is None:
                raise UsageError("--check-idle: the jobs leave what they find in results_folder, which is not set",
                                 hint="see --health")  # fmt: skip
            order = SweepOrder(
                exclusions=opened.list, rules=opened.rules, results=settings.results_folder,
                health=settings.verdict.rules(), health_file=_health_file(health), runs=arguments.runs_root(),
                who=who(), may_drain=drain, dry_run=dry_run, visits=visits, partition=partition, qos=qos, limit_s=limit,
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
                write_metrics(metrics, report, may_exclude=opened.may_exclude)
            except OSError as error:
                report.problems.append(f"{metrics} cannot be written: {error.strerror}")
        if url and report.saw_cluster and not dry_run and (problem := send_heartbeat(url)):
            report.problems.append(problem)
        if as_json:
            say_json(as_object(report))
        for line in () if as_json else report_lines(report):
            say(line)
        return report.exit_code

    return bounded(work, limit_s=limit, name="slurmft-sweep", environment=os.environ)


def _health_file(given: Path | None) -> Path | None:
    """The configuration file that jobs that check nodes are given; None: they find it by themselves."""
    named = given or os.environ.get(CONFIG_VARIABLE)
    return Path(named).absolute() if named else None


def report_lines(report: SweepReport) -> Iterator[str]:
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
    found = asdict(replace(report, plan=None))
    for own in ("plan", "took_s"):
        del found[own]
    found |= {"format": SWEEP_FORMAT, "exit_code": report.exit_code, "seconds": round(report.took_s, 3)}
    if report.plan is not None:
        found["cluster_problems"] = [asdict(problem) for problem in report.plan.cluster_problems]
        found["sick"] = [
            {"node": each.node, "check": each.check, "detail": each.detail, "remedy": each.remedy}
            for each in report.plan.assessment.of(Condition.SICK)
        ]
        found["suspects"] = [each.node for each in report.plan.assessment.of(Condition.SUSPECT)]
    return found


# --- ``slurmft doctor`` ---

DOCTOR_FORMAT = 1
_EXIT_CODES_OF_DOCTOR = """\b
Exit codes:
  0   all of it works; notes are facts to know
  1   warnings: it works, worse than it could
  2   problems: something that this run needs does not work; also bad usage
  69  there is no Slurm on this machine
  75  Slurm did not answer
"""


@click.command(epilog=_EXIT_CODES_OF_DOCTOR)
@click.argument("config", type=arguments.PATH, required=False)
@arguments.json_option
def doctor(*, config: Path | None, as_json: bool) -> int:
    """Say what will and will not work on this cluster, and what to do about it.

    For the run of CONFIG, or for any. Asks Slurm a few questions, tries locks and replacing in the run folder's
    filesystem, looks at the room there, and at what an administrator has set up: hooks, health.yaml, results of nodes,
    and who may change what root relies on. Changes nothing.
    """
    settings = arguments.own_configuration(config) if config is not None else None
    found = diagnose(settings, os.environ, here=Path.cwd())
    if as_json:
        facts = [asdict(finding) for finding in found.findings]
        say_json({"format": DOCTOR_FORMAT, "exit_code": found.exit_code, "findings": facts})
    else:
        for line in as_lines(found.findings):
            say(line)
    return found.exit_code


# --- ``slurmft drill`` ---

_WORDS = {True: ("pass", "green"), False: ("FAIL", "red"), None: ("-", "")}
_EXIT_CODES_OF_DRILL = """\b
Exit codes:
  0   all of it worked
  1   something failed; the table says what. Or Slurm refused
  2   bad configuration or usage; nothing was submitted
  75  the job did not train in time, or Slurm did not answer
"""


@click.command(epilog=_EXIT_CODES_OF_DRILL)
@arguments.config_argument
@arguments.set_option("Override one key, such as slurm.qos=low.")
@click.option("--preempt-with", default="", metavar="PARTITION",
              help="Preempt it for real, with a job of a second in this partition on the same nodes.")  # fmt: skip
@click.option("--limit", default=300.0, show_default=True, type=arguments.Amount(10, 7200), help="Seconds it may take.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted and sent, and do nothing.")
@arguments.json_option
def drill(
    *, config: Path, overrides: tuple[str, ...], preempt_with: str, limit: float, dry_run: bool, as_json: bool
) -> int:
    """Try a preemption: a small job with your own options gets the real signal, and a table shows the results.

    At most 2 nodes with 2 ranks, for a few minutes; its jobs and its folder beside your run folder are removed. Without
    --preempt-with its steps get SIGTERM, as at the beginning of a grace. With it the other job asks for whole nodes:
    jobs that share them may be preempted, too.
    """
    if not slurm.available():
        raise UsageError("there is no Slurm on this machine", hint="slurmft doctor")
    user = arguments.own_configuration(config, overrides)
    made = prepared(user, os.environ, preempt_with=preempt_with, limit_s=limit)
    if dry_run:
        then = preempt_argv("NODES", preempt_with) if preempt_with else signal_argv("JOB")
        say_block(f"# {made.folder / 'drill.yaml'}\n{made.settings.as_yaml()}")
        say_block(f"{shlex.join(made.submission)}\n{shlex.join(then)}\nscancel JOB; rm -r {made.folder}")
        return 0
    rows = carry_out(made, lambda text: say(text, err=True))
    code = 0 if passed(rows) else 1
    if as_json:
        say_json({"format": DOCTOR_FORMAT, "exit_code": code, "rows": [asdict(row) for row in rows]})
        return code
    shown = table("", "", "what happened", wrapped=("", "what happened"))
    for row in rows:
        word, colour = _WORDS[row.passed]
        shown.add_row(row.what, Text(word, style=colour), Text(one_line(row.text)))
    console().print(shown)
    return code
