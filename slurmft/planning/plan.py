"""``slurmft plan``: alternatives of one run, simulated and compared."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmft.config.config import RunConfig, load, load_section
from slurmft.config.planning import PlanConfig
from slurmft.errors import UsageError
from slurmft.operations.advise import counsel
from slurmft.planning.scenario import Scenario, scenario
from slurmft.policy.timing.checkpoint_interval import typical_cost_s

if TYPE_CHECKING:
    from slurmft.planning.outcome import Outcome

AS_IT_IS = "as configured"
MOST_ALTERNATIVES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One thing to simulate."""

    name: str
    scenario: Scenario
    seeds: int


def alternatives(
    config: Path, site: Path | None, *, overrides: Sequence[str], varied: Sequence[str], seeds: int | None
) -> list[Alternative]:
    """The run as configured, what the site's file lists, and every combination of the varied keys.

    Args:
        config: the run's configuration.
        site: the description of its cluster; None: defaults.
        overrides: ``key=value``, of either file, for all alternatives.
        varied: ``key=value,value,...``.
        seeds: lives of each; None: as the site's file says.

    Raises:
        ConfigError: a file or a key is wrong.
        UsageError: there are too many alternatives, or ``varied`` is not of that form.
    """
    plan = load_section(site, PlanConfig, [each for each in overrides if _is_plans(each)])
    wanted = {AS_IT_IS: list[str]()}
    wanted |= {name: [f"{key}={json.dumps(value)}" for key, value in keys.items()] for name, keys in
               plan.alternatives.items()}  # fmt: skip
    wanted |= {", ".join(each): list(each) for each in _combinations(varied)}
    if len(wanted) > MOST_ALTERNATIVES:
        raise UsageError(f"{len(wanted)} alternatives are too many; at most {MOST_ALTERNATIVES}")
    found: list[Alternative] = []
    measured: Mapping[str, Any] | None = None
    for name, keys in wanted.items():
        all_keys = [*overrides, *keys]
        run = load(config, [each for each in all_keys if not _is_plans(each)])
        plan = load_section(site, PlanConfig, [each for each in all_keys if _is_plans(each)])
        if measured is None:
            measured = _measured(run)
        found.append(Alternative(name=name, scenario=scenario(run, plan, **measured), seeds=seeds or plan.seeds))
    return found


def simulated(found: Sequence[Alternative], tell: Callable[[str], None]) -> Iterator[Outcome]:
    """The outcome of each, as it is there.

    Raises:
        UsageError: SimPy is not installed.
    """
    try:
        from slurmft.planning.outcome import simulate
    except ModuleNotFoundError as error:
        raise UsageError("SimPy is not installed here", hint="pip install 'slurmft[plan]'") from error
    for number, each in enumerate(found, start=1):
        tell(f"{each.name}: {each.seeds} lives ({number} of {len(found)})")
        yield simulate(each.name, each.scenario, each.seeds, workers=len(os.sched_getaffinity(0)))


def _is_plans(override: str) -> bool:
    return override.partition("=")[0].partition(".")[0] in PlanConfig.model_fields


def _combinations(varied: Sequence[str]) -> Iterator[tuple[str, ...]]:
    choices = []
    for each in varied:
        key, equals, values = each.partition("=")
        if not key or not equals or not all(values.split(",")):
            raise UsageError(f"--vary {each[:80]!r} is not of the form key=value,value,...")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return itertools.product(*choices) if choices else iter(())


def _measured(run: RunConfig) -> Mapping[str, Any]:
    """Durations that earlier attempts of this run, or of runs like it, have measured."""
    known = counsel(run, {}).advice.measured
    cost_s = typical_cost_s(list(known.costs_s))
    durable = sorted(known.saves_s)
    return {"step_s": known.need.step_s or 0.0, "save_cost_s": cost_s,
            "durable_s": durable[len(durable) // 2] if durable else None}  # fmt: skip
