"""Storms of seeded random faults on the lab, of training, inference and serving at once; tables by kind of fault.

    python bench/random_faults --seeds 1000-1100          # root; goes on where it ended, Ctrl-C at any moment
    python bench/random_faults --only-tables              # of the results that there are
    python bench/random_faults --storms behaviours --faults 300    # of engines and clients as they behave; by name only

Each run (one seed, minutes) appends a line of JSON to the results; seeds that are there already are left out. What a
run that failed has left lies in build/soak-faults.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
RUNS_IN_A_LAB = 4
"""Seeds that share one lab and one undisturbed run."""


@dataclass(frozen=True)
class Soak:
    """One kind of storm, its test and its table."""

    name: str
    test: str
    output: str


SOAKS = (
    Soak("training", "test_random_faults.py", "random_faults.md"),
    Soak("inference", "test_random_inference_faults.py", "random_inference_faults.md"),
    Soak("serving", "test_random_serving_faults.py::test_random_serving_faults", "random_serving_faults.md"),
    Soak("behaviours", "test_random_serving_faults.py::test_random_behaviours", "random_behaviours.md"),
)


def seeds_of(text: str) -> list[int]:
    """``7,9-11`` as numbers."""
    parts = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in parts for seed in range(int(first), int(last or first) + 1)]


def lines_of(results: Path, name: str) -> list[dict[str, Any]]:
    """The runs of one kind of storm so far."""
    if not results.exists():
        return []
    lines = [json.loads(line) for line in results.read_text().splitlines() if line]
    return [line for line in lines if line["storm"] == name]


def run(soak: Soak, seeds: Iterable[int], results: Path) -> None:
    """A few seeds in one lab; what happens is printed as it happens."""
    chosen = ",".join(map(str, seeds))
    environment = {
        **os.environ, "SLURMFT_FAULT_SEEDS": chosen, "SLURMFT_FAULTS_OUTPUT": str(results),
        "SLURMFT_FAULTS_KEEP": str(ROOT / "build" / "soak-faults"),
    }  # fmt: skip
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "soak", "-s", "-q", "--tb=line",
            str(ROOT / "tests" / "slurm" / soak.test)]  # fmt: skip
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            if soak.name in line or line.startswith(("E ", "ERROR", "FAILED")):
                print(line.rstrip().removeprefix("."), flush=True)


def soak_until(soak: Soak, seeds: Sequence[int], faults: int, results: Path, stopping: Event) -> None:
    """All seeds that are missing, until there are so many faults; a seed that leaves no result is tried once."""
    tried: set[int] = set()
    while not stopping.is_set():
        lines = lines_of(results, soak.name)
        failed = [line["seed"] for line in lines if line["failures"]]
        reached = sum(line["faults"] for line in lines)
        print(
            f"== {soak.name}: {reached} of {faults} faults in {len(lines)} runs; failed: {failed or 'none'}", flush=True
        )
        there = {line["seed"] for line in lines} | tried
        missing = [seed for seed in seeds if seed not in there][:RUNS_IN_A_LAB]
        if not missing or reached >= faults:
            return
        tried |= set(missing)
        run(soak, missing, results)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/random_faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1000-1099"))
    parser.add_argument("--faults", type=int, default=1000, help="of each kind of storm, after which it ends")
    parser.add_argument("--storms", default="training,inference,serving", help="and behaviours")
    parser.add_argument("--results", type=Path, default=RESULTS / "random_faults.jsonl")
    parser.add_argument("--only-tables", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the tables")
    args = parser.parse_args()
    results = args.results.absolute()
    results.parent.mkdir(parents=True, exist_ok=True)
    soaks = [soak for soak in SOAKS if soak.name in args.storms.split(",")]
    if not args.only_tables:
        stopping = Event()
        with ThreadPoolExecutor(len(soaks)) as pool:
            try:
                list(pool.map(lambda soak: soak_until(soak, args.seeds, args.faults, results, stopping), soaks))
            except KeyboardInterrupt:  # the tests have it too, and take their labs down
                stopping.set()
    for soak in soaks:
        if lines := lines_of(results, soak.name):
            (args.output / soak.output).write_text(tables.page(soak.name, lines))


if __name__ == "__main__":
    main()
