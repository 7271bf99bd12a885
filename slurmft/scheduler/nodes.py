"""Nodes: which there are, which can take jobs, and many of them in one short hostlist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import expand_hostlist, parse_pairs, parse_time

NODE_FORMAT = "%N|%P|%T"
MAX_NODES = 65_536
"""More than any cluster has; a slip of the finger, as in n[0-99999999], would fill the memory."""

_UNUSABLE = frozenset(
    "down drained draining drain fail failing error unknown future inval maint perfctrs blocked".split()  # noqa: SIM905
)
"""Base states of nodes that take no new job; reboots and power saving pass."""

_DENIED = "permission denied"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}", re.ASCII)
_MAX_DIGITS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """One node in one partition, as sinfo shows it."""

    node: str
    partition: str
    is_default: bool
    """The partition is the cluster's default."""

    usable: bool
    """It takes jobs now, or when those on it have ended."""

    state: str = ""
    """As sinfo shows it, in capital letters and with its suffixes: IDLE, MIXED, DOWN*; empty where it is not known."""

    @property
    def is_free(self) -> bool:
        """Nothing runs on it, and it takes jobs."""
        return self.usable and self.state.rstrip("~#") == "IDLE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A node that Slurm has drained because it could not start a job."""

    node: str
    reason: str
    at: float
    """Unix time, by the controller's clock."""


REFUSAL_FORMAT = "%N|%H|%E"
_REFUSED = re.compile(r"prolog|batch job complete failure|launch fail|duplicate jobid", re.IGNORECASE)
WITHIN_S = 5.0
"""Slurm drains a node that refuses a job and puts the job back into the queue in one go, to the second."""


def refusals(at: float) -> list[Refusal]:
    """Nodes that were drained at that time by the controller's clock, because they could not start a job.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    found = parse_refusals(slurm.run(["sinfo", "-h", "-a", "-N", "-o", REFUSAL_FORMAT], timeout_s=5.0))
    return [each for each in found if abs(each.at - at) <= WITHIN_S]


def parse_refusals(text: str) -> list[Refusal]:
    """The nodes in the output of ``sinfo -N -o REFUSAL_FORMAT`` that could not start a job, each once."""
    found: dict[str, Refusal] = {}
    for fields in (line.split("|", 2) for line in text.splitlines()):
        if len(fields) == 3 and _REFUSED.search(fields[2]) and (at := parse_time(fields[1].strip())) is not None:
            found.setdefault(fields[0].strip(), Refusal(node=fields[0].strip(), reason=fields[2].strip()[:200], at=at))
    return list(found.values())


def nodes(*, timeout_s: float = 5.0) -> list[NodeRecord]:
    """Every node of every partition, hidden ones too; one that is in several is there several times. One question.

    Where the site keeps the states of nodes from its users (``PrivateData=nodes``), a second one asks the partitions
    for their names, and every node counts as one that takes jobs.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known, and silence is not health.
        SlurmError: Slurm refused.
    """
    try:
        return parse_nodes(slurm.run(["sinfo", "-h", "-a", "-N", "-o", NODE_FORMAT], timeout_s=timeout_s))
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        if _DENIED not in error.what:
            raise
    return parse_named(slurm.run(["scontrol", "-a", "-o", "show", "partition"], timeout_s=timeout_s))


def parse_named(text: str) -> list[NodeRecord]:
    """The nodes in the output of ``scontrol -o show partition``, of unknown state."""
    found = []
    for pairs in map(parse_pairs, text.splitlines()):
        try:
            names = expand(pairs.get("Nodes", "").replace("(null)", ""))
        except ValueError:
            continue
        partition, is_default = pairs.get("PartitionName", ""), pairs.get("Default") == "YES"
        found += [NodeRecord(node=name, partition=partition, is_default=is_default, usable=True) for name in names]
    return found


def parse_nodes(text: str) -> list[NodeRecord]:
    """The nodes in the output of ``sinfo -N -o NODE_FORMAT``; lines of another shape are skipped."""
    lines = (line.split("|") for line in text.splitlines())
    return [
        NodeRecord(
            node=fields[0].strip(),
            partition=fields[1].strip().removesuffix("*"),
            is_default=fields[1].strip().endswith("*"),
            usable=is_usable(fields[2]),
            state=fields[2].strip().upper(),
        )
        for fields in lines
        if len(fields) == 3 and fields[0].strip()
    ]


def is_usable(state: str) -> bool:
    """Whether a node in this state, with sinfo's suffixes, takes jobs now or later."""
    word = state.strip().lower()
    base = word.rstrip("*~#!%$@^-+")
    suffixes = word[len(base) :]
    return bool(base) and base not in _UNUSABLE and not set(suffixes) & {"*", "$"}  # not responding, maintenance


