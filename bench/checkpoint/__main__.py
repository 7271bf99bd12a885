"""What a checkpoint costs the training: ours, torch's, NVRx's, and what the machine can do at best, in one run.

    python bench/checkpoint --output bench/results/checkpoint.md     # 11 minutes; nothing else should run meanwhile

nvidia-resiliency-ext takes part where ``--nvrx`` names a folder that holds it:
``pip install --no-deps --target FOLDER nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml``.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import exercise
import psutil
import table
import torch
from methods import AS_IT_COMES, METHODS, SLURMFT, WAITING
from plot import picture
from state import SHAPES
from trials import Place, Result, floors, many, measure

import slurmft

SIZES = ("1 GB", "4 GB")
SHORT = ("floor", "slurmft", AS_IT_COMES, "DCP async_save, thread, shared-memory")
FULL, PART = "1 GB", ("floor", "slurmft", "torch.save", AS_IT_COMES, "DCP async_save, thread, shared-memory")
ROOM = 4.5
TIMED_LOADS = ("slurmft", "torch.save", "DCP save")
EARLIER = (10, 100, 1000)

HOW = """\
Each method has a process of its own, a fresh folder and two threads; between its saves a small model trains (forward,
backward and Adam, {step_ms:.0f} ms a step), while it writes and some steps longer. Right after each call all values are
changed in place, as a step would; the last save is loaded by another process and compared with digests taken before the
call: "torn values".

- "Stall" is the call. "Durable after" is from the call until the files are on the disk (fsync; ours: until the marker
  is renamed into place). "Training lost" is the stall and what the steps during the write took longer.
- Memory is anonymous and shared memory of all processes of a method, each page once, at most, beyond what there was
  before the first save. Page cache is not counted.
- "floor: copy, ..." copies into shared memory, and a process that is as polite as our writer writes that with O_DIRECT:
  no digests, no format. "the same, and hashes it": with a second thread for the digests, as ours. What training loses
  beside them, it loses to this machine.
- All write to the same disk, with the page cache as it is, and remove the save before the last one.
- Load: by a fresh process, whose first load of each kind is not counted: it also pays for memory that a virtual machine
  gets for the first time. "cold": the page cache forgets the files first (the disk of a virtual machine may not).
  "restart": the optimizer has no state yet, so a part of the memory is new. "in place": it has.
- Floors: the same bytes in the same tensors, measured before and after the methods (``--short``: before). Those
  of loads: from the same file into the same tensors, before each load. "map anew, hash, then copy": what a load from
  memory cannot do without, as no byte is used before all are verified.

Seconds; median [least, most]."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(args: argparse.Namespace, size: str) -> list[str]:
    names = [name for name in METHODS if args.nvrx or not name.startswith("nvidia")]
    if size != FULL:
        names = [name for name in names if name.startswith(PART) and name != WAITING]
    if args.short:
        names = [name for name in names if name.startswith(SHORT) and name != WAITING]
    return [name for name in names if not args.methods or any(word in name for word in args.methods.split(","))]


def one_size(size: str, args: argparse.Namespace, place: Place) -> tuple[list[Result], dict[str, list[float]]]:
    is_full = size == FULL
    rounds = 2 if is_full else 1
    best = floors(size, place, rounds)
    say(f"{size}: floors")
    results = []
    for name in chosen(args, size):
        timed = name.startswith(TIMED_LOADS)
        try:
            found = measure(
                name, size, place, saves=args.saves, limit_s=args.limit, rounds=rounds, timed_loads=timed
            )  # fmt: skip
        except RuntimeError as error:
            say(f"{size}: {name}: left out: {error}")
            continue
        results.append(found)
        stalls, durables = table.spread(table.later(found, "stall"), 3), table.spread(table.later(found, "durable"))
        say(f"{size}: {name}: stall {stalls}, durable {durables}, {found.wrong} of {found.compared} torn")
    if not args.short:
        for name, seconds in floors(size, place, rounds).items():
            best[name] += seconds
    return results, best


