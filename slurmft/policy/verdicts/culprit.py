"""The culprits and victims of an attempt's end: the activity of all ranks at one moment, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slurmft.policy.timing.stop import END, step_of
from slurmft.policy.verdicts.symptoms import cause_of_text
from slurmft.policy.verdicts.verdict import Cause
from slurmft.policy.verdicts.whereabouts import Where

MAX_NAMED = 64
"""More culprits than this are no finding: the reason lies outside of the ranks."""

_SIGABRT, _SIGTERM = 6, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One rank at the moment of the look."""

    rank: int
    node: str
    where: Where
    doing: str = ""
    """In a few words."""

    attached: bool = False
    """It uses a session, so that ``step`` and ``tick`` mean something."""

    step: int = 0
    tick: int = 0
    """The safe point it has reached (``policy.timing.stop``)."""

    frames: tuple[str, ...] = ()
    """Its main thread's innermost calls, innermost first."""

    sections: tuple[str, ...] = ()
    """Open sections, outermost first."""

    exit_code: int | None = None
    """Of one that is dead: as of subprocess, negative for a signal."""

    killed: bool = False
    """Dead because we killed it."""

    error: str = ""
    """Last line of a dead rank's traceback or log."""

    recorded: bool = False
    """Its flight recorder has been written: by the watchdog, where it has ended by SIGABRT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A rank, and the evidence against it."""

    rank: int
    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The culprits. None, with the reason why, when the look does not show them."""

    culprits: tuple[Named, ...] = ()
    victims: tuple[int, ...] = ()
    undecided: str = ""


def blame(
    ranks: Sequence[Summary], *, lost: Mapping[int, str] | None = None, overdue: Mapping[int, str] | None = None,
    absent: Mapping[int, str] | None = None,
) -> Blame:  # fmt: skip
    """Separate the culprits from the victims.

    Args:
        ranks: those that could be looked at; dead ones in the order in which they ended.
        lost: ranks that could not, with their nodes.
        overdue: ranks whose section is open for too long, with the text of that report.
        absent: ranks that have not entered a collective in which others wait, with the text of that finding.

    A rank that waits for the others at the newest step is never named while another rank is behind it.
    """
    lost, overdue, absent = lost or {}, overdue or {}, absent or {}
    dead = [rank for rank in ranks if rank.where is Where.DEAD and not rank.killed]
    living = [rank for rank in ranks if rank.where not in (Where.DEAD, Where.STOPPED)]
    found = (
        _named([rank for rank in dead if _is_crash(rank)], lambda rank: f"was ended by signal {-(rank.exit_code or 0)}")
        or _named([rank for rank in dead if rank.exit_code and not _is_echo(rank)][:1], _failure)
        or [Named(rank=rank, node=node, reason="its node does not answer") for rank, node in sorted(lost.items())]
        or _named([rank for rank in ranks if rank.where is Where.STOPPED], lambda rank: rank.doing or "is stopped")
        or _named(
            [rank for rank in ranks if rank.rank in absent and not rank.killed],
            lambda rank: "; ".join(filter(None, [absent[rank.rank], rank.doing + _at(rank)])),
        )
        or _slowest(living, overdue)
        or (_named([rank for rank in dead if not rank.exit_code], _left) if living else [])
    )
    if not found or len(found) > MAX_NAMED:
        if not living and any(map(_is_of_watchdog, ranks)):
            return Blame(
                undecided="torch's watchdog ended the ranks, and their flight recorders do not show which one caused it"
            )
        return Blame(victims=tuple(sorted(rank.rank for rank in living)), undecided=_why_undecided(living, found))
    guilty = {each.rank for each in found}
    everyone = {rank.rank for rank in ranks if rank.exit_code != 0} | set(lost)
    return Blame(culprits=tuple(found), victims=tuple(sorted(everyone - guilty)))


def _named(ranks: Sequence[Summary], reason: Callable[[Summary], str]) -> list[Named]:
    return [Named(rank=rank.rank, node=rank.node, reason=reason(rank)) for rank in ranks]


def _is_crash(rank: Summary) -> bool:
    ended_by_signal = rank.exit_code is not None and rank.exit_code < 0
    return ended_by_signal and rank.exit_code != -_SIGTERM and not _is_of_watchdog(rank)


def _is_of_watchdog(rank: Summary) -> bool:
    """torch has ended it because a collective took too long, for which another rank may be the reason."""
    return rank.recorded and rank.exit_code == -_SIGABRT


def _is_echo(rank: Summary) -> bool:
    """It reports that a peer was gone; so does every other one."""
    return _is_of_watchdog(rank) or (bool(rank.error) and cause_of_text(rank.error) is Cause.COMMUNICATION_ERROR)


def _failure(rank: Summary) -> str:
    return f"failed with exit code {rank.exit_code}" + (f": {rank.error}" if rank.error else "")


def _left(_rank: Summary) -> str:
    return "has ended with code 0, while others go on"


def _slowest(living: Sequence[Summary], overdue: Mapping[int, str]) -> list[Named]:
    """The ranks that the others wait for; none where the ranks do not differ."""
    if not living:
        return []
    newest = max((rank.tick for rank in living if rank.attached), default=0)

    def reached(rank: Summary) -> int:
        return rank.tick if rank.attached else newest

    waiting = [rank for rank in living if rank.where is Where.COLLECTIVE]
    others = [rank for rank in living if rank.where is not Where.COLLECTIVE]
    if waiting and others:
        front = max(map(reached, waiting))
        if awaited := _last(others, reached, at_most=front):
            return _named(awaited, lambda rank: f"{rank.doing}{_at(rank)}, while {_ranks(len(waiting))}")
        return _named(_last(waiting, reached), lambda rank: f"{rank.doing}{_at(rank)}, which others have left behind")
    if any(reached(rank) < newest for rank in living):
        where = f", while others have reached {_place(newest)}"
        return _named(_last(living, reached), lambda rank: f"{rank.doing}{_at(rank)}{where}")
    if odd := _odd_ones(living):
        return _named(odd, lambda rank: f"{rank.doing}{_at(rank)}; most others are somewhere else")
    late = [rank for rank in others if rank.rank in overdue]
    return (
        _named(late, lambda rank: f"{rank.doing}{_at(rank)}; {overdue[rank.rank]}") if len(late) < len(living) else []
    )


def _last(ranks: Sequence[Summary], reached: Callable[[Summary], int], at_most: int | None = None) -> list[Summary]:
    within = [rank for rank in ranks if at_most is None or reached(rank) <= at_most]
    lowest = min(map(reached, within), default=0)
    return [rank for rank in within if reached(rank) == lowest]


def _odd_ones(ranks: Sequence[Summary]) -> list[Summary]:
    """Ranks in another place than more than half of all; none where no place holds so many."""
    places = Counter(rank.doing for rank in ranks)
    common, number = places.most_common(1)[0]
    return [rank for rank in ranks if rank.doing != common] if len(ranks) > 2 and number * 2 > len(ranks) else []


def _at(rank: Summary) -> str:
    return f" at {_place(rank.tick)}" if rank.attached else ""


def _place(tick: int) -> str:
    if tick >= END:
        return "the end"
    return f"step {step_of(tick)}" if tick >= 0 else "its start, before the first step"


def _ranks(number: int) -> str:
    return f"{number} rank{'s wait' if number > 1 else ' waits'} for it in a collective"


def _why_undecided(living: Sequence[Summary], found: Sequence[Named]) -> str:
    if len(found) > MAX_NAMED:
        return f"{len(found)} ranks are alike, so the reason lies outside of them"
    if not living:
        return "no rank was alive any more"
    if all(rank.where is Where.COLLECTIVE for rank in living):
        return "all ranks wait in the same collective: the network or a device, rather than one rank's program"
    return "the ranks do not differ"