def expand(text: str) -> list[str]:
    """The nodes of a hostlist such as ``gpu[01-03,7],login``, each once, in order; zero padding kept.

    Raises:
        ValueError: it is not a hostlist, or has more nodes than any cluster.
    """
    for ranges in re.findall(r"\[([^\[\]]*)\]", text):
        if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranges, re.ASCII):
            raise ValueError(f"{text[:80]!r} is not a hostlist: [{ranges[:40]}] holds something else than numbers")
    if _size(text) > MAX_NODES:
        raise ValueError(f"{text[:80]!r} stands for more than {MAX_NODES} nodes")
    names = list(dict.fromkeys(expand_hostlist(re.sub(r"\s*,\s*", ",", text.strip()))))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not the name of a node")
    return names


def _size(text: str) -> int:
    """An upper bound: as if all brackets belonged to one name; ranges that run backwards are refused.

    Raises:
        ValueError: a range runs backwards, or is longer than the limit.
    """
    total = 0
    for part in re.split(r",(?![^\[]*\])", text):
        product = 1
        for ranges in re.findall(r"\[([^\[\]]*)\]", part):
            count = 0
            for item in ranges.split(","):
                first, dash, last = item.partition("-")
                if len(first) > 18 or len(last) > 18:
                    raise ValueError(f"{text[:80]!r} is not a hostlist: {item[:40]!r} is too long a number")
                count += int(last) - int(first) + 1 if dash else 1
                if dash and int(last) < int(first):
                    raise ValueError(f"{text[:80]!r} is not a hostlist: [{item}] runs backwards")
            product *= count
        total += product
    return total


def compress(names: Iterable[str]) -> str:
    """A short hostlist that every Slurm reads, such as ``n[1-3,08-10],login``; sorted, each name once.

    Only a number at the end of a name is folded: Slurm refuses ``unit[0-31]rack``.
    """
    plain: list[str] = []
    numbers: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        if not prefix or not digits or len(digits) > _MAX_DIGITS or "[" in name or "]" in name:
            plain.append(name)
        else:
            numbers.setdefault(prefix, []).append(digits)
    return ",".join([*(prefix + _folded(found) for prefix, found in numbers.items()), *plain])


def in_order(names: Sequence[str]) -> str:
    """As ``compress``, but in the order of ``names``: folded only where that is the order of a sorted list."""
    folded = compress(names)
    return folded if expand_hostlist(folded) == list(names) else ",".join(names)


def _folded(numbers: Sequence[str]) -> str:
    """``["08", "09", "10", "12"]`` -> ``[08-10,12]``; numbers of different padding are different."""
    ordered = sorted(numbers, key=lambda digits: (len(digits), int(digits)))
    parts: list[str] = []
    start = previous = ordered[0]
    for number in [*ordered[1:], ""]:
        if number and number == str(int(previous) + 1).zfill(len(start)):
            previous = number
            continue
        parts.append(start if start == previous else f"{start}-{previous}")
        start = previous = number
    return ordered[0] if len(ordered) == 1 else f"[{','.join(parts)}]"
