"""A site's settings, parsed from the output of ``scontrol``: partitions, preemption, Slurm's clock. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from slurmft.policy.timing.grace import JobTimes
from slurmft.scheduler.parsing.parsing import job_pairs, parse_duration_s, parse_pairs, parse_time

_NO_LIMIT = frozenset({"UNLIMITED", "INFINITE", "-1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition of ``scontrol show partition``; None where it says nothing."""

    name: str
    is_default: bool
    grace_s: float | None
    preempt_mode: str
    """As printed: words such as REQUEUE or GANG,SUSPEND; the cluster's where the partition has none of its own."""

    priority_tier: int | None
    default_limit_s: float | None
    """Limit of a job that asks for none: infinite where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What ``scontrol show config`` says of the whole cluster; empty or None where it says nothing."""

    preempt_type: str
    kill_wait_s: float | None
    clock: float | None
    """Unix time on the controller when it answered."""

    cluster: str = ""
    has_epilog: bool = True
    """Whether a script of the site's runs on every node after each job; a job is COMPLETING until it has ended."""


def parse_partitions(text: str) -> list[Partition]:
    """The partitions in the output of ``scontrol -o show partition``, one on each line; other lines are skipped."""
    lines = (parse_pairs(line) for line in text.splitlines())
    return [_partition(pairs) for pairs in lines if pairs.get("PartitionName")]


def _partition(pairs: dict[str, str]) -> Partition:
    default, longest = pairs.get("DefaultTime", ""), pairs.get("MaxTime", "")
    grace, tier = pairs.get("GraceTime", ""), pairs.get("PriorityTier", "")
    return Partition(
        name=pairs["PartitionName"],
        is_default=pairs.get("Default") == "YES",
        grace_s=float(grace) if grace.isdecimal() else None,
        preempt_mode=pairs.get("PreemptMode", ""),
        priority_tier=int(tier) if tier.isdecimal() else None,
        default_limit_s=parse_limit_s(longest if default in ("", "NONE") else default),
    )


def parse_site(text: str) -> Site:
    """The facts in the output of ``scontrol show config``."""
    facts = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
    wait = re.match(r"\d+", facts.get("KillWait", ""))
    asked_at = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    return Site(
        preempt_type=_preempt_type(facts.get("PreemptType", "")),
        kill_wait_s=float(wait.group()) if wait else None,
        clock=parse_time(asked_at.group(1)) if asked_at else None,
        cluster=facts.get("ClusterName", ""),
        # from 24.11 on there is a line for each script, and none where there is no script
        has_epilog="EpilogMsgTime" not in facts
        or re.search(r"^Epilog(\[\d+\])?\s*=\s*(?!\(null\))\S", text, re.MULTILINE) is not None,
    )


def parse_configuration(text: str) -> dict[str, str]:
    """Every ``Key = value`` in the output of ``scontrol show config``; under ``as of`` its time."""
    facts = dict(re.findall(r"^(\w+)\s*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    if match := re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE):
        facts["as of"] = match[1]
    if "PreemptType" in facts:
        facts["PreemptType"] = _preempt_type(facts["PreemptType"])
    return facts


def _preempt_type(text: str) -> str:
    """A cluster without preemption says ``preempt/none`` in 22.05, and nothing in newer versions."""
    return "preempt/none" if text == "(null)" else text


def parse_limit_s(text: str) -> float | None:
    """Seconds of a time limit as sbatch takes it, in the whole minutes that Slurm makes of it: infinite where there is
    none, None where it is not known or cannot be read."""
    text = text.strip()
    if text.upper() in _NO_LIMIT:
        return math.inf
    seconds = parse_duration_s(text)
    if seconds is None:
        return None
    return math.inf if seconds == 0 else math.ceil(seconds / 60) * 60.0


def parse_job_times(text: str) -> JobTimes:
    """Start, end, limit and preemption of the job in the output of ``scontrol -o show job``."""
    pairs = job_pairs(text)
    return JobTimes(
        start=parse_time(pairs.get("StartTime", "")),
        end=parse_time(pairs.get("EndTime", "")),
        limit_s=parse_duration_s(pairs.get("TimeLimit", "")),
        preempted=parse_time(pairs.get("PreemptTime", "")),
    )
