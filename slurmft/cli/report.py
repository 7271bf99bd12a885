"""Where a run's time went, and where it would go: ``slurmft report``, ``plan`` and ``advise``."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from slurmft.cli import arguments
from slurmft.cli.main import console, counted, say, say_error, say_json
from slurmft.errors import StorageError, UsageError
from slurmft.reporting.accounting import MEANING, Category
from slurmft.reporting.report import Fleet, Report, dearest, hours, page_of, percent, report_of, span
from slurmft.storage.run_folder import RunFolder, with_roles
from slurmft.system.files import mode_of_shown_files, replace_atomically
from slurmft.system.foreign_text import one_line

if TYPE_CHECKING:
    from slurmft.planning.simulation import Estimate, Projection

# --- ``slurmft report``: where a run's time went, and what failures have cost ---


class _Age(click.ParamType[float]):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if (seconds := arguments.seconds_in(str(value))) is None:
            self.fail(f"{str(value)[:40]!r} is no age such as 12h, 30d or 2w.", param, ctx)
        return seconds


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=arguments.RunType())
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained page to FILE.",
              metavar="FILE")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--compare", type=arguments.RunType(), metavar="OTHER", help="Show this run beside RUN.")
@click.option("--since", type=_Age(), metavar="AGE", help="Count only the newest part: 12h, 30d, 2w.")
def report(
    *, runs: tuple[RunFolder, ...], html: Path | None, as_json: bool, compare: RunFolder | None, since: float | None
) -> int:
    """Show where the time of a run went, and what its failures have cost: from the journal alone.

    Every second is in one category: new work, saves, work done again, queue, launch, import, setup, load, detection,
    evidence, restart, shutdown, idle. ETTR is new work by all time, goodput by the time with nodes. Several runs, the
    roles of one, or none (all below SLURMFT_RUNS), are shown as a fleet, with the nodes that most ends are blamed on.
    """
    if compare is not None and len(runs) != 1:
        raise UsageError("--compare needs exactly one RUN", hint="slurmft report RUN --compare OTHER")
    if html is not None and (str(html) == "-" or not html.parent.is_dir()):
        raise UsageError(f"--html {html}: no file can be there", hint="name a file in a folder that exists")
    # a run with roles trains nothing itself
    chosen = with_roles([*runs, *([compare] if compare else [])] or arguments.every_run(), alone=True)
    if compare is not None and len(chosen) > 2:
        raise UsageError("--compare: a run with roles has a line for each of them", hint="name a role: RUN/roles/ROLE")
    if not chosen:
        raise UsageError(f"there are no runs in {arguments.runs_root()}", hint="SLURMFT_RUNS names another folder")
    now_s = time.time()
    is_fleet = not runs or len(chosen) > 1 + (compare is not None)
    found, problems = _read(chosen, now_s=now_s, since_s=now_s - since if since else 0.0, is_fleet=is_fleet)
    fleet = Fleet(reports=found, problems=problems)
    if html is not None:
        page = page_of(found, problems, now_s=now_s, is_fleet=is_fleet)
        replace_atomically(html, page, mode=mode_of_shown_files(), durable=False)
        if not as_json:
            say(f"written: {html}")
    if as_json:
        say_json(fleet.as_json() if is_fleet or compare else found[0].as_json())
    elif html is None:
        _show(found, fleet if is_fleet else None)
    for name, why in problems:
        say_error(f"{name}: {why}")
    for each in found:
        if each.unreadable:
            say_error(f"{each.name}: {each.unreadable} lines of the journal cannot be read and are left out")
    return 0


def _read(
    runs: list[RunFolder], *, now_s: float, since_s: float, is_fleet: bool
) -> tuple[list[Report], list[tuple[str, str]]]:
    """One damaged run does not hide the others of a fleet.

    Raises:
        StorageError: a run that is not one of many cannot be read.
    """
    found, problems = list[Report](), list[tuple[str, str]]()
    for run in runs:
        try:
            found.append(report_of(run, now_s=_end_of(run, now_s), since_s=since_s, is_one_of_many=is_fleet))
        except (StorageError, OSError) as error:
            if not is_fleet:
                raise
            problems.append((run.name, getattr(error, "what", "") or str(error)))
    return found, problems


def _end_of(run: RunFolder, now_s: float) -> float:
    """A role whose run is complete does not go on, whatever its own journal says."""
    if run.path.parent.name == "roles":
        with contextlib.suppress(OSError):
            return min(now_s, (run.path.parents[1] / "done.json").stat().st_mtime)
    return now_s


def _show(reports: list[Report], fleet: Fleet | None) -> None:
    shown = console()
    if fleet is not None:
        shown.print(_table_of_runs(fleet))
        if lemons := fleet.lemons():
            say("")
            say("lemon nodes", bold=True)
            for node, loss, runs in lemons[:20]:
                blamed = f"{counted(loss.ends, 'end')} in {counted(runs, 'run')}"
                say(f"  {node}: blamed for {blamed}, {hours(loss.rank_s)} rank-hours")
        return
    shown.print(_table_of_times(reports))
    for each in reports:
        for line in _words(each):
            say(line)


def _table_of_runs(fleet: Fleet) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("run", "ETTR", "goodput", "wall", "attempts", "failures", "lost rank-hours"):
        table.add_column(title, justify="left" if title == "run" else "right", overflow="fold")
    for each in fleet.reports:
        account = each.account
        table.add_row(
            Text(one_line(each.name)), percent(account.ettr), percent(account.goodput), span(account.wall_s),
            str(account.attempts), str(account.failures), hours(each.lost_rank_s),
        )  # fmt: skip
    return table


def _table_of_times(reports: list[Report]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for each in reports:
        table.add_column(Text(one_line(each.name)), justify="right")
        table.add_column("", justify="right")
        table.add_column("rank-hours", justify="right")
    table.add_column("")
    for category in Category:
        if any(each.account.seconds[category] > 0 for each in reports):
            rows = [each.row_of(category) for each in reports]
            cells = [cell for _, s, share, rank_s in rows for cell in (span(s), percent(share), hours(rank_s))]
            table.add_row(str(category), *cells, Text(MEANING[category] if len(reports) == 1 else "", style="dim"))
    for title, name in (("ETTR", "ettr"), ("goodput", "goodput")):
        cells = [cell for each in reports for cell in ("", percent(getattr(each.account, name)), "")]
        table.add_row(Text(title, style="bold"), *cells, "")
    return table


def _words(report: Report) -> list[str]:
    account, found, best = report.account, report.mtbf, report.best_interval
    counts = f"{counted(account.attempts, 'attempt')}, {counted(account.failures, 'failure')}, step {account.step}"
    lines = ["", report.sentence, f"{report.name}: {counts}, {hours(report.lost_rank_s)} rank-hours lost"]
    if found is not None:
        if found.mean_s is None:
            lines.append(f"  time between failures: more than {span(found.low_s)} (95 % sure), none was seen")
        else:
            limits = f"{span(found.low_s)} to {span(found.high_s)}"
            lines.append(f"  time between failures: {span(found.mean_s)} (95 % sure: {limits})")
    for title, table in (("cause", account.by_cause), ("node", account.by_node)):
        for name, loss in dearest(table)[:5]:
            rank_hours = hours(loss.rank_s)
            lines.append(
                f"  {title} {name}: {counted(loss.ends, 'end')}, {span(loss.seconds)}, {rank_hours} rank-hours"
            )
    if best is not None:
        limit = f" ({best.limited_by})" if best.limited_by else ""
        lines.append(f"  checkpoints: one every {span(report.save_every_s)} of work, at {span(report.save_cost_s)} "
                     f"each; the best interval would have been {span(best.interval_s)}{limit}")  # fmt: skip
    if (of := account.inference) is not None:
        done = "an endpoint" if of.is_endpoint else f"{of.answered} of {of.total} requests, {of.errors} errors"
        lines.append(f"  inference: {done}; {of.deaths} replica deaths, {span(of.down_s)} of a replica's time")
    return lines


# --- ``slurmft plan`` ---

FORMAT = 1
_COLUMNS = ("days", "failures", "restarts", "requeues", "given_up", "excluded")


@click.command()
@arguments.config_argument
@click.option("--site", type=arguments.PATH,
              help="The cluster and its failures (configs/plan.yaml); default: a typical one.")  # fmt: skip
@arguments.set_option("Override one key of the run or of the site, for all alternatives.")
@click.option("--vary", "varied", multiple=True, metavar="KEY=A,B,...",
              help="Compare these values of one key of the run or of the site; several: all combinations.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(2, 1000), help="Simulated lives of each alternative.")
@click.option("--svg", type=arguments.PATH, help="Write a picture of where the time goes.")
@arguments.json_option
def plan(
    *, config: Path, site: Path | None, overrides: tuple[str, ...], varied: tuple[str, ...], seeds: int | None,
    svg: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Simulate the life of CONFIG on a described cluster, with the policy that decides in a real run.

    Says which share of the time would be useful training (ETTR, with the queue) and where the rest goes, for the run as
    configured and for alternatives: other intervals, spares, budgets, or a cluster that repairs faster. Nothing is
    submitted.
    """
    try:
        from slurmft.planning.plan import alternatives, simulated
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed here", hint="pip install simpy") from error
    found = alternatives(config, site, overrides=overrides, varied=varied, seeds=seeds)
    outcomes = list(simulated(found, lambda text: say(one_line(text), err=True)))
    if svg is not None:
        from slurmft.planning.plan import svg as drawn

        try:
            replace_atomically(svg, drawn(outcomes), mode=0o644)
        except OSError as error:
            raise StorageError(f"cannot write {svg}: {error.strerror or error}") from error
    if as_json:
        say_json({"format": FORMAT, "alternatives": [_facts(each) for each in outcomes]})
        return 0
    width = max(11, *(len(one_line(each.name)) for each in outcomes))
    say(f"{'alternative':<{width}}  {'ETTR':>15}  {'without queue':>15}  {'days':>7}  {'failures':>8}  "
        f"{'restarts':>8}  {'requeues':>8}  {'given up':>8}  {'excluded':>8}")  # fmt: skip
    for each in outcomes:
        numbers = "  ".join(f"{getattr(each, name).mean:>{7 if name == 'days' else 8}.1f}" for name in _COLUMNS)
        say(f"{one_line(each.name):<{width}}  {each.ettr!s:>15}  {each.goodput!s:>15}  {numbers}")
    say("")
    say(f"{'share of time':<{width}}  " + "  ".join(f"{name:>9}" for name in _shares(outcomes[0])))
    for each in outcomes:
        say(f"{one_line(each.name):<{width}}  " + "  ".join(f"{share:>9.2%}" for share in _shares(each).values()))
    for each in outcomes:
        for role, cost in each.of_roles.items():
            say(f"{one_line(each.name)}: failures of {role} cost {cost.mean:.1f} +- {cost.half_width:.1f} hours")
    for each in outcomes:
        if each.finished < len(each.lives):
            say(f"{one_line(each.name)}: {len(each.lives) - each.finished} of {len(each.lives)} lives did not finish "
                "within 20 times their work")  # fmt: skip
    return 0


