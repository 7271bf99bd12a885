"""Files of a whole cluster that one process reads: results of node checks, exclusion list, journal. Seconds of each."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from slurmft.health.checker import KEEP, brief_json, read_results
from slurmft.policy.node_health import Checkup, ProbeResult, Status
from slurmft.policy.suspicion import WEIGHTS, Observation, Rules, standing
from slurmft.policy.verdict import Kind
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.journal import EventName, Journal
from slurmft.system.files import write_json

NODES, OBSERVATIONS, JOURNALED, STARTS = 10_000, 10_000, 100_000, 200
CHECKS = 20


def timed_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def checks(folder: Path) -> dict[str, float]:
    """One file of results for each node, as nodes write them."""
    now = time.time()
    for number in range(NODES):
        node = f"gpu-{number:05}"
        looks = [
            Checkup(node=node, at=now - 300 * age, context="healthcheck",
                    results=tuple(ProbeResult(name=f"check-{check}", status=Status.OK, detail="", took_s=0.01)
                                  for check in range(CHECKS)))
            for age in range(KEEP)
        ]  # fmt: skip
        write_json(folder / f"{node}.json", {"node": node, "checkups": list(map(brief_json, looks))}, durable=False)
    return {f"results of node checks: {NODES:,} files of {KEEP} looks": timed_s(lambda: read_results(folder))}


def exclusions(folder: Path) -> dict[str, float]:
    """A list on which every node has an observation; which of them a job avoids."""
    dice, now = random.Random(1), time.time()
    kinds = [kind for kind, weight in WEIGHTS.items() if weight > 0]
    shared = ExclusionList(folder / "list.json")
    shared.observe([
        Observation(kind=Kind(kind := dice.choice(kinds)), node=f"gpu-{number % NODES:05}", weight=WEIGHTS[kind],
                    at=now - 86_400 * dice.random(), id=f"{number:016x}")
        for number in range(OBSERVATIONS)
    ])  # fmt: skip

    def read() -> None:
        held = ExclusionList(folder / "list.json").read()
        found = standing(held.observations, held.manual, now, Rules())
        assert len(found) == NODES

    return {f"exclusion list: {OBSERVATIONS:,} observations of {NODES:,} nodes, read and judged": timed_s(read)}


def journal(folder: Path) -> dict[str, float]:
    """A journal of many starts, most of whose lines a start passes over; twice, as restarts read it."""
    log, per_start = Journal(folder, attempt="1.0.0"), JOURNALED // STARTS
    lines = [
        Journal.line_of(log.compose(event, facts))
        for event, facts in (
            (EventName.VERDICT, {"cause": "signal crash", "reason": "rank 3 was killed", "last_step": 7}),
            (EventName.CHECKPOINT_VERIFIED, {"step": 100}),
        )
    ]
    log.path.write_text("\n".join(STARTS * [lines[0], *([lines[1]] * (per_start - 1))]) + "\n")
    size = log.path.stat().st_size / 2**20
    first, again = timed_s(Journal(folder).read_past), timed_s(Journal(folder).read_past)
    what = f"journal of {JOURNALED:,} lines ({size:.0f} MiB) at a restart"
    return {f"{what}: the first one": first, f"{what}: each later one": again}


def measure(folder: Path) -> dict[str, float]:
    found = dict[str, float]()
    for work in (checks, exclusions, journal):
        (own := folder / work.__name__).mkdir()
        found |= work(own)
    os.sync()
    return found
