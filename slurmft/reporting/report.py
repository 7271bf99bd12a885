"""A run's report: its account, its numbers, its timeline, and the page that shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from slurmft.config.base import parsed
from slurmft.errors import SlurmftError, StorageError, UsageError
from slurmft.operations.control import reading_journal
from slurmft.policy.checkpoints import FailureHistory, Mtbf, Plan, duration, mtbf_of, mtbf_s, plan
from slurmft.reporting.accounting import (
    ALIASES,
    FAILURES,
    MEANING,
    WANTED,
    WITHOUT_NODES,
    Account,
    Accounting,
    Category,
    Interval,
    Loss,
    Mark,
)
from slurmft.storage import history
from slurmft.storage.run_folder import RunFolder, progress_of
from slurmft.system.files import read_text
from slurmft.system.foreign_text import one_line

# --- A report's numbers: of one run, of two side by side, and of a fleet of runs ---

MAX_ROWS = 200
"""Attempts that a page lists; a table of thousands is no picture any more."""

LEMON_ENDS = 2
"""A node that so many ends of attempts are blamed on, over all runs, is named as a lemon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run's account with the values that follow from it."""

    name: str
    account: Account
    unreadable: int = 0
    """Lines of the journal that are not events."""

    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """Step and value of each number that the trainer has reported."""

    settings: Sequence[tuple[str, str]] = ()
    """The head of the configuration."""

    @property
    def mtbf(self) -> Mtbf | None:
        """Of the run as a whole, of the time in which its workers lived."""
        return mtbf_of(self.account.failures, self.account.exposed_s)

    @property
    def sentence(self) -> str:
        """What has happened, in one sentence."""
        account, of = self.account, self.account.inference
        if of is None:
            did = f"came to step {account.step}"
        else:
            did = "served" if of.is_endpoint else f"answered {of.answered} of {of.total} requests"
        last = account.rows[-1].cause if account.rows else ""
        state = "goes on" if account.is_open else f"ended: {last}" if last and last != "finished" else "has finished"
        failures = sorted(
            ((loss.seconds, name, loss.ends) for name, loss in account.by_cause.items() if name in FAILURES),
            reverse=True,
        )
        named = ", ".join(f"{ends} x {name}" for _, name, ends in failures[:4])
        cost_s = sum(seconds for seconds, _, _ in failures)
        undone = f"failures ({named}) cost {span(cost_s)}" if failures else "nothing failed"
        return f"In {span(account.wall_s)} the run {did} and {state}; {undone}; {percent(account.ettr)} was new work."

    def row_of(self, category: Category) -> tuple[str, float, float, float | None]:
        """Name, seconds, share of all time, and rank-seconds; None where the run holds no nodes meanwhile."""
        account = self.account
        seconds, rank_s = account.seconds[category], account.rank_s[category]
        return (str(category), seconds, seconds / (account.wall_s or 1.0),
                None if category in WITHOUT_NODES else rank_s)  # fmt: skip

    @property
    def lost_rank_s(self) -> float:
        """Rank-seconds that were not new work."""
        return sum(seconds for category, seconds in self.account.rank_s.items() if category is not Category.TRAINING)

    @property
    def save_cost_s(self) -> float | None:
        """Mean stall of a save; None where none was measured."""
        account = self.account
        return account.seconds[Category.SAVES] / account.saves if account.saves else None

    @property
    def save_every_s(self) -> float | None:
        """Seconds of work between two saves, as they were."""
        account = self.account
        worked_s = account.seconds[Category.TRAINING] + account.seconds[Category.REDONE]
        return worked_s / account.saves if account.saves else None

    @property
    def best_interval(self) -> Plan | None:
        """The interval that would have cost the least, with the failures that were seen; None without saves."""
        account, cost_s = self.account, self.save_cost_s
        if cost_s is None or account.exposed_s <= 0:
            return None
        nodes = max(1, account.nodes)
        history = FailureHistory(failures=account.failures, node_s=account.exposed_s * nodes)
        seen_s = account.exposed_s / account.failures if account.failures else mtbf_s(history, nodes)
        return plan(cost_s, seen_s)

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format only grows. Times in seconds, moments as Unix times."""
        account, found = self.account, self.mtbf
        best = self.best_interval
        return {
            "format": 1,
            "run": self.name,
            "begin": round(account.begin_s, 3),
            "end": round(account.end_s, 3),
            "goes_on": account.is_open,
            "wall_s": round(account.wall_s, 3),
            "ettr": _rounded(account.ettr),
            "goodput": _rounded(account.goodput),
            "seconds": {str(each): round(account.seconds[each], 3) for each in Category},
            "rank_seconds": {str(each): round(account.rank_s[each], 3) for each in Category
                             if each not in WITHOUT_NODES},
            "lost_rank_s": round(self.lost_rank_s, 3),
            "attempts": account.attempts, "jobs": account.jobs, "failures": account.failures,
            "step": account.step, "saves": account.saves, "world_size": account.world_size, "nodes": account.nodes,
            "mtbf": None if found is None else {key: _rounded(value) for key, value in asdict(found).items()},
            "by_cause": _losses(account.by_cause),
            "by_node": _losses(account.by_node),
            "checkpoint_interval": {
                "was_s": _rounded(self.save_every_s), "save_cost_s": _rounded(self.save_cost_s),
                "best_s": None if best is None else round(best.interval_s, 3),
                "limited_by": "" if best is None else best.limited_by,
            },
            "ends": [
                {"attempt": end.attempt, "at": round(end.at_s, 3), "cause": end.cause, "reason": end.reason,
                 "is_failure": end.is_failure, "nodes": list(end.nodes), "cost_s": round(end.cost_s, 3),
                 "rank_s": round(end.rank_s, 3),
                 "seconds": {str(key): round(value, 3) for key, value in end.seconds.items()}}
                for end in account.ends
            ],
            "inference": None if account.inference is None else asdict(account.inference),
            "unreadable_lines": self.unreadable,
            "ml_goodput": ml_goodput(account),
        }  # fmt: skip


def ml_goodput(account: Account) -> dict[str, Any]:
    """The same seconds under the names of ``GoodputType`` and ``BadputType`` of Google's ml-goodput-measurement."""
    badput = dict.fromkeys(ALIASES.values(), 0.0)
    for category, name in ALIASES.items():
        badput[name] += account.seconds[category]
    return {"GoodputType": {"TOTAL": round(account.seconds[Category.TRAINING], 3)},
            "BadputType": {name: round(seconds, 3) for name, seconds in badput.items()}}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Many runs side by side."""

    reports: Sequence[Report]
    problems: Sequence[tuple[str, str]] = ()
    """Runs that could not be read, and why."""

    def nodes(self) -> list[tuple[str, Loss, int]]:
        """Nodes with what they are blamed for and in how many runs, the most expensive first."""
        return _merged([report.account.by_node for report in self.reports])

    def causes(self) -> list[tuple[str, Loss, int]]:
        """The same for causes of ends."""
        return _merged([report.account.by_cause for report in self.reports])

    def lemons(self) -> list[tuple[str, Loss, int]]:
        """Nodes that LEMON_ENDS or more ends are blamed on."""
        return [each for each in self.nodes() if each[1].ends >= LEMON_ENDS]

    def share(self, name: str) -> float | None:
        """``ettr`` or ``goodput`` of all runs, each second of each run counting alike."""
        whole = part = 0.0
        for report in self.reports:
            account = report.account
            idle = (Category.IDLE,) if name == "ettr" else tuple(WITHOUT_NODES)
            whole += account.wall_s - sum(account.seconds[each] for each in idle)
            part += account.productive_s
        return part / whole if whole > 0 else None

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format only grows."""
        return {
            "format": 1,
            "ettr": _rounded(self.share("ettr")),
            "goodput": _rounded(self.share("goodput")),
            "lost_rank_s": round(sum(report.lost_rank_s for report in self.reports), 3),
            "lemons": [node for node, *_ in self.lemons()],
            "by_node": _losses({name: loss for name, loss, _ in self.nodes()}),
            "by_cause": _losses({name: loss for name, loss, _ in self.causes()}),
            "runs": [report.as_json() for report in self.reports],
            "unreadable": dict(self.problems),
        }


