"""Checkpoints of 16,384 ranks: what one commit and one rank's load cost, with the real code on real files.

    python bench/many_ranks --output bench/results/many_ranks.md     # four minutes, 2 GB below --folder

The images are small, the numbers of files, indexes and pieces are not: this measures what grows with the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from folders import DENSE, LAYERS, write_dense, write_spread
from measures import IDENTITY

import slurmft

RANKS, ON_NODE = 16_384, 8
COMMIT_S, LOAD_S, LOAD_MIB = 2.0, 5.0, 200.0


def measure(*arguments: object) -> dict[str, Any]:
    script = Path(__file__).with_name("measures.py")
    done = subprocess.run([sys.executable, str(script), *map(str, arguments)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def verdict(value: float, limit: float) -> str:
    return "hit" if value <= limit else "**miss**"


def rows_of(kind: str, directory: Path, ranks: int) -> list[str]:
    """Write the shards of all ranks, commit them, and load some ranks' parts."""
    folder = directory / kind / IDENTITY.folder_name
    folder.mkdir(parents=True)
    middle = ranks // 2 + 3
    began = time.monotonic()
    if kind == "dense":
        write_dense(folder, IDENTITY, ranks)
    else:
        write_spread(folder, IDENTITY, ranks, with_image={0, middle, middle // 2 * 2, middle // 2 * 2 + 1})
    print(f"{kind}: {ranks} shards written in {time.monotonic() - began:.0f} s", file=sys.stderr)
    index_bytes = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".json"))
    found = measure("commit", folder, ranks)
    named = "with .metadata" if found["metadata"] else "without .metadata"
    what = f"{DENSE} tensors that all ranks have" if kind == "dense" else f"{LAYERS} weights and their moments, spread"
    state = f"{what} ({index_bytes / 2**20:.0f} MiB of indexes)"
    rows = [f"| {state} | commit, {named} | {found['seconds']:.2f} s | {found['mib']:.0f} MiB | {COMMIT_S:g} s |"
            f" {verdict(found['seconds'], COMMIT_S)} |"]  # fmt: skip
    loads = [("rank 0", 0, ranks), (f"rank {middle}", middle, ranks)]
    loads += [(f"rank {middle // 2} of {ranks // 2}", middle // 2, ranks // 2)] if kind == "spread" else []
    for text, rank, world in loads:
        found = measure("load", folder, kind, rank, world)
        is_hit = found["seconds"] <= LOAD_S and found["mib"] <= LOAD_MIB
        what, asked = f"load of {text}: {found['indexes']} indexes read", f"{LOAD_S:g} s, {LOAD_MIB:g} MiB"
        result = "hit" if is_hit else "**miss**"
        rows.append(f"| | {what} | {found['seconds']:.2f} s | {found['mib']:.0f} MiB | {asked} | {result} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/many_ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--folder", type=Path, help="where the files are written; a temporary one otherwise")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        rows = [*rows_of("dense", Path(name), args.ranks), *rows_of("spread", Path(name), args.ranks)]
    found = measure("decide", args.ranks, ON_NODE)
    rows.append(f"| | which state of all nodes' memories to load | {found['seconds']:.2f} s | {found['mib']:.0f} MiB |"
                f" {LOAD_S:g} s, {LOAD_MIB:g} MiB | {verdict(found['seconds'], LOAD_S)} |")  # fmt: skip
    versions = f"{platform.system()}, Python {platform.python_version()}, slurmft {slurmft.__version__}"
    text = "\n".join([
        f"# Checkpoints of {args.ranks:,} ranks", "",
        f"`python bench/many_ranks` on {os.cpu_count()} cores, {versions}, files on the local disk. Processes that"
        f" wanted to run when it ended: {os.getloadavg()[0]:.1f}. One process each; the memory is what it grew by.", "",
        "| state | work | time | memory | asked | |", "|---|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
