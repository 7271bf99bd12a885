"""What one sweep costs on clusters of up to 10,000 nodes, from recorded output of Slurm's commands.

    python bench/sweep --output bench/results/sweep.md     # a minute; no Slurm, no root

Programs that print files stand in for sinfo and squeue and count how often they are asked. Nothing else should run on
the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import slurmft
from slurmft.health.checker import KEEP, brief_json, read_results
from slurmft.operations.sweep import SweepOrder, sweep
from slurmft.policy.node_health import Checkup, HealthRules, ProbeResult, Status, SweepPlan, Visits, sweep_plan
from slurmft.policy.suspicion import WEIGHTS, Observation, Rules
from slurmft.policy.verdict import Kind
from slurmft.scheduler.slurm import node_facts, parse_facts
from slurmft.storage.exclusions import ExclusionList
from slurmft.system.files import write_json

SIZES = (2500, 5000, 10_000)
LOOKS, CHECKS, SICK, OBSERVATIONS = KEEP, 20, 40, 1000
LIMIT_S = 2.0


def name(number: int) -> str:
    return f"gpu-{number:05}"


def sinfo_text(count: int) -> str:
    """Two partitions, as a real sinfo prints them: each node once for each."""
    dice = random.Random(1)
    states = ["allocated"] * 12 + ["idle"] * 4 + ["mixed"] * 3 + ["drained|bad cable"]
    chosen = [dice.choice(states) for _ in range(count)]
    return "".join(
        f"{name(number)}|{state if '|' in state else f'{state}|none'}\n"
        for number, state in enumerate(chosen)
        for _ in range(2)
    )


def looks(number: int, now: float) -> list[Checkup]:
    status = Status.CRITICAL if number < SICK else Status.OK
    return [
        Checkup(
            node=name(number), at=now - 300 * age, context="healthcheck",
            results=tuple(
                ProbeResult(name=f"check-{check}", status=status if check == number % CHECKS else Status.OK,
                            detail="free space 81 %", value=0.81, unit="%", took_s=0.01)
                for check in range(CHECKS)
            ),
        )
        for age in range(LOOKS)
    ]  # fmt: skip


def observations(count: int, now: float) -> list[Observation]:
    dice = random.Random(2)
    kinds = [kind for kind, weight in WEIGHTS.items() if weight > 0]
    return [
        Observation(kind=Kind(kind := dice.choice(kinds)), node=name(dice.randrange(count)), weight=WEIGHTS[kind],
                    at=now - 86_400 * dice.random(), id=str(number))
        for number in range(OBSERVATIONS)
    ]  # fmt: skip


def timed_s(work: Callable[[], object], rounds: int) -> list[float]:
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return took


def told(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f}) s"


def stubs(folder: Path, count: int) -> Path:
    (folder / "sinfo.txt").write_text(sinfo_text(count))
    for command, answer in (("sinfo", f"cat {folder}/sinfo.txt"), ("squeue", "exit 0")):
        path = folder / command
        path.write_text(f"#!/bin/sh\necho {command} >> {folder}/asked\n{answer}\n")
        path.chmod(0o755)
    return folder / "asked"


def measure(count: int, rounds: int) -> tuple[list[float], list[float], list[float], int]:
    """Seconds of the evaluation, of reading all results, and of a whole dry sweep; and how often Slurm was asked."""
    now = time.time()
    with tempfile.TemporaryDirectory() as name_:
        folder = Path(name_)
        asked = stubs(folder, count)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        shared = ExclusionList(folder / "list.json")
        shared.observe(observations(count, now))
        results = folder / "results"
        results.mkdir()
        checkups = {name(number): looks(number, now) for number in range(count)}
        for node, of_node in checkups.items():
            value = {"node": node, "checkups": [brief_json(each) for each in of_node]}
            write_json(results / f"{node}.json", value, durable=False)
        held = shared.read()

        def evaluate() -> SweepPlan:
            return sweep_plan(
                node_facts(), checkups, observations=held.observations, manual=held.manual, now=now,
                health=HealthRules(), rules=Rules(), visits=Visits(at_most=10),
            )  # fmt: skip

        assert len(evaluate().excluded) == HealthRules().max_nodes_per_hour
        assert len(parse_facts(sinfo_text(count))) == count
        evaluation, reading = timed_s(evaluate, rounds), timed_s(lambda: read_results(results), max(1, rounds // 3))
        asked.unlink()
        order = SweepOrder(exclusions=shared, rules=Rules(), results=results, who="bench", dry_run=True,
                           visits=Visits(at_most=10))  # fmt: skip
        whole = timed_s(lambda: sweep(order), 1)
        os.environ["PATH"] = os.environ["PATH"].partition(":")[2]
        return evaluation, reading, whole, len(asked.read_text().split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows, queries = [], 0
    for count in SIZES:
        evaluation, reading, whole, queries = measure(count, given.rounds)
        asked = f"under {LIMIT_S:g} s" if count == max(SIZES) else ""
        hit = ("hit" if statistics.median(evaluation) < LIMIT_S else "**miss**") if asked else ""
        rows.append(f"| {count:,} | {told(evaluation)} | {asked} | {hit} | {told(reading)} | {told(whole)} |")
    text = "\n".join(
        [
            "# One sweep", "",
            f"`python bench/sweep --output bench/results/sweep.md`, slurmft {slurmft.__version__}", "",
            f"One machine with {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}. "
            f"Medians (min - max) of {given.rounds}. Each node has {LOOKS} looks of {CHECKS} checks, {SICK} nodes are "
            f"sick, the list has {OBSERVATIONS:,} observations.", "",
            "| nodes | sinfo, its text, all verdicts, the plan | asked |  | reading one file of results for each node "
            "| a whole sweep, dry |", "|---|---|---|---|---|---|",
            *rows, "",
            f"A sweep asked Slurm {queries} times about the whole cluster; with runs to look after, once more: "
            f"{'hit' if queries <= 2 else '**miss**'} (at most 3). Each node that it changes is looked at once more, "
            "right before, and those are at most max_nodes_per_hour.", "",
        ]
    )  # fmt: skip
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
