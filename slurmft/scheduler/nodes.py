"""Nodes: which there are, which can take jobs, many of them in one short hostlist, and what a sweep changes of them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.node_health import NodeFact
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import expand_hostlist, parse_pairs, parse_time
from slurmft.system.processes import user_name

# --- Nodes: which there are, which can take jobs, and many of them in one short hostlist ---

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


# --- Nodes as a sweep sees them: all of them in one question, and changes that are made only to what was seen ---

FACT_FORMAT = "%N|%T|%E|%H"
PROBE_FORMAT = "%i|%T|%N|%n"
PROBE_NAME = "slurmft-probe"
QUESTION_S = 20.0

_REFUSALS = ("permission denied", "Access/permission", "Invalid user id", "not authorized")


class NotPermitted(SlurmError):
    """Only an administrator may do this."""


def node_facts(*names: str) -> dict[str, NodeFact]:
    """Every node, or these. One question.

    Raises:
        SlurmUnavailable: Slurm did not answer, or named no node at all; nothing is known.
        SlurmError: Slurm refused.
    """
    only = ["-n", ",".join(names)] if names else []
    text = slurm.run(["sinfo", "-h", "-a", "-N", *only, "-o", FACT_FORMAT], timeout_s=QUESTION_S)
    facts = parse_facts(text)
    if not facts and not names:
        raise SlurmUnavailable("sinfo names no node")
    return facts


def parse_facts(text: str) -> dict[str, NodeFact]:
    """The nodes in the output of ``sinfo -N -o FACT_FORMAT``, each once; lines of another shape are skipped."""
    found: dict[str, NodeFact] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, bar, why = rest.partition("|")
        if not bar or not name or name in found:
            continue
        word = state.strip().upper()
        base = word.rstrip("*~#!%$@^-+")
        usable = is_usable(state)
        reason, since = _reason_and_time(why)
        found[name] = NodeFact(
            node=name, state=base, usable=usable, is_idle=usable and base == "IDLE" and word.rstrip("~#") == "IDLE",
            reason="" if reason.strip() == "none" else reason.strip(), since=since,
        )  # fmt: skip
    return found


def _reason_and_time(text: str) -> tuple[str, float | None]:
    """A reason, which may hold any character, and behind it the Unix time since when it holds; None: not known."""
    reason, bar, at = text.rpartition("|")
    if bar and at.strip().isdecimal() and len(at.strip()) <= 12:
        return reason, float(at)
    return (reason, None) if bar and at.strip() in ("Unknown", "None", "N/A") else (text, None)


def drain(seen: NodeFact, reason: str) -> str:
    """Drain a node that is still as it was seen; returns why it was left alone, or nothing when it is done.

    Raises:
        NotPermitted: we may not.
        SlurmError: Slurm refused, or did not answer.
    """
    now = node_facts(seen.node).get(seen.node)
    if now is None or not now.usable or now.reason != seen.reason:
        return f"{seen.node} has changed meanwhile: {_words(now)}"
    _update(seen.node, "State=DRAIN", f"Reason={reason}")
    return ""


def resume(seen: NodeFact) -> str:
    """Resume a node that is still drained for the same reason; returns as ``drain`` does, and raises the same."""
    now = node_facts(seen.node).get(seen.node)
    if now is None or not now.is_drained_by_us or now.reason != seen.reason:
        return f"{seen.node} has changed meanwhile: {_words(now)}"
    _update(seen.node, "State=RESUME")
    return ""


def drain_command(node: str, reason: str) -> str:
    """The administrator's command that drains it."""
    return shlex.join(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])


def resume_command(node: str) -> str:
    """The administrator's command that resumes it."""
    return shlex.join(["scontrol", "update", f"NodeName={node}", "State=RESUME"])


def nodes_under_test() -> frozenset[str]:
    """Nodes for which a job of ours waits or runs, also in a partition that is hidden. One question.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    argv = ["squeue", "-h", "-a", "-u", user_name(), "-n", PROBE_NAME, "-o", PROBE_FORMAT]
    return parse_under_test(slurm.run(argv, timeout_s=QUESTION_S))


def parse_under_test(text: str) -> frozenset[str]:
    """The nodes in the output of ``squeue -o PROBE_FORMAT``; of a waiting job those that it asks for."""
    found: set[str] = set()
    for fields in (line.strip().split("|") for line in text.splitlines()):
        for hostlist in fields[2:4] if len(fields) == 4 else ():
            if re.fullmatch(r"[A-Za-z0-9_.,\[\]:-]+", hostlist) and hostlist != "(null)":
                try:
                    found.update(expand(hostlist))
                except ValueError:
                    continue
    return frozenset(found)


def switches() -> dict[str, str]:
    """Node -> the switch, or the block, that it is plugged into; empty where Slurm is not told. One question.

    Raises:
        SlurmUnavailable: Slurm did not answer.
    """
    try:
        return parse_switches(slurm.run(["scontrol", "show", "topology"], timeout_s=QUESTION_S))
    except SlurmUnavailable:
        raise
    except SlurmError:
        return {}


def parse_switches(text: str) -> dict[str, str]:
    """The lowest switch of each node in the output of ``scontrol show topology``, of a tree or of blocks."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = facts.get("SwitchName") or facts.get("BlockName")
        if not name or facts.get("Level", "0") != "0":
            continue
        try:
            found.update(dict.fromkeys(expand(facts.get("Nodes", "")), name))
        except ValueError:
            continue
    return found


def probe_argv(
    nodes: Sequence[str], probe: Sequence[str], minutes: int, *, partition: str = "", qos: str = ""
) -> list[str]:
    """The command that submits a short look at one node, or at a pair, which reduces together: alone on them, never
    twice, at the lowest priority."""
    if len(nodes) > 1:
        probe = ["srun", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", *probe]
    options = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--exclusive", f"--time={minutes}",
               f"--job-name={PROBE_NAME}", "--no-requeue", "--nice=10000", "--output=/dev/null",
               f"--deadline=now+{2 * minutes + 10}minutes", f"--wrap={shlex.join(probe)}"]  # fmt: skip
    where = [f"--{name}={value}" for name, value in (("partition", partition), ("qos", qos)) if value]
    return ["sbatch", "--parsable", *where, *options]


def submit_probe(argv: Sequence[str]) -> str:
    """Submit it from a folder that every node has; returns the job's id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return slurm.run(argv, folder=Path("/")).strip().split(";")[0]


def probe_command(configuration: Path | None) -> list[str]:
    """The look itself, with this interpreter, which the nodes must have as well."""
    named = [] if configuration is None else ["--config", str(configuration)]
    return [sys.executable, "-P", "-m", "slurmft", "health", "--context", "cron", "--level", "2", *named]


def _update(node: str, *changes: str) -> None:
    try:
        slurm.run(["scontrol", "update", f"NodeName={node}", *changes])
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        if any(word.lower() in error.what.lower() for word in _REFUSALS):
            raise NotPermitted(f"only an administrator may change {node}") from error
        raise


def _words(fact: NodeFact | None) -> str:
    return "Slurm does not name it" if fact is None else f"{fact.state} {fact.reason}".strip()
