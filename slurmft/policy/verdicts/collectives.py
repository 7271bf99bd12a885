"""Which ranks had not entered a collective that others wait in: the flight recorders of all ranks, compared.

A wait on the device does not show in Python stacks. A recorder knows for each process group how far its rank
has come: the newest collective that was entered (enqueued by the host), and the newest that the device has done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_TOLD = 8
"""Groups, and kinds of calls in one of them, that are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far one rank has come in one process group."""

    group: str
    """Its name."""

    description: str = ""
    members: tuple[tuple[int, int], ...] = ()
    """Ranks of the whole job, from the first to the last of each span, as jobs have thousands; empty where the recorder
    does not say."""

    entered: int = 0
    """Number of the newest collective that it has called."""

    done: int = 0
    """Of the newest that has finished on its device."""

    operation: str = ""
    """The first one that it has entered and not done, with the shapes of its input."""

    called_from: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stuck:
    """A collective that does not end."""

    group: str
    description: str
    number: int
    operation: str
    """Of most of those that wait."""

    called_from: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Members that have not entered it, as their recorders say."""

    silent: tuple[int, ...]
    """Members without a record."""

    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Different calls that ranks made under the same number."""


def stuck_collectives(records: Mapping[int, Sequence[Progress]]) -> list[Stuck]:
    """The first collective of each group that some rank waits in, those that ranks are missing from first."""
    groups: dict[tuple[str, tuple[tuple[int, int], ...]], dict[int, Progress]] = {}
    for rank, progress in records.items():
        for each in progress:
            groups.setdefault((each.group, each.members), {})[rank] = each
    found = []
    for (_, members), by_rank in groups.items():
        pending = {rank: each for rank, each in by_rank.items() if each.entered > each.done}
        if pending:
            ranks = [rank for first, last in members for rank in range(first, last + 1)]
            found.append(_stuck(by_rank, pending, ranks or _everyone(by_rank, records), records))
    return sorted(found, key=lambda each: (not each.absent, not each.others, each.group, each.waiting))


def _everyone(by_rank: Mapping[int, Progress], records: Mapping[int, Sequence[Progress]]) -> Iterable[int]:
    """The members of a group whose recorders do not name them: of torch's default one all ranks."""
    return records if any(each.description == "default_pg" for each in by_rank.values()) else by_rank


def _stuck(
    by_rank: Mapping[int, Progress], pending: Mapping[int, Progress], members: Iterable[int],
    records: Mapping[int, Sequence[Progress]],
) -> Stuck:  # fmt: skip
    number = min(each.done + 1 for each in pending.values())
    waiting = sorted(rank for rank, each in pending.items() if each.done < number)
    calls: dict[str, list[int]] = {}
    for rank in waiting:
        calls.setdefault(pending[rank].operation, []).append(rank)
    (operation, most), *others = sorted(calls.items(), key=lambda call: (-len(call[1]), call[1]))
    reached = {rank: each.entered for rank, each in by_rank.items()}
    first = pending[most[0]]
    return Stuck(
        group=first.group, description=first.description, number=number, operation=operation or "a collective",
        called_from=first.called_from, waiting=tuple(waiting),
        absent=tuple(sorted(rank for rank in members if rank in records and reached.get(rank, 0) < number)),
        silent=tuple(sorted(rank for rank in members if rank not in records)),
        others=tuple((other, tuple(ranks)) for other, ranks in others[:MAX_TOLD]),
    )  # fmt: skip


def absent_ranks(stuck: Sequence[Stuck]) -> dict[int, str]:
    """Ranks that others wait for and that wait for none themselves, each with what it has not entered."""
    waiting = {rank for each in stuck for rank in each.waiting}
    found: dict[int, str] = {}
    for each in stuck:
        for rank in each.absent:
            if rank not in waiting:
                found.setdefault(rank, f"has not entered {_name(each)}, which {_count(each.waiting)} for")
    return found


def stuck_told(stuck: Sequence[Stuck]) -> list[str]:
    """A line for each of them."""
    lines = []
    for each in stuck[:MAX_TOLD]:
        parts = [f"{_name(each)}: entered by {ranks_told(each.waiting)}"]
        if each.absent:
            parts.append(f"not entered by {ranks_told(each.absent)}")
        if each.silent:
            parts.append(f"no record of {ranks_told(each.silent)}")
        parts += [f"{ranks_told(ranks)} called {other or 'something else'} instead" for other, ranks in each.others]
        if not (each.absent or each.silent or each.others):
            parts.append("by all of its ranks: the network or a device, rather than a rank's program")
        if each.called_from:
            parts.append(f"called from {each.called_from}")
        lines.append("; ".join(parts)[:1000])
    if len(stuck) > MAX_TOLD:
        lines.append(f"and {len(stuck) - MAX_TOLD} more")
    if _wait_for_each_other(stuck):
        lines.append("ranks wait for each other in different groups: they call the groups' collectives in other orders")
    return lines


def _wait_for_each_other(stuck: Sequence[Stuck]) -> bool:
    return any(each.absent for each in stuck) and not absent_ranks(stuck) and not any(each.silent for each in stuck)


def _name(each: Stuck) -> str:
    description = f" ({each.description})" if each.description not in ("", "undefined", each.group) else ""
    return f"{each.operation}, number {each.number} of the group {each.group or 'without a name'}{description}"


def _count(ranks: Sequence[int]) -> str:
    return f"{len(ranks)} rank{'s wait' if len(ranks) > 1 else ' waits'}"


def ranks_told(ranks: Sequence[int], limit: int = 32) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ", ".join("-".join(map(str, span)) for span in spans[:limit])
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}{', ...' if len(spans) > limit else ''}"