def report(
    sizes: dict[str, tuple[list[Result], dict[str, list[float]]]], counted: list[str], took_s: float, place: Place
) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, slurmft {slurmft.__version__}"
    normal = next((each.normal for results, _ in sizes.values() for each in results), [0.0])
    lines = [
        "# Checkpoints", "", HOW.format(step_ms=1000 * table.middle(normal)), "",
        f"`python bench/checkpoint` on {os.cpu_count()} cores, {platform.system()}, {versions}; "
        f"{datetime.now(UTC):%Y-%m-%d}, {took_s / 60:.0f} minutes. Other processes kept "
        f"{table.spread(place.elsewhere)} processors busy before each trial.", "",
    ]  # fmt: skip
    for size, (results, best) in sizes.items():
        size_bytes = results[0].bytes if results else 0
        lines += [f"## A state of {size} ({size_bytes / 1e9:.2f} GB)", ""]
        lines += table.target_rows(results, best) + table.save_rows(results)
        lines += table.load_rows(results) + table.floor_rows(best, size_bytes)
    return "\n".join([*lines, *counted])


def exercise_report(args: argparse.Namespace) -> str:
    where = "two nodes of a Slurm cluster that is built for it on" if args.lab else "two ranks without Slurm on"
    about = (
        f"A small model with DDP and Adam on {where} one machine of {os.cpu_count()} cores, {exercise.EPOCHS} epochs "
        f"of {exercise.STEPS_PER_EPOCH} steps. Once without a fault (median of {args.rounds}), and once with `kill -9` "
        f"of rank 1 after step {exercise.KILL_AFTER}."
    )
    command = f"`python bench/checkpoint --exercise{' --lab' * args.lab}`, torch {torch.__version__}."
    rows = exercise.measure(args.rounds, say, on_lab=args.lab)
    return "\n".join(["# Saving every 1, 5 and 10 epochs", "", about, "", command, "", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/checkpoint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--saves", type=int, default=5, help="after the first one")
    parser.add_argument(
        "--limit", type=float, default=20, help="seconds for the saves of a method; at least 3 are done"
    )
    parser.add_argument("--methods", help="words of names, with commas between them")
    parser.add_argument(
        "--short", action="store_true", help="only slurmft, DCP's two best, and the floors, which are measured once"
    )
    parser.add_argument("--nvrx", type=Path, help="where nvidia-resiliency-ext is installed")
    parser.add_argument("--disk", type=Path, default=Path("build"), help="the folder to write to")
    parser.add_argument("--no-many", action="store_true", help="leave out the cost beside many earlier checkpoints")
    parser.add_argument(
        "--exercise", action="store_true", help="only this: save every 1, 5 and 10 epochs, with a fault"
    )
    parser.add_argument("--lab", action="store_true", help="the exercise on a real Slurm cluster (root), not just here")
    parser.add_argument("--rounds", type=int, default=2, help="of the exercise")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is cleaned up
    if args.exercise:
        text = exercise_report(args)
        args.output.write_text(text) if args.output else print(text)
        return
    args.disk.mkdir(exist_ok=True)
    place = Place(disk=args.disk.resolve(), memory=Path("/dev/shm"), packages=args.nvrx and args.nvrx.resolve())
    began, sizes = time.monotonic(), {}
    for size in args.sizes.split(","):
        needed = ROOM * 1e9 * float(size.split()[0]) if "GB" in size else 0
        if psutil.virtual_memory().available < needed:
            say(f"{size}: left out, it needs {needed / 1e9:.0f} GB of free memory")
            continue
        sizes[size] = one_size(size, args, place)
    counted = []
    if not args.no_many:
        found = {SLURMFT: many(SLURMFT, place, earlier=list(EARLIER), rounds=15)}
        counted = ["## Beside many earlier checkpoints, a state of 1 MB", "", *table.many_rows(found)]
    text = report(sizes, counted, time.monotonic() - began, place)
    if args.output:
        args.output.with_suffix(".svg").write_text(picture(sizes))
        args.output.write_text(f"{text}\n![stall and durability]({args.output.stem}.svg)\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
