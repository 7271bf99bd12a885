"""From the signal to the first new training step: ours with its stages, then the neighbours, all of them at once."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contenders import NEIGHBOURS, NODES, RANKS, SAVE_EVERY, CannotRun, Contender, empty_queue, slurmft, started
from table import Row, Table

from slurmft.lab.cluster import Lab
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder

TRAINING_S = 2.0
"""How long a contender trains before its next stop."""

APART_S = 15.0
"""Between the signals of two neighbours, so that they do not start at the same moment on the same cores."""

AGAIN_WITHIN_S = 200.0
OURS_AT_MOST_S, TIMES_FASTER = 10.0, 10.0

LIGHTNINGS_RANKS = (
    "Lightning has one rank only. With more, its handler waits in a barrier for ranks that are inside an all-reduce, "
    "where no handler runs: on 2 nodes x 2 ranks 3 of 9 stops never ended."
)

STAGES = {
    "stop requested": "",
    "stop agreed": "agree on a step",
    "verdict": "finish the step, save, end all processes",
    "requeued": "requeue, set the begin time",
    "attempt started": "Slurm: begin time, placement, launch, python",
    "agents ready": "srun, agents, control channel",
    "first step": "import torch, join, load, first step",
}
"""Event of the journal -> what happened between the one above and it."""


@dataclass
class Ours:
    """What was measured of slurmft, one value per stop."""

    total_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)


def measure_ours(lab: Lab, rounds: int, say: Callable[[str], None]) -> Ours:
    contender = started(slurmft, lab)
    ours = Ours()
    for number in range(1, rounds + 1):
        time.sleep(TRAINING_S)
        at = contender.stop()
        again = contender.wait_for_start(number + 1, time.monotonic() + AGAIN_WITHIN_S)
        if again is None:
            raise SystemExit(f"slurmft did not come back within {AGAIN_WITHIN_S:.0f} s of its stop {number}")
        ours.total_s.append(again - at)
        say(f"slurmft, stop {number} of {rounds}: {again - at:.1f} s")
    run = RunFolder(lab.home / "slurmft.run")
    _wait_for_events(run, "first step", rounds + 1)
    empty_queue(lab)
    ours.stages = stages_of(run.journal().read())
    ours.save_s = saves_of(run)[:rounds]  # ending it makes one more
    return ours


def _wait_for_events(run: RunFolder, name: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while sum(event.event == name for event in run.journal().read()) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"the journal has no {name!r} number {count}")
        time.sleep(0.1)


def stages_of(events: Sequence[Event]) -> dict[str, list[float]]:
    """Seconds of each stage, one value per stop, from the journal."""
    stages: dict[str, list[float]] = {label: [] for label in STAGES.values() if label}
    at: dict[str, float] = {}
    for event in events:
        if event.event == "stop requested":
            at = {event.event: event.details["signal_at"]}
        elif at and event.event in STAGES:
            at.setdefault(event.event, event.seconds())
            if event.event == "first step":
                at[event.event] = at["stop requested"] + event.details["seconds_since_stop_request"]
                for before, after in itertools.pairwise(name for name in STAGES if name in at):
                    stages[STAGES[after]].append(at[after] - at[before])
                at = {}
    return {label: values for label, values in stages.items() if values}


def saves_of(run: RunFolder) -> list[float]:
    """Seconds that rank 0 took for each save, oldest first."""
    attempts = dict.fromkeys(event.attempt for event in run.journal().read() if event.event == "first step")
    logs = [(run.attempts / attempt / "rank-0.log").read_text() for attempt in attempts]
    return [float(seconds) for log in logs for seconds in re.findall(r"saved step \d+ in ([\d.]+) s", log)]


@dataclass
class Result:
    """What was measured of one of the others."""

    name: str
    seconds: list[float] = field(default_factory=list)
    trouble: str = ""


def measure_neighbours(lab: Lab, rounds: int, say: Callable[[str], None]) -> list[Result]:
    results: list[Result] = []
    running: dict[str, tuple[Contender, Result]] = {}
    for make in NEIGHBOURS:
        try:
            contender = started(make, lab)
        except CannotRun as error:
            results.append(Result(make.__name__, trouble=f"not measured: {error}"))
            say(f"{make.__name__}: {results[-1].trouble}")
        else:
            results.append(Result(contender.name))
            running[contender.name] = contender, results[-1]
    for number in range(1, rounds + 1):
        for name, seconds in _one_round([contender for contender, _ in running.values()], number).items():
            if seconds is None:
                running.pop(name)[1].trouble = f"not back {AGAIN_WITHIN_S:.0f} s after signal {number}"
            else:
                running[name][1].seconds.append(seconds)
            say(f"{name}, stop {number} of {rounds}: {'never came back' if seconds is None else f'{seconds:.1f} s'}")
    empty_queue(lab)
    return results


def _one_round(running: Sequence[Contender], number: int) -> dict[str, float | None]:
    signalled: dict[str, float] = {}
    time.sleep(TRAINING_S)
    for contender in reversed(running):  # the slowest starter first
        signalled[contender.name] = contender.stop()
        time.sleep(APART_S)
    deadline = time.monotonic() + AGAIN_WITHIN_S
    again = {contender.name: contender.wait_for_start(number + 1, deadline) for contender in running}
    return {name: None if at is None else at - signalled[name] for name, at in again.items()}


def tables(ours: Ours | None, neighbours: Sequence[Result]) -> list[Table]:
    comparison = Table("From the signal to the first new training step", "seconds")
    detail = Table("Its stages, from the journal", "seconds")
    if ours is not None:
        without = [total - save for total, save in zip(ours.total_s, ours.save_s, strict=True)]
        hit = max(without) <= OURS_AT_MOST_S
        comparison.rows += [
            Row(what="**slurmft**", values=ours.total_s),
            Row(what="slurmft, without its save", values=without, target=f"at most {OURS_AT_MOST_S:.0f}", hit=hit),
        ]
        detail.rows += [Row(what=label, values=values) for label, values in ours.stages.items()]
        detail.rows.append(Row(what="(of which the save)", values=ours.save_s))
    comparison.remarks.append(
        f"{NODES} nodes x {RANKS} ranks, the same tiny network; nodes free. The clock starts before `scancel` "
        "sends the signal that the contender waits for, and stops when rank 0 has done the first step of its next "
        "start."
    )
    if neighbours:
        comparison.remarks.append(
            f"The others run at the same time, their signals {APART_S:.0f} s apart; they mostly wait for Slurm. The "
            f"plain script saves every {SAVE_EVERY} steps and repeats those since; the rest save on the signal."
        )
        comparison.remarks.append(LIGHTNINGS_RANKS)
    comparison.rows += [_neighbour_row(result, ours) for result in neighbours]
    return [comparison, *([detail] if ours is not None else [])]


def _neighbour_row(result: Result, ours: Ours | None) -> Row:
    what = f"{result.name} ({result.trouble})" if result.trouble and result.seconds else result.name
    if not result.seconds:
        return Row(what=what, note=result.trouble)
    if ours is None:
        return Row(what=what, values=result.seconds, digits=1)
    ratio = statistics.median(result.seconds) / statistics.median(ours.total_s)
    target = f"at least {TIMES_FASTER:.0f} times ours: {ratio:.0f}"
    return Row(what=what, values=result.seconds, digits=1, target=target, hit=ratio >= TIMES_FASTER)
