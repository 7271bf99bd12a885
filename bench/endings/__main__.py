"""How fast a run ends and comes back, and what slurmft costs: tables in Markdown, from a real Slurm cluster.

    python bench/endings                                    # all of it: about 12 minutes, as root
    python bench/endings --parts commands,steps --rounds 3  # a quick look at two parts

Builds a lab of its own and removes it, whatever happens. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import commands
import running
import stops
from table import Table

import slurmft
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

PARTS = ("ours", "neighbours", "commands", "idle", "steps")
IDLE_S = 40.0
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/endings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which of %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="stops of ours, and rounds of the commands")
    parser.add_argument("--neighbour-rounds", type=int, default=2, help="stops of the others; each takes 3 minutes")
    parser.add_argument("--steps-rounds", type=int, default=6, help="pairs of jobs that count steps per second")
    parser.add_argument("--output", type=Path, help="file for the tables (default: standard output)")
    args = parser.parse_args()
    args.parts = tuple(args.parts.split(","))
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return args


def measure(lab: Lab, args: argparse.Namespace) -> list[Table]:
    tables: list[Table] = []
    ours, neighbours = None, []
    if "commands" in args.parts:
        say("commands")
        tables.append(commands.table(commands.measure(lab, args.rounds)))
    if "idle" in args.parts:
        say(f"idle CPU, {IDLE_S:.0f} s")
        tables.append(running.idle_table(running.measure_idle(lab, IDLE_S), IDLE_S))
    if "steps" in args.parts:
        tables.append(running.steps_table(*running.measure_steps(lab, args.steps_rounds, say)))
    if "ours" in args.parts:
        ours = stops.measure_ours(lab, args.rounds, say)
    if "neighbours" in args.parts:
        say(f"the others: {args.neighbour_rounds} rounds of about 3 minutes")
        neighbours = stops.measure_neighbours(lab, args.neighbour_rounds, say)
    return [*(stops.tables(ours, neighbours) if ours or neighbours else []), *tables]


def report(tables: list[Table], slurm: str) -> str:
    head = [
        "# Endings and their cost",
        f"`{shlex.join(['python', 'bench/endings', *sys.argv[1:]])}`, slurmft {slurmft.__version__}",
        f"One machine with {os.cpu_count()} cores for all nodes, {platform.system()}, Python "
        f"{platform.python_version()}, Slurm {slurm}. Values are medians (min - max).",
    ]
    return "\n\n".join([*head, *(table.markdown() for table in tables)]) + "\n"


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # so that the lab is taken down


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, _end)
    folder = Path(f"/var/lib/slurmft-lab-bench-{os.getpid()}")
    try:
        lab = Lab.up(LabSettings(folder=folder))
        say("the lab is up")
        slurm = lab.run(["sinfo", "--version"]).stdout.split()[-1]
        text = report(measure(lab, args), slurm)
    finally:
        cluster.purge(folder)
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)
        say(f"written to {args.output}")


if __name__ == "__main__":
    main()
