"""A report's numbers: of one run, of two side by side, and of a fleet of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmft.policy.timing.checkpoint_interval import FailureHistory, Plan, mtbf_s, plan
from slurmft.policy.timing.failure_rate import Mtbf, mtbf_of
from slurmft.reporting.times import ALIASES, WITHOUT_NODES, Account, Category, Loss

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

    @property
    def mtbf(self) -> Mtbf | None:
        """Of the run as a whole, of the time in which its workers lived."""
        return mtbf_of(self.account.failures, self.account.exposed_s)

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


def _losses(table: Mapping[str, Loss]) -> dict[str, dict[str, float]]:
    ordered = sorted(table.items(), key=lambda each: -each[1].rank_s)
    return {name: {"ends": loss.ends, "seconds": round(loss.seconds, 3), "rank_s": round(loss.rank_s, 3)}
            for name, loss in ordered}  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
