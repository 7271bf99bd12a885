"""Measurements of a workload, from its run folder or those beside it, and the settings that follow from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.policy.checkpoints import Advice, FailureHistory, Measured, Setting, advise, in_words
from slurmft.policy.stop import Finding
from slurmft.scheduler import slurm
from slurmft.storage import history
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import grace
from slurmft.supervisor.act import history_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counsel:
    """The advice for one configuration, and what Slurm's own settings have to do with it."""

    config: RunConfig
    advice: Advice
    findings: tuple[Finding, ...]
    """About the grace that Slurm leaves; empty where there is no Slurm to ask."""

    def lines(self) -> list[tuple[str, str]]:
        """Names and sentences."""
        words = in_words(self.advice, lead_s=self.config.preemption.signal_lead_s, setting=_setting(self.config))
        return [*words, *((finding.severity.value, finding.text) for finding in self.findings)]

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format only grows. Unknown values are null."""
        advice, measured = self.advice, self.advice.measured
        section = self.config.checkpoint
        return {
            "format": 1,
            "run_folder": str(self.config.run_folder),
            "measured": {
                "attempts": measured.attempts, "of_this_run": measured.is_own, "step_s": measured.need.step_s,
                "longest_step_s": measured.need.longest_step_s, "p99_save_s": measured.need.save_s,
                "save_was_cut_off": measured.need.cut_off, "saves_s": list(measured.saves_s),
                "costs_s": list(measured.costs_s),
            },
            "failures": {**asdict(measured.history), "nodes": advice.nodes, "expected_mtbf_s": round(advice.mtbf_s, 1)},
            "signal_lead_s": {"least": advice.lead_s, "configured": self.config.preemption.signal_lead_s},
            "interval": {
                "configured": {"interval": section.interval, "interval_steps": section.interval_steps,
                               "interval_seconds": section.interval_seconds},
                "steps": advice.steps,
                "cost_was_measured": advice.is_cost_known,
                "recommended": _plan(advice.plan),
                "now": _plan(advice.now),
            },
            "words": [list(line) for line in self.lines()],
        }  # fmt: skip


def counsel(config: RunConfig, environment: Mapping[str, str] | None = None) -> Counsel:
    """Look at what earlier attempts measured, and at Slurm where it is there; nothing is changed."""
    measured = _measured(config)
    around = os.environ if environment is None else environment
    return Counsel(
        config=config,
        advice=advise(measured, nodes=config.nodes, setting=_setting(config)),
        findings=tuple(grace.check(config, {}, around, measured.need)) if slurm.available() else (),
    )


def _measured(config: RunConfig) -> Measured:
    workload = grace.workload_of(config)
    own = list(history.read(config.run_folder, workload).values())  # once: it warns of a file that is damaged
    earlier = own or history.beside(config.run_folder, workload)
    return Measured(
        need=grace.need_from(config, earlier),
        saves_s=tuple(seconds for one in earlier for seconds in one.saves_s),
        costs_s=tuple(seconds for one in earlier for seconds in one.costs_s),
        history=_history(config),
        attempts=len(earlier),
        is_own=bool(own),
    )


def _history(config: RunConfig) -> FailureHistory:
    try:
        return history_of(RunFolder(config.run_folder).journal().read(), config.nproc_per_node)
    except StorageError as error:
        log.warning("the run's journal is left out: %s", error.what)
        return FailureHistory()


def _setting(config: RunConfig) -> Setting:
    section = config.checkpoint
    return Setting(interval=section.interval, steps=section.interval_steps, seconds=section.interval_seconds)


def _plan(plan: Any) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {"interval_s": round(plan.interval_s, 3), "cost_s": round(plan.cost_s, 4),
            "durable_s": round(plan.durable_s, 3), "overhead_fraction": plan.overhead_fraction,
            "lost_s": round(plan.lost_s, 3), "lost_fraction": plan.lost_fraction,
            "limited_by": plan.limited_by}  # fmt: skip