def _merged(tables: Sequence[Mapping[str, Loss]]) -> list[tuple[str, Loss, int]]:
    sums: dict[str, tuple[Loss, int]] = {}
    for table in tables:
        for name, loss in table.items():
            old, runs = sums.get(name, (Loss(), 0))
            total = Loss(old.ends + loss.ends, old.seconds + loss.seconds, old.rank_s + loss.rank_s)
            sums[name] = total, runs + 1
    return sorted(((name, loss, runs) for name, (loss, runs) in sums.items()), key=lambda each: -each[1].rank_s)


def dearest(table: Mapping[str, Loss]) -> list[tuple[str, Loss]]:
    """Causes or nodes, those that have cost the most first."""
    return sorted(table.items(), key=lambda each: -each[1].rank_s)


def _losses(table: Mapping[str, Loss]) -> dict[str, dict[str, float]]:
    return {name: {"ends": loss.ends, "seconds": round(loss.seconds, 3), "rank_s": round(loss.rank_s, 3)}
            for name, loss in dearest(table)}  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# --- The account of a run, from its folder: one pass over the journal, which is never in memory as a whole ---


def report_of(run: RunFolder, *, now_s: float, since_s: float = 0.0, is_one_of_many: bool = False) -> Report:
    """What the journal of ``run`` shows of the time from ``since_s`` to ``now_s``, both Unix times.

    Of one of many, neither its configuration nor the numbers that it has reported are read.

    Raises:
        StorageError: there is no journal, it cannot be read, holds no event, or a newer slurmft wrote it.
    """
    journal, accounting, unreadable = run.journal(), Accounting(since_s), 0
    with reading_journal(run):
        for event in journal.each(WANTED):
            if event is None:
                unreadable += 1
            else:
                accounting.note(event)
    if not accounting.account.events:
        damage = f": none of its {unreadable} lines can be read" if unreadable else " is empty"
        raise StorageError(f"{journal.path}{damage}", hint=f"see also {run.logs}")
    account = accounting.finish(now_s=now_s, seen=asdict(progress_of(run)))
    if is_one_of_many:
        return Report(name=run.name, account=account, unreadable=unreadable)
    curves = history.curves(run.path / history.METRICS_FILE)
    return Report(name=run.name, account=account, unreadable=unreadable, settings=_head_of(run), curves=curves)


