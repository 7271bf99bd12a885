"""What a run's journal, its report and its trainer's clock say about faults, as plain values to be kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm.conftest import Run
from slurmft.reporting.accounting import Category
from slurmft.reporting.report import report_of
from slurmft.storage.journal import EventName

MAX_POINTS = 240
"""Steps that a figure shows one by one; of more, every n-th."""


@dataclass(kw_only=True)
class Fault:
    """One fault, and the events that show that it was noticed and that it is over."""

    label: str
    noticed: Sequence[EventName]
    over: EventName = EventName.FIRST_STEP
    at_s: float = field(default_factory=time.time)
    """Unix time of the injection."""

    mend: Callable[[], None] = lambda: None
    """Called once the fault was noticed: what the run needs before it can get over it."""


def clock_of(run: Run) -> list[tuple[int, float]]:
    """Steps and the Unix times at which the lead rank has done them."""
    path = Path(f"{run.path}.clock")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(int(step), float(at)) for step, at in (line.split() for line in lines if line.count(" ") == 1)]


def is_noticed(run: Run, fault: Fault) -> bool:
    """One of the events that show the fault is in its journal."""
    return any(event.event in fault.noticed and event.seconds() >= fault.at_s - 0.05 for event in run.events())


def is_over(run: Run, fault: Fault) -> bool:
    """The run has got over the fault, by its journal."""
    return any(event.seconds() >= fault.at_s for event in run.events(fault.over))


def facts_of(run: Run, faults: Sequence[Fault]) -> dict[str, Any]:
    """Times in seconds; moments are seconds since the beginning of what the figure shows."""
    report = report_of(run.folder, now_s=time.time())
    account, clock = report.account, clock_of(run)
    begin_s = max(account.begin_s, faults[0].at_s - 10) if faults else account.begin_s
    every = max(1, len(clock) // MAX_POINTS)
    kept = [(step, at) for number, (step, at) in enumerate(clock)
            if number % every == 0 or (number and step <= clock[number - 1][0])
            or (number + 1 < len(clock) and clock[number + 1][0] <= step)
            or (number + 1 < len(clock) and clock[number + 1][1] - at > 2)]  # fmt: skip
    told = report.as_json()
    return {
        "ranks": account.world_size,
        "wall_s": round(account.end_s - begin_s, 2),
        "intervals": [[round(max(each.begin_s, begin_s) - begin_s, 2), round(each.end_s - begin_s, 2),
                       str(each.category)] for each in account.intervals if each.end_s > begin_s],
        "steps": [[round(at - begin_s, 2), step] for step, at in kept if at >= begin_s],
        "faults": [_of(run, fault, begin_s) for fault in faults],
        "ends": [{key: end[key] for key in ("cause", "cost_s", "seconds")} for end in told["ends"]],
        "ettr": told["ettr"], "saves": account.saves, "step": account.step,
        "training_s": round(account.seconds[Category.TRAINING], 2),
        "stalled_s": round(account.seconds[Category.SAVES], 3),
        "redone_s": round(account.seconds[Category.REDONE], 2),
    }  # fmt: skip


def _of(run: Run, fault: Fault, begin_s: float) -> dict[str, Any]:
    after = [event for event in run.events() if event.seconds() >= fault.at_s - 0.05]
    noticed = next((event for event in after if event.event in fault.noticed), None)
    over = next((event for event in after if event.event == fault.over), None)
    verdict = next((event for event in after if event.event == EventName.VERDICT), None)
    over_s, lost = None, 0
    if over is not None:
        over_s = over.seconds()
        if fault.over == EventName.FIRST_STEP:
            over_s = min(over_s, float(over.details.get("first_step_at") or over_s))
            before = [step for step, at in clock_of(run) if at <= over_s - 0.05]
            reached = verdict.details.get("last_step") if verdict is not None else before[-1] + 1 if before else 0
            lost = max(0, int(reached or 0) - int(over.details.get("resumed_from") or 0))
    return {
        "label": fault.label, "at": round(fault.at_s - begin_s, 2),
        "noticed_s": None if noticed is None else round(max(0.0, noticed.seconds() - fault.at_s), 2),
        "noticed_by": None if noticed is None else str(noticed.event),
        "over_s": None if over_s is None else round(over_s - fault.at_s, 2),
        "over_by": str(fault.over),
        "lost": lost,
        "cause": None if verdict is None else str(verdict.details.get("cause")),
    }  # fmt: skip


def shown(run: Run, *words: str) -> str:
    """The output of a command about the run, with the folder of runs as a user would have it."""
    text = run.slurmft(*words, str(run.path), check=False)
    text = re.sub(r"\S*/bin/slurmft ", "slurmft ", text.replace(str(run.path.parent), "runs"))
    text = text.replace(str(run.lab.home), "~").replace(f"{Path(__file__).resolve().parents[2]}/", "")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
