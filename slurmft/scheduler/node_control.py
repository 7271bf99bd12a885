"""Nodes as a sweep sees them: all of them in one question, and changes that are made only to what was seen."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.node_health import NodeFact
from slurmft.scheduler import slurm
from slurmft.scheduler.nodes import expand, is_usable
from slurmft.system.processes import user_name

FACT_FORMAT = "%N|%T|%E|%H"
PROBE_FORMAT = "%i|%T|%N|%n"
PROBE_NAME = "slurmft-probe"
QUESTION_S = 20.0

_DENIED = ("permission denied", "Access/permission", "Invalid user id", "not authorized")


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
        if any(word.lower() in error.what.lower() for word in _DENIED):
            raise NotPermitted(f"only an administrator may change {node}") from error
        raise


def _words(fact: NodeFact | None) -> str:
    return "Slurm does not name it" if fact is None else f"{fact.state} {fact.reason}".strip()
