"""Batch inference: what the pool costs, what a fault costs, and how it grows. Tables in Markdown.

    python bench/inference --output bench/results/inference.md     # nothing else should run meanwhile

Ray Data takes part where ``--ray`` names a Python that has ``ray[data]`` and ``aiohttp``.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path

import coordination
import faults
import ledger_size
import peer
import throughput
from running import say

import slurmft


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/inference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="parts to measure, with commas between them; all when empty")
    parser.add_argument("--finished", type=int, default=10_000_000, help="requests in the ledger")
    parser.add_argument("--ray", type=Path, help="a Python that has ray[data] and aiohttp")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    parts: dict[str, Callable[[], list[str]]] = {
        "throughput": lambda: throughput.tables(args.rounds),
        "faults": lambda: faults.tables(args.rounds),
        "coordinator": lambda: coordination.tables(args.rounds),
        "ledger": lambda: ledger_size.tables(args.rounds, args.finished),
    }
    if args.ray:
        parts["peer"] = lambda: peer.tables(args.rounds, args.ray)
    chosen = args.only.split(",") if args.only else list(parts)
    versions = f"Python {platform.python_version()}, slurmft {slurmft.__version__}"
    load = os.getloadavg()[0]
    lines = [
        "# Batch inference", "",
        f"`python bench/inference` on {os.cpu_count()} cores, {platform.system()}, {versions}. "
        f"Medians (min - max) of {args.rounds} rounds. Processes that wanted to run when it began (load average): "
        f"{load:.1f}. A busy machine costs the throughput and the times of the faults most.", "",
    ]  # fmt: skip
    if not args.output:
        print("\n".join(lines))
    for name in chosen:
        say(f"- {name}")
        found = parts[name]()
        lines += found
        if args.output:
            args.output.write_text("\n".join(lines))
        else:
            print("\n".join(found))


if __name__ == "__main__":
    main()