def _shares(outcome: Projection) -> dict[str, float]:
    from slurmft.planning.simulation import shares

    return shares(outcome)


def _facts(outcome: Projection) -> dict[str, object]:
    return {
        "name": outcome.name,
        "lives": len(outcome.lives),
        "finished": outcome.finished,
        "first_order_ettr": outcome.formula,
        "shares": _shares(outcome),
        "hours_of_roles": {role: _both(cost) for role, cost in outcome.of_roles.items()},
        **{name: _both(getattr(outcome, name)) for name in ("ettr", "goodput", *_COLUMNS)},
    }


def _both(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.mean, "half_width": estimate.half_width}


# --- The verb ``advise`` ---

WIDTH = 110
NAME_WIDTH = 13


@click.command()
@arguments.config_argument
@arguments.set_option("Override one key of the configuration.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def advise(*, config: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Recommend the signal lead and the checkpoint interval of CONFIG, from what was measured.

    How long steps and saves took and how often the run failed comes from its own folder, or where that has no record
    yet, from runs of the same workload beside it. Slurm is asked for its grace where there is one; nothing is changed.
    """
    from slurmft.operations.site import counsel

    found = counsel(arguments.own_configuration(config, overrides), os.environ)
    if as_json:
        say_json(found.as_json())
        return 0
    for name, text in found.lines():
        first, *rest = textwrap.wrap(one_line(text), WIDTH - NAME_WIDTH) or [""]
        say(f"{name:<{NAME_WIDTH}}{first}")
        for line in rest:
            say(f"{'':<{NAME_WIDTH}}{line}")
    return 0
