"""``slurmft doctor``: gathers what the site says and what a try shows; ``policy.site.doctor`` judges it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.errors import LabUnavailable, SlurmError, SlurmUnavailable
from slurmft.operations.folder_test import try_folder
from slurmft.policy.site import doctor as policy
from slurmft.policy.site.doctor import AdminFacts, Finding, Level, PartitionFacts, Wishes
from slurmft.policy.timing.grace import Severity
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing.parsing import parse_time
from slurmft.supervisor import grace
from slurmft.system.processes import user_name

EXIT_NO_SLURM = LabUnavailable.exit_code
EXIT_SILENT = SlurmUnavailable.exit_code
AS_OF = "as of"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings, and how the command ends."""

    findings: tuple[Finding, ...]
    exit_code: int


def diagnose(config: RunConfig | None, environment: Mapping[str, str], *, here: Path) -> Diagnosis:
    """Look at the site around us, for this run or for any; ``here`` stands for its folder where there is no run."""
    folder = try_folder(here if config is None else config.run_folder)
    found = [*policy.judge_folder(folder)]
    offsets = {} if folder.error else {"the run folder's filesystem": folder.clock_offset_s}
    code = 0
    if not slurm.available():
        found.append(_missing("there is no Slurm on this machine: no client commands, or no configuration for them",
                              "runs with --cluster local work here; log in to a node of a cluster"))  # fmt: skip
        code = EXIT_NO_SLURM
    else:
        try:
            found += _of_slurm(config, environment, offsets)
        except SlurmError as error:
            found.append(_missing(f"Slurm did not answer: {error.what}", "try again; scontrol ping says who is up"))
            code = EXIT_SILENT
    found += policy.judge_clocks(offsets)
    return Diagnosis(findings=tuple(found), exit_code=code or policy.exit_code(found))


def _missing(text: str, remedy: str) -> Finding:
    return Finding(check="Slurm", level=Level.PROBLEM, text=text, remedy=remedy)


def _of_slurm(config: RunConfig | None, environment: Mapping[str, str], offsets: dict[str, float]) -> list[Finding]:
    before = time.time()
    conf = slurm.configuration()
    if (clock := parse_time(conf.get(AS_OF, ""))) is not None:
        offsets["Slurm's controller"] = round(clock + 0.5 - (before + time.time()) / 2, 1)
    partitions = slurm.partitions(timeout_s=10.0)
    wishes = _wishes(config, environment)
    known = {each.name: PartitionFacts(name=each.name, preempt_mode=each.preempt_mode, grace_s=each.grace_s)
             for each in partitions}  # fmt: skip
    name, version = conf.get("ClusterName", "unknown"), conf.get("SLURM_VERSION", "unknown")
    return [
        Finding(check="Slurm", level=Level.OK, text=f"cluster {name}, version {version}"),
        *policy.judge_cluster(conf, wishes),
        *policy.judge_partitions(conf, known, [each.name for each in partitions if each.is_default], wishes),
        *_of_grace(config, environment),
        policy.judge_permissions(_permissions(conf)),
    ]


def _wishes(config: RunConfig | None, environment: Mapping[str, str]) -> Wishes:
    if config is None:
        return Wishes()
    named = environment.get("SBATCH_PARTITION") or config.slurm.partition or ""
    return Wishes(
        partitions=tuple(filter(None, named.split(","))),
        requeue=config.slurm.requeue,
        continue_by=config.preemption.continue_by,
        requeue_delay_s=config.preemption.requeue_delay_s,
        survives_nodes=config.survives_nodes,
    )


def _of_grace(config: RunConfig | None, environment: Mapping[str, str]) -> list[Finding]:
    """The grace budget, from what earlier runs of the same workload have measured."""
    if config is None:
        return []
    levels = {Severity.WARNING: Level.WARNING, Severity.NOTE: Level.NOTE}
    return [
        Finding(check="grace budget", level=levels[each.severity], text=each.text)
        for each in grace.check(config, {}, environment)
    ]


def _permissions(conf: Mapping[str, str]) -> AdminFacts:
    user = user_name()
    if os.getuid() == 0 or conf.get("SlurmUser", "").startswith(f"{user}("):
        return AdminFacts(may_drain=True, why=f"{user} is Slurm's administrator")
    if not policy.has_accounting(conf):
        return AdminFacts(may_drain=None, why="without accounting only Slurm's own user surely may")
    try:
        level = slurm.admin_level(user)
    except SlurmError as error:
        return AdminFacts(may_drain=None, why=f"the accounting did not tell: {error.what}")
    why = f"admin level {level} in the accounting" if level else f"the accounting does not know the user {user}"
    return AdminFacts(may_drain=level in ("Administrator", "Operator"), why=why)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """For people: what needs something done comes last, where a terminal shows it."""
    order = list(Level)
    lines = []
    for each in sorted(findings, key=lambda finding: order.index(finding.level)):
        lines.append(f"{each.level.upper():8} {each.check}: {each.text}")
        if each.remedy:
            lines.append(f"         -> {each.remedy}")
    return lines
