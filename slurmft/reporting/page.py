"""A report as one HTML file without scripts, fonts or addresses: it opens from a mail, offline, years later.

Everything that comes from a run is escaped by Jinja2, and the page forbids itself to load or to run anything.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from slurmft.errors import UsageError
from slurmft.policy.timing.checkpoint_interval import duration
from slurmft.reporting.summary import MAX_ROWS, Fleet, Report
from slurmft.reporting.timeline import COLUMNS, is_dense, pieces_of, ticks_of
from slurmft.reporting.times import MEANING, WITHOUT_NODES, Account, Category
from slurmft.system.foreign_text import one_line

MAX_FLEET_ROWS = 500


def page_of(reports: list[Report], problems: list[tuple[str, str]], *, now_s: float, is_fleet: bool) -> str:
    """The file's content: of one run, of two side by side, or of a fleet.

    Raises:
        UsageError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise UsageError(
            "slurmft report --html needs Jinja2, which is not installed",
            hint="pip install 'slurmft[report]'; the table and --json do without",
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("slurmft.reporting"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(span=span, percent=percent, hours=hours, moment=moment, safe_text=one_line)
    fleet = Fleet(reports=reports, problems=problems)
    return environment.get_template("report.html.j2").render(
        title="A fleet of runs" if is_fleet else " and ".join(report.name for report in reports),
        reports=[] if is_fleet else [_facts(report) for report in reports],
        fleet=fleet if is_fleet else None, max_fleet_rows=MAX_FLEET_ROWS, problems=problems, now=now_s,
        meaning={str(category): text for category, text in MEANING.items()},
        categories=[str(category) for category in Category], columns=COLUMNS,
    )  # fmt: skip


def _facts(report: Report) -> dict[str, Any]:
    account = report.account
    return {
        "report": report, "account": account, "pieces": pieces_of(account), "ticks": ticks_of(account),
        "is_dense": is_dense(account),
        "shares": _shares(account), "rows": list(account.rows)[-MAX_ROWS:][::-1],
        "causes": sorted(account.by_cause.items(), key=lambda each: -each[1].rank_s)[:30],
        "nodes": sorted(account.by_node.items(), key=lambda each: -each[1].rank_s)[:30],
        "strip_begin": account.intervals[0].begin_s if account.intervals else account.begin_s,
    }  # fmt: skip


def _shares(account: Account) -> list[tuple[str, float, float, float | None]]:
    """Category, seconds, share, rank-seconds; without categories in which no time went."""
    rows = []
    for category in Category:
        seconds = account.seconds[category]
        if seconds > 0:
            ranks = None if category in WITHOUT_NODES else account.rank_s[category]
            rows.append((str(category), seconds, seconds / (account.wall_s or 1.0), ranks))
    return rows


def span(seconds: float | None) -> str:
    """A duration in readable units, or a dash."""
    return "-" if seconds is None else duration(seconds)


def percent(share: float | None) -> str:
    """Per cent with one decimal, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def hours(rank_s: float | None) -> str:
    """Rank-hours in three digits, or a dash."""
    return "-" if rank_s is None else f"{rank_s / 3600:.3g}" if rank_s < 3.6e6 else f"{rank_s / 3600:,.0f}"


def moment(at_s: float) -> str:
    """UTC, to the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S") if at_s > 0 else "-"