_HEAD = ("command", "nodes", "spare_nodes", "nproc_per_node", "launcher", "slurm.partition", "slurm.time",
         "slurm.gpus_per_node", "checkpoint.interval_steps", "checkpoint.peer_copies",
         "inference.replicas_per_node")  # fmt: skip


def _head_of(run: RunFolder) -> list[tuple[str, str]]:
    """What the run's configuration sets of the keys that tell runs from each other; empty where it cannot be read."""
    found = []
    try:
        settings = parsed(read_text(run.config), of=str(run.config))
    except (OSError, ValueError, SlurmftError):
        return []
    for key in _HEAD:
        value: Any = settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found.append((key, " ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return found


# --- A run's time as a strip of coloured pieces, as many as can be seen, however many intervals there are ---

COLUMNS = 1000
"""Columns of a picture; what is narrower than one could not be seen."""

DENSE = 400
"""With more intervals than this, one colour a column would hide all that is short: columns are stacked instead."""

WIDE = 8
"""Columns of a stack."""

HEIGHT = 46


class Piece(NamedTuple):
    """A rectangle of one category, in columns and in units of HEIGHT."""

    x: int
    y: float
    width: int
    height: float
    category: Category


class Tick(NamedTuple):
    """Marks of one kind that fall into the same column."""

    x: int
    kind: str
    text: str
    number: int


def is_dense(account: Account) -> bool:
    """Whether the strip shows shares of each stretch of time, instead of what happened one after the other."""
    return len(account.intervals) > DENSE


def pieces_of(account: Account) -> list[Piece]:
    """The strip, from the beginning of what is kept to the end."""
    width = WIDE if is_dense(account) else 1
    found = list[Piece]()
    for column, shares in enumerate(_shares_of_columns(account, COLUMNS // width)):
        if width == 1:
            category = max(shares, key=lambda each: shares[each])
            if found and found[-1].category is category:
                found[-1] = found[-1]._replace(width=found[-1].width + 1)
            else:
                found.append(Piece(column, 0, 1, HEIGHT, category))
            continue
        y, whole = float(HEIGHT), sum(shares.values())
        for category in Category:
            if (height := round(HEIGHT * shares.get(category, 0.0) / whole, 1)) > 0:
                y = round(max(0.0, y - height), 1)
                found.append(Piece(column * width, y, width, height, category))
    return found


def _shares_of_columns(account: Account, columns: int) -> Iterator[dict[Category, float]]:
    """For each column, the seconds of its categories."""
    begin_s, intervals, at = _begin(account), list(account.intervals), 0
    column_s = (account.end_s - begin_s) / columns
    for column in range(columns if column_s > 0 else 0):
        low_s, high_s = begin_s + column * column_s, begin_s + (column + 1) * column_s
        while at < len(intervals) - 1 and intervals[at].end_s <= low_s:
            at += 1
        yield _within(intervals, at, low_s, high_s)


def _within(intervals: Sequence[Interval], at: int, low_s: float, high_s: float) -> dict[Category, float]:
    shares: dict[Category, float] = {}
    while at < len(intervals) and intervals[at].begin_s < high_s:
        begin_s, end_s, category = intervals[at]
        shares[category] = shares.get(category, 0.0) + max(0.0, min(end_s, high_s) - max(begin_s, low_s))
        at += 1
    return shares if sum(shares.values()) > 0 else {Category.UNKNOWN: 1.0}


def ticks_of(account: Account) -> list[Tick]:
    """Faults, saves and stops above the strip; those of one column are one tick with their number."""
    begin_s = _begin(account)
    span_s = account.end_s - begin_s
    if span_s <= 0:
        return []
    found: dict[tuple[int, str], Tick] = {}
    width = WIDE if is_dense(account) else 1
    for mark in account.marks:
        if begin_s <= mark.at_s <= account.end_s:
            column = min(COLUMNS - 1, int((mark.at_s - begin_s) / span_s * COLUMNS))
            _count(found, column // width * width, mark)
    return sorted(found.values())


def _count(found: dict[tuple[int, str], Tick], column: int, mark: Mark) -> None:
    old = found.get((column, mark.kind))
    tick = Tick(column, mark.kind, mark.text[:80], 1)
    found[column, mark.kind] = tick if old is None else old._replace(number=old.number + 1)


def _begin(account: Account) -> float:
    """Where the strip begins: intervals older than those that are kept are in the sums alone."""
    return account.intervals[0].begin_s if account.intervals else account.begin_s


# --- A report as one HTML file without scripts, fonts or addresses: it opens from a mail, offline, years later ---
# Everything that comes from a run is escaped by Jinja2, and the page forbids itself to load or to run anything.

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
            hint="pip install jinja2; the table and --json do without",
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
        "is_dense": is_dense(account), "curves": curves_of(report), "height": CURVE_HEIGHT,
        "shares": [report.row_of(each) for each in Category if account.seconds[each] > 0],
        "rows": list(account.rows)[-MAX_ROWS:][::-1],
        "causes": dearest(account.by_cause)[:30], "nodes": dearest(account.by_node)[:30],
        "strip_begin": _begin(account),
    }  # fmt: skip


CURVES = 4
CURVE_HEIGHT = 120


def curves_of(report: Report) -> list[dict[str, Any]]:
    """The first of the reported numbers as lines of a picture: points in columns and in units of CURVE_HEIGHT."""
    drawn = list[dict[str, Any]]()
    for name, points in report.curves.items():
        steps, values = [step for step, _ in points], [value for _, value in points]
        if len(points) < 2 or len(drawn) == CURVES:
            continue
        low, high = min(values), max(values)
        x, y = COLUMNS / max(1, steps[-1] - steps[0]), CURVE_HEIGHT / (high - low or 1.0)
        path = " ".join(f"{(step - steps[0]) * x:.1f},{(high - value) * y:.1f}" for step, value in points)
        drawn.append({"name": name, "path": path, "low": low, "high": high, "newest": values[-1],
                      "first": steps[0], "last": steps[-1]})  # fmt: skip
    return drawn


def span(seconds: float | None) -> str:
    """A duration in readable units, or a dash."""
    return "-" if seconds is None else duration(seconds)


def percent(share: float | None) -> str:
    """Per cent with one decimal, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def hours(rank_s: float | None) -> str:
    """Rank-hours in three digits, or a dash."""
    if rank_s is None:
        return "-"
    if 0 < rank_s < 36:
        return "<0.01"
    return f"{rank_s / 3600:.3g}" if rank_s < 3.6e6 else f"{rank_s / 3600:,.0f}"


def moment(at_s: float) -> str:
    """UTC, to the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S") if at_s > 0 else "-"
