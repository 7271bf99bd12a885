"""What the exclusion list costs: reading 10,000 entries, deciding on them, and 1,000 processes that write at once.

    python bench/exclusions --output bench/results/exclusions.md     # half a minute; no Slurm, no root

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import slurmft
from slurmft.policy.suspicion import WEIGHTS, ManualEntry, Observation, Rules, standing
from slurmft.policy.verdict import Kind
from slurmft.scheduler.slurm import NodeRecord, compress
from slurmft.storage.exclusions import ExclusionList, Exclusions
from slurmft.supervisor.avoided_nodes import to_avoid

ENTRIES, NODES, WRITERS = 10_000, 2000, 1000
KINDS = [kind for kind, weight in WEIGHTS.items() if weight > 0]


def entries(count: int) -> list[Observation]:
    dice, now = random.Random(1), time.time()
    return [
        Observation(
            kind=Kind(kind := dice.choice(KINDS)), node=f"gpu-{dice.randrange(NODES):04}", weight=WEIGHTS[kind],
            at=now - 10 * 86_400 * dice.random(), id=f"{dice.getrandbits(64):016x}", source="supervisor",
            gpu=f"GPU-{dice.getrandbits(128):032x}" if dice.random() < 0.5 else "", run=f"run-{dice.randrange(200)}",
            job=str(dice.randrange(2000)), evidence=f"/shared/runs/run/verdicts/{dice.randrange(10**6)}.json",
        )
        for _ in range(count)
    ]  # fmt: skip


def timed_ms(work: Callable[[], object], rounds: int) -> list[float]:
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def row(what: str, values: Sequence[float], unit: str, limit: float | None = None) -> str:
    middle = statistics.median(values)
    text = f"{middle:.1f} ({min(values):.1f} - {max(values):.1f})" if len(values) > 1 else f"{middle:.1f}"
    asked = "" if limit is None else f"under {limit:g} {unit}"
    hit = "" if limit is None else "hit" if middle < limit else "**miss**"
    return f"| {what} | {text} {unit} | {asked} | {hit} |"


def reading(folder: Path, rounds: int) -> list[str]:
    path = folder / "read.json"
    made = entries(ENTRIES)
    shared = ExclusionList(path)
    shared.observe(made)
    shared.exclude(ManualEntry(node="gpu-0001", reason="fan", who="me", at=time.time()))  # merges
    found, now = shared.read(), time.time()
    assert len(found.observations) == ENTRIES
    names = sorted({each.node for each in made})
    known = [NodeRecord(node=name, partition="p", is_default=True, usable=True) for name in names]
    nodes = [f"gpu-{number:05}" for number in range(10_000)]
    whole = Exclusions(
        [Observation(kind=Kind.RERUN_PERSISTENT, node=node, weight=2.0, at=now, id=node) for node in nodes]
    )
    all_known = [NodeRecord(node=node, partition="p", is_default=True, usable=True) for node in nodes]

    def avoid(held: Exclusions, among: list[NodeRecord]) -> object:
        return to_avoid(held, partition=None, nodes_needed=64, max_excluded_fraction=0.5, known=among)

    size = path.stat().st_size / 1e6
    return [
        row(f"read a list of {ENTRIES:,} entries ({size:.1f} MB): whole, checksum verified",
            timed_ms(shared.read, rounds), "ms", 5),
        row("the same, and every entry as a value", timed_ms(lambda: shared.read().observations, rounds), "ms"),
        row(f"the standing of their {len(names):,} nodes",
            timed_ms(lambda: standing(found.observations, found.manual, now, Rules()), rounds // 2), "ms"),
        row("what a job of 64 nodes avoids of them", timed_ms(lambda: avoid(found, known), rounds // 2), "ms"),
        row("the same of 10,000 nodes, all of them proven faulty",
            timed_ms(lambda: avoid(whole, all_known), rounds // 2), "ms"),
        row("10,000 names as a hostlist", timed_ms(lambda: compress(nodes), rounds // 2), "ms"),
        row("add one observation to the list, on disk",
            timed_ms(lambda: ExclusionList(path).observe(entries_of_now(1)), 12), "ms"),
    ]  # fmt: skip


def entries_of_now(count: int) -> list[Observation]:
    return [each._replace(id=os.urandom(8).hex()) for each in entries(count)]


def writing(folder: Path) -> list[str]:
    path = folder / "write.json"
    ready, go = os.pipe()
    children = [pid for number in range(WRITERS) if (pid := write_one(path, number, ready, go))]
    os.close(ready)
    began = time.perf_counter()
    os.close(go)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    took = time.perf_counter() - began
    lost = WRITERS - len({each.id for each in ExclusionList(path).read().observations})
    return [
        row(f"{WRITERS:,} processes add an observation at once, 7 hosts", [took], "s"),
        f"| of those lost | {lost} | none | {'hit' if lost == failed == 0 else '**miss**'} |",
    ]


def write_one(path: Path, number: int, ready: int, go: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.close(go)
        os.read(ready, 1)  # until the parent closes the other end
        made = Observation(kind=Kind.CRASH, node=f"n{number}", weight=0.1, at=time.time(), id=str(number))
        ExclusionList(path, host=f"host{number % 7}").observe([made])
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/exclusions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, help="file for the table (default: standard output)")
    parser.add_argument("--folder", type=Path, help="filesystem to measure (default: the temporary folder's)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = [*writing(Path(folder)), *reading(Path(folder), args.rounds)]
    command = "python bench/exclusions" + (f" --output {args.output}" if args.output else "")
    lines = [
        "# The exclusion list", "", f"`{command}`, slurmft {slurmft.__version__}", "",
        f"One machine with {os.cpu_count()} cores, Linux, Python {platform.python_version()}. Medians (min - max).", "",
        "|  |  | asked |  |", "|---|---|---|---|", *rows, "",
        "A list that is read is checked as a whole and taken apart when somebody looks at its entries: making 10,000 "
        "values of text takes Python longer than the reading. A submission does all of it, and asks Slurm only when a "
        "node is excluded.",
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
