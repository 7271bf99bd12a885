"""The grace budget of a submission: what earlier runs needed, what Slurm leaves, and the warnings that follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slurmft.config.run import RunConfig, partitions_of
from slurmft.errors import SlurmError, UsageError
from slurmft.policy import checkpoints, stop
from slurmft.policy.stop import Finding, GraceNeed, GraceOffer, Severity
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import asked_for
from slurmft.scheduler.slurm import Partition, Site, parse_limit_s
from slurmft.storage import history

log = logging.getLogger(__name__)


def check(
    config: RunConfig, options: Mapping[str, Any], environment: Mapping[str, str], need: GraceNeed | None = None
) -> list[Finding]:
    """The findings about the grace budget of this submission; ``options`` are sbatch's from behind ``--``.

    Slurm is asked twice, once each, and what it does not say is unknown. ``need``: as of ``need_of``, if known.
    """
    return stop.findings(need or need_of(config), _offers(config, options, environment))


def refuse_warnings(findings: Sequence[Finding]) -> None:
    """The check of ``--strict``.

    Raises:
        UsageError: there are warnings.
    """
    if count := sum(finding.severity is Severity.WARNING for finding in findings):
        raise UsageError(
            f"--strict: the grace budget has {count} problem{'s' if count > 1 else ''}, named above",
            hint="fix them, or submit without --strict",
        )


def need_of(config: RunConfig) -> GraceNeed:
    """The needs of a stop, from earlier runs of the same workload."""
    return need_from(config, history.earlier(config.run_folder, history.fingerprint(config.workload)))


def need_from(config: RunConfig, measured: Sequence[history.Timings]) -> GraceNeed:
    """The needs of a stop, from measurements of earlier attempts, oldest first."""
    save_s = history.p99_save_s(measured)
    cut_off_s = max((one.unfinished_save_s or 0.0 for one in measured), default=0.0)
    return GraceNeed(
        longest_step_s=history.longest_step_s(measured),
        save_s=max(cut_off_s, save_s or 0.0) or None,
        cut_off=cut_off_s > (save_s or 0.0),
        start_s=max((one.start_s for one in measured if one.start_s is not None), default=None),
        step_s=next((one.step_s for one in reversed(measured) if one.step_s is not None), None),
        **_interval_of(config),
    )


def _interval_of(config: RunConfig) -> dict[str, Any]:
    section = config.checkpoint
    if section.interval == "steps":
        return {"interval_steps": section.interval_steps}
    return {"interval_s": section.interval_seconds or checkpoints.LONGEST_S}


def _offers(config: RunConfig, options: Mapping[str, Any], environment: Mapping[str, str]) -> list[GraceOffer]:
    site, partitions = _ask(elsewhere="clusters" in {*options, *(config.slurm.model_extra or {})})
    asked = asked_for(config.slurm, options, environment)
    defaults = [partition.name for partition in partitions if partition.is_default]
    wanted = partitions_of(config, asked.partition).split(",")
    names = list(dict.fromkeys(name for each in wanted for name in ([each] if each else defaults)))
    known = {partition.name: partition for partition in partitions}
    tiers = [partition.priority_tier for partition in partitions if partition.priority_tier is not None]
    asked_s = parse_limit_s(asked.time) if asked.time else None
    lead_s = float(config.preemption.signal_lead_s)
    return [_offer(known.get(name), asked_s if asked.time else _default_s(known.get(name)), lead_s, site, tiers)
            for name in names or [""]]  # fmt: skip


def _offer(
    partition: Partition | None, limit_s: float | None, lead_s: float, site: Site, tiers: Sequence[int]
) -> GraceOffer:
    if partition is None:
        return GraceOffer(lead_s=lead_s, limit_s=limit_s, kill_wait_s=site.kill_wait_s)
    return GraceOffer(
        lead_s=lead_s,
        limit_s=limit_s,
        partition=partition.name,
        preempts=stop.preempts(
            kind=site.preempt_type, mode=partition.preempt_mode, tier=partition.priority_tier, tiers=tiers
        ),
        grace_s=partition.grace_s,
        kill_wait_s=site.kill_wait_s,
    )


def _default_s(partition: Partition | None) -> float | None:
    return None if partition is None else partition.default_limit_s


def _ask(*, elsewhere: bool) -> tuple[Site, list[Partition]]:
    nothing = Site(preempt_type="", kill_wait_s=None, clock=None)
    if elsewhere:  # scontrol reports this cluster, and the job goes to another one
        return nothing, []
    try:
        with ThreadPoolExecutor(1) as pool:  # both at once: a user waits for this at a prompt
            partitions = pool.submit(slurm.partitions)
            return slurm.site(), partitions.result()
    except SlurmError as error:
        log.debug("the grace budget cannot be checked against Slurm: %s", error.what)
        return nothing, []
